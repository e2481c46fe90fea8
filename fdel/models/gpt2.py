"""GPT-2 (Radford et al., 2019): LayerNorm, biases, learned positions, fused and transposed projections, tied head."""

import jax.numpy as jnp

from fdel import ops
from fdel.models import builders, config
from fdel.params.spec import Param, normal, parts, zeros

MODEL_TYPE, ARCHITECTURE = "gpt2", "GPT2LMHeadModel"


@config.config
class Config(config.MultiHead):
    """Sizes and constants; `hf(...)` names each one's key in config.json."""

    ONLY = dict.fromkeys(("reorder_and_upcast_attn", "n_ctx"), config.ANY)
    vocab: int = config.hf("vocab_size", 50257)
    embed: int = config.hf("n_embd", 768)
    ffn: int = config.hf("n_inner", lambda d: 4 * d.get("n_embd", 768))
    layers: int = config.hf("n_layer", 12)
    heads: int = config.hf("n_head", 12)
    max_positions: int = config.hf("n_positions", 1024)
    norm_eps: float = config.hf("layer_norm_epsilon", 1e-5)
    act: str = config.act("activation_function", "gelu_new")
    scaled: bool = config.hf("scale_attn_weights", True)
    tied: bool = config.hf("tie_word_embeddings", True)


def spec(cfg: Config) -> dict:
    """Declare every array. Checkpoints store matrices transposed, [in, out], with q, k and v side by side."""
    name, d, n, h = "transformer.h.{layers}.", cfg.embed, cfg.heads, cfg.head_dim
    layer = {
        "attn_norm": builders.norm(name + "ln_1.weight", d),
        "attn_norm_bias": builders.bias(name + "ln_1.bias", d),
        "o": Param("embed heads head_dim", (d, n, h), normal(0.02), name + "attn.c_proj.weight", "(heads head_dim) embed"),
        "o_bias": builders.bias(name + "attn.c_proj.bias", d),
        "mlp_norm": builders.norm(name + "ln_2.weight", d),
        "mlp_norm_bias": builders.bias(name + "ln_2.bias", d),
        "up": Param("ffn embed", (cfg.ffn, d), normal(0.02), name + "mlp.c_fc.weight", "embed ffn"),
        "up_bias": builders.bias(name + "mlp.c_fc.bias", cfg.ffn, "ffn"),
        "down": Param("embed ffn", (d, cfg.ffn), normal(0.02), name + "mlp.c_proj.weight", "ffn embed"),
        "down_bias": builders.bias(name + "mlp.c_proj.bias", d),
    }  # fmt: skip
    fused, weight = name + "attn.c_attn.", normal(0.02)
    for part, cut in parts(q=d, k=d, v=d).items():
        axes = "heads head_dim embed", (n, h, d)
        layer[part] = Param(*axes, weight, fused + "weight", "embed [heads head_dim]", cut)
        layer[part + "_bias"] = Param("heads head_dim", (n, h), zeros, fused + "bias", "[heads head_dim]", cut)
    positions = Param("positions embed", (cfg.max_positions, d), normal(0.01), "transformer.wpe.weight")
    tree = builders.decoder(cfg, layer, "transformer.wte", "transformer.ln_f", norm_bias=True)
    return tree | {"positions": positions}


def rename(name: str, cfg: Config) -> str | None:
    """Map file names to spec names: the first GPT-2 files lack the prefix and carry the causal mask."""
    name = name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"
    return builders.without_mask(name, cfg)


@builders.hidden("attention")
def hidden(params, tokens, cfg: Config, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final normalised hidden states, [... T embed]; called as `protocol.Family` says."""
    mask = ops.Mask(cfg.head_dim**-0.5 if cfg.scaled else 1.0)
    norm = lambda x, p, part: ops.layer_norm(x, p[part], p[part + "_bias"], cfg.norm_eps)

    def block(x, carry, p, layer):
        h = norm(x, p, "attn_norm")
        q, k, v = (ops.linear("...d,nhd->...nh", h, p[i], p[i + "_bias"]) for i in "qkv")
        a, carry = ops.attend(batch, carry, layer, q, k, v, mask=mask)
        x = x + ops.linear("...nh,dnh->...d", a, p["o"], p["o_bias"])
        return x + ops.mlp(norm(x, p, "mlp_norm"), p, ops.ACTIVATIONS[cfg.act]), carry

    x = ops.embed(params["embed"], tokens) + ops.embed(params["positions"], jnp.maximum(batch.positions, 0))
    x, carry = ops.layers(block, x, carry, params["layers"], remat=remat)
    return norm(x, params, "norm"), carry


state_spec, head, forward = builders.kv_state, builders.head, builders.forward(hidden)
