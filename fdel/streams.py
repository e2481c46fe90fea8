"""Standard streams of a command: some may be closed, and who reads the output may leave."""

import os
import sys
from typing import Any


def opened() -> None:
    """Open those that are closed, on the null device: else files take their numbers, and get what libraries write there."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free, for children too
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115


class Output:
    """Standard output whose reader may leave, as `head` does: what comes then is dropped, and the command goes on."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Write text, as long as somebody reads."""
        return self._tried(self.stream.write, text)

    def flush(self) -> None:
        """Flush, as long as somebody reads."""
        self._tried(self.stream.flush)

    def _tried(self, do: Any, *args: str) -> Any:
        try:
            return do(*args)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
            return sum(map(len, args))
