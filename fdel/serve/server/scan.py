"""Read text that arrives in pieces: generators that wait where they must, and read no character twice.

A reader is a generator that is resumed with the next piece of text (None: there is no more), reads from a `Source` and
tells a `Sink`. However the text is cut into pieces, it reads the same, and its work is linear in the text.
"""

import functools
import itertools
import re
import secrets
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

T = TypeVar("T")
Reader = Generator[None, str | None, T]
Emit = Callable[[str], object]

TOKEN = 128  # the longest key of a tag
SPACE = re.compile(r"[ \t\r\n]*")
NAME = re.compile(r"[\w.:-]*")


class Broken(Exception):
    """The text is not what its format says."""


@dataclass(frozen=True)
class Delta:
    """What an output adds: "content", "reasoning", a "call" (text is its name), "arguments" of call `index` (JSON)."""

    kind: str
    text: str
    index: int = 0
    id: str = ""  # of a call


@dataclass
class Source:
    """The text that has arrived and was not read yet."""

    text: str = ""
    at: int = 0
    over: bool = False
    kept: list[str] = field(default_factory=list)  # what was read since `keep`, up to `base`
    base: int = 0

    def keep(self, before: str = "") -> None:
        """Remember what is read from here on, for `raw`."""
        self.kept, self.base = [before], self.at

    def raw(self) -> str:
        """What was read since `keep`."""
        return "".join(self.kept) + self.text[self.base : self.at]

    def more(self) -> Reader[bool]:
        """Wait for the next piece; False if there is none."""
        if self.over:
            return False
        piece = yield
        self.kept.append(self.text[self.base : self.at])
        self.text, self.at, self.base = self.text[self.at :] + (piece or ""), 0, 0
        self.over = piece is None
        return not self.over

    def peek(self) -> Reader[str]:
        """The next character, "" at the end."""
        while self.at == len(self.text):
            if not (yield from self.more()):
                return ""
        return self.text[self.at]

    def take(self) -> Reader[str]:
        """Read one character."""
        char = yield from self.peek()
        if not char:
            raise Broken
        self.at += 1
        return char

    def span(self, pattern: re.Pattern[str], emit: Emit) -> Reader[None]:
        """Read as far as a pattern of the form [...]* goes."""
        while True:
            found = pattern.match(self.text, self.at)
            if found and found.group():
                emit(found.group())
                self.at = found.end()
            if self.at < len(self.text) or not (yield from self.more()):
                return

    def skip(self) -> Reader[None]:
        """Read white space."""
        yield from self.span(SPACE, len)

    def word(self) -> Reader[str]:
        """Read a name, which may be empty."""
        parts: list[str] = []
        yield from self.span(NAME, parts.append)
        return "".join(parts)

    def accept(self, literal: str) -> Reader[bool]:
        """Read this text if it is what comes next."""
        while len(self.text) - self.at < len(literal) and literal.startswith(self.text[self.at :]):
            if not (yield from self.more()):
                return False
        found = self.text.startswith(literal, self.at)
        self.at += len(literal) * found
        return found

    def must(self, literal: str) -> Reader[None]:
        """Read this text; Broken if it does not come next."""
        if not (yield from self.accept(literal)):
            raise Broken

    def token(self, end: str) -> Reader[str]:
        """Read a short text and what ends it; Broken if that does not come within TOKEN characters."""
        while (found := self.text.find(end, self.at, self.at + TOKEN + len(end))) < 0:
            if len(self.text) - self.at > TOKEN + len(end) or not (yield from self.more()):
                raise Broken
        token, self.at = self.text[self.at : found], found + len(end)
        return token

    def upto(self, markers: Collection[str], emit: Emit) -> Reader[str | None]:
        """Read up to the first of the markers, and it; return it, or None if the text ends before. None may begin
        another."""
        pattern, starts, longest = _markers(tuple(markers))
        while True:
            found = pattern.search(self.text, self.at)
            end = found.start() if found else len(self.text)
            if not found and not self.over:  # what may be the beginning of a marker waits
                most = min(longest - 1, end - self.at)
                end -= next((n for n in range(most, 0, -1) if self.text[end - n :] in starts), 0)
            if end > self.at:
                emit(self.text[self.at : end])
                self.at = end
            if found:
                self.at = found.end()
                return found.group()
            if not (yield from self.more()) and self.at == len(self.text):
                return None


@functools.lru_cache(maxsize=256)
def _markers(markers: tuple[str, ...]) -> tuple[re.Pattern[str], frozenset[str], int]:
    starts = frozenset(m[:n] for m in markers for n in range(1, len(m)))
    return re.compile("|".join(map(re.escape, markers)) or "(?!)"), starts, max(map(len, markers), default=1)


@dataclass
class Sink:
    """What was read. White space beside a marker is dropped, at the ends of the whole text it stays."""

    tools: Mapping[str, Mapping] = field(default_factory=dict)  # name -> JSON schema of the parameters
    new_id: Callable[[], str] = lambda: f"call_{secrets.token_hex(12)}"
    deltas: list[Delta] = field(default_factory=list)
    calls: int = 0
    kind: str = ""  # of the text so far
    held: list[str] = field(default_factory=list)  # white space that a marker may follow
    trim: bool = False

    def call(self, name: str, id: str = "") -> None:
        """Begin a call; Broken if there is no such tool."""
        if name not in self.tools:
            raise Broken
        self.boundary()
        self.deltas.append(Delta("call", name, self.calls, id or self.new_id()))
        self.calls += 1

    def arguments(self, text: str) -> None:
        """Tell a piece of the arguments of the last call."""
        self.deltas.append(Delta("arguments", text, self.calls - 1))

    def boundary(self) -> None:
        """Say that a marker stood here."""
        self.held, self.trim = [], True

    def begin(self, kind: str) -> None:
        """Say that a marker stood here, and of what kind the text after it is; "": not known."""
        self.boundary()
        self.kind = kind

    def take(self) -> list[Delta]:
        """Return what is new, neighbours of the same kind as one."""
        out: list[Delta] = []
        for kind, group in itertools.groupby(self.deltas, lambda d: d.kind):
            new = list(group)
            out += new if kind == "call" else [replace(new[0], text="".join(d.text for d in new))]
        self.deltas = []
        return out

    def flush(self) -> None:
        """End the text."""
        if self.held:
            self.deltas.append(Delta(self.kind, "".join(self.held)))
            self.held = []

    def _text(self, kind: str, text: str) -> None:
        if kind != self.kind and self.kind:
            self.boundary()
        self.kind = kind
        text = text.lstrip() if self.trim else text
        body = text.rstrip()
        if body:
            self.deltas.append(Delta(kind, "".join(self.held) + body))
            self.held, self.trim = [], False
        if not self.trim and body != text:
            self.held.append(text[len(body) :])

    # Tell text of the answer, and of the reasoning.
    content = functools.partialmethod(_text, "content")
    reasoning = functools.partialmethod(_text, "reasoning")
