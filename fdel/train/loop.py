"""The training loop: it feeds a step, writes down what it reports, evaluates, saves, and goes on where a run was cut off.

    step = jax.jit(train.update(...), donate_argnums=0)
    state = fit(step, state, data, Loop(steps=1000, directory="run", save_every=100))

The loop does I/O and nothing else. Run the same program again after a crash, a kill or a preemption: it restores the last
checkpoint with the place in the data, cuts metrics.jsonl back to it, and repeats the lost steps bit by bit (on the same
mesh; on another one to rounding).
"""

import contextlib
import dataclasses
import logging
import math
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from fdel.train import checkpoint, metrics, processes
from fdel.train.evaluation import place
from fdel.train.given import NOTHING, Batch, Given
from fdel.train.metrics import Row
from fdel.train.steps import Metrics, Step, TrainState

Evaluate = Callable[[TrainState], Mapping[str, float]]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loop:
    """When to log, evaluate, save and stop. Every count is in steps, and 0 means never.

    `directory` holds metrics.jsonl and checkpoints/; None writes nothing. `steps` None runs until the data ends. The latest
    `keep` checkpoints stay (0: all), and the best `keep_best` by `metric`, for which every evaluation is saved. Training
    stops early after `patience` evaluations in a row without a better `metric`, and with an error after `max_nonfinite`
    steps in a row whose loss is not finite. `steps_per_epoch` gives rows an "epoch", `flops_per_token` (forward and
    backward) an "mfu". `report_to` names more writers: "tensorboard", "wandb".
    """

    steps: int | None
    directory: str | Path | None = None
    log_every: int = 10
    eval_every: int = 0
    save_every: int = 0
    keep: int = 3
    keep_best: int = 0
    metric: str = "eval_loss"
    greater_is_better: bool = False
    patience: int = 0
    max_nonfinite: int = 0
    steps_per_epoch: float = 0
    flops_per_token: float = 0
    report_to: tuple[str, ...] = ()
    progress_bar: bool = True


@dataclass(frozen=True)
class Event:
    """What a callback sees of a logged row: the step that it is of, its numbers, and the newest state.

    Rows are read one step late, so `state.step` may be `step + 1`; after an evaluation it is `step`. The next step donates
    the state: read it at once, or copy it.
    """

    step: int
    metrics: Row
    state: TrainState


@dataclass(frozen=True)
class Progress:
    """What a run counts besides its state; it is saved with each checkpoint."""

    step: int = 0
    num_tokens: int = 0
    skipped: int = 0  # steps whose loss was not finite
    nonfinite: int = 0  # the same, in a row up to now
    best: float | None = None
    waited: int = 0  # evaluations since the best one


