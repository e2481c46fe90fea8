"""Connections: how many there may be; malformed HTTP, bodies that nobody wants, readers that do not read."""

import asyncio
import functools
import logging
import resource
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from aiohttp import web

from fdel.serve.server import limits
from fdel.serve.server.openai import APIError, body, failure

log = logging.getLogger(__name__)

IDLE = 30.0  # seconds for a client to send the headers of its first request, or of the next
STUCK = 60.0  # seconds in which a reader must take something of what waits for it
LINGER = 1.0  # seconds for which what nobody wants is thrown away, so that its sender reads the answer
BUFFER = 2**18  # bytes of answers that the kernel keeps for a reader
PAUSE = 10.0  # seconds between two lines in the log about malformed HTTP
HEADERS = {"Server": "fdel", "X-Content-Type-Options": "nosniff"}
FULL = APIError("too many connections from this address", status=503, code="overloaded", retry=1)


def slots() -> limits.EvictingQuota:
    """Make slots for connections: most of the files that this process may open."""
    return limits.EvictingQuota(limits.Quota(max(8, min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 256))))


@dataclass
class Connections:
    """All open connections. `count` is told of each answer to malformed HTTP."""

    count: Callable[[int], None]
    slots: limits.EvictingQuota = field(default_factory=lambda: slots())
    open: set["Connection"] = field(default_factory=set)
    timer: asyncio.TimerHandle | None = None
    malformed: int = 0  # since the last line in the log
    logged: float = -PAUSE

    def watch(self) -> None:
        """Look for stuck readers, once a second while there are connections."""
        loop = asyncio.get_running_loop()
        self.sweep(loop.time())
        self.timer = loop.call_later(1.0, self.watch) if self.open else None

    def sweep(self, now: float) -> None:
        """End connections whose readers took nothing of what waits for them for STUCK seconds."""
        for c in list(self.open):
            size = c.channel.get_write_buffer_size()
            if size != c.waits[0]:
                c.waits = size, now
            if size and now - c.waits[1] >= STUCK:
                log.info("%s: the reader is stuck", c.holder)
                c.channel.abort()  # without waiting for the reader, as a polite end would for ever


class Connection(web.RequestHandler):
    """The protocol of one connection."""

    def __init__(self, server: web.Server, connections: Connections, **options: Any):
        super().__init__(server, loop=asyncio.get_running_loop(), **options)
        self.connections, self.holder, self.discarding = connections, "", False
        self.id: str | None = None  # of the request that is being answered
        self.waits = (0, 0.0)  # bytes that wait for the reader, and since when

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take a slot; without one, say so and close."""
        transport, all_ = cast(asyncio.Transport, transport), self.connections
        peer = transport.get_extra_info("peername")
        self.holder = limits.address(peer[0] if peer else None)
        self.channel = transport
        all_.open.add(self)
        if all_.timer is None:
            all_.watch()
        if all_.slots.acquire(self.holder, self, self.evict_idle):
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
            super().connection_made(transport)
            return
        self.discarding, said = True, body.dump(body.error(FULL))
        lines = {**HEADERS, **FULL.headers, "Content-Type": "application/json", "Content-Length": len(said)}
        head = "".join(f"{name}: {value}\r\n" for name, value in {**lines, "Connection": "close"}.items())
        transport.write(f"HTTP/1.1 503 Service Unavailable\r\n{head}\r\n".encode() + said)
        transport.close()
        all_.count(503)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Give the slot back."""
        self.connections.slots.release(self.holder, self)
        self.connections.open.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what comes, unless nobody wants it."""
        if not self.discarding:
            super().data_received(data)

    def evict_idle(self) -> bool:
        """End for a newer connection, if no request is being answered."""
        if self.id is None:
            self.channel.abort()
        return self.id is None

    async def discard(self) -> None:
        """Throw away what still comes, unparsed, until the client hangs up: a close at once might lose it the answer."""
        self.discarding = True
        self.channel.resume_reading()
        await asyncio.sleep(LINGER)

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answer malformed HTTP, and what a handler raised that nobody foresaw; the connection ends."""
        id, self.id = self.id or "req_" + secrets.token_hex(12), None
        if status < 500:
            all_, now = self.connections, asyncio.get_running_loop().time()
            all_.count(status)
            all_.malformed += 1
            if now - all_.logged >= PAUSE:
                said = "malformed HTTP, %d times; the newest from %s: %.100r"
                log.info(said, all_.malformed, request.remote, str(message or exc))
                all_.malformed, all_.logged = 0, now
            error = APIError("this is no HTTP that the server understands", status=status, code="malformed_http")
        else:
            log.error("%s failed", id, exc_info=exc)
            error = failure()
        if request.writer.output_size > 0:
            raise ConnectionError("an answer is under way already")
        response = web.Response(body=body.dump(body.error(error)), status=status, content_type="application/json")
        response.headers.update({**HEADERS, **error.headers, "x-request-id": id})
        response.force_close()
        return response


class Runner(web.AppRunner):
    """Runs an application on `Connection`s: handlers end with their clients, and nothing is inflated."""

    def __init__(self, app: web.Application, connections: Connections):
        super().__init__(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        self.connections = connections

    @property
    def server(self) -> Any:
        """What makes the protocol of a new connection; None before `setup`."""
        found = super().server
        return found and functools.partial(
            Connection, found, self.connections, keepalive_timeout=IDLE, access_log=None, auto_decompress=False,
            lingering_time=0.0,
        )  # fmt: skip
