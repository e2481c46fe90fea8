"""Who runs an engine's steps: a thread of its own, or whoever waits for a result. All others leave notes in its inbox."""

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fdel.serve.core import FAULTS, Core, Told
from fdel.serve.reply import Delta


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
    """The steps of a core, one at a time, and the word between threads."""

    def __init__(self, core: Core):
        self.core = core
        self.inbox: deque[Callable[[], Told | None]] = deque()  # what to do before the next step; gives what to tell
        self.thread: threading.Thread | None = None
        self.turning, self.changed, self.told = threading.RLock(), threading.Event(), threading.Condition()
        self.paused = self.closed = False
        self.error: BaseException | None = None  # what ended the thread
        self.beat = time.monotonic()  # of the newest turn

    def check_open(self) -> None:
        """Raise RuntimeError after `close`, and after an error that ended the thread."""
        if self.closed:
            raise RuntimeError(f"the engine is closed{f' after {self.error!r}' if self.error else ''}; make a new one")

    def turn(self) -> Told:
        """Take in what was asked, do one step, and tell everybody; returns what was told."""
        with self.turning:
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
        with self.turning:
            if self.thread is None:
                self.core.device.warm_up(least=not wait)
                self.thread = threading.Thread(target=self._run, name="fdel-engine", daemon=True)
                self.thread.start()
                threading.Thread(target=self.core.device.complete, name="fdel-compiler").start()

    def close(self) -> None:
        """Stop the thread and abort all requests."""
        self.closed = True
        self.changed.set()
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
        if self.thread is None or self.closed:
            with self.turning:
                self._tell(change() or [])
            return
        done, failed = threading.Event(), []

        def act() -> Told | None:
            try:
                return change()
            except FAULTS as e:
                failed.append(e)
                return None
            finally:
                done.set()

        self.post(act)
        done.wait()
        if failed:
            raise failed[0]

    def post(self, action: Callable[[], Any]) -> None:
        """Have something done before the next step."""
        self.inbox.append(action)
        self.changed.set()

    def wait(self, done: Callable[[], bool]) -> None:
        """Return once `done()` holds; without a thread, do the turns that it takes."""
        while not done():
            if self.thread is not None:
                with self.told:
                    self.told.wait_for(lambda: done() or self.closed, 1.0)
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
            self.closed, self.error = True, e
            self._end_all("error", f"the engine stopped: {e!r}")
            raise

    def _end_all(self, reason: str, error: str | None = None) -> None:
        with self.turning:
            while self.inbox:
                self.inbox.popleft()()
            for id in list(self.core.jobs):
                self._tell(self.core.end(id, reason, error))

    def _tell(self, told: Told) -> None:
        """Hand deltas to their readers: one call into each event loop."""
        loops: dict[asyncio.AbstractEventLoop, list[tuple[Mailbox, Delta]]] = {}
        for job, delta in told:
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
