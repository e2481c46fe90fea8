"""One engine on two processes: the answers of one process, a clean end, and a clear error when one of them dies."""

import contextlib
import hmac
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest

from fdel.serve.engine import follow, packing
from fdel.serve.engine.engine import Engine
from tests.serve import follow_worker, small, test_sight

ROOT = Path(__file__).resolve().parents[2]


def free() -> str:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return f"localhost:{s.getsockname()[1]}"


def run(what: str) -> tuple[list[int], list[str], list[str]]:
    """Start both processes: how they ended, what they printed, what they complained of."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=1"
    env = dict(XLA_FLAGS=flags, JAX_PLATFORMS="cpu", PYTHONPATH=str(ROOT))
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


REFUSED = ("lies on devices of other processes", "or give reshard=True", "generates and scores, and embeds nothing")


def fresh(seed: int) -> list:
    """Tokens of a new engine with these weights."""
    model = small.make_model(0)._replace(
        params=jax.tree.map(lambda x: x.astype(np.float32), follow_worker.others(seed))
    )
    return [g.tokens for g in Engine(model, follow_worker.SETTINGS).generate(follow_worker.PROMPTS, follow_worker.ASK)]


@pytest.mark.slow
def test_two_processes_answer_as_one(model) -> None:
    codes, said, complaints = run("works")
    assert codes == [0, 0], complaints
    many, few, stays, aborted, preempted, rested, refused, compiled, after, told = json.loads(said[0].splitlines()[-1])
    e = Engine(model, follow_worker.SETTINGS)
    assert [many, few, stays] == follow_worker.answers(e)[:3] and many == few
    assert aborted == "abort" and preempted and compiled == 0
    assert rested and [w in r for w, r in zip(REFUSED, refused, strict=True)] == [True] * 3
    one = Engine(model, follow_worker.SETTINGS)
    alone, want = follow_worker.changed(one), follow_worker.scored(one)
    one.close()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), told, want)
    assert after[:-1] == alone[:-1] and after[-1] == 0
    assert after[0] == after[3] == fresh(1) and after[4] == fresh(2) and len({str(x) for x in after[:-1]}) == 4
    assert said[1].splitlines()[-1] == "followed to the end"


@pytest.mark.slow
@pytest.mark.matrix
def test_a_picture_of_a_new_size_holds_no_process_up() -> None:
    """Both compile beside their steps: a text goes on meanwhile. The follower, which needs longer, waits for itself."""
    codes, said, complaints = run("sees")
    assert codes == [0, 0], complaints
    want = test_sight.naive(test_sight.made(), *follow_worker.new_size(), follow_worker.ASK.max_tokens)
    assert json.loads(said[0].splitlines()[-1]) == [60, 0, want, None]
    first, *rest = said[1].splitlines()[-1].split()
    assert first.startswith("ThreadPoolExecutor") and " ".join(rest) == "followed to the end"


@pytest.mark.slow
def test_a_follower_that_dies_fails_requests(model) -> None:
    codes, said, complaints = run("dies")
    assert codes == [0, 3], complaints
    reason, error, tokens = json.loads(said[0].splitlines()[-1])
    assert reason == "error" and 0 < tokens < 100
    assert "the engine stopped" in error and "follower 0 of 1 is gone" in error


# ---- connections ---------------------------------------------------------------------------------------------------


def test_only_who_knows_the_secret_comes_in() -> None:
    """A stranger with another secret, and one that says nothing sensible, are sent away; the follower still comes."""
    address, found = free(), []
    leader = threading.Thread(target=lambda: found.extend(follow.accept(address, b"s" * 16, 1, 60.0)), daemon=True)
    leader.start()
    with pytest.raises(PermissionError):
        follow.connect(address, b"t" * 16, 30.0)
    host, port = address.split(":")
    with socket.create_connection((host, int(port))) as s, contextlib.suppress(ConnectionResetError):
        s.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(64))
        while s.recv(100):
            pass
    call = packing.Call("extend", [np.arange(6, dtype=np.int32)], "a", {"block": 32})
    with follow.connect(address, b"s" * 16, 30.0) as connection:
        leader.join()
        found[0].send_bytes(packing.pack_call(call))
        assert follow.receive(connection)._replace(arrays=[]) == call._replace(arrays=[])
        found[0].close()
        with pytest.raises(follow.Lost, match="the other process is gone"):
            follow.receive(connection)


@pytest.mark.parametrize("pause", [60.0, 0.5])
def test_a_stranger_that_says_little_is_sent_away(monkeypatch, pause: float) -> None:
    """Nothing, or a byte at a time: it keeps the follower behind it waiting for the seconds of its proof alone."""
    monkeypatch.setattr(follow, "PROOF", 1.0)
    address, found = free(), []
    leader = threading.Thread(target=lambda: found.extend(follow.accept(address, b"s" * 16, 1, 60.0)), daemon=True)
    leader.start()
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            silent = socket.create_connection((address.split(":")[0], int(address.split(":")[1])))
            break
    over = threading.Event()

    def drip() -> None:
        with contextlib.suppress(OSError):
            while not over.wait(pause):
                silent.sendall(b"x")

    threading.Thread(target=drip, daemon=True).start()
    with silent, follow.connect(address, b"s" * 16, 10.0):
        over.set()
        leader.join(5)
        assert len(found) == 1
        found[0].close()


def tcp() -> tuple[socket.socket, socket.socket]:
    """The two ends of a connection: ours, and a stranger's."""
    with socket.create_server(("localhost", 0)) as server:
        stranger = socket.create_connection(server.getsockname(), timeout=20)
        return server.accept()[0], stranger


