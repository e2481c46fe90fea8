"""Rewards of programs: what a model wrote runs with the tests of its row, in a process with limits."""

import math
import secrets
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

from fdel.train.rollout.isolated import run
from fdel.train.rollout.verify import Verifier, column_of, texts

FILE_BYTES, FILES, TAIL = 2**24, 64, 2**12


def unit_tests(
    column: str = "tests", *, timeout: float = 10.0, memory: int = 2**30, processes: int = 4, allow: bool = False
) -> Verifier:
    """Reward completions whose Python passes the tests in a column: 1 if all pass, 0 otherwise, None without tests.

    Tests are Python, one text or a list of them, that follow the program and raise where it is wrong. Each program has a
    process and a new folder of its own, an empty environment, `timeout` seconds, `memory` bytes, no network where Linux
    lets anybody make a namespace, and `processes` of them run at once. A program that exits before its tests have passed
    has not passed them.

    This is no sandbox: such a program reads and writes what the user of this process may, can start processes that
    outlive it, and can cheat if it looks for how it is judged. So nothing runs without `allow=True`, which belongs into a
    container or a virtual machine that holds nothing of value.
    """
    if allow is not True:
        raise ValueError(
            "unit_tests runs programs that a model wrote on this machine, with limits but without a sandbox; "
            "pass allow=True in a container that holds nothing of value"
        )
    limits = {"RLIMIT_CPU": math.ceil(timeout), "RLIMIT_AS": int(memory), "RLIMIT_FSIZE": FILE_BYTES,
              "RLIMIT_NOFILE": FILES, "RLIMIT_CORE": 0}  # fmt: skip

    def passed(said: str, tests: Any) -> float | None:
        if tests is None:
            return None
        code = program(said)
        return 0.0 if code is None else float(passes(code, tests, timeout, limits))

    def verify(completions: Sequence[Any], **columns: Any) -> list[float | None]:
        with ThreadPoolExecutor(processes) as pool:  # none of its threads outlives `timeout`
            return list(pool.map(passed, texts(completions), column_of(columns, column)))

    return verify


def program(text: str) -> str | None:
    """Find the last fenced block of Python, or of no language; all of the text if it has no fence, None if none fits.
    >>> program("So:\\n```python\\nx = 1\\n```")
    'x = 1\\n'
    """
    found, name, lines = (None if "```" in text else text), None, []
    for line in text.splitlines(keepends=True):
        if not line.lstrip().startswith("```"):
            lines.append(line)
        elif name is None:
            name, lines = line.strip().strip("`").lower(), []
        else:
            found = "".join(lines) if name in ("", "py", "python", "python3") else found
            name = None
    return found


def passes(code: str, tests: str | Sequence[str], timeout: float, limits: dict[str, int]) -> bool:
    """Run a program and its tests, and tell whether the end was reached: where it says a word that none can guess."""
    word = secrets.token_hex(16)
    lines = [code, *([tests] if isinstance(tests, str) else tests), f"__import__('os').write(1, b'{word}')"]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        Path(folder, "main.py").write_bytes("\n\n".join(lines).encode("utf-8", "replace"))
        _, said = run(
            ["-I", "main.py"],
            timeout=timeout,
            limits=limits,
            network=False,
            most=TAIL,
            stderr=DEVNULL,
            cwd=folder,
            env={},
        )
    return word.encode() in said
