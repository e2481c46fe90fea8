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


FAILED = APIError("the server failed", status=500, type="server_error", code="internal")


async def stream(call: Call, frames: Frames, on_error: bytes = body.sse(body.error(FAILED))) -> web.StreamResponse:
    """Send frames as they come. What fails from here on ends the stream with an error event, `on_error` if unforeseen."""
    response = web.StreamResponse(headers={**body.EVENT_STREAM, "x-request-id": call.id})
    try:
        await response.prepare(call.request)
        try:
            async for frame in frames:
                await asyncio.wait_for(response.write(frame), STUCK)
        except APIError as e:
            await response.write(body.sse(body.error(e)))
        except (TimeoutError, ConnectionError):
            log.info("%s: the reader is gone or stuck", call.id)
        except FAULTS:
            log.exception("%s: a stream failed", call.id)
            await response.write(on_error)
    finally:
        await frames.aclose()  # type: ignore[attr-defined]
        call.finish()
    return response
