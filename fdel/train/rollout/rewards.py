"""Rewards of samples: functions are called side by side, and one that raises or hangs fails its samples, never the run."""

import inspect
import logging
import math
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

import numpy as np

from fdel.train.rollout.advantages import weighted_sum
from fdel.train.rollout.aside import aside
from fdel.train.rollout.records import Rewards, Sample

log = logging.getLogger(__name__)

# f(prompts=, completions=, completion_ids=, **columns), each a list of B, gives B numbers, None where it abstains.
Reward = Callable[..., Any]
ENVIRONMENT = "environment"  # what the environment's own reward is called


def score(
    functions: Mapping[str, Reward],
    samples: Sequence[Sample],
    decode: Callable[[Sequence[int]], str] = lambda ids: " ".join(map(str, ids)),
    *,
    weights: Sequence[float] | None = None,
    timeout: float = 60.0,
    most_failed: float = 0.5,
) -> Rewards:
    """Ask every function, sync or async, at the same time and in a thread of its own, about all samples.

    Functions are called as TRL calls them: prompts as their rows have them (text, or messages, of which completions are
    then too), completions as `decode` gives them, completion_ids, and every other column of the rows. None and NaN
    abstain. A function that raises, returns another number of rewards, or an infinite one, or is not done after `timeout`
    seconds, fails: its samples have no reward of it, and are counted. A thread that hangs goes on to do so. Rewards of
    environments are one more function, of weight 1; samples that ended with an error have no reward at all.

    RuntimeError if more than `most_failed` of a function's samples failed: then something is wrong with it.
    """
    if weights is not None and len(weights) != len(functions):
        raise ValueError(f"{len(weights)} weights for {len(functions)} reward functions; expected one for each")
    told = arguments(samples, decode)
    calls = {name: aside(_numbers, f, {k: list(v) for k, v in told.items()}) for name, f in functions.items()}
    end = time.monotonic() + timeout
    each, failed = [np.full(len(samples), np.nan) for _ in calls], dict.fromkeys(calls, 0)
    for row, (name, call) in zip(each, calls.items(), strict=True):
        error, cause = _read(row, call, end, timeout)
        if error is not None:
            failed[name] = len(samples) if np.isnan(row).all() else int(np.isinf(row).sum())
            row[np.isinf(row)] = np.nan
            log.warning("reward function %s failed for %d samples: %s", name, failed[name], error)
            if failed[name] > most_failed * len(samples):
                raise RuntimeError(
                    f"reward function {name} failed for {failed[name]} of {len(samples)} samples: {error}"
                ) from cause
    names, weights = tuple(calls), [1.0] * len(calls) if weights is None else list(weights)
    if any(s.reward is not None for s in samples):
        each.append(np.array([np.nan if s.reward is None else s.reward for s in samples]))
        names, weights = (*names, ENVIRONMENT), [*weights, 1.0]
    if not each:
        raise ValueError("there is no reward function, and no environment gave a reward; give a function")
    every = np.stack(each)
    every[:, [s.finish == "error" for s in samples]] = np.nan
    return Rewards(every, weighted_sum(every, np.array(weights)), names, failed)


def arguments(samples: Sequence[Sample], decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
    """Give what functions are called with: lists of B."""
    rows = [s.task.row for s in samples]
    prompts = [row["prompt"] if "prompt" in row else decode(s.prompt) for row, s in zip(rows, samples, strict=True)]
    texts = [decode(s.completion) for s in samples]
    said = [
        [{"role": "assistant", "content": x}] if isinstance(p, list) else x for x, p in zip(texts, prompts, strict=True)
    ]
    columns = {name: [row.get(name) for row in rows] for name in sorted({k for row in rows for k in row})}
    own = {"prompts": prompts, "completions": said, "completion_ids": [s.completion for s in samples]}
    return {k: v for k, v in columns.items() if k not in ("prompt", *own)} | own


def _numbers(f: Reward, told: dict[str, Any]) -> Any:
    """Call a function, in its thread: what it gives may be computed only when it is read."""
    given = f(**told)
    return _awaited(given) if inspect.isawaitable(given) else _floats(given)


async def _awaited(given: Any) -> list[float]:
    return _floats(await given)


def _floats(given: Iterable[Any]) -> list[float]:
    return [math.nan if x is None else float(x) for x in given]


def _read(row: np.ndarray, call: Future, end: float, timeout: float) -> tuple[str | None, BaseException | None]:
    """Write what a function gave into its row, NaN for nothing; say what is wrong with it, and what it raised."""
    if not wait([call], max(0.0, end - time.monotonic())).done:
        return f"it took more than {timeout:g} s", None
    if (e := call.exception()) is not None:
        return traceback.format_exception_only(e)[-1].strip(), e
    if len(values := call.result()) != len(row):
        return f"it gave {len(values)} rewards for {len(row)} samples", None
    row[:] = values
    return ("a reward is infinite" if np.isinf(row).any() else None), None
