"""Qwen3-VL-MoE (arXiv:2511.21631): Qwen3-VL with Qwen3-MoE's layers, their weights of experts always summing to one."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fdel import ops
from fdel.models import builders, config, qwen2_vl, qwen3_moe, qwen3_vl
from fdel.models.qwen3_moe import DENSE, MOE
from fdel.models.qwen3_vl import encode
from fdel.ops.rope import Rope

MODEL_TYPE, ARCHITECTURE = "qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration"


@config.config
class Text(qwen3_moe.Config):
    """Sizes and constants of the language model."""

    DEFAULTS = dict(
        vocab=151936, embed=2048, ffn=5632, layers=24, heads=16, kv_heads=16, head_dim=128, max_positions=128000,
        top_k=4, moe_ffn=1408, normalize=True,
    )  # fmt: skip
    ONLY = {"norm_topk_prob": True}
    experts: int = config.hf("num_experts", lambda d: d.get("num_local_experts", 60))
    rope: Rope = qwen2_vl.sections((24, 20, 20), theta=5e5, mrope_interleaved=True)


@dataclass(frozen=True, kw_only=True)
class Config(qwen3_vl.Sighted):
    """Sizes and constants; `inputs_first` is how the experts of a file lie, see `of_file`."""

    TEXT, VISION, TYPES = Text, qwen3_vl.Vision, ("qwen3_vl_moe_text", "qwen3_vl_moe_vision")
    inputs_first: bool = field(default=True, compare=False)


def of_file(cfg: Config, names: Mapping[str, Any]) -> Config:
    """Give the Config for a file with these tensors: published ones have experts' inputs first, transformers' own last."""
    shapes = [tuple(t.shape) for name, t in names.items() if name.endswith("mlp.experts.down_proj")]
    return replace(cfg, inputs_first=(cfg.text.experts, cfg.text.embed, cfg.text.moe_ffn) not in shapes)


def spec(cfg: Config) -> dict:
    """Declare every array: the language model's at the top, the tower's and the projectors' below."""
    text, name = replace(cfg.text, kinds=cfg.kinds), "model.layers.{layers}.mlp."
    routed = builders.fused_experts(
        name + "experts.", text.embed, text.moe_ffn, text.experts, inputs_first=cfg.inputs_first
    )
    moe = builders.moe(name, text.embed, text.moe_ffn, text.experts)
    moe["experts"] = {part: replace(p, module=moe["experts"][part].module) for part, p in routed.items()}
    layer = lambda kind: qwen3_moe.layer_spec(text, kind[1]) | (moe if kind[1] == MOE else {})
    return qwen3_vl.below(builders.decoder(text, layer)) | qwen3_vl.tower_spec(cfg)


@builders.hidden("attention", "router", encode=encode, rotary=True)
def hidden(params, tokens, cfg: Config, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final normalised hidden states, [... T embed]; called as `protocol.Family` says."""
    blocks = dict.fromkeys((DENSE, MOE), qwen3_moe.block(cfg.text, batch))
    return qwen3_vl.walk(params, tokens, cfg, blocks, carry, remat)


state_spec, head, forward = builders.kv_state, builders.head, builders.forward(hidden)
