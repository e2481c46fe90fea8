"""Tokenized examples as flat arrays, in memory or memory-mapped, and their cache on disk."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fdel import text
from fdel.train.data import pictures
from fdel.train.data.encode import encode_rows
from fdel.train.data.files import File, Row, Source, find, sliced, span
from fdel.train.data.finish import Example
from fdel.train.data.settings import PER_TOKEN, Report, Settings
from fdel.train.data.tables import Table, open_table

CHUNK = 512  # rows that are tokenized together
NUMBERS: dict[str, dict[str, str]] = dict.fromkeys(
    ("sft", "triples", "prompt", "embedding", "process", "tagged", "spans"), {}
)
NUMBERS |= {"pairs": {"margin": "float32"}, "unpaired": {"label": "bool", "prompt": "int32"}}
NUMBERS |= {"labelled": {"labels": "float32"}}  # [targets], where that is not one
FORMAT = 4  # of the cache; another number makes caches of before invalid


@dataclass(frozen=True)
class Store:
    """Examples of `sides` sequences each: tokens int32[N] and mask bool[N], end to end; lengths int32[sequences].

    The mask of judged steps and of words is their labels, int32[N], negative where there is none. `numbers` hold a value
    per example: "label", "margin", "prompt" (the length of it), "labels" (`Settings.targets` of them). `images` are what
    the sequences show and play, None if that is nothing.
    """

    tokens: np.ndarray
    mask: np.ndarray
    lengths: np.ndarray
    numbers: dict[str, np.ndarray]
    sides: int
    report: Report
    images: pictures.Files | None = None

    @functools.cached_property
    def starts(self) -> np.ndarray:
        """Where each sequence begins in `tokens`, and where the last one ends."""
        return np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])

    def __len__(self) -> int:
        return len(self.lengths) // self.sides


def arrays(examples: Sequence[Example], settings: Settings) -> dict[str, np.ndarray]:
    """Lay examples out as the arrays of a store, by name."""
    kind = settings.kind
    flat = lambda parts, dtype: np.concatenate([np.zeros(0, dtype), *parts], dtype=dtype)
    found = {
        "tokens": flat([x for e in examples for x in e.ids], np.int32),
        "mask": flat([x for e in examples for x in e.masks], np.int32 if kind in PER_TOKEN else bool),
        "lengths": np.array([len(x) for e in examples for x in e.ids], np.int32),
    }
    if settings.sight is not None:
        found |= pictures.arrays(x for e in examples for x in e.images or ((),) * len(e.ids))
    return found | {k: np.array([e.numbers[k] for e in examples], dtype).ravel() for k, dtype in NUMBERS[kind].items()}


def store(parts: Mapping[str, np.ndarray], settings: Settings, report: Report) -> Store:
    """Make a store of its arrays."""
    numbers = {k: parts[k] for k in NUMBERS[settings.kind]}
    if settings.kind == "labelled" and settings.targets > 1:
        numbers = {k: x.reshape(-1, settings.targets) for k, x in numbers.items()}
    images = pictures.files(parts)
    return Store(parts["tokens"], parts["mask"], parts["lengths"], numbers, settings.sides, report, images)


def row_range(source: Source, before: int, total: int, table: Table, first: int = 0, step: int = 1) -> range:
    """Give the rows of a table to read, after `before` of the `total` rows of all files; `total` counts if it is sliced."""
    asked = span(source, total if sliced(source) else before + table.length)
    low, high = (min(max(n - before, 0), table.length) for n in (asked.start, asked.stop))
    return range(first + max(0, -(-(low - first) // step)) * step, high, step)


def prepare(table: Table, rows: range, source: Source, seen: set[str]) -> list[tuple[str, Row | ValueError | None]]:
    """Read rows with their places, renamed and transformed; None for a row that the transform leaves out.

    `seen` takes the names of their columns.
    """
    return [(table.place(i), _change(row, source, seen)) for i, row in zip(rows, _rows(table, rows), strict=True)]


def _rows(table: Table, rows: range) -> list[Row | ValueError]:
    """Read rows; where one of them cannot be read, one by one."""
    try:
        return table.read(rows)
    except Exception as e:
        if isinstance(e, OSError | ImportError):
            raise
        if len(rows) == 1:
            return [ValueError(f"cannot be read ({type(e).__name__}: {e})")]
    return [found for i in rows for found in _rows(table, range(i, i + 1))]


def _change(row: Row | ValueError, source: Source, seen: set[str]) -> Row | ValueError | None:
    if isinstance(row, ValueError):
        return row
    seen.update(row)
    there = {new for old, new in source.rename.items() if old in row}
    for old, new in source.rename.items():
        if old not in row and new in row.keys() - there:
            return ValueError(f"no column {old!r} to be read as {new!r} (found {', '.join(row)})")
    kept = {k: v for k, v in row.items() if k not in source.rename and k not in there}
    row = kept | {new: row[old] for old, new in source.rename.items() if old in row}
    if source.transform is None:
        return row
    try:
        return source.transform(row)
    except Exception as e:
        if isinstance(e, OSError):
            raise
        return ValueError(f"the transform failed: {type(e).__name__}: {e}")


def check_columns(source: Source, seen: set[str]) -> None:
    """Raise ValueError for a column to be renamed that no row has."""
    absent = [old for old in source.rename if old not in seen]
    if seen and absent:
        raise ValueError(f"{_name(source)}: no row has the column {absent[0]!r}; found are {', '.join(sorted(seen))}")


def tokenize(source: Source, tok: text.Tokenizer, settings: Settings) -> Iterator[tuple[list[Example], Report]]:
    """Tokenize a whole source, chunk by chunk, in order. ValueError for a column to be renamed that no row has."""
    seen: set[str] = set()

    def chunks() -> Iterator[tuple]:
        files, before = find(source), 0
        total = sum(open_table(f).length for f in files) if sliced(source) else 0
        for file in files:
            table = open_table(file)
            rows = row_range(source, before, total, table)
            before += table.length
            for i in range(0, len(rows), CHUNK):
                yield prepare(table, rows[i : i + CHUNK], source, seen), tok, settings, table.folder
        check_columns(source, seen)

    with ThreadPoolExecutor(settings.threads) as pool:
        running: deque = deque()
        for chunk in chunks():
            running.append(pool.submit(encode_rows, *chunk))
            if len(running) > settings.threads:
                yield running.popleft().result()
        yield from (future.result() for future in running)


def build(source: Source, tok: text.Tokenizer, settings: Settings) -> Store:
    """Tokenize a source into memory. ValueError if nothing of it can be learnt."""
    parts: list[Mapping[str, np.ndarray]] = []
    report = _each_part(source, tok, settings, parts.append)
    return store({k: np.concatenate([p[k] for p in parts]) for k in parts[0]}, settings, report)


def _each_part(source: Source, tok: text.Tokenizer, settings: Settings, keep: Callable[[dict], Any]) -> Report:
    """Tokenize a source and call `keep` with the arrays of each chunk. ValueError if nothing of it can be learnt."""
    report = Report()
    for examples, more in tokenize(source, tok, settings):
        keep(arrays(examples, settings))
        report += more
    if not report.kept:
        raise ValueError(f"{_name(source)}: no row can be used\n{report}")
    return report


def _name(source: Source) -> str:
    return ", ".join(dict.fromkeys(f.name for f in find(source)))


# ---- the cache -----------------------------------------------------------------------------------------------------


def cache(source: Source, tok: text.Tokenizer, settings: Settings, directory: str | Path) -> Store:
    """Tokenize a source into a folder below `directory`, once; map it into memory. ValueError as `build`.

    The folder's name is the hash of what decides about its content: the files' names, sizes and times, the settings that
    touch tokens, the tokenizer. It appears when it is complete, also if several processes write at once.
    """
    if source.transform is not None and not source.version:
        raise ValueError("a transform and a cache: give the source a version=, and change it with the transform")
    directory = Path(directory)
    folder = directory / key(source, tok, settings)
    if not folder.is_dir():
        directory.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=".part-", dir=directory))
        try:
            _write(source, tok, settings, part)
            with contextlib.suppress(OSError):  # another process was faster
                os.rename(part, folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return _read(folder, settings)


def key(source: Source, tok: text.Tokenizer, settings: Settings) -> str:
    """Hash what decides about a source's tokens."""
    seen = [_digest(f) for f in find(source)]
    of_source = {k: getattr(source, k) for k in ("format", "split", "rename", "version", "rows")}
    special = {"embedding": ("negatives",), "process": ("separator", "last_only")}
    alone = (special | {"labelled": ("labels", "problem"), "tagged": ("labels",)}).get(settings.kind, ())
    deciding = "kind", "learn", "overlong", "length", "whole", "bad_rows", "vocab", "max_prompt", "max_completion"
    of_settings = {k: getattr(settings, k) for k in (*deciding, *alone)}
    of_settings |= {} if settings.sight is None else {"sight": repr(settings.sight)}
    of_tokenizer = tok.json, dict(tok.special), dict(tok.templates)
    facts = json.dumps([FORMAT, seen, of_source, of_settings, of_tokenizer], sort_keys=True)
    return hashlib.sha256(facts.encode()).hexdigest()[:32]


