"""Reward functions that verify: 1 for an answer that is right, 0 for one that is not, None for a row without an answer.

Each is made with its options: `exact("answer")` compares with the rows' column `answer`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from fdel.train.rollout import mathematics

Verifier = Callable[..., list[float | None]]


def texts(completions: Sequence[Any]) -> list[str]:
    """Give what completions say, messages or texts."""
    return [x if isinstance(x, str) else "".join(str(m.get("content") or "") for m in x) for x in completions]


def column_of(columns: Mapping[str, Sequence[Any]], name: str) -> Sequence[Any]:
    """Give a column of the rows; ValueError for one that they lack."""
    if name not in columns:
        raise ValueError(f"rows have no column {name!r} (found {', '.join(sorted(columns))}); name another one")
    return columns[name]


def _verifier(column: str, right: Callable[[str, str], bool]) -> Verifier:
    """Make a reward of a comparison of what was said with what a column has."""

    def verify(completions: Sequence[Any], **columns: Any) -> list[float | None]:
        pairs = zip(texts(completions), column_of(columns, column), strict=True)
        return [None if answer is None else float(right(said, str(answer))) for said, answer in pairs]

    return verify


def exact(column: str = "answer") -> Verifier:
    """Reward completions that are the answer, but for spaces around it.
    >>> exact()(["4", " 5 "], answer=["5", "5"])
    [0.0, 1.0]
    """
    return _verifier(column, lambda said, answer: said.strip() == answer.strip())


def boxed(column: str = "answer", *, symbolic: bool | None = None) -> Verifier:
    r"""Reward completions whose last \\boxed{...} has the answer: the same number, or else the same text but for spaces.

    With `symbolic`, math-verify compares what this leaves unequal, where one is no number: it knows \\frac12, roots, sets,
    intervals and expressions. None stands for whether it is installed (extra `rewards`); ImportError if it is not, and
    asked for.
    >>> boxed(symbolic=False)([r"so \boxed{\frac{1}{2}}", r"\boxed{3}"], answer=["0.5", "4"])
    [1.0, 0.0]
    """
    if symbolic and not mathematics.there():
        raise ImportError("boxed(symbolic=True) needs math-verify: pip install 'fdel[rewards]'")
    ask = mathematics.there() if symbolic is None else symbolic

    def verify(completions: Sequence[Any], **columns: Any) -> list[float | None]:
        answers = [None if x is None else last_boxed(str(x)) or str(x) for x in column_of(columns, column)]
        pairs = list(zip(map(last_boxed, texts(completions)), answers, strict=True))
        rewards = [None if answer is None else float(same(said, answer)) for said, answer in pairs]
        unclear = [(i, (said, answer)) for i, (said, answer) in enumerate(pairs)
                   if rewards[i] == 0 and said and answer and None in (number(said), number(answer))]  # fmt: skip
        if ask and unclear:
            for (i, _), equal in zip(unclear, mathematics.equal([pair for _, pair in unclear]), strict=True):
                rewards[i] = float(equal)
        return rewards

    return verify


def hashes(column: str = "answer") -> Verifier:
    """Reward completions that have the answer after their last ####, as GSM8K writes it (arXiv:2110.14168).
    >>> hashes()(["4 + 4 = 8 #### 8"], answer=["It is #### 8"])
    [1.0]
    """
    after = lambda text: text.rpartition("####")[2].strip() if "####" in text else None
    return _verifier(column, lambda said, answer: same(after(said), after(answer) or answer))


def pattern(regex: str) -> Verifier:
    """Reward completions that a regular expression matches from beginning to end.

    One that backtracks without end stops the whole process, for Python lets no other thread run meanwhile: put it into
    a function that `isolated` runs.
    >>> pattern("[0-9]+")(["12", "12 apples"])
    [1.0, 0.0]
    """
    compiled = re.compile(regex, re.DOTALL)
    return lambda completions, **columns: [float(compiled.fullmatch(x) is not None) for x in texts(completions)]


def think_format() -> Verifier:
    """Reward completions that begin with <think>...</think>, once, and say something after it (DeepSeek-R1)."""
    return pattern(r"<think>(?!.*<think>)(.*?)</think>.*")


def last_boxed(text: str) -> str | None:
    r"""Find what stands in the last \\boxed{...} that is closed; None without one. Braces behind a backslash are text."""
    best, opened = (-1, -1), list[int]()
    for m in re.finditer(r"\\boxed\s*\{|\\.|[{}]", text, re.DOTALL):  # once: a text may have thousands that are open
        if m[0] == "}":
            start = opened.pop() if opened else -1
            best = max(best, (start, m.start()))
        elif m[0][-1] == "{" and m[0] != r"\{":
            opened.append(m.end() if len(m[0]) > 1 else -1)
    return None if best[0] < 0 else text[best[0] : best[1]]


def same(said: str | None, answer: str) -> bool:
    """Tell whether two answers are one: as numbers (1,000; 50%; 1/2; \\frac{1}{2}; 0.5), or as texts but for spaces."""
    if said is None:
        return False
    a, b = number(said), number(answer)
    return a == b if a is not None and b is not None else "".join(said.split()) == "".join(answer.split())


def number(text: str) -> Fraction | None:
    """Read a number exactly; None if it is none."""
    x = re.sub(r"\\(left|right|,|;|!|\$)|[$\s]", "", text).rstrip(".").replace("\\%", "%")
    x = re.sub(r"\\[dt]?frac\{(-?\d+)\}\{(\d+)\}", r"\1/\2", x)
    x = re.sub(r"(?<=\d),(?=\d{3}(\D|$))", "", x)
    percent = x.endswith("%")
    x = x.removesuffix("%")
    if not re.fullmatch(r"[-+]?(\d{1,40}(\.\d{0,40})?|\.\d{1,40})(/\d{1,40})?", x):
        return None
    top, _, bottom = x.partition("/")
    below = Fraction(bottom or 1)
    return None if below == 0 else Fraction(top) / below / (100 if percent else 1)
