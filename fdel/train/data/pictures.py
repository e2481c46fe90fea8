"""Images of a data set: kept as files in a store, and put into batches as a tower takes them."""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fdel.media import sight as sights
from fdel.media.sight import Picture, Sight
from fdel.ops.batch import Media, Patches
from fdel.train.data.images import Shown, load

COUNTS = dict(counts=np.int32, starts=np.int32, tokens=np.int32, patches=np.int32, numbers=np.int32, sizes=np.int64,
              paths=bool, turned=bool, files=np.uint8)  # fmt: skip


# ---- in a store ----------------------------------------------------------------------------------------------------


def arrays(sequences: Iterable[Sequence[Shown]]) -> dict[str, np.ndarray]:
    """Lay the images of sequences out as arrays, by name (`Files`)."""
    found = [tuple(s) for s in sequences]
    every = [s for images in found for s in images]
    columns: dict[str, Any] = {
        "counts": [len(images) for images in found], "starts": [s.start for s in every],
        "tokens": [len(s.run) for s in every], "patches": [s.patches for s in every],
        "numbers": [s.numbers for s in every],
        "sizes": [len(s.file) for s in every], "paths": [s.path for s in every], "turned": [s.turned for s in every],
        "files": np.frombuffer(b"".join(s.file for s in every), np.uint8),
    }  # fmt: skip
    return {f"images.{k}": np.array(columns[k], dtype) for k, dtype in COUNTS.items()}


@dataclass(frozen=True)
class Files:
    """The images of a store: how many each sequence has, and of each image what `Shown` says, its file end to end."""

    counts: np.ndarray
    starts: np.ndarray
    tokens: np.ndarray
    patches: np.ndarray
    numbers: np.ndarray
    sizes: np.ndarray
    paths: np.ndarray
    turned: np.ndarray
    files: np.ndarray

    @functools.cached_property
    def first(self) -> np.ndarray:
        """The first image of each sequence, and the number of all."""
        return np.concatenate([[0], np.cumsum(self.counts, dtype=np.int64)])

    @functools.cached_property
    def ends(self) -> np.ndarray:
        """Where each file begins, and where the last one ends."""
        return np.concatenate([[0], np.cumsum(self.sizes, dtype=np.int64)])

    @functools.cached_property
    def largest(self) -> np.ndarray:
        """The most patches of an image of each sequence."""
        most = np.maximum.reduceat(np.append(self.patches, 0), self.first[:-1]) if len(self.counts) else self.counts
        return np.where(self.counts > 0, most, 0)

    def of(self, sequence: int, tokens: np.ndarray) -> list[Shown]:
        """List the images of a sequence of these tokens."""
        found = []
        for i in range(int(self.first[sequence]), int(self.first[sequence + 1])):
            start, file = int(self.starts[i]), self.files[self.ends[i] : self.ends[i + 1]].tobytes()
            run = tuple(tokens[start : start + int(self.tokens[i])].tolist())
            facts = int(self.patches[i]), int(self.numbers[i]), bool(self.turned[i])
            found.append(Shown(file, bool(self.paths[i]), run, *facts, start))
        return found


def files(parts: Mapping[str, np.ndarray]) -> Files | None:
    """Read the images of a store's arrays; None if there are none."""
    found = {k: parts[name] for k in COUNTS if (name := f"images.{k}") in parts}
    return Files(**found) if len(found.get("starts", ())) else None


# ---- in batches ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Room:
    """What a batch has room for: images of a row, patches of an image, numbers of a patch.

    `turned`: its tokens turn by three components.
    """

    images: int
    patches: int
    numbers: int
    turned: bool


