"""Routes about the server itself: whether it is well, its models, metrics, pages, and administration."""

import base64
import hashlib
import importlib.metadata
import re
import time
from dataclasses import asdict
from importlib import resources

from aiohttp import web

from fdel.serve import auth
from fdel.serve.metrics import CONTENT_TYPE
from fdel.serve.openai import APIError, body
from fdel.serve.state import Call, Server

STALE = 30.0  # seconds without a turn of an engine's loop after which the server is not ready
# The engines' counters and their names for Prometheus.
COUNTERS = {
    "preempted": "fdel_num_preemptions_total",
    "looked up": "fdel_prefix_cache_queries_total",
    "found": "fdel_prefix_cache_hits_total",
    "compiled": "fdel_compilations_total",
}


# ---- about the server ----------------------------------------------------------------------------------------------


async def health(call: Call) -> web.Response:
    """GET /health: the process answers."""
    return call.json({"status": "ok"})


async def ready(call: Call) -> web.Response:
    """GET /ready: every engine's loop turns, and no drain has begun."""
    beats = {name: s.engine.stats()["seconds since a turn"] for name, s in call.server.engines().items()}
    fine = not call.server.draining and all(beat < STALE for beat in beats.values())
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
    every = [s.engine.stats() for s in server.engines().values()]
    total = lambda name: sum(stats[name] for stats in every)
    server.metrics.set("fdel_num_requests_running", total("running"))
    server.metrics.set("fdel_num_requests_waiting", total("waiting"))
    server.metrics.set("fdel_kv_cache_usage_ratio", 1 - total("free pages") / total("pages"))
    for name, metric in COUNTERS.items():
        now, before = total(name), server.counted.get(name, 0)
        server.metrics.add(metric, now - before)
        server.counted[name] = now
    return web.Response(text=server.metrics.text(), headers={"Content-Type": CONTENT_TYPE})


async def page(call: Call) -> web.Response:
    """GET /: the playground."""
    return send_page("playground.html")


def send_page(name: str, status: int = 200) -> web.Response:
    """Send a page of ours, which may run its own scripts and talk to this server, and nothing else."""
    web_files = resources.files("fdel.serve") / "web"
    texts = {n: (web_files / n).read_text("utf-8") for n in ("login.html", "playground.html")}
    # The login page writes the playground into itself, so that its policy is in force there too.
    scripts = [re.search("<script>(.*)</script>", t, re.DOTALL)[1] for t in texts.values()]  # type: ignore[index]
    digests = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts]
    allowed = " ".join(f"'sha256-{d}'" for d in digests)
    policy = f"default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; script-src {allowed}"
    headers = {"Content-Security-Policy": policy, "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
    return web.Response(text=texts[name], status=status, content_type="text/html", headers=headers)


# ---- administration ------------------------------------------------------------------------------------------------


async def list_keys(call: Call) -> web.Response:
    """GET /admin/keys: all but the hashes."""
    shown = [{k: v for k, v in asdict(key).items() if k != "hash"} for key in (call.server.keys or {}).values()]
    return call.json({"object": "list", "data": shown})


async def add_key(call: Call) -> web.Response:
    """POST /admin/keys: a new key; its secret is in this answer and nowhere else."""
    known = {"role", "name", "requests_per_minute", "tokens_per_minute"}
    if unknown := sorted(set(call.body) - known):
        raise APIError(f"unknown field; expected {', '.join(sorted(known))}", param=unknown[0][:64])
    if call.server.keys is None:
        raise APIError("this server asks for no keys; start it with a key file", status=409, code="no_keys")
    try:
        key, secret = auth.create(**{"name": "", "role": "user", **call.body}, now=time.time())
    except ValueError as e:
        raise APIError(f"this is no key: {e}") from e
    _change_keys(call.server, {**call.server.keys, key.hash: key})
    return call.json({"id": key.id, "secret": secret}, 201)


async def remove_key(call: Call) -> web.Response:
    """DELETE /admin/keys/{id}."""
    id, keys = call.request.match_info["id"], call.server.keys or {}
    rest = {h: k for h, k in keys.items() if k.id != id}
    if len(rest) == len(keys):
        raise APIError("there is no such key", status=404, code="not_found")
    _change_keys(call.server, rest)
    return call.json({"id": id, "deleted": True})


def _change_keys(server: Server, keys: dict[str, auth.Key]) -> None:
    if server.key_file is not None:
        auth.save(server.key_file, keys.values())
    server.keys = keys


async def drain(call: Call) -> web.Response:
    """POST /admin/drain: take no more requests; those under way go on."""
    call.server.draining = True
    return call.json({"status": "draining", "active": call.server.active - 1})
