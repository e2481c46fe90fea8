"""Whether two LaTeX answers are equal as mathematics: asks math-verify (extra `rewards`) in a process that can be killed.

An expression such as 9^{9^{9^9}} makes sympy compute for ever, inside of one instruction that no exception interrupts. So
the system ends the process with an alarm; the pair that it was at is unequal, and another process goes on behind it.
As a script, this file is that process, and imports no jax.
"""

import importlib.util
import json
import logging
import signal
import sys
import time
from collections.abc import Sequence

log = logging.getLogger(__name__)
MEMORY = 2**32  # bytes of address space of the process
READY = b"."


def there() -> bool:
    """Tell whether math-verify is installed, where a process can set an alarm."""
    return hasattr(signal, "setitimer") and importlib.util.find_spec("math_verify") is not None


def equal(pairs: Sequence[tuple[str, str]], *, seconds: float = 2.0, wait: float = 50.0) -> list[bool]:
    """Compare (said, answer) pairs of LaTeX without dollars; what takes more than `seconds` of computing is unequal.

    So is what is not compared after `wait` seconds. RuntimeError if math-verify cannot begin.
    """
    from fdel.train.rollout.isolated import ending, run

    end, answers = time.monotonic() + wait, b""
    while len(answers) < len(pairs) and (left := end - time.monotonic()) > 0:
        told = json.dumps({"path": sys.path, "pairs": pairs[len(answers) :], "seconds": seconds}).encode()
        code, said = run(["-P", __file__], told, timeout=left, limits={"RLIMIT_AS": MEMORY})
        if not said and code is not None:
            raise RuntimeError(f"math-verify did not begin: {ending(code)}")
        answers += said.removeprefix(READY) + b"0" * (code != 0)  # the pair that ended it
    if len(answers) < len(pairs):
        log.warning("%d of %d answers are not compared after %g s", len(pairs) - len(answers), len(pairs), wait)
    return [x == ord("1") for x in answers[: len(pairs)].ljust(len(pairs), b"0")]


def main() -> None:
    """Write a dot when math-verify is ready, and 0 or 1 for each pair; an alarm ends the process in a long one."""
    told = json.load(sys.stdin)
    sys.path[:] = told["path"]
    from math_verify import parse, verify

    logging.disable()
    equal = lambda said, answer: verify(
        *(parse(f"${x}$", parsing_timeout=None) for x in (answer, said)), timeout_seconds=None
    )
    equal("x", "x + 1")  # what it loads when it is first asked is not the pair's time
    print(READY.decode(), end="", flush=True)
    for said, answer in told["pairs"]:
        signal.setitimer(signal.ITIMER_PROF, told["seconds"])
        print(int(equal(said, answer)), end="", flush=True)
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main()
