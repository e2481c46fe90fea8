"""Verifiers, against answers as data sets have them, and TRL's own where it is installed."""

import pytest

from fdel.train.rollout import verify


def test_exact():
    assert verify.exact("solution")(["4 ", "4.0", "x"], solution=["4", "4", None]) == [1.0, 0.0, None]
    with pytest.raises(ValueError, match="no column 'answer' .found solution"):
        verify.exact()(["4"], solution=["4"])


@pytest.mark.parametrize(
    ("said", "answer", "right"),
    [
        (r"\boxed{42}", "42", 1), (r"first \boxed{1}, no: \boxed{42}", "42", 1), (r"\boxed{42", "42", 0),
        (r"\boxed{\frac{1}{2}}", "0.5", 1), (r"\boxed{\frac{1}{2}}", r"\frac12", 0), (r"\boxed{1/2}", r"\dfrac{1}{2}", 1),
        (r"\boxed{1,000}", "1000", 1), (r"\boxed{50\%}", "1/2", 1), (r"\boxed{x^{2} + 1}", "x^{2}+1", 1),
        (r"\boxed{0.1}", "1/10", 1), (r"\boxed{0.30000000000000004}", "0.3", 0), (r"\boxed{-3}", "3", 0),
        ("42", "42", 0), (r"\boxed{}", "0", 0), (r"\boxed{1/0}", "1/0", 1), (r"$\boxed{\$5.}$", "5", 1),
        (r"\boxed{9" + "9" * 10_000 + "}", "9", 0), (r"\boxed{3}", r"so \boxed{3}", 1),
    ],
)  # fmt: skip
def test_boxed(said, answer, right):
    assert verify.boxed(symbolic=False)([said], answer=[answer]) == [float(right)]
    assert verify.boxed(symbolic=False)([[{"role": "assistant", "content": said}]], answer=[answer]) == [float(right)]


def test_hashes_and_patterns():
    gold = "She has 3 + 4 = 7.\n#### 7"
    assert verify.hashes()(["#### 7", "7", "#### 8 #### 7.0", "####"], answer=[gold] * 4) == [1, 0, 1, 0]
    assert verify.pattern(r"a+\n?")(["aa\n", "aab", ""]) == [1, 0, 0]


def test_think_format():
    cases = ["<think>a</think> b", "<think>a", "a</think>b", "x<think>a</think>b", "<think>a\nb</think>\nc",
             "<think>a<think>b</think>c"]  # fmt: skip
    found = verify.think_format()(cases)
    assert found == [1, 0, 0, 0, 1, 0]
    trl = pytest.importorskip("trl.rewards")
    assert trl.think_format_reward([[{"content": c}] for c in cases]) == found
