"""Work that a stranger's text can make expensive or fatal, in child processes, with a fair share for each who asks.

A child that takes too long, too much memory, or ends, costs the one request that it worked for; another takes its place.
So does a client that hangs up meanwhile. Light work has children of its own, which what is heavy cannot hold.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fdel.serve import worker
from fdel.serve.limits import LATER, Turns
from fdel.serve.openai import APIError, Chat

log = logging.getLogger(__name__)

LARGE = 2**16  # the most bytes of JSON that the event loop parses itself, and characters of text that are light work
CPU = {"check": 5.0, "encode": 5.0, "chat": 2.0, "compile": 2.0}  # seconds of processor time for one job
WALL = 20.0  # seconds for one job, on a machine that is busy
START = 120.0  # seconds for the first child: it loads the tokenizers
_CODE = "import json, sys; sys.path = json.loads(sys.argv[2]); import fdel.serve.worker as w; w.main(int(sys.argv[1]))"
_WHAT = {"check": "the body", "encode": "the text", "chat": "the chat", "compile": "the grammar"}


@dataclass(eq=False)
class _Child:
    """A child process and our end of its socket."""

    number: int
    socket: socket.socket

    def alive(self) -> bool:
        """Whether it has not ended since its last answer."""
        try:
            return bool(self.socket.recv(1, socket.MSG_PEEK))  # nothing was asked, so all there is to read is the end
        except BlockingIOError:
            return True
        except OSError:
            return False

    async def read(self, size: int) -> bytes:
        """Read so many bytes. EOFError if it ended."""
        loop, parts = asyncio.get_running_loop(), []
        while size:
            part = await loop.sock_recv(self.socket, min(size, 2**18))
            if not part:
                raise EOFError
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


@dataclass(eq=False)
class _Lane:
    """Children for one kind of work, and how nice they are."""

    nice: int
    turns: Turns
    idle: list[_Child] = field(default_factory=list)


class Aside:
    """The child processes of a server; `facts` describes each model's texts (`Texts.facts`). Used in one event loop."""

    def __init__(self, facts: Mapping[str, Mapping[str, Any]]):
        heavy = max(2, (os.cpu_count() or 1) // 4)
        self.facts, self.number, self.closed = facts, 0, False
        self.light = _Lane(0, Turns(2 * heavy, 2 * heavy - 1))
        self.heavy = _Lane(5, Turns(heavy, heavy // 2))
        self.process, self.control = self._start()

    def _start(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        """Start the process that forks. It inherits nothing but its end of a socket."""
        ours, theirs = socket.socketpair()
        with theirs, tempfile.TemporaryFile() as described:
            described.write(json.dumps(self.facts).encode())
            described.seek(0)
            command = [sys.executable, "-P", "-W", "ignore", "-c", _CODE, str(theirs.fileno()), json.dumps(sys.path)]
            process = subprocess.Popen(
                command, stdin=described, stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True
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

    async def chat(self, who: str, model: str, asked: Chat, large: bool = False) -> tuple[str, list[int]]:
        """Render and tokenize a chat: (the end of its text, its tokens)."""
        said: dict[str, Any] = {
            "messages": asked.messages,
            "tools": [t.spec for t in asked.tools] or None,
            "variables": asked.template,
        }
        tail, data = await self.ask(who, "chat", model, large=large, **said)
        return tail, array("I", data).tolist()

    async def encode(
        self, who: str, model: str, texts: Sequence[str], special: bool = True, seen: bool = False
    ) -> list[list[int]]:
        """Tokenize texts; see `worker._encode`."""
        large = sum(map(len, texts)) > LARGE
        lengths, data = await self.ask(who, "encode", model, large=large, texts=texts, special=special, seen=seen)
        ids = iter(array("I", data).tolist())
        return [list(itertools.islice(ids, n)) for n in lengths]

    async def ask(
        self, who: str, job: str, model: str = "", data: bytes = b"", *, large: bool = False, **asked: Any
    ) -> tuple[Any, bytes]:
        """Have a job of `worker.JOBS` done. APIError with what is wrong, and for what cannot be done within the limits."""
        lane = self.heavy if large else self.light
        header = {"job": job, "model": model, "cpu": CPU[job], "wall": WALL + 1, **asked}
        message = await asyncio.to_thread(worker.pack, header, data) if large else worker.pack(header, data)
        async with lane.turns.turn(who):
            child = await self._child(lane)
            try:
                async with asyncio.timeout(WALL):
                    await asyncio.get_running_loop().sock_sendall(child.socket, message)
                    size, more = worker.HEAD.unpack(await child.read(worker.HEAD.size))
                    answer, data = json.loads(await child.read(size)), await child.read(more)
            except (EOFError, OSError) as e:  # TimeoutError is one
                self._drop(child)
                raise self._failed(job, repr(e)) from e
            except BaseException:  # the client has gone
                self._drop(child)
                raise
            if "fault" in answer:
                self._drop(child)
                raise self._failed(job, answer["fault"])
            lane.idle.append(child)
        if "error" in answer:
            raise APIError(**answer["error"])
        return answer["value"], data

    def _failed(self, job: str, why: str) -> APIError:
        if self.closed:
            return APIError("the server is shutting down", **LATER, code="draining")
        log.warning("a child process ended at the job %s: %s", job, why)
        return APIError(f"{_WHAT[job]} cannot be used: it is too deep, or needs too much time or memory")

    async def _child(self, lane: _Lane) -> _Child:
        """Take a child that waits, or fork one."""
        while lane.idle:
            if (child := lane.idle.pop()).alive():
                return child
            self._drop(child)
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self.number += 1
        child = _Child(self.number, ours)
        try:
            with theirs:
                self._order(b"f", self.number, lane.nice, theirs)
            async with asyncio.timeout(START):
                await child.read(1)
        except (EOFError, OSError) as e:
            self._drop(child)
            if not self.closed:
                log.error("no child process could be started: %r", e)
            raise APIError("the server cannot do this now; try again", **LATER, code="unavailable") from e
        except BaseException:
            self._drop(child)
            raise
        return child

    def _drop(self, child: _Child) -> None:
        """End a child."""
        child.socket.close()
        with contextlib.suppress(OSError):
            self._order(b"k", child.number)

    def _order(self, kind: bytes, number: int, nice: int = 0, end: socket.socket | None = None) -> None:
        """Tell the process that forks what to do; start another if it has ended. OSError after `close`."""
        order = worker.ORDER.pack(kind, number, nice)
        send = lambda: socket.send_fds(self.control, [order], [] if end is None else [end.fileno()])
        try:
            send()
        except (BrokenPipeError, ConnectionResetError):
            self.control.close()
            self.process.wait()
            self.process, self.control = self._start()
            if end is not None:
                send()
