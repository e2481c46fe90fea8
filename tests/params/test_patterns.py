"""Patterns of module names, against what PEFT does with them; and patterns that would keep `re` busy for ever."""

import random
import re
import time

import pytest

from fdel.params.patterns import Patterns

MODULES = [
    f"{top}layers.{i}.{part}"
    for top in ("model.", "model.decoder.", "")
    for i in (0, 1, 10, 11)
    for part in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj", "mlp.experts.3.w1", "attn-x.c_attn")
]
REAL = [  # keys of alpha_pattern and rank_pattern as people write them
    "q_proj", "layers.1.self_attn.q_proj", r"layers\.1\.self_attn\.q_proj", "^model.decoder.layers.0.self_attn.k_proj",
    ".*q_proj", ".*.q_proj", r".*\.(q_proj|k_proj)", "(q|k|v)_proj", r"layers\.(0|1)\.mlp\.(gate|up|down)_proj",
    r"layers\.\d+\.self_attn.*", r"layers\.[0-9]\.mlp\..*", r"layers\.1[01]\..*_proj$", r"experts\.[^.]+\.w1",
    r"(?:model\.)?layers\.1\.self_attn\.[qk]_proj", r"l\w{5}\.\d{2}\.m.p\.down_proj", r"attn\-x\.c_attn", "", "proj",
    r".+?\.w\d{,2}", "1|0", "[qk]_proj|w1", r"\S+", "x{", "a]b}",
]  # fmt: skip
FREEZE = [r"(([a-z_.0-9])+)+!", "(a|a)*" * 20 + "!", "(.*.*)*!", ".*" * 200 + "!", "(a?){500}!", "((a*)*)*" * 50 + "!",
          "(x+x+)+y" * 30]  # fmt: skip


def of_peft(patterns: list[str], module: str) -> str:
    return next((p for p in patterns if re.match(rf"(.*\.)?({p})$", module)), module)


MANY = [*([p] for p in REAL), REAL, REAL[::-1]]


def test_ordinary_patterns() -> None:
    """Each alone, and the first of many."""
    for patterns in MANY:
        got = Patterns({p: p for p in patterns})
        assert [got.get(m, m) for m in MODULES] == [of_peft(patterns, m) for m in MODULES], patterns


@pytest.mark.slow
def test_that_is_what_peft_does() -> None:
    get_pattern_key = pytest.importorskip("peft.utils.other", reason="needs the torch extra").get_pattern_key
    for patterns in MANY:
        assert [get_pattern_key(patterns, m) for m in MODULES] == [of_peft(patterns, m) for m in MODULES]


def test_random_patterns_match_as_in_re() -> None:
    """20,000 pairs over an alphabet that meets itself; both outcomes are common."""
    draw, hits, count = random.Random(0), 0, 0

    def pattern(depth: int) -> str:
        kind = draw.random()
        if depth == 0 or kind < 0.4:
            return draw.choice(["a", "b", ".", r"\.", "[ab]", "[^a]", r"\d", r"\w", "1", "^", "$"])
        if kind < 0.6:
            return pattern(depth - 1) + pattern(depth - 1)
        inside = f"({draw.choice(['', '?:'])}{pattern(depth - 1)}{draw.choice(['', '|' + pattern(depth - 1)])})"
        return inside + draw.choice(["", "*", "+", "?", "{2}", "{1,2}", "{0,}", "*?", "{,2}"])

    while count < 20_000:
        p = pattern(4)
        try:
            compiled = re.compile(rf"(.*\.)?({p})$")
        except re.error:
            continue
        try:
            found = Patterns({p: True})
        except ValueError:
            assert re.search(r"[\^$][*+?{]", p)
            continue
        for _ in range(10):
            text = "".join(draw.choice("ab.1") for _ in range(draw.randint(0, 6)))
            want = compiled.match(text) is not None
            assert found.get(text, False) == want, (p, text)
            hits, count = hits + want, count + 1
    assert 0.2 < hits / count < 0.8


@pytest.mark.parametrize("pattern", FREEZE, ids=lambda p: p[:12])
def test_no_pattern_runs_for_ever(pattern: str) -> None:
    start = time.monotonic()
    found = Patterns({pattern: 1})
    assert [found.get("a" * 50 + m, None) for m in MODULES] == [None] * len(MODULES)
    assert time.monotonic() - start < 30


BAD = {
    "(": "missing", ")": "unmatched", "a**": "'\\*'", "[z-a]": "bad character range", "[a": "'\\['", r"(a)\1": "not known",
    "(?=a)": "'\\?'", "(?i)a": "'\\?'", r"\bq": "not known", "a" * 2001 + ".": "2,002 characters",
    "(" * 30: "20 parentheses", "a{3000}": "repeats too much", "((a{40}){40}){40}": "repeats too much", "*a": "'\\*'",
    "a{2,1}": "repeats", "\\": "expected",
}  # fmt: skip


@pytest.mark.parametrize("pattern", BAD, ids=lambda p: p[:12])
def test_what_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=f"^pattern .*{BAD[pattern]}"):
        Patterns({pattern: 1})


def test_too_much_work_is_refused(monkeypatch) -> None:
    monkeypatch.setattr("fdel.params.patterns.WORK", 1000)
    found = Patterns({"(.*.*)*!": 1})
    with pytest.raises(ValueError, match="more than 1,000 steps"):
        [found.get(m, None) for m in MODULES]
