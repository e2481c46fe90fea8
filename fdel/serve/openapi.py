"""The server's OpenAPI document: its routes, the parameters that clients use most, and the schemas of its answers."""

import importlib.metadata
from collections.abc import Iterable
from typing import Any

from fdel.serve.openai.schema import SCHEMAS

_TEXT = {"type": "string", "minLength": 1}
_TEXTS = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1}]}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPTS = {"anyOf": [*_TEXTS["anyOf"], _IDS, {"type": "array", "items": _IDS, "minItems": 1}]}
_BETWEEN = lambda low, high, kind="number": {"type": kind, "minimum": low, "maximum": high}
_SAMPLING = {
    "temperature": _BETWEEN(0, 2), "top_p": _BETWEEN(1e-6, 1), "presence_penalty": _BETWEEN(-2, 2),
    "frequency_penalty": _BETWEEN(-2, 2), "seed": _BETWEEN(-(2**63), 2**63 - 1, "integer"), "stream": {"type": "boolean"},
    "n": _BETWEEN(1, 128, "integer"), "stop": _TEXTS, "user": {"type": "string"}, "top_k": {"type": "integer"},
    "min_p": _BETWEEN(0, 1), "repetition_penalty": _BETWEEN(0.01, 100), "min_tokens": {"type": "integer", "minimum": 0},
    "logit_bias": {"type": "object", "additionalProperties": _BETWEEN(-100, 100)}, "ignore_eos": {"type": "boolean"},
}  # fmt: skip
_MESSAGE = {
    "type": "object",
    "properties": {"role": {"enum": ["system", "developer", "user", "assistant", "tool"]}, "content": _TEXT},
    "required": ["role"],
}
_MESSAGES = {"type": "array", "items": _MESSAGE, "minItems": 1}
_FUNCTION = {"type": "object", "properties": {"name": _TEXT, "parameters": {"type": "object"}}, "required": ["name"]}
_TOOL = {
    "type": "object",
    "properties": {"type": {"const": "function"}, "function": _FUNCTION},
    "required": ["type", "function"],
}
# path: (parameters beside "model", those that are required, the schema of the answer)
_POSTS: dict[str, tuple[dict[str, Any], tuple[str, ...], str]] = {
    "/v1/chat/completions": (
        {"messages": _MESSAGES, "max_completion_tokens": {"type": "integer", "minimum": 1}, "logprobs": {"type": "boolean"},
         "top_logprobs": _BETWEEN(0, 20, "integer"), "response_format": {"type": "object"},
         "tools": {"type": "array", "items": _TOOL}, "tool_choice": {}, **_SAMPLING}, ("messages",), "chat",
    ),
    "/v1/completions": (
        {"prompt": _PROMPTS, "max_tokens": {"type": "integer", "minimum": 0}, "logprobs": _BETWEEN(0, 20, "integer"),
         "echo": {"type": "boolean"}, "best_of": _BETWEEN(1, 128, "integer"), **_SAMPLING}, ("prompt",), "completion",
    ),
    "/v1/responses": (
        {"input": _TEXT, "instructions": _TEXT, "max_output_tokens": {"type": "integer", "minimum": 1},
         "temperature": _BETWEEN(0, 2), "top_p": _BETWEEN(1e-6, 1), "stream": {"type": "boolean"}}, ("input",), "response",
    ),
    "/v1/embeddings": ({"input": _PROMPTS, "encoding_format": {"enum": ["float", "base64"]}}, ("input",), "embeddings"),
    "/v1/score": ({"text_1": _TEXTS, "text_2": _TEXTS}, ("text_1", "text_2"), "scores"),
    "/v1/rerank": ({"query": _TEXT, "documents": {"type": "array", "items": _TEXT, "minItems": 1},
                    "top_n": {"type": "integer", "minimum": 1}}, ("query", "documents"), "ranking"),
    "/tokenize": ({"prompt": {"type": "string"}, "add_special_tokens": {"type": "boolean"}}, ("prompt",), "tokens"),
    "/detokenize": ({"tokens": {"type": "array", "items": {"type": "integer"}}}, ("tokens",), "detokenized"),
}  # fmt: skip
_GETS = {"/v1/models": "models"}


def document(routes: Iterable[tuple[str, str, str | None, Any]], models: Iterable[str]) -> dict[str, Any]:
    """Describe the routes (method, path, scope or None for an open one, handler)."""
    paths: dict[str, dict[str, Any]] = {}
    name = {"type": "string", "enum": list(models)}
    for method, path, scope, handler in routes:
        about = {"summary": (handler.__doc__ or path).strip().splitlines()[0], "responses": _answers(path, scope)}
        if scope is not None:
            about["security"] = [{"key": []}]
        if path in _POSTS:
            fields, required, _ = _POSTS[path]
            needed = ["model", *required] if path not in ("/tokenize", "/detokenize") else list(required)
            schema = {"type": "object", "properties": {"model": name, **fields}, "required": needed}
            about["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        elif method == "POST":
            about["requestBody"] = {"content": {"application/json": {"schema": {"type": "object"}}}}
        if "{id" in path:
            path = path.replace("{id:.+}", "{id}")
            about["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
        paths.setdefault(path, {})[method.lower()] = about
    return {
        "openapi": "3.1.0",
        "info": {"title": "fdel", "version": importlib.metadata.version("fdel")},
        "paths": paths,
        "components": {
            "schemas": {"Error": SCHEMAS["error"]},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _answers(path: str, scope: str | None) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    answer = _POSTS[path][2] if path in _POSTS else _GETS.get(path)
    content: dict[str, Any] = {} if answer is None else {"application/json": {"schema": SCHEMAS[answer]}}
    if path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
        content["text/event-stream"] = {"schema": {}}
    if path == "/metrics":
        content = {"text/plain": {"schema": {"type": "string"}}}
    if path == "/":
        content = {"text/html": {"schema": {"type": "string"}}}
    codes = {"200": {"description": "the answer", **({"content": content} if content else {})}}
    if scope is not None:
        codes |= {"4XX": {"description": "refused", "content": error}, "503": {"description": "busy", "content": error}}
    return codes
