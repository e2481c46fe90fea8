"""The Responses API without a memory: requests become chats, and outputs become items and events."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fdel.serve.server.openai import body, request
from fdel.serve.server.openai.checks import APIError
from fdel.serve.server.openai.tables import Limits, requests
from fdel.serve.server.tools import Delta

ECHOED = ("instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "temperature", "text", "tool_choice",
          "tools", "top_logprobs", "top_p", "reasoning", "user", "truncation")  # fmt: skip
DEFAULTS: Mapping[str, Any] = {
    "instructions": None, "max_output_tokens": None, "metadata": {}, "parallel_tool_calls": True, "temperature": 1.0,
    "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [], "top_p": 1.0,
    "reasoning": {"effort": None, "summary": None}, "truncation": "disabled",
}  # fmt: skip
# kind of item -> (how its id begins, what its text is in events)
_KINDS = {"message": ("msg", "output_text"), "reasoning": ("rs", "reasoning_text"),
          "function_call": ("fc", "function_call_arguments")}  # fmt: skip


def parse(given: Mapping[str, Any], limits: Limits) -> request.Chat:
    """Make a chat of a request for a response; `echo` is what the answer repeats. APIError with the wrong parameter."""
    r = requests(limits)["response"](given)
    messages = [{"role": "system", "content": r["instructions"]}] if "instructions" in r else []
    messages += [{"role": "user", "content": r["input"]}] if isinstance(r["input"], str) else _messages(r["input"])
    shape = r.get("text", {}).get("format", {"type": "text"})
    shape = {"type": "json_schema", "json_schema": shape} if shape["type"] == "json_schema" else shape
    top, effort = r.get("top_logprobs", 0), r.get("reasoning", {}).get("effort")
    said = {k: v for k, v in r.items() if k not in ("tools", "tool_choice", "stream_options")}
    said |= {"tools": [_wrapped(t) for t in r.get("tools", ())], "response_format": shape, "top_logprobs": top}
    said |= {"logprobs": bool(r.get("include")) or top > 0, "max_tokens": r.get("max_output_tokens", request.NO_END)}
    said |= {"tool_choice": _choice(r["tool_choice"])} if "tool_choice" in r else {}
    said |= {"reasoning_effort": effort} if effort else {}
    chat = request.chat_of(said, messages, "text.format", limits.media)
    return replace(chat, echo={**DEFAULTS} | {k: given[k] for k in ECHOED if given.get(k) is not None})


def _wrapped(t: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {k: v for k, v in t.items() if k != "type"}}


def _choice(chosen: Any) -> Any:
    """Write a tool_choice as chat completions do."""
    if isinstance(chosen, str):
        return chosen
    if "name" in chosen:
        return _wrapped(chosen)
    allowed = {"mode": chosen["mode"], "tools": [_wrapped(t) for t in chosen["tools"]]}
    return {"type": "allowed_tools", "allowed_tools": allowed}


def _messages(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Join items to messages: reasoning, text and calls in a row are one message of the assistant."""
    out: list[dict[str, Any]] = []
    open_ = False  # whether the last message is the assistant's and may go on

    def assistant() -> dict[str, Any]:
        if not open_:
            out.append({"role": "assistant", "content": ""})
        return out[-1]

    for i, item in enumerate(items):
        kind = item.get("type", "message")
        if kind == "message" and item["role"] == "assistant" and not (open_ and out[-1]["content"]):
            assistant()["content"] = item["content"]
        elif kind == "message":
            out.append({"role": item["role"].replace("developer", "system"), "content": item["content"]})
        elif kind == "reasoning":
            thought = "\n".join(t["text"] for t in item.get("content", ()) or item.get("summary", ()))
            if thought:
                assistant()["reasoning_content"] = thought
        elif kind == "function_call":
            calls = assistant().setdefault("tool_calls", [])
            calls.append(request.called(item["call_id"], item, f"input[{i}]"))
        else:
            out.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
        open_ = out[-1:] != [] and out[-1]["role"] == "assistant"
    return out


