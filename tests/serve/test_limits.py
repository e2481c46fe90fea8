"""Fair shares: what one holder can take of a server, and what is left for others."""

import asyncio
import contextlib
import json
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("aiohttp", reason="needs the serve extra")
from fdel.serve.server import connection, limits
from fdel.serve.server.limits import EvictingQuota, Quota
from tests.serve import wire
from tests.serve.wire import CHAT, LONG, at_rest, call, chat, head, open_chat, raw, refusal, wait_for


@given(
    st.integers(1, 200), st.lists(st.tuples(st.sampled_from("abcde"), st.integers(1, 40), st.booleans()), max_size=80)
)
def test_something_is_always_left(total, events):
    """No holder has more than one above what was free then; who holds nothing finds a place while one is left."""
    share = Quota(total)
    for holder, count, take in events:
        free, had = share.total - share.taken, share.held.get(holder, 0)
        if take:
            taken = share.acquire(holder, count)
            assert taken == (had + count <= free - count + 1)
            assert taken or count > 1 or had or not free
        elif had >= count:
            share.release(holder, count)
        assert share.taken == sum(share.held.values()) <= total and all(n > 0 for n in share.held.values())


def test_one_holder_has_half_and_each_other_half_of_the_rest():
    share = Quota(1024)
    for n in range(10):
        while share.acquire(str(n)):
            pass
        assert share.held[str(n)] == 1024 // 2 ** (n + 1)
    assert share.acquire("new") and not share.acquire("newer")  # the last place
    assert Quota(1024).acquire("a", 512) and not Quota(1024).acquire("a", 513)


@pytest.mark.parametrize(("remote", "holder"), {
    "127.0.0.1": "loopback", "127.9.9.9": "loopback", "::1": "loopback", "::ffff:127.0.0.1": "loopback",
    "10.0.0.1": "10.0.0.1",
    "::ffff:10.0.0.1": "10.0.0.1", "2001:db8:1:2:3:4:5:6": "2001:db8:1:2::/64", "2001:db8:1:2::9": "2001:db8:1:2::/64",
    "fe80::1%eth0": "fe80::/64", "unix": "unix", None: "",
}.items())  # fmt: skip
def test_who_stands_behind_an_address(remote, holder):
    assert limits.address(remote) == holder


def test_the_oldest_gives_way_to_a_newer_one_of_the_same_holder():
    places, ended = EvictingQuota(Quota(8)), []
    end = lambda n, ends=True: lambda: ends and (ended.append(n) or True)
    for n in range(4):
        assert places.acquire("a", n, end(n, ends=n != 0))
    assert places.acquire("a", 4, end(4)) and ended == [1]  # the oldest that can end
    assert places.acquire("b", 9, end(9)) and places.quota.held == {"a": 4, "b": 1}
    places.release("a", 1)  # its place is another's by now
    assert places.quota.held == {"a": 4, "b": 1}
    for n in (0, 2, 3, 4, 9):
        places.release("b" if n == 9 else "a", n)
    assert not places.quota.taken and not places.entries


def test_whose_entries_cannot_end_gets_no_more():
    places = EvictingQuota(Quota(4))
    assert [places.acquire("a", n, lambda: False) for n in range(4)] == [True, True, False, False]
    assert places.acquire("b", 9, lambda: False)


def test_slow_ones_never_keep_a_quick_one_out():
    """Hundreds that hang, of one holder: whoever comes and goes quickly is served all the same, its own holder too."""

    async def act():
        places, late = EvictingQuota(Quota(256)), []

        async def hang(holder):
            try:
                async with places.timed(holder, 30.0):
                    await asyncio.sleep(30)
            except TimeoutError:
                late.append(holder)

        tasks = [asyncio.create_task(hang("a")) for _ in range(300)]
        await asyncio.sleep(0)
        assert places.quota.held["a"] == 128
        for holder in ("a", "b"):
            async with places.timed(holder, 30.0):
                await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert places.quota.held == {"a": 127} and len(late) == 300 - 127
        for t in tasks:
            t.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not places.quota.taken and not places.entries

    asyncio.run(act())


# ---- over a socket ---------------------------------------------------------------------------------------------------


