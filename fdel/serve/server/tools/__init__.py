"""Read what a model writes: reasoning, content, and calls of tools, as the text arrives.

    output = Output(FORMATS["hermes"], {"weather": schema}, thinking=reasoning.FAMILIES["think"])
    for piece in pieces:
        deltas = output.push(piece)
    deltas = output.finish()

`grammar` makes the grammar that enforces a call, `answer` one of reasoning with a structured answer after it.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from fdel.serve.server import reasoning
from fdel.serve.server.scan import Broken, Delta, Emit, Reader, Sink, Source
from fdel.serve.server.tools import formats
from fdel.serve.server.tools.formats import Format, read_arguments
from fdel.serve.server.tools.grammar import answer, grammar

__all__ = ["Call", "Delta", "FORMATS", "Format", "Message", "Output", "answer", "detect", "grammar", "message", "parse"]

# What a chat template says, and the format that it means; the first that fits.
_SIGNS = (
    ("<|channel|>", "harmony"),
    ("<arg_key>", "glm4"),
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("[ARGS]", "mistral"),
    ("[TOOL_CALLS]", "mistral_v3"),
    ("<|tool_call_argument_begin|>", "kimi_k2"),
    ("<｜tool▁sep｜>' + tool['function']['name']", "deepseek_v3"),
    ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "deepseek_v3"),
    ("<｜tool▁sep｜>", "deepseek_v31"),
    ("<|python_start|>", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
)


def detect(template: str) -> str | None:
    """Name the format whose marks a chat template has: a key of FORMATS, or None."""
    return next((name for sign, name in _SIGNS if sign in template), None)


@dataclass(frozen=True)
class Call:
    """A call of a tool; `arguments` is JSON, if the model wrote all of it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Message:
    """A whole output."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


@dataclass
class Output:
    """One output that arrives in pieces of text: `push` each, then `finish`; both tell what is new.

    `format` is one of FORMATS, or None if there are no tools; `tools` gives each tool's parameters (a JSON
    schema). With `inside`, the prompt began the reasoning (`reasoning.opened`). Calls beyond `most` are dropped. Never
    raises for what a model writes.
    """

    format: Format | None = None
    tools: Mapping[str, Mapping] = field(default_factory=dict)
    thinking: reasoning.Thinking | None = None
    inside: bool = False
    most: int = 128

    def __post_init__(self) -> None:
        new_id = self.format and self.format.new_id
        self.sink = Sink(self.tools, new_id) if new_id else Sink(self.tools)
        self.reader = self._read(Source(), self.sink)
        next(self.reader)  # to where it waits for text

    def push(self, text: str) -> list[Delta]:
        """Take the next piece of text."""
        self.reader.send(text)
        return [d for d in self.sink.take() if d.index < self.most]

    def finish(self) -> list[Delta]:
        """Tell what was held back; the text is over."""
        self.reader.send(None)
        return [d for d in self.sink.take() if d.index < self.most]

    def _read(self, src: Source, sink: Sink) -> Reader[None]:
        if self.thinking is not None and not (self.format and self.format.channels):
            yield from reasoning.think(self.thinking, self.inside, src, sink)
        if self.format is not None:
            yield from formats.read(self.format, src, sink)
        else:
            yield from src.upto((), sink.content)
        sink.flush()
        yield


def message(deltas: Iterable[Delta]) -> Message:
    """Put an output together."""
    texts: dict[str, list[str]] = {"content": [], "reasoning": []}
    calls: list[tuple[Delta, list[str]]] = []
    for delta in deltas:
        if delta.kind == "call":
            calls.append((delta, []))
        elif delta.kind == "arguments":
            calls[delta.index][1].append(delta.text)
        else:
            texts[delta.kind].append(delta.text)
    whole = tuple(Call(d.id, d.text, "".join(parts)) for d, parts in calls)
    return Message("".join(texts["content"]), "".join(texts["reasoning"]), whole)


def parse(output: Output, text: str) -> Message:
    """Read a whole text."""
    return message([*output.push(text), *output.finish()])


# ---- gpt-oss: channels, which mark reasoning, content and calls alike (OpenAI's harmony format) ---------------------

_HEADER = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>")
_ENDS = ("<|end|>", "<|return|>", "<|call|>")


def _harmony(src: Source, sink: Sink) -> Reader[None]:
    """Read the channels of gpt-oss: analysis is reasoning, a message to functions.NAME a call, all else content."""
    header: list[str] = []
    emit: Emit = sink.content
    while (marker := (yield from src.upto(_HEADER + _ENDS, emit))) is not None:
        if marker in _ENDS:
            sink.begin("")
            header, emit = [], sink.content
        elif marker != "<|message|>":
            header.append(marker)
            emit = header.append
        else:
            said, header = "".join(header), []
            channel = re.search(r"<\|channel\|>\s*(\w+)", said)
            to = re.search(r"to=functions\.([\w.-]+)", said)
            thought = channel and channel[1] == "analysis" and not to
            sink.begin("reasoning" if thought else "")
            emit = sink.reasoning if thought else sink.content
            if to:
                src.keep(said + marker)
                calls = sink.calls
                try:
                    sink.call(to[1])
                    yield from read_arguments(src, sink)
                except Broken:
                    if sink.calls == calls:
                        sink.content(src.raw())
    if header:  # one without a message
        sink.content("".join(header))


FORMATS: Mapping[str, Format] = {
    **formats.FORMATS,
    "harmony": Format(
        "<|channel|>", _harmony, "",
        ("", "<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "", "", ""), channels=True,
    ),
}  # fmt: skip
