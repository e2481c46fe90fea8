"""Qwen3.5-MoE, text (Qwen, 2026): Qwen3.5 with routed experts beside a gated shared one in every layer."""

from collections.abc import Collection
from dataclasses import replace

from fdel.models import config, qwen3_5
from fdel.models.qwen3_5 import forward, head, hidden, rename, spec, state_spec

MODEL_TYPE, ARCHITECTURE = "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"
__all__ = [
    "ARCHITECTURE",
    "MODEL_TYPE",
    "Config",
    "forward",
    "head",
    "hidden",
    "of_file",
    "rename",
    "spec",
    "state_spec",
]


@config.config
class Config(qwen3_5.Config):
    """Sizes and constants."""

    DEFAULTS = qwen3_5.Config.DEFAULTS | dict(hidden_size=2048, num_hidden_layers=40, num_key_value_heads=2)
    ONLY = qwen3_5.Config.ONLY | {"intermediate_size": config.ANY}
    ffn: int = config.computed(lambda d: 0, lambda n: {}, default=0)  # of dense layers, of which there are none
    experts: int = config.hf("num_experts", 256)
    top_k: int = config.hf("num_experts_per_tok", 8)
    moe_ffn: int = config.hf("moe_intermediate_size", 512)
    shared_ffn: int = config.hf("shared_expert_intermediate_size", 512)
    kinds: tuple[tuple[str, str], ...] = qwen3_5.kinds("moe")
    fused: bool = config.computed(lambda d: False, lambda v: {}, default=False, compare=False)  # see of_file


def of_file(cfg: Config, names: Collection[str]) -> Config:
    """Give the Config for a file with tensors of these names: published ones have all experts of a layer in one."""
    experts = [name for name in names if name.endswith("mlp.experts.gate_up_proj") and not name.startswith("mtp.")]
    return replace(cfg, fused=bool(experts))
