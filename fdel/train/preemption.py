"""Notice that this run is to end: SIGTERM, Ctrl-C, or the preemption service of jax.distributed."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

import jax


@contextlib.contextmanager
def listen() -> Iterator[list[int]]:
    """Collect SIGTERM and SIGINT instead of dying of them; a second one does what it did before.

    Where jax.distributed runs, its own service hears SIGTERM, so that all processes stop at the same step.
    """
    caught: list[int] = []
    usual: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread() and not jax.distributed.is_initialized():

        def note(number: int, frame: Any) -> None:
            caught.append(number)
            signal.signal(number, usual[number])

        usual = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield caught
    finally:
        for number, action in usual.items():
            signal.signal(number, action)


def signalled(caught: list[int], step: int) -> int:
    """Return the signal to stop for after this step, 0 if there is none; the same on every process."""
    if not jax.distributed.is_initialized():
        return caught[0] if caught else 0
    from jax.experimental import multihost_utils

    return signal.SIGTERM if multihost_utils.reached_preemption_sync_point(step) else 0
