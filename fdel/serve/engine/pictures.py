"""What a prompt shows and plays: pictures and sounds as the model's towers take them, and where they stand. Plain numpy.

Also who has which entry of the array on the device that holds what the tower gave of them: `Holders`.
"""

import functools
import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from fdel.media import hearing, senses
from fdel.media import sight as sights

CHUNKS = 4  # of sounds, as ROUND of patches
Size = tuple[str, int]  # of a program of the towers: "encode" so many patches, or "hear" so many chunks
ROUND = 64  # patches for whose multiples programs are compiled, up to 1024; beyond, four significant bits


@dataclass(frozen=True, eq=False)
class Medium:
    """What a tower takes at once, a picture, a frame of a video or a sound, and how many tokens of a prompt stand for it.

    Of a picture `values` are its patches, `places` their frames, rows and columns; of a sound the features of its chunks,
    and how many frames each has.
    """

    values: Float[np.ndarray, "P numbers"] | Float[np.ndarray, "chunks bins frames"]
    places: Int[np.ndarray, "P 3"] | Int[np.ndarray, " chunks"]
    entries: int
    digest: bytes = b""  # of its content; made here if it is not given

    def __post_init__(self) -> None:
        x, at = self.values, self.places
        shape = {2: (len(x), 3), 3: (len(x),)}.get(x.ndim)
        if not (shape == at.shape and len(x) and x.dtype == np.float32 and self.entries > 0):
            found = f"{x.dtype}{list(x.shape)} at places {list(at.shape)} for {self.entries} entries"
            raise ValueError(f"found a medium of {found}; expected patches float32[P numbers] at [P 3], or features "
                             "float32[chunks bins frames] at [chunks], and at least 1")  # fmt: skip
        object.__setattr__(self, "digest", self.digest or digest(x, at))

    @property
    def heard(self) -> bool:
        """Whether it is a sound."""
        return self.values.ndim == 3

    def size(self, example: int) -> Size:
        """Name the program that takes it: `example` patches have one of their own."""
        count = len(self.values)
        if self.heard:
            return "hear", rounded(count, CHUNKS)
        return "encode", count if count == example else rounded(count)

    def padded(self, example: int) -> tuple[np.ndarray, np.ndarray]:
        """Values and places, as many as the program of its `size` takes."""
        more = self.size(example)[1] - len(self.values)
        if not more:
            return self.values, self.places.astype(np.int32)
        fill = lambda x, value: np.pad(x, [(0, more), *[(0, 0)] * (x.ndim - 1)], constant_values=value)
        return fill(self.values, 0), fill(self.places.astype(np.int32), 0 if self.heard else -1)


def size_of(values: np.ndarray) -> Size:
    """Name the program that takes values of this size."""
    return ("hear" if values.ndim == 3 else "encode"), len(values)


def digest(values: np.ndarray, places: np.ndarray) -> bytes:
    """Hash what a tower takes (BLAKE2b)."""
    h = hashlib.blake2b(np.array([*values.shape], "<i8").tobytes(), digest_size=32)
    h.update(values.tobytes())
    h.update(places.astype("<i4").tobytes())
    return h.digest()


