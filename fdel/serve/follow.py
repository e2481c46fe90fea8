"""One engine on several processes: the first plans and serves, the others make the same calls to their devices.

All make the same `Device` over one mesh (`jax.distributed`). The first sends what it is about to launch, host arrays of
some kilobytes, over TCP; nothing else keeps the others in step. Not `multihost_utils.broadcast_one_to_all`: that would
wait on the device behind the step before, and time out while no requests come.

    engine = Engine(model, settings, make=leading("10.0.0.1:9000", secret, 1))         # process 0
    follow(make_device(model, settings), "10.0.0.1:9000", secret)                      # process 1, returns at the end
"""

import hmac
import json
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import numpy as np

from fdel.serve.device import Device
from fdel.serve.sample import sampling_rows

NONCE, HEAD, MOST = 32, struct.Struct(">IQ"), 1 << 30  # bytes: of a challenge; of two lengths; the most of a message
DTYPES = ("bool", "int32", "uint32", "float32", "int64", "uint64")  # of the arrays that are sent
ROUTES = ("begin", "warm_up", "admit", "extend", "decode")
END = "end"


class Lost(RuntimeError):
    """Another process of this engine is gone."""


@dataclass
class Leader(Device):
    """The device of process 0: tells its followers what it launches. It is made and closed by its engine."""

    fixed: ClassVar[str | None] = "this engine runs on several processes: its weights stay, and it only generates"

    address: str = ""
    secret: bytes = b""
    followers: int = 0
    timeout: float = 300.0

    def __post_init__(self) -> None:
        self.sockets: list[socket.socket] = []
        super().__post_init__()
        self.sockets = accept(self.address, self.secret, self.followers, self.timeout)

    def launch(self, name: str, arrays: Sequence[Any] = (), adapter: str = "", **static: int) -> Any:
        """Have it launched everywhere; Lost if a follower is gone."""
        self._tell(name, jax.tree.leaves(tuple(arrays)), adapter, static)
        return super().launch(name, arrays, adapter, **static)

    def warm_up(self, least: bool = False) -> None:
        """Compile every program: all processes must have the one that a step needs."""
        super().warm_up()

    def close(self) -> None:
        """Let the followers go."""
        try:
            self._tell(END, (), "", {})
        except Lost:
            pass  # gone already
        for s in self.sockets:
            s.close()
        self.sockets = []

    def _tell(self, name: str, arrays: Sequence[Any], adapter: str, static: dict[str, int]) -> None:
        message = pack(name, arrays, adapter, static)
        for i, s in enumerate(self.sockets):
            try:
                if s.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK) == b"":
                    raise ConnectionResetError("the connection was closed")
            except BlockingIOError:
                pass  # nothing to read: followers say nothing while they live
            except OSError as e:
                raise Lost(f"follower {i} of {len(self.sockets)} is gone ({e}); start all processes again") from e
            try:
                s.sendall(message)
            except OSError as e:
                raise Lost(f"follower {i} of {len(self.sockets)} is gone ({e}); start all processes again") from e


def leading(address: str, secret: bytes, followers: int, timeout: float = 300.0) -> Callable[..., Leader]:
    """Make what `Engine(..., make=)` wants in process 0: a device that waits at "host:port" for its followers."""
    return partial(Leader, address=address, secret=secret, followers=followers, timeout=timeout)


def follow(device: Device, address: str, secret: bytes, timeout: float = 300.0) -> None:
    """Launch here what the leader launches there, until it ends. Lost if it goes without a word.

    An error here is raised: this process then ends, which the leader notices at its next step.
    """
    with connect(address, secret, timeout) as s:
        template = sampling_rows([], [], [], [], vocab=device.model.cfg.vocab, rows=1)
        count, structure = len(jax.tree.leaves(template)), jax.tree.structure(template)
        while True:
            name, arrays, adapter, static = unpack(partial(receive, s))
            if name == END:
                return
            if name == "admit":  # row, tokens, length, Sampling, slot
                arrays = [*arrays[:3], jax.tree.unflatten(structure, arrays[3 : 3 + count]), *arrays[3 + count :]]
            device.launch(name, arrays, adapter, **static)


# ---- messages: two lengths, a header of JSON, the arrays' bytes ------------------------------------------------------


