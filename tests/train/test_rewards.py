"""Rewards: called as TRL calls them, side by side; one that raises, hangs or miscounts fails its samples alone."""

import asyncio
import math
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import replace

import numpy as np
import pytest

from fdel.train.rollout import Sample, Task
from fdel.train.rollout.rewards import score


def sample(i, said=(1, 2), row=None, **more):
    tokens, drawn = np.array([9, *said], np.int32), np.array([False] + [True] * len(said))
    zeros = np.zeros(len(tokens), np.float32)
    return Sample(Task(i, (9,), row or {}), 0, tokens, drawn, zeros, zeros, drawn - 1, "stop", **more)


ROWS = [{"prompt": f"p{i}", "answer": i} for i in range(4)]
SAMPLES = [sample(i, (1,) * (i + 1), row) for i, row in enumerate(ROWS)]


def test_functions_are_called_as_trl_calls_them():
    seen = {}

    def f(prompts, completions, completion_ids, **columns):
        seen.update(prompts=prompts, completions=completions, ids=completion_ids, columns=columns)
        return [1.0, None, 3.0, math.nan]

    async def g(completion_ids, **_):
        await asyncio.sleep(0.01)
        return [len(x) for x in completion_ids]

    found = score({"f": f, "g": g}, SAMPLES, lambda ids: "x" * len(ids), weights=[1.0, 0.5])
    assert seen == {
        "prompts": ["p0", "p1", "p2", "p3"], "completions": ["x", "xx", "xxx", "xxxx"],
        "ids": [[1], [1, 1], [1, 1, 1], [1, 1, 1, 1]], "columns": {"answer": [0, 1, 2, 3]},
    }  # fmt: skip
    np.testing.assert_array_equal(found.each, [[1, np.nan, 3, np.nan], [1, 2, 3, 4]])
    np.testing.assert_array_equal(found.total, [1.5, 1, 4.5, 2])
    assert found.names == ("f", "g") and found.failed == {"f": 0, "g": 0}
    chat = [sample(0, row={"prompt": [{"role": "user", "content": "hi"}]})]
    score({"f": lambda **k: seen.update(k) or [0]}, chat, lambda ids: "hello")
    assert seen["completions"] == [[{"role": "assistant", "content": "hello"}]]


def test_one_that_fails_fails_alone():
    hung = threading.Event()
    bad = {
        "raises": lambda **k: 1 / 0, "hangs": lambda **k: hung.wait(30), "miscounts": lambda **k: [1.0],
        "words": lambda **k: ["good"] * 4, "infinite": lambda **k: [math.inf, 1, 1, 1],
    }  # fmt: skip
    begun = time.monotonic()
    found = score({**bad, "good": lambda **k: [2] * 4}, SAMPLES, timeout=0.3, most_failed=1.0)
    assert time.monotonic() - begun < 5
    assert found.failed == {"raises": 4, "hangs": 4, "miscounts": 4, "words": 4, "infinite": 1, "good": 0}
    np.testing.assert_array_equal(found.total, [2, 3, 3, 3])
    for name, why in (
        ("raises", "ZeroDivisionError"),
        ("hangs", "0.3 s"),
        ("miscounts", "1 rewards for 4"),
        ("words", "good"),
    ):
        with pytest.raises(RuntimeError, match=f"{name} failed for 4 of 4 samples: .*{why}"):
            score({name: bad[name]}, SAMPLES, timeout=0.3)
    hung.set()


def test_what_is_computed_late_is_late():
    """A function that yields, or gives arrays that are not there yet, hangs in its own thread."""
    hung = threading.Event()

    def later(**_):
        yield from (1.0, 1.0, 1.0, 1.0 if hung.wait(30) else 0.0)

    begun = time.monotonic()
    assert score({"later": later}, SAMPLES, timeout=0.2, most_failed=1.0).failed == {"later": 4}
    assert time.monotonic() - begun < 5
    hung.set()
    np.testing.assert_array_equal(score({"later": later}, SAMPLES).total, [1, 1, 1, 1])


def test_functions_do_not_see_what_others_change():
    gone = threading.Event()

    def clears(completions, answer, **_):
        completions.clear()
        answer.clear()
        gone.set()
        return [0] * 4

    found = score({"clears": clears, "counts": lambda answer, **_: gone.wait(9) and answer}, SAMPLES)
    np.testing.assert_array_equal(found.total, [0, 1, 2, 3])


def test_errors_say_what_was_raised():
    def asks(**_):
        raise TimeoutError("no answer from the judge")

    with pytest.raises(RuntimeError, match="asks failed for 4 of 4 samples: TimeoutError: no answer") as e:
        score({"asks": asks}, SAMPLES)
    assert traceback.extract_tb(e.value.__cause__.__traceback__)[-1].name == "asks"
    with pytest.raises(ValueError, match="2 weights for 1 reward functions"):
        score({"asks": asks}, SAMPLES, weights=[1.0, 2.0])


def test_environments_and_errors():
    some = [replace(SAMPLES[0], reward=2.0), replace(SAMPLES[1], finish="error"), *SAMPLES[2:]]
    found = score({"f": lambda **k: [1, 1, 1, None]}, some)
    assert found.names == ("f", "environment")
    np.testing.assert_array_equal(found.total, [3, np.nan, 1, np.nan])
    np.testing.assert_array_equal(score({}, some).total, [2, np.nan, np.nan, np.nan])
    with pytest.raises(ValueError, match="no reward function"):
        score({}, SAMPLES)


@pytest.mark.slow
def test_what_hangs_keeps_no_interpreter_from_ending():
    """Neither a thread that sleeps, nor an event loop that waits."""
    code = """
import asyncio, time
from fdel.train.rollout.rewards import score
from tests.train.test_rewards import SAMPLES
async def waits(**_):
    await asyncio.sleep(100)
print(score({"waits": waits, "sleeps": lambda **_: time.sleep(100)}, SAMPLES, timeout=0.1, most_failed=1).failed)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "{'waits': 4, 'sleeps': 4}\n"
