"""From samples to the batch that policy losses read (`losses.sampled`): on the host, of few shapes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from fdel.ops.batch import Packed
from fdel.train.data.planning import pack
from fdel.train.losses.forward import learnt_places
from fdel.train.rollout.records import Sample

Batch = dict[str, Any]
COLUMNS = {"mask": np.bool_, "logps": np.float32, "kept": np.float32, "advantages": np.float32}


def collate(
    samples: Sequence[Sample],
    advantages: Float[np.ndarray, " B"],
    *,
    length: int,
    rows: int = 1,
    packed: bool = False,
    learn: Sequence[bool] | None = None,
    most: int | None = None,
) -> Batch:
    """Put samples and their advantages into rows: {"tokens", "mask", "logps", "kept", "advantages", "places"}.

    All but "places" have the shape [R T], and each number stands at the token that it is about. Every row is one sample,
    with "lengths"; with `packed` rows of `length` tokens hold several, with "packed". T is a power of two, or `length`; R a
    multiple of `rows`, and with `packed` that times a power of two: empty rows fill up, so that few shapes are compiled.
    With `most`, the tokens of a sample that are learnt at most, T is `length` and the shapes do not depend on the samples.
    `learn` tells which samples are learnt: of the others the mask is False. Samples that ended with an error are not. A
    sample of more than `length` tokens loses its end.
    """
    advantages = np.asarray(advantages, np.float32)
    if advantages.shape != (len(samples),) or not samples:
        raise ValueError(
            f"{len(samples)} samples and advantages {advantages.shape}; expected one for each, and at least one"
        )
    sizes = np.minimum([len(s.tokens) for s in samples], length)
    pieces, bounds = pack(sizes, length, "best_fit" if packed else None)
    grouped = [pieces[a:b, 0].tolist() for a, b in zip(bounds[:-1], bounds[1:], strict=True)]
    width = length if packed or most else min(length, power(int(sizes.max())))
    height = rows * power(-(-len(grouped) // rows)) if packed else -(-len(grouped) // rows) * rows
    full: Batch = {k: np.zeros((height, width), t) for k, t in COLUMNS.items()}
    full |= {"tokens": np.zeros((height, width), np.int32), "positions": np.zeros((height, width), np.int32)}
    full["segments"] = np.full((height, width), -1, np.int32)
    for r, members in enumerate(grouped):
        start = 0
        for segment, i in enumerate(members):
            s, n = samples[i], int(sizes[i])
            here = (r, slice(start, start + n))
            learnt = s.drawn[:n] & (s.finish != "error") & (learn is None or bool(learn[i]))
            full["tokens"][here], full["positions"][here], full["segments"][here] = s.tokens[:n], np.arange(n), segment
            full["mask"][here], full["logps"][here], full["kept"][here] = learnt, s.logps[:n], s.kept[:n]
            full["advantages"][here] = learnt * advantages[i]
            start += n
    found: Batch = {k: full[k] for k in ("tokens", *COLUMNS)}
    segments, positions = full["segments"], full["positions"]
    found |= {"packed": Packed(positions, segments)} if packed else {"lengths": (segments >= 0).sum(1, dtype=np.int32)}
    places = power(max(1, most or int(found["mask"].sum(1).max())))
    return found | {"places": learnt_places(found, min(width, places))}


def power(n: int) -> int:
    """The smallest power of two from n on.
    >>> [power(n) for n in (1, 5, 8)]
    [1, 8, 8]
    """
    return 1 << max(0, n - 1).bit_length()
