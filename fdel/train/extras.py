"""Steps that keep more than parameters: moving averages, a reference that follows, running statistics of the losses.

Each wraps a step. What `update` skips leaves no trace in them.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fdel.ops.contraction import widen
from fdel.train.given import Given
from fdel.train.steps import Batch, Metrics, Params, Step, TrainState, extra, join, split, unless_skipped, with_extra


def carry(step: Step, name: str, fold: Callable[[Any, Metrics], Any]) -> Step:
    """Set extra[name] to `fold(extra[name], metrics)` after each step: a running mean of what losses report.

    With `reads=(name,)` the next loss sees it.
    """
    return _kept(step, name, lambda old, new, metrics: fold(old, metrics))


def ema(step: Step, decay: float) -> Step:
    """Keep extra["ema"], the exponential moving average decay * ema + (1 - decay) * params, in its own dtype.

    Start it as `init_state(params, optimizer, ema=params)`, in float32: bfloat16 drops relative changes below 2^-9.
    """
    return _kept(step, "ema", lambda old, new, metrics: _towards(old, new.params, 1 - decay))


def _kept(step: Step, name: str, fold: Callable[[Any, TrainState, Metrics], Any]) -> Step:
    """Set extra[name] to `fold(extra[name], new state, metrics)` after each step that is not skipped."""

    def wrapped(state: TrainState, batch: Batch, /, **given: Any) -> tuple[TrainState, Metrics]:
        new, metrics = step(state, batch, **given)
        old = extra(new, name)
        return with_extra(new, **{name: unless_skipped(metrics, fold(old, new, metrics), old)}), metrics

    return wrapped


def sync_reference(step: Step, alpha: float = 0.6, every: int = 512) -> Step:
    """Move extra["reference"] to alpha * params + (1 - alpha) * reference after every `every` steps (TR-DPO).

    arXiv:2404.09656; TRL's `sync_ref_model`. The loss takes it with `reads=("reference",)`.
    """

    def syncing(state: TrainState, batch: Batch, /, **given: Any) -> tuple[TrainState, Metrics]:
        new, metrics = step(state, batch, **given)
        move = lambda reference: _towards(reference, new.params, alpha)
        due = (new.step % every == 0) & (metrics.get("skipped", 0) == 0)
        reference = jax.lax.cond(due, move, lambda x: x, extra(new, "reference"))
        return with_extra(new, reference=reference), metrics

    return syncing


def _towards(old: Params, new: Params, weight: float) -> Params:
    return jax.tree.map(lambda a, b: (widen(a) + weight * (widen(b) - widen(a))).astype(a.dtype), old, new)


def minibatches(
    step: Step,
    parts: int,
    *,
    times: int = 1,
    first: Callable[[Params, Batch, Given], Batch] | None = None,
    then: Callable[[Batch], Batch] | None = None,
    chunks: int = 1,
) -> Step:
    """Learn a batch in `parts` steps, one after the other, `times` over, as one step; metrics are means over all of them.

    `first(params, batch, given)` gives columns that are computed once, before the first of them, and join the batch: the
    log-probabilities that ratios begin with (`losses.token_logps`); in `chunks` of the rows, one after the other. `then`
    changes the whole batch after that, as where numbers are scaled over all of its tokens.
    ValueError if `parts` or `chunks` do not divide the rows. `state.step` counts the inner steps.
    >>> step = train.minibatches(train.update(gradients, optimizer), 2, times=3)
    >>> int(step(train.init_state(weights, optimizer), {"tokens": tokens})[0].step)
    6
    """
    if parts == times == 1 and first is None and then is None:
        return step

    def learn(state: TrainState, batch: Batch, /, **given: Any) -> tuple[TrainState, Metrics]:
        if first is not None:
            rows = len(jax.tree.leaves(batch)[0])
            new = jax.lax.map(lambda part: first(state.params, part, given), split(batch, chunks))
            batch = {**batch, **join(new, rows)}
        batch = batch if then is None else then(batch)
        every = split(batch, parts)

        def one(state: TrainState, i: jax.Array) -> tuple[TrainState, Metrics]:
            return step(state, jax.tree.map(lambda x: x[i], every), **given)

        state, metrics = jax.lax.scan(one, state, jnp.tile(jnp.arange(parts), times))
        return state, jax.tree.map(lambda x: x.mean(0), metrics)

    return learn
