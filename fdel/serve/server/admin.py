"""Routes about the server itself (whether it is well, its models, metrics, pages), and those of administration."""

import asyncio
import base64
import functools
import hashlib
import importlib.metadata
import logging
import re
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

from aiohttp import web

from fdel import params
from fdel.models import spec_of
from fdel.serve.server import auth, keyfile
from fdel.serve.server.call import Call, Server
from fdel.serve.server.metrics import CONTENT_TYPE, gather
from fdel.serve.server.openai import APIError, body
from fdel.serve.server.openai.checks import choice, number, record, text
from fdel.serve.server.openai.tables import NAME
from fdel.serve.server.served import ServedModel

log = logging.getLogger(__name__)
STALE = 30.0  # seconds without a turn of an engine's loop after which the server is not ready
ADAPTERS = 64  # that may be loaded at a time
_RATE, _NAME, _MODEL = number(1e-3, 1e9), text(64, 1, NAME), text(256, 1)
# What the bodies of the routes are.
NEW_KEY = record({
    "role": choice(*auth.ROLES), "name": text(64), "requests_per_minute": _RATE, "tokens_per_minute": _RATE,
})  # fmt: skip
LOAD = record({"lora_name": _NAME, "lora_path": text(4096, 1), "model": _MODEL}, ["lora_name", "lora_path"])
UNLOAD = record({"lora_name": _NAME}, ["lora_name"])
DRAIN = record({})


# ---- about the server ----------------------------------------------------------------------------------------------


async def health(call: Call) -> web.Response:
    """GET /health: the process answers."""
    return call.json({"status": "ok"})


async def ready(call: Call) -> web.Response:
    """GET /ready: every engine's loop runs, and no drain has begun."""
    engines = [s.engine for s in call.server.engines().values()]
    runs = all(not e.closed and e.stats()["seconds since a step"] < STALE for e in engines)
    fine = runs and not call.server.draining
    status = "ready" if fine else "draining" if call.server.draining else "stuck"
    return call.json({"status": status}, 200 if fine else 503)


async def version(call: Call) -> web.Response:
    """GET /version."""
    return call.json({"version": importlib.metadata.version("fdel")})


async def models(call: Call) -> web.Response:
    """GET /v1/models."""
    server = call.server
    found = [*server.models.values(), *server.heard.values(), *server.dual.values(), *server.labels.values()]
    listed = [body.model(s.name, s.created, s.takes, parent=s.parent) for s in found]
    return call.json({"object": "list", "data": listed})


async def model(call: Call) -> web.Response:
    """GET /v1/models/{id}."""
    call.body = {"model": call.request.match_info["id"]}
    found = call.server.heard.get(call.body["model"]) or call.dual() or call.labels() or call.served()
    return call.json(body.model(found.name, found.created, found.takes, parent=found.parent))


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
    web_files = resources.files("fdel.serve.server") / "web"
    texts = {n: (web_files / n).read_text("utf-8") for n in ("login.html", "playground.html")}
    # The login page writes the playground into itself, so that its policy is in force there too.
    scripts = [re.search("<script>(.*)</script>", t, re.DOTALL)[1] for t in texts.values()]  # type: ignore[index]
    digests = [base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts]
    allowed = " ".join(f"'sha256-{d}'" for d in digests)
    closed = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; img-src data:"
    return texts, f"{closed}; connect-src 'self'; style-src 'unsafe-inline'; script-src {allowed}"


