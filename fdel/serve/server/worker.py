"""Child processes for what a stranger's text can make expensive or fatal: see `worker_pool`, which asks them.

`main` runs in a process that loads the tokenizers once and then only forks: a new child is there within milliseconds
and shares their memory. It ends, and its children with it, when the server does. A child answers one job at a time and
is ended by the kernel when a job takes too long; it has little memory beyond what it began with, and writes no files.
Messages are `pack`ed: JSON and bytes behind it, no pickle.
"""

import base64
import contextlib
import gc
import hashlib
import itertools
import json
import operator
import os
import resource
import signal
import socket
import struct
import sys
from array import array
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np

from fdel.media import sound
from fdel.media.hearing import Film, Sound
from fdel.media.senses import Most
from fdel.serve.server import grammar
from fdel.serve.server.openai import checks
from fdel.serve.server.tokenizing import PromptEncoder

HEAD = struct.Struct(">II")  # lengths of the JSON and of the bytes
# To the process that forks: fork, kill or demote; the child's number; whether it is demoted
ORDER = struct.Struct(">cI?")
TRIAL_STACK = 2**22  # bytes: chains of 500 to 1,500 references
TRIAL_STEPS = 16  # tokens
PIXEL = b"GIF87a\1\0\1\0\x80\0\0\0\0\0\0\0\0,\0\0\0\0\1\0\1\0\0\2\2D\1\0;"  # a picture
MEMORY = 2**30  # bytes that a child may take beyond what it begins with


def pack(value: Any, data: bytes = b"") -> bytes:
    """Write a message."""
    said = json.dumps(value, separators=(",", ":")).encode()
    return HEAD.pack(len(said), len(data)) + said + data


# ---- the jobs: (encoder, arguments, bytes) -> (value, bytes) -------------------------------------------------------


def _check(encoder: PromptEncoder, asked: Mapping[str, Any], data: bytes) -> tuple[Any, bytes]:
    """Look whether bytes are a body that may be parsed."""
    checks.load(data)
    return None, b""


def _encode(encoder: PromptEncoder, asked: Mapping[str, Any], data: bytes) -> tuple[Any, bytes]:
    """Tokenize texts, as `PromptEncoder.encode` does, or as `PromptEncoder.tokens` (`seen`)."""
    each = encoder.tokens if asked["seen"] else encoder.encode
    found = [each(said, asked["special"]) for said in asked["texts"]]
    return list(map(len, found)), b"".join(array("I", ids).tobytes() for ids in found)


def _chat(encoder: PromptEncoder, asked: Mapping[str, Any], data: bytes) -> tuple[Any, bytes]:
    """Render and tokenize a chat; gives the end of its text."""
    said, ids = encoder.chat(asked["messages"], asked["tools"], asked["variables"])
    return said.rstrip()[-256:], array("I", ids).tobytes()


