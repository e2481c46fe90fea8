"""Requests of the protocol as records: each parameter is implemented or refused, none is ignored."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fdel.serve.engine.request import SamplingParams
from fdel.serve.server.grammar import Spec
from fdel.serve.server.openai.checks import APIError, load, refuse
from fdel.serve.server.openai.media import Media, Shown, taken
from fdel.serve.server.openai.tables import Limits, requests

NO_END = 2**31 - 1  # max_tokens of who gave none: to the end of the context


@dataclass(frozen=True)
class Tool:
    """A function that the model may call; `spec` is what the chat template gets."""

    name: str
    parameters: Mapping[str, Any]
    spec: Mapping[str, Any]
    strict: bool = False


@dataclass(frozen=True)
class Chat:
    """A request for chat completions."""

    model: str
    messages: Sequence[Mapping[str, Any]]  # as chat templates expect them
    sampling: SamplingParams
    stream: bool = False
    usage: bool = False  # in the stream
    logprobs: bool = False
    tools: tuple[Tool, ...] = ()  # all
    callable: tuple[str, ...] = ()  # the names of those that may be called
    tool_choice: str = "none"  # "auto", "required", "named"
    parallel: bool = True  # more than one call
    grammar: Spec | None = None
    template: Mapping[str, Any] = field(default_factory=dict)  # variables for the chat template
    salt: str = ""  # of the prefix cache
    echo: Mapping[str, Any] = field(default_factory=dict)  # what a response repeats of its request
    shown: Sequence[Shown] = ()  # images, videos and sounds of its messages, in order


@dataclass(frozen=True)
class Completion:
    """A request for completions."""

    model: str
    prompts: Sequence[str | Sequence[int]]
    sampling: SamplingParams
    stream: bool = False
    usage: bool = False
    logprobs: int | None = None
    echo: bool = False
    scored: bool = False  # max_tokens 0: only the prompt is wanted
    special: bool = True  # whether the tokenizer adds its special tokens
    grammar: Spec | None = None
    salt: str = ""


def parse_chat(body: Mapping[str, Any], limits: Limits) -> Chat:
    """Check a request for chat completions. APIError with the parameter that is wrong."""
    r = requests(limits)["chat"](body)
    if r.get("top_logprobs") is not None and not r.get("logprobs"):
        refuse("top_logprobs", "needs logprobs: true")
    return chat_of(r, [message(m, i) for i, m in enumerate(r["messages"])], "response_format", limits.media)


def chat_of(r: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], shape: str, most: Media) -> Chat:
    """Make a chat of checked parameters, with `most` images, videos and sounds; `shape`: the client's response_format."""
    heard = r.get("mm_processor_kwargs", {}).get("use_audio_in_video", False)
    messages, shown = taken(messages, most, heard)
    tools = tuple(map(_tool, r.get("tools", ())))
    names, mode, visible = choose(tools, r.get("tool_choice"))
    spec = structure(r)
    if spec is not None and mode != "none":
        refuse(shape, "cannot be combined with tools here; set tool_choice to none")
    length = r.get("max_completion_tokens", r.get("max_tokens", NO_END))
    return Chat(
        r["model"], messages, sampling(r, max_tokens=length, logprobs=r.get("top_logprobs", 0)), *streaming(r),
        logprobs=r.get("logprobs", False), tools=visible, callable=names, tool_choice=mode,
        parallel=r.get("parallel_tool_calls", True), grammar=spec, salt=r.get("cache_salt", ""),
        template=r.get("chat_template_kwargs", {}) | {k: r[k] for k in ("reasoning_effort",) if k in r}, shown=shown,
    )  # fmt: skip


def parse_completion(body: Mapping[str, Any], limits: Limits) -> Completion:
    """Check a request for completions. APIError with the parameter that is wrong."""
    r = requests(limits)["completion"](body)
    n, best_of = r.get("n", 1), r.get("best_of")
    if best_of is not None and (best_of < n or (r.get("stream") and best_of > n)):
        refuse("best_of", f"found {best_of}, expected at least n ({n}), and not more in a stream")
    if len(r["prompt"]) * max(n, best_of or 1) > limits.outputs:
        each = f"{len(r['prompt'])} prompts with {max(n, best_of or 1)} outputs each"
        refuse("prompt", f"{each}; the most is {limits.outputs} outputs")
    tokens, logprobs, echo = r.get("max_tokens", 16), r.get("logprobs"), r.get("echo", False)
    if tokens == 0 and not echo:
        refuse("max_tokens", "0 is for echo: true only")
    scored = logprobs if echo else None
    asked = sampling(r, max_tokens=max(tokens, 1), logprobs=logprobs or 0, best_of=best_of, prompt_logprobs=scored)
    return Completion(
        r["model"], r["prompt"], asked, *streaming(r), logprobs, echo, tokens == 0, r.get("add_special_tokens", True),
        structure(r), r.get("cache_salt", ""),
    )  # fmt: skip


def parse_tokenize(body: Mapping[str, Any], limits: Limits) -> Chat | tuple[str, bool]:
    """Check a request for tokens: a chat to be rendered, or (text, whether special tokens are added)."""
    if "messages" in body:
        return parse_chat(body, limits)
    r = requests(limits)["tokenize"](body)
    return r["prompt"], r.get("add_special_tokens", True)


def parse_detokenize(body: Mapping[str, Any], limits: Limits) -> list[int]:
    """Check a request for the text of tokens."""
    return requests(limits)["detokenize"](body)["tokens"]


