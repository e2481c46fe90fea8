"""Ministral 3: Mistral whose queries grow with the logarithm of their position."""

import jax.numpy as jnp

from fdel import ops
from fdel.models import builders, config, llama, sublayers

MODEL_TYPE, ARCHITECTURE = "ministral3", "Ministral3ForCausalLM"
YARN = dict(rope_type="yarn", rope_theta=1e6, factor=16.0, original_max_position_embeddings=16384, beta_fast=32.0,
            beta_slow=1.0, mscale_all_dim=1.0, mscale=1.0, llama_4_scaling_beta=0.1)  # fmt: skip
BETA, ORIGINAL = "llama_4_scaling_beta", "original_max_position_embeddings"


def rotary(d: dict) -> dict:
    """Give the rotary parameters of a config dict."""
    return dict(config.K.mapping("rope_parameters", d.get("rope_parameters") or d.get("rope_scaling") or YARN))


def growth(d: dict) -> tuple[float, int]:
    """Read by how much queries grow, times the logarithm of how often their position is past a number of positions."""
    p = rotary(d)
    beta, original = p.get(BETA, 0.0), p.get(ORIGINAL, d["max_position_embeddings"])
    return float(beta), int(original)


@config.config
class Config(config.Decoder):
    """Sizes and constants."""

    DEFAULTS = dict(
        vocab=131072, embed=4096, ffn=14336, layers=34, heads=32, kv_heads=8, head_dim=128, max_positions=262144,
        norm_eps=1e-5,
    )  # fmt: skip
    window: int | None = config.hf("sliding_window", None)
    rope: ops.Rope = config.computed(
        lambda d: config.rope(
            d | {"rope_parameters": rotary(d)}, d["head_dim"], also=(BETA, "max_position_embeddings")
        ),
        lambda r: {"rope_parameters": config.rope_to_hf(r)},
    )
    growth: tuple[float, int] = config.computed(
        growth, lambda g: {f"rope_parameters.{BETA}": g[0], f"rope_parameters.{ORIGINAL}": g[1]}
    )


@builders.hidden("attention")
def hidden(params, tokens, cfg: Config, batch: ops.Batch, carry: ops.Carry, remat: str | None):
    """Compute the final normalised hidden states, [... T embed]; called as `protocol.Family` says."""
    rot, (beta, original) = ops.rotation(cfg.rope, batch), cfg.growth
    scale = 1 + beta * jnp.log1p(jnp.maximum(batch.positions, 0) // original)[..., None, None]
    change = lambda q, k: (ops.rope(q, rot) * scale.astype(q.dtype), ops.rope(k, rot))
    return sublayers.walk(params, tokens, cfg, llama.block(cfg, batch, change, cfg.window), carry, remat)


spec, state_spec, head, forward = llama.spec, builders.kv_state, builders.head, builders.forward(hidden)
