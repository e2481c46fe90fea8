"""OPT (arXiv:2205.01068): learned positions, biases and ReLU; LayerNorm before or after what it belongs to."""

from dataclasses import replace

import jax.numpy as jnp

from fdel import ops
from fdel.models import builders, config, sublayers
from fdel.params.spec import Param, normal, stack

MODEL_TYPE, ARCHITECTURE = "opt", "OPTForCausalLM"
OFFSET, EPS = 2, 1e-5  # rows of the table of positions before the first position; of LayerNorm


@config.config
class Config(config.MultiHead):
    """Sizes and constants; `hf(...)` names each one's key in config.json."""

    vocab: int = config.hf("vocab_size", 50272)
    embed: int = config.hf("hidden_size", 768)
    ffn: int = config.hf("ffn_dim", 3072)
    layers: int = config.hf("num_hidden_layers", 12)
    heads: int = config.hf("num_attention_heads", 12)
    max_positions: int = config.hf("max_position_embeddings", 2048)
    act: str = config.act("activation_function", "relu")
    tied: bool = config.hf("tie_word_embeddings", True)
    width: int = config.hf("word_embed_proj_dim", lambda d: d["hidden_size"])  # of embeddings and final hidden states
    norm_first: bool = config.hf("do_layer_norm_before", True)
    no_last_norm: bool = config.hf("_remove_final_layer_norm", False)
    biased: bool = config.hf("enable_bias", True)
    affine: bool = config.hf("layer_norm_elementwise_affine", True)


def spec(cfg: Config) -> dict:
    """Declare every array."""
    start, d = "model.decoder.", cfg.embed
    name = start + "layers.{layers}."
    norm = lambda part, file: builders.layer_norm(part, file, d) if cfg.affine else {}
    layer = {
        **norm("attn_norm", name + "self_attn_layer_norm"),
        **builders.gqa(name + "self_attn.", cfg, biased=cfg.biased, names=("q_proj", "k_proj", "v_proj", "out_proj")),
        **norm("mlp_norm", name + "final_layer_norm"),
        **builders.mlp(name, d, cfg.ffn, ("fc1", "fc2"), biased=cfg.biased),
    }
    table = Param("vocab embed", (cfg.vocab, cfg.width), normal(builders.STD), start + "embed_tokens.weight")
    rows = cfg.max_positions + OFFSET
    tree = {
        "embed": table, "layers": stack(layer, "layers", range(cfg.layers)),
        "positions": Param("positions embed", (rows, d), normal(builders.STD), start + "embed_positions.weight"),
    }  # fmt: skip
    if cfg.norm_first and not cfg.no_last_norm:
        tree |= norm("norm", start + "final_layer_norm")
    if cfg.width != d:
        tree["project_in"] = builders.matrix(start + "project_in.weight", ("channels", cfg.width), ("embed", d))
        tree["project_out"] = builders.matrix(start + "project_out.weight", ("embed", d), ("channels", cfg.width))
    return tree if cfg.tied else tree | {"head": replace(table, hf="lm_head.weight")}


def rename(name: str, cfg: Config) -> str:
    """Map file names to spec names: the first OPT files lack the prefix."""
    return name if name.startswith(("model.", "lm_head.")) else f"model.{name}"


@builders.hidden("attention")
def hidden(params, tokens, cfg: Config, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final normalised hidden states, [... T width]; called as `protocol.Family` says."""
    mask = ops.Mask(cfg.head_dim**-0.5)
    norm = lambda x, p, part: sublayers.layer_norm(x, p, part, EPS)
    before = norm if cfg.norm_first else lambda x, p, part: x
    after = (lambda x, p, part: x) if cfg.norm_first else norm

    def block(x, carry, p, layer):
        a, carry = sublayers.attention(before(x, p, "attn_norm"), carry, p, layer, batch, mask)
        x = after(x + a, p, "attn_norm")
        h = ops.mlp(before(x, p, "mlp_norm"), p, ops.ACTIVATIONS[cfg.act])
        return after(x + h, p, "mlp_norm"), carry

    x = ops.embed(params["embed"], tokens)
    if "project_in" in params:
        x = ops.einsum("...c,dc->...d", x, params["project_in"])
    x = x + ops.embed(params["positions"], jnp.maximum(batch.positions, 0) + OFFSET)
    x, carry = ops.layers(block, x, carry, params["layers"], remat=remat)
    if cfg.norm_first and not cfg.no_last_norm:
        x = norm(x, params, "norm")
    return ops.einsum("...d,cd->...c", x, params["project_out"]) if "project_out" in params else x, carry


state_spec, head, forward = builders.kv_state, builders.head, builders.forward(hidden)
