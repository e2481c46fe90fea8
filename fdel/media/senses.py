"""What rows of a batch show and play, as arrays: of models that see and hear (`sight.gather` is for those that see)."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from fdel.media import frames, hearing, sound, video
from fdel.media import sight as sights
from fdel.media.hearing import Film, Sound, states
from fdel.media.image import Picture
from fdel.media.sight import Sight

Item = Picture | Sound | Film


class Most(NamedTuple):
    """What files may have at most: pixels of an image, pixels of all frames taken of a video, seconds of a sound.

    `frames` and `work` are those of a video and their pixels, of which all up to the last that is taken are decoded.
    `tokens` may stand for a file. Of a sound they bound the seconds, before it is decoded.
    """

    pixels: int
    volume: int
    seconds: float
    frames: int = 2**16
    work: int = 2**31
    tokens: int = 2**40


TRUSTED = Most(2**26, 2**28, 3600.0, 108_000, 2**40)  # of files that the user of this machine names


def prepare(sight: Sight | None, kind: str, data: bytes, most: Most, tokenize: Callable[[str], Sequence[int]]) -> Item:
    """Decode and prepare a file, of "images", "videos" or "sounds", or "films", videos with what they play.

    Where `sight.heard`, all videos are films; a silent one is a video. `tokenize` gives the tokens of a text. ValueError
    for what is no such file, or too large, and for a model that takes none; ImportError for a reader that is absent.
    """
    ways = (
        {} if sight is None else {"images": sight, "videos": sight.video, "films": sight.video, "sounds": sight.sound}
    )
    if sight is None or (way := ways[kind]) is None:
        raise ValueError(f"this model takes no {kind}; leave them out")
    if kind == "images":
        return _bounded(sights.prepare(sight, sights.decode(data, pixels=most.pixels)), most)
    if kind == "sounds":
        seconds = min(most.seconds, hearing.longest(way, most.tokens))
        return _bounded(hearing.prepare(way, sound.decode(data, most=seconds)), most)
    limits = frames.Limits(volume=most.volume, total=most.frames, work=most.work)
    seen = video.prepare(way, video.decode(data, lambda total, fps: video.sample(way, total, fps), limits), tokenize)
    _bounded(seen, most)
    if not (kind == "films" or sight.heard) or sight.sound is None:
        return seen
    left = hearing.longest(sight.sound, most.tokens - len(seen.run) - len(sight.sound.marks))
    played = sound.listen(data, most=min(most.seconds, left))
    if played is None:
        return seen
    return _bounded(hearing.together(sight.sound, seen, hearing.prepare(sight.sound, played)), most)


def _bounded(item: Item, most: Most) -> Item:
    """Refuse what takes too many tokens: ValueError."""
    if len(item.run) > most.tokens:
        found = f"it takes {len(item.run)} tokens, more than the model's {most.tokens}"
        raise ValueError(f"{found}; make it smaller or shorter")
    return item


def parts(sight: Sight, item: Item) -> list[Picture | Sound]:
    """Divide what is shown or played into what a tower takes at once: a video into its frames (`sight.frames`).

    Of a video with its sound, the sound comes last.
    """
    if isinstance(item, Film):
        return [*sights.frames(sight, item.picture), item.sound]
    return [item] if isinstance(item, Sound) else [*sights.frames(sight, item)]


def gather(
    sight: Sight, rows: Sequence[Sequence[Item]], index: np.ndarray, *, images: int | None = None,
    patches: int | None = None, sounds: int | None = None, chunks: int | None = None,
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray], np.ndarray]:  # fmt: skip
    """Put what rows show and play into arrays: values and places of `sight.gather`; features and lengths of sounds.

    float32[rows sounds chunks bins frames] and int32[rows sounds chunks]. Also gives `index` int[rows T], of
    `sight.expand`, as it counts the entries of padded images, and behind them those of padded sounds. Sizes pad the arrays;
    None is the most that there are, fewer are a ValueError.
    """
    s = sight.sound
    pictures = [[i.picture if isinstance(i, Film) else i for i in row if not isinstance(i, Sound)] for row in rows]
    heard = [[i.sound if isinstance(i, Film) else i for i in row if not isinstance(i, Picture)] for row in rows]
    seen, named = np.full_like(index, -1), np.full_like(index, -1)
    for i, row in enumerate(rows):
        audible = np.array([t == s.token for item in row for t in item.run if t in sight.entries], bool)
        order = np.where(audible, np.cumsum(audible), np.cumsum(~audible)) - 1
        here = index[i] >= 0
        which, at = audible[index[i][here]], order[index[i][here]]
        seen[i][here], named[i][here] = np.where(which, -1, at), np.where(which, at, -1)
    values, places, out = sights.gather(sight, pictures, seen, images=images, patches=patches)
    most = max(map(len, heard), default=0), max((len(x.lengths) for row in heard for x in row), default=0)
    sounds, chunks = most[0] if sounds is None else sounds, most[1] if chunks is None else chunks
    if sounds < most[0] or chunks < most[1]:
        raise ValueError(f"found rows of {most[0]} sounds of {most[1]} chunks, expected at most {sounds} of {chunks}")
    features = np.zeros((len(rows), sounds, chunks, s.bins, s.frames), np.float32)
    lengths = np.zeros(features.shape[:3], np.int32)
    first, stride = values.shape[1] * sight.count(values.shape[2]), chunks * int(states(np.array(s.frames)))
    for i, row in enumerate(heard):
        before = 0
        for j, x in enumerate(row):
            features[i, j, : len(x.lengths)], lengths[i, j, : len(x.lengths)] = x.features, x.lengths
            mine = (named[i] >= before) & (named[i] < before + len(x.run))
            out[i] = np.where(mine, named[i] - before + first + j * stride, out[i])
            before += len(x.run)
    return (values, places), (features, lengths), out