@dataclass(frozen=True, eq=False)
class PromptMedia:
    """The pictures and sounds of one prompt, and the entry over all that stands in the place of each token, -1 for none.

    A video is a picture for each frame of its patches.

    `rotary` are the time, row and column of each token of the prompt, where the model has rotary embeddings of three
    components; None: all three its position. `prompt_media` makes it of what `fdel.media.sight` gives.
    """

    items: Sequence[Medium]
    index: Int[np.ndarray, " T"]
    rotary: Int[np.ndarray, "T 3"] | None = None
    _marks: dict[tuple[int, int], bytes] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        total, index = int(self.starts[-1]), self.index
        used = index[index >= 0]
        each = np.array_equal(np.sort(used), np.arange(total))
        if not (index.ndim == 1 and np.issubdtype(index.dtype, np.integer) and each):
            found = f"{index.dtype}{list(index.shape)} with {len(used)} of them"
            raise ValueError(f"index: found {found}; expected each of entries 0 to {total - 1} once, -1 between them")
        if self.rotary is not None and self.rotary.shape != (len(index), 3):
            raise ValueError(f"rotary has shape {list(self.rotary.shape)}; expected {[len(index), 3]}, as index says")

    @functools.cached_property
    def starts(self) -> np.ndarray:
        """The first entry of each picture, and the number of all."""
        return np.cumsum([0, *(i.entries for i in self.items)])

    @functools.cached_property
    def shift(self) -> int:
        """What is added to the position of a token after the prompt: there all three components are the same."""
        return 0 if self.rotary is None else int(self.rotary.max()) + 1 - len(self.index)

    @functools.cached_property
    def edges(self) -> np.ndarray:
        """Where the prompt may be parted, from 0 to its length: at edges of runs of entries, and beside other tokens."""
        seen = self.index >= 0
        parted = np.zeros(len(seen) + 1, bool)
        parted[1:-1] = seen[1:] & seen[:-1]
        return np.flatnonzero(~parted)

    @functools.cached_property
    def longest(self) -> int:
        """The most tokens of a run of entries."""
        return int(np.diff(self.edges).max(initial=0))

    def edge(self, start: int, stop: int) -> int:
        """Give the last place up to `stop` where a chunk from `start` on may end that parts no run; else the next."""
        if stop >= len(self.index):
            return stop
        first, last = np.searchsorted(self.edges, (start, stop), "right")
        return int(self.edges[max(first, last - 1)])

    def shown(self, start: int, stop: int) -> list[int]:
        """Name the pictures that stand at the tokens from start to stop."""
        used = self.index[start:stop]
        return np.unique(np.searchsorted(self.starts, used[used >= 0], "right") - 1).tolist()

    def turns(self, start: int, stop: int) -> Int[np.ndarray, "n 3"]:
        """Give the three components of the tokens from start to stop, which may be past the prompt."""
        places = np.arange(start, stop)
        out = np.stack([places] * 3, 1)
        if self.rotary is not None:
            inside = self.rotary[start:stop]
            out += self.shift
            out[: len(inside)] = inside
        return out

    def _runs(self, start: int, stop: int) -> tuple[int, int]:
        """Widen a part of the prompt to whole runs of entries."""
        if stop <= start:
            return start, stop
        first, last = np.searchsorted(self.edges, start, "right") - 1, np.searchsorted(self.edges, stop)
        return int(self.edges[first]), int(self.edges[last])

    def mark(self, start: int, stop: int) -> bytes:
        """Tell what the tokens from start to stop do not: empty where no picture stands and nothing is turned otherwise.

        Else a hash (BLAKE2b), which is kept: it is asked for when pages are looked up and when they are shared.
        """
        if (start, stop) not in self._marks:
            self._marks[start, stop] = self._mark(start, stop)
        return self._marks[start, stop]

    def _mark(self, start: int, stop: int) -> bytes:
        out, stop = [], min(stop, len(self.index))
        first, last = self._runs(start, stop)  # the states of its tokens may depend on all of a run
        for i in self.shown(first, last):
            out += [self.items[i].digest, (self.index[start:stop] - self.starts[i]).astype("<i8").tobytes()]
        turns = None if self.rotary is None else self.turns(start, stop)
        if turns is not None and (turns != np.arange(start, stop)[:, None]).any():
            out.append(turns.astype("<i8").tobytes())
        return hashlib.blake2b(b"".join(out), digest_size=32).digest() if out else b""


def prompt_media(
    sight: Any, tokens: Sequence[int], pictures: Sequence[Any], digests: Sequence[bytes] | None = None
) -> tuple[list[int], PromptMedia]:
    """Put pictures (`media.sight.prepare`) in the places of a prompt: its tokens, and what an engine takes beside them.

    So with videos (`media.video.prepare`), sounds (`media.hearing.prepare`) and both in one (`media.hearing.together`).
    ValueError if the prompt has places for another number of them.
    >>> rgb = media.sight.decode(file, pixels=2**24)  # doctest: +SKIP
    >>> tokens, seen = serve.prompt_media(sight, tokens, [media.sight.prepare(sight, rgb)])  # doctest: +SKIP
    >>> engine.generate([tokens], media=[seen])  # doctest: +SKIP
    """
    whole = sights.expand(sight, tokens, pictures)
    rotary = None if whole.rotary is None else np.array(whole.rotary, np.int32).reshape(-1, 3)
    return whole.tokens, beside(sight, pictures, np.array(whole.index, np.int32), rotary, digests)


