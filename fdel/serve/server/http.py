"""The HTTP server: routes and who may use them, limits, errors as OpenAI's clients expect them, graceful ends.

Every route is closed but those without a scope. What is known to be wrong is refused before a stream begins.
"""

import asyncio
import contextlib
import logging
import re
import secrets
import signal
import time
from collections.abc import Callable
from typing import Any, cast

from aiohttp import HttpVersion10, HttpVersion11, web

from fdel.serve.server import admin, audio, auth, form, inference, openai, pooling
from fdel.serve.server.answer import LATE
from fdel.serve.server.call import Call, Server
from fdel.serve.server.connection import HEADERS, Connection, Connections, Runner
from fdel.serve.server.openai import APIError, body, failure
from fdel.serve.server.openai.schema import Route, document

log = logging.getLogger(__name__)
audit = logging.getLogger("fdel.audit")  # one JSON object per call, without texts and secrets

BODY = 2**23  # bytes
SLOW = 30.0  # seconds for a client to send its body
UPLOAD = 120.0  # seconds for a file


async def describe(call: Call) -> web.Response:
    """GET /openapi.json: this server's routes."""
    server = call.server
    limited = [*server.models.values(), *server.dual.values(), *server.labels.values()]
    limits = next((s.limits for s in limited), openai.Limits(1, 1))
    return call.json(
        document(
            ROUTES, [*server.models, *server.heard, *server.dual, *server.labels], limits, keys=server.keys is not None
        )
    )


ROUTES = (
    Route("GET", "/", "infer", admin.page, answer="text/html"),
    Route("GET", "/health", None, admin.health),
    Route("GET", "/ready", None, admin.ready),
    Route("GET", "/version", "models", admin.version),
    Route("GET", "/openapi.json", "models", describe),
    Route("GET", "/metrics", "metrics", admin.metrics, answer="text/plain"),
    Route("GET", "/v1/models", "models", admin.models, answer="models"),
    Route("GET", "/v1/models/{id:.+}", "models", admin.model),
    Route("GET", "/tokenizer_info", "infer", admin.tokenizer_info),
    Route("POST", "/tokenize", "infer", inference.tokenize, "tokenize", "tokens"),
    Route("POST", "/detokenize", "infer", inference.detokenize, "detokenize", "detokenized"),
    Route("POST", "/v1/chat/completions", "infer", inference.chat, "chat", "chat"),
    Route("POST", "/v1/completions", "infer", inference.completions, "completion", "completion"),
    Route("POST", "/v1/responses", "infer", inference.respond, "response", "response"),
    Route("POST", "/v1/embeddings", "infer", pooling.embeddings, "embeddings", "embeddings"),
    Route("POST", "/score", "infer", pooling.score_pairs, "score", "scores"),
    Route("POST", "/v1/score", "infer", pooling.score_pairs, "score", "scores"),
    Route("POST", "/rerank", "infer", pooling.rerank, "rerank", "ranking"),
    Route("POST", "/v1/rerank", "infer", pooling.rerank, "rerank", "ranking"),
    Route("POST", "/classify", "infer", pooling.classify, "classify", "classes"),
    Route("POST", "/v1/classify", "infer", pooling.classify, "classify", "classes"),
    Route("POST", "/pooling", "infer", pooling.pool, "pooling", "pooled"),
    Route("POST", "/v1/audio/transcriptions", "infer", audio.transcribe, "transcription", "transcript", form=True),
    Route("POST", "/v1/audio/translations", "infer", audio.translate, "translation", "transcript", form=True),
    Route("GET", "/admin/keys", "admin", admin.list_keys),
    Route("POST", "/admin/keys", "admin", admin.add_key, admin.NEW_KEY, status="201"),
    Route("DELETE", "/admin/keys/{id}", "admin", admin.remove_key),
    Route("POST", "/v1/load_lora_adapter", "admin", admin.load_adapter, admin.LOAD),
    Route("POST", "/v1/unload_lora_adapter", "admin", admin.unload_adapter, admin.UNLOAD),
    Route("POST", "/admin/drain", "admin", admin.drain, admin.DRAIN),
)
_SCOPES = {(r.method, re.sub(":[^}]*}", "}", r.path)): r.scope for r in ROUTES}  # by aiohttp's names
_FORMS = {r.path for r in ROUTES if r.form}
PATHS = (*dict.fromkeys(path for _, path in _SCOPES), "other")  # for metrics


