"""Qwen3.5-MoE (Qwen, 2026): Qwen3.5 with routed experts beside a gated shared one in every layer."""

from collections.abc import Collection
from dataclasses import dataclass, replace

from fdel.models import config, qwen3_5, qwen3_5_moe_text, qwen3_vl
from fdel.ops.rope import Rope

MODEL_TYPE, ARCHITECTURE = "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"


@config.config
class Text(qwen3_5_moe_text.Config):
    """Sizes and constants of the language model."""

    rope: Rope = qwen3_5.rope()


@dataclass(frozen=True, kw_only=True)
class Config(qwen3_5.Config):
    """Sizes and constants."""

    TEXT, VISION, TYPES = Text, qwen3_vl.Tower, ("qwen3_5_moe_text", "qwen3_5_moe_vision")


def of_file(cfg: Config, names: Collection[str]) -> Config:
    """Give the Config for a file with tensors of these names: published ones have all experts of a layer in one."""
    return replace(cfg, text=qwen3_5_moe_text.of_file(cfg.text, names))


spec, encode, hidden, state_spec = qwen3_5.spec, qwen3_5.encode, qwen3_5.hidden, qwen3_5.state_spec
head, forward, rename = qwen3_5.head, qwen3_5.forward, qwen3_5.rename
