"""Sample an engine's model: each task several times, over one turn or several, until all have ended or time is up."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fdel.serve import Engine, SamplingParams
from fdel.serve.engine.reply import Job
from fdel.serve.engine.schedule import QueueFull
from fdel.train.data.images import Shown
from fdel.train.rollout.aside import aside
from fdel.train.rollout.records import Sample, Task
from fdel.train.rollout.sight import Columns, begun, prompt_media, went_on
from fdel.train.rollout.turns import Said, Turn

POLL = 0.02  # seconds between two looks at environments that run beside the engine's thread


@dataclass(eq=False)
class _Trajectory:
    """One sample under way."""

    task: Task
    index: int
    tokens: list[int]
    columns: dict[str, list] = field(default_factory=lambda: {"drawn": [], "logps": [], "kept": [], "versions": []})
    asked: list[int] = field(default_factory=list)
    images: list[Shown] = field(default_factory=list)  # the environment's
    seen: Columns | None = None  # what all tokens show, when the sampler is asked
    finish: str = ""
    error: str | None = None
    reward: float | None = None
    info: dict[str, float] = field(default_factory=dict)

    @property
    def drawn(self) -> int:
        """Tokens after the prompt."""
        return len(self.tokens) - len(self.task.prompt)

    def end(self, finish: str, error: str | None = None) -> None:
        self.finish, self.error = finish, error

    def take(self, tokens: Sequence[int], **columns: Sequence) -> None:
        """Append tokens; without columns they are the environment's."""
        self.tokens += tokens
        for (name, column), other in zip(self.columns.items(), (False, 0.0, 0.0, -1), strict=True):
            column += columns.get(name, [other] * len(tokens))

    def take_generation(self, job: Job) -> str:
        """Append what a job drew; return why it ended."""
        g = job.reply.generation()
        self.asked.append(len(self.tokens))
        columns: dict[str, Sequence] = {"logps": g.sampled_logprobs, "kept": g.kept, "versions": g.versions}
        self.take(g.tokens, drawn=[True] * len(g.tokens), **columns)
        self.error = g.error
        return g.finish_reason

    def take_said(self, said: Said, sight: Any) -> None:
        """Append what an environment said and showed; ValueError for what cannot be shown."""
        new = [replace(x, start=x.start + len(self.tokens)) for x in said.images]
        self.take(list(map(int, said.tokens)))
        self.seen = went_on(sight, self.seen, self.tokens, new)
        self.images += new

    def sample(self) -> Sample:
        """What it is so far."""
        n = len(self.task.prompt)
        types = {"drawn": np.bool_, "logps": np.float32, "kept": np.float32, "versions": np.int32}
        before = {"versions": -1}
        arrays: Any = {
            k: np.concatenate([np.full(n, before.get(k, 0), t), np.array(self.columns[k], t)]) for k, t in types.items()
        }
        found = {"turns": float(len(self.asked)), **self.info}
        tokens = np.array(self.tokens, np.int32)
        return Sample(
            self.task, self.index, tokens, **arrays,
            finish=self.finish, error=self.error, reward=self.reward, info=found, asked=tuple(self.asked),
            images=tuple(self.images),
        )  # fmt: skip


