"""Gemma 2 (arXiv:2408.00118): Gemma with sandwich norms, capped scores and logits, every second layer in a window."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from fdel import ops
from fdel.models import builders, config, gemma, sublayers
from fdel.models.config import FULL, SLIDING
from fdel.params.spec import Param

MODEL_TYPE, ARCHITECTURE = "gemma2", "Gemma2ForCausalLM"


@config.config
class Config(config.Decoder):
    """Sizes and constants."""

    DEFAULTS = dict(
        vocab=256000, embed=2304, ffn=9216, layers=26, heads=8, kv_heads=4, head_dim=256, max_positions=8192, tied=True,
    )  # fmt: skip
    ONLY = {"hidden_act": lambda c: c.act, "sliding_window_size": lambda c: c.window}
    act: str = config.act("hidden_activation", gemma.GELU)
    attn_bias: bool = config.hf("attention_bias", False)
    query_scale: int = config.hf("query_pre_attn_scalar", 256)
    score_cap: float | None = config.hf("attn_logit_softcapping", 50.0)
    softcap: float | None = config.hf("final_logit_softcapping", 30.0)
    window: int = config.hf("sliding_window", 4096)
    kinds: tuple[str, ...] = config.pattern(2)


def spec(cfg: Any, more: Mapping[str, Param] | None = None) -> dict:
    """Declare every array, `more` in each layer; norm scales are stored around zero."""
    name = "model.layers.{layers}."
    norms = {"attn_norm": "input", "attn_post_norm": "post_attention", "mlp_norm": "pre_feedforward",
             "mlp_post_norm": "post_feedforward"}  # fmt: skip
    layer = {
        **{part: builders.bias(f"{name}{file}_layernorm.weight", cfg.embed) for part, file in norms.items()},
        **builders.gqa(name + "self_attn.", cfg, biased=cfg.attn_bias),
        **builders.glu(name + "mlp.", cfg.embed, cfg.ffn),
        **(more or {}),
    }
    return builders.decoder(cfg, layer, norm=builders.bias)


def block(cfg: Any, batch: ops.Batch, rope: ops.Rope, mask: ops.Mask):
    """Make the block of one kind of layer; queries and keys are normalised where the layer has scales for it."""
    rot, norm = ops.rotation(rope, batch), lambda x, w: ops.rms_norm(x, w, cfg.norm_eps, offset=1.0)

    def apply(x, carry, p, layer):
        h, change = norm(x, p["attn_norm"]), sublayers.normed(norm, p, rot)
        a, carry = sublayers.attention(h, carry, p, layer, batch, mask, change)
        x = x + norm(a, p["attn_post_norm"])
        h = ops.glu(norm(x, p["mlp_norm"]), p, ops.ACTIVATIONS[cfg.act])
        return x + norm(h, p["mlp_post_norm"]), carry

    return apply


def walk(params, tokens, cfg: Any, blocks: Any, carry: ops.Carry, remat: str | None):
    """Embed, apply every layer, normalise."""
    norm = lambda x: ops.rms_norm(x, params["norm"], cfg.norm_eps, offset=1.0)
    return sublayers.walk(params, tokens, cfg, blocks, carry, remat, norm, scale=cfg.embed**0.5)


@builders.hidden("attention")
def hidden(params, tokens, cfg: Config, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final normalised hidden states, [... T embed]; called as `protocol.Family` says."""
    mask = partial(ops.Mask, cfg.query_scale**-0.5, softcap=cfg.score_cap)
    blocks = {kind: block(cfg, batch, cfg.rope, mask(window=w)) for kind, w in ((FULL, None), (SLIDING, cfg.window))}
    return walk(params, tokens, cfg, blocks, carry, remat)


state_spec, head, forward = builders.kv_state, builders.head, builders.forward(hidden)
