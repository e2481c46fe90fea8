"""Streams of server-sent events: frames as they come, and what happens when one fails."""

import asyncio
import logging
from collections.abc import AsyncIterator

from aiohttp import web

from fdel.serve.openai import APIError, body
from fdel.serve.state import Call

log = logging.getLogger(__name__)
Frames = AsyncIterator[bytes]


PING = 15.0  # seconds of silence before a comment is sent
ROOM = 2**14  # bytes that a connection takes without waiting; asyncio waits from 64 KiB until 16 KiB are left


LATE = APIError("this request took too long", status=408, code="timeout")
FAILED = APIError("the server failed", status=500, type="server_error", code="internal")


async def stream(call: Call, frames: Frames, on_error: bytes = body.sse(body.error(FAILED))) -> web.StreamResponse:
    """Send frames as they come. What fails from here on ends the stream with an error event, `on_error` if unforeseen."""
    response = web.StreamResponse(headers=body.EVENT_STREAM)
    try:
        await response.prepare(call.request)
        call.clock.reschedule(None)  # from here on a second answer, such as its 408, would land inside of this one
        try:
            async with asyncio.timeout(call.server.timeout):
                async for frame in frames:
                    await response.write(frame)  # a reader that takes nothing is ended with its connection
        except APIError as e:
            await response.write(body.sse(body.error(e)))
        except TimeoutError:
            transport = call.request.transport
            if transport is None or transport.get_write_buffer_size() < ROOM:
                await response.write(body.sse(body.error(LATE)))
            else:  # a polite end would wait for the reader for ever
                log.info("%s: the reader is too slow", call.id)
                transport.abort()
        except ConnectionError:
            raise
        except Exception:
            log.exception("%s: a stream failed", call.id)
            await response.write(on_error)
    except ConnectionError:  # of any write, the headers' too
        log.info("%s: the reader is gone", call.id)
    finally:
        await frames.aclose()  # type: ignore[attr-defined]
        call.finish()
    return response
