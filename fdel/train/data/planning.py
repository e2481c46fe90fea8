"""In which order an epoch reads the examples of several sources, and which of them share a row.

Both are pure functions: of sizes, weights and the seed, and of lengths. A piece is a part of an example: (example, start,
stop). Rows are given as pieces int64[P 3], row after row, and bounds int64[R + 1]: row r has the pieces
bounds[r] : bounds[r + 1].
"""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Int

from fdel.train.data.settings import Settings

Order = Int[np.ndarray, " N"]
Pieces = Int[np.ndarray, "P 3"]
Bounds = Int[np.ndarray, " R_1"]
Runs = Callable[[int], Sequence[tuple[int, int]]]  # of an example's number: (start, stop) of each run, in order


# ---- mixtures ------------------------------------------------------------------------------------------------------


def order(sizes: Sequence[int], weights: Sequence[float] | None, settings: Settings, epoch: int) -> Order:
    """Number the examples of an epoch; those of the second source follow those of the first, and so on.

    Without weights each example comes once. With them see `stop` and `block` in `Settings`: a source that is read again
    within an epoch is shuffled anew.
    """
    if weights is None:
        rng = np.random.default_rng([settings.seed, epoch])
        return rng.permutation(sum(sizes)) if settings.shuffle else np.arange(sum(sizes))
    shares = np.array(weights) / sum(weights)
    if settings.block is not None:
        shares = _in_block(shares, settings.block) / settings.block
    lasts = np.array(sizes) / shares  # an epoch this long reads a source exactly once
    exhausted = settings.stop == "first_exhausted"
    count = int(np.ceil((lasts.min() if exhausted else lasts.max()) + 2 / shares.min()))
    chosen = interleave(shares, count) if settings.block is None else _blocks(shares, count, settings, epoch)
    nth = np.empty(len(chosen), np.int64)  # how often its source was chosen before
    for s in range(len(sizes)):
        nth[chosen == s] = np.arange((chosen == s).sum())
    size = np.array(sizes)[chosen]
    if exhausted:
        end = np.flatnonzero(nth >= size)[0]
    else:
        end = max(np.flatnonzero((chosen == s) & (nth == sizes[s] - 1))[0] for s in range(len(sizes))) + 1
    chosen, nth, size = chosen[:end], nth[:end], size[:end]
    within = nth % size
    if settings.shuffle:
        for s, turn in np.unique(np.stack([chosen, nth // size]), axis=1).T:
            here = (chosen == s) & (nth // size == turn)
            rng = np.random.default_rng([settings.seed, epoch, s, turn])
            within[here] = rng.permutation(sizes[s])[within[here]]
    return (np.cumsum(sizes) - sizes)[chosen] + within


def interleave(shares: np.ndarray, count: int) -> Int[np.ndarray, " count"]:
    """Choose a source for each of `count` places so that each prefix has the shares, as evenly as can be."""
    most = np.ceil(shares * count).astype(int) + 1
    when = np.concatenate([(np.arange(n) + 0.5) / share for n, share in zip(most, shares, strict=True)])
    return np.repeat(np.arange(len(shares)), most)[np.argsort(when, kind="stable")][:count]


def _in_block(shares: np.ndarray, size: int) -> np.ndarray:
    """Round shares of a block to whole numbers with the same sum."""
    numbers = np.floor(shares * size).astype(int)
    rest = np.argsort(numbers - shares * size, kind="stable")[: size - numbers.sum()]
    numbers[rest] += 1
    if not numbers.all():
        raise ValueError(f"block={size} is too small for the weights {shares.round(4).tolist()}: a source never comes")
    return numbers


def _blocks(shares: np.ndarray, count: int, settings: Settings, epoch: int) -> np.ndarray:
    """Choose sources block by block, each with the same numbers, in random order."""
    size = settings.block or 1
    block = np.repeat(np.arange(len(shares)), _in_block(shares, size))
    rng = np.random.default_rng([settings.seed, epoch])
    return np.concatenate([rng.permutation(block) if settings.shuffle else block for _ in range(-(-count // size))])


# ---- packing -------------------------------------------------------------------------------------------------------


def pack(
    lengths: Int[np.ndarray, " N"], size: int, packing: str | None, runs: Runs | None = None
) -> tuple[Pieces, Bounds]:
    """Distribute examples over rows of `size` tokens; see `Settings.packing` for the ways to do it.

    Without splitting, of an example that is longer its first `size` tokens remain. With splitting no piece ends inside of
    one of an example's `runs`, the tokens of an image, say: the cut is moved before it. A run of more than `size` tokens is
    a ValueError.
    """
    if packing == "wrapped":
        return _wrapped(lengths, size) if runs is None else _wrapped_around(lengths, size, runs)
    whole = np.stack([np.arange(len(lengths)), np.zeros(len(lengths), np.int64), np.minimum(lengths, size)], 1)
    pieces = whole
    if packing == "best_fit_split":
        pieces = _cut(lengths, size) if runs is None else _cut_around(lengths, size, runs)
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


def _cut(lengths: np.ndarray, size: int) -> Pieces:
    """Cut examples into parts of `size`, and what remains."""
    count = -(-lengths.astype(np.int64) // size)
    example = np.repeat(np.arange(len(lengths)), count)
    start = size * (np.arange(len(example)) - np.repeat(np.cumsum(count) - count, count))
    return np.stack([example, start, np.minimum(start + size, lengths[example])], 1)


def _cuts(length: int, room: int, size: int, runs: Sequence[tuple[int, int]]) -> list[int]:
    """Say where the parts of an example begin, and where it ends: of `room` tokens at most, and of `size` all others."""
    cuts = [0]
    while length - cuts[-1] > room:
        end = cuts[-1] + room
        end = next((first for first, last in runs if first < end < last), end)
        if end <= cuts[-1] and room == size:
            raise ValueError(f"tokens that stand together are more than size={size}; leave out their example")
        cuts.append(max(end, cuts[-1]))
        room = size
    return [*cuts, length]


def _cut_around(lengths: np.ndarray, size: int, runs: Runs) -> Pieces:
    """Cut examples into parts of `size` at the most, between runs."""
    cuts = [_cuts(n, size, size, runs(i)) for i, n in enumerate(lengths.tolist())]
    parts = [(i, a, b) for i, c in enumerate(cuts) for a, b in zip(c[:-1], c[1:], strict=True) if b > a]
    return np.array(parts, np.int64).reshape(-1, 3)


def _wrapped_around(lengths: np.ndarray, size: int, runs: Runs) -> tuple[Pieces, Bounds]:
    """Cut the stream of all examples where rows of `size` are full, or before a run that has no room in one."""
    pieces, bounds, room = list[tuple[int, int, int]](), [0], size
    for i, n in enumerate(lengths.tolist()):
        cuts = _cuts(n, room, size, runs(i))
        for part, (a, b) in enumerate(zip(cuts[:-1], cuts[1:], strict=True)):
            if part:
                bounds.append(len(pieces))
                room = size
            pieces += [(i, a, b)] * (b > a)
            room -= b - a
    bounds += [len(pieces)] * (bounds[-1] < len(pieces))
    return np.array(pieces, np.int64).reshape(-1, 3), np.array(bounds, np.int64)


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
