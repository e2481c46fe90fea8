"""Reward functions in a process of their own: what they get and give, and every way that one can fail."""

import heapq
import math
import subprocess
import sys
import time

import numpy as np
import pytest

from fdel.train.rollout import isolated
from fdel.train.rollout.isolated import isolated as make

SOURCE = """
import os, signal, sys, time
import beside

def echo(prompts, completions, answer, **columns):
    print("not an answer")
    os.write(1, b"nor this")
    return [len(c) + a + beside.ONE for c, a in zip(completions, answer)]

async def later(completions, **_):
    return [None, float("nan")]

def raises(**_):
    return 1 / 0

def dies(**_):
    os.kill(os.getpid(), signal.SIGSEGV)

def leaves(**_):
    os._exit(0)

def exits(**_):
    sys.exit(3)

def rubbish(**_):
    for fd in range(3, 12):
        try:
            os.write(fd, b"{] ")
        except OSError:
            pass
    return [1.0]

def words(**_):
    return ["good"]

def eats(**_):
    return [len(bytearray(2**31))]

def hangs(file, **_):
    if os.fork() == 0:
        time.sleep(0.9)
        open(file[0], "w").close()
    time.sleep(30)

class Kept:
    @staticmethod
    def inner(completions, **_):
        return [7] * len(completions)
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "mine.py").write_text(SOURCE)
    (folder / "beside.py").write_text("ONE = 1\n")
    return folder / "mine.py"


def test_what_it_gets_and_gives(file):
    told = {"prompts": [[{"role": "user", "content": "é"}]] * 2, "completions": ["ab", "c"]}
    assert make(f"{file}:echo")(**told, answer=np.array([1, 2]), more=(np.float32(1), None)) == [4.0, 4.0]
    none, nan = make(f"{file}:later")(**told)
    assert none is None and math.isnan(nan)
    assert make(f"{file}:Kept.inner")(completions=["x"]) == [7.0]
    assert make(heapq.nlargest)(n=2, iterable=[1, 2, 3]) == make("heapq:nlargest")(n=2, iterable=[3, 2]) == [3, 2]
    with pytest.raises(TypeError, match="a set, which JSON"):
        make(f"{file}:echo")(**told, answer=[{1}, {2}])


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("raises", "raised ZeroDivisionError"), ("dies", "signal SIGSEGV"), ("leaves", "answered b''"),
        ("exits", "code 3"), ("rubbish", "answered b'{]"), ("words", "raised ValueError: could not convert"),
        ("eats", "raised MemoryError"), ("missing", "raised AttributeError"),
    ],
)  # fmt: skip
def test_one_that_fails_says_why(file, name, why):
    with pytest.raises(RuntimeError, match=f"mine.py:{name} .*{why}"):
        make(f"{file}:{name}", memory=2**30)(completions=["x"])


def test_one_that_hangs_is_killed_with_its_children(file, tmp_path):
    late, begun = tmp_path / "late", time.monotonic()
    with pytest.raises(RuntimeError, match="took more than 0.4 s, and was killed"):
        make(f"{file}:hangs", timeout=0.4)(file=[str(late)])
    assert time.monotonic() - begun < 5
    time.sleep(max(0, begun + 1.6 - time.monotonic()))
    assert not late.exists()


def test_functions_that_cannot_be_found(file):
    with pytest.raises(ValueError, match="no file .*gone.py"):
        make(str(file.with_name("gone.py")) + ":f")
    with pytest.raises(ValueError, match="expected 'file.py:name'"):
        make("rewards")
    with pytest.raises(ValueError, match="by a name of its own"):
        make(lambda **_: [1.0])


def test_a_child_imports_no_jax(file):
    """Nor anything of fdel: a call costs a start of Python."""
    code = f"import runpy, sys; runpy.run_path({str(isolated.CHILD)!r}); print({{'jax', 'fdel'}} & {{*sys.modules}})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