def cap_max_tokens(asked: SamplingParams, prompt: int, context: int) -> SamplingParams:
    """Cut max_tokens to what the context leaves after the prompt. APIError if that is nothing."""
    room = context - prompt
    if room < max(1, asked.min_tokens):
        raise APIError(
            f"this model's maximum context length is {context} tokens; the prompt has {prompt}, so no room for an answer"
            f"{f' of {asked.min_tokens} tokens' if asked.min_tokens else ''} is left; shorten the prompt",
            param="messages", code="context_length_exceeded",
        )  # fmt: skip
    return dataclasses.replace(asked, max_tokens=min(asked.max_tokens, room))


def sampling(r: Mapping[str, Any], **given: Any) -> SamplingParams:
    """Collect what the engine needs; the defaults are OpenAI's."""
    same = ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "min_tokens", "n",
            "stop", "stop_token_ids", "ignore_eos")  # fmt: skip
    asked = {k: r[k] for k in same if k in r} | {k: v for k, v in given.items() if v is not None}
    asked["max_tokens"] = min(asked["max_tokens"], NO_END)
    if asked.get("min_tokens", 0) > asked["max_tokens"]:
        refuse("min_tokens", f"found {asked['min_tokens']}, which is more than max_tokens ({asked['max_tokens']})")
    return SamplingParams(
        temperature=r.get("temperature", 1.0), top_p=r.get("top_p", 1.0), top_k=max(r.get("top_k", 0), 0),
        allowed_tokens=r.get("allowed_token_ids"), seed=r["seed"] % 2**64 if "seed" in r else None, **asked,
    )  # fmt: skip


def streaming(r: Mapping[str, Any]) -> tuple[bool, bool]:
    """(whether to stream, whether the stream tells the usage)."""
    if "stream_options" in r and not r.get("stream"):
        refuse("stream_options", "needs stream: true")
    return r.get("stream", False), r.get("stream_options", {}).get("include_usage", False)


def structure(r: Mapping[str, Any]) -> Spec | None:
    """Find the grammar that a request asks for, under any of its names."""
    asked = [(k, k.removeprefix("guided_"), r[k]) for k in r if k.startswith("guided_")]
    asked += [("structured_outputs", k, v) for k, v in r.get("structured_outputs", {}).items()]
    shape = r.get("response_format", {"type": "text"})
    if shape["type"] == "json_schema":
        asked.append(("response_format.json_schema.schema", "json", shape["json_schema"]["schema"]))
    elif shape["type"] == "json_object":
        asked.append(("response_format", "json_object", True))
    if len(asked) > 1:
        refuse(asked[-1][0], f"the output has a structure by {asked[0][0]} already; expected one")
    if not asked:
        return None
    path, kind, value = asked[0]
    if kind == "json":
        value = decode(value, path) if isinstance(value, str) else value
        if not isinstance(value, dict | bool):
            refuse(path, "expected a JSON schema")
    said = "" if kind == "json_object" else value if isinstance(value, str) else json.dumps(value)
    try:
        return Spec({"json": "json_schema", "grammar": "lark"}.get(kind, kind), said)
    except ValueError as e:
        raise APIError(f"{path}: {e}", param=path) from e


def _tool(spec: Mapping[str, Any]) -> Tool:
    f = spec["function"]
    return Tool(f["name"], f.get("parameters", {"type": "object", "properties": {}}), spec, f.get("strict", False))


def choose(tools: tuple[Tool, ...], chosen: Any) -> tuple[tuple[str, ...], str, tuple[Tool, ...]]:
    """(names that may be called, the mode, the tools for the template) from tools and tool_choice."""
    names = tuple(t.name for t in tools)
    if len(set(names)) < len(names):
        refuse("tools", f"the name {next(n for n in names if names.count(n) > 1)!r} comes twice")
    if chosen is None:
        chosen = "auto" if tools else "none"
    if isinstance(chosen, str):
        if chosen != "none" and not tools:
            refuse("tool_choice", f"found {chosen}, but there are no tools")
        return (() if chosen == "none" else names), chosen, (() if chosen == "none" else tools)
    if "function" in chosen:
        wanted, mode = [chosen["function"]["name"]], "named"
    else:
        wanted = [t["function"]["name"] for t in chosen["allowed_tools"]["tools"]]
        mode = chosen["allowed_tools"]["mode"]
    for name in wanted:
        if name not in names:
            refuse("tool_choice", f"found the function {name!r}, expected one of tools")
    return tuple(dict.fromkeys(wanted)), mode, tools


def message(m: Mapping[str, Any], i: int) -> dict[str, Any]:
    """Write a message as chat templates expect it: arguments as objects, "system" for "developer"."""
    m = dict(m, role={"developer": "system"}.get(m["role"], m["role"]))
    if m["role"] == "assistant":
        if "content" not in m and "tool_calls" not in m and "refusal" not in m:
            refuse(f"messages[{i}].content", "missing", "missing_required_parameter")
        thought = m.pop("reasoning", None) or m.pop("reasoning_content", None)
        refusal = m.pop("refusal", None)
        m.pop("provider_specific_fields", None)  # litellm's notes on an answer that it got, not part of the talk
        m = {**m, "content": m.get("content") or refusal or ""} | ({"reasoning_content": thought} if thought else {})
    if "tool_calls" in m:
        calls = enumerate(m["tool_calls"])
        m["tool_calls"] = [called(c["id"], c["function"], f"messages[{i}].tool_calls[{j}]") for j, c in calls]
    return m


def called(id: str, function: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Write a call as chat templates expect it."""
    said = {"name": function["name"], "arguments": decode(function["arguments"], path)}
    return {"id": id, "type": "function", "function": said}


def decode(said: str, path: str) -> dict[str, Any]:
    """Parse the arguments of a call; an APIError if they are no JSON object."""
    try:
        return load(said.encode() or b"{}")
    except APIError as e:
        raise APIError(f"{path}.arguments: {e.message}", param=path) from e
