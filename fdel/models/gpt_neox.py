"""GPT-NeoX (arXiv:2204.06745), Pythia: attention and feed-forward in parallel, each with a LayerNorm, partly rotary."""

from fdel import ops
from fdel.models import builders, config, sublayers
from fdel.params.spec import stack

MODEL_TYPE, ARCHITECTURE = "gpt_neox", "GPTNeoXForCausalLM"


def rotary(d: dict) -> ops.Rope:
    """Read the rotary parameters, of a quarter of each head by default; older files have names of their own."""
    theta = d.get("rope_theta", d.get("rotary_emb_base", 10000.0))
    partial = d.get("partial_rotary_factor", d.get("rotary_pct", 0.25))
    return config.rope(d | {"rope_theta": theta, "partial_rotary_factor": partial}, d["head_dim"])


@config.config
class Config(config.Decoder):
    """Sizes and constants."""

    DEFAULTS = dict(
        vocab_size=50432, hidden_size=6144, intermediate_size=24576, num_hidden_layers=44, num_attention_heads=64,
    )  # fmt: skip
    ONLY = {"num_key_value_heads": lambda c: c.heads, "head_dim": lambda c: c.embed // c.heads}
    norm_eps: float = config.hf("layer_norm_eps", 1e-5)
    act: str = config.act(default="gelu")
    attn_bias: bool = config.hf("attention_bias", True)
    parallel: bool = config.hf("use_parallel_residual", True)
    rope: ops.Rope = config.computed(
        rotary, lambda r: {"rope_parameters": config.rope_to_hf(r) | {"partial_rotary_factor": r.partial}}
    )


def spec(cfg: Config) -> dict:
    """Declare every array."""
    name, d = "gpt_neox.layers.{layers}.", cfg.embed
    layer = {
        **builders.layer_norm("attn_norm", name + "input_layernorm", d),
        **builders.grouped_qkv(name + "attention.query_key_value", cfg, biased=cfg.attn_bias),
        "o": builders.heads_in(name + "attention.dense.weight", cfg.heads, cfg.head_dim, d),
        **builders.layer_norm("mlp_norm", name + "post_attention_layernorm", d),
        **builders.mlp(name + "mlp.", d, cfg.ffn, ("dense_h_to_4h", "dense_4h_to_h")),
    }
    layer |= {"o_bias": builders.bias(name + "attention.dense.bias", d)} if cfg.attn_bias else {}
    names = "gpt_neox.embed_in.weight", "gpt_neox.final_layer_norm.weight"
    tree = builders.top(cfg, stack(layer, "layers", range(cfg.layers)), *names, head="embed_out.weight")
    return tree | {"norm_bias": builders.bias("gpt_neox.final_layer_norm.bias", d)}


def rename(name: str, cfg: Config) -> str | None:
    """Leave out the causal mask that older files carry."""
    return None if name.endswith((".attention.bias", ".attention.masked_bias")) else name


@builders.hidden("attention")
def hidden(params, tokens, cfg: Config, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final normalised hidden states, [... T embed]; called as `protocol.Family` says."""
    rot, mask = ops.rotation(cfg.rope, batch), ops.Mask(cfg.head_dim**-0.5)
    norm = lambda x, p, part: sublayers.layer_norm(x, p, part, cfg.norm_eps)

    def block(x, carry, p, layer):
        h = norm(x, p, "attn_norm")
        a, carry = sublayers.attention(h, carry, p, layer, batch, mask, sublayers.rotate(rot))
        h = norm(x if cfg.parallel else x + a, p, "mlp_norm")
        return x + a + ops.mlp(h, p, ops.ACTIVATIONS[cfg.act]), carry

    return sublayers.walk(params, tokens, cfg, block, carry, remat, lambda x: norm(x, params, "norm"))


state_spec, head, forward = builders.kv_state, builders.head, builders.forward(hidden)
