"""What each parameter of the protocol may be: one table per kind of request.

The extensions are vLLM's: top_k, min_p, repetition_penalty, min_tokens, stop_token_ids, ignore_eos, allowed_token_ids,
structured_outputs and guided_*, chat_template_kwargs, mm_processor_kwargs, cache_salt.
"""

import functools  # noqa: I001
from dataclasses import dataclass
from typing import Any

from fdel.serve.engine.request import BIASES, LIMITS, SAMPLES, STOPS, TOP
from fdel.serve.server import grammar
from fdel.serve.server.openai import media
from fdel.serve.server.openai.media import Media
from fdel.serve.server.openai.checks import (
    Check, anything, array, boolean, choice, either, integer, mapping, number, only, record, refuse, tagged, text,
)  # fmt: skip
from fdel.text.chat import RESERVED

NAME = r"[a-zA-Z0-9_.-]{1,64}"


@dataclass(frozen=True)
class Limits:
    """What one request may ask for at most; `vocab` is the number of logits, `context` the model's."""

    vocab: int
    context: int
    text: int = 2**22  # characters of one string
    messages: int = 4096
    outputs: int = 256  # prompts times n
    inputs: int = 2048  # of embeddings and scores
    stops: int = 16
    stop: int = 1024  # characters of a stop string
    media: Media = Media()  # of a chat


def content(limits: Limits, *kinds: str, without: str | None = None) -> Check:
    """Text, or parts of text, which become lines of one; and parts that show or play something, all but `without`."""
    part = record({"type": anything, "text": text(limits.text)}, ["text"])
    seen = {} if without is None else {k: v for k, v in media.parts(limits.media).items() if k != without}
    parts = array(tagged("type", dict.fromkeys(kinds, part) | seen), 1, 1024)
    lines = lambda value, path: media.joined(parts(value, path))
    return either(text(limits.text), Check(lines, parts.schema))


def _sampled(name: str, low: float | None = None, high: float | None = None) -> Check:
    """Take of a sampling parameter what the engine takes, or as much as the protocol has of it."""
    kind, least, most = LIMITS[name]
    least, most = least if low is None else low, most if high is None else high
    return number(kind(least), kind(most), kind)


