"""The other side of `isolated`: a script that reads a function's name and arguments, and writes what it gives, or raises.

It runs by its path, without the package, so that a child imports no jax.
"""

import asyncio
import importlib
import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any


def main() -> None:
    """Answer {"error": a text or None, "rewards": a list or None} on what was stdout; prints go to stderr from here on."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    told = json.load(sys.stdin)
    sys.path[:] = told["path"]
    error = rewards = None
    try:
        given = find(told["module"], told["name"])(**told["arguments"])
        given = asyncio.run(_awaited(given)) if inspect.isawaitable(given) else given
        rewards = [None if x is None else float(x) for x in given]
    except Exception as e:
        error = f"{type(e).__name__}: {e}"
    with out:
        json.dump({"error": error, "rewards": rewards}, out)


def find(module: str, name: str) -> Callable[..., Any]:
    """Import a module, or run a file as one, and take a function of it."""
    if module.endswith(".py"):
        file = Path(module)
        sys.path.insert(0, str(file.parent))
        spec = importlib.util.spec_from_file_location(file.stem, file)
        if spec is None or spec.loader is None:
            raise ImportError(f"{module} is no Python file")
        found = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
    else:
        found = importlib.import_module(module)
    function: Any = reduce(getattr, name.split("."), found)
    return function


async def _awaited(x: Any) -> Any:
    return await x


if __name__ == "__main__":
    main()
