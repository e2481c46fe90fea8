"""GPT-NeoX (arXiv:2204.06745), Pythia: attention and feed-forward in parallel, each with a LayerNorm, partly rotary."""

from fdel import ops
from fdel.models import builders, config, sublayers
from fdel.params.hf_layout import with_modules

MODEL_TYPE, ARCHITECTURE = "gpt_neox", "GPTNeoXForCausalLM"
MODULES = {r"^embed_out\.": "lm_head."}  # what transformers' modules are called


@config.config
class Config(config.Decoder):
    """Sizes and constants."""

    DEFAULTS = dict(vocab=50432, embed=6144, ffn=24576, layers=44, heads=64)
    ONLY = {"num_key_value_heads": lambda c: c.heads, "head_dim": lambda c: c.embed // c.heads}
    norm_eps: float = config.hf("layer_norm_eps", 1e-5)
    act: str = config.act(default="gelu")
    attn_bias: bool = config.hf("attention_bias", True)
    parallel: bool = config.hf("use_parallel_residual", True)
    rope: ops.Rope = config.rotary(  # of a quarter of each head by default; older files have names of their own
        theta=lambda d: d.get("rotary_emb_base", 10000.0), partial=lambda d: d.get("rotary_pct", 0.25)
    )


def spec(cfg: Config) -> dict:
    """Declare every array."""
    name, d = "gpt_neox.layers.{layers}.", cfg.embed
    layer = {
        **builders.layer_norm("attn_norm", name + "input_layernorm", d),
        **builders.grouped_qkv(name + "attention.query_key_value", name + "attention.dense", cfg, biased=cfg.attn_bias),
        **builders.layer_norm("mlp_norm", name + "post_attention_layernorm", d),
        **builders.mlp(name + "mlp.", d, cfg.ffn, ("dense_h_to_4h", "dense_4h_to_h")),
    }
    names = "gpt_neox.embed_in", "gpt_neox.final_layer_norm"
    return with_modules(builders.decoder(cfg, layer, *names, head="embed_out", norm_bias=True), MODULES)


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


state_spec, head, forward, rename = builders.kv_state, builders.head, builders.forward(hidden), builders.without_mask