def rollout(
    engine: Any,
    tasks: Sequence[Task],
    ask: SamplingParams,
    *,
    samples: int = 8,
    seed: int = 0,
    turn: Turn | None = None,
    deadline: float | None = None,
    each: Callable[[list[Sample]], Any] | None = None,
) -> list[Sample]:
    """Draw `samples` trajectories for each task, one task's after the other's, as `ask` says; max_tokens are for all turns.

    Noise is a function of (seed, task.number, index, turn) and of the tokens so far: the same weights give the same
    samples, whatever else runs. `engine` is an `Engine`, or an `Adapter` of one. After a generation that ends with a stop,
    `turn(sample)` says what the environment answers, as token ids, which are appended as they are; without `turn` the
    first generation is all. All trajectories take their next turn together: how fast an environment answers then changes
    no bit. `deadline` seconds after the start whatever goes on is cut, with the tokens that it has; a rollout with a
    deadline depends on clocks anyway, and there each goes on as soon as it has its answer.
    `each` gets each task's samples as soon as all of them have ended. ValueError for what cannot be asked, RuntimeError if
    the engine is closed meanwhile.
    """
    _check(ask, samples)
    run = _Rollout(engine, ask, seed, turn, together=deadline is None)
    groups = [[_Trajectory(task, i, list(task.prompt)) for i in range(samples)] for task in tasks]
    untold, end = list(groups), None if deadline is None else time.monotonic() + deadline
    waiting = deque(group for group in groups if group)
    try:
        while untold:
            run.begin(waiting)
            run.go_on()
            for group in [g for g in untold if all(t.finish for t in g)]:
                untold.remove(group)
                if each is not None:
                    each([t.sample() for t in group])
            if untold and not run.wait(end):
                waiting.clear()
                run.cut()
                for t in [t for group in untold for t in group if not t.finish]:
                    t.end("deadline")
    finally:
        run.abort()
    return [t.sample() for group in groups for t in group]


class Adapter:
    """One adapter of an engine, as `rollout` takes an engine: the policy of LoRA, whose weights alone are handed over."""

    def __init__(self, engine: Engine, name: str):
        self.engine, self.name = engine, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def submit_all(self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, **where: Any) -> list[Job]:
        """Queue outputs of the adapter."""
        return self.engine.submit_all(prompts, sampling, adapter=self.name, **where)

    def update_params(self, params: Any, **how: bool) -> int:
        """Replace the adapter's weights; give their version."""
        return self.engine.update_params(params, self.name, **how)


def _check(ask: SamplingParams, samples: int) -> None:
    if ask.seed is not None or ask.outputs > 1:
        raise ValueError(
            f"seed={ask.seed}, n={ask.n}, best_of={ask.best_of} of ask; rollout has samples= and seed= instead"
        )
    if samples < 1:
        raise ValueError(f"samples={samples}; expected at least 1")


