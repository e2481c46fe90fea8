"""Read values of JSON and Python as the text arrives, and tell them as JSON."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from fdel.serve.server.scan import Broken, Emit, Reader, Source

DEPTH = 64  # brackets inside brackets
DIGITS = 128  # the longest number
_SCALAR = re.compile(r"[-+.\w]*")
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?", re.ASCII)
_RUN = {'"': re.compile(r'[^"\\\x00-\x1f]*'), "'": re.compile(r"""[^'"\\\x00-\x1f]*""")}


@dataclass(frozen=True)
class Dialect:
    """How a language writes values that JSON has too."""

    quotes: str
    brackets: Mapping[str, str]
    words: Mapping[str, str]


JSON = Dialect('"', {"{": "}", "[": "]"}, {"true": "true", "false": "false", "null": "null"})
PYTHON = Dialect("\"'", {**JSON.brackets, "(": ")"}, {**JSON.words, "True": "true", "False": "false", "None": "null"})


def value(src: Source, emit: Emit, dialect: Dialect = JSON) -> Reader[None]:
    """Read a value and tell it as JSON, in the layout of `json.dumps`, bit by bit.

    Lenient where the meaning is plain: control characters in strings, unknown escapes, a comma before a bracket.
    """
    open_: list[str] = []
    lead = ""
    while True:
        yield from src.skip()
        char = yield from src.peek()
        if open_ and char == open_[-1]:
            src.at += 1
            emit("}" if open_.pop() == "}" else "]")
        else:
            emit(lead)
            if open_ and open_[-1] == "}":
                yield from string(src, emit, dialect)
                yield from src.skip()
                yield from src.must(":")
                emit(": ")
                yield from src.skip()
                char = yield from src.peek()
            if char in dialect.brackets:
                if len(open_) == DEPTH:
                    raise Broken
                src.at += 1
                open_.append(dialect.brackets[char])
                emit("{" if char == "{" else "[")
                lead = ""
                continue
            yield from string(src, emit, dialect) if char in [*dialect.quotes] else _scalar(src, emit, dialect)
        if not open_:
            return
        yield from src.skip()
        if (yield from src.accept(",")):
            lead = ", "
        elif (yield from src.peek()) != open_[-1]:
            raise Broken


def string(src: Source, emit: Emit, dialect: Dialect = JSON) -> Reader[None]:
    """Read a string in quotes and tell it as JSON's."""
    quote = yield from src.peek()
    if not quote or quote not in dialect.quotes:
        raise Broken
    src.at += 1
    emit('"')
    while True:
        yield from src.span(_RUN[quote], emit)
        char = yield from src.take()
        if char == quote:
            emit('"')
            return
        if char != "\\":
            emit(json.dumps(char)[1:-1])
            continue
        char = yield from src.take()
        if char in '"\\/bfnrt':
            emit("\\" + char)
        elif char in "ux":
            digits = ""
            for _ in range(4 if char == "u" else 2):
                digits += yield from src.take()
            if not re.fullmatch("[0-9a-fA-F]+", digits):
                raise Broken
            emit(f"\\u{digits:0>4}")
        else:
            emit("'" if char == "'" else json.dumps("\\" + char)[1:-1])


def _scalar(src: Source, emit: Emit, dialect: Dialect) -> Reader[None]:
    parts: list[str] = []
    yield from src.span(_SCALAR, parts.append)
    word = "".join(parts)
    if word not in dialect.words and not (len(word) < DIGITS and _NUMBER.fullmatch(word)):
        raise Broken
    emit(dialect.words.get(word, word))


def text_of(src: Source) -> Reader[str]:
    """Read a JSON string and return what it says."""
    parts: list[str] = []
    yield from string(src, parts.append)
    return json.loads("".join(parts))


def normal(text: str) -> str | None:
    """Return JSON in the layout of `json.dumps`, or None if the text is none."""
    src = Source(text, over=True)
    parts: list[str] = []
    try:
        for _ in value(src, parts.append):
            pass
    except Broken:
        return None
    return None if src.text[src.at :].strip() else "".join(parts)
