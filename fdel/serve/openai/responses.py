"""The Responses API without a memory: requests become chats, and outputs become items and events."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fdel.serve.openai import body, request
from fdel.serve.openai.checks import APIError
from fdel.serve.openai.tables import Limits, requests
from fdel.serve.tools import Delta, Message

ECHOED = ("instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "temperature", "text", "tool_choice",
          "tools", "top_logprobs", "top_p", "reasoning", "user", "truncation")  # fmt: skip
DEFAULTS: Mapping[str, Any] = {
    "instructions": None, "max_output_tokens": None, "metadata": {}, "parallel_tool_calls": True, "temperature": 1.0,
    "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [], "top_p": 1.0,
    "reasoning": {"effort": None, "summary": None}, "truncation": "disabled",
}  # fmt: skip


@dataclass(frozen=True)
class Request:
    """A request for a response: the chat that it is, and what its answer repeats."""

    chat: request.Chat
    echo: Mapping[str, Any]


def parse(given: Mapping[str, Any], limits: Limits) -> Request:
    """Check a request for a response. APIError with the parameter that is wrong."""
    r = requests(limits)["response"](given)
    messages = [{"role": "system", "content": r["instructions"]}] if "instructions" in r else []
    messages += [{"role": "user", "content": r["input"]}] if isinstance(r["input"], str) else _messages(r["input"])
    tools = tuple(
        request.Tool(t["name"], t.get("parameters", {}), _tool(t), t.get("strict", False)) for t in r.get("tools", ())
    )
    names, mode, shown = request.choose(tools, _choice(r.get("tool_choice", "auto" if tools else "none")))
    shape = r.get("text", {}).get("format", {"type": "text"})
    shape = {"type": "json_schema", "json_schema": shape} if shape["type"] == "json_schema" else shape
    spec = request.structure({"response_format": shape})
    if spec is not None and mode != "none":
        raise APIError("text.format cannot be combined with tools here; set tool_choice to none", param="text.format")
    effort = r.get("reasoning", {}).get("effort")
    variables = dict(r.get("chat_template_kwargs", {})) | ({"reasoning_effort": effort} if effort else {})
    top = r.get("top_logprobs", 0)
    most = r.get("max_output_tokens", request.NO_END)
    chat = request.Chat(
        r["model"], messages, request.sampling(r, limits, max_tokens=most, logprobs=top), r.get("stream", False),
        logprobs=bool(r.get("include")) or top > 0, tools=shown, callable=names, tool_choice=mode,
        parallel=r.get("parallel_tool_calls", True), grammar=spec, template=variables,
    )  # fmt: skip
    return Request(chat, {**DEFAULTS} | {k: given[k] for k in ECHOED if given.get(k) is not None})


def _tool(t: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {k: v for k, v in t.items() if k != "type"}}


def _choice(chosen: Any) -> Any:
    """Write a tool_choice as chat completions do."""
    wrap = lambda t: {"type": "function", "function": {"name": t["name"]}}
    if isinstance(chosen, str):
        return chosen
    if "name" in chosen:
        return wrap(chosen)
    return {
        "type": "allowed_tools",
        "allowed_tools": {"mode": chosen["mode"], "tools": [wrap(t) for t in chosen["tools"]]},
    }


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
            call = {"name": item["name"], "arguments": request.decode(item["arguments"], f"input[{i}]")}
            calls = assistant().setdefault("tool_calls", [])
            calls.append({"id": item["call_id"], "type": "function", "function": call})
        else:
            out.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
        open_ = out[-1:] != [] and out[-1]["role"] == "assistant"
    return out


# ---- answers -------------------------------------------------------------------------------------------------------


@dataclass
class Answer:
    """A response under way: `start`, `push` what the output adds, `finish`; all return events for the stream.

    The body without a stream is that of the last event: `body(...)`.
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
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def push(self, deltas: Sequence[Delta], logprobs: Sequence[Mapping[str, Any]] = ()) -> list[dict[str, Any]]:
        """Tell what an output adds; the log-probabilities go with its text."""
        events = []
        for delta in deltas:
            kind = {"content": "message", "reasoning": "reasoning"}.get(delta.kind, "function_call")
            if delta.kind == "call" or not self.items or self.items[-1]["type"] != kind:
                events += self._close("completed") + self._open(kind, delta)
            if delta.kind != "call":
                self.parts.append(delta.text)
                events.append(self._delta(kind, delta.text, logprobs))
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
        out = {
            "id": self.meta.id, "object": "response", "created_at": self.meta.created, "status": status, "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.meta.model, "output": list(self.items), "background": False, "store": False,
            "previous_response_id": None, "usage": None if used is None else _usage(used),
        }  # fmt: skip
        return {**out, **self.echo}

    def _event(self, type: str, **fields: Any) -> dict[str, Any]:
        event = {"type": type, "sequence_number": self.sequence, **fields}
        self.sequence += 1
        return event

    def _where(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _open(self, kind: str, delta: Delta) -> list[dict[str, Any]]:
        self.parts, self.logprobs = [], []
        id = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind] + f"_{secrets.token_hex(16)}"
        item: dict[str, Any] = {"id": id, "type": kind, "status": "in_progress"}
        if kind == "function_call":
            item |= {"call_id": delta.id, "name": delta.text, "arguments": ""}
        else:
            item |= {"role": "assistant", "content": []} if kind == "message" else {"summary": [], "content": []}
        self.items.append(item)
        events = [self._event("response.output_item.added", output_index=len(self.items) - 1, item=item)]
        if kind != "function_call":
            part = self._part(kind)
            events.append(self._event("response.content_part.added", **self._where(), content_index=0, part=part))
        return events

    def _delta(self, kind: str, said: str, logprobs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        if kind == "function_call":
            return self._event("response.function_call_arguments.delta", **self._where(), delta=said)
        if kind == "reasoning":
            return self._event("response.reasoning_text.delta", **self._where(), content_index=0, delta=said)
        self.logprobs += [dict(row) for row in logprobs]
        where = {**self._where(), "content_index": 0, "delta": said, "logprobs": list(logprobs)}
        return self._event("response.output_text.delta", **where)

    def _part(self, kind: str) -> dict[str, Any]:
        said = "".join(self.parts)
        if kind == "reasoning":
            return {"type": "reasoning_text", "text": said}
        return {"type": "output_text", "text": said, "annotations": [], "logprobs": self.logprobs}

    def _close(self, status: str) -> list[dict[str, Any]]:
        """End the last item."""
        if not self.items or self.items[-1]["status"] != "in_progress":
            return []
        item, said = self.items[-1], "".join(self.parts)
        kind, where = item["type"], self._where()
        if kind == "function_call":
            done = {**where, "name": item["name"], "arguments": said}
            events = [self._event("response.function_call_arguments.done", **done)]
            closed = {**item, "status": status, "arguments": said}
        else:
            part = self._part(kind)
            more = {"logprobs": self.logprobs} if kind == "message" else {}
            name = "output_text" if kind == "message" else "reasoning_text"
            events = [self._event(f"response.{name}.done", **where, content_index=0, text=said, **more),
                      self._event("response.content_part.done", **where, content_index=0, part=part)]  # fmt: skip
            closed = {**item, "status": status, "content": [part]}
        self.items[-1] = closed  # a new one: events told the old
        return [*events, self._event("response.output_item.done", output_index=len(self.items) - 1, item=closed)]


def answer(meta: body.Meta, echo: Mapping[str, Any], said: Message, reason: str, used: body.Usage) -> dict[str, Any]:
    """The body of a whole output."""
    out = Answer(meta, echo)
    out.push([Delta("reasoning", said.reasoning)] if said.reasoning else [])
    out.push([Delta("content", said.content)] if said.content else [])
    for i, call in enumerate(said.calls):
        out.push([Delta("call", call.name, i, call.id), Delta("arguments", call.arguments, i)])
    return out.finish(reason, used)[-1]["response"]


def _usage(u: body.Usage) -> dict[str, Any]:
    return {
        "input_tokens": u.prompt, "output_tokens": u.completion, "total_tokens": u.prompt + u.completion,
        "input_tokens_details": {"cached_tokens": u.cached, "cache_write_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": u.reasoning},
    }  # fmt: skip
