"""OLMo 2 (arXiv:2501.00656): norms behind attention and feed-forward; queries and keys normalised over all heads."""

from typing import Any

from fdel import ops
from fdel.models import builders, config, sublayers
from fdel.params.spec import Param, ones

MODEL_TYPE, ARCHITECTURE = "olmo2", "Olmo2ForCausalLM"


@config.config
class Config(config.Decoder):
    """Sizes and constants."""

    DEFAULTS = dict(vocab=50304, embed=4096, ffn=11008, layers=32, heads=32, norm_eps=1e-5)
    attn_bias: bool = config.hf("attention_bias", False)


def spec(cfg: Any, *, per_head: bool = False) -> dict:
    """Declare every array; `per_head`: queries and keys are normalised in each head alone, else over all of them."""
    name = "model.layers.{layers}."
    layer = builders.gqa(name + "self_attn.", cfg, biased=cfg.attn_bias) | builders.glu(
        name + "mlp.", cfg.embed, cfg.ffn
    )
    for part, file in ("attn", "attention"), ("mlp", "feedforward"):
        layer[f"{part}_norm"] = builders.norm(f"{name}post_{file}_layernorm.weight", cfg.embed)
    if per_head:
        return builders.decoder(cfg, layer | builders.qk_norm(name + "self_attn.", cfg))
    for part, axis, n in ("q", "heads", cfg.heads), ("k", "kv_heads", cfg.kv_heads):
        axes, file = f"{axis} head_dim", f"{name}self_attn.{part}_norm.weight"
        layer[f"{part}_norm"] = Param(axes, (n, cfg.head_dim), ones, file, f"({axes})")
    return builders.decoder(cfg, layer)


def block(cfg: Any, batch: ops.Batch, rot: Any, window: int | None = None, *, per_head: bool = False):
    """Make the block of layers that attend within `window`; `rot` None: without positions."""
    mask, norm = ops.Mask(cfg.head_dim**-0.5, window=window), lambda x, w: ops.rms_norm(x, w, cfg.norm_eps)
    flat = lambda x: x.reshape(*x.shape[:-2], -1)
    norm_heads = norm if per_head else lambda x, w: norm(flat(x), flat(w)).reshape(x.shape)

    def apply(x, carry, p, layer):
        a, carry = sublayers.attention(x, carry, p, layer, batch, mask, sublayers.normed(norm_heads, p, rot))
        x = x + norm(a, p["attn_norm"])
        return x + norm(ops.glu(x, p, ops.ACTIVATIONS[cfg.act]), p["mlp_norm"]), carry

    return apply


@builders.hidden("attention")
def hidden(params, tokens, cfg: Config, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final normalised hidden states, [... T embed]; called as `protocol.Family` says."""
    return sublayers.walk(params, tokens, cfg, block(cfg, batch, ops.rotation(cfg.rope, batch)), carry, remat)


state_spec, head, forward = builders.kv_state, builders.head, builders.forward(hidden)
