"""Read what a model writes: reasoning, content, and calls of tools, as the text arrives.

    output = Output(FORMATS["hermes"], {"weather": schema}, thinking=reasoning.FAMILIES["think"])
    for piece in pieces:
        deltas = output.push(piece)
    deltas = output.finish()

`grammar` makes the grammar that enforces a call, `answer` one of reasoning with a structured answer after it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from fdel.serve import reasoning
from fdel.serve.scan import Delta, Reader, Sink, Source
from fdel.serve.tools import formats
from fdel.serve.tools.formats import FORMATS, Format
from fdel.serve.tools.grammar import answer, grammar
from fdel.serve.tools.harmony import harmony

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
    """Name the format whose marks a chat template has: a key of FORMATS, "harmony" (gpt-oss), or None."""
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

    `format` is one of FORMATS, "harmony", or None if there are no tools; `tools` gives each tool's parameters (a JSON
    schema). With `inside`, the prompt began the reasoning (`reasoning.opened`). Calls beyond `most` are dropped. Never
    raises for what a model writes.
    """

    format: Format | str | None = None
    tools: Mapping[str, Mapping] = field(default_factory=dict)
    thinking: reasoning.Thinking | None = None
    inside: bool = False
    most: int = 128

    def __post_init__(self) -> None:
        new_id = self.format.new_id if isinstance(self.format, Format) else None
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
        if self.format == "harmony":
            yield from harmony(src, sink)
        else:
            if self.thinking is not None:
                yield from reasoning.think(self.thinking, self.inside, src, sink)
            if isinstance(self.format, Format):
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
