"""What `fit` draws batches of own samples from: the newest weights go to the engine, which answers the next tasks."""

import base64
import binascii
import io
import time
import zipfile
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np

from fdel.ops.batch import Media, Packed, Patches, Sounds
from fdel.train.losses.self_distillation import TOLD
from fdel.train.metrics import Row
from fdel.train.rollout.aside import aside
from fdel.train.rollout.records import Task
from fdel.train.steps import TrainState

# What a checkpoint keeps of `ops.Packed`, of `ops.Media` and of its inputs.
KEPT = {"packed": ("positions", "segment_ids", "prefix_ids"), "media": ("index",), "Patches": ("values", "places"),
        "Sounds": ("features", "lengths")}  # fmt: skip

Batch = dict[str, Any]
Learn = Callable[[Sequence[Task]], tuple[Batch, Row]]


class Drawn(NamedTuple):
    """A batch that was sampled and is not learnt: its numbers, and how many updates its weights had seen."""

    batch: Batch
    row: Row
    version: int


class Source:
    """The data of `fit`: batches of samples, each drawn by the weights of `ahead` steps before it is learnt.

    `publish(state)` gives the engine the state's weights. `sample(tasks)` draws samples for them, and makes the batch of a
    step and its metrics. With ahead=0, a step's batch is drawn by the very weights that it changes. With more, the next
    batches are sampled in a thread meanwhile: batch k is drawn by the weights after max(0, k - ahead) steps, never by
    others. Batches that are sampled but not learnt are part of `get_state`: a run that is resumed learns the same ones.
    """

    def __init__(
        self, tasks: Iterable[Sequence[Task]], publish: Callable[[TrainState], Any], sample: Learn, *, ahead: int = 0
    ):
        if ahead < 0:
            raise ValueError(f"ahead={ahead}; expected 0 or more steps")
        self.data, self.publish, self.sample, self.ahead = tasks, publish, sample, ahead
        self.shared = ahead == 0  # the place is the same on all processes

    def __iter__(self) -> "Source":
        """Begin with the first tasks."""
        self.tasks: Any = iter(self.data)
        self.ready: deque[Drawn] = deque()
        self.running: Future | None = None  # the batch after those that are ready
        self.version = 0
        return self

    def __next__(self) -> Batch:
        raise TypeError("what is sampled depends on the weights: take draw(state), as train.fit does")

    def draw(self, state: TrainState) -> tuple[Batch, Row] | None:
        """Give the next batch and its metrics, drawn for the state that will learn it; None after the last one."""
        begun = time.monotonic()
        self._collect()
        self.publish(state)
        self.version = int(state.step)
        published = time.monotonic()
        while len(self.ready) < self.ahead and self._begin():
            self._collect()
        self._begin()
        if not (self.ahead and self.ready):
            self._collect()
        if not self.ready:
            return None
        found = self.ready.popleft()
        now = time.monotonic()
        times = {"time/publish": published - begun, "time/wait_for_samples": now - published}
        return found.batch, found.row | times | {"staleness": self.version - found.version}

    def wait(self) -> None:
        """Wait for the batch that is being sampled: its weights are no longer needed then."""
        self._collect()

    def _begin(self) -> bool:
        """Begin to sample the next tasks, in a thread if there is something to do meanwhile; False if there are none."""
        tasks = next(self.tasks, None)
        if tasks is None:
            return False
        version = self.version
        work = lambda: Drawn(*self.sample(tasks), version)
        if self.ahead:
            self.running = aside(work)
        else:
            self.ready.append(work())
        return True

    def _collect(self) -> None:
        """Wait for the batch that is being sampled."""
        if self.running is not None:
            running, self.running = self.running, None
            self.ready.append(running.result())

    def get_state(self) -> dict[str, Any]:
        """Give the place in the tasks, and the batches that are not learnt: JSON."""
        self._collect()
        return {"tasks": self.tasks.get_state(), "ready": [[encode(d.batch), d.row, d.version] for d in self.ready]}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from a state; ValueError if it is damaged, or another `ahead` made it."""
        ready = [Drawn(decode(batch), dict(row), int(version)) for batch, row, version in state["ready"]]
        if len(ready) > self.ahead:
            raise ValueError(
                f"the checkpoint holds {len(ready)} batches that were sampled ahead, and ahead={self.ahead}"
            )
        self.tasks.set_state(state["tasks"])
        self.ready, self.running = deque(ready), None


class Mixed:
    """The data of `fit`: in a share of the steps batches of own samples, in the others given ones (GKD, arXiv:2306.13649).

    Which it is depends on `seed` and the number of the step alone. Ends with either.
    """

    def __init__(self, given: Iterable[Batch], source: Source, share: float, *, seed: int = 0):
        if not 0 <= share <= 1:
            raise ValueError(f"share={share}; expected a number from 0, no samples, to 1, samples alone")
        if source.ahead:
            raise ValueError(f"ahead={source.ahead}: samples are learnt in some steps; draw them in these")
        self.given, self.source, self.share, self.seed = given, source, share, seed
        self.shared = source.shared and getattr(given, "shared", False)

    def __iter__(self) -> "Mixed":
        """Begin with the first step."""
        self.rows: Any = iter(self.given)
        self.samples, self.number = iter(self.source), 0
        return self

    def __next__(self) -> Batch:
        raise TypeError("what is sampled depends on the weights: take draw(state), as train.fit does")

    def draw(self, state: TrainState) -> tuple[Batch, Row] | None:
        """Give the next batch and its metrics; None after the last one."""
        own = np.random.default_rng((self.seed, self.number)).random() < self.share
        self.number += 1
        if own:
            drawn = self.samples.draw(state)
            return None if drawn is None else (drawn[0], {**drawn[1], "own_samples": 1.0})
        batch = next(self.rows, None)
        return None if batch is None else (batch, {"own_samples": 0.0})

    def get_state(self) -> dict[str, Any]:
        """Give the places in both: JSON."""
        return {"number": self.number, "rows": self.rows.get_state(), "samples": self.samples.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.number = int(state["number"])
        self.rows.set_state(state["rows"])
        self.samples.set_state(state["samples"])


def encode(batch: Batch) -> str:
    """Write a batch as text: base64 of numpy's npz."""
    parts, arrays = list[tuple[str, str, Any]](), dict[str, Any]()
    for key, value in batch.items():
        if isinstance(value, Media):
            inputs = value.inputs if isinstance(value.inputs, tuple) else (value.inputs,)
            before = key.removesuffix("media")
            parts += [(before, "media", value), *((before, type(x).__name__, x) for x in inputs)]
        elif isinstance(value, Packed):
            parts.append(("", key, value))
        else:
            arrays[key] = value
    for before, name, x in parts:
        arrays |= {f"{before}{name}.{k}": v for k in KEPT[name] if (v := getattr(x, k, None)) is not None}
    file = io.BytesIO()
    np.savez(file, **arrays)
    return base64.b64encode(file.getvalue()).decode()


def decode(text: str) -> Batch:
    """Read what `encode` wrote; ValueError if it is damaged."""
    try:
        with np.load(io.BytesIO(base64.b64decode(text, validate=True))) as found:
            arrays = {k: found[k] for k in found.files}
    except (binascii.Error, zipfile.BadZipFile, OSError, EOFError, KeyError) as e:
        raise ValueError(f"a batch of the checkpoint is damaged ({type(e).__name__}: {e})") from e
    take = lambda name: {k: arrays.pop(f"{name}.{k}") for k in KEPT[name.removeprefix(TOLD)] if f"{name}.{k}" in arrays}
    if packed := take("packed"):
        arrays["packed"] = Packed(**packed)
    for before in ("", TOLD):
        if media := take(f"{before}media"):
            inputs = [of(**x) for of in (Patches, Sounds) if (x := take(before + of.__name__))]
            arrays[f"{before}media"] = Media(**media, inputs=tuple(inputs) if len(inputs) > 1 else inputs[0])
    return arrays
