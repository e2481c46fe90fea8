"""The header of a GGUF model (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): its metadata and its tensors.

A model may lie in several files, NAME-00001-of-00003.gguf and so on (llama.cpp's tools/gguf-split). Each says which one it
is (split.no, from 0), how many there are (split.count) and how many tensors these hold together (split.tensors.count); the
first has all other metadata.
"""

import re
import struct
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

MOST = 2**24  # of tensors, keys, items of an array, bytes of a string
NUMBERS = dict(
    zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True)
)  # type of a value: its struct code
SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


class Info(NamedTuple):
    """A tensor's shape, its ggml type, and where its bytes begin, from the beginning of which file."""

    shape: tuple[int, ...]
    kind: int
    file: Path
    offset: int


class Header(NamedTuple):
    """Metadata by key, and tensors by name."""

    meta: dict[str, Any]
    infos: dict[str, Info]


def find(path: Path) -> Path | None:
    """Give a path that is a GGUF file, or the only model of a directory; of a model in several files, the first of them."""
    if path.is_file():
        return _files(path)[0] if path.suffix == ".gguf" else None
    found = {_files(file)[0] for file in path.glob("*.gguf")}
    return found.pop() if len(found) == 1 else None


def read(file: Path) -> Header:
    """Read the header of a model, whichever of its files is given.

    ValueError for what is damaged, for sizes beyond bounds, and for files that are missing or do not belong together.
    """
    files = _files(file)
    lacking = [f.name for f in files if not f.is_file()]
    if lacking:
        some = ", ".join(lacking[:5]) + (f" and {len(lacking) - 5} more" if len(lacking) > 5 else "")
        raise ValueError(f"{some} not found; the model is in {len(files)} files: fetch them all into one directory")
    headers = [_one(f) for f in files]
    for i, (f, (meta, _)) in enumerate(zip(files, headers, strict=True)):
        no, count = meta.get("split.no"), meta.get("split.count")
        if (no, count) != (i, len(files)) and (len(files) > 1 or count not in (None, 1)):
            want = (
                f"split.no {i}, split.count {len(files)}" if len(files) > 1 else "a name as model-00001-of-00003.gguf"
            )
            raise ValueError(f"{f.name}: split.no is {no!r:.100}, split.count {count!r:.100}; expected {want}: it was "
                             "renamed, or is of another set of files")  # fmt: skip
    total, infos = sum(len(own) for _, own in headers), dict[str, Info]()
    for f, (meta, own) in zip(files, headers, strict=True):
        said = meta.get("split.tensors.count")
        if len(files) > 1 and said != total:
            raise ValueError(f"{f.name}: split.tensors.count is {said!r:.100}, but the files hold {total}: they are not of "
                             "one model, or one was changed")  # fmt: skip
        if twice := sorted(infos.keys() & own.keys()):
            raise ValueError(f"{f.name}: {twice[0]} is in {infos[twice[0]].file.name} too; they are not of one model")
        infos |= own
    return Header(headers[0].meta, infos)


def _files(file: Path) -> list[Path]:
    """Name all files of the model of which this is one."""
    match = SPLIT.fullmatch(file.name)
    if match is None or not 0 < int(match[2]) <= int(match[3]):
        return [file]
    return [file.with_name(f"{match[1]}-{i:05}-of-{match[3]}.gguf") for i in range(1, int(match[3]) + 1)]


def _one(file: Path) -> Header:
    """Read the header of one file."""
    try:
        with file.open("rb") as f:
            magic, version = f.read(4), _number(f, "I")
            if magic != b"GGUF" or version not in (2, 3):
                raise ValueError(f"it begins with {magic!r}, version {version}; expected GGUF of version 2 or 3")
            tensors, keys = _count(f), _count(f)
            meta = {_text(f): _value(f, _number(f, "I")) for _ in range(keys)}
            infos: dict[str, Info] = {}
            for _ in range(tensors):
                name, axes = _text(f), min(_number(f, "I"), 64)
                if name in infos:
                    raise ValueError(f"{name:.100} occurs twice")
                shape = tuple(_number(f, "Q") for _ in range(axes))[::-1]
                infos[name] = Info(shape, _number(f, "I"), file, _number(f, "Q"))
            step = meta.get("general.alignment", 32)
            if type(step) is not int or step < 1 or step & step - 1:
                raise ValueError(f"general.alignment is {step!r:.100}; expected a power of two")
            start = -(-f.tell() // step) * step
            return Header(meta, {n: x._replace(offset=start + x.offset) for n, x in infos.items()})
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
