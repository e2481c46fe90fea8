"""The program of `flash_backward_gpu` that gives dk and dv of a tile of keys."""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fdel.kernels import transfer_gpu
from fdel.kernels.flash_gradients_gpu import (
    COPYING,
    MULTIPLYING,
    ROWS,
    About,
    Tile,
    added,
    nothing,
    operand,
    probabilities,
    registers,
    spread,
    zero,
)  # fmt: skip
from fdel.kernels.flash_tiles import END, FIRST, NUMBERS, WHOLE_FROM, WHOLE_TO

HANDS = 2  # tiles of probabilities on their way from one group of warps to the other


class Walk(NamedTuple):
    """What a program walks: its memory, the bounds of its tile of keys, that tile, its row and its key head.

    A step is of a tile of queries, from `begin` to before `end`, and one of the group's query heads, which go round first.
    """

    s: Any
    bounds: Any
    tile: Any
    row: Any
    head: Any
    begin: Any
    end: Any

    def steps(self, about: About) -> Any:
        """Count the steps."""
        return (self.end - self.begin) * about.group

    def slot(self, i: Any) -> Any:
        """Give the place of a step's queries in memory."""
        return jax.lax.rem(i, jnp.int32(self.s.q_s.shape[0]))

    def queries(self, about: About, i: Any) -> Any:
        """Give the tile of queries of a step."""
        return self.begin + jax.lax.div(i, jnp.int32(about.group))

    def hand(self, about: About, i: Any, part: int) -> Any:
        """Give the place of a step's probabilities of 64 keys."""
        return jax.lax.rem(i, jnp.int32(HANDS)) * (about.tiles.keys // ROWS) + part


def of_keys(*refs: Any, about: About, **memory: Any) -> None:
    """Give dk and dv of a tile of keys; `refs` are the arguments and results of the kernel."""
    from jax.experimental import pallas as pl

    *_, bounds, dk, dv = refs
    tile, row, head, mine = (jax.lax.axis_index(name) for name in ("tile", "row", "head", "warps"))
    s = SimpleNamespace(**memory)
    w = Walk(s, bounds, tile, row, head, bounds[row, tile, FIRST], bounds[row, tile, END])
    scores, weights = (functools.partial(f, about, w) for f in (_scores, _weights))
    pl.when(mine == 2)(lambda: copy(refs, about, w))
    pl.when(mine == 0)(lambda: _sums(about, w, scores, (s.k_s, s.q_s, s.dout_s), dv, 1.0))
    pl.when(mine == 1)(lambda: _sums(about, w, weights, (s.v_s, s.dout_s, s.q_s), dk, about.scale))


def copy(refs: tuple, about: About, w: Walk) -> None:
    """Copy the keys and their values, then queries, as places for them are free."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    q, k, v, dout, lse, delta, numbers, segments, *_ = refs
    s, row, size = w.s, w.row, about.tiles
    channels = lambda head, width: pl.ds(head * width, width)

    def fetch(i: Any, _: None) -> None:
        slot, n = w.slot(i), w.head * about.group + jax.lax.rem(i, jnp.int32(about.group))
        tokens = pl.ds(w.queries(about, i) * size.queries, size.queries)
        pl.when(i >= s.q_s.shape[0])(lambda: gpu.barrier_wait(s.free.at[slot]))
        given = (
            (q.at[row, tokens, channels(n, about.width)], s.q_s),
            (dout.at[row, tokens, channels(n, about.values)], s.dout_s),
            (lse.at[row, n, tokens], s.lse_s), (delta.at[row, n, tokens], s.delta_s),
            (numbers.at[row, pl.ds(0, NUMBERS), tokens], s.numbers_s),
        )  # fmt: skip
        for ref, to in given:
            gpu.copy_gmem_to_smem(ref, to.at[slot], s.full.at[slot])

    registers(about, COPYING, "decrease")
    for part in range(size.keys // ROWS):
        here = pl.ds(w.tile * size.keys + part * ROWS, ROWS)
        given = (
            (k.at[row, here, channels(w.head, about.width)], s.k_s),
            (v.at[row, here, channels(w.head, about.values)], s.v_s), (segments.at[row, here], s.segments_s),
        )  # fmt: skip
        for ref, to in given:
            gpu.copy_gmem_to_smem(ref, to.at[part], s.shared.at[0])
    jax.lax.fori_loop(0, w.steps(about), fetch, None)


def _sums(about: About, w: Walk, weigh: Callable, operands: tuple[Any, Any, Any], to: Any, factor: float) -> None:
    """Walk the tiles of queries: to sums of each 64 keys add weigh(i, slot, part, left right^T) times other.

    All products with the right side begin before the first is waited for; while one is weighed others go on.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    s, (left, right, other) = w.s, operands
    width, parts = other.shape[2], about.tiles.keys // ROWS

    def each(i: Any, found: list[Array]) -> list[Array]:
        slot, none = w.slot(i), zero(w.bounds[w.row, w.tile, FIRST])

        def multiply(*accs: Any) -> None:
            for part, x in enumerate(accs[parts:]):
                gpu.wgmma(x, left.at[part + none], right.at[slot].transpose((1, 0)))
            for part, (acc, x) in enumerate(zip(accs[:parts], accs[parts:], strict=True)):
                weights = weigh(i, slot, part, gpu.wgmma_accumulator_load(x, wait_n=parts - 1))
                gpu.wgmma(acc, weights, other.at[slot])

        gpu.barrier_wait(s.full.at[slot])
        found = added(about, multiply, found, *[(ROWS, about.tiles.queries)] * parts)
        gpu.barrier_arrive(s.free.at[slot])
        return found

    registers(about, MULTIPLYING, "increase")
    gpu.barrier_wait(s.shared.at[0])
    for part, x in enumerate(jax.lax.fori_loop(0, w.steps(about), each, [nothing(width)] * parts)):
        rows = pl.ds(w.tile * about.tiles.keys + part * ROWS, ROWS)
        transfer_gpu.store(to.at[w.row, rows, pl.ds(w.head * width, width)], (x * factor).astype(to.dtype))


def _scores(about: About, w: Walk, i: Any, slot: Any, part: int, x: Array) -> Any:
    """Give probabilities of 64 keys, and hand on what their gradients are multiplied with."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    s, j, to = w.s, w.queries(about, i), w.hand(about, i, part)
    whole = (w.bounds[w.row, w.tile, WHOLE_FROM] <= j) & (j < w.bounds[w.row, w.tile, WHOLE_TO])
    at = Tile(s.numbers_s.at[slot], s.segments_s.at[part], w.tile * about.tiles.keys + part * ROWS, 1, whole)
    p, weight = probabilities(about, x, columns(s.lse_s.at[slot]), at)
    pl.when(i >= HANDS)(lambda: gpu.barrier_wait(s.taken.at[to]))
    s.hand_s.at[to][...] = weight.astype(s.hand_s.dtype)
    gpu.barrier_arrive(s.given.at[to])
    return operand(about, p.astype(s.hand_s.dtype), s, 0, part)


def _weights(about: About, w: Walk, i: Any, slot: Any, part: int, x: Array) -> Any:
    """Give gradients of scores of 64 keys, from those of probabilities."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    s, of = w.s, w.hand(about, i, part)
    x -= spread(columns(s.delta_s.at[slot]), x.shape, 1)
    gpu.barrier_wait(s.given.at[of])
    x *= transfer_gpu.load(s.hand_s.at[of], layout=gpu.Layout.WGMMA).astype(jnp.float32)
    gpu.barrier_arrive(s.taken.at[of])
    return operand(about, x.astype(s.hand_s.dtype), s, 1, part)


def columns(ref: Any) -> Float[Array, " n"]:
    """Load a number for each column of a product."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    return transfer_gpu.load(ref, layout=gpu.Layout.WGMMA.reduce(0))
