"""In which order an epoch reads the examples of several sources: a pure function of sizes, weights and the seed."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from fdel.train.data.settings import Settings


def order(
    sizes: Sequence[int], weights: Sequence[float] | None, settings: Settings, epoch: int
) -> Int[np.ndarray, " N"]:
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
