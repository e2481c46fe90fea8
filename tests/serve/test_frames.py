"""Streams of events over a socket, without a model: readers that stop, leave, or are slow."""

import asyncio
import contextlib
import logging
from types import SimpleNamespace

import pytest

web = pytest.importorskip("aiohttp.web")

from fdel.serve.server import answer, connection  # noqa: E402


async def streamed(request, frames, timeout):
    """Stream frames as a call does."""
    async with asyncio.timeout(None) as clock:
        server = SimpleNamespace(timeout=timeout)
        call = SimpleNamespace(server=server, request=request, id="r", clock=clock, finish=lambda: None)
        return await answer.stream(call, frames)


async def serve(make, read, before=lambda request: None, timeout=60.0):
    """Stream `make()` to a client that `read` plays: (what it gave, the calls that ended, frames closed)."""
    ended, closed = [], []

    async def source():
        try:
            async for frame in make():
                yield frame
        finally:
            closed.append(True)

    async def handler(request):
        before(request)
        try:
            return await streamed(request, source(), timeout)
        finally:
            ended.append(request)

    app = web.Application()
    app.router.add_get("/", handler)
    runner = connection.Runner(app, connection.Connections(lambda status: None))
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        reader, writer = await asyncio.open_connection("127.0.0.1", runner.addresses[0][1], limit=1024)
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        got = await asyncio.wait_for(read(reader, ended), 20)
        writer.transport.abort()
        return got, len(ended), len(closed)
    finally:
        await runner.cleanup()


async def everything(reader, ended):
    return await reader.read(-1)


async def nothing(reader, ended):
    """Read nothing until the server has given up; then what is left."""
    while not ended:
        await asyncio.sleep(0.01)
    got = b""
    with contextlib.suppress(ConnectionError):
        while part := await reader.read(2**16):
            got += part
    return got


def dechunked(raw):
    """The body of a chunked answer."""
    body, out = raw.partition(b"\r\n\r\n")[2], b""
    while body:
        size, _, body = body.partition(b"\r\n")
        out, body = out + body[: int(size, 16)], body[int(size, 16) + 2 :]
    return out


def test_small_and_large_frames_come_whole_and_in_order():
    sent = [bytes([65 + i % 26]) * (100_000 if i % 7 == 3 else 1 + i) for i in range(40)]

    async def make():
        for frame in sent:
            yield frame

    async def slowly(reader, ended):
        got = b""
        while part := await reader.read(20_000):
            got += part
            await asyncio.sleep(0)
        return got

    got, ended, closed = asyncio.run(serve(make, slowly))
    assert dechunked(got) == b"".join(sent)
    assert (ended, closed) == (1, 1)


def test_who_does_not_read_is_dropped(monkeypatch):
    monkeypatch.setattr(connection, "STUCK", 0.2)
    count = []

    async def make():
        while True:
            count.append(1)
            yield b"x" * 10_000
            await asyncio.sleep(0)

    got, ended, closed = asyncio.run(serve(make, nothing))
    assert (ended, closed) == (1, 1)
    assert len(got) < 10_000 * len(count)  # what was not taken is gone, and the end of the answer with it
    assert not got.endswith(b"0\r\n\r\n")
    assert len(count) < 2000  # and the server did not keep all that it made: at most what sockets hold


def test_who_does_not_read_is_dropped_when_its_time_is_over():
    async def make():
        while True:
            yield b"x" * 10**6  # what sockets hold is full in a few turns of the loop, however late they come
            await asyncio.sleep(0)

    got, ended, closed = asyncio.run(serve(make, nothing, timeout=1.0))
    assert (ended, closed) == (1, 1)
    assert b"timeout" not in got[-1000:]


def test_who_has_left_before_the_headers_is_no_failure(caplog):
    async def make():
        yield b"x"

    with caplog.at_level(logging.INFO):
        got, ended, closed = asyncio.run(serve(make, everything, before=lambda request: request.transport.abort()))
    assert (got, ended) == (b"", 1)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert any("the reader is gone" in r.getMessage() for r in caplog.records)


@pytest.mark.parametrize("whole", [False, True], ids=["stream", "whole answer"])
def test_readers_that_take_nothing_for_a_minute_are_ended(whole):
    """Many at a time, that have only just begun: what is made for each is bounded, and who takes something goes on."""
    made, closed, count = [0] * 30, [], 30

    async def source(i):
        try:
            while True:
                made[i] += 10_000
                yield b"x" * 10_000
        finally:
            closed.append(i)

    async def handler(request):
        i = int(request.query["i"])
        if whole:
            try:
                response = web.Response(body=b"x" * 20_000_000)
                await response.prepare(request)
                await response.write_eof()
                return response
            finally:
                closed.append(i)
        return await streamed(request, source(i), 600.0)

    async def act():
        app = web.Application()
        app.router.add_get("/", handler)
        runner = connection.Runner(app, connection.Connections(lambda status: None))
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            all_, clients = runner.connections, []
            for i in range(count):
                reader, writer = await asyncio.open_connection("127.0.0.1", runner.addresses[0][1], limit=1024)
                writer.write(f"GET /?i={i} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
                clients.append((reader, writer))
            sizes = lambda: [c.channel.get_write_buffer_size() for c in all_.open]
            before = None
            while before is None or before != sizes() or len(before) < count or not all(before):
                before = sizes()
                await asyncio.sleep(0.3)
            assert max(made) < 2**23
            begin = asyncio.get_running_loop().time()
            all_.sweep(begin)
            await clients[0][0].readexactly(6_000_000)  # it is slow, and reads
            all_.sweep(begin + connection.STUCK - 0.1)
            await asyncio.sleep(0)
            assert not closed
            all_.sweep(begin + connection.STUCK)
            while len(closed) < count - 1:
                await asyncio.sleep(0.01)
            assert sorted(closed) == list(range(1, count)) and len(all_.open) == 1
            for _, writer in clients:
                writer.transport.abort()
            while all_.open:
                await asyncio.sleep(0.01)
            assert not all_.slots.quota.taken
        finally:
            await runner.cleanup()

    asyncio.run(asyncio.wait_for(act(), 60))
