"""Which examples share a row: packing as pure functions of lengths.

A piece is a part of an example: (example, start, stop). Rows are given as pieces int64[P 3], row after row, and bounds
int64[R + 1]: row r has the pieces bounds[r] : bounds[r + 1].
"""

import numpy as np
from jaxtyping import Int

Pieces = Int[np.ndarray, "P 3"]
Bounds = Int[np.ndarray, " R_1"]


def pack(lengths: Int[np.ndarray, " N"], size: int, packing: str | None) -> tuple[Pieces, Bounds]:
    """Distribute examples over rows of `size` tokens; see `Settings.packing` for the ways to do it.

    Without splitting, of an example that is longer its first `size` tokens remain.
    """
    if packing == "wrapped":
        return _wrapped(lengths, size)
    pieces = _cut(lengths, size) if packing == "best_fit_split" else _whole(lengths, size)
    if packing is None:
        return pieces, np.arange(len(pieces) + 1)
    bins = (first_fit if packing == "first_fit" else best_fit)(pieces[:, 2] - pieces[:, 1], size)
    order = np.array([i for b in bins for i in b], np.int64)
    return pieces[order], np.concatenate([[0], np.cumsum([len(b) for b in bins], dtype=np.int64)])


def first_fit(lengths: Int[np.ndarray, " N"], size: int) -> list[list[int]]:
    """Put each example, in order, into the first row that has room for it: the examples of each row."""
    rows: list[list[int]] = []
    room = np.full(len(lengths), size)
    for i, n in enumerate(lengths.tolist()):
        row = int(np.argmax(room >= n))
        rows += [[]] if row == len(rows) else []
        rows[row].append(i)
        room[row] -= n
    return rows


def best_fit(lengths: Int[np.ndarray, " N"], size: int) -> list[list[int]]:
    """Put each example, the longest first, into the row with the least room that suffices: the examples of each row.

    Best-fit decreasing (Johnson, 1973): never more than 11/9 of the fewest rows, plus 4.
    """
    rows: list[list[int]] = []
    having: dict[int, list[int]] = {}  # rows by their room
    rooms = 0  # bit n is set if a row has room for n tokens
    for i in np.argsort(-lengths, kind="stable").tolist():
        n = int(lengths[i])
        enough = rooms >> n
        if n and enough:
            room = n + (enough & -enough).bit_length() - 1
            row = having[room].pop()
            rooms ^= 0 if having[room] else 1 << room
        else:
            room, row = size, len(rows)
            rows.append([])
        rows[row].append(i)
        if room > n:
            having.setdefault(room - n, []).append(row)
            rooms |= 1 << (room - n)
    return rows


def _whole(lengths: np.ndarray, size: int) -> Pieces:
    zero = np.zeros(len(lengths), np.int64)
    return np.stack([np.arange(len(lengths)), zero, np.minimum(lengths, size)], 1)


def _cut(lengths: np.ndarray, size: int) -> Pieces:
    """Cut examples into parts of `size`, and what remains."""
    count = -(-lengths.astype(np.int64) // size)
    example = np.repeat(np.arange(len(lengths)), count)
    start = size * (np.arange(len(example)) - np.repeat(np.cumsum(count) - count, count))
    return np.stack([example, start, np.minimum(start + size, lengths[example])], 1)


def _wrapped(lengths: np.ndarray, size: int) -> tuple[Pieces, Bounds]:
    """Cut the stream of all examples at every `size` tokens."""
    ends = np.cumsum(lengths, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    cuts = np.unique(np.concatenate([[0], ends, np.arange(0, total, size)]))
    first, last = cuts[:-1], cuts[1:]
    example = np.searchsorted(ends, first, "right")
    begin = ends[example] - lengths[example]
    rows = np.searchsorted(first, np.arange(0, total, size))
    return np.stack([example, first - begin, last - begin], 1), np.append(rows, len(first))
