"""The program of `flash_backward_gpu` that gives dk and dv of a tile of keys, and adds its part of dq up in memory.

Algorithm: FlashAttention-3's backward pass (arXiv 2407.08608, appendix B) with the product for dq one step late. A program
has 128 keys and walks tiles of 64 queries; two groups of warps multiply, with 64 keys each. In a step a group begins
  s = k q^T and dp = v dout^T, [64 keys, 64 queries] each; then, with p in registers,
  dv += p dout and, of the step before, dq = ds^T k: all 128 keys, half of the channels; then, with ds in registers,
  dk += ds q.
ds goes to the other group through shared memory, and has a step's time to get there. The products for dq run while ds is
computed, that for dk while dq is copied to shared memory and those of the next step begin. From there TMA adds dq, in
float32, to an array in memory: in no fixed order, so that dq is not the same in the last bit from call to call.
"""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fdel.kernels import transfer_gpu
from fdel.kernels.flash_gradients_gpu import (
    MULTIPLYING,
    ROWS,
    About,
    Tile,
    operand,
    probabilities,
    registers,
    spread,
    zero,
)  # fmt: skip
from fdel.kernels.flash_keys_gpu import HANDS, Walk, columns, copy
from fdel.kernels.flash_tiles import END, FIRST, WHOLE_FROM, WHOLE_TO

GROUPS = 2  # of warps, that multiply


def of_both(*refs: Any, about: About, **memory: Any) -> None:
    """Give dk and dv of a tile of keys and add to dq; `refs` are the arguments, dq, which is 0 before, dk and dv."""
    from jax.experimental import pallas as pl

    *_, bounds, dq, dk, dv = refs
    tile, row, head, mine = (jax.lax.axis_index(name) for name in ("tile", "row", "head", "warps"))
    s = SimpleNamespace(**memory)
    w = Walk(s, bounds, tile, row, head, bounds[row, tile, FIRST], bounds[row, tile, END])
    pl.when(mine == GROUPS)(lambda: copy(refs, about, w))
    for group in range(GROUPS):
        pl.when(mine == group)(functools.partial(_multiply, about, w, group, (dq, dk, dv)))


