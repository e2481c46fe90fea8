"""Which samples are learnt, and how much: pure functions of what is known of them, on the host.

Groups are n samples of one prompt, one after the other; NaN rewards are those of samples about which nothing is known.
"""

import numpy as np
from jaxtyping import Bool, Float, Int

from fdel.train.losses.stats import check_range
from fdel.train.rollout.advantages import Rewards, equal_groups

Which = Bool[np.ndarray, " B"]


def best(scores: Rewards, n: int, top: int) -> Which:
    """Choose the `top` samples of each group with the highest scores, of equals the earlier ones (GFPO, arXiv:2508.09726).

    NaN scores come last and are never chosen. Advantages are then of the chosen ones: `grouped(np.where(chosen, total,
    np.nan), n)`.
    >>> best(np.array([3.0, 1.0, 2.0, 5.0, 5.0, 5.0]), 3, 2)
    array([ True, False,  True,  True,  True, False])
    """
    if not 1 <= top <= n or len(scores) % n:
        raise ValueError(f"top={top} of groups of {n}, of {len(scores)} samples; expected 1 to {n}, and whole groups")
    groups = np.asarray(scores, np.float64).reshape(-1, n)
    order = np.argsort(np.where(np.isnan(groups), np.inf, -groups), 1, kind="stable")
    chosen = np.zeros(groups.shape, bool)
    np.put_along_axis(chosen, order[:, :top], True, 1)
    return (chosen & ~np.isnan(groups)).reshape(-1)


def conciseness(
    total: Rewards, lengths: Int[np.ndarray, " B"], n: int, *, length: float = 0.5, efficiency: float = 0.5
) -> Rewards:
    """Score samples for `best`: short ones, and those with much reward per token; `length` and `efficiency` weigh the two.

    Both parts lie in [0, 1] within a group: 1 - length / longest, and reward per token from the lowest to the highest.
    """
    check_range(length=length, efficiency=efficiency)
    lengths = np.maximum(np.asarray(lengths, np.float64), 1).reshape(-1, n)
    rate = np.asarray(total, np.float64).reshape(-1, n) / lengths
    there = ~np.isnan(rate)
    low = np.min(rate, 1, where=there, initial=np.inf, keepdims=True)
    span = np.max(rate, 1, where=there, initial=-np.inf, keepdims=True) - low
    known = np.isfinite(span) & (span > 0)
    eased = np.where(known, (rate - np.where(known, low, 0)) / np.where(known, span, 1), rate * 0)
    return (length * (1 - lengths / lengths.max(1, keepdims=True)) + efficiency * eased).reshape(-1)


def unequal(total: Rewards, n: int) -> Which:
    """Choose the samples of groups whose rewards differ: the others teach nothing (DAPO's dynamic sampling)."""
    return np.repeat(~equal_groups(total, n), n)


def solved_between(total: Rewards, n: int, low: float = 0.1, high: float = 0.95) -> Which:
    """Choose the samples of groups whose mean reward lies in [low, high]: tasks neither too hard nor too easy."""
    check_range(low, high=high)
    groups = np.asarray(total, np.float64).reshape(-1, n)
    count = (~np.isnan(groups)).sum(1)
    mean = np.nansum(groups, 1) / np.maximum(count, 1)
    return np.repeat((count > 0) & (low <= mean) & (mean <= high), n)


def difficulty_weights(
    difficulty: Float[np.ndarray, " B"], *, low: float = 0.5, high: float = 2.0
) -> Float[np.ndarray, " B"]:
    """Weigh advantages by how hard a task is: from `low` for difficulty 0, or less, to `high` for 1, or more; NaN weighs 1.
    >>> difficulty_weights(np.array([0.0, 0.5, 3.0, np.nan]))
    array([0.5 , 1.25, 2.  , 1.  ])
    """
    check_range(low=low, high=high)
    d = np.asarray(difficulty, np.float64)
    return np.where(np.isnan(d), 1.0, low + (high - low) * np.clip(d, 0, 1))


def learnt(drawn: Bool[np.ndarray, "B T"], chosen: Which) -> Bool[np.ndarray, "B T"]:
    """Mask the tokens that are learnt: those drawn, of the chosen samples (as those that ended before the limit)."""
    return np.asarray(drawn, bool) & np.asarray(chosen, bool)[:, None]
