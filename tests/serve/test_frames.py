"""Streams of events over a socket, without a model: readers that stop, leave, or are slow."""

import asyncio
import contextlib
import logging
from types import SimpleNamespace

import pytest

web = pytest.importorskip("aiohttp.web")

from fdel.serve import frames  # noqa: E402


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
        async with asyncio.timeout(None) as clock:
            server = SimpleNamespace(timeout=timeout)
            call = SimpleNamespace(server=server, request=request, id="r", clock=clock, finish=lambda: None)
            response = await frames.stream(call, source())
        ended.append(request)
        return response

    app = web.Application()
    app.router.add_get("/", handler)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
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
    monkeypatch.setattr(frames, "STUCK", 0.2)
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
            yield b"x" * 10_000
            await asyncio.sleep(0)

    got, ended, closed = asyncio.run(serve(make, nothing, timeout=0.3))
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
