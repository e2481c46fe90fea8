"""Routes about the server itself: whether it is well, its models, metrics, pages."""

import base64
import functools
import hashlib
import importlib.metadata
import re
from importlib import resources

from aiohttp import web

from fdel.serve.metrics import CONTENT_TYPE, gather
from fdel.serve.openai import body
from fdel.serve.state import Call

STALE = 30.0  # seconds without a turn of an engine's loop after which the server is not ready


# ---- about the server ----------------------------------------------------------------------------------------------


async def health(call: Call) -> web.Response:
    """GET /health: the process answers."""
    return call.json({"status": "ok"})


async def ready(call: Call) -> web.Response:
    """GET /ready: every engine's loop turns, and no drain has begun."""
    engines = [s.engine for s in call.server.engines().values()]
    turn = all(not e.loop.closed and e.stats()["seconds since a turn"] < STALE for e in engines)
    fine = turn and not call.server.draining
    return call.json(
        {"status": "ready" if fine else "draining" if call.server.draining else "stuck"}, 200 if fine else 503
    )


async def version(call: Call) -> web.Response:
    """GET /version."""
    return call.json({"version": importlib.metadata.version("fdel")})


async def models(call: Call) -> web.Response:
    """GET /v1/models."""
    listed = [body.model(s.name, s.created, parent=s.parent) for s in call.server.models.values()]
    return call.json(body.models(listed))


async def model(call: Call) -> web.Response:
    """GET /v1/models/{id}."""
    call.body = {"model": call.request.match_info["id"]}
    found = call.served()
    return call.json(body.model(found.name, found.created, parent=found.parent))


async def tokenizer_info(call: Call) -> web.Response:
    """GET /tokenizer_info."""
    return call.json(body.tokenizer_info(call.served(optional=True).tokenizer))


async def metrics(call: Call) -> web.Response:
    """GET /metrics, as Prometheus reads them."""
    server = call.server
    gather(server.metrics, [s.engine.stats() for s in server.engines().values()])
    return web.Response(text=server.metrics.text(), headers={"Content-Type": CONTENT_TYPE})


async def page(call: Call) -> web.Response:
    """GET /: the playground."""
    return send_page("playground.html")


@functools.cache
def pages() -> tuple[dict[str, str], str]:
    """Read our pages: their texts by name, and the policy under which they run their own scripts and no others."""
    web_files = resources.files("fdel.serve") / "web"
    texts = {n: (web_files / n).read_text("utf-8") for n in ("login.html", "playground.html")}
    # The login page writes the playground into itself, so that its policy is in force there too.
    scripts = [re.search("<script>(.*)</script>", t, re.DOTALL)[1] for t in texts.values()]  # type: ignore[index]
    digests = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts]
    allowed = " ".join(f"'sha256-{d}'" for d in digests)
    closed = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    return texts, f"{closed}; connect-src 'self'; style-src 'unsafe-inline'; script-src {allowed}"


def send_page(name: str, status: int = 200) -> web.Response:
    """Send a page of ours, which may talk to this server, and to nothing else."""
    texts, policy = pages()
    headers = {
        "Content-Security-Policy": policy, "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }  # fmt: skip
    return web.Response(text=texts[name], status=status, content_type="text/html", headers=headers)
