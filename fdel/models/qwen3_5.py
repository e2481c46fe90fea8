"""Qwen3.5 (Qwen, 2026): the gated delta rule and gated attention in turn, and Qwen3-VL's tower, its last states alone."""

from dataclasses import dataclass
from typing import Any

from fdel import ops
from fdel.models import builders, config, qwen2_vl, qwen3_5_text, qwen3_next, qwen3_vl
from fdel.models.qwen3_next import head, rename, state_spec
from fdel.models.qwen3_vl import encode
from fdel.ops.rope import Rope

MODEL_TYPE, ARCHITECTURE = "qwen3_5", "Qwen3_5ForConditionalGeneration"
__all__ = [
    "ARCHITECTURE", "MODEL_TYPE", "Config", "encode", "forward", "head", "hidden", "rename", "spec", "state_spec",
]  # fmt: skip


def rope() -> Any:
    """Declare the field `rope`: the channels that turn do so by components that alternate."""
    return qwen2_vl.sections((11, 11, 10), theta=1e4, mrope_interleaved=True)


@config.config
class Text(qwen3_5_text.Config):
    """Sizes and constants of the language model."""

    rope: Rope = rope()


@dataclass(frozen=True, kw_only=True)
class Config(qwen3_vl.Sighted):
    """Sizes and constants."""

    TEXT, VISION, TYPES = Text, qwen3_vl.Tower, ("qwen3_5_text", "qwen3_5_vision")
    image_token: int = 248056

    kinds = property(lambda self: self.text.kinds)


def spec(cfg: Any) -> dict:
    """Declare every array: the language model's at the top, the tower's and the projector's below."""
    return qwen3_vl.below(qwen3_5_text.spec(cfg.text)) | qwen3_vl.tower_spec(cfg)


@builders.hidden("attention", "router", encode=encode, rotary=True)
def hidden(params, tokens, cfg: Any, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final normalised hidden states, [... T embed]; called as `protocol.Family` says."""
    return qwen3_next.hidden.walk(params, tokens, cfg.text, batch, carry, remat)  # type: ignore[attr-defined]


forward = builders.forward(hidden)