def fit(
    step: Step,
    state: TrainState | Callable[[], TrainState],
    data: Iterable[Batch],
    loop: Loop,
    *,
    given: Given = NOTHING,
    evaluate: Evaluate | None = None,
    callbacks: Sequence[Callable[[Event], Any]] = (),
    sharding: Any = None,
    config: Any = None,
) -> TrainState:
    """Run `state, metrics = step(state, batch, **given)` to `loop.steps`, from the last checkpoint if there is one.

    `state` is consumed. A jitted function that makes it (with out_shardings on a mesh) is called if nothing is restored.
    `iter(data)` yields dicts of numpy arrays, this process's rows; `sharding` puts them on the mesh. With
    checkpoints it has `get_state()`, JSON, and `set_state(state)`; with `data.shared`, as in `train.data`, the state is the
    same on all processes, and another number of them can go on. An iterator of batches that depend on the state, as
    `rollout.Source`, has `draw(state)`, which gives a batch and its metrics, or None at the end. `evaluate(state)` gives
    numbers whose names begin with "eval_"; `callbacks` are called at each row, on every process, and end the run by
    returning True. `config` is JSON, kept in the checkpoints.

    SIGTERM, or Ctrl-C once: finishes the step, saves, and raises SystemExit with 128 + the signal's number. Raises
    CheckpointError if there are checkpoints but none that can be restored, FloatingPointError after `max_nonfinite` steps
    or if no step of the run was finite, and the error of a save if it is the last one; earlier failures are logged. Needs
    the extra `train` if it saves.
    """
    _check(loop, evaluate)
    iterator = iter(data)
    state, progress, saver = _begin(loop, state, iterator, config, getattr(data, "shared", False))
    with contextlib.ExitStack() as stack:
        caught = stack.enter_context(processes.listen())
        if saver:
            stack.callback(saver.wait)
        write = stack.enter_context(metrics.rows(loop.directory, progress.step, loop.report_to))
        show = stack.enter_context(metrics.bar(loop.steps, progress.step, loop.progress_bar))
        run = _Run(loop, progress, write, show, callbacks)
        killed, now = 0, progress.step
        while not (run.stopped or killed or now == loop.steps) and (drawn := _draw(iterator, state)) is not None:
            placed, tokens = _placed(drawn[0], sharding)
            state, reported = step(state, placed, **given)
            run.read(state)  # the step before: the device is busy with this one meanwhile
            now, run.unread = now + 1, (now + 1, {**drawn[1], **reported}, tokens)
            evaluating = _every(loop.eval_every, now)
            saving = _every(loop.save_every, now) or (evaluating and loop.keep_best > 0)
            if evaluating or saving:
                run.read(state, evaluate if evaluating else None, last=now == loop.steps)
            if saver and saving:
                saver.save(now, state, run.notes(iterator, config))
            killed = processes.signalled(caught, now)
        run.read(state, last=not killed or now == loop.steps)
        if not killed:
            _learnt(run.progress)
        if saver:
            saver.finish(now, state, run.notes(iterator, config))
    if killed:
        what = ", which is saved" if saver else ""
        log.warning("%s: stopped after step %d%s", signal.Signals(killed).name, now, what)
        raise SystemExit(128 + killed)
    return state


@dataclass
class _Run:
    """What changes besides the state: the progress, and the step whose metrics are still on the device."""

    loop: Loop
    progress: Progress
    write: metrics.Write
    show: metrics.Write
    callbacks: Sequence[Callable[[Event], Any]]
    unread: tuple[int, Metrics, int] | None = None
    evaluated: Row = field(default_factory=dict)  # the numbers of an evaluation after the step that was read last
    speed: metrics.Speed = field(default_factory=metrics.Speed)
    ended: bool = False  # by a callback

    @property
    def stopped(self) -> bool:
        return self.ended or 0 < self.loop.patience <= self.progress.waited

    def read(self, state: TrainState, evaluate: Evaluate | None = None, last: bool = False) -> None:
        """Read the metrics of the step that is unread; evaluate; log a row if one is due."""
        if self.unread is None:
            return
        (number, reported, tokens), self.unread = self.unread, None
        row = {"step": number, "loss": math.nan, **metrics.numbers(reported)}
        self.speed.add(tokens)
        self.progress = _count(self.progress, row, tokens, self.loop.max_nonfinite)
        if logged := bool(evaluate) or last or _every(self.loop.log_every, number):
            row |= {"num_tokens": self.progress.num_tokens, "nonfinite_steps": self.progress.skipped}
            if self.loop.steps_per_epoch:
                row["epoch"] = number / self.loop.steps_per_epoch
            row |= self.speed.read(self.loop.flops_per_token)
        self.evaluated = metrics.numbers(evaluate(state)) if evaluate else {}
        if evaluate:
            self.progress = _judge(self.progress, self.evaluated, self.loop)
            self.speed.restart()
        self.show(row | self.evaluated)
        if logged:
            row |= self.evaluated
            self.write(row)
            self.ended |= any([callback(Event(number, row, state)) is True for callback in self.callbacks])

    def notes(self, iterator: Any, config: Any) -> checkpoint.Notes:
        """Collect what a checkpoint of the step that was read last holds besides arrays."""
        return checkpoint.notes(iterator, config, progress=dataclasses.asdict(self.progress), metrics=self.evaluated)


def _draw(iterator: Any, state: TrainState) -> tuple[Batch, Row] | None:
    """Take the next batch, and metrics that come with it; None at the end."""
    if hasattr(iterator, "draw"):
        return iterator.draw(state)
    batch = next(iterator, None)
    return None if batch is None else (batch, {})


def _placed(batch: Batch, sharding: Any) -> tuple[Batch, int]:
    """Place a batch and count its tokens, on all processes if the others' rows have as many as those of this one."""
    placed, tokens = place(batch, sharding), metrics.tokens_of(batch)
    if jax.process_count() > 1:
        tokens *= len(jax.tree.leaves(placed)[0]) // len(jax.tree.leaves(batch)[0])
    return placed, tokens


