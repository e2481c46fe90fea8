"""Functions of others, in threads of their own: they may hang, and keep no interpreter from ending."""

import asyncio
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


def aside(f: Callable[..., Any], *args: Any, **named: Any) -> Future:
    """Call a function, sync or async, in a thread of its own."""
    future: Future = Future()

    def call() -> None:
        try:
            result = f(*args, **named)
            future.set_result(asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result)
        except BaseException as e:
            future.set_exception(e)

    threading.Thread(target=call, name="fdel-aside", daemon=True).start()
    return future


async def _awaited(x: Any) -> Any:
    return await x