def pack(name: str, arrays: Sequence[Any], adapter: str, static: dict[str, int]) -> bytes:
    """Write a call as bytes."""
    found = [np.asarray(a) for a in arrays]
    header = json.dumps([name, [[a.dtype.name, a.shape] for a in found], adapter, static]).encode()
    body = b"".join(np.ascontiguousarray(a).tobytes() for a in found)
    return HEAD.pack(len(header), len(body)) + header + body


def unpack(read: Callable[[int], bytes]) -> tuple[str, list[Any], str, dict[str, int]]:
    """Read a call from what gives so many bytes; ValueError if it is none."""
    header_size, body_size = HEAD.unpack(read(HEAD.size))
    if header_size + body_size > MOST:
        raise ValueError(f"a message of {header_size + body_size} bytes; the most is {MOST}: is this another version?")
    name, described, adapter, static = json.loads(read(header_size))
    body, at, arrays = memoryview(read(body_size)), 0, []
    for dtype, shape in described:
        if dtype not in DTYPES:
            raise ValueError(f"a message with an array of {dtype!r}; expected one of {', '.join(DTYPES)}")
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        arrays.append(np.frombuffer(body[at : at + size], dtype).reshape(shape))
        at += size
    if at != body_size or name not in (*ROUTES, END):
        raise ValueError(f"a message {name!r} of {body_size} bytes, {at} of them arrays: is this another version?")
    return name, arrays, adapter, static


def receive(s: socket.socket, size: int) -> bytes:
    """Read so many bytes; Lost if the other side is gone."""
    data = bytearray()
    while len(data) < size:
        try:
            part = s.recv(min(size - len(data), 1 << 20))
        except TimeoutError:
            raise
        except OSError as e:
            raise Lost(f"the other process is gone ({e})") from e
        if not part:
            raise Lost("the other process is gone")
        data += part
    return bytes(data)


# ---- connections: both sides prove that they know the secret, which is never sent --------------------------------------


def accept(address: str, secret: bytes, count: int, timeout: float) -> list[socket.socket]:
    """Wait for `count` followers; who does not know the secret is sent away. TimeoutError if they do not come."""
    host, _, port = address.rpartition(":")
    found: list[socket.socket] = []
    end = time.monotonic() + timeout
    with socket.create_server((host, int(port))) as server:
        while len(found) < count:
            server.settimeout(max(0.01, end - time.monotonic()))
            try:
                s, _ = server.accept()
            except TimeoutError as e:
                raise TimeoutError(f"{len(found)} of {count} followers came to {address} in {timeout:g} s") from e
            s.settimeout(min(5.0, timeout))  # for the proof alone: a stranger cannot keep others waiting for long
            try:
                prove(s, secret, b"leader", b"follower")
            except (Lost, PermissionError, OSError):
                s.close()
                continue
            ready(s)
            found.append(s)
    return found


def connect(address: str, secret: bytes, timeout: float) -> socket.socket:
    """Reach the leader, which may not listen yet. TimeoutError if it does not, PermissionError for another secret."""
    host, _, port = address.rpartition(":")
    end = time.monotonic() + timeout
    while True:
        try:
            s = socket.create_connection((host, int(port)), timeout=5.0)
            break
        except OSError as e:
            if time.monotonic() > end:
                raise TimeoutError(f"nobody listens at {address} ({e}); start process 0 with this address") from e
            time.sleep(0.1)
    try:
        prove(s, secret, b"follower", b"leader")
    except BaseException:
        s.close()
        raise
    ready(s)
    return s


def ready(s: socket.socket) -> None:
    """Wait without end for the next message, send small ones at once, and notice a machine that is gone."""
    s.settimeout(None)
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def prove(s: socket.socket, secret: bytes, me: bytes, other: bytes) -> None:
    """Show each other, by HMACs of random challenges, that both know the secret. PermissionError otherwise."""
    if len(secret) < 16:
        raise ValueError(f"a secret of {len(secret)} bytes; expected at least 16, such as secrets.token_bytes(32)")
    mine = secrets.token_bytes(NONCE)
    s.sendall(mine)
    theirs = receive(s, NONCE)
    answer = lambda who: hmac.digest(secret, who + mine + theirs if who == me else who + theirs + mine, "sha256")
    s.sendall(answer(me))
    if not hmac.compare_digest(receive(s, NONCE), answer(other)):
        raise PermissionError("the process at the other end does not know the secret; give all of them the same")
