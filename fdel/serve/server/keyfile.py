"""The file of API keys, which a server, `fdel keys` and an editor may change at the same time."""

import fcntl
import json
import logging
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from fdel.serve.server.auth import Key

log = logging.getLogger(__name__)

EVERY = 0.5  # seconds between two looks at the file
SETTLED = 2.0  # seconds after which a change of the file shows in its times
WAIT = 10.0  # seconds to wait for another process that changes it


def save(path: str | Path, keys: Iterable[Key]) -> None:
    """Write keys to a file that only its owner can read; a crash leaves the old file or the new one."""
    path = Path(path).resolve()
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        json.dump([asdict(key) for key in keys], file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def load(path: str | Path) -> dict[str, Key]:
    """Read keys, by their hash. ValueError for a file that others can read, or that holds something else."""
    path = Path(path)
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        raise ValueError(f"{path} is no file of keys: it is no regular file")
    if mode & 0o077:
        raise ValueError(f"{path} has the mode {mode & 0o777:04o}, so others can read it; run: chmod 600 {path}")
    try:
        keys = [Key(**row) for row in json.loads(path.read_text("utf-8"))]
    except (TypeError, json.JSONDecodeError, UnicodeDecodeError, RecursionError) as e:
        raise ValueError(f"{path} is no file of keys, or a damaged one: {type(e).__name__}") from e
    found = {key.hash: key for key in keys}
    if len(found) < len(keys) or len({key.id for key in keys}) < len(keys):
        raise ValueError(f"{path} holds a key twice; remove one")
    return found


def change(path: str | Path, edit: Callable[[dict[str, Key]], Mapping[str, Key]]) -> None:
    """Replace keys by what `edit` makes of those that the file holds now, none if it is not there; one writer at a time.

    OSError if another process changes it for more than WAIT seconds.
    """
    path = Path(path).resolve()
    lock, end = path.with_name(f".{path.name}.lock"), time.monotonic() + WAIT
    with open(os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)) as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise OSError(f"another process holds {lock}; end it, or wait for it") from None
                time.sleep(0.02)
        save(path, edit(load(path) if path.exists() else {}).values())


@dataclass
class Watch:
    """Tells when the file has changed. What cannot be read changes nothing, and is written to the log once."""

    path: Path
    seen: tuple[int, ...] = ()  # the file that was read last
    looked: float = float("-inf")
    said: str = ""  # what the log has of it

    def changed(self, now: float | None = None) -> dict[str, Key] | None:
        """Return the keys of a file that has changed, or None. With a time, of any clock, it is not looked at too often."""
        if now is not None:
            if 0 <= now - self.looked < EVERY:
                return None
            self.looked = now
        try:
            found = _signature(self.path)
            if found == self.seen:
                return None
            keys = load(self.path)
        except (OSError, ValueError) as e:
            if str(e) != self.said:
                log.error("the API keys stay as they were, since their file cannot be read: %s", e)
            self.said = str(e)
            return None
        # The file system's clock is coarse: what was written just now may be written again without a trace.
        self.seen, self.said = found if time.time() - found[-1] / 1e9 > SETTLED else (), ""
        return keys


def _signature(path: Path) -> tuple[int, ...]:
    s = os.stat(path)
    return s.st_ino, s.st_dev, s.st_size, s.st_mode, s.st_mtime_ns, s.st_ctime_ns
