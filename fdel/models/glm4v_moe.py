"""GLM-4.5V (arXiv:2507.01006): GLM-4.5 that turns by three components, and GLM-4.1V's tower."""

from dataclasses import dataclass
from typing import Any

from fdel import ops
from fdel.models import builders, config, glm4_moe, glm4v, qwen2_vl, qwen3_vl
from fdel.models.glm4v import encode
from fdel.ops.rope import Rope

MODEL_TYPE, ARCHITECTURE = "glm4v_moe", "Glm4vMoeForConditionalGeneration"
INNER = "model.language_model."  # before the names of the language model's tensors


@config.config
class Text(glm4_moe.Config):
    """Sizes and constants of the language model."""

    DEFAULTS = glm4_moe.Config.DEFAULTS | dict(vocab=151424, max_positions=65536, attn_bias=True)
    ONLY = glm4_moe.Config.ONLY | {"use_qk_norm": False} | dict.fromkeys(glm4v.TOKENS, config.ANY)
    rope: Rope = qwen2_vl.sections((8, 12, 12), theta=1e4)


@dataclass(frozen=True, kw_only=True)
class Config(glm4v.Config):
    """Sizes and constants."""

    TEXT, VISION, TYPES = Text, glm4v.Vision, ("glm4v_moe_text", "glm4v_moe_vision")
    image_token: int = 151363


def spec(cfg: Config) -> dict:
    """Declare every array: the language model's at the top, the tower's and the projector's below."""
    return qwen3_vl.below(glm4_moe.spec(cfg.text)) | glm4v.tower_spec(cfg)


def rename(name: str, cfg: Any) -> str | None:
    """Leave out the layers that predict further tokens, as GLM-4.5 does."""
    inner = glm4_moe.rename(name.replace(INNER, "model.", 1), cfg)
    return None if inner is None else name


@builders.hidden("attention", "router", encode=encode, rotary=True)
def hidden(params, tokens, cfg: Config, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final normalised hidden states, [... T embed]; called as `protocol.Family` says."""
    return glm4_moe.hidden.walk(params, tokens, cfg.text, batch, carry, remat)  # type: ignore[attr-defined]


state_spec, head, forward = builders.kv_state, builders.head, builders.forward(hidden)
