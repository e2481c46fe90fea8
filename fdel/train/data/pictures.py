"""Images, videos and sounds of a data set: kept as files in a store, and put into batches as towers take them."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fdel.media import senses
from fdel.media import sight as sights
from fdel.media.senses import Item, Sound
from fdel.media.sight import Sight
from fdel.ops.batch import Media, Patches, Sounds
from fdel.train.data import images
from fdel.train.data.images import KINDS, Shown, load

COUNTS = dict(counts=np.int32, starts=np.int32, tokens=np.int32, kinds=np.int8, parts=np.int32, patches=np.int32,
              numbers=np.int32, chunks=np.int32, sizes=np.int64, paths=bool, turned=bool, files=np.uint8)  # fmt: skip


# ---- in a store ----------------------------------------------------------------------------------------------------


def arrays(sequences: Iterable[Sequence[Shown]]) -> dict[str, np.ndarray]:
    """Lay what sequences show and play out as arrays, by name (`Files`)."""
    found = [tuple(s) for s in sequences]
    every = [s for shown in found for s in shown]
    columns: dict[str, Any] = {
        "counts": [len(shown) for shown in found], "starts": [s.start for s in every],
        "tokens": [len(s.run) for s in every], "kinds": [[*KINDS].index(s.kind) for s in every],
        "parts": [s.parts for s in every], "patches": [s.patches for s in every],
        "numbers": [s.numbers for s in every], "chunks": [s.chunks for s in every],
        "sizes": [len(s.file) for s in every], "paths": [s.path for s in every], "turned": [s.turned for s in every],
        "files": np.frombuffer(b"".join(s.file for s in every), np.uint8),
    }  # fmt: skip
    return {f"images.{k}": np.array(columns[k], dtype) for k, dtype in COUNTS.items()}


@dataclass(frozen=True)
class Files:
    """What a store shows and plays: how much each sequence, and of each what `Shown` says, its file end to end."""

    counts: np.ndarray
    starts: np.ndarray
    tokens: np.ndarray
    kinds: np.ndarray  # places in KINDS
    parts: np.ndarray
    patches: np.ndarray
    numbers: np.ndarray
    chunks: np.ndarray
    sizes: np.ndarray
    paths: np.ndarray
    turned: np.ndarray
    files: np.ndarray

    @functools.cached_property
    def first(self) -> np.ndarray:
        """The first of each sequence, and the number of all."""
        return np.concatenate([[0], np.cumsum(self.counts, dtype=np.int64)])

    @functools.cached_property
    def ends(self) -> np.ndarray:
        """Where each file begins, and where the last one ends."""
        return np.concatenate([[0], np.cumsum(self.sizes, dtype=np.int64)])

    @functools.cached_property
    def needs(self) -> np.ndarray:
        """What each sequence needs, int64[4 sequences]: images, patches of the largest, sounds, chunks of the longest."""
        return self._needed(self._owners, np.arange(len(self.starts)), len(self.counts))

    @property
    def _owners(self) -> np.ndarray:
        """The sequence of each."""
        return np.repeat(np.arange(len(self.counts)), self.counts)

    def needed(self, sequences: np.ndarray, first: np.ndarray, last: np.ndarray) -> np.ndarray:
        """What the tokens from first to last of so many sequences need, as `needs`: int64[4 pieces]."""
        far = 1 + max(int(x.max(initial=0)) for x in (self.starts, first, last))
        places = self._owners * far + self.starts
        begin, end = (np.searchsorted(places, sequences * far + x) for x in (first, last))
        count = end - begin
        which = np.arange(count.sum()) + np.repeat(begin - np.cumsum(count) + count, count)
        return self._needed(np.repeat(np.arange(len(sequences)), count), which, len(sequences))

    def _needed(self, owner: np.ndarray, which: np.ndarray, count: int) -> np.ndarray:
        out, chunks = np.zeros((4, count), np.int64), self.chunks[which]
        for i, (n, size) in enumerate(((self.parts[which], self.patches[which]), (chunks > 0, chunks))):
            np.add.at(out[2 * i], owner, n)
            np.maximum.at(out[2 * i + 1], owner, size)
        return out

    def runs(self, sequence: int) -> list[tuple[int, int]]:
        """Say where the tokens of what a sequence shows and plays begin and end."""
        here = slice(int(self.first[sequence]), int(self.first[sequence + 1]))
        return [(a, a + n) for a, n in zip(self.starts[here].tolist(), self.tokens[here].tolist(), strict=True)]

    @functools.cached_property
    def size(self) -> int:
        """How many numbers a patch has; 0 if there are sounds alone."""
        return int(self.numbers.max(initial=0))

    def of(self, sequence: int, tokens: np.ndarray, first: int = 0) -> list[Shown]:
        """List what these tokens of a sequence, those from `first` on, show and play."""
        found = []
        for i in range(int(self.first[sequence]), int(self.first[sequence + 1])):
            start, file = int(self.starts[i]) - first, self.files[self.ends[i] : self.ends[i + 1]].tobytes()
            if not 0 <= start < len(tokens):
                continue
            run = tuple(tokens[start : start + int(self.tokens[i])].tolist())
            sizes = {k: int(getattr(self, k)[i]) for k in ("parts", "patches", "numbers", "chunks")}
            kind, turned = [*KINDS][self.kinds[i]], bool(self.turned[i])
            found.append(Shown(file, bool(self.paths[i]), kind, run, turned=turned, start=start, **sizes))
        return found


def files(parts: Mapping[str, np.ndarray]) -> Files | None:
    """Read what a store's arrays show and play; None if that is nothing."""
    found = {k: parts[name] for k in COUNTS if (name := f"images.{k}") in parts}
    return Files(**found) if len(found.get("starts", ())) else None