def _count(progress: Progress, row: Row, tokens: int, most: int) -> Progress:
    """Count a step, and stop a run that has gone wrong: FloatingPointError after `most` non-finite steps in a row."""
    bad = row.get("skipped", 0) > 0 or not math.isfinite(row["loss"])
    in_a_row = progress.nonfinite + 1 if bad else 0
    if in_a_row >= 10 and str(in_a_row).strip("0") == "1":  # 10, 100, 1000, ...
        log.warning("%d steps in a row, up to step %d, had no finite loss or gradient", in_a_row, row["step"])
    if 0 < most <= in_a_row:
        raise FloatingPointError(
            f"the loss or its gradient was not finite in {in_a_row} steps in a row, up to step {row['step']} "
            f"(loss {row['loss']}); lower the learning rate, clip gradients, or look at the data of these steps"
        )
    total, skipped = progress.num_tokens + tokens, progress.skipped + bad
    return dataclasses.replace(progress, step=row["step"], num_tokens=total, skipped=skipped, nonfinite=in_a_row)


def _learnt(progress: Progress) -> None:
    if 0 < progress.step == progress.skipped:
        raise FloatingPointError(
            f"none of the {progress.step} steps had a finite loss and gradient, so nothing was learnt and the run is not "
            "saved as ended; look at the model's weights, at the first rows of the data, and at the learning rate"
        )


def _judge(progress: Progress, evaluated: Row, loop: Loop) -> Progress:
    """Compare an evaluation with the best one before it."""
    if not (loop.patience or loop.keep_best):
        return progress
    if loop.metric not in evaluated:
        raise ValueError(f"the evaluation gave {sorted(evaluated)}; metric={loop.metric!r} is not among them")
    value, best = evaluated[loop.metric], progress.best
    better = best is None or (value > best if loop.greater_is_better else value < best)
    if better and not math.isnan(value):
        return dataclasses.replace(progress, best=value, waited=0)
    return dataclasses.replace(progress, waited=progress.waited + 1)


def _every(n: int, step: int) -> bool:
    return n > 0 and step % n == 0


def _check(loop: Loop, evaluate: Any) -> None:
    if loop.eval_every and evaluate is None:
        raise ValueError(f"eval_every={loop.eval_every} needs an `evaluate` function")
    if (loop.patience or loop.keep_best) and not loop.eval_every:
        raise ValueError("patience and keep_best look at evaluations; set eval_every")
    if (loop.save_every or loop.keep_best) and loop.directory is None:
        raise ValueError("save_every and keep_best need a directory")


def _begin(
    loop: Loop, state: Any, iterator: Any, config: Any, shared: bool
) -> tuple[TrainState, Progress, checkpoint.Saver | None]:
    """Restore state, progress and the place in the data, or make them."""
    fresh = state if callable(state) else lambda: state
    if loop.directory is None:
        return fresh(), Progress(), None
    path = Path(loop.directory) / "checkpoints"
    going_on = bool(checkpoint.steps(path))
    if not (loop.save_every or loop.keep_best or going_on):
        return fresh(), Progress(), None
    if not hasattr(iterator, "get_state"):
        raise ValueError(f"the data's iterator, {type(iterator).__name__}, has no get_state() to save its place with")
    path.mkdir(parents=True, exist_ok=True)
    checkpoint.clean(path)
    progress = Progress()
    if going_on:
        state, progress = checkpoint.resume(path, state, iterator, config, shared, _progress)
    else:
        state = fresh()
    best: dict[str, Any] = dict(keep_best=loop.keep_best, metric=loop.metric, greater=loop.greater_is_better)
    return state, progress, checkpoint.Saver(path, keep=loop.keep, **best)


def _progress(saved: Mapping[str, Any]) -> Progress:
    """Read what a checkpoint says of the progress; TypeError if it is damaged."""
    found = Progress(**saved)
    best = found.best is None or isinstance(found.best, float | int)
    if not best or not all(type(n) is int for n in dataclasses.replace(found, best=0).__dict__.values()):
        raise TypeError(f"the progress is {saved!r:.200}; expected whole numbers")
    return found
