"""Checks inside a jitted step, for `fdel run --debug`: what is out of range or not finite is an error that names its path.

    g = debug.checked(normalize(grads(loss)), cfg.vocab)
    step = debug.jit(update(g, optimizer), donate_argnums=0)

An error is a result of the program (`jax.experimental.checkify`) and raised on the host: a callback that raises on one
device, as `equinox.error_if` does, leaves the others waiting in their next collective until XLA ends the process. Only the
checks go through checkify; a whole step, which is what `chex.chexify` takes, has `shard_map`s that it cannot rewrite.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import checkify
from jaxtyping import Array, Bool

from fdel.params.spec import named_leaves
from fdel.train.given import NOTHING, Batch, Given, Params
from fdel.train.steps import GradFn, Metrics, Step, TrainState

FAULTS = "faults"  # in the metrics on their way from `checked` to `jit`


def checked(g: GradFn, vocab: int) -> GradFn:
    """Check what a normalized gradient function takes and gives; the step must be jitted by `debug.jit`.

    In this order: token ids of the batch, in [0, vocab); the floats of batch, parameters and `given`; then gradients and
    metrics. What overflows in float16 is a fault too, which a step with a loss scale would skip.
    """

    def before(params: Params, batch: Batch, given: Given) -> None:
        for path, x in named_leaves({"batch": batch}):
            if path.rpartition(".")[2] == "tokens":
                expected = f"token ids of 0 .. {vocab - 1}; does the tokenizer fit the model?"
                _check((x >= 0) & (x < vocab), path, expected)
        _check_finite({"batch": batch, "params": params, **given})

    after = lambda grads, metrics: _check_finite({"gradient": grads, "metrics": metrics})

    def h(params: Params, batch: Batch, given: Given = NOTHING) -> tuple[Params, Any]:
        first, _ = checkify.checkify(before)(params, batch, given)
        grads, metrics = g(params, batch, given)
        second, _ = checkify.checkify(after)(grads, metrics)
        return grads, metrics | {FAULTS: (first, second)}

    return h


def jit(step: Step, **options: Any) -> Step:
    """As `jax.jit`, for a step of a `checked` gradient function: its first fault is a `checkify.JaxRuntimeError`.

    Each call waits for its step.
    """
    run = jax.jit(step, **options)

    def raising(state: TrainState, batch: Batch, /, **given: Any) -> tuple[TrainState, Metrics]:
        state, metrics = run(state, batch, **given)
        for fault in metrics.pop(FAULTS):
            fault.throw()
        return state, metrics

    return raising


def _check_finite(tree: Any) -> None:
    for path, x in named_leaves(tree):
        if jnp.issubdtype(x.dtype, jnp.floating):
            _check(jnp.isfinite(x), path, f"finite {x.dtype}{list(x.shape)}")


def _check(good: Bool[Array, "..."], path: str, expected: str) -> None:
    bad, size = (~good).sum(), jnp.int32(good.size)
    checkify.check(bad == 0, f"{path}: {{bad}} of {{size}} are bad; expected {expected}", bad=bad, size=size)
