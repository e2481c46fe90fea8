"""Streams of server-sent events: frames as they come, and what happens when one fails."""

import asyncio
import logging
from collections.abc import AsyncIterator

from aiohttp import web

from fdel.serve.core import FAULTS
from fdel.serve.openai import APIError, body
from fdel.serve.state import Call

log = logging.getLogger(__name__)
Frames = AsyncIterator[bytes]


PING = 15.0  # seconds of silence before a comment is sent
STUCK = 60.0  # seconds that a reader may leave a write waiting
ROOM = 2**14  # bytes that a connection takes without waiting; asyncio waits from 64 KiB until 16 KiB are left


LATE = APIError("this request took too long", status=408, code="timeout")
FAILED = APIError("the server failed", status=500, type="server_error", code="internal")


def _fits(transport: asyncio.Transport | None, frame: bytes) -> bool:
    """Say whether writing a frame cannot wait for the reader: then it needs no clock, which costs as much as the write."""
    return transport is None or transport.get_write_buffer_size() + len(frame) < ROOM


def _drop(transport: asyncio.Transport | None) -> None:
    """End a connection with what its reader has not taken: a polite end would wait for it for ever."""
    if transport is not None:
        transport.abort()


async def stream(call: Call, frames: Frames, on_error: bytes = body.sse(body.error(FAILED))) -> web.StreamResponse:
    """Send frames as they come. What fails from here on ends the stream with an error event, `on_error` if unforeseen."""
    response = web.StreamResponse(headers=body.EVENT_STREAM)
    try:
        await response.prepare(call.request)
        call.clock.reschedule(None)  # from here on a second answer, such as its 408, would land inside of this one
        try:
            async with asyncio.timeout(call.server.timeout) as clock:
                async for frame in frames:
                    if _fits(call.request.transport, frame):
                        await response.write(frame)
                        continue
                    async with asyncio.timeout(STUCK):  # `wait_for` may swallow a cancellation before Python 3.12
                        await response.write(frame)
        except APIError as e:
            await response.write(body.sse(body.error(e)))
        except TimeoutError:
            late = body.sse(body.error(LATE))
            if clock.expired() and _fits(call.request.transport, late):
                await response.write(late)
            else:
                log.info("%s: the reader is stuck", call.id)
                _drop(call.request.transport)
        except ConnectionError:
            raise
        except FAULTS:
            log.exception("%s: a stream failed", call.id)
            await response.write(on_error)
    except ConnectionError:  # of any write, the headers' too
        log.info("%s: the reader is gone", call.id)
    finally:
        await frames.aclose()  # type: ignore[attr-defined]
        call.finish()
    return response
