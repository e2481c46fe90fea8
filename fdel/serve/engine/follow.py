"""One engine on several processes: the first plans and serves, the others execute the same calls on their devices.

All make the same `Device` over one mesh (`jax.distributed`). The first sends the calls that it is about to execute, host
arrays of some kilobytes, over TCP (`packing.pack_call`; bytes alone, nothing is unpickled); nothing else keeps the others
in step. Not `multihost_utils.broadcast_one_to_all`: that would wait on the device behind the step before, and time out
while no requests come.

    engine = Engine(model, settings, make=leading("10.0.0.1:9000", secret, 1))     # process 0
    follow(Device(model, settings), "10.0.0.1:9000", secret)                       # process 1, returns at the end

New weights are given to the first alone, on its own devices or its host, with reshard=True; the others get them from it
over the same connections (`transfer`). Both lay them out as they go, so that nobody holds them twice.
"""

import contextlib
import hmac
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from multiprocessing.connection import Connection
from secrets import token_bytes
from typing import Any, ClassVar

import jax
import numpy as np

from fdel import params as P
from fdel.serve.engine import transfer
from fdel.serve.engine.device import Device
from fdel.serve.engine.packing import Call, pack_call, unpack_call
from fdel.serve.engine.pictures import Size, size_of
from fdel.serve.engine.views import View, layer_views

MOST = 1 << 30  # bytes of a message
PROOF = 5.0  # seconds for the proof that the other side knows the secret
PROOF_BYTES = 32  # of a number that is drawn, and of a proof


class Lost(RuntimeError):
    """Another process of this engine is gone."""


class Leader(Device):
    """The device of process 0: its followers execute what it executes. It is made and closed by its engine."""

    unembedded: ClassVar[str | None] = (
        "this engine runs on several processes: it generates and scores, and embeds nothing"
    )

    def __init__(self, *args: Any, address: str, secret: bytes, followers: int, timeout: float, **how: Any):
        self.connections: list[Connection] = []
        self.turn = threading.Lock()  # steps, and what other threads score: all processes execute them in one order
        super().__init__(*args, **how)
        self.connections = accept(address, secret, followers, timeout)

    def execute(self, call: Call) -> Any:
        """Execute it everywhere; Lost if a follower is gone."""
        with self.turn:
            self._send(call)
            return alone(self, call) if call.name == "score" else super().execute(call)

    def checked(self, adapter: str, params: Any, **how: bool) -> Any:
        """Check new weights, all of which process 0 has. ValueError for those that lie on other processes."""
        own = self.weights.arrays() if adapter else set[int]()
        named = P.named_leaves(layer_views(params))
        far = [path for path, x in named if not (transfer.reachable(x.array) or id(x.array) in own)]
        if far:
            raise ValueError(
                f"{far[0]} lies on devices of other processes ({len(far)} such arrays); give new weights on those of "
                "process 0, or on its host, with reshard=True"
            )
        return super().checked(adapter, params, **how)

    def replace(self, adapter: str, new: Any, reuse: bool = False) -> None:
        """Hold other weights everywhere; Lost if a follower is gone. They go array by array: nothing is written over."""
        own = self.weights.is_base
        with self.turn:
            self._send(Call("weights", [transfer.describe(new, own, adapter)], adapter))
            super().replace(adapter, transfer.sending(new, own, adapter, self._send_array))

    def warm_up(self, least: bool = False) -> None:
        """Compile every program: all processes must have the one that a step needs."""
        super().warm_up()

    def compiler(self, name: str, n: int) -> Callable[[], None]:
        """Have the followers compile it too, beside their steps."""
        with self.turn:
            self._send(Call("compile", static={name: n}))
        return super().compiler(name, n)

    def close(self) -> None:
        """Let the followers go."""
        with self.turn, contextlib.suppress(Lost):  # gone already
            self._send(Call("end"))
        for c in self.connections:
            c.close()
        self.connections = []

    def _send(self, call: Call) -> None:
        self._send_bytes(pack_call(call))

    def _send_array(self, x: np.ndarray) -> None:
        for piece in transfer.pieces(x):
            self._send_bytes(piece)

    def _send_bytes(self, message: Any) -> None:
        for i, c in enumerate(self.connections):
            try:
                if c.poll():  # followers say nothing while they live
                    raise ConnectionResetError("the connection was closed")
                c.send_bytes(message)
            except OSError as e:
                raise Lost(f"follower {i} of {len(self.connections)} is gone ({e}); start all processes again") from e


def leading(address: str, secret: bytes, followers: int, timeout: float = 300.0) -> Callable[..., Leader]:
    """Make what `Engine(..., make=)` wants in process 0: a device that waits at "host:port" for its followers."""
    return partial(Leader, address=address, secret=secret, followers=followers, timeout=timeout)


