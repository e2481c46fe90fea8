"""Llama (arXiv:2302.13971, 2407.21783): pre-norm decoder with grouped-query attention, rotary positions and SwiGLU."""

from collections.abc import Callable
from typing import Any

from fdel import ops
from fdel.models import builders, config, sublayers
from fdel.params.spec import Param

MODEL_TYPE, ARCHITECTURE = "llama", "LlamaForCausalLM"


@config.config
class Config(config.Decoder):
    """Sizes and constants; those of every decoder come first, see `config.Decoder`."""

    attn_bias: bool = config.hf("attention_bias", False)
    mlp_bias: bool = config.hf("mlp_bias", False)


def spec(cfg: Any, norm: Callable[[str, int], Param] = builders.norm) -> dict:
    """Declare every array: the stacked layers, and what stands around them."""
    name = "model.layers.{layers}."
    layer = {
        "attn_norm": norm(name + "input_layernorm.weight", cfg.embed),
        **builders.gqa(name + "self_attn.", cfg, biased=cfg.attn_bias, o_biased=cfg.o_bias),
        "mlp_norm": norm(name + "post_attention_layernorm.weight", cfg.embed),
        **builders.glu(name + "mlp.", cfg.embed, cfg.ffn, biased=cfg.mlp_bias),
    }
    return builders.decoder(cfg, layer, norm=norm)


def block(
    cfg: Any, batch: ops.Batch, change: Callable | None, window: int | None = None, norm: Callable | None = None
) -> Callable:
    """Make the block of layers that attend within `window`; `change` as in `sublayers.attention`."""
    mask, act = ops.Mask(cfg.head_dim**-0.5, window=window), ops.ACTIVATIONS[cfg.act]
    norm = norm or ops.rms_norm

    def apply(x, carry, p, layer):
        h = norm(x, p["attn_norm"], cfg.norm_eps)
        a, carry = sublayers.attention(h, carry, p, layer, batch, mask, change)
        x = x + a
        return x + ops.glu(norm(x, p["mlp_norm"], cfg.norm_eps), p, act), carry

    return apply


@builders.hidden("attention")
def hidden(params, tokens, cfg: Config, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final normalised hidden states, [... T embed]; called as `protocol.Family` says."""
    change = sublayers.rotate(ops.rotation(cfg.rope, batch))
    return sublayers.walk(params, tokens, cfg, block(cfg, batch, change, cfg.window), carry, remat)


state_spec, head, forward = builders.kv_state, builders.head, builders.forward(hidden)