def common(limits: Limits) -> dict[str, Check]:
    """Parameters of every generation."""
    token = integer(0, limits.vocab - 1)
    bias = lambda key, path: token(int(key) if key.isascii() and key.isdigit() and len(key) < 10 else key, path)
    shapes = {"json": anything, "regex": text(grammar.MAX_CHARS), "grammar": text(grammar.MAX_CHARS),
              "choice": array(text(4096, 1), 1, 10_000)}  # fmt: skip
    return {
        "model": text(256, 1),
        "stream": boolean,
        "stream_options": record({"include_usage": boolean, "include_obfuscation": only(False)}),
        "temperature": _sampled("temperature", high=2),
        "top_p": _sampled("top_p", low=1e-6),
        "top_k": _sampled("top_k", low=-1, high=2**31 - 1),
        **{name: _sampled(name) for name in ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")},
        "logit_bias": mapping(bias, number(-100, 100), BIASES),
        "seed": integer(-(2**63), 2**63 - 1),
        "n": _sampled("n", high=min(SAMPLES, limits.outputs)),
        "max_tokens": integer(1, 2**63 - 1),
        "min_tokens": _sampled("min_tokens", high=limits.context),
        "stop": either(text(limits.stop, 1), array(text(limits.stop, 1), 0, limits.stops)),
        "stop_token_ids": _tokens(limits, 0, STOPS // 2),
        "allowed_token_ids": _tokens(limits, 1, limits.vocab),
        "ignore_eos": boolean,
        "cache_salt": text(64, 1, "[A-Za-z0-9_-]+"),
        **{f"guided_{kind}": check for kind, check in shapes.items()},
        "structured_outputs": record({**shapes, "json_object": only(True)}),
        # Nothing to do for these:
        **dict.fromkeys(("user", "safety_identifier", "prompt_cache_key"), text(512)),
        "metadata": mapping(text(64), text(512), 16),
        "service_tier": choice("auto", "default"),
        "store": only(False),
    }  # fmt: skip


def _function(limits: Limits) -> dict[str, Check]:
    """The fields of a function."""
    parameters = Check(_parameters, {"type": "object"})
    return {"name": text(64, 1, NAME), "description": text(limits.text), "parameters": parameters, "strict": boolean}


def _parameters(value: Any, path: str) -> dict[str, Any]:
    schema = mapping(anything, anything, 1024)(value, path)
    if schema.get("type", "object") != "object":
        refuse(f"{path}.type", "expected object")
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not all(isinstance(p, dict | bool) for p in properties.values()):
        refuse(f"{path}.properties", "expected an object of JSON schemas")
    array(text(256), 0, 1024)(required, f"{path}.required")
    return schema


def chat_fields(limits: Limits) -> dict[str, Check]:
    """Parameters of chat completions."""
    named = record({"type": only("function"), "function": record({"name": text(64, 1)}, ["name"])}, ["function"])
    mode = {"mode": choice("auto", "required"), "tools": array(named, 1, 128)}
    chosen = tagged("type", {
        "function": named,
        "allowed_tools": record({"type": anything, "allowed_tools": record(mode, mode)}, ["allowed_tools"]),
    })  # fmt: skip
    tool = record({"type": only("function"), "function": record(_function(limits), ["name"])}, ["type", "function"])
    return common(limits) | {
        "messages": array(tagged("role", _messages(limits)), 1, limits.messages),
        "max_completion_tokens": integer(1, 2**63 - 1),
        "logprobs": boolean,
        "top_logprobs": integer(0, TOP),
        "tools": array(tool, 1, 128),
        "tool_choice": either(choice("none", "auto", "required"), chosen),
        "parallel_tool_calls": boolean,
        "response_format": tagged("type", {
            "text": record({"type": anything}),
            "json_object": record({"type": anything}),
            "json_schema": record({"type": anything, "json_schema": record(
                {"name": text(64, 1, NAME), "description": text(limits.text), "schema": anything, "strict": boolean},
                ["name", "schema"])}, ["json_schema"]),
        }),
        "reasoning_effort": choice("none", "minimal", "low", "medium", "high", "xhigh"),
        "chat_template_kwargs": mapping(_variable, anything, 32),
        "mm_processor_kwargs": record({"use_audio_in_video": boolean}),
        "verbosity": only("medium"),
        "modalities": only(["text"]),
        "chat_template": only(), "functions": only(), "function_call": only(), "audio": only(), "prediction": only(),
        "web_search_options": only(), "moderation": only(), "prompt_cache_options": only(),
        "prompt_cache_retention": only("in_memory"),
    }  # fmt: skip


def _messages(limits: Limits) -> dict[str, Check]:
    """Messages by role."""
    said, name = content(limits, "text"), text(256)
    call = record({"name": text(64, 1), "arguments": text(limits.text)}, ["name", "arguments"])
    calls = array(record({"id": text(256, 1), "type": only("function"), "function": call}, ["id", "function"]), 1, 128)
    plain = record({"role": anything, "content": said, "name": name}, ["content"])
    seen = content(limits, "text", without="input_image")
    return {
        "system": plain, "developer": plain, "user": record({"role": anything, "content": seen, "name": name}, ["content"]),
        "assistant": record({"role": anything, "content": said, "name": name, "tool_calls": calls, "audio": only(),
                             "refusal": text(limits.text), "reasoning_content": text(limits.text), "function_call": only(),
                             "reasoning": text(limits.text), "provider_specific_fields": anything}),
        "tool": record({"role": anything, "content": said, "name": name, "tool_call_id": text(256, 1)},
                       ["content", "tool_call_id"]),
    }  # fmt: skip


def _variable(name: str, path: str) -> str:
    if name in RESERVED or not name.isidentifier():
        refuse(f"{path}.{name:.64}", "this name cannot be set here")
    return name


def _tokens(limits: Limits, least: int, most: int) -> Check:
    """Token ids. A body may hold millions, so all are looked at together, and one by one only to name the wrong one."""
    slow = array(integer(0, limits.vocab - 1), least, most)

    def check(value: Any, path: str) -> list:
        fine = isinstance(value, list) and 0 < len(value) <= most and set(map(type, value)) == {int}
        return value if fine and 0 <= min(value) and max(value) < limits.vocab else slow(value, path)

    return Check(check, slow.schema)


def _prompts(limits: Limits, most: int) -> Check:
    """A text, token ids, or a list of either; none empty. What does not fit the context is refused or cut later."""
    said, ids = text(limits.text, 1), _tokens(limits, 1, max(limits.context, 2**16))
    several = array(either(said, ids), 1, most)

    def check(value: Any, path: str) -> list:
        if isinstance(value, str):
            return [said(value, path)]
        one = isinstance(value, list) and value and type(value[0]) is int
        return [ids(value, path)] if one else several(value, path)

    return Check(check, {"anyOf": [said.schema, ids.schema, several.schema]})


def completion_fields(limits: Limits) -> dict[str, Check]:
    """Parameters of completions."""
    return common(limits) | {
        "prompt": _prompts(limits, limits.outputs),
        "max_tokens": integer(0, 2**63 - 1),
        "logprobs": _sampled("logprobs"),
        "echo": boolean,
        "best_of": _sampled("best_of", high=min(SAMPLES, limits.outputs)),
        "suffix": only(""),
        "add_special_tokens": boolean,
    }


def response_fields(limits: Limits) -> dict[str, Check]:
    """Parameters of responses."""
    schema = {"type": anything, "name": text(64, 1, NAME), "description": text(limits.text), "schema": anything,
              "strict": boolean}  # fmt: skip
    plain = record({"type": anything})
    shape = {"text": plain, "json_object": plain, "json_schema": record(schema, ["name", "schema"])}
    tool = record({"type": only("function"), **_function(limits)}, ["type", "name"])
    named = record({"type": only("function"), "name": text(64, 1)}, ["name"])
    allowed = {"type": anything, "mode": choice("auto", "required"), "tools": array(named, 1, 128)}
    chosen = tagged("type", {"function": named, "allowed_tools": record(allowed, ["mode", "tools"])})
    same = ("model", "stream", "temperature", "top_p", "user", "metadata", "safety_identifier", "prompt_cache_key",
            "service_tier", "store")  # fmt: skip
    chat = chat_fields(limits)
    return {name: chat[name] for name in same} | {
        "input": either(text(limits.text, 1), array(tagged("type", _items(limits), "message"), 1, limits.messages)),
        "instructions": text(limits.text),
        "max_output_tokens": integer(1, 2**63 - 1),
        "tools": array(tool, 0, 128),
        "tool_choice": either(choice("none", "auto", "required"), chosen),
        "parallel_tool_calls": boolean,
        "text": record({"format": tagged("type", shape), "verbosity": only("medium")}),
        "reasoning": record({"effort": chat["reasoning_effort"], "summary": only(), "generate_summary": only()}),
        "top_logprobs": integer(0, TOP),
        "include": array(choice("message.output_text.logprobs"), 0, 8),
        "stream_options": record({"include_obfuscation": only(False)}),
        "truncation": only("disabled"),
        "background": only(False),
        "chat_template_kwargs": chat["chat_template_kwargs"],
        "previous_response_id": only(), "conversation": only(), "prompt": only(), "max_tool_calls": only(),
        "background_options": only(), "access_programs": only(), "image": only(),
        "context_management": only(), "moderation": only(), "prompt_cache_options": only(),
        "prompt_cache_retention": only("in_memory"),
    }  # fmt: skip


def _items(limits: Limits) -> dict[str, Check]:
    said, id = content(limits, "input_text", "output_text", without="image_url"), text(256)
    output = content(limits, "input_text")
    thoughts = array(record({"type": anything, "text": text(limits.text)}, ["text"]), 0, 64)
    return {
        "message": record({"type": anything, "role": choice("user", "assistant", "system", "developer"), "content": said,
                           "id": id, "status": id, "phase": id}, ["role", "content"]),
        "function_call": record({"type": anything, "id": id, "call_id": text(256, 1), "name": text(64, 1),
                                 "arguments": text(limits.text), "status": id}, ["call_id", "name", "arguments"]),
        "function_call_output": record({"type": anything, "id": id, "call_id": text(256, 1), "output": output,
                                        "status": id}, ["call_id", "output"]),
        "reasoning": record({"type": anything, "id": id, "summary": thoughts, "content": thoughts, "status": id,
                             "encrypted_content": only()}),
    }  # fmt: skip


@functools.lru_cache
def requests(limits: Limits) -> dict[str, Check]:
    """The body of each kind of request."""
    model, user, said = text(256, 1), text(512), text(limits.text, 1)
    texts = array(said, 1, limits.inputs)
    raw = {"model": model, "user": user, "use_activation": boolean}
    pooled = {"input": _prompts(limits, limits.inputs), "messages": chat_fields(limits)["messages"]} | raw
    written = {"encoding_format": choice("float", "base64")}
    labels = {"candidate_labels": array(text(limits.text, 1), 1, limits.inputs), "hypothesis_template": text(4096, 1)}
    score = {"text_1": either(said, texts), "text_2": either(said, texts)} | raw
    rerank = {"query": said, "documents": texts, "top_n": integer(1, 2**31 - 1), "return_documents": boolean} | raw
    ids = _tokens(limits, 0, max(limits.context, 2**16))
    heard = {
        "file": Check(lambda value, path: value, {"type": "string", "format": "binary"}), "model": model,
        "prompt": text(2**13), "response_format": choice("json", "text", "srt", "verbose_json", "vtt"),
        "temperature": number(0, 1),
    }  # fmt: skip
    transcription = heard | {
        "language": text(8, 2, "[a-z]+"), "timestamp_granularities": array(choice("word", "segment"), 1, 2),
        "stream": boolean, "chunking_strategy": only("auto"), "include": only([]), "seed": integer(0, 2**31 - 1),
    }  # fmt: skip
    return {
        "chat": record(chat_fields(limits), ["model", "messages"]),
        "completion": record(completion_fields(limits), ["model", "prompt"]),
        "response": record(response_fields(limits), ["model", "input"]),
        "embeddings": record(pooled | written | {"dimensions": integer(1, 2**16)}, ["model"]),
        "score": record(score, ["model", "text_1", "text_2"]),
        "rerank": record(rerank, ["model", "query", "documents"]),
        "classify": record(pooled | labels, ["model"]),
        "pooling": record(pooled | written, ["model"]),
        "tokenize": record({"model": model, "prompt": text(limits.text), "add_special_tokens": boolean}, ["prompt"]),
        "transcription": record(transcription, ["file", "model"]),
        "translation": record(heard, ["file", "model"]),
        "detokenize": record({"model": model, "tokens": ids}, ["tokens"]),
    }  # fmt: skip
