"""One engine on two processes: the answers of one process, a clean end, and a clear error when one of them dies."""

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from fdel.serve import follow
from fdel.serve.engine import Engine
from tests.serve import follow_worker

ROOT = Path(__file__).resolve().parents[2]


def free() -> str:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return f"localhost:{s.getsockname()[1]}"


def run(what: str) -> tuple[list[int], list[str], list[str]]:
    """Start both processes: how they ended, what they printed, what they complained of."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=1"
    env = dict(XLA_FLAGS=flags, JAX_PLATFORMS="cpu", JAX_DISABLE_MOST_OPTIMIZATIONS="1", PYTHONPATH=str(ROOT))
    addresses = free(), free()
    command = lambda i: [sys.executable, "-m", "tests.serve.follow_worker", addresses[0], str(i), addresses[1], what]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    processes = [subprocess.Popen(command(i), cwd=ROOT, env=os.environ | env, **pipes) for i in range(2)]
    try:
        said = [p.communicate(timeout=420) for p in processes]
    finally:
        for p in processes:
            p.kill()
    return [p.returncode for p in processes], [out for out, _ in said], [err for _, err in said]


@pytest.mark.slow
def test_two_processes_answer_as_one(model) -> None:
    codes, said, complaints = run("works")
    assert codes == [0, 0], complaints
    many, few, stays, aborted, preempted, refused, compiled = json.loads(said[0].splitlines()[-1])
    e = Engine(model, follow_worker.SETTINGS)
    assert [many, few, stays] == follow_worker.answers(e)[:3] and many == few
    assert aborted == "abort" and preempted and compiled == 0
    assert len(refused) == 3 and all("runs on several processes" in r for r in refused)
    assert said[1].splitlines()[-1] == "followed to the end"


@pytest.mark.slow
def test_a_follower_that_dies_fails_requests(model) -> None:
    codes, said, complaints = run("dies")
    assert codes == [0, 3], complaints
    reason, error, tokens = json.loads(said[0].splitlines()[-1])
    assert reason == "error" and 0 < tokens < 100
    assert "the engine stopped" in error and "follower 0 of 1 is gone" in error


# ---- messages and connections --------------------------------------------------------------------------------------


def reader(data: bytes):
    at = [0]

    def read(n: int) -> bytes:
        at[0] += n
        return data[at[0] - n : at[0]]

    return read


def test_a_call_arrives_as_it_was_sent() -> None:
    arrays = [
        np.arange(6, dtype=np.int32).reshape(2, 3).T,
        np.float32(0.5),
        np.array([True, False]),
        np.zeros((0, 4), "u4"),
    ]
    name, got, adapter, static = follow.unpack(reader(follow.pack("extend", arrays, "a", {"block": 32})))
    assert (name, adapter, static) == ("extend", "a", {"block": 32})
    for a, b in zip(arrays, got, strict=True):
        assert np.asarray(a).dtype == b.dtype and np.asarray(a).shape == b.shape
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("header", "body", "said"),
    [
        (["extend", [["object", [1]]], "", {}], b"12345678", "array of 'object'"),
        (["extend", [["int32", [3]]], "", {}], b"1234", "buffer|cannot reshape|4 bytes"),
        (["extend", [["int32", [1]]], "", {}], b"12345678", "8 bytes, 4 of them arrays"),
        (["__class__", [], "", {}], b"", "'__class__' of 0 bytes"),
    ],
)
def test_what_is_no_call_is_refused(header: list, body: bytes, said: str) -> None:
    text = json.dumps(header).encode()
    with pytest.raises(ValueError, match=said):
        follow.unpack(reader(follow.HEAD.pack(len(text), len(body)) + text + body))
    with pytest.raises(ValueError, match="the most is"):
        follow.unpack(reader(struct.pack(">IQ", 8, 1 << 40)))


def test_only_who_knows_the_secret_comes_in() -> None:
    """A stranger with another secret, and one that says nothing sensible, are sent away; the follower still comes."""
    address, found = free(), []
    leader = threading.Thread(target=lambda: found.extend(follow.accept(address, b"s" * 16, 1, 60.0)), daemon=True)
    leader.start()
    with pytest.raises((PermissionError, follow.Lost)):
        follow.connect(address, b"t" * 16, 30.0)
    host, port = address.split(":")
    with socket.create_connection((host, int(port))) as s, contextlib.suppress(ConnectionResetError):
        s.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(64))
        while s.recv(100):
            pass
    with follow.connect(address, b"s" * 16, 30.0) as s:
        leader.join()
        found[0].sendall(follow.pack("begin", [], "", {}))
        assert follow.unpack(lambda n: follow.receive(s, n))[0] == "begin"
        found[0].close()
        with pytest.raises(follow.Lost, match="the other process is gone"):
            follow.receive(s, 1)


def test_nobody_comes() -> None:
    with pytest.raises(TimeoutError, match="0 of 1 followers came"):
        follow.accept(free(), b"s" * 16, 1, 0.05)
    with pytest.raises(TimeoutError, match="nobody listens"):
        follow.connect(free(), b"s" * 16, 0.05)
    a, b = socket.socketpair()
    with a, b, pytest.raises(ValueError, match="a secret of 3 bytes"):
        follow.prove(a, b"abc", b"leader", b"follower")
