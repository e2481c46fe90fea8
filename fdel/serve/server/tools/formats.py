"""How families of models write calls of tools, and readers of each; what is no call is content.

Sources: the families' chat templates and model cards. A broken call is content if its name was not told yet; later, the
arguments end where they broke and are no valid JSON, for a repaired call would be another one than the model meant.
"""

import dataclasses
import json
import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fdel.serve.server.scan import SPACE, Broken, Reader, Sink, Source
from fdel.serve.server.tools import values


def _mistral_id() -> str:
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass(frozen=True)
class Format:
    """A family's calls: text, `marker`, one or more calls, `end`; `sections` stand around several of these.

    `writes` are the texts around name and arguments of a call in the words of its template, for grammars:
    begin of all, begin of a call, between name and arguments, end of a call, between calls, end of all; {index} is a
    number.
    """

    marker: str
    body: Callable[[Source, Sink], Reader[None]]
    end: str
    writes: tuple[str, str, str, str, str, str]
    arguments: str = "json"  # or "tagged", "python": how a grammar writes them
    opener: str = ""  # before the first of several calls behind one marker
    separator: str = ""  # between them
    leading: str = ""  # a text that begins so is a call without a marker
    sections: tuple[str, ...] = ()
    new_id: Callable[[], str] | None = None
    tags: "Tags | None" = None
    channels: bool = False  # each part stands in a channel, reasoning too: `body` reads all of a text

    @property
    def texts(self) -> tuple[str, ...]:
        """All fixed texts of a call: what of them is a special token, the tokenizer says."""
        tags = (self.tags.name_end, *self.tags.key, *self.tags.value, self.tags.end) if self.tags else ()
        return (self.marker, self.end, *self.sections, *self.writes, *tags)


def read(fmt: Format, src: Source, sink: Sink) -> Reader[None]:
    """Read text with calls to its end."""
    if fmt.channels:
        yield from fmt.body(src, sink)
        return
    if fmt.leading:
        yield from src.span(SPACE, sink.content)
        if ((yield from src.peek()) or " ") in fmt.leading:
            yield from _group(fmt, "", src, sink)
    while (marker := (yield from src.upto((fmt.marker, *fmt.sections), sink.content))) is not None:
        if marker == fmt.marker:
            yield from _group(fmt, marker, src, sink)
        else:
            sink.boundary()


def _group(fmt: Format, marker: str, src: Source, sink: Sink) -> Reader[None]:
    """Read the calls behind one marker."""
    src.keep(marker)
    calls = sink.calls
    try:
        yield from src.skip()
        yield from src.accept(fmt.opener)
        while True:
            yield from src.skip()
            yield from fmt.body(src, sink)
            yield from src.skip()
            if not (fmt.separator and (yield from src.accept(fmt.separator))):
                break
            src.keep()
            calls = sink.calls
        yield from src.accept(fmt.end)
    except Broken:
        if sink.calls == calls:
            sink.content(src.raw())


def _object(src: Source, sink: Sink) -> Reader[None]:
    """{"name": ..., "arguments" or "parameters": {...}}"""
    yield from src.must("{")
    name, known = None, sink.calls
    parts: list[str] = []
    while True:
        yield from src.skip()
        key = yield from values.text_of(src)
        yield from src.skip()
        yield from src.must(":")
        yield from src.skip()
        if key == "name" and name is None:
            name = yield from values.text_of(src)
        elif key in ("arguments", "parameters") and not parts and sink.calls == known:
            first = yield from src.peek()
            if first == '"':  # JSON in a string
                parts.append(values.normal((yield from values.text_of(src))) or "")
            elif name is not None and first == "{":
                sink.call(name)
                yield from values.value(src, sink.arguments)
            else:
                yield from values.value(src, parts.append)
        elif key in ("id", "type"):
            yield from values.value(src, len)
        else:
            raise Broken
        yield from src.skip()
        if not (yield from src.accept(",")):
            break
    yield from src.must("}")
    if sink.calls == known:
        arguments = "".join(parts) or "{}"
        if name is None or arguments[0] != "{":
            raise Broken
        sink.call(name)
        sink.arguments(arguments)


def read_arguments(src: Source, sink: Sink) -> Reader[None]:
    """Read arguments of a call that was told."""
    yield from src.skip()
    if (yield from src.peek()) != "{":
        raise Broken
    yield from values.value(src, sink.arguments)


def _mistral(src: Source, sink: Sink) -> Reader[None]:
    """An object, or NAME[ARGS]{...} with an id in between or not."""
    if (yield from src.peek()) == "{":
        yield from _object(src, sink)
        return
    name, id = (yield from src.word()), ""
    if (yield from src.accept("[CALL_ID]")):
        id = yield from src.word()
    yield from src.must("[ARGS]")
    sink.call(name, id)
    yield from read_arguments(src, sink)


def _deepseek(src: Source, sink: Sink) -> Reader[None]:
    """V3: function<sep>NAME, then JSON in a fence; V3.1: NAME<sep>{...}."""
    name = yield from src.word()
    yield from src.must("<｜tool▁sep｜>")
    fenced = name == "function"
    if fenced:
        name = yield from src.word()
        yield from src.must("\n```json\n")
    sink.call(name)
    yield from read_arguments(src, sink)
    if fenced:
        yield from src.skip()
        yield from src.accept("```")


