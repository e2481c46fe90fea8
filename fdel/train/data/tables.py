"""Open a file of any format as a table of rows, which are asked for by number, in rising order.

Nothing is kept in memory but the places of lines, the last row group of a parquet file, or all of a csv, json or compressed
file.
"""

import csv
import gzip
import io
import json
import mmap
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from fdel.train.data.files import File, Row

SCAN = 2**26  # bytes looked at together for ends of lines
LONGEST = 2**25  # bytes of a line, which takes many times that to parse
RATIO, FLOOR = 100, 2**26  # how many times its size, and how many bytes anyway, a compressed file may hold


@dataclass(frozen=True)
class Table:
    """An opened file. `read(range)` gives each row as a dict, or as the ValueError that it is; `line` says where it is.

    `folder` is that of the file, below which its rows may name others; None if it is no local file.
    """

    name: str
    length: int
    read: Callable[[range], list[Row | ValueError]]
    line: Callable[[int], int] = lambda row: row + 1
    folder: Path | None = None

    def place(self, row: int) -> str:
        """Say where a row stands, for people."""
        return f"{self.name}:{self.line(row)}"


def open_table(file: File) -> Table:
    """Open a file; ValueError if it is not of its format. Parquet and arrow need the extra `data`."""
    lines = {"jsonl": partial(_lines, parse=_object), "text": partial(_lines, parse=_text)}
    readers: dict[str, Callable[[File], Table]] = lines | {"json": _json, "csv": _csv, "memory": _memory}
    readers |= {"parquet": _parquet, "arrow": _arrow}
    if file.format not in readers:
        raise ValueError(f"{file.name}: unknown format {file.format!r}; expected one of {', '.join(readers)}")
    here = file.format != "memory" and "://" not in file.name
    return replace(readers[file.format](file), folder=file.path.parent if here else None)


def _bytes(file: File) -> Any:
    """Map a file into memory; a compressed one is read."""
    if file.name.endswith(".gz"):
        most = max(FLOOR, RATIO * file.path.stat().st_size)
        try:
            with gzip.open(file.path) as f:
                data = f.read(most + 1)
        except (EOFError, zlib.error) as e:
            raise ValueError(f"{file.name} is damaged: {e}") from e
        _bounded(file, len(data))
        return data
    with open(file.path, "rb") as f:
        return mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) if file.path.stat().st_size else b""


def _bounded(file: File, size: int) -> None:
    packed = file.path.stat().st_size
    if size > max(FLOOR, RATIO * packed):
        raise ValueError(
            f"{file.name}: {packed:,} bytes hold more than {RATIO} times as many when they are decompressed, which is "
            "refused; if that is right, decompress the file yourself"
        )


def _lines(file: File, parse: Callable[[bytes], Row | ValueError]) -> Table:
    """Index the lines that are not empty; each is parsed when it is asked for."""
    data = _bytes(file)
    view = np.frombuffer(data, np.uint8)
    breaks = [np.flatnonzero(view[i : i + SCAN] == 10) + i for i in range(0, len(view), SCAN)]
    ends = np.concatenate([*breaks, np.array([len(view)])])
    starts = np.concatenate([[0], ends[:-1] + 1])
    size = ends - starts
    returns = (size == 1) & (view[np.minimum(starts, len(view) - 1)] == 13) if len(view) else size == 1
    numbers = np.flatnonzero((size > 0) & ~returns)

    def line(i: int) -> Row | ValueError:
        if size[i] > LONGEST:
            return ValueError(f"a line of {size[i]:,} bytes, the most is {LONGEST:,}; split the row")
        return parse(data[starts[i] : ends[i]])

    read = lambda rows: [line(i) for i in numbers[rows.start : rows.stop : rows.step]]
    return Table(file.name, len(numbers), read, lambda row: int(numbers[row]) + 1)


def _object(line: bytes) -> Row | ValueError:
    try:
        row = json.loads(line)
    except RecursionError:
        return ValueError("JSON that is nested too deeply")
    except ValueError as e:
        return ValueError(f"not JSON ({e})")
    return row if isinstance(row, dict) else ValueError(f"expected a JSON object, found {type(row).__name__}")


def _text(line: bytes) -> Row | ValueError:
    try:
        return {"text": line.decode().removesuffix("\r")}
    except UnicodeDecodeError:
        return ValueError("not UTF-8")