def send_page(name: str, status: int = 200) -> web.Response:
    """Send a page of ours, which may talk to this server, and to nothing else."""
    texts, policy = pages()
    headers = {
        "Content-Security-Policy": policy, "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }  # fmt: skip
    return web.Response(text=texts[name], status=status, content_type="text/html", headers=headers)


async def list_keys(call: Call) -> web.Response:
    """GET /admin/keys: all but the hashes."""
    shown = [{k: v for k, v in asdict(key).items() if k != "hash"} for key in (call.server.keys or {}).values()]
    return call.json({"object": "list", "data": shown})


async def add_key(call: Call) -> web.Response:
    """POST /admin/keys: a new key; its secret is in this answer and nowhere else."""
    asked = NEW_KEY(call.body)
    if call.server.keys is None:
        raise APIError("this server asks for no keys; start it with a key file", status=409, code="no_keys")
    key, secret = auth.create(**{"name": "", "role": "user", **asked}, now=time.time())
    await _change_keys(call.server, lambda known: {**known, key.hash: key})
    return call.json({"id": key.id, "secret": secret}, 201)


async def remove_key(call: Call) -> web.Response:
    """DELETE /admin/keys/{id}."""
    id = call.request.match_info["id"]
    if id not in {key.id for key in (call.server.keys or {}).values()}:
        raise APIError("there is no such key", status=404, code="not_found")
    await _change_keys(call.server, lambda known: {h: k for h, k in known.items() if k.id != id})
    return call.json({"id": id, "deleted": True})


async def _change_keys(server: Server, edit: Callable[[dict[str, auth.Key]], dict[str, auth.Key]]) -> None:
    """Change the file, if there is one, and go by what it holds then."""
    if server.key_file is None:
        server.keys = edit(server.keys or {})
        return
    await asyncio.shield(asyncio.to_thread(keyfile.change, server.key_file.path, edit))
    server.reload()


async def load_adapter(call: Call) -> web.Response:
    """POST /v1/load_lora_adapter: serve a PEFT adapter, of a directory under the root given at the start, by a name."""
    asked = LOAD(call.body)
    name, base, server = asked["lora_name"], call.served(optional=True), call.server
    call.facts["model"] = name
    if base.parent is not None:
        raise APIError(f"the model {base.name!r} is an adapter; name a model", param="model")
    path = directory(server.adapter_root, asked["lora_path"])

    def check() -> None:
        if name in server.models:
            said = f"the name {name!r} is taken; unload it first"
            raise APIError(said, param="lora_name", status=409, code="exists")
        if sum(s.parent is not None for s in server.models.values()) >= ADAPTERS:
            raise APIError(f"{ADAPTERS} adapters are loaded, which is the most", status=409, code="full")

    async def work() -> None:
        check()
        try:
            adapted = await call.in_thread(lambda: _read(base, path))  # may take a while, and holds up nobody
            async with server.changing:
                check()
                await call.in_thread(lambda: base.engine.update_params(adapted, adapter=name))
                server.metrics.extend("model", name)
                server.models = {**server.models, name: base.with_adapter(name)}
        except ValueError as e:
            raise APIError(f"this adapter does not fit the model: {e}", param="lora_path") from e

    await asyncio.shield(work())  # also if the client leaves: models and engine must agree
    return call.json({"id": name, "object": "model", "parent": base.name, "loaded": True})


async def unload_adapter(call: Call) -> web.Response:
    """POST /v1/unload_lora_adapter: forget an adapter; requests that still use it fail."""
    name, server = UNLOAD(call.body)["lora_name"], call.server
    call.facts["model"] = name

    async def work() -> None:
        async with server.changing:
            found = server.models.get(name)
            if found is None or found.parent is None:
                raise APIError("there is no such adapter", param="lora_name", status=404, code="not_found")
            server.models = {n: s for n, s in server.models.items() if n != name}
            await call.in_thread(lambda: found.engine.remove_adapter(name))
            server.metrics.remove("model", name)

    await asyncio.shield(work())
    return call.json({"id": name, "object": "model", "deleted": True})


def directory(root: Path | None, said: str) -> Path:
    """Find an adapter's directory by its path below the root. APIError for all else, saying nothing of what is there."""
    if root is None:
        message = "this server loads no adapters; start it with --adapter-root"
        raise APIError(message, status=403, code="no_adapter_root")
    root = root.resolve()
    try:
        found = (root / said).resolve()
        files = [(found / name).resolve() for name in ("adapter_config.json", "adapter_model.safetensors")]
        if found != root and all(f.is_relative_to(root) and f.is_file() for f in files):
            return found
    except (OSError, ValueError, RuntimeError):  # a name that is none, or links in a circle
        pass
    raise APIError("there is no adapter of this path", param="lora_path", status=404, code="not_found")


def _read(base: ServedModel, path: Path) -> Any:
    model, most = base.engine.model, base.engine.settings.lora_rank
    try:
        return params.load_peft(params.unstack(spec_of(model)), model.params, path, max_rank=most)
    except ValueError:
        raise
    except Exception as e:  # whatever else a file may bring about is told to the log alone
        log.exception("an adapter cannot be read")
        raise ValueError("its files cannot be read") from e


async def drain(call: Call) -> web.Response:
    """POST /admin/drain: take no more requests; those under way go on."""
    DRAIN(call.body)
    call.server.draining = True
    return call.json({"status": "draining", "active": call.server.active - 1})
