"""A training step as composed functions, jitted once by the caller.

    g = grads(loss)                    # loss(params, batch) -> (sum, {"weight": tokens, ...}): sums, never means
    g = accumulate(g, 4)               # the same sums, a quarter of the batch at a time
    g = normalize(g)                   # one division, by the whole batch's weight
    step = update(g, optimizer)        # (TrainState, batch) -> (TrainState, metrics)
    step = skip_nonfinite(step)        # optional
    step = jax.jit(step, donate_argnums=0)

A gradient function `g` maps (params, batch) to (gradients, sums). Whatever follows the batch is passed on to the loss,
neither differentiated nor split nor donated: frozen weights, a reference model. To train a part of the tree, make it
`params` and join it with the rest in the loss:

    g = grads(lambda adapters, batch, base: loss(join(adapters, base), batch))
    state, metrics = step(state, batch, base)

A sum is a scalar, or a pair (sum, count) if its denominator is not the weight.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int

Params = Any
Batch = Any
Sums = dict[str, Any]
Metrics = dict[str, Array]
Loss = Callable[..., tuple[Array, Sums]]
GradFn = Callable[..., tuple[Params, Sums]]
Step = Callable[..., tuple["TrainState", Metrics]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """All that a step changes. Randomness is `fold_in(seed, step)`, so that resuming needs no key."""

    step: Int[Array, ""]
    params: Params
    opt_state: Any


def init_state(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    """Start training `params` at step 0. Pure: jit it with the parameters' shardings to make sharded moments."""
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))


def grads(loss: Loss) -> GradFn:
    """Differentiate a summed loss in its first argument: (gradients of the sum, sums with "loss")."""

    def g(params: Params, batch: Batch, *fixed: Any) -> tuple[Params, Sums]:
        (total, sums), grad = jax.value_and_grad(loss, has_aux=True)(params, batch, *fixed)
        if "weight" not in sums:
            raise ValueError(f"the loss returned the sums {sorted(sums)}; expected one named 'weight' to divide by")
        return grad, {"loss": total, **sums}

    return g


def accumulate(g: GradFn, n: int) -> GradFn:
    """Compute gradients and sums over n microbatches, one after the other, and add them up in float32.

    Every array of the batch has the rows in front; ValueError if n does not divide them.
    """
    if n == 1:
        return g

    def split(x: Array) -> Array:
        if x.ndim == 0 or x.shape[0] % n:
            raise ValueError(f"a batch array of shape {x.shape} has no rows to divide into {n} microbatches")
        # Each device keeps its rows. Consecutive rows per microbatch would move the whole batch between devices.
        return x.reshape(x.shape[0] // n, n, *x.shape[1:]).swapaxes(0, 1)

    def accumulated(params: Params, batch: Batch, *fixed: Any) -> tuple[Params, Sums]:
        micro = jax.tree.map(split, batch)
        one = lambda b: jax.tree.map(_widen, g(params, b, *fixed))
        zero = jax.eval_shape(lambda m: one(jax.tree.map(lambda x: x[0], m)), micro)
        zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), zero)
        return jax.lax.scan(lambda acc, b: (jax.tree.map(jnp.add, acc, one(b)), None), zero, micro)[0]

    return accumulated


def _widen(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32)) if jnp.issubdtype(x.dtype, jnp.floating) else x


def normalize(g: GradFn) -> GradFn:
    """Divide gradients and sums by the weight, pairs (sum, count) by their count; "weight" stays as it is.

    Must follow `accumulate`: the mean of microbatch means is another number when their weights differ.
    """

    def normalized(params: Params, batch: Batch, *fixed: Any) -> tuple[Params, Metrics]:
        grad, sums = g(params, batch, *fixed)
        ratio = lambda x, w: _widen(x) / jnp.where(w > 0, w, 1)
        weight = sums["weight"]
        metrics = {k: ratio(*v) if isinstance(v, tuple) else ratio(v, weight) for k, v in sums.items()}
        return jax.tree.map(lambda x: ratio(x, weight), grad), metrics | {"weight": weight}

    return normalized


def update(g: GradFn, optimizer: optax.GradientTransformation) -> Step:
    """Apply one optimizer step; metrics are those of `g` and "grad_norm", the norm before clipping."""

    def step(state: TrainState, batch: Batch, *fixed: Any) -> tuple[TrainState, Metrics]:
        grad, metrics = g(state.params, batch, *fixed)
        updates, opt_state = optimizer.update(grad, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(state.step + 1, params, opt_state), metrics | {"grad_norm": optax.tree.norm(grad)}

    return step


def skip_nonfinite(step: Step) -> Step:
    """Keep parameters and optimizer state where the loss or the gradient norm is not finite; "skipped" is then 1.

    The step still counts, so that its data and randomness are not tried again.
    """

    def guarded(state: TrainState, batch: Batch, *fixed: Any) -> tuple[TrainState, Metrics]:
        new, metrics = step(state, batch, *fixed)
        fine = jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["grad_norm"])
        kept = jax.tree.map(lambda a, b: jnp.where(fine, a, b), new, dataclasses.replace(state, step=new.step))
        return kept, metrics | {"skipped": 1.0 - fine}

    return guarded