def _fold(*numbers: int) -> int:
    """Make one seed of several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])


@dataclass
class _Rollout:
    """The trajectories that an engine draws or an environment answers."""

    engine: Any
    ask: SamplingParams
    seed: int
    turn: Turn | None
    together: bool
    drawing: dict[_Trajectory, Job] = field(default_factory=dict)
    asking: dict[_Trajectory, Future] = field(default_factory=dict)  # what the environment will say
    ready: list[_Trajectory] = field(default_factory=list)  # who wait for their next turn
    next: deque[_Trajectory] = field(default_factory=deque)  # whose next turn is to be queued now

    def begin(self, waiting: deque[list[_Trajectory]]) -> None:
        """Queue next turns and first ones, as far as the queue has room."""
        try:
            if not (self.together and (self.drawing or self.asking or waiting or self.next)):
                self.next.extend(sorted(self.ready, key=lambda t: (t.task.number, t.index)))
                self.ready.clear()
            while self.next:
                t = self.next[0]
                room = self.ask.max_tokens - t.drawn
                asked = replace(self.ask, max_tokens=room, min_tokens=min(self.ask.min_tokens, room))
                seed = _fold(self.seed, t.task.number, len(t.asked), t.index)
                try:
                    (self.drawing[t],) = self._submit(t.tokens, t.seen, replace(asked, seed=seed))
                except ValueError as e:  # of what the environment said: more than there is room for
                    t.end("error", f"after what the environment said: {e}")
                self.next.popleft()
            while waiting:
                task, group = waiting[0][0].task, waiting[0]
                asked = replace(self.ask, n=len(group), seed=_fold(self.seed, task.number, 0))
                seen = group[0].seen = group[0].seen or begun(self.engine.sight, task)
                self.drawing.update(zip(group, self._submit(task.prompt, seen, asked), strict=True))
                for t in group:
                    t.seen = seen
                waiting.popleft()
        except QueueFull:
            if not self.drawing:
                raise

    def _submit(self, prompt: Sequence[int], seen: Columns | None, asked: SamplingParams) -> list[Job]:
        if seen is None:
            return self.engine.submit_all([prompt], asked)
        return self.engine.submit_all([prompt], asked, media=[prompt_media(self.engine.sight, seen)])

    def go_on(self) -> None:
        """Take what was drawn and said."""
        for t, job in [(t, job) for t, job in self.drawing.items() if job.reply.finish_reason]:
            del self.drawing[t]
            reason = t.take_generation(job)
            if reason == "abort":
                raise RuntimeError("the engine was closed, or somebody aborted a request of the rollout")
            if self.turn is None or reason != "stop":
                t.end(reason, t.error)
            else:
                self.asking[t] = aside(self.turn, t.sample())
        for t, said in [(t, said) for t, said in self.asking.items() if said.done()]:
            del self.asking[t]
            self._hear(t, said)

    def _hear(self, t: _Trajectory, told: Future) -> None:
        """Take what an environment said; one that raised ends its sample as an error."""
        if (error := told.exception()) is not None:
            t.end("error", f"the environment raised {type(error).__name__}: {error}")
            return
        said: Said = told.result()
        try:
            t.take_said(said, self.engine.sight)
        except ValueError as e:
            t.end("error", f"what the environment showed: {e}")
            return
        t.reward = t.reward if said.reward is None else float(said.reward)
        for name, value in said.info.items():
            t.info[name] = t.info.get(name, 0.0) + value
        if said.done:
            t.end("stop")
        elif t.drawn >= self.ask.max_tokens or len(t.tokens) >= self.engine.limit:
            t.end("length")
        else:
            self.ready.append(t)

    def wait(self, end: float | None) -> bool:
        """Wait until something has ended; False if the time is up before."""
        left = None if end is None else end - time.monotonic()
        if left is not None and left <= 0:
            return False
        jobs, told = list(self.drawing.values()), list(self.asking.values())
        if jobs:
            ended = lambda: any(job.reply.finish_reason for job in jobs) or any(said.done() for said in told)
            self.engine.wait(ended, min(POLL, POLL if left is None else left) if told else left)
        elif told:
            wait(told, left, FIRST_COMPLETED)
        return True

    def cut(self) -> None:
        """Take what is there of whatever goes on."""
        self.abort()
        for t, job in self.drawing.items():
            t.take_generation(job)
        for of in (self.drawing, self.asking, self.ready, self.next):
            of.clear()

    def abort(self) -> None:
        """Abort what is being drawn, and wait until that is done."""
        jobs = list(self.drawing.values())
        for job in jobs:
            self.engine.abort(job)
        if jobs and not self.engine.closed:
            self.engine.wait(lambda: all(job.reply.finish_reason for job in jobs))


def metrics(samples: Sequence[Sample]) -> Mapping[str, float]:
    """Count what samples are, by TRL's names: lengths, how many were cut, turns, how old their weights are."""
    lengths = np.array([s.length for s in samples], np.float64)
    cut = np.array([s.finish != "stop" for s in samples])
    ended = lengths[~cut] if (~cut).any() else np.zeros(1)
    found = {f"completions/{name}_length": float(f(lengths)) for name, f in STATISTICS.items()}
    found |= {f"completions/{name}_terminated_length": float(f(ended)) for name, f in STATISTICS.items()}
    found |= {
        "completions/clipped_ratio": float(cut.mean()),
        "rollout/errors": float(sum(s.finish == "error" for s in samples)),
    }
    for name in sorted({k for s in samples for k in s.info}):
        found[f"rollout/{name}"] = float(np.mean([s.info.get(name, 0.0) for s in samples]))
    if (calls := found.pop("rollout/tools/calls", None)) is not None:
        failures = found.pop("rollout/tools/failures", 0.0)
        found |= {"tools/call_frequency": calls, "tools/failure_frequency": failures / calls if calls else 0.0}
    return found


STATISTICS: Mapping[str, Callable] = {"mean": np.mean, "min": np.min, "max": np.max}
