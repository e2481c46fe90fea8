"""JSON schemas of the protocol's answers: the keys that clients may count on, and their types."""

from collections.abc import Mapping
from typing import Any

STRING, INTEGER, NUMBER, BOOLEAN, NULL = ({"type": t} for t in ("string", "integer", "number", "boolean", "null"))


def _object(
    required: Mapping[str, Any], optional: Mapping[str, Any] | None = None, closed: bool = False
) -> dict[str, Any]:
    properties = {**required, **(optional or {})}
    return {"type": "object", "properties": properties, "required": list(required)} | (
        {"additionalProperties": False} if closed else {}
    )


def _list(item: Any) -> dict[str, Any]:
    return {"type": "array", "items": item}


def _maybe(schema: Any) -> dict[str, Any]:
    return {"anyOf": [schema, NULL]}


def _const(value: str) -> dict[str, Any]:
    return {"const": value}


_USAGE = _object({"prompt_tokens": INTEGER, "completion_tokens": INTEGER, "total_tokens": INTEGER})
_TOKEN = {"token": STRING, "logprob": NUMBER, "bytes": _maybe(_list(INTEGER))}
_CHAT_LOGPROBS = _object(
    {"content": _maybe(_list(_object({**_TOKEN, "top_logprobs": _list(_object(_TOKEN))}))), "refusal": NULL}
)
_LEGACY_LOGPROBS = _object({
    "tokens": _list(STRING), "token_logprobs": _list(_maybe(NUMBER)), "text_offset": _list(INTEGER),
    "top_logprobs": _list(_maybe({"type": "object", "additionalProperties": NUMBER})),
})  # fmt: skip
_FUNCTION = _object({"name": STRING, "arguments": STRING})
_CALLS = {**_list(_object({"id": STRING, "type": _const("function"), "function": _FUNCTION})), "minItems": 1}
_MESSAGE = _object(
    {"role": _const("assistant"), "content": _maybe(STRING), "refusal": _maybe(STRING)},
    {"tool_calls": _CALLS, "reasoning_content": STRING},
)
_CALL_DELTA = _object(
    {
        "index": {"type": "integer", "minimum": 0},
        "function": _object({"arguments": STRING}, {"name": STRING}, closed=True),
    },
    {"id": STRING, "type": _const("function")},
    closed=True,
)
_DELTA = _object(
    {},
    {"role": _const("assistant"), "content": STRING, "reasoning_content": STRING, "tool_calls": _list(_CALL_DELTA)},
    closed=True,
)
_CHAT_END = {"enum": ["stop", "length", "tool_calls", "content_filter"]}
_HEAD = {"id": STRING, "created": INTEGER, "model": STRING}
_CHAT_CHOICE = {"index": INTEGER, "message": _MESSAGE, "logprobs": _maybe(_CHAT_LOGPROBS), "finish_reason": _CHAT_END}
_CHUNK_CHOICE = {"index": INTEGER, "delta": _DELTA, "finish_reason": _maybe(_CHAT_END)}
_TEXT_CHOICE = {"index": INTEGER, "text": STRING, "logprobs": _maybe(_LEGACY_LOGPROBS)}
_TEXT_END = {"enum": ["stop", "length", "content_filter"]}
_PART = {"anyOf": [
    _object({"type": _const("output_text"), "text": STRING, "annotations": _list({}), "logprobs": _list({})}),
    _object({"type": _const("reasoning_text"), "text": STRING}),
]}  # fmt: skip
_STATUS = {"enum": ["completed", "in_progress", "incomplete"]}
_ITEM = {"anyOf": [
    _object({"type": _const("message"), "id": STRING, "role": _const("assistant"), "status": _STATUS,
             "content": _list(_PART)}),
    _object({"type": _const("reasoning"), "id": STRING, "summary": _list({}), "content": _list(_PART)}),
    _object({"type": _const("function_call"), "id": STRING, "call_id": STRING, "name": STRING, "arguments": STRING,
             "status": _STATUS}),
]}  # fmt: skip
_RESPONSE = _object({
    "id": STRING, "object": _const("response"), "created_at": INTEGER, "model": STRING, "output": _list(_ITEM),
    "status": {"enum": ["completed", "failed", "in_progress", "cancelled", "queued", "incomplete"]},
    "error": _maybe(_object({"code": STRING, "message": STRING})), "instructions": _maybe(STRING),
    "incomplete_details": _maybe(_object({"reason": STRING})), "parallel_tool_calls": BOOLEAN,
    "metadata": {"type": "object", "additionalProperties": STRING}, "temperature": NUMBER, "top_p": NUMBER,
    "tool_choice": {"type": ["string", "object"]}, "tools": _list(_object({"type": STRING})),
    "usage": _maybe(_object({
        "input_tokens": INTEGER, "output_tokens": INTEGER, "total_tokens": INTEGER,
        "input_tokens_details": _object({"cached_tokens": INTEGER}),
        "output_tokens_details": _object({"reasoning_tokens": INTEGER}),
    })),
})  # fmt: skip

SCHEMAS: Mapping[str, Mapping[str, Any]] = {
    "error": _object({"error": _object(
        {"message": STRING, "type": STRING, "param": _maybe(STRING), "code": _maybe(STRING)}, closed=True)}, closed=True),
    "chat": _object({
        **_HEAD, "object": _const("chat.completion"), "choices": _list(_object(_CHAT_CHOICE, closed=True)),
        "usage": _USAGE,
    }),
    "chat_chunk": _object(
        {**_HEAD, "object": _const("chat.completion.chunk"),
         "choices": _list(_object(_CHUNK_CHOICE, {"logprobs": _maybe(_CHAT_LOGPROBS)}, closed=True))},
        {"usage": _maybe(_USAGE)},
    ),
    "completion": _object({
        **_HEAD, "object": _const("text_completion"), "usage": _USAGE,
        "choices": _list(_object({**_TEXT_CHOICE, "finish_reason": _TEXT_END}, closed=True)),
    }),
    "completion_chunk": _object(
        {**_HEAD, "object": _const("text_completion"),
         "choices": _list(_object({**_TEXT_CHOICE, "finish_reason": _maybe(_TEXT_END)}, closed=True))},
        {"usage": _maybe(_USAGE)},
    ),
    "models": _object({"object": _const("list"), "data": _list(_object(
        {"id": STRING, "object": _const("model"), "created": INTEGER, "owned_by": STRING}, {"parent": STRING}))}),
    "embeddings": _object({
        "object": _const("list"), "model": STRING,
        "data": _list(_object({"object": _const("embedding"), "index": INTEGER,
                               "embedding": {"anyOf": [_list(NUMBER), STRING]}})),
        "usage": _object({"prompt_tokens": INTEGER, "total_tokens": INTEGER}),
    }),
    "scores": _object({**_HEAD, "object": _const("list"), "data": _list(
        _object({"index": INTEGER, "object": _const("score"), "score": NUMBER}))}),
    "ranking": _object({"id": STRING, "model": STRING, "results": _list(
        _object({"index": INTEGER, "relevance_score": NUMBER}, {"document": _object({"text": STRING})}))}),
    "tokens": _object({"tokens": _list(INTEGER), "count": INTEGER, "max_model_len": INTEGER}),
    "detokenized": _object({"prompt": STRING}),
    "response": _RESPONSE,
    "response_event": _object({"type": STRING, "sequence_number": INTEGER}, {"response": _RESPONSE, "item": _ITEM}),
}  # fmt: skip
