"""The header of a GGUF file (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): its metadata and its tensors."""

import struct
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

MOST = 2**24  # of tensors, keys, items of an array, bytes of a string
NUMBERS = dict(
    zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True)
)  # type of a value: its struct code


class Header(NamedTuple):
    """Metadata by key; (shape, ggml's type, offset) of each tensor by name; where in the file they begin."""

    meta: dict[str, Any]
    infos: dict[str, tuple[tuple[int, ...], int, int]]
    start: int


def find(path: Path) -> Path | None:
    """Give a path that is a GGUF file, or the only one of a directory."""
    if path.is_file():
        return path if path.suffix == ".gguf" else None
    found = sorted(path.glob("*.gguf"))
    return found[0] if len(found) == 1 else None


def read(file: Path) -> Header:
    """Read the header. ValueError for what is damaged, and for sizes beyond bounds."""
    try:
        with file.open("rb") as f:
            magic, version = f.read(4), _number(f, "I")
            if magic != b"GGUF" or version not in (2, 3):
                raise ValueError(f"it begins with {magic!r}, version {version}; expected GGUF of version 2 or 3")
            tensors, keys = _count(f), _count(f)
            meta = {_text(f): _value(f, _number(f, "I")) for _ in range(keys)}
            infos: dict[str, tuple[tuple[int, ...], int, int]] = {}
            for _ in range(tensors):
                name, axes = _text(f), min(_number(f, "I"), 64)
                shape = tuple(_number(f, "Q") for _ in range(axes))[::-1]
                infos[name] = shape, _number(f, "I"), _number(f, "Q")
            step = meta.get("general.alignment", 32)
            if type(step) is not int or step < 1 or step & step - 1:
                raise ValueError(f"general.alignment is {step!r:.100}; expected a power of two")
            return Header(meta, infos, -(-f.tell() // step) * step)
    except (ValueError, TypeError, ArithmeticError, RecursionError) as e:
        raise ValueError(f"{file.name}: {e}") from e


def _number(f: BinaryIO, code: str) -> Any:
    raw = f.read(struct.calcsize(code))
    if len(raw) < struct.calcsize(code):
        raise ValueError("the file ends inside its header: truncated, fetch it again")
    return struct.unpack("<" + code, raw)[0]


def _count(f: BinaryIO) -> int:
    n = _number(f, "Q")
    if n > MOST:
        raise ValueError(f"{n:,} items in the header, expected at most {MOST:,}")
    return n


def _text(f: BinaryIO) -> str:
    n = _count(f)
    return _number(f, f"{n}s").decode(errors="replace")


def _value(f: BinaryIO, kind: int) -> Any:
    if kind == 8:
        return _text(f)
    if kind == 9:
        inner, n = _number(f, "I"), _count(f)
        return [_value(f, inner) for _ in range(n)]
    if kind not in NUMBERS:
        raise ValueError(f"a value of type {kind} in the header; known are 0 to 12")
    return _number(f, NUMBERS[kind])