def follow(device: Device, address: str, secret: bytes, timeout: float = 300.0) -> None:
    """Execute here what the leader executes there, until it ends. Lost if it goes without a word.

    An error here is raised: this process then ends, which the leader notices at its next step.
    """
    compiling: dict[Size, Future] = {}
    with connect(address, secret, timeout) as connection, ThreadPoolExecutor() as threads:
        while (call := receive(connection)).name != "end":
            if call.name == "encode" and (waits := compiling.pop(size_of(call.arrays[0]), None)):
                wait([waits])  # the leader was quicker; if it failed here, the call raises what is wrong
            if call.name == "weights":
                base = jax.tree.map(View, device.weights[""] if call.adapter else device.weights.like)
                device.replace(call.adapter, transfer.receiving(call.arrays[0], base, partial(fill, connection)))
            elif call.name == "score":
                alone(device, call)
            elif call.name == "compile":
                ((name, n),) = call.static.items()
                compiling[name, n] = threads.submit(device.compiler(name, n))
            else:
                device.execute(call)


def alone(device: Device, call: Call) -> Any:
    """Execute a call that no step waits for. On CPU it could run beside one, and what both send to others would mix."""
    jax.block_until_ready((device.state, device.sequences))
    return jax.block_until_ready(device.perform(call))


def receive(connection: Connection) -> Call:
    """Wait for the next call. Lost if the other side is gone or sends more than `MOST` bytes, ValueError for no call."""
    try:
        return unpack_call(connection.recv_bytes(MOST))
    except (OSError, EOFError) as e:
        raise Lost(f"the other process is gone, or sent more than {MOST} bytes ({e})") from e


def fill(connection: Connection, x: np.ndarray) -> None:
    """Wait for the bytes of an array. Lost if the other side is gone, ValueError if others come."""
    try:
        transfer.receive(connection, x)
    except (OSError, EOFError) as e:
        raise Lost(f"the other process is gone, half-way through an array ({e})") from e


def accept(address: str, secret: bytes, count: int, timeout: float) -> list[Connection]:
    """Wait for `count` followers; who does not know the secret is sent away. TimeoutError if they do not come."""
    host, _, port = address.rpartition(":")
    connections: list[Connection] = []
    end = time.monotonic() + timeout
    with socket.create_server((host, int(port))) as server:
        while len(connections) < count:
            server.settimeout(max(0.01, end - time.monotonic()))
            try:
                s, _ = server.accept()
            except TimeoutError as e:
                raise TimeoutError(f"{len(connections)} of {count} followers came to {address} in {timeout:g} s") from e
            with contextlib.suppress(OSError, EOFError):
                connections.append(authenticated(s, secret, b"leader", PROOF))
    return connections


def connect(address: str, secret: bytes, timeout: float) -> Connection:
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
        left = max(1.0, end - time.monotonic())  # strangers may stand before us, each for PROOF seconds
        return authenticated(s, secret, b"follower", left)
    except (OSError, EOFError) as e:
        raise PermissionError(f"the process at {address} did not prove that it knows the secret ({e})") from e


def authenticated(s: socket.socket, secret: bytes, role: bytes, seconds: float) -> Connection:
    """Make a connection of a socket once both sides have proved that they know the secret, which is never sent.

    A proof is HMAC-SHA256 of the prover's role and a number that each side has just drawn. Followers prove first, so that
    strangers get no proof from a leader. PermissionError for a wrong one; OSError or EOFError for a side that has not sent
    its number and its proof within so many seconds.
    """
    end = time.monotonic() + seconds
    with s:
        if len(secret) < 16:
            raise ValueError(f"a secret of {len(secret)} bytes; expected at least 16, such as secrets.token_bytes(32)")
        s.settimeout(seconds)
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # send small messages at once
        s.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # notice a machine that is gone
        s.sendall(ours := token_bytes(PROOF_BYTES))
        theirs = _receive_proof(s, end)
        drawn = ours + theirs if role == b"leader" else theirs + ours
        for prover in (b"follower", b"leader"):
            proof = hmac.digest(secret, prover + drawn, "sha256")
            if prover == role:
                s.sendall(proof)
            elif not hmac.compare_digest(_receive_proof(s, end), proof):
                raise PermissionError("the process at the other end does not know the secret; give all the same")
        s.settimeout(None)
        return Connection(s.detach())


def _receive_proof(s: socket.socket, end: float) -> bytes:
    """Read a number or a proof until `end`, also from a side that sends a byte at a time."""
    received = b""
    while len(received) < PROOF_BYTES:
        if (left := end - time.monotonic()) <= 0:
            raise TimeoutError("the time for a proof is over")
        s.settimeout(left)
        if not (part := s.recv(PROOF_BYTES - len(received))):
            raise EOFError("the connection was closed")
        received += part
    return received
