"""GLM-4.7-Flash (Z.ai, 2026): DeepSeek-V3's function; which layers are dense is listed."""

from fdel.models import config, deepseek_v3
from fdel.models.deepseek_v3 import DENSE, MOE, forward, head, hidden, rename, spec, state_spec

MODEL_TYPE, ARCHITECTURE = "glm4_moe_lite", "Glm4MoeLiteForCausalLM"
SPARSE = "sparse"  # in config.json
__all__ = ["ARCHITECTURE", "MODEL_TYPE", "Config", "forward", "head", "hidden", "rename", "spec", "state_spec"]


def kinds(d: dict) -> tuple[str, ...]:
    """Read the feed-forward of each layer: mlp_layer_types, or the first first_k_dense_replace are dense."""
    n, first = d["num_hidden_layers"], d.get("first_k_dense_replace", 1)
    default = [DENSE if i < first else SPARSE for i in range(n)]
    listed = config.layer_types(d, default, (DENSE, SPARSE), "mlp_layer_types")
    return tuple(DENSE if k == DENSE else MOE for k in listed)


def kinds_to_hf(kinds: tuple[str, ...]) -> dict:
    """Write mlp_layer_types."""
    return {"mlp_layer_types": [DENSE if k == DENSE else SPARSE for k in kinds]}


@config.config
class Config(deepseek_v3.Config):
    """Sizes and constants, under DeepSeek-V3's names."""

    DEFAULTS = dict(
        vocab=154880, embed=2048, ffn=10240, layers=47, heads=20, max_positions=202752, rope_dim=64, moe_ffn=1536,
        experts=64, route_scale=1.8, q_latent=768, v_dim=256, nope_dim=192, groups=1, topk_groups=1, top_k=4,
        norm_eps=1e-5,
    )  # fmt: skip
    kinds: tuple[str, ...] = config.computed(kinds, kinds_to_hf)