def _digest(file: File) -> Any:
    """Give a file's name, size and time, if it is no copy of a remote one; of rows in memory their hash."""
    if file.format != "memory":
        stat = file.path.stat()
        return file.name, stat.st_size, 0 if "://" in file.name else stat.st_mtime_ns
    table, found = open_table(file), hashlib.sha256()
    for i in range(0, table.length, CHUNK):
        found.update(json.dumps(table.read(range(table.length)[i : i + CHUNK]), default=repr).encode())
    return found.hexdigest()


def _write(source: Source, tok: text.Tokenizer, settings: Settings, folder: Path) -> None:
    dtypes = {}

    def append(parts: dict[str, np.ndarray]) -> None:
        for name, array in parts.items():
            dtypes[name] = array.dtype.str
            with open(folder / f"{name}.bin", "ab") as file:
                file.write(array.tobytes())

    report = _each_part(source, tok, settings, append)
    index = {"dtypes": dtypes, "report": dataclasses.asdict(report)}
    (folder / "index.json").write_text(json.dumps(index, indent=2))


def _read(folder: Path, settings: Settings) -> Store:
    index = json.loads((folder / "index.json").read_text())
    parts = {k: _mapped(folder / f"{k}.bin", np.dtype(d)) for k, d in index["dtypes"].items()}
    notes = {k: (n, tuple(places)) for k, (n, places) in index["report"].pop("notes").items()}
    return store(parts, settings, Report(**index["report"], notes=notes))


def _mapped(file: Path, dtype: np.dtype) -> np.ndarray:
    return np.memmap(file, dtype, "r") if file.stat().st_size else np.zeros(0, dtype)