def halved(most: int, found: int, unit: int = 1) -> int:
    """Halve a size, in whole units, as often as `found` still fits: of one most there are few sizes.
    >>> halved(12, 4), halved(12, 2), halved(16, 0, 4)
    (6, 2, 4)
    """
    size = max(unit, -(-most // unit) * unit)
    while size > unit and (half := -(-size // (2 * unit)) * unit) >= found and half < size:
        size = half
    return size


def room(rows: Sequence[tuple[Sequence[Mapping[str, Any]], Any]], processes: int) -> Room | None:
    """Say what a batch of a stream has room for: a power of two of images, patches of three significant bits.

    None if its rows show none. ValueError for several processes, whose batches would have other shapes.
    """
    each = [x["media"]["pictures"] for sequences, _ in rows for x in sequences if "media" in x]
    every = [p for found in each for p in found]
    if not every:
        return None
    if processes > 1:
        raise ValueError("a stream of several processes has no common number of images; read the data without stream")
    most = max(len(p.patches) for p in every)
    step = max(64, 1 << max(0, most.bit_length() - 3))
    images = 1 << (max(map(len, each)) - 1).bit_length()
    return Room(images, -(-most // step) * step, every[0].patches.shape[1], any(p.turns is not None for p in every))


def columns(sight: Sight, tokens: np.ndarray, shown: Sequence[Shown]) -> dict[str, Any]:
    """Read the images of a sequence: its "index" (of `sight.expand`), "rotary" int[T 3], and "pictures".

    ValueError for an image that is another than when its row was tokenized.
    """
    plain, after = list[int](), 0
    for s in shown:
        plain += [*tokens[after : s.start].tolist(), sight.placeholder]
        after = s.start + len(s.run)
    pictures = [load(s, sight) for s in shown]
    for s, p in zip(shown, pictures, strict=True):
        if p.run != s.run:
            raise ValueError(
                f"{s.name}: the image has another size than when its row was read; let it be, and train anew"
            )
    out = sights.expand(sight, [*plain, *tokens[after:].tolist()], pictures)
    turns = np.repeat(np.arange(len(tokens))[:, None], 3, 1) if out.rotary is None else np.array(out.rotary)
    rotary = turns.reshape(-1, 3).astype(np.int32)
    return {"index": np.array(out.index, np.int32), "rotary": rotary, "pictures": pictures}


def longer(found: Mapping[str, Any], length: int) -> dict[str, Any]:
    """Give the columns of a sequence that went on to `length` tokens."""
    n = length - len(found["index"])
    rotary = np.arange(n, dtype=np.int32)[:, None] + found["rotary"].max(initial=-1) + 1
    return {
        "index": np.pad(found["index"], (0, n), constant_values=-1), "pictures": found["pictures"],
        "rotary": np.concatenate([found["rotary"], np.repeat(rotary, 3, 1)]),
    }  # fmt: skip


def none(positions: np.ndarray) -> dict[str, Any]:
    """Give the columns of a sequence without images, as `columns`."""
    return {
        "index": np.full(len(positions), -1, np.int32),
        "rotary": np.repeat(positions[:, None], 3, 1),
        "pictures": [],
    }


def join(parts: Sequence[Mapping[str, Any]], sight: Sight) -> dict[str, Any]:
    """Put the columns of sequences that share a row one after the other."""
    entries = [sum(t in sight.entries for x in p["pictures"] for t in x.run) for p in parts]
    before = np.cumsum([0, *entries])
    index = [np.where(p["index"] < 0, -1, p["index"] + n) for p, n in zip(parts, before[:-1], strict=True)]
    rotary = np.concatenate([p["rotary"] for p in parts])
    return {"index": np.concatenate(index), "rotary": rotary, "pictures": [x for p in parts for x in p["pictures"]]}


def media(
    rows: Sequence[Sequence[Mapping[str, Any]]], sight: Sight, shape: tuple[int, ...], room: Room
) -> dict[str, Any]:
    """Put the images of sequences (rows, sides) into a batch of `shape` (rows, sides, T): "media", and "rotary"."""
    index, rotary = np.full(shape, -1, np.int32), np.zeros((*shape, 3), np.int32)
    pictures = [list[Picture]() for _ in range(shape[0] * shape[1])]
    for i, sides in enumerate(rows):
        for j, found in enumerate(sides):
            n = len(found["index"])
            index[i, j, :n], rotary[i, j, :n] = found["index"], found["rotary"]
            pictures[i * shape[1] + j] = found["pictures"]
    values, places, flat = sights.gather(
        sight, pictures, index.reshape(-1, shape[-1]), images=room.images, patches=room.patches
    )
    if not values.shape[-1]:  # none of these rows shows one
        values = np.zeros((*values.shape[:-1], room.numbers), values.dtype)
    back = lambda x: x.reshape(*shape[:2], *x.shape[1:])
    out: dict[str, Any] = {"media": Media(back(flat).astype(np.int32), inputs=Patches(back(values), back(places)))}
    return out | ({"rotary": rotary} if room.turned else {})