def beside(
    sight: Any, pictures: Sequence[Any], index: np.ndarray, rotary: np.ndarray | None = None,
    digests: Sequence[bytes] | None = None,
) -> PromptMedia:  # fmt: skip
    """Give what an engine takes beside a prompt, of the `index` of `sight.expand`, int[T], and its turns, int[T 3]."""
    known = digests or [b""] * len(pictures)
    items = [item for p, d in zip(pictures, known, strict=True) for item in media(sight, p, d)]
    of = [  # the item of each entry: those of a film's sound stand between those of its frames
        (i, isinstance(p, hearing.Film) and t == sight.sound.token)
        for i, p in enumerate(pictures) for t in p.run if t in sight.entries
    ]  # fmt: skip
    order = np.empty(len(of), np.int32)
    order[sorted(range(len(of)), key=of.__getitem__)] = np.arange(len(of))
    placed = index.astype(np.int32)
    placed[index >= 0] = order[index[index >= 0]]
    return PromptMedia(items, placed, rotary)


def media(sight: Any, shown: Any, digest: bytes = b"") -> list[Medium]:
    """Divide what is shown or played into what a tower takes at once; `digest` is of the whole, b"" if it is not known."""
    found = senses.parts(sight, shown)
    part = lambda i: hashlib.blake2b(digest + i.to_bytes(4, "little"), digest_size=32).digest()
    own = [part(i) if digest and len(found) > 1 else digest for i in range(len(found))]
    heard = lambda x: isinstance(x, senses.Sound)
    values, places = lambda x: x.features if heard(x) else x.patches, lambda x: x.lengths if heard(x) else x.places
    count = lambda x: sum(t in sight.entries for t in x.run)
    return [Medium(values(x), places(x), count(x), d) for x, d in zip(found, own, strict=True)]


def rounded(count: int, least: int = ROUND) -> int:
    """Round a number of patches, or of chunks, up to one for which there is a program."""
    step = max(least, 1 << max(0, count.bit_length() - 4))
    return -(-count // step) * step


Key = tuple[str, bytes]  # whose weights, and a picture's digest


@dataclass
class Holders:
    """Which entries of an array of `total` hold what the towers gave of which item; the longest unused make room."""

    total: int
    held: OrderedDict[Key, np.ndarray] = field(default_factory=OrderedDict)
    free: list[int] = field(init=False)
    counts: Counter = field(default_factory=Counter)  # pictures "encoded", and those "found" in the array

    def __post_init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Hold nothing: weights have changed, or the array is lost."""
        self.held.clear()
        self.free = list(range(self.total))[::-1]

    def fits(self, keys: Iterable[tuple[Key, Medium]]) -> bool:
        """Tell whether pictures can all be held at once."""
        return sum(i.entries for i in dict(keys).values()) <= self.total

    def hold(self, wanted: Iterable[tuple[Key, Medium]]) -> list[tuple[Key, Medium, np.ndarray]]:
        """Have entries for all of these pictures, which `fits` has passed: those still to be encoded, and where to."""
        needed, new = dict(wanted), []
        for key in needed.keys() & self.held.keys():
            self.held.move_to_end(key)
        for key, image in needed.items():
            if key in self.held:
                self.counts["found"] += 1
                continue
            while len(self.free) < image.entries:  # who is needed now stands behind all others
                _, entries = self.held.popitem(last=False)
                self.free += entries.tolist()
            entries = np.array([self.free.pop() for _ in range(image.entries)], np.int32)
            self.held[key] = entries
            new.append((key, image, entries))
            self.counts["encoded"] += 1
        return new

    def drop(self, keys: Iterable[Key]) -> None:
        """Hold these no more: they could not be encoded."""
        for key in keys:
            self.free += self.held.pop(key).tolist()