@dataclass
class Response:
    """A response under way: `start`, `push` what the output adds, `finish`; all return events for the stream.

    The body without a stream is that of the last event.
    """

    meta: body.Meta
    echo: Mapping[str, Any]
    items: list[dict[str, Any]] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)  # text of the last item
    logprobs: list[dict[str, Any]] = field(default_factory=list)  # of the last item
    sequence: int = 0

    def start(self) -> list[dict[str, Any]]:
        """Begin the stream."""
        response = self.body("in_progress")
        return [self._event(f"response.{step}", response=response) for step in ("created", "in_progress")]

    def push(self, deltas: Sequence[Delta], logprobs: Sequence[Mapping[str, Any]] = ()) -> list[dict[str, Any]]:
        """Tell what an output adds; the log-probabilities go with its text."""
        events = []
        for delta in deltas:
            kind = {"content": "message", "reasoning": "reasoning"}.get(delta.kind, "function_call")
            if delta.kind == "call" or not self.items or self.items[-1]["type"] != kind:
                events += self._close("completed") + self._open(kind, delta)
            if delta.kind != "call":
                self.parts.append(delta.text)
                shown = {"logprobs": list(logprobs)} if kind == "message" else {}
                self.logprobs += map(dict, shown.get("logprobs", ()))
                name = f"response.{_KINDS[kind][1]}.delta"
                events.append(self._event(name, **self._where(), delta=delta.text, **shown))
                logprobs = ()
        return events

    def finish(self, reason: str, used: body.Usage) -> list[dict[str, Any]]:
        """End the stream: "stop", or "length" if the output was cut off."""
        status = "incomplete" if reason == "length" else "completed"
        events = self._close(status)
        return [*events, self._event(f"response.{status}", response=self.body(status, used))]

    def fail(self, e: APIError) -> list[dict[str, Any]]:
        """End a stream that failed."""
        return [self._event("error", code=e.code, message=e.message, param=e.param)]

    def body(self, status: str, used: body.Usage | None = None) -> dict[str, Any]:
        """The response as it stands."""
        out: dict[str, Any] = {
            "id": self.meta.id, "object": "response", "created_at": self.meta.created, "status": status, "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.meta.model, "output": list(self.items), "background": False, "store": False,
            "previous_response_id": None, "usage": None,
        }  # fmt: skip
        if used is not None:
            out["usage"] = {
                "input_tokens": used.prompt, "output_tokens": used.completion,
                "total_tokens": used.prompt + used.completion,
                "input_tokens_details": {"cached_tokens": used.cached, "cache_write_tokens": 0},
                "output_tokens_details": {"reasoning_tokens": used.reasoning},
            }  # fmt: skip
        return {**out, **self.echo}

    def _event(self, type: str, **fields: Any) -> dict[str, Any]:
        event = {"type": type, "sequence_number": self.sequence, **fields}
        self.sequence += 1
        return event

    def _where(self) -> dict[str, Any]:
        where = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return where if self.items[-1]["type"] == "function_call" else where | {"content_index": 0}

    def _open(self, kind: str, delta: Delta) -> list[dict[str, Any]]:
        self.parts, self.logprobs = [], []
        id = f"{_KINDS[kind][0]}_{secrets.token_hex(16)}"
        item: dict[str, Any] = {"id": id, "type": kind, "status": "in_progress"}
        if kind == "function_call":
            item |= {"call_id": delta.id, "name": delta.text, "arguments": ""}
        else:
            item |= {"role": "assistant", "content": []} if kind == "message" else {"summary": [], "content": []}
        self.items.append(item)
        events = [self._event("response.output_item.added", output_index=len(self.items) - 1, item=item)]
        if kind != "function_call":
            events.append(self._event("response.content_part.added", **self._where(), part=self._part(kind)))
        return events

    def _part(self, kind: str) -> dict[str, Any]:
        part = {"type": _KINDS[kind][1], "text": "".join(self.parts)}
        return part | ({"annotations": [], "logprobs": self.logprobs} if kind == "message" else {})

    def _close(self, status: str) -> list[dict[str, Any]]:
        """End the last item."""
        if not self.items or self.items[-1]["status"] != "in_progress":
            return []
        item, where = self.items[-1], self._where()
        done = f"response.{_KINDS[item['type']][1]}.done"
        if item["type"] == "function_call":
            whole: dict[str, Any] = {"arguments": "".join(self.parts)}
            events = [self._event(done, **where, name=item["name"], **whole)]
        else:
            part = self._part(item["type"])
            whole = {"content": [part]}
            events = [self._event(done, **where, **{k: part[k] for k in ("text", "logprobs") if k in part}),
                      self._event("response.content_part.done", **where, part=part)]  # fmt: skip
        closed = self.items[-1] = {**item, "status": status, **whole}  # a new one: events told the old
        return [*events, self._event("response.output_item.done", output_index=len(self.items) - 1, item=closed)]
