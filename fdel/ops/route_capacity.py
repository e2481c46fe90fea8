"""Routers with a capacity, and what keeps routers in balance. Index -1 is no expert: `ops.moe` adds nothing for it."""

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from fdel.ops.batch import Batch, Packed, register
from fdel.ops.carry import Carry, RouterLoad, choices


def expert_capacity(tokens: int, experts: int, factor: float, k: int = 1) -> int:
    """Count the tokens that an expert takes at most: ceil(factor k tokens / experts) (arXiv:2101.03961, equation 3).

    >>> ops.expert_capacity(100, 8, 1.25)
    16
    """
    return math.ceil(round(factor * k * tokens / experts, 9))  # 1.1 * 100 / 10 is 11, and a little more in floats


def route_switch(
    logits: Float[Array, "... T E"], capacity: int | None = None
) -> tuple[Float[Array, "... T 1"], Int[Array, "... T 1"]]:
    """Choose the most probable expert, its probability as the weight (arXiv:2101.03961, section 2.1): float32, indices.

    With `capacity` an expert takes the first so many tokens of each row of T; those that come later are dropped: weight 0,
    index -1. For jitter see `router_jitter`, for sizes `expert_capacity`. A token depends on earlier ones alone.
    >>> ops.route_switch(jnp.array([[0.0, 9.0], [0.0, 9.0], [9.0, 0.0]]), 1)[1][:, 0]
    Array([ 1, -1,  0], dtype=int32)
    """
    if capacity is not None and capacity < 1:
        raise ValueError(f"capacity {capacity}: an expert takes 1 token of a row at least; see expert_capacity")
    probability = jax.nn.softmax(checkpoint_name(logits.astype(jnp.float32), "moe_router_logits"))
    weights, experts = lax.top_k(probability, 1)
    if capacity is None:
        return weights, experts
    chosen = experts == jnp.arange(logits.shape[-1])
    kept = (chosen.cumsum(-2) * chosen).sum(-1, keepdims=True) <= capacity
    return jnp.where(kept, weights, 0), jnp.where(kept, experts, -1)


def route_expert_choice(
    logits: Float[Array, "... T E"], capacity: int
) -> tuple[Float[Array, "... T E"], Int[Array, "... T E"]]:
    """Let each expert choose its `capacity` tokens of each row of T by softmax(logits) over experts (arXiv:2202.09368).

    Float32 weights and expert indices in descending order of weight; -1 and 0 where a token has fewer than E experts, maybe
    none. Later tokens decide about earlier ones: it is for models that see whole sequences, and wrong for generation.
    ValueError if there are fewer tokens than `capacity`.
    >>> ops.route_expert_choice(jnp.array([[0.0, 0.0], [2.0, 0.0], [0.0, 2.0]]), 1)[1].tolist()
    [[-1, -1], [0, -1], [1, -1]]
    """
    if not 0 < capacity <= logits.shape[-2]:
        raise ValueError(
            f"route_expert_choice: capacity {capacity} of {logits.shape[-2]} tokens; expected 1 to as many"
        )
    probability = jax.nn.softmax(checkpoint_name(logits.astype(jnp.float32), "moe_router_logits"))
    by_expert = probability.swapaxes(-1, -2)
    _, tokens = lax.top_k(by_expert, capacity)  # [... E C]
    chosen = (tokens[..., None] == jnp.arange(logits.shape[-2])).any(-2).swapaxes(-1, -2)
    weights, experts = lax.top_k(jnp.where(chosen, probability, 0), logits.shape[-1])
    taken = jnp.take_along_axis(chosen, experts, -1)
    return jnp.where(taken, weights, 0), jnp.where(taken, experts, -1)


def router_jitter(x: Float[Array, "... D"], key: Array, amount: float) -> Float[Array, "... D"]:
    """Multiply what a router reads with noise, uniform from 1 - amount to 1 + amount (arXiv:2101.03961, section 2.2)."""
    return x * jax.random.uniform(key, x.shape, jnp.float32, 1 - amount, 1 + amount).astype(x.dtype)


def jittered(h: Float[Array, "... D"], carry: Carry) -> tuple[Float[Array, "... D"], Carry]:
    """Give what a router reads in this call: h with `router_jitter`, if the batch's `Routing` asks for it, else h.

    Each row and each router of the model have a key of their own.
    """
    r = carry.routing
    if r is None or r.keys is None:
        return h, carry
    before = jnp.int32(0) if r.routers is None else r.routers
    own = lambda data: jax.random.fold_in(jax.random.wrap_key_data(data), before)
    noisy = jax.vmap(lambda data, x: router_jitter(x, own(data), r.jitter))(r.keys, h)
    return noisy, replace(carry, routing=replace(r, routers=before + 1))


