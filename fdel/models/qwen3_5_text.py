"""Qwen3.5, text (Qwen, 2026): Qwen3-Next's mixers, their projections in other tensors, and dense feed-forwards."""

from typing import Any

from fdel.models import builders, config, qwen3_next
from fdel.models.qwen3_next import FULL, LINEAR, forward, head, hidden, rename, state_spec

MODEL_TYPE, ARCHITECTURE = "qwen3_5_text", "Qwen3_5ForCausalLM"
__all__ = ["ARCHITECTURE", "MODEL_TYPE", "Config", "forward", "head", "hidden", "rename", "spec", "state_spec"]


def kinds(ffn: str) -> Any:
    """Declare (mixer, ffn) of each layer; every fourth mixer is full attention unless layer_types says otherwise."""

    def read(d: dict) -> tuple[tuple[str, str], ...]:
        n, every = d["num_hidden_layers"], d.get("full_attention_interval") or 4
        default = [LINEAR if (i + 1) % every else FULL for i in range(n)]
        return tuple((mixer, ffn) for mixer in config.layer_types(d, default, (LINEAR, FULL)))

    return config.computed(read, lambda kinds: {"layer_types": [mixer for mixer, _ in kinds]})


@config.config
class Config(qwen3_next.Hybrid):
    """Sizes and constants."""

    DEFAULTS = dict(
        vocab=248320, embed=4096, ffn=12288, layers=32, heads=16, kv_heads=4, head_dim=256, max_positions=32768,
        partial_rotary_factor=0.25,
    )  # fmt: skip
    ONLY = dict(
        attn_output_gate=True, mamba_ssm_dtype="float32", mtp_num_hidden_layers=config.ANY,
        mtp_use_dedicated_embeddings=config.ANY,
    )  # fmt: skip
    kinds: tuple[tuple[str, str], ...] = kinds("dense")


def linear_spec(cfg: Any, name: str) -> dict:
    """Declare a gated delta-rule mixer; the file's q, k and v lie one below the other, z, b and a apart."""
    embed, (g, r, k, v) = ("embed", cfg.embed), (cfg.key_heads, cfg.rep, cfg.key_dim, cfg.value_dim)
    narrow, wide, gate = ("heads head_dim", (g, k)), ("heads rep head_dim", (g, r, v)), ("heads rep", (g, r))
    return {
        **builders.fused(name + "in_proj_qkv.weight", embed, q=narrow, k=narrow, v=wide),
        **builders.fused(name + "in_proj_z.weight", embed, z=wide),
        **builders.fused(name + "in_proj_b.weight", embed, beta=gate),
        **builders.fused(name + "in_proj_a.weight", embed, decay=gate),
        **qwen3_next.delta_spec(cfg, name),
    }


def spec(cfg: Any) -> dict:
    """Declare every array; norm scales are stored around zero, except the delta mixer's."""
    return qwen3_next.spec(cfg, linear_spec)
