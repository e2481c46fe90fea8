"""Answers of the protocol: bodies, chunks of streams, usage, log-probabilities, errors, frames."""

import base64
import json
import math
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fdel import text
from fdel.serve.server.openai.checks import APIError
from fdel.serve.server.tools import Delta, Message

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"  # a comment, for clients and proxies that wait
EVENT_STREAM = {
    "Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no",
}  # fmt: skip
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
LOWEST = -9999.0  # what the protocol writes for a log-probability of minus infinity
Top = Sequence[Mapping[int, float]]  # of each token: the likeliest, with their log-probabilities


@dataclass(frozen=True)
class Meta:
    """What all chunks of an answer share; make it with `meta`."""

    id: str
    created: int  # seconds since 1970
    model: str
    usage: bool = False  # whether a stream ends with the usage


@dataclass(frozen=True)
class Usage:
    """Tokens; prompt tokens count once for all outputs of a prompt."""

    prompt: int
    completion: int = 0
    cached: int = 0
    reasoning: int = 0


def meta(prefix: str, model: str, usage: bool = False) -> Meta:
    """Name an answer that is made now: "chatcmpl", "cmpl", "resp", "score"."""
    return Meta(f"{prefix}-{secrets.token_hex(16)}", int(time.time()), model, usage)


def frame(events: Iterable[Mapping[str, Any]]) -> bytes:
    """Frame events of a stream; those of the Responses API are named by their type."""
    return b"".join(sse(e, e.get("type", "")) for e in events)


def sse(value: Mapping[str, Any], event: str = "") -> bytes:
    """Frame an event of a stream."""
    return (f"event: {event}\n" if event else "").encode() + b"data: " + dump(value) + b"\n\n"


def dump(value: Any) -> bytes:
    """Write JSON on one line, in UTF-8."""
    return _JSON.encode(value).encode("utf-8", "replace")


def error(e: APIError) -> dict[str, Any]:
    """The body of a refusal; the last event of a stream that fails."""
    return {"error": {"message": e.message, "type": e.type, "param": e.param, "code": e.code}}


def usage(u: Usage) -> dict[str, Any]:
    """Count tokens as chat completions and completions do."""
    return {
        "prompt_tokens": u.prompt, "completion_tokens": u.completion, "total_tokens": u.prompt + u.completion,
        "prompt_tokens_details": {"cached_tokens": u.cached},
        "completion_tokens_details": {"reasoning_tokens": u.reasoning},
    }  # fmt: skip


def finish(reason: str, calls: bool, tool_choice: str) -> str:
    """Say why an output ended: one that was cut off is "length"; calls that the client chose by name are a "stop"."""
    if reason == "length":
        return "length"
    return "tool_calls" if calls and tool_choice != "named" else "stop"


def _head(m: Meta, object: str, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {"id": m.id, "object": object, "created": m.created, "model": m.model, "choices": choices}


def chat(m: Meta, choices: Iterable[tuple[Message, str, Any]], used: Usage) -> dict[str, Any]:
    """The body of a chat completion; of each output: its message, why it ended, and its log-probabilities."""
    written = [
        {"index": i, "message": message(said), "finish_reason": reason, "logprobs": logprobs}
        for i, (said, reason, logprobs) in enumerate(choices)
    ]
    return _head(m, "chat.completion", written) | {"usage": usage(used)}


def message(said: Message) -> dict[str, Any]:
    """What the assistant said."""
    content = said.content or (None if said.calls else "")
    out: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if said.reasoning:
        out["reasoning_content"] = said.reasoning
    if said.calls:
        function = lambda c: {"name": c.name, "arguments": c.arguments}
        out["tool_calls"] = [{"id": c.id, "type": "function", "function": function(c)} for c in said.calls]
    return out


def chat_chunk(
    m: Meta, index: int, delta: Mapping[str, Any], finish_reason: str | None = None, logprobs: Any = None
) -> dict[str, Any]:
    """A chunk of one output; the first has `FIRST` as delta, the last {} and the reason."""
    choice = {"index": index, "delta": dict(delta), "logprobs": logprobs, "finish_reason": finish_reason}
    return _head(m, "chat.completion.chunk", [choice]) | ({"usage": None} if m.usage else {})


FIRST: Mapping[str, Any] = {"role": "assistant", "content": ""}


def chat_delta(delta: Delta) -> dict[str, Any]:
    """Write what an output adds."""
    if delta.kind == "call":
        function = {"name": delta.text, "arguments": ""}
        return {"tool_calls": [{"index": delta.index, "id": delta.id, "type": "function", "function": function}]}
    if delta.kind == "arguments":
        return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]}
    return {"reasoning_content" if delta.kind == "reasoning" else "content": delta.text}


def usage_chunk(m: Meta, used: Usage, object: str = "chat.completion.chunk") -> dict[str, Any]:
    """The last chunk of a stream with include_usage; `object` is text_completion for completions."""
    return _head(m, object, []) | {"usage": usage(used)}


