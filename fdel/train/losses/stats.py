"""What losses need to know about the next-token distribution, per token, and how to differentiate it."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

IGNORE = -100  # the label of a token that no loss counts; every negative label acts the same


def check_range(low: float = 0.0, high: float = math.inf, *, above: bool = False, **options: Any) -> None:
    """Raise ValueError for a number outside of [low, high], or of (low, high] if it is `above`; NaN is in none.

    Arrays, and options that are None, pass.
    """
    for name, value in options.items():
        if not isinstance(value, int | float):
            continue
        if not (math.isfinite(value) and (low < value if above else low <= value) and value <= high):
            bounds = f"{'above' if above else 'from'} {low:g}" + ("" if high == math.inf else f" to {high:g}")
            raise ValueError(f"{name}={value}; expected a finite number {bounds}")


def check_call(f: Callable, *shapes: tuple[int, ...]) -> None:
    """Call a function on arrays without numbers, to raise now what it would raise in the traced step."""
    jax.eval_shape(f, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))


class TokenStats(NamedTuple):
    """Statistics of p = softmax(z) per token, in float32; all are 0, without gradient, where the label is negative.

    `mean_logit - logsumexp` is the mean log-probability (label smoothing), `logsumexp` serves z-loss, `logsumsq` the
    weights of WPO (arXiv:2406.11827). `top1` has no gradient.
    """

    logp: Float[Array, "..."]  # log p[label]
    entropy: Float[Array, "..."]  # -sum_v p log p, in nats
    logsumexp: Float[Array, "..."]  # log sum_v exp z
    logsumsq: Float[Array, "..."]  # log sum_v p^2
    mean_logit: Float[Array, "..."]  # mean_v z
    top1: Float[Array, "..."]  # 1 where the label is the first most likely token


def from_logits(z: Float[Array, "... V"], labels: Int[Array, "..."]) -> TokenStats:
    """Compute the statistics of logits: the definition. `token_stats` gives the same without building all logits.
    >>> losses.stats.from_logits(jnp.zeros((2, 4)), jnp.array([1, 3])).logp
    Array([-1.3862944, -1.3862944], dtype=float32)
    """
    index = jnp.arange(z.shape[-1])
    # A sum, not a lookup: z may be divided along V.
    label = jnp.where(index == labels[..., None], z, 0).sum(-1, keepdims=True)
    top = z.max(-1, keepdims=True)
    s = z - top
    e = jnp.exp(s)
    total = e.sum(-1)
    log_total = jnp.log(total)
    before = index < labels[..., None]
    stats = TokenStats(
        logp=(label - top)[..., 0] - log_total,
        entropy=log_total - (e * s).sum(-1) / total,
        logsumexp=top[..., 0] + log_total,
        logsumsq=jnp.log((e * e).sum(-1)) - 2 * log_total,
        mean_logit=z.mean(-1),
        top1=1.0 - ((z > label) | (before & (z == label))).any(-1),
    )
    return jax.tree.map(lambda x: jnp.where(labels >= 0, x, 0), stats)


def logits_gradient(
    z: Float[Array, "... V"], labels: Int[Array, "..."], stats: TokenStats, ct: TokenStats
) -> Float[Array, "... V"]:
    """Compute the loss's gradient in the logits from its gradients `ct` in the statistics (the pullback, by hand)."""
    stats, ct = jax.tree.map(lambda x: x[..., None], (stats, ct))
    logp = z - stats.logsumexp
    p = jnp.exp(logp)
    factor = ct.logsumexp - ct.logp - ct.entropy * (logp + stats.entropy)
    factor += 2 * ct.logsumsq * (p * jnp.exp(-stats.logsumsq) - 1)
    label = jnp.arange(z.shape[-1]) == labels[..., None]
    dz = factor * p + ct.mean_logit / z.shape[-1] + jnp.where(label, ct.logp, 0)
    return jnp.where(labels[..., None] >= 0, dz, 0)