@pytest.mark.parametrize("role", [b"leader", b"follower"])
def test_a_proof_of_another_secret_is_refused(role: bytes) -> None:
    """A stranger that speaks the protocol; until it has proved something, a leader sends it the number drawn alone."""
    ours, stranger = tcp()
    with stranger, ThreadPoolExecutor() as threads:
        waits = threads.submit(follow.authenticated, ours, b"s" * 16, role, 20)
        drawn = stranger.recv(32), bytes(32)
        stranger.sendall(drawn[1])
        other = b"follower" if role == b"leader" else b"leader"
        both = b"".join(drawn if role == b"leader" else drawn[::-1])
        stranger.sendall(hmac.digest(b"t" * 16, other + both, "sha256"))
        with pytest.raises(PermissionError, match="does not know the secret; give all the same"):
            waits.result()
        if role == b"follower":
            assert stranger.recv(32) == hmac.digest(b"s" * 16, role + both, "sha256")
        assert stranger.recv(32) == b""


def test_an_answer_that_is_sent_back_is_refused() -> None:
    """Neither an echo nor another follower, which does know the secret, is a leader."""
    ours, stranger = tcp()
    with stranger, ThreadPoolExecutor() as threads:
        waits = threads.submit(follow.authenticated, ours, b"s" * 16, b"follower", 20)
        for _ in range(2):
            stranger.sendall(stranger.recv(32))
        with pytest.raises(PermissionError):
            waits.result()
    ours, stranger = tcp()
    with ThreadPoolExecutor() as threads:
        both = [threads.submit(follow.authenticated, s, b"s" * 16, b"follower", 20) for s in (ours, stranger)]
        assert all(isinstance(f.exception(), PermissionError) for f in both)


def test_a_message_that_is_too_long_is_not_read(monkeypatch) -> None:
    monkeypatch.setattr(follow, "MOST", 100)
    a, b = multiprocessing.Pipe()
    with a, b:
        a.send_bytes(bytes(101))
        with pytest.raises(follow.Lost, match="sent more than 100 bytes"):
            follow.receive(b)


def test_nobody_comes() -> None:
    with pytest.raises(TimeoutError, match="0 of 1 followers came"):
        follow.accept(free(), b"s" * 16, 1, 0.05)
    with pytest.raises(TimeoutError, match="nobody listens"):
        follow.connect(free(), b"s" * 16, 0.05)
    a, b = socket.socketpair()
    with a, b, pytest.raises(ValueError, match="a secret of 3 bytes"):
        follow.authenticated(a, b"abc", b"leader", 1)
