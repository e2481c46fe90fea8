"""Checkpoint files: which tensors a checkpoint holds, and their bytes. Knows files, not specs (`hf` does).

A safetensors file is 8 bytes (header length, little endian), a JSON header {name: {dtype, shape, data_offsets}} and the
tensors' bytes (https://github.com/huggingface/safetensors, "Format"). The header is read here because the library
maps whole files into memory, which counts against the host's peak, and gives no offsets to read into a given array.
"""

import json
import math
import os
import re
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fdel.gguf import find

from . import gguf
from .tensor import DTYPES, NAMES, CheckpointError, Tensor

MAX_HEADER = 100_000_000  # the limit of the safetensors library
MAX_TENSORS, MAX_AXES = 2**18, 64  # of a file, of a tensor


Header = Callable[[Path, list[str]], dict[str, Tensor]]  # reads one file, appends what is wrong with it to the list


def _readinto(file: Path, start: int, out: np.ndarray, at: int) -> None:
    view = out.data
    with file.open("rb", buffering=0) as f:
        f.seek(start + at)
        while view:
            n = f.readinto(view)
            if not n:
                raise CheckpointError(file, ["the file ended while it was being read; did something rewrite it?"])
            view = view[n:]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a key occurs twice")
    return out


def json_object(file: Path, raw: bytes, problems: list[str]) -> dict[str, Any]:
    """Parse a JSON object; append what is wrong with it to `problems`."""
    try:
        value = json.loads(raw, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as e:
        problems.append(f"{file.name}: not valid JSON: {e}")
        return {}
    if not isinstance(value, dict):
        problems.append(f"{file.name}: expected a JSON object, found {type(value).__name__}")
        return {}
    return value


def _natural(xs: Any) -> bool:
    return isinstance(xs, list) and all(type(x) is int and x >= 0 for x in xs)


def _entry(entry: Any) -> tuple[tuple[int, ...], np.dtype, int, int]:
    """Check one header entry; a ValueError says what is wrong with it."""
    if not isinstance(entry, dict) or not _natural(entry.get("shape")) or not _natural(entry.get("data_offsets")):
        raise ValueError(f"expected dtype, shape and data_offsets of natural numbers, found {str(entry)[:100]}")
    if len(entry["shape"]) > MAX_AXES:
        raise ValueError(f"{len(entry['shape'])} axes, expected at most {MAX_AXES}")
    if len(entry["data_offsets"]) != 2 or str(entry.get("dtype")) not in DTYPES:
        raise ValueError(f"dtype {entry.get('dtype')!r} or offsets {entry['data_offsets']} are not supported")
    (begin, end), dtype, shape = entry["data_offsets"], DTYPES[entry["dtype"]], tuple(entry["shape"])
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{entry['dtype']}{list(shape)} does not take bytes {begin} to {end}")
    return shape, dtype, begin, end


def safetensors_header(file: Path, problems: list[str], most: int = MAX_HEADER) -> dict[str, Tensor]:
    """Read which tensors a safetensors file holds, in file order; append what is wrong with it to `problems`.

    `most` is the most bytes that the header may have. As in the safetensors library, tensors must cover the file without
    overlap, hole or rest.
    """
    size = file.stat().st_size
    with file.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if size < 8 or length > size - 8:
            problems.append(f"{file.name}: {size} bytes cannot hold a header of {length}; no safetensors, or truncated")
            return {}
        if length > most:
            problems.append(f"{file.name}: a header of {length:,} bytes; expected {most:,} at most")
            return {}
        entries = json_object(file, f.read(length), problems)
    if len(entries) > MAX_TENSORS:
        problems.append(f"{file.name}: the header names {len(entries)} tensors, expected at most {MAX_TENSORS}")
        return {}
    found: dict[str, tuple[tuple[int, ...], np.dtype, int, int]] = {}
    bad = len(problems)
    for name, entry in entries.items():
        if name != "__metadata__":
            try:
                found[name] = _entry(entry)
            except ValueError as e:
                problems.append(f"{file.name}: {name}: {e}")
    at, data = 0, size - 8 - length
    out = {}
    for name, (shape, dtype, begin, end) in sorted(found.items(), key=lambda item: item[1][2:]):
        if begin != at and bad == len(problems):
            problems.append(f"{file.name}: {name} begins at byte {begin}, expected {at} (overlap or hole)")
        if end > data:
            problems.append(f"{file.name}: {name} ends at byte {end}, the file at {data}: truncated, fetch it again")
        at, out[name] = end, Tensor(shape, dtype, file, partial(_readinto, file, 8 + length + begin))
    if at < data and bad == len(problems):
        problems.append(f"{file.name}: {data - at} bytes follow the last tensor")
    return out


def _copy(flat: Any, out: np.ndarray, at: int) -> None:
    out[...] = flat[at : at + out.size].numpy()


def bin_header(file: Path, problems: list[str]) -> dict[str, Tensor]:
    """Read which tensors a .bin file holds, without running code in it; append what does not fit to `problems`.

    Without torch: ImportError.
    """
    try:
        import torch
    except ImportError as e:
        fix = "pip install 'fdel[torch]', or convert it to safetensors where PyTorch is installed"
        raise ImportError(f"{file} needs PyTorch: {fix}") from e
    try:
        # Only the zip format (since 2020) can be mapped; its bytes are then read when they are asked for.
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except Exception as e:  # UnpicklingError, RuntimeError, EOFError or ValueError, by kind of damage
        why = f"{file.name}: torch.load(weights_only=True) refused it: {' '.join(str(e).split())[:300]}"
        raise CheckpointError(file, [why]) from e
    dtypes = {dtype.name: dtype for dtype in DTYPES.values()}
    out = {}
    for name, t in state.items() if isinstance(state, dict) else [("the file", state)]:
        dtype = dtypes.get(str(t.dtype).removeprefix("torch.")) if isinstance(t, torch.Tensor) else None
        if dtype is None:
            what = f"a tensor of {t.dtype}" if isinstance(t, torch.Tensor) else type(t).__name__
            problems.append(f"{file.name}: {name} is {what}, expected a flat dict of dense tensors")
            continue
        flat = t.detach().contiguous().reshape(-1).view(torch.uint8)
        out[name] = Tensor(tuple(t.shape), dtype, file, partial(_copy, flat))
    return out


def _indexed(index: Path, header: Header, problems: list[str]) -> dict[str, Tensor]:
    where = json_object(index, index.read_bytes(), problems).get("weight_map")
    # A path in the index must not lead out of the directory.
    inside = lambda f: isinstance(f, str) and re.fullmatch(r"[\w.-]+", f)
    if not isinstance(where, dict) or not all(map(inside, where.values())):
        problems.append(f"{index.name}: expected a weight_map of tensor names to names of files in the same directory")
        return {}
    out: dict[str, Tensor] = {}
    for name in sorted(set(where.values())):
        file = index.parent / name
        if not file.is_file():
            problems.append(f"{name} does not exist, but {index.name} names it")
            continue
        bad = len(problems)
        found = header(file, problems)
        if bad == len(problems):
            lost = (t for t, f in where.items() if f == name and t not in found)
            problems.extend(f"{index.name} places {t} in {name}, which does not hold it" for t in lost)
        out.update((t, tensor) for t, tensor in found.items() if where.get(t, name) == name)
    return out


def scan(path: Path, problems: list[str]) -> dict[str, Tensor]:
    """Do what `tensors` does, but append what is wrong to `problems`."""
    if path.is_file() and path.suffix != ".gguf":
        return (safetensors_header if path.suffix == ".safetensors" else bin_header)(path, problems)
    for name, header in ("model.safetensors", safetensors_header), ("pytorch_model.bin", bin_header):
        if (path / name).is_file():
            return header(path / name, problems)
        if (path / f"{name}.index.json").is_file():
            return _indexed(path / f"{name}.index.json", header, problems)
    if file := find(path):
        return gguf.header(file, problems, _readinto)
    seen = sorted(f.name for f in path.iterdir())[:10] if path.is_dir() else "no such directory"
    raise FileNotFoundError(f"{path}: no model.safetensors, pytorch_model.bin or index of either; found {seen}")


def tensors(path: str | Path) -> dict[str, Tensor]:
    """Give the tensors of a checkpoint by name, in file order: a directory in hub layout, or one file.

    Only headers are read. safetensors are preferred over .bin. A directory without a checkpoint is a FileNotFoundError,
    a malformed one a `CheckpointError`.
    """
    problems: list[str] = []
    found = scan(Path(path), problems)
    if problems:
        raise CheckpointError(path, problems)
    return found


Entries = Mapping[str, tuple[tuple[int, ...], np.dtype]]


def _order(entries: Entries) -> list[str]:
    """Wide elements first, so that every tensor is aligned to its element; then by name, as the library does."""
    return sorted(entries, key=lambda name: (-entries[name][1].itemsize, name))


def write_safetensors(
    file: Path, entries: Entries, fetch: Callable[[str], np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Write a safetensors file, one tensor at a time: `fetch(name)` gives the array that `entries` announces."""
    names = _order(entries)
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    at = 0
    for name in names:
        shape, dtype = entries[name]
        end = at + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    with file.open("wb") as f:
        f.write(len(raw).to_bytes(8, "little") + raw)
        for name in names:
            f.write(np.ascontiguousarray(fetch(name)).reshape(-1).view(np.uint8).data)
        f.flush()
        os.fsync(f.fileno())


def _split(sizes: Mapping[str, int], shard_bytes: int) -> dict[str, list[str]]:
    """Distribute tensors over files in natural order (layer 2 before 10), each file up to `shard_bytes`."""
    groups: list[list[str]] = [[]]
    total = 0
    for name in sorted(sizes, key=lambda n: [int(s) if s.isdigit() else s for s in re.split(r"(\d+)", n)]):
        if groups[-1] and total + sizes[name] > shard_bytes:
            groups.append([])
            total = 0
        groups[-1].append(name)
        total += sizes[name]
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i:05}-of-{len(groups):05}.safetensors": group for i, group in enumerate(groups, 1)}


def _publish(new: Path, path: Path, names: list[str]) -> None:
    """Move complete files to their final names; a crash leaves the old checkpoint, the new one, or none that loads."""
    single, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if single.name not in names:
        index.unlink(missing_ok=True)  # without it nobody reads a mixture of old and new files
        single.unlink(missing_ok=True)
    for name in sorted(names):  # the index comes last
        os.replace(new / name, path / name)
    for old in [index, *path.glob("model-*-of-*.safetensors")]:
        if old.name not in names:
            old.unlink(missing_ok=True)


def write_checkpoint(
    path: Path | None, entries: Entries, fetch: Callable[[str], np.ndarray], shard_bytes: int,
    metadata: Mapping[str, str],
) -> None:  # fmt: skip
    """Write tensors into directory `path` in hub layout, in place of any checkpoint there; None: only fetch them."""
    sizes = {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in entries.items()}
    if shard_bytes < 1:
        raise ValueError(f"files of {shard_bytes} bytes; expected 1 or more")
    files = _split(sizes, shard_bytes)
    if path is None:
        for names in files.values():
            for name in _order({name: entries[name] for name in names}):
                fetch(name)
        return
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=path) as tmp:
        for file, names in files.items():
            write_safetensors(Path(tmp, file), {name: entries[name] for name in names}, fetch, metadata)
        if len(files) > 1:
            where = {name: file for file, names in files.items() for name in names}
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": dict(sorted(where.items()))}
            Path(tmp, "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        _publish(Path(tmp), path, os.listdir(tmp))