def runner(server: Server) -> Runner:
    """Run the application: handlers end with their clients, and connections that say nothing are closed."""
    return Runner(application(server), Connections(lambda status: _count(server, "other", status)))


def application(server: Server) -> web.Application:
    """Build the aiohttp application; `runner` has the settings that it needs."""
    admin.pages()  # read once, before the first call

    @web.middleware
    async def guard(request: web.Request, handler: Any) -> web.StreamResponse:
        call = Call(server, request, "req_" + secrets.token_hex(12), None)
        connection = cast(Connection, request.protocol)
        server.active, connection.id, status = server.active + 1, call.id, 500
        try:
            try:
                response = await _answer(call, handler)
                status = response.status
            except asyncio.CancelledError:
                status = 499  # the client has gone
                raise
            finally:
                call.finish()
                path, key = _path(call) or "other", call.key
                _count(server, path, status)
                facts = {
                    "time": round(time.time(), 3),
                    "request": call.id,
                    "route": path,
                    "status": status,
                    **call.facts,
                }
                facts |= {} if key is None else {"key": key.id, "role": key.role}
                audit.info(auth.audit(facts | {"remote": request.remote}))
            if unread := not request.content.is_eof():
                response.force_close()
            with contextlib.suppress(ConnectionError):
                await response.prepare(request)
                await response.write_eof()
        finally:
            server.active -= 1
        connection.id = None
        if unread:
            await connection.discard()
        return response

    async def mark(request: web.Request, response: web.StreamResponse) -> None:
        response.headers.update({**HEADERS, "x-request-id": cast(Connection, request.protocol).id or ""})

    async def expect(request: web.Request) -> None:
        """Ask for no body yet: who may send one is not known."""

    app = web.Application(middlewares=[guard], client_max_size=BODY)
    app.on_response_prepare.append(mark)
    app.cleanup_ctx.append(server.with_workers)
    for r in ROUTES:
        app.router.add_route(r.method, r.path, r.handler, expect_handler=expect)
    return app


async def _answer(call: Call, handler: Any) -> web.StreamResponse:
    """Let a call in, run its handler, and turn whatever it raises into an answer."""
    try:
        _enter(call)
        if not _path(call):
            return await handler(call.request)  # raises 404 or 405
        if call.request.method == "POST":
            call.body = await (_read_form if _path(call) in _FORMS else _read)(call)
        async with asyncio.timeout(call.server.timeout) as call.clock:
            return await handler(call)
    except APIError as e:
        return _refusal(call, e)
    except web.HTTPRequestEntityTooLarge:  # of a body whose length was not said before
        return _refusal(call, form.too_large(BODY))
    except web.HTTPException as e:
        code = {404: "not_found", 405: "method_not_allowed"}.get(e.status, "bad_request")
        allow = {k: e.headers[k] for k in ("Allow",) if k in e.headers}
        return _refusal(call, APIError(e.reason, status=e.status, code=code, headers=allow))
    except TimeoutError:
        return _refusal(call, LATE)
    except Exception:
        log.exception("%s failed", call.id)
        return _refusal(call, failure())


def _path(call: Call) -> str:
    """Name a call's route as aiohttp does; "" for none."""
    return getattr(getattr(call.request.match_info.route, "resource", None), "canonical", "")


def _enter(call: Call) -> None:
    """Refuse who may not do this, and work while the server drains."""
    server, headers = call.server, call.request.headers
    scope = _SCOPES.get((call.request.method, _path(call)), "models")  # of an unknown route one that every role has
    if call.request.version not in (HttpVersion10, HttpVersion11):
        raise APIError("expected HTTP/1.1", status=505, code="http_version")
    server.reload(time.monotonic())
    if server.keys is not None and scope is not None:
        given = headers.getall("Authorization", [])
        call.key = auth.authenticate(server.keys, given[0] if len(given) == 1 else None)
        auth.authorize(call.key, scope)
    elif scope is not None:
        auth.check_site(headers, server.hosts, link=(call.request.method, call.request.path) == ("GET", "/"))
    if server.draining and scope == "infer":
        raise APIError("the server is shutting down", status=503, code="draining", retry=5)
    if scope == "infer":
        call.take(server.calls)


