"""Command R (Cohere, 2024): attention and feed-forward in parallel on one LayerNorm without bias, scaled logits."""

from typing import Any

from fdel import ops
from fdel.models import builders, config, sublayers
from fdel.params.spec import Param, ones

MODEL_TYPE, ARCHITECTURE = "cohere", "CohereForCausalLM"


@config.config
class Config(config.Decoder):
    """Sizes and constants."""

    DEFAULTS = dict(vocab=256000, embed=8192, ffn=22528, layers=40, heads=64, max_positions=8192, tied=True)
    ONLY = {"model_max_length": config.ANY}
    norm_eps: float = config.hf("layer_norm_eps", 1e-5)
    attn_bias: bool = config.hf("attention_bias", False)
    qk_norm: bool = config.hf("use_qk_norm", False)
    logit_scale: float = config.hf("logit_scale", 0.0625)
    rope: ops.Rope = config.rotary(theta=5e5)


def spec(cfg: Any) -> dict:
    """Declare every array."""
    name = "model.layers.{layers}."
    layer = {
        "norm": builders.norm(name + "input_layernorm.weight", cfg.embed),
        **builders.gqa(name + "self_attn.", cfg, biased=cfg.attn_bias),
        **builders.glu(name + "mlp.", cfg.embed, cfg.ffn),
    }
    if cfg.qk_norm:
        for part, axis, n in ("q", "heads", cfg.heads), ("k", "kv_heads", cfg.kv_heads):
            file = f"{name}self_attn.{part}_norm.weight"
            layer[f"{part}_norm"] = Param(f"{axis} head_dim", (n, cfg.head_dim), ones, file, inputs=0)
    return builders.decoder(cfg, layer)


def block(cfg: Any, batch: ops.Batch, rot: Any, window: int | None = None):
    """Make the block of layers that attend within `window`; `rot` None: without positions."""
    mask, norm = ops.Mask(cfg.head_dim**-0.5, window=window), lambda x, w: ops.layer_norm(x, w, None, cfg.norm_eps)

    def apply(x, carry, p, layer):
        h = norm(x, p["norm"])
        change = sublayers.normed(norm, p, rot, interleaved=True)
        a, carry = sublayers.attention(h, carry, p, layer, batch, mask, change)
        return x + a + ops.glu(h, p, ops.ACTIVATIONS[cfg.act]), carry

    return apply


@builders.hidden("attention")
def hidden(params, tokens, cfg: Config, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final normalised hidden states, [... T embed]; called as `protocol.Family` says."""
    norm = lambda x: ops.layer_norm(x, params["norm"], None, cfg.norm_eps)
    return sublayers.walk(params, tokens, cfg, block(cfg, batch, ops.rotation(cfg.rope, batch)), carry, remat, norm)


state_spec, head, forward = builders.kv_state, builders.head, builders.forward(hidden)
