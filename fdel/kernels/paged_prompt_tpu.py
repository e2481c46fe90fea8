"""Attention of a prompt's tokens to a group of pages on TPUs: what `paged_program_tpu` computes of tiles with many rows.

The work is cut in items, some hundred rows of a key head each, and an item in three stages (`stages_tpu`): its scores and
their greatest; its probabilities and what they add up to; its products with the values.

Sums of probabilities are kept for each lane apart, and added up once a tile; all lanes of `top` and `decay` hold the same.
Groups of which every row sees every key are computed without a mask.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fdel.kernels import stages_tpu as stages
from fdel.ops.mask import NEG, Mask
from fdel.ops.paged import LANES

KEYS = 256  # of a product of scores: what a v6e's multipliers are wide, and twice a v5p's
ROWS = 64  # whose scores are multiplied, masked and compared before those of others, and so stay in registers
TOGETHER = {
    False: 2,
    True: 6,
}  # items in a round of the loop: with a mask, and without one, where code for it is spared
NAMES = "scores probs least decay"  # memory of two items


class Read(NamedTuple):
    """What gives keys and values of a head, and what to multiply scores (a scale is in it) and probabilities with."""

    k: Callable[[Any], Array]
    v: Callable[[Any], Array]
    k_times: Callable[[Any], Any]
    v_times: Callable[[Any], Any]


class Part(NamedTuple):
    """What is computed: heads, the rows of an item, the mask, how scores are capped, and which keys of a row are seen."""

    heads: int
    rows: int
    mask: Mask
    cap: Callable[[Array], Array]
    seen: Callable[[Any, tuple[int, ...], int], Array] | None


def memory(rows: int, keys: int, dtype: Any) -> list:
    """Give the memory that `attend` needs, in the order of `NAMES`."""
    from jax.experimental.pallas import tpu as pltpu

    numbers = lambda n: pltpu.VMEM((2, rows, n), jnp.float32)
    return [numbers(keys), pltpu.VMEM((2, rows, keys), dtype), numbers(LANES), numbers(LANES)]


def whole(mask: Mask, tokens: int, keys: int, run: tuple) -> Array:
    """Tell whether all rows of a tile see all keys of a group."""
    start, _, count, first = run
    seen = (count == tokens) & (first + keys - 1 <= start)
    last = start + count - 1
    if mask.window is not None:
        seen &= first >= last - (mask.window - 1)
    return seen if mask.chunk is None else seen & (first >= jax.lax.div(last, jnp.int32(mask.chunk)) * mask.chunk)


def attend(r: Any, part: Part, read: Read) -> None:
    """Add a group of pages to the sums of all heads; without `part.seen` every row sees every key."""
    items = part.heads * (r.q.shape[1] // part.rows)
    each = _scores, _probabilities, _products
    stages.run(items, [functools.partial(stage, r, part, read) for stage in each], TOGETHER[part.seen is None])


def _at(r: Any, part: Part, n: Any, first: int = 0, rows: int | None = None) -> tuple:
    """Give the head of item n, and where its rows lie."""
    from jax.experimental import pallas as pl

    parts = r.q.shape[1] // part.rows
    return n // parts, pl.ds(pl.multiple_of(n % parts * part.rows + first, 8), rows or part.rows)


def _blocks(part: Part) -> list[slice]:
    """Cut the rows of an item."""
    return [slice(i, min(i + ROWS, part.rows)) for i in range(0, part.rows, ROWS)]


def _lanes(keys: int) -> list[slice]:
    """Cut keys in registers' lanes, if they fill them."""
    width = LANES if keys % LANES == 0 else keys
    return [slice(i, i + width) for i in range(0, keys, width)]


def _scores(r: Any, part: Part, read: Read, n: Any, to: int) -> None:
    """Write an item's scores times log2(e), and the greatest of each row so far."""
    at, keys = _at(r, part, n), r.scores.shape[-1]
    k, times, wide = read.k(at[0]), read.k_times(at[0]), KEYS if keys % KEYS == 0 else keys
    tops: dict[int, Array] = {}
    for key in range(0, keys, wide):
        of = slice(key, key + wide)
        x = jax.lax.dot_general(r.q[at], k[of], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        for rows in _blocks(part):
            y = part.cap(x[rows] * (times if isinstance(times, float) else times[:, of]))
            if part.seen is not None:
                y = jnp.where(part.seen(at[1].start + rows.start, y.shape, key), y, NEG)
            r.scores[to, rows, of] = y
            for lanes in _lanes(wide):  # registers with registers first; lanes of one with each other once a row
                tops[rows.start] = jnp.maximum(tops[rows.start], y[:, lanes]) if rows.start in tops else y[:, lanes]
    for rows in _blocks(part):
        old = r.top[_at(r, part, n, rows.start, rows.stop - rows.start)]
        r.least[to, rows] = jnp.maximum(old, tops[rows.start].max(1, keepdims=True))


def _probabilities(r: Any, part: Part, read: Read, n: Any, to: int) -> None:
    """Write an item's probabilities, times what values are multiplied with, and how much its sums fade."""
    head, keys = _at(r, part, n)[0], r.scores.shape[-1]
    times = read.v_times(head)
    for rows in _blocks(part):
        at = _at(r, part, n, rows.start, rows.stop - rows.start)
        new = r.least[to, rows]
        decay = jnp.exp2(r.top[at] - new)
        least = new if part.seen is None else jnp.maximum(new, NEG / 2)  # of a row that sees nothing yet
        total = r.total[at] * decay
        for lanes in _lanes(keys):
            p = jnp.exp2(r.scores[to, rows, lanes] - (least if keys % LANES == 0 else least[:, :1]))
            total += p if keys % LANES == 0 else p.sum(1, keepdims=True) / LANES
            p = p if times is None else p * times[:, lanes]
            r.probs[to, rows, lanes] = p.astype(r.probs.dtype)
        r.total[at], r.decay[to, rows], r.top[at] = total, decay, new


def _products(r: Any, part: Part, read: Read, n: Any, to: int) -> None:
    """Add an item's probabilities times values to its sums."""
    head = _at(r, part, n)[0]
    more = jnp.dot(r.probs[to], read.v(head), preferred_element_type=jnp.float32)
    for rows in _blocks(part):
        h, mine = _at(r, part, n, rows.start, rows.stop - rows.start)
        decay = r.decay[to, rows]
        for of in _lanes(more.shape[1]):
            by = decay if of.stop - of.start == LANES else decay[:, : of.stop - of.start]
            r.sums[h, mine, of] = r.sums[h, mine, of] * by + more[rows, of]
