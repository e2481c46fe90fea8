"""Evaluation: means over a whole data set, exact by weight, and what a model says of each of its examples."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from fdel.train import extremes
from fdel.train.data import Data, in_order, with_columns
from fdel.train.given import NOTHING, Batch, Given, Loss, collect
from fdel.train.metrics import Row
from fdel.train.steps import TrainState, extra


def place(batch: Batch, sharding: Any) -> Batch:
    """Put this process's rows of a batch on the devices; None leaves them to the step."""
    if sharding is None:
        return batch
    if jax.process_count() == 1:
        return jax.device_put(batch, sharding)
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x), batch)


def evaluator(
    loss: Loss,
    data: Iterable[Batch],
    *,
    given: Given = NOTHING,
    reads: Sequence[str] = (),
    seed: int = 0,
    sharding: Any = None,
) -> Callable[[TrainState], Row]:
    """Make an `evaluate` for `fit`: a loss's means over all of `data`, as "eval_loss" and so on.

    `loss(params, batch, given) -> (sum, sums)`, jitted by the caller, as in `steps`: a sum counts by the weight, a pair
    (sum, count) by its count. Sums of all batches are added up before the one division, so that batches of different
    weight count as they should. No batch, or no weight, is a ValueError.

    A loss is given what it is in a step: the state's counter, `reads` and `given`. Its key is folded from `seed` and the
    number of the batch alone: all evaluations of a run draw the same noise, so that their numbers compare. A loss with
    dropout is to be built without, for evaluation.
    """

    def evaluate(state: TrainState) -> Row:
        totals: dict[str, list[tuple[float, float]]] = {}
        ends: dict[str, list[extremes.Extreme]] = {}

        def add(total: Any, sums: Any) -> None:
            sums = jax.device_get({"loss": total, **sums})
            weight = sums.pop("weight")
            for name, value in sums.items():
                if isinstance(value, extremes.Extreme):
                    ends.setdefault(name, []).append(value)
                    continue
                pair = value if isinstance(value, tuple) else (value, weight)
                totals.setdefault(name, []).append((float(pair[0]), float(pair[1])))

        unread, extras = None, {name: extra(state, name) for name in reads}
        for number, batch in enumerate(data):
            known = collect(state.step, jax.random.fold_in(jax.random.key(seed), number), extras, given)
            result = loss(state.params, place(batch, sharding), known)
            if unread is not None:
                add(*unread)  # the batch before: the device is busy with this one meanwhile
            unread = result
        if unread is None:
            raise ValueError("the evaluation data has no batch; give it one, or leave out eval_every")
        add(*unread)
        found = {name: _mean(name, pairs) for name, pairs in totals.items()}
        return {f"eval_{k}": x for k, x in (found | {k: extremes.last(v) for k, v in ends.items()}).items()}

    return evaluate


def _mean(name: str, pairs: list[tuple[float, float]]) -> float:
    count = math.fsum(c for _, c in pairs)
    if not count and name == "loss":
        raise ValueError("the evaluation data has no token that counts; look at its masks")
    return math.fsum(s for s, _ in pairs) / (count or 1.0)


def per_example(f: Callable[[Batch], jax.Array], data: Data, rows: int, sharding: Any = None) -> np.ndarray:
    """Collect f(batch) [rows ...] of all examples, in the order of `data.in_order`, on every process.

    `f` is jitted by the caller. ValueError for a stream.
    """
    whole = lambda x: np.asarray(multihost_utils.process_allgather(x, tiled=True) if jax.process_count() > 1 else x)
    count = data.examples or 0
    numbered = with_columns(in_order(data, rows), number=np.arange(1, count + 1, dtype=np.int32))
    found: np.ndarray | None = None
    for batch in numbered:
        batch = place(batch, sharding)
        number, values = whole(batch["number"]), whole(f(batch))
        found = np.zeros((count, *values.shape[1:]), values.dtype) if found is None else found
        found[number[number > 0] - 1] = values[number > 0]  # 0 are the rows that fill up the last batch
    if found is None:
        raise ValueError("the data has no example")
    return found


def everywhere(fine: bool) -> bool:
    """Tell whether this holds on every process; all of them call it."""
    return fine if jax.process_count() == 1 else bool(multihost_utils.process_allgather(np.asarray(fine)).all())
