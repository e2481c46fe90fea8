"""Regular expressions of strangers' files, matched in linear time: `re` may take for ever, and holds the GIL meanwhile.

A pattern becomes a program of instructions that is run on all of its threads at once (Thompson 1968; Pike's machine): a
function takes the characters for which it is true, a tuple of relative jumps goes on at each of them, "^" and "$" hold at
the ends of the text.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

Code = list[Callable[[str], Any] | tuple[int, ...] | str]

SIZE = 2000  # most instructions of a pattern, and most characters
DEPTH = 20  # most parentheses in one another
WORK = 20_000_000  # most threads that are advanced by a character in all, over all patterns and texts
TOKEN = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]|\\.|\(\?:|\{\d+,?\d*\}|\{,\d*\}|.", re.DOTALL)
COUNT = re.compile(r"\{(\d*)(,?)(\d*)\}")
LITERAL = re.compile(r"(?:[\w-]|\\[^\w\s])+")


class Patterns:
    """Values by regular expressions of module names, as in PEFT's `alpha_pattern`: the first that matches counts.

    A name matches if `re.match(rf"(.*\\.)?({pattern})$", name)` would: characters, `.`, classes, \\d \\w \\s, groups, |,
    * + ? {m,n}, ^ and $ are known; another construct, or a pattern that is too large, is a ValueError.
    """

    def __init__(self, values: Mapping[str, Any]):
        self.values = list(values.values())
        plain = {re.sub(r"\\(.)", r"\1", k): i for i, k in reversed([*enumerate(values)]) if LITERAL.fullmatch(k)}
        self.plain: Mapping[str, int] = plain  # thousands of names, one for each module, are found without a search
        self.codes = [(i, parse(k)) for i, k in enumerate(values) if not LITERAL.fullmatch(k)]
        self.work = WORK

    def get(self, name: str, default: Any) -> Any:
        """Give the value of the first pattern that matches a name. ValueError if all searches so far took too long."""
        ends = [name, *(name[i + 1 :] for i, c in enumerate(name) if c == ".")]
        first = min((self.plain[end] for end in ends if end in self.plain), default=len(self.values))
        for i, code in self.codes:
            if i < first and self._matches(code, name):
                first = i
        return self.values[first] if first < len(self.values) else default

    def _matches(self, code: Code, text: str) -> bool:
        now: set[int] = set()
        for i in range(len(text) + 1):
            now = _reach(code, now | {0} if i == 0 or text[i - 1] == "." else now, i == 0, i == len(text))
            self.work -= 1 + len(now)
            if self.work < 0:
                raise ValueError(f"patterns take more than {WORK:,} steps to match; write fewer or simpler ones")
            if i < len(text):
                takes = lambda step, c=text[i]: callable(step) and step(c)
                now = {at + 1 for at in now if at < len(code) and takes(code[at])}
        return len(code) in now


def _reach(code: Code, starts: set[int], first: bool, last: bool) -> set[int]:
    """All places that can be reached from some without taking a character."""
    found: set[int] = set()
    todo = list(starts)
    while todo:
        at = todo.pop()
        if at not in found:
            found.add(at)
            step = code[at] if at < len(code) else ""
            if isinstance(step, tuple):
                todo += [at + jump for jump in step]
            elif (step == "^" and first) or (step == "$" and last):
                todo.append(at + 1)
    return found


def parse(pattern: str) -> Code:
    """Compile a pattern. ValueError for one that is too large, or has a construct that is not known."""
    if len(pattern) > SIZE:
        raise ValueError(f"pattern {pattern[:40]!r}... of {len(pattern):,} characters; the most are {SIZE:,}")
    tokens = TOKEN.findall(pattern)[::-1]
    try:
        code = _either(tokens, 0)
        if tokens:
            raise ValueError("an unmatched ')'")
        return code
    except (ValueError, re.error) as e:
        raise ValueError(f"pattern {pattern[:100]!r} cannot be used: {e}") from None


def _either(tokens: list[str], depth: int) -> Code:
    if depth > DEPTH:
        raise ValueError(f"more than {DEPTH} parentheses in one another")
    code = _sequence(tokens, depth)
    while tokens and tokens[-1] == "|":
        tokens.pop()
        other = _sequence(tokens, depth)
        code = [(1, len(code) + 2), *code, (len(other) + 1,), *other]
    return code


def _sequence(tokens: list[str], depth: int) -> Code:
    code: Code = []
    while tokens and tokens[-1] not in ("|", ")"):
        code += _repeated(_item(tokens, depth), tokens)
        if len(code) > SIZE:
            raise ValueError(f"more than {SIZE:,} instructions")
    return code


def _item(tokens: list[str], depth: int) -> Code:
    token = tokens.pop()
    if token in ("(", "(?:"):
        code = _either(tokens, depth + 1)
        if not tokens:
            raise ValueError("a missing ')'")
        tokens.pop()
        return code
    if token in ("^", "$"):
        return [token]
    if token in ("*", "+", "?", "[", "\\") or (len(token) > 1 and token[0] == "{"):
        raise ValueError(f"{token!r} where a character, a class or a group is expected")
    if token[0] == "\\" and token[1].isalnum() and token[1] not in "dwsDWS":
        raise ValueError(f"{token!r} is not known here")
    return [re.compile(token).fullmatch if len(token) > 1 or token == "." else token.__eq__]


def _repeated(code: Code, tokens: list[str]) -> Code:
    if not tokens or not (tokens[-1] in ("*", "+", "?") or COUNT.fullmatch(tokens[-1])):
        return code
    token = {"*": "{0,}", "+": "{1,}", "?": "{0,1}"}.get(tokens[-1], tokens[-1])
    tokens.pop()
    if tokens and tokens[-1] == "?":  # the shortest match first: whether there is one stays the same
        tokens.pop()
    low, comma, high = COUNT.fullmatch(token).groups()  # type: ignore[union-attr]
    least = int(low or 0)
    most = int(high) if high else None if comma else least
    if len(code) * max(least, most or 0, 1) > SIZE or (most is not None and most < least):
        raise ValueError(f"{token!r} repeats too much")
    if most is None:
        return code * least + [(1, len(code) + 2), *code, (-len(code) - 1,)]
    return code * least + [(1, len(code) + 1), *code] * (most - least)
