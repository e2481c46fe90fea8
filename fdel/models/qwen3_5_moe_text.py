"""Qwen3.5-MoE, text (Qwen, 2026): Qwen3.5 with routed experts beside a gated shared one in every layer."""

from collections.abc import Collection
from dataclasses import replace

from fdel.models import config, qwen3_5_text

MODEL_TYPE, ARCHITECTURE = "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"


@config.config
class Config(qwen3_5_text.Config):
    """Sizes and constants."""

    DEFAULTS = qwen3_5_text.Config.DEFAULTS | dict(embed=2048, layers=40, kv_heads=2)
    ONLY = qwen3_5_text.Config.ONLY | {"intermediate_size": config.ANY}
    ffn: int = config.computed(lambda d: 0, lambda n: {}, default=0)  # of dense layers, of which there are none
    experts: int = config.hf("num_experts", 256)
    top_k: int = config.hf("num_experts_per_tok", 8)
    moe_ffn: int = config.hf("moe_intermediate_size", 512)
    shared_ffn: int = config.hf("shared_expert_intermediate_size", 512)
    kinds: tuple[tuple[str, str], ...] = qwen3_5_text.kinds("moe")
    fused: bool = config.computed(lambda d: False, lambda v: {}, default=False, compare=False)  # see of_file


def of_file(cfg: Config, names: Collection[str]) -> Config:
    """Give the Config for a file with tensors of these names: published ones have all experts of a layer in one."""
    experts = [name for name in names if name.endswith("mlp.experts.gate_up_proj") and not name.startswith("mtp.")]
    return replace(cfg, fused=bool(experts))


spec, hidden, state_spec = qwen3_5_text.spec, qwen3_5_text.hidden, qwen3_5_text.state_spec
head, forward, rename = qwen3_5_text.head, qwen3_5_text.forward, qwen3_5_text.rename
