"""Who runs an engine's steps: a thread of its own, or whoever waits for a result. All others leave notes in its inbox."""

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fdel.serve.core import Core, Told
from fdel.serve.job import Job
from fdel.serve.reply import Delta
from fdel.serve.schedule import QueueFull


@dataclass(eq=False)
class Mailbox:
    """What one asyncio reader has not read yet. A slow reader gets fewer, larger deltas; nobody waits for it."""

    loop: asyncio.AbstractEventLoop
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    deltas: list[Delta] = field(default_factory=list)

    def put(self, delta: Delta) -> None:
        """Add a delta; in the reader's own thread."""
        self.deltas.append(delta)
        self.ready.set()


class Loop:
    """The steps of a core, one at a time, and the word between threads.

    Whatever is accepted is answered: nothing enters the inbox once `closed` is set, and who was not told an end by then
    is told one.
    """

    def __init__(self, core: Core):
        self.core = core
        self.inbox: deque[Callable[[], Told | None]] = deque()  # what to do before the next step; gives what to tell
        self.live: set[Job] = set()  # accepted, and not told its end
        self.coming = 0  # outputs in the inbox
        self.thread: threading.Thread | None = None
        self.gate, self.turning = threading.Lock(), threading.Lock()  # of the inbox; of the core
        self.changed, self.told = threading.Event(), threading.Condition()
        self.paused = self.closed = False
        self.error: BaseException | None = None  # what ended the thread
        self.inside: int | None = None  # the thread that holds the core
        self.beat = time.monotonic()  # of the newest turn

    def check_open(self) -> None:
        """Raise RuntimeError after `close`, and after an error that ended the thread."""
        if self.closed:
            raise RuntimeError(f"the engine is closed{f' after {self.error!r}' if self.error else ''}; make a new one")

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the core. RuntimeError from inside of a step, where a callback would wait for itself."""
        self.check_outside()
        with self.turning:
            self.inside = threading.get_ident()
            try:
                yield
            finally:
                self.inside = None

    def check_outside(self) -> None:
        """Raise RuntimeError inside of a step."""
        if self.inside == threading.get_ident():
            raise RuntimeError("a callback of a step called the engine, which cannot go on before it returns")

    def turn(self) -> Told:
        """Take in what was asked, do one step, and tell everybody; returns what was told."""
        with self.alone():
            told: Told = []
            while self.inbox:
                told += self.inbox.popleft()() or []
            if not self.paused and not self.core.idle:
                told += self.core.step()
            self.beat = time.monotonic()
            self._tell(told)
        return told

    def start(self, wait: bool = False) -> None:
        """See `Engine.start`."""
        with self.alone():
            self.check_open()
            if self.thread is None:
                self.core.device.warm_up(least=not wait)
                self.thread = threading.Thread(target=self._run, name="fdel-engine", daemon=True)
                self.thread.start()
                threading.Thread(target=self.core.device.complete, name="fdel-compiler").start()

    def close(self) -> None:
        """Stop the thread and abort all requests. From a callback: after the step that it belongs to."""
        with self.gate:
            self.closed = True
        self.changed.set()
        if self.inside == threading.get_ident():
            return
        if self.thread is not None:
            self.thread.join()
        self._end_all("abort")

    def pause(self) -> None:
        """Do no steps until `resume`; requests are still queued."""
        self.paused = True
        self.between(self.core.settle)

    def resume(self) -> None:
        """Go on after `pause`."""
        self.paused = False
        self.changed.set()

    def between(self, change: Callable[[], Any]) -> None:
        """Do something between two steps, and wait until it is done; what it raises is raised here."""
        self.check_outside()
        if self.thread is None:
            with self.alone():
                self.check_open()
                self._tell(change() or [])
            return
        done, failed = threading.Event(), []

        def act() -> Told | None:
            try:
                return change()
            except BaseException as e:
                failed.append(e)
                return None
            finally:
                done.set()

        self.post(act)
        done.wait()
        if failed:
            raise failed[0]

    def post(self, action: Callable[[], Any]) -> None:
        """Have something done before the next step, also if `close` comes first. RuntimeError once closed."""
        with self.gate:
            self.check_open()
            self.inbox.append(action)
        self.changed.set()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue outputs, all or none. QueueFull; RuntimeError once closed."""

        def add() -> None:
            with self.gate:
                self.coming -= len(jobs)
            for job in jobs:
                self.core.add(job)

        with self.gate:
            self.check_open()
            self._check_room(len(jobs))
            self.coming += len(jobs)
            self.live.update(jobs)
            self.inbox.append(add)
        self.changed.set()

    def _check_room(self, new: int) -> None:
        queue, waiting = self.core.schedule.queue, len(self.core.schedule.waiting) + self.coming
        if new > queue:
            raise ValueError(f"{new} outputs at once, but the queue holds {queue}; ask for fewer, or make it longer")
        if waiting + new > queue:
            raise QueueFull(f"{waiting + new} outputs would wait, the most is {queue}; try again later")

    def abort(self, job: Job) -> None:
        """End a request, if it has not ended."""
        with contextlib.suppress(RuntimeError):  # closed: it is told by whoever closes
            self.post(lambda: self.core.end(job.request.id, "abort"))

    def wait(self, done: Callable[[], bool]) -> None:
        """Return once `done()` holds; without a thread, do the turns that it takes."""
        self.check_outside()
        while not done():
            if self.thread is not None:
                with self.told:
                    self.told.wait_for(done, 1.0)
            elif self.paused:
                raise RuntimeError("the engine is paused, and nothing would ever come; call resume() first")
            else:
                self.turn()

    def _run(self) -> None:
        try:
            while not self.closed:
                self.changed.clear()
                if self.inbox or not (self.paused or self.core.idle):
                    self.turn()
                else:
                    self.beat = time.monotonic()
                    self.changed.wait(1.0)
        except BaseException as e:
            self.error = e
            raise
        finally:
            with self.gate:
                self.closed = True
            self._end_all(
                *(("abort", None) if self.error is None else ("error", f"the engine stopped: {self.error!r}"))
            )

    def _end_all(self, reason: str, error: str | None = None) -> None:
        with self.alone():
            while self.inbox:
                with contextlib.suppress(Exception):  # `between` hands it to who asked
                    self.inbox.popleft()()
            for job in list(self.live):  # what a step that failed had to tell is lost, ends included
                told = self.core.end(job.request.id, reason, error)
                self._tell(told or [(job, Delta([], "", reason, error=error))])

    def _tell(self, told: Told) -> None:
        """Hand deltas to their readers: one call into each event loop."""
        loops: dict[asyncio.AbstractEventLoop, list[tuple[Mailbox, Delta]]] = {}
        for job, delta in told:
            if delta.finish_reason:
                self.live.discard(job)
            if job.box is not None:
                loops.setdefault(job.box.loop, []).append((job.box, delta))
        for loop, deltas in loops.items():
            with contextlib.suppress(RuntimeError):  # a loop that is closed has no readers
                loop.call_soon_threadsafe(_put, deltas)
        if told:
            with self.told:
                self.told.notify_all()


def _put(deltas: Sequence[tuple[Mailbox, Delta]]) -> None:
    for box, delta in deltas:
        box.put(delta)
