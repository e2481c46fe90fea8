"""Write down sounds as they come in, in a thread of its own: those under way share a batch, window by window."""

import queue
import threading
from collections.abc import Generator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from fdel.serve.hear.batch import Batch, turn
from fdel.serve.hear.listen import Listener
from fdel.serve.hear.windows import Transcript


@dataclass(eq=False)
class _Sound:
    """A sound that is written down: its loop, what that asks for, and who waits for the end."""

    loop: Generator[Any, Any, Transcript]
    done: Future
    ask: Any = None

    def send(self, answer: Any) -> bool:
        """Go on until the next question; False at the end, which an exception is too."""
        if isinstance(answer, Exception):
            self.end(answer)
            return False
        try:
            self.ask = self.loop.send(answer)
            return True
        except StopIteration as end:
            self.end(end.value)
        except Exception as e:
            self.end(e)
        return False

    def end(self, found: Any) -> None:
        """Hand on a transcript, or what went wrong."""
        if self.done.set_running_or_notify_cancel():
            self.done.set_exception(found) if isinstance(found, Exception) else self.done.set_result(found)


@dataclass(eq=False)
class Scribe:
    """A `Listener` behind a queue. Cancel what `write` returns to drop a sound."""

    listener: Listener
    waiting: queue.SimpleQueue = field(default_factory=queue.SimpleQueue)
    thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to listen."""
        self.thread = threading.Thread(target=self._run, name="fdel-hear", daemon=True)
        self.thread.start()

    def write(self, loop: Generator[Any, Any, Transcript]) -> "Future[Transcript]":
        """Write down a sound: one `windows.transcribe`. What the loop raises, the future does; RuntimeError at the end."""
        sound = _Sound(loop, Future())
        self.waiting.put(sound)
        return sound.done

    def check_open(self) -> None:
        """Raise a RuntimeError if the thread has ended by itself."""
        if self.thread is not None and not self.thread.is_alive():
            raise RuntimeError("the thread that listens has ended")

    def close(self) -> None:
        """End the thread after what it computes now; what is left fails with a RuntimeError."""
        self.waiting.put(None)
        if self.thread is not None:
            self.thread.join()

    def _run(self) -> None:
        sounds, batch = list[_Sound](), Batch()
        while True:
            new = [self.waiting.get()] if not sounds else []
            while not self.waiting.empty():
                new.append(self.waiting.get())
            if None in new:
                for sound in [*sounds, *filter(None, new)]:
                    sound.end(RuntimeError("the server is shutting down"))
                return
            sounds += [s for s in new if s.send(None)]
            sounds = [s for s in sounds if not s.done.cancelled()]
            if not sounds:
                batch = Batch()
            else:
                answers = turn(self.listener, batch, {s: s.ask for s in sounds})
                rest = [s for s in sounds if s not in answers]
                sounds = rest + [s for s, answer in answers.items() if s.send(answer)]
