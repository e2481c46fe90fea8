"""Administration: keys, adapters, the end of service."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from aiohttp import web

from fdel import params
from fdel.serve import auth, keyfile
from fdel.serve.openai import APIError
from fdel.serve.openai.checks import choice, number, record, text
from fdel.serve.openai.tables import NAME
from fdel.serve.served import Served
from fdel.serve.state import Call, Server

log = logging.getLogger(__name__)
ADAPTERS = 64  # that may be loaded at a time
_RATE, _NAME, _MODEL = number(1e-3, 1e9), text(64, 1, NAME), text(256, 1)
# What the bodies are, by path.
BODIES = {
    "/admin/keys": record({"role": choice(*auth.ROLES), "name": text(64), "requests_per_minute": _RATE,
                           "tokens_per_minute": _RATE}),
    "/admin/drain": record({}),
    "/v1/load_lora_adapter": record({"lora_name": _NAME, "lora_path": text(4096, 1), "model": _MODEL},
                                    ["lora_name", "lora_path"]),
    "/v1/unload_lora_adapter": record({"lora_name": _NAME}, ["lora_name"]),
}  # fmt: skip


# ---- keys ----------------------------------------------------------------------------------------------------------


async def list_keys(call: Call) -> web.Response:
    """GET /admin/keys: all but the hashes."""
    shown = [{k: v for k, v in asdict(key).items() if k != "hash"} for key in (call.server.keys or {}).values()]
    return call.json({"object": "list", "data": shown})


async def add_key(call: Call) -> web.Response:
    """POST /admin/keys: a new key; its secret is in this answer and nowhere else."""
    asked = BODIES["/admin/keys"](call.body)
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


# ---- adapters ------------------------------------------------------------------------------------------------------


async def load_adapter(call: Call) -> web.Response:
    """POST /v1/load_lora_adapter: serve a PEFT adapter, of a directory under the root given at the start, by a name."""
    asked = BODIES["/v1/load_lora_adapter"](call.body)
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
        adapted = await call.aside(lambda: _read(base, path))  # may take a while, and holds up nobody
        async with server.changing:
            check()
            await call.aside(lambda: _update(base, name, adapted))
            server.metrics.extend("model", name)
            server.models = {**server.models, name: base.under(name)}

    await asyncio.shield(work())  # also if the client leaves: models and engine must agree
    return call.json({"id": name, "object": "model", "parent": base.name, "loaded": True})


async def unload_adapter(call: Call) -> web.Response:
    """POST /v1/unload_lora_adapter: forget an adapter; requests that still use it fail."""
    name, server = BODIES["/v1/unload_lora_adapter"](call.body)["lora_name"], call.server
    call.facts["model"] = name

    async def work() -> None:
        async with server.changing:
            found = server.models.get(name)
            if found is None or found.parent is None:
                raise APIError("there is no such adapter", param="lora_name", status=404, code="not_found")
            server.models = {n: s for n, s in server.models.items() if n != name}
            await call.aside(lambda: found.engine.remove_adapter(name))

    await asyncio.shield(work())
    return call.json({"id": name, "object": "model", "deleted": True})


def directory(root: Path | None, said: str) -> Path:
    """Find an adapter's directory by its path below the root. APIError for all else, saying nothing of what is there."""
    if root is None:
        raise APIError(
            "this server loads no adapters; start it with --adapter-root", status=403, code="no_adapter_root"
        )
    root = root.resolve()
    try:
        found = (root / said).resolve()
        files = [(found / name).resolve() for name in ("adapter_config.json", "adapter_model.safetensors")]
        if found != root and all(f.is_relative_to(root) and f.is_file() for f in files):
            return found
    except (OSError, ValueError, RuntimeError):  # a name that is none, or links in a circle
        pass
    raise APIError("there is no adapter of this path", param="lora_path", status=404, code="not_found")


def _read(base: Served, path: Path) -> Any:
    engine = base.engine
    model, most = engine.model, engine.settings.lora_rank
    try:
        return params.load_peft(params.unstack(model.family.spec(model.cfg)), model.params, path, max_rank=most)
    except ValueError as e:
        raise _unfit(str(e)) from e
    except Exception as e:  # whatever else a file may bring about is told to the log alone
        log.exception("an adapter cannot be read")
        raise _unfit("its files cannot be read") from e


def _update(base: Served, name: str, adapted: Any) -> None:
    try:
        base.engine.update_params(adapted, adapter=name)
    except ValueError as e:
        raise _unfit(str(e)) from e


def _unfit(said: str) -> APIError:
    return APIError(f"this adapter does not fit the model: {said}", param="lora_path")


# ---- the end -------------------------------------------------------------------------------------------------------


async def drain(call: Call) -> web.Response:
    """POST /admin/drain: take no more requests; those under way go on."""
    BODIES["/admin/drain"](call.body)
    call.server.draining = True
    return call.json({"status": "draining", "active": call.server.active - 1})
