"""Routers: which experts a token goes to, and with what weights."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int


def route_softmax(
    logits: Float[Array, "... E"], k: int, *, normalize: bool, groups: int = 1, topk_groups: int = 1
) -> tuple[Float[Array, "... k"], Int[Array, "... k"]]:
    """Choose the k experts of the greatest probability softmax(logits): float32 weights and expert indices.

    `normalize` divides the k probabilities by their sum (arXiv:2401.04088, where it is a softmax over the k logits). Of
    several `groups` of experts the `topk_groups` with the most probable expert remain (arXiv:2405.04434, section 2.1.2).
    >>> ops.route_softmax(jnp.array([0.0, 9.0, 9.0]), 2, normalize=True)
    (Array([0.5, 0.5], dtype=float32), Array([1, 2], dtype=int32))
    """
    logits = checkpoint_name(logits.astype(jnp.float32), "moe_router_logits")
    probability = choice = jax.nn.softmax(logits)
    if groups > 1:
        choice = _limited(probability, k, groups, topk_groups, lambda group: group.max(-1))
    _, experts = lax.top_k(choice, k)
    weights = jnp.take_along_axis(probability, experts, -1)
    return weights / weights.sum(-1, keepdims=True) if normalize else weights, experts


def route_sigmoid(
    logits: Float[Array, "... E"], k: int, *, bias: Float[Array, " E"], groups: int, topk_groups: int, scale: float,
    normalize: bool,
) -> tuple[Float[Array, "... k"], Int[Array, "... k"]]:  # fmt: skip
    """Choose k experts out of the best groups by sigmoid(logits) + bias: float32 weights and expert indices.

    The experts form `groups` equal groups in order; the `topk_groups` groups with the greatest sum of their two best
    experts remain (arXiv:2412.19437, section 2.1.2). Weights are scale * sigmoid(logits), without the bias;
    `normalize` divides them by their sum first. Sizes that do not fit are a ValueError.
    >>> best = dict(groups=2, topk_groups=1, scale=1.0, normalize=True)
    >>> ops.route_sigmoid(jnp.zeros(4), 2, bias=jnp.array([0.0, 0.0, 0.1, 0.0]), **best)
    (Array([0.5, 0.5], dtype=float32), Array([2, 3], dtype=int32))
    """
    scores = jax.nn.sigmoid(checkpoint_name(logits.astype(jnp.float32), "moe_router_logits"))
    choice = scores + bias.astype(jnp.float32)
    choice = _limited(choice, k, groups, topk_groups, lambda group: lax.top_k(group, 2)[0].sum(-1))
    _, chosen = lax.top_k(choice, k)
    weights = jnp.take_along_axis(scores, chosen, -1)
    if normalize:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return weights * scale, chosen


def route_sparsemixer(
    logits: Float[Array, "... E"], k: int, *, band: float
) -> tuple[Float[Array, "... k"], Int[Array, "... k"]]:
    """Choose the k greatest logits one after the other (arXiv:2409.12136): float32 weights and expert indices.

    The weight of each is its share of a softmax over those not chosen before it that are nearly as great: whose distance
    is at most 2 * band * max(|logit|, greatest). Choice is greedy in training too, and gradients are those of the softmax.
    >>> ops.route_sparsemixer(jnp.array([0.0, 9.0, 9.0]), 2, band=0.1)
    (Array([0.5, 1. ], dtype=float32), Array([1, 2], dtype=int32))
    """
    logits = checkpoint_name(logits.astype(jnp.float32), "moe_router_logits")
    left, weights, experts = logits, [], []
    for _ in range(k):
        best = lax.stop_gradient(left.max(-1, keepdims=True))
        chosen = left.argmax(-1, keepdims=True)
        near = (best - logits) <= 2 * band * jnp.maximum(jnp.abs(logits), best)
        weights.append(jnp.take_along_axis(jax.nn.softmax(jnp.where(near, left, -jnp.inf)), chosen, -1))
        experts.append(chosen)
        left = jnp.where(jnp.arange(logits.shape[-1]) == chosen, -jnp.inf, left)
    return jnp.concatenate(weights, -1), jnp.concatenate(experts, -1)


def _limited(choice: Array, k: int, groups: int, topk_groups: int, best: Callable[[Array], Array]) -> Array:
    """Leave the experts [... E] of the `topk_groups` groups with the greatest best(group); -inf for the others."""
    *batch, experts = choice.shape
    size = experts // groups
    if experts % groups or size < 2 or not k <= topk_groups * size <= experts:
        raise ValueError(
            f"cannot choose {k} of {experts} experts from {topk_groups} of {groups} groups; expected equal groups "
            "of at least 2 experts, and at least k experts in the groups that remain"
        )
    parts = choice.reshape(*batch, groups, size)
    _, chosen = lax.top_k(best(parts), topk_groups)
    kept = (chosen[..., None] == jnp.arange(groups)).any(-2)
    return jnp.where(kept[..., None], parts, -jnp.inf).reshape(choice.shape)