@pytest.fixture
def crowd(running):
    """Opens so many connections that say this, and closes them in the end."""
    with contextlib.ExitStack() as stack:

        def make(count: int, said: bytes, port: int | None = None) -> list[socket.socket]:
            where = ("127.0.0.1", port or running.port)
            found = [stack.enter_context(socket.create_connection(where, timeout=30)) for _ in range(count)]
            for s in found:
                s.sendall(said)
            return found

        yield make


SENDS = ("Content-Type: application/json", f"Content-Length: {len(json.dumps(CHAT))}")


@pytest.mark.parametrize("keys", [True, False])
def test_bodies_that_do_not_come_shut_nobody_out(running, crowd, monkeypatch, keys):
    """Three hundred of one key, or of one address where there are no keys: others come in, and the same one too."""
    if not keys:
        monkeypatch.setattr(running.state, "keys", None)
    top = head(running, "/v1/chat/completions", *SENDS)
    if not keys:
        top = top.replace(b"Host: x", b"Host: localhost")
    hung = crowd(300, top + b"{")
    share = running.state.bodies.quota
    wait_for(lambda: share.taken == 128)
    for role in ("admin", "user") if keys else (None,):
        assert chat(running, role=role)[0] == 200
        whole = json.dumps(CHAT).encode()
        asks = head(running, "/v1/chat/completions", *SENDS, "Connection: close", role=role or "user")
        asks = asks if keys else asks.replace(b"Host: x", b"Host: localhost")
        assert raw(running, asks, whole[:9], whole[9:], wait=20).startswith(b"HTTP/1.1 200")
    assert hung[0].recv(12) == b"HTTP/1.1 408"  # the oldest gave way
    [s.close() for s in hung]
    wait_for(lambda: not share.taken)


def test_idle_connections_shut_nobody_out(running, crowd, monkeypatch):
    """Where an address has all the connections that it may have, the oldest idle one ends, and none that is answered."""
    monkeypatch.setattr(connection, "slots", lambda: EvictingQuota(Quota(20)))
    with wire.listening(running.state) as port:
        other = type(running)(**vars(running) | {"port": port})
        busy = open_chat(other, LONG | {"stream": True})
        response = busy.getresponse()
        response.read(10)
        idle = crowd(40, b"", port)
        for _ in range(20):
            assert call(other, "GET", "/health", role=None)[0] == 200
        assert idle[0].recv(1) == b"" and response.read().endswith(b"data: [DONE]\n\n")
        running.served.engine.pause()
        try:
            held = [open_chat(other, LONG) for _ in range(10)]
            wait_for(lambda: running.state.active == 10)
            status, said, headers = refusal(raw(other, b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n", wait=5))
            assert status == 503 and said["error"]["code"] == "overloaded" and headers["retry-after"] == "1"
            [c.close() for c in held]
        finally:
            running.served.engine.resume()
        wait_for(lambda: call(other, "GET", "/health", role=None)[0] == 200)


def test_one_key_leaves_room_in_the_queue(running):
    """It has half of it at the most; another key's request is taken all the same."""
    running.served.engine.pause()
    try:
        held = [open_chat(running, LONG | {"n": 16}) for _ in range(2)]
        wait_for(lambda: running.served.engine.stats()["waiting"] == 32)
        for stream in (False, True):
            status, said, headers = chat(running, {"stream": stream})
            assert status == 429 and said["error"]["code"] == "too_many_requests" and headers["Retry-After"] == "1"
        other = open_chat(running, {}, role="service")
        wait_for(lambda: running.served.engine.stats()["waiting"] == 33)
        [c.close() for c in held]
    finally:
        running.served.engine.resume()
    assert other.getresponse().status == 200 and chat(running)[0] == 200
    wait_for(lambda: at_rest(running))
    assert not running.state.outputs["small"].taken and not running.state.calls.taken


def test_one_key_leaves_room_for_calls(running, monkeypatch):
    """Of any route that asks for work."""
    monkeypatch.setattr(running.state, "calls", Quota(4))
    running.served.engine.pause()
    try:
        held = [open_chat(running, LONG) for _ in range(2)]
        wait_for(lambda: running.state.calls.taken == 2)
        asks = lambda role: call(running, "POST", "/tokenize", {"model": "small", "prompt": "a"}, role=role)[0]
        assert asks("user") == 429 and asks("service") == 200 and call(running, "GET", "/v1/models")[0] == 200
        [c.close() for c in held]
    finally:
        running.served.engine.resume()
    wait_for(lambda: at_rest(running) and not running.state.calls.taken)