async def _read(call: Call) -> dict[str, Any]:
    """Read a body of JSON."""
    raw = await _receive(call, "application/json", BODY, SLOW)
    return await call.load(raw) if raw else {}


async def _read_form(call: Call) -> dict[str, Any]:
    """Read a form: its files are `call.files`, and its other fields the body."""
    call.take(call.server.uploads)
    raw = await _receive(call, "multipart/form-data", call.server.audio_bytes + BODY // 64, UPLOAD)
    between = form.boundary(call.request.headers.get("Content-Type", ""))
    found = await call.in_thread(lambda: form.read(raw, between))
    call.files = found.files
    return found.fields() | dict.fromkeys(found.files, True)


async def _receive(call: Call, kind: str, most: int, seconds: float) -> bytes:
    """Receive a body of a type and a size."""
    request, server = call.request, call.server
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise APIError("the body must not be compressed", status=415, code="unsupported_encoding")
    if request.content_type != kind:  # also of none: no page of another site can send JSON
        raise APIError(f"the body must be {kind}", status=415, code="unsupported_media_type")
    if not request.can_read_body:
        return b""
    if (request.content_length or 0) > most:
        raise form.too_large(most)
    if request.content.is_eof() and most == BODY:  # all of it is here
        return await request.read()
    if expected := request.headers.get("Expect", ""):
        if expected.lower() != "100-continue":
            raise APIError("expected 100-continue", status=417, code="expectation_failed")
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the answer has not begun
    try:
        async with server.bodies.timed(call.holder, seconds):
            return await (request.read() if most <= BODY else form.receive(request.content, most))
    except BlockingIOError as e:
        raise APIError("too many requests are on their way; try again", status=503, code="overloaded", retry=1) from e


def _refusal(call: Call, e: APIError) -> web.Response:
    if e.status == 401 and call.request.path == "/" and call.request.method == "GET":
        return admin.send_page("login.html", 401)
    response = call.json(body.error(e), e.status)
    response.headers.update(e.headers)
    return response


def _count(server: Server, path: str, status: int) -> None:
    server.metrics.add("fdel_http_requests_total", route=path, status=f"{min(status, 599) // 100}xx")


def check_host(host: str, keys: Any, insecure: bool) -> None:
    """Refuse to listen beyond this machine without keys: ValueError."""
    if host not in ("127.0.0.1", "::1", "localhost") and not keys and not insecure:
        raise ValueError(
            f"host {host} can be reached from elsewhere and no API key is asked for; give --api-key-file, or --insecure"
        )


async def run(
    server: Server, host: str, port: int, grace: float = 30.0, started: Callable[[int], None] = print
) -> None:
    """Serve until SIGTERM or SIGINT; then answer what is under way for `grace` seconds. A second signal ends it at once.

    SIGHUP reads the file of keys again, and ends nothing. `started` is called with the port once it listens. RuntimeError
    if an engine ends by itself.
    """
    running, stop, loop = runner(server), asyncio.Event(), asyncio.get_running_loop()
    signals: list[int] = []

    def drain(number: int) -> None:
        signals.append(number)
        server.draining = True
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, drain, number)
    loop.add_signal_handler(signal.SIGHUP, server.reload)
    try:
        await running.setup()
        site = web.TCPSite(running, host, port)
        await site.start()
        started(running.addresses[0][1])
        while not stop.is_set():
            for s in server.engines().values():
                s.engine.check_open()
            for h in server.heard.values():
                h.scribe.check_open()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await stop.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace):
                while server.active and len(signals) < 2:
                    await asyncio.sleep(0.05)
    finally:
        if server.workers is not None:
            server.workers.close()  # what they still read is refused
        for s in server.engines().values():
            await loop.run_in_executor(None, s.engine.close)  # tells the readers of what is left
        for h in server.heard.values():
            await loop.run_in_executor(None, h.scribe.close)
        await running.cleanup()
        server.threads.shutdown(wait=False, cancel_futures=True)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.remove_signal_handler(number)
