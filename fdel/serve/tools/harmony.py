"""Read the channels of gpt-oss, which mark reasoning, content and calls alike (OpenAI's harmony format)."""

import re

from fdel.serve.scan import Broken, Emit, Reader, Sink, Source
from fdel.serve.tools.formats import read_arguments

_HEADER = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>")
_ENDS = ("<|end|>", "<|return|>", "<|call|>")


def harmony(src: Source, sink: Sink) -> Reader[None]:
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
                yield from _harmony_call(to[1], said + marker, src, sink)
    if header:  # one without a message
        sink.content("".join(header))


def _harmony_call(name: str, said: str, src: Source, sink: Sink) -> Reader[None]:
    src.keep(said)
    calls = sink.calls
    try:
        sink.call(name)
        yield from read_arguments(src, sink)
    except Broken:
        if sink.calls == calls:
            sink.content(src.raw())
