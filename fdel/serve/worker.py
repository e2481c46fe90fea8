"""Child processes for what a stranger's text can make expensive or fatal: see `aside`, which asks them.

`main` runs in a process that loads the tokenizers once and then only forks: a new child is there within milliseconds
and shares their memory. It ends, and its children with it, when the server does. A child answers one job at a time and
is ended by the kernel when a job takes too long; it has little memory beyond what it began with, and writes no files.
Messages are `pack`ed: JSON and bytes behind it, no pickle.
"""

import contextlib
import gc
import json
import os
import resource
import signal
import socket
import struct
import sys
import time
from array import array
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np

from fdel.serve import grammar
from fdel.serve.openai import checks
from fdel.serve.texts import Texts

HEAD = struct.Struct(">II")  # lengths of the JSON and of the bytes
ORDER = struct.Struct(">cIB")  # to the process that forks: b"f" or b"k" (fork, kill), the child's number, its niceness
TRIAL_STACK = 2**22  # bytes: chains of 500 to 1,500 references
TRIAL_STEPS = 16  # tokens
TRIAL_STEP = 0.1  # seconds for one of them; llguidance's limits allow about 0.015
MEMORY = 2**30  # bytes that a child may take beyond what it begins with


def pack(value: Any, data: bytes = b"") -> bytes:
    """Write a message."""
    said = json.dumps(value, separators=(",", ":")).encode()
    return HEAD.pack(len(said), len(data)) + said + data


# ---- the jobs: (texts, arguments, bytes) -> (value, bytes) ---------------------------------------------------------


def _check(texts: Texts, asked: Mapping[str, Any], data: bytes) -> tuple[Any, bytes]:
    """Look whether bytes are a body that may be parsed."""
    checks.load(data)
    return None, b""


def _encode(texts: Texts, asked: Mapping[str, Any], data: bytes) -> tuple[Any, bytes]:
    """Tokenize texts, as `Texts.encode` does, or as `Texts.tokens` (`seen`)."""
    each = texts.tokens if asked["seen"] else texts.encode
    found = [each(said, asked["special"]) for said in asked["texts"]]
    return list(map(len, found)), b"".join(array("I", ids).tobytes() for ids in found)


def _chat(texts: Texts, asked: Mapping[str, Any], data: bytes) -> tuple[Any, bytes]:
    """Render and tokenize a chat; gives the end of its text."""
    said, ids = texts.chat(asked["messages"], asked["tools"], asked["variables"])
    return said.rstrip()[-256:], array("I", ids).tobytes()


def _compile(texts: Texts, asked: Mapping[str, Any], data: bytes) -> tuple[Any, bytes]:
    """Try a grammar with a stack that is small beside those where it will be used, and follow it for a few tokens."""
    spec = grammar.Spec(asked["kind"], asked["body"])
    matcher = grammar.compile(texts.vocabulary, spec, stack=TRIAL_STACK)
    for _ in range(TRIAL_STEPS):
        begin = time.process_time()
        allowed = np.flatnonzero(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little"))
        if matcher.done or not len(allowed):
            break
        matcher.commit(int(allowed[0]))
        if time.process_time() - begin > TRIAL_STEP:  # the engine's thread would do this, for all
            raise ValueError(f"the {spec.kind} cannot be used: a token of it takes more than {TRIAL_STEP} s")
    return None, b""


JOBS: dict[str, Any] = {"check": _check, "encode": _encode, "chat": _chat, "compile": _compile}


# ---- a child -------------------------------------------------------------------------------------------------------


def serve(connection: socket.socket, models: Mapping[str, Texts]) -> None:
    """Answer jobs until the server closes the connection."""
    stream = connection.makefile("rb")
    connection.sendall(b"!")  # ready
    while head := stream.read(HEAD.size):
        size, more = HEAD.unpack(head)
        asked, data = json.loads(stream.read(size)), stream.read(more)
        signal.setitimer(signal.ITIMER_PROF, asked["cpu"])  # their signals end the process, whatever it does
        signal.setitimer(signal.ITIMER_REAL, asked["wall"])
        try:
            value, data = JOBS[asked["job"]](models[asked["model"]] if asked["model"] else None, asked, data)
            answer = pack({"value": value}, data)
        except checks.APIError as e:
            said = {"message": e.message, "param": e.param, "code": e.code, "status": e.status}
            answer = pack({"error": said})
        except ValueError as e:
            answer = pack({"error": {"message": str(e)}})
        except BaseException as e:  # a panic of Rust, no memory, a bug: this process may be damaged
            connection.sendall(pack({"fault": f"{type(e).__name__}: {e}"[:500]}))
            raise
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
        connection.sendall(answer)


def _child(connection: socket.socket, models: Mapping[str, Texts], nice: int) -> NoReturn:
    """Be a child that was just forked."""
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):  # what Rust says when it panics would fill the log
            os.dup2(null, number)
        os.nice(nice)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        with contextlib.suppress(OSError), open("/proc/self/statm") as f:  # elsewhere memory is not limited
            size = int(f.read().split()[0]) * resource.getpagesize() + MEMORY
            resource.setrlimit(resource.RLIMIT_AS, (size, size))
        serve(connection, models)
    finally:
        os._exit(0)


# ---- the process that forks ----------------------------------------------------------------------------------------


def main(descriptor: int) -> None:
    """Load what stdin describes, then fork and kill as the socket with this number says, until it is closed."""
    control = socket.socket(fileno=descriptor)
    models = {name: Texts.from_facts(facts) for name, facts in json.load(sys.stdin.buffer).items()}
    for texts in models.values():
        _warm(texts)
    gc.freeze()  # a collection in a child would copy every page
    children: dict[int, int] = {}
    while True:
        order, descriptors, _, _ = socket.recv_fds(control, ORDER.size, 1, socket.MSG_WAITALL)
        if len(order) < ORDER.size:
            break
        kind, number, nice = ORDER.unpack(order)
        if kind == b"k" and number in children:
            _kill(children.pop(number))
        elif kind == b"f" and descriptors:
            connection = socket.socket(fileno=descriptors[0])
            pid = os.fork()
            if pid == 0:
                control.close()
                _child(connection, models, nice)
            children[number] = pid
            connection.close()
    for pid in children.values():
        _kill(pid)


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)  # nobody else waits for it, so the number is still its own
    os.waitpid(pid, 0)


def _warm(texts: Texts) -> None:
    """Make what is made once, before it is shared."""
    texts.plain, texts.specials  # noqa: B018
    with contextlib.suppress(ValueError):
        texts.longest  # noqa: B018
    with contextlib.suppress(ValueError, ImportError):
        texts.vocabulary.trie  # noqa: B018