def limited(batch: Batch, carry: Carry, experts: Int[Array, "... k"], n: int) -> tuple[Int[Array, "... k"], Carry]:
    """Drop choices of n experts that are full, if the batch's `Routing` says when: index -1, which adds nothing in `moe`.

    An expert takes the first `expert_capacity` tokens that chose it, first, second or k-th, of each row; the row's tokens
    are counted without padding. So microbatches and devices, which divide rows, change nothing. For k = 1 that is the
    rule of `route_switch`. Drops are added to the `RouterLoad` that is watched.
    """
    r = carry.routing
    if r is None or r.capacity is None or not isinstance(batch, Packed):
        return experts, carry
    real, (*_, t, k) = batch.segment_ids >= 0, experts.shape
    most = np.array([expert_capacity(tokens, n, r.capacity, k) for tokens in range(t + 1)], np.int32)
    chosen = (experts[..., None] == jnp.arange(n)).any(-2) & real[..., None]
    place = jnp.take_along_axis(chosen.cumsum(-2), jnp.maximum(experts, 0), -1)
    over = (place > jnp.asarray(most)[real.sum(-1)][:, None, None]) & (experts >= 0)
    load = carry.taps and carry.taps.router
    if load and load.dropped is not None:
        lost = (over & real[..., None]).sum(dtype=jnp.float32)
        carry = carry.watch(router=replace(load, dropped=load.dropped + lost))
    return jnp.where(over, -1, experts), carry


def router_z_loss(logits: Float[Array, "... E"], real: Bool[Array, "..."] | None = None) -> Float[Array, ""]:
    """Compute the mean of logsumexp(logits)^2 over tokens, those that are `real` (ST-MoE, arXiv:2202.08906, equation 5).

    >>> ops.router_z_loss(jnp.zeros((3, 1)))
    Array(0., dtype=float32)
    """
    squares = jax.nn.logsumexp(logits.astype(jnp.float32), -1) ** 2
    real = jnp.ones(squares.shape) if real is None else real.astype(jnp.float32)
    return (squares * real).sum() / jnp.maximum(real.sum(), 1)


def update_router_bias(
    bias: Float[Array, "... E"], chosen: Float[Array, "... E"], rate: float = 1e-3
) -> Float[Array, "... E"]:
    """Move a selection bias against the load: bias + rate sign(mean(chosen) - chosen) (arXiv:2408.15664, algorithm 1).

    `chosen` counts the tokens of a step that chose each expert, of one layer or of each. The bias is that of
    `route_sigmoid`, which no gradient reaches: call this after the optimizer. No auxiliary loss is needed then.
    >>> ops.update_router_bias(jnp.zeros(3), jnp.array([5.0, 1.0, 3.0]), 0.5)
    Array([-0.5,  0.5,  0. ], dtype=float32)
    """
    excess = chosen.sum(-1, keepdims=True) - chosen * chosen.shape[-1]  # E times the mean's: integers, which are exact
    return bias + jnp.asarray(rate, bias.dtype) * jnp.sign(excess).astype(bias.dtype)


@register
@dataclass(frozen=True)
class Tallied:
    """A selection bias whose gradient counts how often each expert was chosen, padding not, whatever the loss is.

    So counts of all microbatches and devices add up as gradients do, for each layer by itself. A bias of selection has no
    other gradient. `sublayers.sigmoid_experts` reads it in Packed calls (`tally`).
    """

    bias: Float[Array, "... E"]


def tally(
    batch: Batch, weights: Float[Array, "... k"], experts: Int[Array, "... k"], bias: Tallied | Float[Array, " E"]
) -> Float[Array, "... k"]:
    """Give the weights of chosen experts as they are; the gradient in a `Tallied` bias is how often each was chosen."""
    if not (isinstance(bias, Tallied) and isinstance(batch, Packed)):
        return weights
    return _tallied(weights, bias.bias, choices(batch, experts, bias.bias.shape[-1]).astype(bias.bias.dtype))


@jax.custom_vjp
def _tallied(weights: Array, bias: Array, counts: Array) -> Array:
    return weights


_tallied.defvjp(
    lambda weights, bias, counts: (weights, counts), lambda counts, ct: (ct, counts, jnp.zeros_like(counts))
)


def router_metrics(load: RouterLoad, k: int) -> dict[str, Float[Array, ""]]:
    """Say how a router that chooses k experts spreads its tokens, for a metrics file.

    "dropped": the share of choices that no expert took, for want of capacity. "busiest": the load of the busiest expert,
    1 where all have as much.
    >>> load = ops.RouterLoad(jnp.array([3.0, 1.0]), jnp.array([2.0, 2.0]), jnp.array(5.0), jnp.array(0.0))
    >>> {name: round(float(x), 2) for name, x in ops.router_metrics(load, 1).items()}
    {'dropped': 0.2, 'busiest': 1.5}
    """
    taken = load.chosen.sum() - (0 if load.dropped is None else load.dropped)
    return {
        "dropped": 1 - taken / jnp.maximum(load.tokens * k, 1),
        "busiest": load.chosen.max() * load.chosen.size / jnp.maximum(load.chosen.sum(), 1),
    }