def chat_logprobs(
    tok: text.Tokenizer, ids: Sequence[int], logprobs: Sequence[float], top: Top, most: int
) -> dict[str, Any]:
    """Log-probabilities of tokens, with those of the `most` likeliest."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        raw = text.token_bytes(tok, token)
        return {"token": raw.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(raw)}

    rows = zip(ids, logprobs, [list(t.items())[:most] for t in top] or [[]] * len(ids), strict=True)
    content = [entry(i, lp) | {"top_logprobs": [entry(*pair) for pair in best]} for i, lp, best in rows]
    return {"content": content, "refusal": None}


def completion(m: Meta, choices: Sequence[Mapping[str, Any]], used: Usage | None) -> dict[str, Any]:
    """The body of a completion, or (without usage) a chunk of one; choices come from `completion_choice`."""
    head = _head(m, "text_completion", list(choices))
    return head | ({"usage": usage(used)} if used is not None else {"usage": None} if m.usage else {})


def completion_choice(index: int, said: str, finish_reason: str | None, logprobs: Any = None) -> dict[str, Any]:
    """One output of a completion; output j of prompt i has index i * n + j."""
    return {"index": index, "text": said, "logprobs": logprobs, "finish_reason": finish_reason}


def completion_logprobs(
    tok: text.Tokenizer, ids: Sequence[int], logprobs: Sequence[float | None], top: Top, most: int, offset: int = 0
) -> dict[str, Any]:
    """Log-probabilities of tokens (with echo, the prompt's come first), with those of the `most` likeliest.

    The first token of a prompt has none. text_offset counts characters of the text, the first token's from `offset`.
    """
    state, offsets, best = text.Detokenizer(tok), [], list[dict[str, float] | None]()
    name = lambda token: text.token_bytes(tok, token).decode("utf-8", "replace")
    for token, logprob, row in zip(ids, logprobs, top or [{}] * len(ids), strict=True):
        offsets.append(offset)
        state, said = text.step(state, [token])
        offset += len(said)
        if logprob is None:
            best.append(None)
            continue
        named: dict[str, float] = {}
        for t, lp in [*list(row.items())[:most], (token, logprob)]:
            named[name(t)] = max(_finite(lp), named.get(name(t), LOWEST))  # parts of characters share their name
        best.append(named)
    values = [None if lp is None else _finite(lp) for lp in logprobs]
    return {"tokens": list(map(name, ids)), "token_logprobs": values, "top_logprobs": best, "text_offset": offsets}


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST


def model(
    name: str, created: float, takes: Sequence[str] = ("text",), owner: str = "fdel", parent: str | None = None
) -> dict[str, Any]:
    """Describe a model, or an adapter of one (`parent`); `takes` are its modalities: text, image, audio."""
    out = {"id": name, "object": "model", "created": int(created), "owned_by": owner, "input_modalities": list(takes)}
    return out if parent is None else out | {"parent": parent}


def embeddings(name: str, vectors: Sequence[np.ndarray], base64_: bool, prompt: int) -> dict[str, Any]:
    """Embeddings in order; base64 is of float32 in little-endian order. `prompt` counts tokens."""
    data = [{"object": "embedding", "index": i, "embedding": _numbers(v, base64_)} for i, v in enumerate(vectors)]
    return {"object": "list", "model": name, "data": data, "usage": {"prompt_tokens": prompt, "total_tokens": prompt}}


def _numbers(x: np.ndarray, base64_: bool) -> Any:
    return base64.b64encode(x.astype("<f4").tobytes()).decode() if base64_ else x.tolist()


def classes(m: Meta, rows: Sequence[np.ndarray], names: Sequence[str], prompt: int) -> dict[str, Any]:
    """What a classifier says of each text; `names` are those of its labels."""
    row = lambda i, p: {"index": i, "label": names[int(p.argmax())], "probs": p.tolist(), "num_classes": len(p)}
    return _listed(m, [row(i, p) for i, p in enumerate(rows)], prompt)


def pooled(m: Meta, rows: Sequence[np.ndarray], base64_: bool, prompt: int) -> dict[str, Any]:
    """What a model says of each text: a vector, or one for each token."""
    return _listed(
        m, [{"index": i, "object": "pooling", "data": _numbers(x, base64_)} for i, x in enumerate(rows)], prompt
    )


def scores(m: Meta, values: Sequence[float], prompt: int) -> dict[str, Any]:
    """Scores of pairs of texts."""
    return _listed(m, [{"index": i, "object": "score", "score": float(s)} for i, s in enumerate(values)], prompt)


def _listed(m: Meta, data: Sequence[Mapping[str, Any]], prompt: int) -> dict[str, Any]:
    used = {"prompt_tokens": prompt, "total_tokens": prompt}
    return {"id": m.id, "object": "list", "created": m.created, "model": m.model, "data": data, "usage": used}


def ranking(m: Meta, values: Sequence[float], documents: Sequence[str] | None, top: int, prompt: int) -> dict[str, Any]:
    """Documents by score, the best first and at most `top`; their text unless `documents` is None."""
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))[:top]
    row = lambda i: {"index": i, "relevance_score": float(values[i])}
    results = [row(i) | ({} if documents is None else {"document": {"text": documents[i]}}) for i in order]
    return {"id": m.id, "model": m.model, "results": results, "usage": {"total_tokens": prompt}}


def tokenizer_info(tok: text.Tokenizer) -> dict[str, Any]:
    """What clients that tokenize by themselves must know."""
    ids = {f"{name}_token_id": i for name, i in tok.ids.items()}
    facts = {"vocab_size": tok.backend.get_vocab_size(), "chat_template": tok.templates.get("default")}
    kind = tok.config.get("tokenizer_class", "PreTrainedTokenizerFast")
    return {"tokenizer_class": kind, **tok.special, **ids, **facts}
