"""A training step as composed functions, jitted once by the caller.

    g = grads(loss)                    # loss(params, batch, given) -> (sum, {"weight": tokens, ...}): sums, never means
    g = accumulate(g, 4)               # the same sums, a quarter of the batch at a time
    g = normalize(g)                   # one division, by the whole batch's weight
    step = update(g, optimizer)        # (TrainState, batch, **given) -> (TrainState, metrics)
    step = jax.jit(step, donate_argnums=0)     # on CPU, compiler_options=compiler_options() makes it faster

A gradient function `g` maps (params, batch, given) to (gradients, sums). `given` names what else a loss needs, see
`train.given`: always the step and a key, then frozen weights, a reference, a teacher. To train a part of the tree, make it
`params` and join it with the rest in the loss:

    g = grads(lambda adapters, batch, given: loss(join(adapters, given["base"]), batch, given))
    state, metrics = step(state, batch, base=base)

A sum is a scalar, or a pair (sum, count) if its denominator is not the weight; an `extremes.Extreme` among them is a
largest or smallest number. A loss that couples the rows of a batch (by
a sort, a mean, negatives) comes in two parts, and `gradcache(outputs, objective, n)` takes the place of `accumulate` and
`grads`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int

from fdel.ops.contraction import widen
from fdel.ops.platform import target
from fdel.ops.shard import require_mesh
from fdel.train import extremes
from fdel.train.given import NOTHING, Batch, Given, Loss, Params, Sums, check_signature, collect, fold

Metrics = dict[str, Array]
GradFn = Callable[..., tuple[Params, Sums]]  # of (params, batch, given)
Step = Callable[..., tuple["TrainState", Metrics]]


def compiler_options() -> dict[str, Any]:
    """Give options for the `jax.jit` of a step: on CPU vectors of 512 bits, where the processor has them; XLA takes 256."""
    return {"xla_cpu_prefer_vector_width": 512} if target() == "cpu" else {}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """All that a step changes. Randomness is `fold_in(seed, step)`, so that resuming needs no key.

    `extra` holds what transforms of the step keep: "ema" or "reference" parameters, a loss scale, running statistics.
    """

    step: Int[Array, ""]
    params: Params
    opt_state: Any
    extra: dict[str, Any] = field(default_factory=dict)


def init_state(params: Params, optimizer: optax.GradientTransformation, **extra: Any) -> TrainState:
    """Start training `params` at step 0, with named extras, as in `init_state(params, optimizer, ema=params)`.

    Extras are copied: a donated state must not hold a buffer twice. On a mesh, jit it with the out_shardings of
    `parallel.state_shardings`: new zeros would be whole on every device.
    >>> int(train.init_state(weights, optimizer).step)
    0
    """
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params), jax.tree.map(jnp.copy, extra))


def with_extra(state: TrainState, **extra: Any) -> TrainState:
    """Replace or add named extras."""
    return dataclasses.replace(state, extra=state.extra | extra)


def grads(loss: Loss) -> GradFn:
    """Differentiate a summed loss in its first argument: (gradients of the sum, sums with "loss").

    Parameters on several devices whose mesh `jax.set_mesh` has not set are a ValueError; a loss of other parameters than
    (params, batch, given) is a TypeError.
    >>> g, sums = train.grads(losses.sft(llama, cfg))(weights, {"tokens": tokens}, {})
    >>> sums["weight"]
    Array(20., dtype=float32)
    """
    check_signature(loss)

    def g(params: Params, batch: Batch, given: Given = NOTHING) -> tuple[Params, Sums]:
        require_mesh(params)
        (total, sums), grad = jax.value_and_grad(loss, has_aux=True)(params, batch, given)
        return grad, _checked(total, sums)

    return g


def _checked(total: Array, sums: Sums) -> Sums:
    if "weight" not in sums:
        raise ValueError(f"the loss returned the sums {sorted(sums)}; expected one named 'weight' to divide by")
    return {"loss": total, **sums}


def accumulate(g: GradFn, n: int) -> GradFn:
    """Compute gradients and sums over n microbatches, one after the other, and add them up in float32.

    Every array of the batch has the rows in front; ValueError if n does not divide them. Each microbatch gets a key of its
    own.
    >>> g, sums = train.accumulate(train.grads(losses.sft(llama, cfg)), 2)(weights, {"tokens": tokens}, {})
    >>> sums["weight"]
    Array(20., dtype=float32)
    """
    if n == 1:
        return g

    def accumulated(params: Params, batch: Batch, given: Given = NOTHING) -> tuple[Params, Sums]:
        return _scan_sum(lambda x: g(params, x[1], fold(given, x[0])), (jnp.arange(n), split(batch, n)))

    return accumulated


def gradcache(outputs: Callable[..., Any], objective: Callable[..., tuple[Array, Sums]], n: int) -> GradFn:
    """Differentiate `objective(outputs(params, batch, given), batch, given) -> (sum, sums)` in n microbatches, exactly.

    `outputs` gives a tree of arrays with the rows in front, row by row from the batch's; `objective` may couple all rows.
    A first pass computes the outputs without gradient, a second one pulls the objective's cotangents back (GradCache,
    arXiv:2101.06983): memory is that of one microbatch and of all outputs, for one more forward pass. Both passes of a
    microbatch get one key, its own; the objective gets the step's.
    """
    check_signature(outputs)
    check_signature(objective, "outputs")
    if n == 1:
        return grads(lambda params, batch, given: objective(outputs(params, batch, given), batch, given))

    def g(params: Params, batch: Batch, given: Given = NOTHING) -> tuple[Params, Sums]:
        require_mesh(params)
        micro = jnp.arange(n), split(batch, n)
        forward = lambda p, x: outputs(p, x[1], fold(given, x[0]))
        first = jax.lax.map(lambda x: forward_of_vjp(lambda p: forward(p, x), params), micro)
        out = join(first, len(jax.tree.leaves(batch)[0]))
        score = jax.value_and_grad(objective, has_aux=True, allow_int=True)
        (total, sums), cotangents = score(out, batch, given)

        def pull(xs: tuple[Any, list[Array]]) -> Params:
            x, ct = xs
            return jax.vjp(lambda p: floating(forward(p, x)), params)[1](ct)[0]

        return _scan_sum(pull, (micro, split(floating(cotangents), n))), _checked(total, sums)

    return g


def floating(tree: Any) -> list[Array]:
    """List the leaves that can have a gradient."""
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]


def forward_of_vjp(f: Callable[[Any], Any], x: Any) -> Any:
    """Compute f(x) as the forward half of its `jax.vjp`.

    Forward-mode differentiation, which is how sophia differentiates gradients, fails for a `jax.custom_vjp` alone.
    """
    return jax.vjp(f, x)[0]


def split(batch: Batch, n: int) -> Batch:
    """Divide the rows of a batch's arrays: [B ...] -> [n B/n ...], every n-th row together."""

    def divide(x: Array) -> Array:
        if x.ndim == 0 or x.shape[0] % n:
            raise ValueError(f"a batch array of shape {x.shape} has no rows to divide into {n} microbatches")
        # Each device keeps its rows. Consecutive rows per microbatch would move the whole batch between devices.
        return x.reshape(x.shape[0] // n, n, *x.shape[1:]).swapaxes(0, 1)

    return jax.tree.map(divide, batch)


def join(micro: Any, rows: int) -> Any:
    """Undo `split`."""

    def joined(x: Array) -> Array:
        if x.ndim < 2 or x.shape[0] * x.shape[1] != rows:
            found = f"outputs of shape {x.shape[1:]} per microbatch"
            raise ValueError(f"{found}; expected {rows // x.shape[0]} rows in front")
        return x.swapaxes(0, 1).reshape(rows, *x.shape[2:])

    return jax.tree.map(joined, micro)


def _scan_sum(f: Callable[[Any], Any], xs: Any) -> Any:
    """Sum f over the leading axis of xs, one item after the other, in float32 or wider."""
    one = lambda x: jax.tree.map(widen, f(x))
    zero = extremes.zero(jax.eval_shape(lambda xs: one(jax.tree.map(lambda x: x[0], xs)), xs))
    return jax.lax.scan(lambda acc, x: (extremes.added(acc, one(x)), None), zero, xs)[0]


def normalize(g: GradFn) -> GradFn:
    """Divide gradients and sums by the weight, pairs (sum, count) by their count; "weight" stays as it is.

    Must follow `accumulate`: the mean of microbatch means is another number when their weights differ.
    >>> g, means = train.normalize(train.grads(losses.sft(llama, cfg)))(weights, {"tokens": tokens}, {})
    >>> means["loss"].round(1)  # about log 32
    Array(3.5, dtype=float32)
    """

    def normalized(params: Params, batch: Batch, given: Given = NOTHING) -> tuple[Params, Metrics]:
        grad, sums = g(params, batch, given)
        ratio = lambda x, w: widen(x) / jnp.where(w > 0, w, 1)
        weight = sums["weight"]
        known = {k: extremes.number(v) for k, v in sums.items() if isinstance(v, extremes.Extreme)}
        means = {k: v if isinstance(v, tuple) else (v, weight) for k, v in sums.items() if k not in known}
        metrics = {k: ratio(*v) for k, v in means.items()} | known
        # Multiplied: a division would be a pass of its own over the gradients.
        share = 1 / jnp.where(weight > 0, weight, 1)
        return jax.tree.map(lambda x: widen(x) * share, grad), metrics | {"weight": weight}

    return normalized


def add(params: Params, updates: Params, step: Int[Array, ""]) -> Params:
    """Add updates to parameters and round to nearest; see `precision.add_stochastic` for bfloat16."""
    return optax.apply_updates(params, updates)


def update(
    g: GradFn,
    optimizer: optax.GradientTransformation,
    *,
    reads: Sequence[str] = (),
    apply: Callable[[Params, Params, Array], Params] = add,
    skip_nonfinite: bool = False,
    seed: int = 0,
) -> Step:
    """Apply one optimizer step; metrics are those of `g` and "grad_norm", the norm before clipping.

    `step(state, batch, **given)` gives the loss its keywords, the extras named in `reads`, "step" and "key", which is
    `fold_in(key(seed), step)`; see `train.given`. A name given twice, or an extra that the state lacks, is a ValueError.
    `apply` adds the updates. Optimizers that look at other points (sophia) get the gradient function, as `grad_fn(params)`.

    `skip_nonfinite`: where the loss or the gradient norm is not finite, parameters and optimizer state stay as they are,
    and so does what the wrappers of `extras` keep; the metric "skipped" is then 1, else 0. The step still counts, so that
    its data and randomness are not tried again.
    >>> step = jax.jit(train.update(gradients, optimizer))
    >>> state, metrics = step(train.init_state(weights, optimizer), {"tokens": tokens})
    >>> int(state.step)
    1
    """
    optimizer = optax.with_extra_args_support(optimizer)

    def step(state: TrainState, batch: Batch, /, **given: Any) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        known = collect(state.step, key, {name: extra(state, name) for name in reads}, given)
        grad, metrics = g(state.params, batch, known)
        metrics = metrics | {"grad_norm": optax.tree.norm(grad)}
        at = lambda params: g(params, batch, known)[0]

        def move(params: Params, opt_state: Any) -> tuple[Params, Any]:
            updates, opt_state = optimizer.update(grad, opt_state, params, grad_fn=at)
            return apply(params, updates, state.step), opt_state

        kept = state.params, state.opt_state
        if skip_nonfinite:
            fine = jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["grad_norm"])
            metrics["skipped"] = 1.0 - fine
            # Not a choice between old and new arrays afterwards: XLA would copy the old ones.
            params, opt_state = jax.lax.cond(fine, move, lambda *kept: kept, *kept)
        else:
            params, opt_state = move(*kept)
        return dataclasses.replace(state, step=state.step + 1, params=params, opt_state=opt_state), metrics

    return step


def unless_skipped(metrics: Metrics, new: Any, old: Any) -> Any:
    """Choose the old tree where `update` has skipped the step."""
    return jax.tree.map(lambda a, b: jnp.where(metrics["skipped"] > 0, b, a), new, old) if "skipped" in metrics else new


def extra(state: TrainState, name: str) -> Any:
    """Look up a named extra; ValueError if the state has none of that name."""
    if name not in state.extra:
        found = sorted(state.extra)
        raise ValueError(f"the state's extras are {found}; add it: init_state(params, optimizer, {name}=...)")
    return state.extra[name]