def _multiply(about: About, w: Walk, group: int, to: tuple[Any, Any, Any]) -> None:
    """Walk the tiles of queries with 64 keys; `to` are dq, dk and dv."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    s, size, steps = w.s, about.tiles, w.steps(about)
    of_scores = gpu.ACC((ROWS, size.queries), jnp.float32)

    def walk(dk: Any, dv: Any) -> tuple[Array, Array]:
        def step(i: Any, _: None) -> None:
            pl.run_scoped(functools.partial(_step, about, w, group, to[0], i, (dk, dv)), of_scores, of_scores)

        jax.lax.fori_loop(0, steps, step, None)
        dks, dvs = dk[...], dv[...]
        pl.when(steps > 0)(lambda: pl.run_scoped(functools.partial(_last, about, w, group, to[0]), _of_dq()))
        return dks, dvs

    registers(about, MULTIPLYING, "increase")
    gpu.barrier_wait(s.shared.at[0])
    widths = about.width, about.values
    sums = pl.run_scoped(walk, *[gpu.ACC((ROWS, width), jnp.float32) for width in widths])
    rows = pl.ds(w.tile * size.keys + group * ROWS, ROWS)
    for ref, x, width, factor in zip(to[1:], sums, widths, (about.scale, 1.0), strict=True):
        transfer_gpu.store(ref.at[w.row, rows, pl.ds(w.head * width, width)], (x * factor).astype(ref.dtype))
    gpu.wait_smem_to_gmem(0)


def _of_dq() -> Any:
    from jax.experimental.pallas import mosaic_gpu as gpu

    return gpu.ACC((ROWS, ROWS), jnp.float32)


def _step(about: About, w: Walk, group: int, to: Any, i: Any, sums: tuple[Any, Any], x: Any, dp: Any) -> None:
    """Add a tile of queries to dk and dv, which are `sums`, and to dq what the tile before gives; x and dp begin at 0."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    s, slot, j, none = w.s, w.slot(i), w.queries(about, i), zero(w.bounds[w.row, w.tile, FIRST])
    dk, dv = sums
    now, before, later = _hand(i), _hand(i + 1), pl.when(i > 0)  # two, so the one before is the one after
    gpu.barrier_wait(s.full.at[slot])
    gpu.wgmma(x, s.k_s.at[group + none], s.q_s.at[slot].transpose((1, 0)))
    gpu.wgmma(dp, s.v_s.at[group + none], s.dout_s.at[slot].transpose((1, 0)))
    scores = gpu.wgmma_accumulator_load(x, wait_n=1)  # and dk of the step before
    later(lambda: gpu.barrier_arrive(s.free.at[w.slot(i - 1)]))
    whole = (w.bounds[w.row, w.tile, WHOLE_FROM] <= j) & (j < w.bounds[w.row, w.tile, WHOLE_TO])
    at = Tile(s.numbers_s.at[slot], s.segments_s.at[group], w.tile * about.tiles.keys + group * ROWS, 1, whole)
    p, weight = probabilities(about, scores, columns(s.lse_s.at[slot]), at)
    weight = weight if about.softcap is None else weight.astype(s.ds_s.dtype)  # else both would be held in 32 bits
    gpu.wgmma(dv, operand(about, p.astype(s.ds_s.dtype), s, 0, group), s.dout_s.at[slot])
    ds = gpu.wgmma_accumulator_load(dp, wait_n=1)
    ds = (weight * (ds - spread(columns(s.delta_s.at[slot]), ds.shape, 1))).astype(s.ds_s.dtype)
    later(lambda: gpu.barrier_wait(s.taken.at[now]))
    s.ds_s.at[now * GROUPS + group][...] = ds
    gpu.commit_smem()
    gpu.barrier_arrive(s.given.at[now])

    def finish(dq: Any) -> None:
        later(lambda: gpu.barrier_wait(s.given.at[before]))
        _begin(s, group, before, dq)  # in the first step of what nobody wrote: given to nobody
        gpu.wgmma(dk, operand(about, ds, s, 1, group), s.q_s.at[slot])
        found = gpu.wgmma_accumulator_load(dq, wait_n=1)
        gpu.barrier_arrive(s.taken.at[before])
        later(lambda: _add(about, w, group, to, i - 1, found))

    pl.run_scoped(finish, _of_dq())


def _last(about: About, w: Walk, group: int, to: Any, dq: Any) -> None:
    """Add to dq what the last tile gives."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    i = w.steps(about) - 1
    gpu.barrier_wait(w.s.given.at[_hand(i)])
    _begin(w.s, group, _hand(i), dq)
    _add(about, w, group, to, i, gpu.wgmma_accumulator_load(dq))


def _begin(s: Any, group: int, hand: Any, dq: Any) -> None:
    """Begin the products of all gradients of scores of a step with keys, for half of the channels."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    for part in range(GROUPS):
        gpu.wgmma(dq, s.ds_s.at[hand * GROUPS + part].transpose((1, 0)), s.k_s.at[part, :, pl.ds(group * ROWS, ROWS)])


def _add(about: About, w: Walk, group: int, to: Any, i: Any, found: Float[Array, "64 64"]) -> None:
    """Add to dq in memory; what was added before has left its place in shared memory, which takes a step's time."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    n = w.head * about.group + jax.lax.rem(i, jnp.int32(about.group))
    tokens, place = pl.ds(w.queries(about, i) * about.tiles.queries, about.tiles.queries), w.s.dq_s.at[group]
    gpu.wait_smem_to_gmem(0, wait_read_only=True)
    place[...] = found
    gpu.commit_smem()
    channels = pl.ds(n * about.width + group * ROWS, ROWS)
    gpu.copy_smem_to_gmem(place, to.at[w.row, tokens, channels], reduction_op="add")


def _hand(i: Any) -> Any:
    """Give the place of gradients of scores of a step."""
    return jax.lax.rem(i, jnp.int32(HANDS))
