"""DeepSeek-V2 (arXiv:2405.04434): V3's latent attention; experts chosen by softmax, of all or of the best groups."""

from functools import partial

from fdel import ops
from fdel.models import builders, config, deepseek_v3, sublayers
from fdel.models.deepseek_v3 import head, rename, state_spec

MODEL_TYPE, ARCHITECTURE = "deepseek_v2", "DeepseekV2ForCausalLM"
GREEDY, LIMITED = "greedy", "group_limited_greedy"
__all__ = ["ARCHITECTURE", "MODEL_TYPE", "Config", "forward", "head", "hidden", "rename", "spec", "state_spec"]


@config.config
class Config(deepseek_v3.Config):
    """Sizes and constants, under V3's names."""

    DEFAULTS = dict(
        vocab=102400, embed=4096, ffn=11008, layers=32, heads=32, max_positions=2048, rope_dim=64, moe_ffn=1407,
        experts=64, shared=2, route_scale=1.0, normalize=False, first_k_dense_replace=0,
    )  # fmt: skip
    ONLY = deepseek_v3.Config.ONLY | dict(
        scoring_func="softmax", topk_method=config.ANY, norm_topk_prob=False, rope_interleave=True
    )
    top_k: int = config.hf("num_experts_per_tok", lambda d: 6)
    method: str = config.hf("topk_method", GREEDY, choices=(GREEDY, LIMITED))
    groups: int | None = config.hf("n_group", None)
    topk_groups: int | None = config.hf("topk_group", None)


def moe_spec(cfg: Config, name: str) -> dict:
    """Declare routed experts, and the shared experts as one feed-forward."""
    shared = builders.glu(name + "shared_experts.", cfg.embed, cfg.moe_ffn * cfg.shared)
    return builders.moe(name, cfg.embed, cfg.moe_ffn, cfg.experts) | {"shared": shared}


def spec(cfg: Config) -> dict:
    """Declare every array."""
    return deepseek_v3.spec(cfg, moe_spec)


@builders.hidden("attention", "router")
def hidden(params, tokens, cfg: Config, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final normalised hidden states, [... T embed]; called as `protocol.Family` says."""
    groups, most = (cfg.groups or 1, cfg.topk_groups or 1) if cfg.method == LIMITED else (1, 1)
    moe = partial(sublayers.softmax_experts, normalize=False, groups=groups, topk_groups=most)
    return deepseek_v3.walk(params, tokens, cfg, batch, carry, remat, moe)


forward = builders.forward(hidden)
