"""The order of an epoch: what each source gives, when an epoch ends, and that it depends on seed and epoch alone."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fdel.train.data import Settings, interleave, order

SIZES, WEIGHTS = [40, 25, 100], [0.5, 0.3, 0.2]


def sources(found: np.ndarray) -> np.ndarray:
    """Of each number, its source."""
    return np.searchsorted(np.cumsum(SIZES), found, "right")


@given(st.lists(st.floats(0.05, 1), min_size=2, max_size=4), st.integers(1, 200))
def test_prefixes_have_the_shares(weights: list[float], count: int) -> None:
    shares = np.array(weights) / sum(weights)
    chosen = interleave(shares, count)
    counts = np.cumsum(chosen[:, None] == np.arange(len(shares)), 0)
    assert np.abs(counts - shares * np.arange(1, count + 1)[:, None]).max() < len(shares) / 2 + 0.5


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("block", [None, 10, 7])
def test_first_exhausted(shuffle: bool, block: int | None) -> None:
    """The epoch ends before any example comes twice, and when one source is used up."""
    found = order(SIZES, WEIGHTS, Settings(block=block, shuffle=shuffle), 0)
    counts = np.bincount(sources(found), minlength=3)
    assert len(set(found.tolist())) == len(found) and (counts == SIZES).any()
    assert np.abs(counts / len(found) - WEIGHTS).max() < (0.03 if block != 7 else 0.08)


@pytest.mark.parametrize("block", [None, 10])
def test_longest(block: int | None) -> None:
    """Everything comes; the others come again, evenly."""
    found = order(SIZES, WEIGHTS, Settings(stop="longest", block=block), 0)
    times = np.bincount(found, minlength=sum(SIZES))
    assert times.min() == 1 and times[65:].max() == 1
    for first, last in ((0, 40), (40, 65)):
        assert times[first:last].max() - times[first:last].min() <= 1
    assert len(found) == pytest.approx(100 / 0.2, rel=0.02)
    first = found[sources(found) == 0][:80]
    assert not np.array_equal(first[:40], first[40:])  # shuffled anew


def test_blocks_are_exact() -> None:
    found = sources(order(SIZES, WEIGHTS, Settings(block=10), 0))
    blocks = [np.bincount(b, minlength=3).tolist() for b in np.split(found[: len(found) // 10 * 10], len(found) // 10)]
    assert all(b == [5, 3, 2] for b in blocks)
    with pytest.raises(ValueError, match="block=2 is too small"):
        order(SIZES, WEIGHTS, Settings(block=2), 0)


def test_without_weights() -> None:
    assert order(SIZES, None, Settings(shuffle=False), 3).tolist() == list(range(165))
    epochs = [order(SIZES, None, Settings(), e).tolist() for e in (0, 0, 1)]
    assert sorted(epochs[0]) == list(range(165)) and epochs[0] == epochs[1] != epochs[2]


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_seed_and_epoch_decide(weights: list[float] | None) -> None:
    settings = Settings(block=10)
    runs = {
        (s, e): order(SIZES, weights, dataclasses.replace(settings, seed=s), e).tolist() for s in (0, 1) for e in (0, 1)
    }
    assert len({tuple(r) for r in runs.values()}) == 4
    assert runs[0, 1] == order(SIZES, weights, settings, 1).tolist()
