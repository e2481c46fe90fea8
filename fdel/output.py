"""Standard output of the command line."""

import contextlib
import os
from typing import Any


class Output:
    """Standard output whose reader may leave, as `head` does: what comes then is dropped, and the command goes on."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        """Write text, as long as somebody reads."""
        with contextlib.suppress(BrokenPipeError):
            return self.stream.write(text)
        return self._left(len(text))

    def flush(self) -> None:
        """Flush, as long as somebody reads."""
        try:
            self.stream.flush()
        except BrokenPipeError:
            self._left()

    def _left(self, count: int = 0) -> int:
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
        return count
