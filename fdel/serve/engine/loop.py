"""Runs an engine's steps: in a thread of its own, or in the one that waits for a result. Other threads queue actions."""

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fdel.serve.engine.core import Core, Deltas
from fdel.serve.engine.reply import Delta, DeltaQueue, Job, describe
from fdel.serve.engine.schedule import QueueFull

log = logging.getLogger(__name__)


class Loop:
    """The steps of a core, one at a time, the actions between them, and the delivery of what they add.

    Every output that was accepted is told its end: no action is queued once `closed` is set, and what has no end by then
    gets one.
    """

    closed = False  # takes no more requests

    def __init__(self, core: Core):
        self._core = core
        self._actions: deque[Callable[[], Deltas | None]] = deque()  # to do before the next step
        self._live: set[Job] = set()  # accepted, and no end delivered
        self._queued = 0  # outputs whose action to add them is queued
        self._thread: threading.Thread | None = None
        self._gate, self._stepping = threading.Lock(), threading.Lock()  # of the actions; of the core
        self._changed, self._delivered = threading.Event(), threading.Condition()
        self._paused = False
        self._error: BaseException | None = None  # what ended the thread
        self._inside: int | None = None  # the thread that holds the core
        self._stepped = time.monotonic()  # when the newest step ended

    def check_open(self) -> None:
        """Raise RuntimeError after `close`, and after an error that ended the thread."""
        if self.closed:
            after = f" after {self._error!r}" if self._error else ""
            raise RuntimeError(f"the engine is closed{after}; make a new one")

    def _check_outside(self) -> None:
        """Raise RuntimeError inside of a step, where a callback would wait for itself."""
        if self._inside == threading.get_ident():
            raise RuntimeError("a callback of a step called the engine, which cannot go on before it returns")

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Hold the core. RuntimeError inside of a step."""
        self._check_outside()
        with self._stepping:
            self._inside = threading.get_ident()
            try:
                yield
            finally:
                self._inside = None

    def step(self) -> Deltas:
        """Do one step in this thread: what it added to which outputs. For engines that `start` was not called for."""
        with self._exclusive():
            deltas: Deltas = []
            while self._actions:
                deltas += self._actions.popleft()() or []
            if not self._paused and not self._core.idle:
                deltas += self._core.step()
            self._stepped = time.monotonic()
            self._deliver(deltas)
            if not self._core.asleep and threading.main_thread().is_alive():  # a process that ends compiles no more
                self._compile()
        return deltas

    def _compile(self) -> None:
        """Have a program compiled that a request waits for, in a thread of its own, unless one is: see `Held`."""
        if (size := self._core.held.next()) is None:
            return
        compile = self._core.device.compiler(*size)

        def run() -> None:
            error = None
            try:
                compile()
            except Exception as e:
                what = {"encode": "patches", "hear": "chunks of sound"}[size[0]]
                error = f"the program that encodes {size[1]} {what} could not be compiled: {describe(e)}"
            with contextlib.suppress(RuntimeError):  # closed
                self._post(lambda: self._core.compiled(size, error))

        threading.Thread(target=run, name="fdel-compiler").start()

    def start(self, *, wait: bool = False) -> None:
        """Compile, then run the steps in a thread of their own. A second call does nothing.

        Steps begin when the programs of the largest size are there, which any step can use; the others are compiled
        meanwhile, in a thread of their own. With `wait`, they begin when all are there, and nothing compiles afterwards
        but what encodes pictures and sounds of other sizes: who shows the first of a size waits for that, nobody else.
        """
        with self._exclusive():
            self.check_open()
            if self._thread is None:
                self._core.device.warm_up(least=not wait)
                self._core.holds = True
                self._thread = threading.Thread(target=self._run, name="fdel-engine", daemon=True)
                self._thread.start()
                threading.Thread(target=self._core.device.complete, name="fdel-compiler").start()

    def close(self) -> None:
        """Stop the thread and abort all requests. From a callback: after the step that it belongs to."""
        with self._gate:
            self.closed = True
        self._changed.set()
        if self._inside != threading.get_ident():
            if self._thread is not None:
                self._thread.join()
            self._end_all("abort")
        self._core.device.close()

    def pause(self) -> None:
        """Do no steps until `resume`; requests are still queued."""
        self._paused = True
        self._between_steps(self._core.drain)

    def resume(self) -> None:
        """Go on after `pause`."""
        self._paused = False
        self._changed.set()

    def _between_steps(self, change: Callable[[], Any]) -> None:
        """Do something between two steps, and wait until it is done; what it raises is raised here."""
        self._check_outside()
        if self._thread is None:
            with self._exclusive():
                self.check_open()
                self._deliver(change() or [])
            return
        done, failed = threading.Event(), []

        def act() -> Deltas | None:
            try:
                return change()
            except BaseException as e:
                failed.append(e)
                return None
            finally:
                done.set()

        self._post(act)
        done.wait()
        if failed:
            raise failed[0]

    def _post(self, action: Callable[[], Any]) -> None:
        """Queue an action, which is done also if `close` comes first. RuntimeError once closed."""
        with self._gate:
            self.check_open()
            self._actions.append(action)
        self._changed.set()

    def _enqueue(self, jobs: Sequence[Job]) -> None:
        """Queue outputs, all or none. QueueFull; RuntimeError once closed."""

        def add() -> None:
            with self._gate:
                self._queued -= len(jobs)
            for job in jobs:
                self._core.add(job)

        with self._gate:
            self.check_open()
            most, total = self._core.schedule.queue, self._waiting + len(jobs)
            if len(jobs) > most:
                more = "ask for fewer, or make it longer"
                raise ValueError(f"{len(jobs)} outputs at once, but the queue holds {most}; {more}")
            if total > most:
                raise QueueFull(f"{total} outputs would wait, the most is {most}; try again later")
            self._queued += len(jobs)
            self._live.update(jobs)
            self._actions.append(add)
        self._changed.set()

    @property
    def _waiting(self) -> int:
        """Outputs in the queue."""
        return len(self._core.schedule.waiting) + len(self._core.held.jobs) + self._queued

    def abort(self, job: Job) -> None:
        """End a request wherever it stands, with finish_reason "abort". Ended ones stay as they are."""
        with contextlib.suppress(RuntimeError):  # closed: `close` ends it
            self._post(lambda: self._core.end(job.request.id, "abort"))

    def wait(self, done: Callable[[], bool], seconds: float | None = None) -> bool:
        """Return True once `done()` holds, or False after `seconds`; without a thread, do the steps that it takes.

        RuntimeError if it is paused and has no thread, or is called inside of a step: nothing would ever come.
        """
        self._check_outside()
        end = None if seconds is None else time.monotonic() + seconds
        while not done():
            left = 1.0 if end is None else min(1.0, end - time.monotonic())
            if left <= 0:
                return False
            if self._thread is not None:
                with self._delivered:
                    self._delivered.wait_for(done, left)
            elif self._paused:
                raise RuntimeError("the engine is paused, and nothing would ever come; call resume() first")
            else:
                self.step()
        return True

    def _run(self) -> None:
        try:
            while not self.closed:
                self._changed.clear()
                if self._actions or not (self._paused or self._core.idle):
                    self.step()
                elif not self._use_next():
                    self._stepped = time.monotonic()
                    self._changed.wait(1.0)
        except BaseException as e:
            self._error = e
            raise
        finally:
            with self._gate:
                self.closed = True
            if self._error is None:
                self._end_all("abort")
            else:
                self._end_all("error", f"the engine stopped: {self._error!r}")

    def _use_next(self) -> bool:
        """While nobody waits, run a program for the first time, over nothing; whether there was one."""
        if self._paused or self._core.asleep:
            return False
        with self._exclusive():
            try:
                return self._core.device.use_next()
            except Exception as e:
                log.warning("a program failed over nothing: %s", describe(e))
                self._core.sleep(False)  # what was donated to it is lost
                self._core.wake()
                return True

    def _end_all(self, reason: str, error: str | None = None) -> None:
        with self._exclusive():
            while self._actions:
                with contextlib.suppress(Exception):  # `_between_steps` raises it where it was called
                    self._actions.popleft()()
            for job in list(self._live):  # what a step that failed had added is lost, ends included
                deltas = self._core.end(job.request.id, reason, error)
                self._deliver(deltas or [(job, Delta([], "", reason, error=error))])

    def _deliver(self, deltas: Deltas) -> None:
        """Hand deltas to their readers: one call into each event loop."""
        loops: dict[asyncio.AbstractEventLoop, list[tuple[DeltaQueue, int, Delta]]] = {}
        for job, delta in deltas:
            if delta.finish_reason:
                self._live.discard(job)
            if job.queue is not None:
                loops.setdefault(job.queue.loop, []).append((job.queue, job.index, delta))
        for loop, puts in loops.items():
            with contextlib.suppress(RuntimeError):  # a loop that is closed has no readers
                loop.call_soon_threadsafe(_put, puts)
        if deltas:
            with self._delivered:
                self._delivered.notify_all()


def _put(puts: Sequence[tuple[DeltaQueue, int, Delta]]) -> None:
    for queue, index, delta in puts:
        queue.put(index, delta)
