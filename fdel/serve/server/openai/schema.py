"""JSON schemas of the protocol's answers: the keys that clients may count on, and their types; the OpenAPI document."""

import importlib.metadata
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fdel.serve.server.openai.checks import Check
from fdel.serve.server.openai.tables import Limits, requests

_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", None: "null"}
CLOSED = "CLOSED"  # as a key: the object has no others


def schema(shape: Any) -> dict[str, Any]:
    """Make a JSON schema of a shape in Python's words.

    A type or None, a constant text, [what each item is], {field: shape} ("field?": it may be absent), or a tuple of
    alternatives. A schema is one itself, below the key "schema".
    """
    if shape in (str, int, float, bool, None):
        return {"type": _TYPES[shape]}
    if isinstance(shape, str):
        return {"const": shape}
    if isinstance(shape, list):
        return {"type": "array", "items": schema(shape[0]) if shape else {}}
    if isinstance(shape, tuple):
        return {"enum": list(shape)} if all(isinstance(s, str) for s in shape) else {"anyOf": list(map(schema, shape))}
    if "schema" in shape:
        return shape["schema"]
    fields = {k: v for k, v in shape.items() if k != CLOSED}
    out = {"type": "object", "properties": {k.removesuffix("?"): schema(v) for k, v in fields.items()},
           "required": [k for k in fields if not k.endswith("?")]}  # fmt: skip
    return out | ({"additionalProperties": False} if CLOSED in shape else {})


_HEAD = {"id": str, "created": int, "model": str}
_USAGE = {"prompt_tokens": int, "completion_tokens": int, "total_tokens": int}
_USED = {"prompt_tokens": int, "total_tokens": int}
_TOKEN = {"token": str, "logprob": float, "bytes": ([int], None)}
_CHAT_LOGPROBS = ({"content": ([{**_TOKEN, "top_logprobs": [_TOKEN]}], None), "refusal": None}, None)
_LIKELIEST = {"schema": {"type": "object", "additionalProperties": {"type": "number"}}}
_LEGACY_LOGPROBS = {
    "tokens": [str], "token_logprobs": [(float, None)], "text_offset": [int], "top_logprobs": [(_LIKELIEST, None)],
}  # fmt: skip
_CALL = {"id": str, "type": "function", "function": {"name": str, "arguments": str}}
_CALLS = {"schema": {**schema([_CALL]), "minItems": 1}}
_MESSAGE = {
    "role": "assistant", "content": (str, None), "refusal": (str, None), "tool_calls?": _CALLS, "reasoning_content?": str,
}  # fmt: skip
_CALL_DELTA = {
    "index": {"schema": {"type": "integer", "minimum": 0}}, "function": {"arguments": str, "name?": str, CLOSED: 1},
    "id?": str, "type?": "function", CLOSED: 1,
}  # fmt: skip
_DELTA = {
    "role?": "assistant", "content?": str, "reasoning_content?": str, "tool_calls?": [_CALL_DELTA], CLOSED: 1,
}  # fmt: skip
_CHAT_END = ("stop", "length", "tool_calls", "content_filter")
_TEXT_END = ("stop", "length", "content_filter")
_TEXT_CHOICE = {"index": int, "text": str, "logprobs": (_LEGACY_LOGPROBS, None), CLOSED: 1}
_PART = (
    {"type": "output_text", "text": str, "annotations": [], "logprobs": []},
    {"type": "reasoning_text", "text": str},
)
_STATUS = ("completed", "in_progress", "incomplete")
_ITEM = (
    {"type": "message", "id": str, "role": "assistant", "status": _STATUS, "content": [_PART]},
    {"type": "reasoning", "id": str, "summary": [], "content": [_PART]},
    {"type": "function_call", "id": str, "call_id": str, "name": str, "arguments": str, "status": _STATUS},
)
_RESPONSE = {
    "id": str, "object": "response", "created_at": int, "model": str, "output": [_ITEM],
    "status": ("completed", "failed", "in_progress", "cancelled", "queued", "incomplete"),
    "error": ({"code": str, "message": str}, None), "instructions": (str, None), "temperature": float, "top_p": float,
    "incomplete_details": ({"reason": str}, None), "parallel_tool_calls": bool, "tools": [{"type": str}],
    "metadata": {"schema": {"type": "object", "additionalProperties": {"type": "string"}}},
    "tool_choice": {"schema": {"type": ["string", "object"]}},
    "usage": ({
        "input_tokens": int, "output_tokens": int, "total_tokens": int, "input_tokens_details": {"cached_tokens": int},
        "output_tokens_details": {"reasoning_tokens": int},
    }, None),
}  # fmt: skip
_SEGMENT = {
    "id": int, "seek": int, "start": float, "end": float, "text": str, "tokens": [int], "temperature": float,
    "avg_logprob": float, "compression_ratio": float, "no_speech_prob": float,
}  # fmt: skip
_ANSWERS: Mapping[str, Any] = {
    "error": {"error": {"message": str, "type": str, "param": (str, None), "code": (str, None), CLOSED: 1}, CLOSED: 1},
    "chat": {**_HEAD, "object": "chat.completion", "usage": _USAGE, "choices": [
        {"index": int, "message": _MESSAGE, "logprobs": _CHAT_LOGPROBS, "finish_reason": _CHAT_END, CLOSED: 1}]},
    "chat_chunk": {**_HEAD, "object": "chat.completion.chunk", "usage?": (_USAGE, None), "choices": [
        {"index": int, "delta": _DELTA, "finish_reason": (_CHAT_END, None),
         "logprobs?": _CHAT_LOGPROBS, CLOSED: 1}]},
    "completion": {**_HEAD, "object": "text_completion", "usage": _USAGE,
                   "choices": [{**_TEXT_CHOICE, "finish_reason": _TEXT_END}]},
    "completion_chunk": {**_HEAD, "object": "text_completion", "usage?": (_USAGE, None),
                         "choices": [{**_TEXT_CHOICE, "finish_reason": (_TEXT_END, None)}]},
    "models": {"object": "list", "data": [
        {"id": str, "object": "model", "created": int, "owned_by": str, "parent?": str,
         "input_modalities": [("text", "image", "audio")]}]},
    "embeddings": {"object": "list", "model": str, "usage": _USED,
                   "data": [{"object": "embedding", "index": int, "embedding": ([float], str)}]},
    "scores": {**_HEAD, "object": "list", "data": [{"index": int, "object": "score", "score": float}]},
    "ranking": {"id": str, "model": str, "results": [
        {"index": int, "relevance_score": float, "document?": {"text": str}}]},
    "classes": {**_HEAD, "object": "list", "usage": _USED, "data": [
        {"index": int, "label": str, "probs": [float], "num_classes": int}]},
    "pooled": {**_HEAD, "object": "list", "usage": _USED, "data": [
        {"index": int, "object": "pooling", "data": ([float], [[float]], str)}]},
    "tokens": {"tokens": [int], "count": int, "max_model_len": int},
    "detokenized": {"prompt": str},
    "transcript": {"text": str, "usage": {"type": "duration", "seconds": int}, "task?": str, "language?": str,
                   "duration?": float, "words?": [{"word": str, "start": float, "end": float}], "segments?": [_SEGMENT]},
    "response": _RESPONSE,
    "response_event": {"type": str, "sequence_number": int, "response?": _RESPONSE, "item?": _ITEM},
}  # fmt: skip
SCHEMAS: Mapping[str, Mapping[str, Any]] = {name: schema(shape) for name, shape in _ANSWERS.items()}


