"""Packing: rows equal to TRL's on the same lengths (fixture), and what holds for any lengths."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fdel.train.data import best_fit, first_fit, pack

TRL = json.loads((Path(__file__).parent / "fixtures" / "packing.json").read_text())
OURS = {"bfd": "best_fit", "bfd_split": "best_fit_split", "wrapped": "wrapped"}


def rows_of(lengths, size: int, packing: str | None) -> list[list[tuple[int, int, int]]]:
    """The pieces of each row."""
    pieces, bounds = pack(np.array(lengths, np.int64), size, packing)
    return [[tuple(p) for p in pieces[a:b].tolist()] for a, b in zip(bounds, bounds[1:], strict=False)]


@pytest.mark.parametrize("strategy", OURS)
@pytest.mark.parametrize("case", TRL)
def test_rows_are_trls(case: str, strategy: str) -> None:
    """In TRL equal lengths may come in another order, so each row is known by its segments' lengths."""
    got = [
        [stop - start for _, start, stop in row]
        for row in rows_of(TRL[case]["lengths"], TRL[case]["size"], OURS[strategy])
    ]
    want = TRL[case][strategy]
    if strategy == "wrapped":
        assert got == want
    else:
        assert sorted(map(sum, got)) == sorted(map(sum, want))
        assert len(got) == len(want) and sum(map(sum, got)) == sum(map(sum, want))


@given(
    st.lists(st.integers(1, 70), max_size=60), st.integers(1, 50), st.sampled_from(["first_fit", *OURS.values(), None])
)
def test_every_token_once(lengths: list[int], size: int, packing: str | None) -> None:
    """Every token that is kept stands in one row; no row is too long; only long examples are cut."""
    rows = rows_of(lengths, size, packing)
    whole = packing in ("best_fit_split", "wrapped")
    pieces = sorted(piece for row in rows for piece in row)
    wanted = [(i, t) for i, n in enumerate(lengths) for t in range(n if whole else min(n, size))]
    assert [(i, t) for i, a, b in pieces for t in range(a, b)] == wanted
    assert all(0 < sum(b - a for _, a, b in row) <= size for row in rows)
    if packing != "wrapped":
        assert all(sum(i == j for j, _, _ in pieces) == (-(-n // size) if whole else 1) for i, n in enumerate(lengths))
    else:
        assert [p for row in rows for p in row] == pieces  # in order
        assert all(sum(b - a for _, a, b in row) == size for row in rows[:-1])


TEXTS_AND_RUNS = st.lists(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 12)), max_size=5), max_size=20)


@given(TEXTS_AND_RUNS, st.integers(12, 20), st.sampled_from(["wrapped", "best_fit_split"]))
def test_no_cut_goes_through_a_run(found: list, size: int, packing: str) -> None:
    """A row ends where it is full, or before a run that it has no room for; with none all is as before."""
    lengths = [sum(map(sum, example)) for example in found]
    ends = [np.cumsum([n for pair in example for n in pair]).tolist() for example in found]
    runs = [list(zip(e[::2], e[1::2], strict=True)) for e in ends]  # of text and run in turns
    pieces, bounds = pack(np.array(lengths, np.int64), size, packing, lambda i: runs[i])
    assert sorted((i, t) for i, a, b in pieces.tolist() for t in range(a, b)) == [
        (i, t) for i, n in enumerate(lengths) for t in range(n)
    ]
    assert not any(first < cut < last for i, *cuts in pieces.tolist() for cut in cuts for first, last in runs[i])
    sums = [sum(b - a for _, a, b in pieces[x:y].tolist()) for x, y in zip(bounds, bounds[1:], strict=False)]
    assert all(0 < n <= size for n in sums)
    for n, (i, a, _) in zip(sums, pieces[bounds[1:-1]].tolist(), strict=False):
        after = next((last - first for first, last in runs[i] if first == a), 1)
        assert packing != "wrapped" or n + after > size
    plain, same = (pack(np.array(lengths, np.int64), size, packing, r) for r in (None, lambda i: []))
    np.testing.assert_array_equal(plain[0], same[0])
    np.testing.assert_array_equal(plain[1], same[1])


def test_a_run_that_no_row_holds_is_an_error() -> None:
    with pytest.raises(ValueError, match="tokens that stand together are more than size=8"):
        pack(np.array([20]), 8, "wrapped", lambda i: [(3, 12)])


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60))
def test_no_two_rows_fit_together(lengths: list[int]) -> None:
    """First and best fit never open a row for an example that another has room for."""
    n = np.array(lengths)
    for fit in (first_fit, best_fit):
        used = sorted(int(n[row].sum()) for row in fit(n, 40))
        assert sum(used[:2]) > 40 or len(used) == 1
    order = np.argsort(-n, kind="stable")
    decreasing = first_fit(n[order], 40)
    assert len(best_fit(n, 40)) <= 11 / 9 * len(decreasing) + 4


def test_first_fit_by_hand() -> None:
    assert first_fit(np.array([5, 4, 3, 6, 2, 1]), 8) == [[0, 2], [1, 4, 5], [3]]
    assert best_fit(np.array([5, 4, 3, 6, 2, 1]), 8) == [[3, 4], [0, 2], [1, 5]]


def test_fill() -> None:
    """Documents as on the web, 4096 tokens a row: above 97 % in windows of 4096 documents."""
    lengths = np.random.default_rng(0).lognormal(6.0, 1.0, 4096).astype(int) + 1
    fill = {}
    for packing in ("first_fit", "best_fit", "best_fit_split", "wrapped"):
        pieces, bounds = pack(lengths, 4096, packing)
        fill[packing] = (pieces[:, 2] - pieces[:, 1]).sum() / (4096 * (len(bounds) - 1))
    assert min(fill.values()) > 0.97 and fill["best_fit"] > 0.99
