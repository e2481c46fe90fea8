"""Work that a stranger's text can make expensive or fatal, in child processes, with a fair share for each holder.

A child that takes too long or too much memory costs the one request that it worked for, and another takes its place; so
does a client that hangs up meanwhile. A child that ended for a reason of its own, such as a signal from outside, costs
nothing: its job is done once more. Light work has children of its own, which heavy work cannot hold.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fdel.serve.server import worker
from fdel.serve.server.limits import FairSemaphore
from fdel.serve.server.openai import APIError, Chat

log = logging.getLogger(__name__)

LARGE = 2**16  # the most bytes of JSON that the event loop parses itself, and characters of text that are light work
CPU = {
    "check": 5.0,
    "encode": 5.0,
    "chat": 2.0,
    "compile": 2.0,
    "sound": 30.0,
    "images": 2.0,
    "videos": 10.0,
    "films": 10.0,
    "sounds": 10.0,
}  # seconds of processor time for one job; of a chat's videos `Server.video_cpu` says it
WALL = 60.0  # seconds for one job, which may run only where nothing else does
LIGHT = 0.05  # seconds for which a job may compete with the engine
START = 120.0  # seconds for the first child: it loads the tokenizers
_CODE = """import json, sys
sys.path = json.loads(sys.argv[2])
from fdel.serve.server import worker
worker.main(int(sys.argv[1]))"""
_TIME, _MEMORY, _DEPTH = "it needs too much time", "it needs too much memory", "it is nested too deep"
_SPENT = _TIME + ": {cpu:g} seconds of processor time are spent, the most that it may take; make it smaller"
# What a job did to its child: by the signal that ended it, and by the exception that it could not answer.
_ENDS: dict[int, str] = {signal.SIGPROF: _SPENT, signal.SIGALRM: _TIME, signal.SIGABRT: _MEMORY, signal.SIGBUS: _MEMORY,
         signal.SIGSEGV: _DEPTH}  # fmt: skip
_FAULTS = {"MemoryError": _MEMORY, "RecursionError": _DEPTH}
_WHAT = {"check": "the body", "encode": "the text", "chat": "the chat", "compile": "the grammar", "sound": "the file",
         "images": "the image", "videos": "the video", "films": "the video", "sounds": "the sound"}  # fmt: skip


@dataclass(eq=False)
class _Child:
    """A child process, our end of its socket, and whether it runs only where nothing else would."""

    number: int
    socket: socket.socket
    background: bool

    def alive(self) -> bool:
        """Whether it has not ended since its last answer."""
        try:
            return bool(self.socket.recv(1, socket.MSG_PEEK))  # nothing was asked, so all there is to read is the end
        except BlockingIOError:
            return True
        except OSError:
            return False

    async def ask(self, message: bytes, accept: Callable[[int], None]) -> tuple[dict[str, Any], bytearray]:
        """Have it do a job: the answer, and bytes, whose number `accept` is told first. EOFError or OSError if it ended."""
        await asyncio.get_running_loop().sock_sendall(self.socket, message)
        size, more = worker.HEAD.unpack(await self.read(worker.HEAD.size))
        accept(more)
        return json.loads(await self.read(size)), await self.read(more)

    async def read(self, size: int) -> bytearray:
        """Read so many bytes. EOFError if it ended."""
        loop, data = asyncio.get_running_loop(), bytearray(size)
        rest = memoryview(data)
        while len(rest):
            count = await loop.sock_recv_into(self.socket, rest[: 2**18])
            if not count:
                raise EOFError
            rest = rest[count:]
        return data


@dataclass(eq=False)
class _Lane:
    """Children for one kind of work; those in the background run only where nothing else would."""

    background: bool
    slots: FairSemaphore
    idle: list[_Child] = field(default_factory=list)


class WorkerPool:
    """The child processes of a server, for one event loop; `facts` describes each model (`PromptEncoder.facts`)."""

    def __init__(self, facts: Mapping[str, Mapping[str, Any]]):
        heavy = max(2, (os.cpu_count() or 1) // 4)
        self.facts, self.number, self.closed = facts, 0, False
        self.light = _Lane(False, FairSemaphore(2 * heavy, 2 * heavy - 1))
        self.heavy = _Lane(True, FairSemaphore(heavy, heavy // 2))
        self.process, self.control = self._start()

    def _start(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """Start the process that forks. It inherits nothing but its end of a socket."""
        ours, theirs = socket.socketpair()
        with theirs, tempfile.TemporaryFile() as described:
            described.write(json.dumps(self.facts).encode())
            described.seek(0)
            command = [sys.executable, "-P", "-W", "ignore", "-c", _CODE, str(theirs.fileno()), json.dumps(sys.path)]
            process = subprocess.Popen(
                command, stdin=described, stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()], process_group=0
            )
        return process, ours

    def close(self) -> None:
        """End all children, whatever they do; what they worked for is refused."""
        self.closed = True
        self.control.close()  # the process that forks kills them, and ends
        for lane in (self.light, self.heavy):
            while lane.idle:
                lane.idle.pop().socket.close()

    async def ended(self) -> None:
        """Wait until all of them are gone, after `close`."""
        await asyncio.to_thread(self.process.wait)

    async def chat(self, holder: str, model: str, asked: Chat, large: bool = False) -> tuple[str, list[int]]:
        """Render and tokenize a chat: (the end of its text, its tokens)."""
        said: dict[str, Any] = {
            "messages": asked.messages,
            "tools": [t.spec for t in asked.tools] or None,
            "variables": asked.template,
        }
        tail, data = await self.ask(holder, "chat", model, large=large, **said)
        return tail, array("I", data).tolist()

    async def encode(
        self, holder: str, model: str, texts: Sequence[str | Sequence[str]], special: bool = True, seen: bool = False
    ) -> list[list[int]]:
        """Tokenize texts, or pairs; see `worker._encode`."""
        large = sum(len(t) if isinstance(t, str) else sum(map(len, t)) for t in texts) > LARGE
        lengths, data = await self.ask(holder, "encode", model, large=large, texts=texts, special=special, seen=seen)
        ids = iter(array("I", data).tolist())
        return [list(itertools.islice(ids, n)) for n in lengths]

    async def ask(
        self, holder: str, job: str, model: str = "", data: bytes = b"", accept: Callable[[int], None] = lambda size: None,
        *, large: bool = False, **asked: Any,
    ) -> tuple[Any, bytes | bytearray]:  # fmt: skip
        """Have a job of `worker.JOBS` done. APIError with what is wrong, and for what cannot be done within the limits.

        `accept` is told how many bytes come with the answer before they do, and may raise to have none.
        """
        lane = self.heavy if large else self.light
        header = {"job": job, "model": model, "cpu": CPU[job], "wall": WALL + 1, **asked}
        message = await asyncio.to_thread(worker.pack, header, data) if large else worker.pack(header, data)
        async with lane.slots.slot(holder):
            for last in (False, True):
                child = await self._child(lane)
                late = asyncio.get_running_loop().call_later(LIGHT, self._demote, child)
                try:
                    async with asyncio.timeout(WALL):
                        answer, found = await child.ask(message, accept)
                except (EOFError, OSError) as e:  # TimeoutError is one
                    why = _TIME if isinstance(e, TimeoutError) else _ENDS.get(await self._end(child))
                    why = why and why.format(cpu=header["cpu"])
                    self._drop(child)
                    if why is None and not last and not self.closed:
                        log.warning("a child process ended for a reason of its own; another does its job %s", job)
                        continue
                    raise self._failed(job, repr(e), why) from e
                except BaseException:  # the client has gone
                    self._drop(child)
                    raise
                finally:
                    late.cancel()
                break
            if "fault" in answer:
                self._drop(child)
                why = _FAULTS.get(answer["fault"].partition(":")[0], "it fails the library that reads it")
                raise self._failed(job, answer["fault"], why)
            if child.background == lane.background:
                lane.idle.append(child)
            else:
                self._drop(child)
        if "error" in answer:
            raise APIError(**answer["error"])
        return answer["value"], found

    def _failed(self, job: str, fault: str, why: str | None) -> APIError:
        if self.closed:
            return _draining()
        log.warning("a child process ended at the job %s: %s (%s)", job, why or "from outside", fault)
        if why is None:
            return _unavailable()
        return APIError(f"{_WHAT[job]} cannot be used: {why}")

    async def _child(self, lane: _Lane) -> _Child:
        """Take a child that waits, or fork one: another one if it ends as it starts."""
        while lane.idle:
            if (child := lane.idle.pop()).alive():
                return child
            self._drop(child)
        with contextlib.suppress(EOFError):
            return await self._fork(lane)
        try:
            return await self._fork(lane)
        except EOFError as e:
            raise self._unstarted(e) from e

    async def _fork(self, lane: _Lane) -> _Child:
        """Fork a child. EOFError if it has ended, APIError if none can be had."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self.number += 1
        child = _Child(self.number, ours, lane.background)
        try:
            with theirs:
                self._order(b"f", self.number, lane.background, theirs)
            async with asyncio.timeout(START):
                await child.read(1)
        except OSError as e:
            self._drop(child)
            raise self._unstarted(e) from e
        except BaseException:  # EOFError is one
            self._drop(child)
            raise
        return child

    def _unstarted(self, e: Exception) -> APIError:
        if self.closed:
            return _draining()
        log.error("no child process could be started: %r", e)
        return _unavailable()

    def _demote(self, child: _Child) -> None:
        """Let a child whose job takes long run only where nothing else would: it is not worth a pause of all streams."""
        if not child.background:
            child.background = True
            with contextlib.suppress(OSError):
                self._order(b"d", child.number)

    def _drop(self, child: _Child) -> None:
        """End a child."""
        child.socket.close()
        with contextlib.suppress(OSError):
            self._order(b"k", child.number)

    async def _end(self, child: _Child) -> int:
        """Say which signal ended a child; 0 if none did, or if the process that forks has ended."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with ours, theirs, contextlib.suppress(OSError, EOFError):
            self._order(b"k", child.number, end=theirs)
            theirs.close()
            async with asyncio.timeout(WALL):
                return (await _Child(0, ours, False).read(1))[0]
        return 0

    def _order(self, kind: bytes, number: int, background: bool = False, end: socket.socket | None = None) -> None:
        """Tell the process that forks what to do; start another if it has ended. OSError after `close`."""
        order = worker.ORDER.pack(kind, number, background)
        send = lambda: socket.send_fds(self.control, [order], [] if end is None else [end.fileno()])
        try:
            send()
        except (BrokenPipeError, ConnectionResetError):
            self.control.close()
            self.process.wait()
            self.process, self.control = self._start()
            if end is not None:
                send()


def _draining() -> APIError:
    return APIError("the server is shutting down", status=503, code="draining", retry=1)


def _unavailable() -> APIError:
    return APIError("the server cannot do this now; try again", status=503, code="unavailable", retry=1)
