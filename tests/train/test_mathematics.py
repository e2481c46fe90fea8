"""Answers compared by math-verify: what it is asked, and what becomes of those that it never finishes."""

import pytest

from fdel.train.rollout import mathematics, verify

STAND_IN = """
import os, signal

def parse(latex, parsing_timeout):
    assert parsing_timeout is None and latex[0] == latex[-1] == "$"
    return latex[1:-1]

def verify(gold, target, timeout_seconds):
    assert timeout_seconds is None
    if target == "long":
        9 ** 9 ** 9  # one instruction, which no exception ends
    if target == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    return (gold, target) == ("right", "same as right")
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A module in the place of math-verify."""
    (tmp_path / "math_verify.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "math_verify.py"


def test_a_pair_that_never_ends_is_unequal_and_the_others_are_compared(stand_in):
    said = ["same as right", "long", "dies", "wrong", "same as right", "dies"]
    assert mathematics.equal([(x, "right") for x in said], seconds=0.2) == [True, False, False, False, True, False]
    stand_in.write_text("raise ImportError")
    with pytest.raises(RuntimeError, match="did not begin: code 1"):
        mathematics.equal([("1", "2")])


def test_the_rest_is_unequal_when_time_is_up(stand_in, caplog):
    some = [("same as right", "right"), ("long", "right"), ("same as right", "right"), ("wrong", "right")]
    assert mathematics.equal(some, seconds=60, wait=1.5) == [True, False, False, False]
    assert caplog.messages == ["2 of 4 answers are not compared after 1.5 s"]


def test_only_what_is_unclear_is_asked(stand_in, monkeypatch):
    asked, equal = [], mathematics.equal
    monkeypatch.setattr(mathematics, "equal", lambda pairs: asked.extend(pairs) or equal(pairs))
    boxes = [rf"\boxed{{{x}}}" for x in ("1", "0.5", "same as right", "wrong", "", "2")] + ["no box"]
    answers = ["2", r"\frac{1}{2}", "right", "right", "right", None, "right"]
    assert verify.boxed()(boxes, answer=answers) == [0, 1, 1, 0, 0, None, 0]
    assert asked == [("same as right", "right"), ("wrong", "right")]
    assert verify.boxed(symbolic=False)(boxes, answer=answers) == [0, 1, 0, 0, 0, None, 0] and len(asked) == 2


def test_it_must_be_installed(monkeypatch):
    monkeypatch.setattr(mathematics, "there", lambda: False)
    assert verify.boxed()([r"\boxed{x}"], answer=["x"]) == [1]
    with pytest.raises(ImportError, match=r"pip install 'fdel\[rewards\]'"):
        verify.boxed(symbolic=True)


def test_with_math_verify_itself():
    pytest.importorskip("math_verify")
    pairs = {
        r"\frac12": "0.5",
        "x^2+2x+1": "(x+1)^2",
        r"\{1,2\}": r"\{2,1\}",
        r"\sqrt{8}": r"2\sqrt{2}",
        "5": "6",
        "]][": "3",
    }
    pairs |= {"9^{9^{9^9}}": "3", "y+x": "x+y"}
    want = [True, True, True, True, False, False, False, True]
    assert mathematics.equal(list(pairs.items()), seconds=2.0) == want