def _json(file: File) -> Table:
    """Read a list of objects, an object with such a list as "data", or (under this suffix, too) one object per line."""
    data = _bytes(file)
    first = data[: max(data.find(b"\n"), 0)]
    by_line = len(first) <= LONGEST and isinstance(_object(first), dict) and re.compile(rb"\S").search(data, len(first))
    if by_line or re.search(r"\.(jsonl|ndjson)(\.gz)?$", file.name):
        return _lines(file, _object)
    try:
        content = json.loads(bytes(data))
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{file.name} is neither JSON nor JSON lines: {e}") from e
    if isinstance(content, dict):
        content = content["data"] if isinstance(content.get("data"), list) else [content]
    odd = lambda row: row if isinstance(row, dict) else ValueError(f"expected an object, found {type(row).__name__}")
    return Table(file.name, len(content), lambda rows: [odd(content[i]) for i in rows])


def _csv(file: File) -> Table:
    # What is no UTF-8 becomes lone surrogates, so that only the rows which are read for it are lost.
    text = io.StringIO(bytes(_bytes(file)).decode("utf-8-sig", "surrogateescape"), newline="")
    reader = csv.reader(text, delimiter="\t" if ".tsv" in file.name else ",", strict=True)
    content: list = []
    row: list[str] | ValueError | None = []
    lines, before = [], 0
    while row is not None:
        try:
            row = next(reader, None)
        except csv.Error as e:  # the reader goes on with the next line
            row = ValueError(f"not CSV, in lines {before + 1} to {reader.line_num}: {e}")
        if row:
            content.append(row)
            lines.append(before + 1)
        before = reader.line_num
    if content and isinstance(content[0], ValueError):
        raise ValueError(f"{file.name}: its header is {content[0]}")
    header, content, lines = (content or [[]])[0], content[1:], lines[1:]

    def named(row: list[str] | ValueError) -> Row | ValueError:
        if isinstance(row, ValueError):
            return row
        if len(row) != len(header):
            return ValueError(f"{len(row)} fields, but the header names {len(header)}")
        return dict(zip(header, row, strict=True))

    return Table(file.name, len(content), lambda rows: [named(content[i]) for i in rows], lambda row: lines[row])


def _pyarrow(file: File) -> Any:
    try:
        import pyarrow.parquet
    except ImportError as e:
        raise ImportError(f"{file.name} needs pyarrow; install the extra: pip install 'fdel[data]'") from e
    return pyarrow


def _arrow(file: File) -> Table:
    """Open an IPC stream (as `datasets` writes it) or file, mapped into memory."""
    pa = _pyarrow(file)
    try:
        table = pa.ipc.open_stream(pa.memory_map(str(file.path))).read_all()
    except pa.ArrowInvalid:
        table = pa.ipc.open_file(pa.memory_map(str(file.path))).read_all()
    return Table(file.name, len(table), partial(_take, table))


def _take(table: Any, rows: range) -> list:
    part = table.slice(rows.start, len(rows)) if rows.step == 1 else table.take(list(rows))
    return part.to_pylist()


def _parquet(file: File) -> Table:
    parquet = _pyarrow(file).parquet.ParquetFile(file.path)
    _bounded(file, sum(parquet.metadata.row_group(i).total_byte_size for i in range(parquet.num_row_groups)))
    sizes = [parquet.metadata.row_group(i).num_rows for i in range(parquet.num_row_groups)]
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(int)
    group = lru_cache(maxsize=1)(parquet.read_row_group)

    def read(rows: range) -> list:
        found: list = []
        while rows:
            i = int(np.searchsorted(starts, rows[0], "right")) - 1
            here = len(range(rows[0], min(rows[-1] + 1, int(starts[i + 1])), rows.step))
            found += _take(group(i), range(rows[0] - int(starts[i]), rows[here - 1] - int(starts[i]) + 1, rows.step))
            rows = rows[here:]
        return found

    return Table(file.name, int(starts[-1]), read)


def _memory(file: File) -> Table:
    """Take rows in memory: a sequence of dicts, or a `datasets.Dataset`, whose rows are numbered from 0."""
    given, columns = file.rows, hasattr(file.rows, "column_names")
    listed = isinstance(given, Sequence) and not isinstance(given, str)
    if isinstance(given, Mapping) or not (columns or listed) or not hasattr(given, "__len__"):
        named = f" of {', '.join(map(str, given))}: choose one" if isinstance(given, Mapping) else ""
        raise ValueError(f"expected rows as a list of dicts or a datasets.Dataset, found {type(given).__name__}{named}")

    def read(rows: range) -> list[Row | ValueError]:
        if columns:
            found = given[list(rows)]
            return [dict(zip(found, values, strict=True)) for values in zip(*found.values(), strict=True)]
        odd = lambda row: ValueError(f"expected a dict, found {type(row).__name__}")
        return [dict(row) if isinstance(row, Mapping) else odd(row) for row in (given[i] for i in rows)]

    return Table(file.name, len(given), read, lambda row: row)