# ---- the OpenAPI document --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Route:
    """A route. `scope` is what a key needs, None for an open route.

    `request` is its body, a key of `openai.requests` or a check; `answer` is a key of `SCHEMAS`, or a type of media.
    """

    method: str
    path: str
    scope: str | None
    handler: Callable[..., Awaitable[Any]]
    request: str | Check | None = None
    answer: str = ""
    status: str = "200"
    form: bool = False  # its body is multipart/form-data, not JSON


def document(routes: Iterable[Route], models: Collection[str], limits: Limits, *, keys: bool) -> dict[str, Any]:
    """Describe the routes of a server, with `keys` or without."""
    paths: dict[str, dict[str, Any]] = {}
    for r in routes:
        about: dict[str, Any] = {"summary": (r.handler.__doc__ or r.path).strip(), "responses": _answers(r)}
        if r.scope is not None and keys:
            about["security"] = [{"key": []}]
        if r.request is not None:
            schema = (requests(limits)[r.request] if isinstance(r.request, str) else r.request).schema
            if isinstance(r.request, str):
                schema = {**schema, "properties": {**schema["properties"], "model": {"enum": list(models)}}}
            body = {"multipart/form-data" if r.form else "application/json": {"schema": schema}}
            about["requestBody"] = {"required": bool(schema["required"]), "content": body}
        if "{id" in r.path:
            about["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
        paths.setdefault(r.path.replace(":.+", ""), {})[r.method.lower()] = about
    schemas = {"schemas": {"Error": SCHEMAS["error"]}, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
    info = {"title": "fdel", "version": importlib.metadata.version("fdel")}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": schemas}


def _answers(r: Route) -> dict[str, Any]:
    content: dict[str, Mapping[str, Any]] = {}
    if r.answer in SCHEMAS:
        content["application/json"] = {"schema": SCHEMAS[r.answer]}
    elif r.answer:
        content[r.answer] = {"schema": {"type": "string"}}
    if r.request in ("transcription", "translation"):
        content |= {kind: {"schema": {"type": "string"}} for kind in ("text/plain", "text/vtt")}
    if r.request in ("chat", "completion", "response", "transcription"):  # its answer may be a stream
        content["text/event-stream"] = {"schema": {}}
    answers: dict[str, Any] = {r.status: {"description": "the answer"} | ({"content": content} if content else {})}
    if r.scope is not None:
        error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
        refused, busy = ({"description": what, "content": error} for what in ("refused", "busy"))
        answers |= {"4XX": refused, "503": busy}
    return answers
