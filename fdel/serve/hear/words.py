"""When each word was said: the path of least cost through a decoder's attention to a sound, and tokens joined to words."""

import string
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

BEFORE, AFTER = "\"'“¿([{-", "\"'.。,，!！?？:：”)]}、"  # marks that belong to the word behind them, or before them
UNSPACED = {"zh", "ja", "th", "lo", "my", "yue"}  # languages that put no spaces between words


class Word(NamedTuple):
    """A word and when it was said, in seconds."""

    text: str
    start: float
    end: float


def align(weights: np.ndarray, width: int) -> np.ndarray:
    """Find at which state of the sound each row begins, by attention float32[heads rows states]: int[rows].

    Each head's weights are normalised over the rows, smoothed over time by a median of `width`, and averaged; `warp` finds
    the path (as in Whisper's own code and transformers').
    """
    mean, std = weights.mean(1, keepdims=True), weights.std(1, keepdims=True)
    smooth = median((weights - mean) / np.maximum(std, 1e-30), width)
    return warp(-smooth.mean(0).astype(np.float64))


def median(x: np.ndarray, width: int) -> np.ndarray:
    """Take the median of `width` neighbours along the last axis, its ends reflected; a short axis stays as it is."""
    half = width // 2
    if x.shape[-1] <= half:
        return x
    padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(half, half)], mode="reflect")
    return np.median(np.lib.stride_tricks.sliding_window_view(padded, width, axis=-1), axis=-1)


def warp(cost: np.ndarray) -> np.ndarray:
    """Find the cheapest monotone path through float[rows columns], corner to corner: the first column of each row.

    Dynamic time warping with steps (1, 1), (1, 0) and (0, 1); where two are equally cheap, (0, 1). Computed along
    diagonals, whose cells do not depend on each other.
    """
    rows, columns = cost.shape
    total = np.full((rows + 1, columns + 1), np.inf, np.float32)
    step = np.full((rows + 1, columns + 1), 2, np.int8)
    total[0, 0], step[1:, 0] = 0, 1
    for d in range(2, rows + columns + 1):
        i = np.arange(max(1, d - columns), min(rows, d - 1) + 1)
        j = d - i
        both, down, right = total[i - 1, j - 1], total[i - 1, j], total[i, j - 1]
        taken = np.where((both < down) & (both < right), 0, np.where((down < both) & (down < right), 1, 2))
        total[i, j] = cost[i - 1, j - 1] + np.choose(taken, (both, down, right))
        step[i, j] = taken
    first, i, j = np.zeros(rows, np.int64), rows, columns
    while i > 0 and j > 0:
        first[i - 1] = j - 1
        taken = step[i, j]
        i, j = i - (taken != 2), j - (taken != 1)
    return first


def split(
    spoken: Sequence[tuple[int, float, float]], decode: Callable[[list[int]], str], language: str | None
) -> list[Word]:
    """Join tokens (id, start, end) to words; `decode` gives the text of ids.

    A word begins with a space, in languages without them with each character; marks stand with the word before or behind.
    """
    pieces = list[Word]()
    part: list[tuple[int, float, float]] = []
    for token in spoken:
        part.append(token)
        said = decode([t for t, _, _ in part])
        if "\ufffd" not in said or len(part) == 4:  # a character of several tokens is complete, or none
            pieces.append(Word(said, part[0][1], part[-1][2]))
            part = []
    if part:
        pieces.append(Word(decode([t for t, _, _ in part]), part[0][1], part[-1][2]))
    out = list[Word]()
    for p in pieces:
        mark = p.text.strip() in string.punctuation
        if out and not (p.text.startswith(" ") or mark or language in UNSPACED):
            p = Word(out[-1].text + p.text, out.pop().start, p.end)
        out.append(p)
    return _with_marks(out)


def _with_marks(found: list[Word]) -> list[Word]:
    """Join marks to the words that they belong to."""
    behind = list[Word]()
    for w in reversed(found):
        if behind and w.text.startswith(" ") and w.text.strip() in BEFORE:
            w = Word(w.text + behind[-1].text, w.start, behind.pop().end)
        behind.append(w)
    out = list[Word]()
    for w in reversed(behind):
        if out and w.text in AFTER and not out[-1].text.endswith(" "):
            w = Word(out[-1].text + w.text, out.pop().start, w.end)
        out.append(w)
    return out
