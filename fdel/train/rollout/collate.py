"""From samples to the batch that policy losses read (`losses.sampled`): on the host, of few shapes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from fdel.ops.batch import Packed
from fdel.train.data.planning import pack
from fdel.train.losses.forward import learnt_places
from fdel.train.rollout.records import Sample

Batch = dict[str, Any]
COLUMNS = {"mask": np.bool_, "logps": np.float32, "kept": np.float32, "advantages": np.float32, "turns": np.int32}


def collate(
    samples: Sequence[Sample],
    advantages: Float[np.ndarray, " B"],
    *,
    length: int,
    rows: int = 1,
    packed: bool = False,
    shared: bool = False,
    learn: Sequence[bool] | None = None,
    most: int | None = None,
    media: Callable[..., Mapping[str, Any]] | None = None,
) -> Batch:
    """Put samples and their advantages into rows: the columns of `losses.sampled`, and "places".

    All but "places" have the shape [R T], and each number stands at the token that it is about. Every row is one sample,
    with "lengths"; with `packed` rows of `length` tokens hold several, with "packed". T is a power of two, or `length`; R a
    multiple of `rows`, and with `packed` that times a power of two: empty rows fill up, so that few shapes are compiled.
    `shared`: packed, and samples of one prompt in a row have it there once, so that it is computed once for all of them.
    With `most`, the tokens of a sample that are learnt at most, T is `length` and the shapes do not depend on the samples.
    `media(rows, shape)` gives what samples show (`shown`); rows have parts of samples. `learn` tells which samples are
    learnt: of the others the mask is False. Samples that ended with an error are not. One of more than `length` tokens
    loses its end.
    """
    advantages = np.asarray(advantages, np.float32)
    if advantages.shape != (len(samples),) or not samples:
        raise ValueError(
            f"{len(samples)} samples and advantages {advantages.shape}; expected one for each, and at least one"
        )
    sizes = np.minimum([len(s.tokens) for s in samples], length)
    packed |= shared
    families = _of_one_prompt(samples, sizes, length) if shared else [(0, [i]) for i in range(len(samples))]
    room = np.array([before + sum(int(sizes[i]) - before for i in members) for before, members in families])
    pieces, bounds = pack(room, length, "best_fit" if packed else None)
    grouped = [[families[i] for i in pieces[a:b, 0]] for a, b in zip(bounds[:-1], bounds[1:], strict=True)]
    width = length if packed or most else min(length, power(int(sizes.max())))
    height = rows * power(-(-len(grouped) // rows)) if packed else -(-len(grouped) // rows) * rows
    full: Batch = {k: np.zeros((height, width), t) for k, t in COLUMNS.items()}
    full |= {"tokens": np.zeros((height, width), np.int32), "positions": np.zeros((height, width), np.int32)}
    full["segments"] = np.full((height, width), -1, np.int32)
    full["prefixes"] = np.full((height, width), -2, np.int32)
    for r, together in enumerate(grouped):
        start = 0
        for segment, (i, first, end, prefix) in enumerate(_segments(together, sizes)):
            s, part, here = samples[i], slice(first, end), (r, slice(start, start + end - first))
            learnt = s.drawn[part] & (s.finish != "error") & (learn is None or bool(learn[i]))
            full["tokens"][here], full["positions"][here] = s.tokens[part], np.arange(first, end)
            full["segments"][here], full["prefixes"][here] = segment, prefix
            full["mask"][here], full["logps"][here], full["kept"][here] = learnt, s.logps[part], s.kept[part]
            full["advantages"][here], turns = learnt * advantages[i], s.turns[part] - first + start
            full["turns"][here], start = learnt * turns, start + end - first
    found: Batch = {k: full[k] for k in ("tokens", *COLUMNS)}
    segments, positions = full["segments"], full["positions"]
    where = Packed(positions, segments, prefix_ids=full["prefixes"] if shared else None)
    found |= {"packed": where} if packed else {"lengths": (segments >= 0).sum(1, dtype=np.int32)}
    if media is None and any(s.task.images or s.images for s in samples):
        raise ValueError("samples show pictures; give media=partial(shown, sight=...), which puts them into the batch")
    if media is not None:
        found |= media([[(samples[i], a, b) for i, a, b, _ in _segments(x, sizes)] for x in grouped], (height, width))
    places = power(max(1, most or int(found["mask"].sum(1).max())))
    return found | {"places": learnt_places(found, min(width, places))}


def power(n: int) -> int:
    """The smallest power of two from n on.
    >>> [power(n) for n in (1, 5, 8)]
    [1, 8, 8]
    """
    return 1 << max(0, n - 1).bit_length()


def _segments(together: Sequence[tuple[int, list[int]]], sizes: np.ndarray) -> list[tuple[int, int, int, int]]:
    """Give the segments of a row: (a sample, the first and the end of its tokens, the segment of their prompt or -2)."""
    found: list[tuple[int, int, int, int]] = []
    for before, members in together:
        prefix = len(found) if before else -2
        found += [(members[0], 0, before, -2)] * bool(before) + [(i, before, int(sizes[i]), prefix) for i in members]
    return found


def _of_one_prompt(samples: Sequence[Sample], sizes: np.ndarray, length: int) -> list[tuple[int, list[int]]]:
    """Divide samples into those that share their prompt in a row of `length`: (tokens that they share, their numbers).

    The prompt's last token is each sample's own: what it computes predicts the first one that was drawn.
    """
    found: list[tuple[int, list[int]]] = []
    latest: dict[tuple[Any, ...], int] = {}  # the last of `found` of each prompt and what it shows
    room: list[int] = []
    for i, s in enumerate(samples):
        prompt = tuple(s.tokens[: int(np.argmax(s.drawn))]) if s.drawn.any() else tuple(s.tokens)
        before = max(0, min(len(prompt), int(sizes[i])) - 1)
        own, at = int(sizes[i]) - before, latest.get((prompt, s.task.images))
        if at is None or own > room[at]:
            latest[prompt, s.task.images] = at = len(found)
            found.append((before, []))
            room.append(length - before)
        found[at][1].append(i)
        room[at] -= own
    return [(before if len(members) > 1 else 0, members) for before, members in found]