def _compile(encoder: PromptEncoder, asked: Mapping[str, Any], data: bytes) -> tuple[Any, bytes]:
    """Try a grammar with a stack that is small beside those where it will be used, and follow it for a few tokens."""
    spec = grammar.Spec(asked["kind"], asked["body"])
    matcher = grammar.compile(encoder.vocabulary, spec, stack=TRIAL_STACK)
    for _ in range(TRIAL_STEPS):
        allowed = np.flatnonzero(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little"))
        allowed = np.setdiff1d(allowed, encoder.vocabulary.eos)  # the end would end the trial
        if matcher.done or not len(allowed):
            break
        matcher.commit(int(allowed[0]))
    if matcher.slow:  # the engine's thread would do this, for all
        raise ValueError(f"the {spec.kind} cannot be used: {matcher.error}")
    return None, b""


def _sound(encoder: PromptEncoder, asked: Mapping[str, Any], data: bytes) -> tuple[Any, bytes]:
    """Decode a file of at most `most` seconds: its length in seconds, and log-mel features float32[bins frames].

    With `window`, silence fills it up to so many samples.
    """
    x = sound.decode(data, most=asked["most"])
    if window := asked.get("window"):
        return len(x) / sound.RATE, sound.log_mel(x[:window], asked["bins"], least=window).tobytes()
    frames = max(1, len(x) // sound.HOP)
    quiet = len(x) + sound.FRAME  # silence after the end
    return len(x) / sound.RATE, sound.log_mel(x, asked["bins"], least=quiet)[:, :frames].tobytes()


def _shown(encoder: PromptEncoder, asked: Mapping[str, Any], data: bytes) -> tuple[Any, bytes]:
    """Decode and prepare a file of a `kind`, with `most` in it, `encoded` in base64 or not: its facts, and its arrays."""
    if asked["encoded"]:
        try:
            data = base64.b64decode(data, validate=True)
        except ValueError as e:
            raise ValueError(f"expected base64 behind the comma: {e}") from e
    # What takes more tokens ends here, before its arrays go to the server, which would hold them.
    x = encoder.prepared(asked["kind"], data, Most(*asked["most"])._replace(tokens=encoder.context))
    parts = (x.picture, x.sound) if isinstance(x, Film) else (x,)
    arrays = [a for p in parts for a in ((p.features, p.lengths) if isinstance(p, Sound) else (p.patches, p.places))]
    arrays += [] if x.turns is None else [x.turns]
    arrays = [a.astype("<f4" if a.dtype.kind == "f" else "<i4") for a in arrays]
    raw, shapes = b"".join(a.tobytes() for a in arrays), [a.shape for a in arrays]
    digest = hashlib.blake2b(json.dumps([shapes, x.run]).encode() + raw, digest_size=32).hexdigest()
    runs = [p.run for p in parts]
    return {
        "shapes": shapes,
        "kinds": [a.dtype.kind for a in arrays],
        "run": x.run,
        "runs": runs,
        "digest": digest,
    }, raw


JOBS: dict[str, Any] = {
    "check": _check,
    "encode": _encode,
    "chat": _chat,
    "compile": _compile,
    "sound": _sound,
    **dict.fromkeys(("images", "videos", "films", "sounds"), _shown),
}


def serve(connection: socket.socket, models: Mapping[str, PromptEncoder]) -> None:
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


def _child(connection: socket.socket, models: Mapping[str, PromptEncoder], background: bool) -> NoReturn:
    """Be a child that was just forked."""
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):  # what Rust says when it panics would fill the log
            os.dup2(null, number)
        if background:
            _demote(0)
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
    models = {name: PromptEncoder.from_facts(facts) for name, facts in json.load(sys.stdin.buffer).items()}
    for encoder, made in itertools.product(
        models.values(), ("plain", "specials", "longest", "vocabulary.trie", "listed")
    ):
        with contextlib.suppress(ValueError, ImportError):  # what is made once, before it is shared
            operator.attrgetter(made)(encoder)
        for kind in ("images", "videos", "sounds"):  # what reads them is loaded once
            with contextlib.suppress(ValueError):
                encoder.prepared(kind, PIXEL, Most(1, 1, 1.0))
    gc.freeze()  # a collection in a child would copy every page
    children: dict[int, int] = {}
    while True:
        order, descriptors, _, _ = socket.recv_fds(control, ORDER.size, 1, socket.MSG_WAITALL)
        if len(order) < ORDER.size:
            break
        kind, number, background = ORDER.unpack(order)
        connection = socket.socket(fileno=descriptors[0]) if descriptors else None
        if kind == b"k" and number in children:
            ended = _kill(children.pop(number))
            if connection is not None:  # of a child that ended by itself
                with contextlib.suppress(OSError):
                    connection.sendall(bytes([ended]))
        elif kind == b"d" and number in children:
            _demote(children[number])
        elif kind == b"f" and connection is not None:
            pid = os.fork()
            if pid == 0:
                control.close()
                _child(connection, models, background)
            children[number] = pid
        if connection is not None:
            connection.close()
    for pid in children.values():
        _kill(pid)


def _demote(pid: int) -> None:
    """Let a process run only where nothing else would: the lowest priority alone still delays those that wake up often."""
    try:
        os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))
    except (AttributeError, OSError):  # not Linux
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, pid, 19)


def _kill(pid: int) -> int:
    """End a child, and return the signal that has ended it, which may have been another one before; 0 for none."""
    os.kill(pid, signal.SIGKILL)  # nobody else waits for it, so the number is still its own
    _, status = os.waitpid(pid, 0)
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