# ---- in batches ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Room:
    """What a batch has room for: images of a row (a video is several), patches of an image, sounds of a row, their chunks.

    A patch has so many `numbers`. `turned`: its tokens turn by three components.
    """

    images: int
    patches: int
    sounds: int
    chunks: int
    numbers: int
    turned: bool


def halved(most: int, found: int, unit: int = 1) -> int:
    """Halve a size, in whole units, as often as `found` still fits: of one most there are few sizes.
    >>> halved(12, 4), halved(12, 2), halved(16, 0, 4), halved(0, 0)
    (6, 2, 4, 0)
    """
    size = max(unit, -(-most // unit) * unit) if most else 0
    while size > unit and (half := -(-size // (2 * unit)) * unit) >= found and half < size:
        size = half
    return size


def room(
    rows: Sequence[tuple[Sequence[Mapping[str, Any]], Any]], sight: Sight | None,
    agree: Callable[[np.ndarray], np.ndarray] | None = None,
) -> Room | None:  # fmt: skip
    """Say what a batch of a stream has room for: powers of two of images and sounds, patches of three significant bits.

    None if its rows show none. `agree(sizes)` gives the largest of several processes (`processes.most`), whose batches have
    one shape then, those of a process whose own rows show none too.
    """
    each = [x["media"]["pictures"] for sequences, _ in rows for x in sequences if "media" in x]
    if sight is None or not (agree or any(each)):
        return None
    split = [[part for p in shown for part in senses.parts(sight, p)] for shown in each]
    heard = [[x for x in parts if isinstance(x, Sound)] for parts in split]
    seen = [[x for x in parts if not isinstance(x, Sound)] for parts in split]
    power = lambda sizes: 1 << (n - 1).bit_length() if (n := max(sizes, default=0)) else 0
    most = max((len(p.patches) for parts in seen for p in parts), default=0)
    chunks = [len(x.lengths) for parts in heard for x in parts]
    step = max(64, 1 << max(0, most.bit_length() - 3))
    numbers = max((p.patches.shape[1] for parts in seen for p in parts), default=0)
    turned = any(p.turns is not None for shown in each for p in shown)
    patches = -(-most // step) * step
    found = np.array([power(map(len, seen)), patches, power(map(len, heard)), power(chunks), numbers, turned])
    pictures, patches, sounds, longest, numbers, turned = (found if agree is None else agree(found)).tolist()
    return Room(pictures, patches, sounds, longest, numbers, bool(turned)) if pictures or sounds else None


def columns(sight: Sight, tokens: np.ndarray, shown: Sequence[Shown]) -> dict[str, Any]:
    """Read what a sequence shows and plays: its "index" (of `sight.expand`), "rotary" int[T 3], and "pictures", of it all.

    ValueError for an image that is another than when its row was tokenized.
    """
    plain, after, places = list[int](), 0, images.tokens(sight)
    for s in shown:
        plain += [*tokens[after : s.start].tolist(), places[s.kind]]
        after = s.start + len(s.run)
    pictures: list[Any] = [load(s, sight) for s in shown]
    for s, p in zip(shown, pictures, strict=True):
        if p.run != s.run:
            raise ValueError(
                f"{s.name}: the {s.kind[:-1]} has another size than when its row was read; let it be, and train anew"
            )
    out = sights.expand(sight, [*plain, *tokens[after:].tolist()], pictures)
    turns = np.repeat(np.arange(len(tokens))[:, None], 3, 1) if out.rotary is None else np.array(out.rotary)
    rotary = turns.reshape(-1, 3).astype(np.int32)
    return {"index": np.array(out.index, np.int32), "rotary": rotary, "pictures": pictures}


def following(found: Mapping[str, Any], tokens: np.ndarray, shown: Sequence[Shown], sight: Sight) -> dict[str, Any]:
    """Give the columns of a sequence that went on: `tokens` are all of it, `shown` is what stands behind its first part.

    ValueError for what is shown where its own tokens do not stand.
    """
    parts, at = [found], len(found["index"])
    between = lambda n: none(np.arange(n, dtype=np.int32))
    for s in shown:
        here = tokens[s.start : s.start + len(s.run)]
        if s.start < at or tuple(here.tolist()) != s.run:
            raise ValueError(f"{s.name}: the {len(s.run)} tokens that stand for it are not those from {s.start} on")
        parts += [between(s.start - at), columns(sight, here, [replace(s, start=0)])]
        at = s.start + len(s.run)
    return join([*parts, between(len(tokens) - at)], sight, one=True)


def part(found: Mapping[str, Any], first: int, end: int, sight: Sight) -> dict[str, Any]:
    """Give the columns of the tokens from first to end of a sequence; ValueError if one of what is shown is cut."""
    index, counts = found["index"][first:end], _entries(found["pictures"], sight)
    used = index[index >= 0]
    here = np.bincount(np.repeat(np.arange(len(counts)), counts)[used], minlength=len(counts))
    if ((here > 0) & (here < counts)).any():
        raise ValueError(
            "the end of a prompt is an image, a video or a sound; let a text follow it, or share no prompts"
        )
    kept = [x for x, n in zip(found["pictures"], here, strict=True) if n]
    index = np.where(index < 0, index, index - used.min(initial=len(found["index"])))
    return {"index": index, "rotary": found["rotary"][first:end], "pictures": kept}


def _entries(items: Sequence[Item], sight: Sight) -> np.ndarray:
    """Count the entries of each of what is shown."""
    return np.array([sum(t in sight.entries for t in x.run) for x in items], np.int64)


def none(positions: np.ndarray) -> dict[str, Any]:
    """Give the columns of a sequence of text alone, as `columns`."""
    return {
        "index": np.full(len(positions), -1, np.int32),
        "rotary": np.repeat(positions[:, None], 3, 1),
        "pictures": [],
    }


def join(parts: Sequence[Mapping[str, Any]], sight: Sight, one: bool = False) -> dict[str, Any]:
    """Put the columns of sequences that share a row one after the other; of `one` in parts, turns go on."""
    before = np.cumsum([0, *(int(_entries(p["pictures"], sight).sum()) for p in parts)])
    index = [np.where(p["index"] < 0, -1, p["index"] + n) for p, n in zip(parts, before[:-1], strict=True)]
    ends = np.cumsum([0, *(one * (p["rotary"].max(initial=-1) + 1) for p in parts)]).astype(np.int32)
    rotary = np.concatenate([p["rotary"] + n for p, n in zip(parts, ends[:-1], strict=True)])
    return {"index": np.concatenate(index), "rotary": rotary, "pictures": [x for p in parts for x in p["pictures"]]}


def media(
    rows: Sequence[Sequence[Mapping[str, Any]]], sight: Sight, shape: tuple[int, ...], room: Room
) -> dict[str, Any]:
    """Put what sequences (rows, sides) show and play into a batch of `shape` (rows, sides, T): "media", and "rotary"."""
    index, rotary = np.full(shape, -1, np.int32), np.zeros((*shape, 3), np.int32)
    items = [list[Item]() for _ in range(shape[0] * shape[1])]
    for i, sides in enumerate(rows):
        for j, found in enumerate(sides):
            n = len(found["index"])
            index[i, j, :n], rotary[i, j, :n] = found["index"], found["rotary"]
            items[i * shape[1] + j] = found["pictures"]
    flat, much = index.reshape(-1, shape[-1]), dict(images=room.images, patches=room.patches)
    heard: tuple[np.ndarray, ...] = ()
    if room.sounds:
        much |= dict(sounds=room.sounds, chunks=room.chunks)
        (values, places), heard, flat = senses.gather(sight, items, flat, **much)
    else:
        values, places, flat = sights.gather(sight, items, flat, **much)  # type: ignore[arg-type]
    if not values.shape[-1]:  # none of these rows shows one
        values = np.zeros((*values.shape[:-1], room.numbers), values.dtype)
    back = lambda x: x.reshape(*shape[:2], *x.shape[1:])
    seen = [Patches(back(values), back(places))] if room.images else []
    inputs = (*seen, *([Sounds(*map(back, heard))] if heard else []))
    media = Media(back(flat).astype(np.int32), inputs=inputs if len(inputs) > 1 else inputs[0])
    return {"media": media} | ({"rotary": rotary} if room.turned else {})
