"""The server's OpenAPI document: its routes, with the schemas of requests and answers by which they are checked."""

import importlib.metadata
from collections.abc import Iterable, Mapping
from typing import Any

from fdel.serve import admin, openai
from fdel.serve.openai.schema import SCHEMAS

# path: (kind of request, schema of the answer)
_KINDS = {
    "/v1/chat/completions": ("chat", "chat"),
    "/v1/completions": ("completion", "completion"),
    "/v1/responses": ("response", "response"),
    "/v1/embeddings": ("embeddings", "embeddings"),
    "/score": ("score", "scores"),
    "/v1/score": ("score", "scores"),
    "/rerank": ("rerank", "ranking"),
    "/v1/rerank": ("rerank", "ranking"),
    "/tokenize": ("tokenize", "tokens"),
    "/detokenize": ("detokenize", "detokenized"),
}
_STREAMS = ("chat", "completion", "response")
_TEXTS = {"/": "text/html", "/metrics": "text/plain"}


def document(
    routes: Iterable[tuple[str, str, str | None, Any]],
    models: Mapping[str, Any],
    limits: openai.Limits,
    *,
    keys: bool,
) -> dict[str, Any]:
    """Describe routes (method, path, scope or None for an open one, handler) of a server, with `keys` or without."""
    requests, paths = openai.requests(limits), dict[str, dict[str, Any]]()
    for method, path, scope, handler in routes:
        kind, answer = _KINDS.get(path, (None, {"/v1/models": "models"}.get(path)))
        about: dict[str, Any] = {
            "summary": (handler.__doc__ or path).strip(),
            "responses": _answers(
                path, kind, answer, scope, "201" if (method, path) == ("POST", "/admin/keys") else "200"
            ),
        }
        if scope is not None and keys:
            about["security"] = [{"key": []}]
        if kind is not None:
            schema = requests[kind].schema
            schema = {**schema, "properties": {**schema["properties"], "model": {"enum": list(models)}}}
            about["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        elif method == "POST":
            schema = admin.BODIES[path].schema
            about["requestBody"] = {
                "required": bool(schema["required"]),
                "content": {"application/json": {"schema": schema}},
            }
        if "{id" in path:
            about["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
        paths.setdefault(path.replace(":.+", ""), {})[method.lower()] = about
    return {
        "openapi": "3.1.0",
        "info": {"title": "fdel", "version": importlib.metadata.version("fdel")},
        "paths": paths,
        "components": {
            "schemas": {"Error": SCHEMAS["error"]},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _answers(path: str, kind: str | None, answer: str | None, scope: str | None, status: str) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    content: dict[str, Any] = {} if answer is None else {"application/json": {"schema": SCHEMAS[answer]}}
    content |= {"text/event-stream": {"schema": {}}} if kind in _STREAMS else {}
    content |= {_TEXTS[path]: {"schema": {"type": "string"}}} if path in _TEXTS else {}
    answers = {status: {"description": "the answer"} | ({"content": content} if content else {})}
    if scope is not None:
        answers |= {
            "4XX": {"description": "refused", "content": error},
            "503": {"description": "busy", "content": error},
        }
    return answers
