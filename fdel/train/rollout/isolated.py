"""Reward functions in a process of their own, which is killed when it takes too long; and Python programs with limits.

A thread that hangs cannot be ended, and code that exits, or runs out of memory, ends the run. A process costs a start of
Python (0.05 s, and what its module imports) each time.
"""

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

CHILD = Path(__file__).with_name("isolated_child.py")
LONGEST = 2**26  # bytes of an answer that are read
NEW_USER, NEW_NET = 0x10000000, 0x40000000  # Linux' CLONE_NEWUSER and CLONE_NEWNET

# Limits are set by the process itself, since code between fork and exec is not safe beside jax' threads; they stay when
# it then becomes the program. A limit that a platform lacks or refuses is left out, and so is a network of its own.
LAUNCH = """
import ctypes, json, os, sys
if sys.argv[2] != "0":
    try:
        ctypes.CDLL(None).unshare(int(sys.argv[2]))
    except (AttributeError, OSError):
        pass
for name, most in json.loads(sys.argv[1]).items():
    try:
        import resource
        resource.setrlimit(getattr(resource, name), (most, most))
    except (ImportError, AttributeError, ValueError, OSError):
        pass
os.execv(sys.executable, [sys.executable, *sys.argv[3:]])
"""


def isolated(function: str | Callable[..., Any], *, timeout: float = 50.0, memory: int | None = None) -> Callable:
    """Make a reward of a function that runs in a new process at each call; what it prints goes to stderr.

    It is named "file.py:name" or "module:name", or is one that a module has by its name. Arguments and rewards pass as
    JSON: texts, numbers, lists, and dicts of these; arrays become lists. `timeout` is in seconds, and had better be less
    than that of `score`; `memory` in bytes of address space. A function that uses jax had better choose the CPU, for
    this process holds the accelerators. RuntimeError for a function that raises, dies, is late, or
    gives something else; ValueError here for one that is not found by its name.
    """
    name = function if isinstance(function, str) else _name(function)
    where, _, attribute = name.rpartition(":")
    if not where or not attribute:
        raise ValueError(f"function {name!r}; expected 'file.py:name' or 'module:name'")
    file = Path(where).absolute() if where.endswith(".py") else None
    if file is not None and not file.is_file():
        raise ValueError(f"function {name!r}: there is no file {where}")
    limits = {"RLIMIT_CPU": math.ceil(timeout) + 1} | ({} if memory is None else {"RLIMIT_AS": int(memory)})
    told = {"module": where if file is None else str(file), "name": attribute}

    def reward(**arguments: Any) -> Sequence[float | None]:
        asked = told | {"path": sys.path, "arguments": _plain(arguments)}
        code, said = run(["-P", str(CHILD)], json.dumps(asked).encode(), timeout=timeout, limits=limits)
        if code is None:
            raise RuntimeError(f"{name} took more than {timeout:g} s, and was killed")
        if code != 0:
            raise RuntimeError(f"{name} ended its process with {ending(code)}")
        try:
            answer = json.loads(said)
            error, rewards = answer["error"], answer["rewards"]
        except (ValueError, TypeError, KeyError, RecursionError) as e:
            raise RuntimeError(f"{name} answered {said[:80]!r}; expected rewards as JSON") from e
        if error is not None:
            raise RuntimeError(f"{name} raised {error}")
        return rewards

    return reward


def run(
    arguments: Sequence[str],
    told: bytes = b"",
    *,
    timeout: float,
    limits: Mapping[str, int],
    network: bool = True,
    most: int = LONGEST,
    **where: Any,
) -> tuple[int | None, bytes]:
    """Run Python with arguments and limits: (exit code, or None if it was killed after `timeout`, the end of its stdout).

    `told` is its stdin; `limits` are of `resource`, by name. Without `network` it has none where Linux lets anybody make
    a namespace. All processes that it started are killed too, but for those that left its group. Files stand in for
    pipes, since a pipe that is full or never read makes one side wait for the other.
    """
    command = [
        sys.executable,
        "-I",
        "-S",
        "-c",
        LAUNCH,
        json.dumps(dict(limits)),
        str(0 if network else NEW_USER | NEW_NET),
    ]
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as said:
        given.write(told)
        given.seek(0)
        child = subprocess.Popen([*command, *arguments], stdin=given, stdout=said, start_new_session=True, **where)
        try:
            code: int | None = child.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _kill(child)
        return code, _tail(said, most)


def ending(code: int) -> str:
    """Say how a process ended: by a signal, if its code is negative, or with a code.
    >>> ending(-9)
    'signal SIGKILL'
    """
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"code {code}"


def _kill(child: subprocess.Popen) -> None:
    """Kill a process and its group, and wait for it."""
    try:
        os.killpg(child.pid, signal.SIGKILL) if hasattr(os, "killpg") else child.kill()
    except ProcessLookupError:
        pass  # it has ended, and so have its children
    child.wait()


def _tail(file: BinaryIO, most: int) -> bytes:
    file.seek(max(0, file.seek(0, os.SEEK_END) - most))
    return file.read(most)


def _name(function: Callable[..., Any]) -> str:
    """Name a function so that another process finds it."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "<unnamed>")
    if module == "__main__":
        module = getattr(sys.modules["__main__"], "__file__", None)
    if not module or "<" in name:
        raise ValueError(
            f"function {name} cannot be found by another process; put it into a file, by a name of its own"
        )
    return f"{module}:{name}"


def _plain(x: Any) -> Any:
    """Turn arrays and numbers of numpy into Python's; TypeError for what JSON cannot hold."""
    if isinstance(x, Mapping):
        return {str(k): _plain(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [_plain(v) for v in x]
    if x is None or isinstance(x, str | bool | int | float):
        return x
    if hasattr(x, "tolist"):
        return x.tolist()
    raise TypeError(
        f"a column has a {type(x).__name__}, which JSON cannot hold; leave it out, or do not isolate the reward"
    )
