"""Programs that a model wrote: those that pass their tests, those that do not, and those that misbehave."""

import socket
import subprocess
import sys

import pytest

from fdel.train.rollout.programs import program, unit_tests

ADD = "def add(a, b):\n    return a + b\n"
TESTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]
run = unit_tests(timeout=8, allow=True)
REACHABLE = """
import socket, threading
try:
    socket.create_connection(("127.0.0.1", PORT), 2)
except OSError:
    pass
else:
    raise SystemExit
"""


def test_it_must_be_allowed():
    with pytest.raises(ValueError, match="without a sandbox; pass allow=True"):
        unit_tests()


def test_which_part_is_the_program():
    fenced = "First:\n```\nx = 0\n```\nno:\n```python\nx = 1\n```\nprints\n```text\n1\n```\n"
    assert program(fenced) == "x = 1\n" and program("x = 2") == "x = 2"
    assert program("```python\nx = 1\n") is None and program("```rust\nx\n```") is None
    assert program("```python\nx\n" * 20_000) == "x\n"  # closed by the next fence, and in linear time


def test_programs_that_pass_and_that_do_not():
    future = f"from __future__ import annotations\n{ADD}"
    said = [f"So:\n```python\n{ADD}```\nDone.", ADD.replace("+", "-"), "def add(", future,
            "```rust\nfn add()\n```", ADD, "\ud800"]  # fmt: skip
    tests = [TESTS, TESTS, TESTS, "\n".join(TESTS), TESTS, None, TESTS]
    assert run(said, tests=tests) == [1, 0, 0, 1, 0, None, 0]
    chat = [[{"role": "assistant", "content": ADD}]]
    assert unit_tests("cases", allow=True)(chat, cases=[TESTS]) == [1]
    with pytest.raises(ValueError, match="no column 'tests' .found cases"):
        run(chat, cases=[TESTS])


@pytest.mark.parametrize(
    "code",
    [
        "import os\nos._exit(0)", "raise SystemExit(0)", "'''", "if False:\n    pass\nelse:\n    quit()",
        "x = bytearray(2**31)", "while True:\n    print('x' * 2**16)", "open('a', 'w').write('x' * 2**25)",
        "import os\nassert os.environ.get('HOME')", "import sys\nprint(sys.stdin.read()[0])",
    ],
)  # fmt: skip
def test_programs_that_leave_early_or_take_much_have_not_passed(code):
    assert run([f"{ADD}\n{code}"], tests=[TESTS]) == [0]


def test_one_that_hangs_is_killed():
    assert unit_tests(timeout=0.3, allow=True)(["import time\ntime.sleep(30)"], tests=[""]) == [0]


def test_one_finds_a_folder_and_an_environment_of_its_own(tmp_path):
    code = "import os\nassert os.listdir() == ['main.py'] and not set(os.environ) - {'LC_CTYPE'}"
    assert run([code], tests=[""]) == [1]


def test_no_network():
    """Where namespaces may be made; a listening socket of this machine stands for it."""
    if subprocess.run(["unshare", "-rn", "true"], capture_output=True).returncode:
        pytest.skip("this system lets nobody make a namespace")
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = REACHABLE.replace("PORT", str(server.getsockname()[1]))
        assert run([code], tests=[""]) == [1]
        assert subprocess.run([sys.executable, "-c", code + "\nraise SystemError"], capture_output=True).returncode == 0