def _kimi(src: Source, sink: Sink) -> Reader[None]:
    """functions.NAME:0<argument>{...}; all of the first is the call's id."""
    id = yield from src.word()
    yield from src.skip()
    yield from src.must("<|tool_call_argument_begin|>")
    sink.call(id.removeprefix("functions.").rpartition(":")[0], id)
    yield from read_arguments(src, sink)


def _pythonic(src: Source, sink: Sink) -> Reader[None]:
    """NAME(key=value, ...)"""
    name = yield from src.word()
    yield from src.must("(")
    sink.call(name)
    lead = "{"
    yield from src.skip()
    while not (yield from src.accept(")")):
        key = yield from src.word()
        yield from src.skip()
        yield from src.must("=")
        sink.arguments(f"{lead}{json.dumps(key)}: ")
        yield from values.value(src, sink.arguments, values.PYTHON)
        yield from src.skip()
        if not (yield from src.accept(",")) and (yield from src.peek()) != ")":
            raise Broken
        yield from src.skip()
        lead = ", "
    sink.arguments("}" if lead == ", " else "{}")


@dataclass(frozen=True)
class Tags:
    """Arguments in tags. Values of strings stand as they are, all others as JSON."""

    name_end: str
    key: tuple[str, str]
    value: tuple[str, str]
    end: str
    newline: str = ""  # around values

    def __call__(self, src: Source, sink: Sink) -> Reader[None]:
        """Read a call."""
        name = yield from src.word()
        yield from src.must(self.name_end)
        if name not in sink.tools:
            raise Broken
        properties = sink.tools[name].get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        sink.call(name)
        lead = "{"
        while True:
            yield from src.skip()
            if (yield from src.accept(self.end)):
                break
            yield from src.must(self.key[0])
            key = yield from src.token(self.key[1])
            if self.value[0]:
                yield from src.skip()
                yield from src.must(self.value[0])
            parts: list[str] = []
            if (yield from src.upto([self.value[1]], parts.append)) is None:
                raise Broken
            said = "".join(parts).removeprefix(self.newline).removesuffix(self.newline)
            schema = properties.get(key, {"type": "string"})
            kind = schema.get("type") if isinstance(schema, Mapping) else None
            written = None if kind == "string" else values.normal(said)
            written = json.dumps(said, ensure_ascii=False) if written is None else written
            sink.arguments(f"{lead}{json.dumps(key)}: {written}")
            lead = ", "
        sink.arguments("}" if lead == ", " else "{}")


_HERMES = ("", '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "\n", "")
_QWEN = Tags(">", ("<parameter=", ">"), ("", "</parameter>"), "</function>", "\n")
_GLM = Tags("", ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>"), "</tool_call>")
_DEEPSEEK = Format(
    "<｜tool▁call▁begin｜>", _deepseek, "<｜tool▁call▁end｜>",
    ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>",
     "<｜tool▁call▁end｜>", "", "<｜tool▁calls▁end｜>"),
    sections=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
)  # fmt: skip
_FENCED = (
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n",
    "\n```<｜tool▁call▁end｜>", "\n", "<｜tool▁calls▁end｜>",
)  # fmt: skip
_MISTRAL = Format(
    "[TOOL_CALLS]", _mistral, "]", ("", "[TOOL_CALLS]", "[ARGS]", "", "", ""),
    opener="[", separator=",", new_id=_mistral_id,
)  # fmt: skip
_MISTRAL_V3 = ("[TOOL_CALLS][", '{"name": "', '", "arguments": ', "}", ", ", "]")

FORMATS: Mapping[str, Format] = {
    "hermes": Format("<tool_call>", _object, "</tool_call>", _HERMES),
    "llama3_json": Format(
        "<|python_tag|>", _object, "", ("", '{"name": "', '", "parameters": ', "}", "; ", ""),
        separator=";", leading="{",
    ),
    "pythonic": Format(
        "<|python_start|>", _pythonic, "]", ("[", "", "(", ")", ", ", "]"), "python",
        opener="[", separator=",", leading="[", sections=("<|python_end|>",),
    ),
    "mistral": _MISTRAL,
    "mistral_v3": dataclasses.replace(_MISTRAL, writes=_MISTRAL_V3),
    "deepseek_v3": dataclasses.replace(_DEEPSEEK, writes=_FENCED),
    "deepseek_v31": _DEEPSEEK,
    "qwen3_coder": Format(
        "<function=", _QWEN, "", ("", "<tool_call>\n<function=", ">\n", "</function>\n</tool_call>", "\n", ""), "tagged",
        sections=("<tool_call>", "</tool_call>"), tags=_QWEN,
    ),
    "glm4": Format(
        "<tool_call>", _GLM, "</tool_call>", ("", "<tool_call>", "\n", "</tool_call>", "\n", ""), "tagged", tags=_GLM,
    ),
    "kimi_k2": Format(
        "<|tool_call_begin|>", _kimi, "<|tool_call_end|>",
        ("<|tool_calls_section_begin|>", "<|tool_call_begin|>functions.", ":{index}<|tool_call_argument_begin|>",
         "<|tool_call_end|>", "", "<|tool_calls_section_end|>"),
        sections=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
}  # fmt: skip
