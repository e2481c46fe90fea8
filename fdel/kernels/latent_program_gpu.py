"""The program of `paged_attention_gpu` for latents, whose first channels are the values: read once for both products.

Multi-head latent attention in its absorbed form (arXiv 2405.04434, section 2.1): all query heads share one key head of 576
channels, so 64 rows need 128 KiB for their sums, more than the registers of one group of warps hold. Three groups share a
program (as in FlashMLA): one copies pages, `DEPTH` ahead; one multiplies queries with keys, gives probabilities, and what
older sums fade by, to shared memory, and sums the left half of the values; the third sums the right half meanwhile.

Bytes read: 2 * keys * width once for each 64 rows, of which programs of the same block find the others' in the second-level
cache. FLOPs: 2 * 64 * keys * (width + values): 121 for each byte of 576 channels, and 242 with two programs of a block.
"""

import functools
import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fdel.kernels import transfer_gpu
from fdel.ops.mask import NEG

ROWS, DEPTH = 64, 2  # of queries in a program, and pages on their way: with queries all of a multiprocessor's memory
PROGRAMS = 132  # that fill an H100 or H200
MEMORY = 224 * 2**10  # bytes for queries, pages and probabilities
COPYING, MULTIPLYING = 40, 232  # registers of a thread, of 168 each
CLEARED = 64  # channels that are cleared at once
LOG2E = math.log2(math.e)


class Part(NamedTuple):
    """Pages of a block that a program walks: the first in the block's table, how many, and the block's last key."""

    begin: Any
    count: Any
    last: Any


def unsupported(pages: tuple[int, ...], values: int) -> str | None:
    """Say why pages [layers P heads page width] of latents with so many values cannot be served, or None."""
    heads, size, width = pages[2:]
    if heads != 1:
        return f"{heads} key heads without values of their own; expected 1"
    if width % 64 or values % 128 or not 0 < values <= min(512, width):
        return f"values in the first {values} of {width} channels; expected multiples of 128, 512 at most, and of 64"
    need = 2 * ROWS * width + DEPTH * 2 * size * width + 2 * ROWS * size
    return None if need <= MEMORY else f"latents of {width} channels take {need} bytes; expected at most {MEMORY}"


def run(
    how: Any, values: int, q: Float[Array, "blocks 1 rows H"], k: Float[Array, "P page H"],
    table: Int[Array, "blocks width"], bounds: Int[Array, "blocks 2 tiles*64"], span: Int[Array, "blocks 3"],
) -> tuple[Array, Array]:  # fmt: skip
    """Give each part's output [blocks 1 splits tiles*64 values] and log-sum-exp [blocks 1 splits tiles*64].

    They are float32, but for the output where there is one part, which has the dtype of q.
    """
    from jax.experimental.pallas import mosaic_gpu as gpu

    blocks, _, rows, width = q.shape
    size, tiles = k.shape[1], -(-rows // ROWS)
    tiled = (gpu.TilingTransform((8, 64)), gpu.SwizzleTransform(128))
    half: Any = functools.partial(gpu.SMEM, dtype=q.dtype, transforms=tiled)
    of = lambda dtype, *shape: jax.ShapeDtypeStruct((blocks, 1, how.splits, tiles * ROWS, *shape), dtype)
    call = gpu.kernel(
        functools.partial(_program, how=how, tile=min(rows, ROWS)),
        kernel_name="latent_paged_attention",
        out_type=(of(q.dtype if how.splits == 1 else jnp.float32, values), of(jnp.float32)),
        scratch_types={
            "q_s": half((ROWS, width)), "k_s": half((DEPTH, size, width)), "p_s": half((ROWS, size)),
            "decay_s": gpu.SMEM((ROWS,), jnp.float32), "q_bar": gpu.Barrier(), "full": gpu.Barrier(num_barriers=DEPTH),
            "free": gpu.Barrier(num_arrivals=2, num_barriers=DEPTH), "ready": gpu.Barrier(), "taken": gpu.Barrier(),
        },
        grid=(blocks * tiles, how.splits),
        grid_names=("block", "split"),
        num_threads=3,
        thread_name="warps",
        compiler_params=gpu.CompilerParams(
            lowering_semantics=gpu.LoweringSemantics.Lane, reduction_scratch_bytes=1024  # of memory that is needed here
        ),
    )  # fmt: skip
    return call(q, k, table, bounds, span)


def _program(*refs: Any, how: Any, tile: int, **memory: Any) -> None:
    """Attend from one tile of rows to one part of its pages; `refs` are the arguments and results of `run`'s kernel."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    q, k, table, bounds, span, out, lse = refs
    at, split, mine = (jax.lax.axis_index(name) for name in ("block", "split", "warps"))
    s, tiles = SimpleNamespace(**memory), bounds.shape[2] // ROWS
    block, first = jax.lax.div(at, jnp.int32(tiles)), jax.lax.rem(at, jnp.int32(tiles)) * ROWS
    rows = pl.ds(first, ROWS)
    each = jax.lax.div(span[block, 1] - span[block, 0] + (how.splits - 1), jnp.int32(how.splits))
    begin = span[block, 0] + split * each
    count = jnp.maximum(jnp.minimum(span[block, 1] - begin, each), 0)

    def registers(count: int, action: Any) -> None:
        if not how.interpreted:
            gpu.set_max_registers(count, action=action)

    def fetch(j: Any, _: None) -> None:
        slot = jax.lax.rem(j, jnp.int32(DEPTH))
        pl.when(j >= DEPTH)(lambda: gpu.barrier_wait(s.free.at[slot]))
        gpu.copy_gmem_to_smem(k.at[table[block, begin + j]], s.k_s.at[slot], s.full.at[slot])

    @pl.when(mine == 2)
    def copy() -> None:
        registers(COPYING, "decrease")
        gpu.copy_gmem_to_smem(q.at[block, 0, pl.ds(first, tile)], s.q_s.at[pl.ds(0, tile)], s.q_bar)
        jax.lax.fori_loop(0, count, fetch, None)

    part = Part(begin, count, span[block, 2])
    left, right = (pl.ds(i * (out.shape[-1] // 2), out.shape[-1] // 2) for i in range(2))

    @pl.when(mine == 0)
    def lead() -> None:
        registers(MULTIPLYING, "increase")
        low, high = (_rows(bounds.at[block, i, rows], optimized=False) for i in range(2))
        o, sums = _lead(s, how, part, left, (low, high))
        transfer_gpu.store(out.at[block, 0, split, rows, left], o.astype(out.dtype))
        lse.at[block, 0, split, rows][...] = sums

    @pl.when(mine == 1)
    def follow() -> None:
        registers(MULTIPLYING, "increase")
        o = _follow(s, how, part, right)
        transfer_gpu.store(out.at[block, 0, split, rows, right], o.astype(out.dtype))


def _lead(s: Any, how: Any, part: Part, columns: Any, bounds: Any) -> tuple[Array, Array]:
    """Give probabilities of a part's pages, and sum some columns of the values: output and log-sum-exps of rows.

    Rows of no query hold what was in memory: no row reads another.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    def give(decay: Array, p: Any, wait: Any) -> None:
        """Hand on what sums fade by, and probabilities, once those before were taken."""
        pl.when(wait)(lambda: gpu.barrier_wait(s.taken))
        s.decay_s[...] = decay
        if p is not None:
            s.p_s[...] = p.astype(s.p_s.dtype)
        gpu.commit_smem()
        gpu.barrier_arrive(s.ready)

    def step(j: Any, carry: tuple) -> tuple:
        top, total, o = carry
        gpu.barrier_wait(s.full.at[jax.lax.rem(j, jnp.int32(DEPTH))])
        top, decay, p = _scores(s, how, part, j, top, bounds)
        give(decay, p, j > 0)
        return top, total * decay + p.sum(axis=1), _values(s, how, part, j, columns, o, decay)

    row = gpu.Layout.WGMMA.reduce(1)
    begun = _whole((ROWS,), NEG, row), _whole((ROWS,), 0, row), _whole((ROWS, columns.size), 0, gpu.Layout.WGMMA)
    gpu.barrier_wait(s.q_bar)
    top, total, o = jax.lax.fori_loop(0, part.count, step, begun)
    total = jnp.maximum(total, 1e-30)  # of a row that sees nothing: 0
    give(1 / total, None, part.count > 0)
    lse = jnp.where(top <= NEG / 2, NEG, (top + jnp.log2(total)) * (1 / LOG2E))
    return o * _across(1 / total, columns.size), lse


def _follow(s: Any, how: Any, part: Part, columns: Any) -> Array:
    """Sum other columns of the values with the probabilities that `_lead` gives."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    def step(j: Any, o: Array) -> Array:
        gpu.barrier_wait(s.full.at[jax.lax.rem(j, jnp.int32(DEPTH))])
        gpu.barrier_wait(s.ready)
        o = _values(s, how, part, j, columns, o, _rows(s.decay_s))
        gpu.barrier_arrive(s.taken)
        return o

    o = jax.lax.fori_loop(0, part.count, step, _whole((ROWS, columns.size), 0, gpu.Layout.WGMMA))
    gpu.barrier_wait(s.ready)
    return o * _across(_rows(s.decay_s), columns.size)


def _scores(s: Any, how: Any, part: Part, j: Any, top: Array, bounds: Any) -> tuple[Array, Array, Array]:
    """Multiply queries with the keys of page j: the new maximum of rows, what sums fade by, and probabilities."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    size = s.k_s.shape[1]

    def products(acc: Any) -> Array:
        gpu.wgmma(acc, s.q_s, s.k_s.at[jax.lax.rem(j, jnp.int32(DEPTH))].transpose((1, 0)))
        return acc[...]

    x = pl.run_scoped(products, gpu.ACC((ROWS, size), jnp.float32)) * how.scale
    if how.softcap is not None:
        x = jnp.tanh(x * (1 / how.softcap)) * how.softcap
    ki = gpu.broadcasted_iota(jnp.int32, (ROWS, size), 1, layout=gpu.Layout.WGMMA) + (part.begin + j) * size
    low, high = (_across(x, size) for x in bounds)
    x = jnp.where((ki >= low) & (ki <= high), x * LOG2E, NEG)
    new = jnp.maximum(top, x.max(axis=1))
    return new, jnp.exp2(top - new), jnp.exp2(x - _across(jnp.maximum(new, NEG / 2), size))


def _values(s: Any, how: Any, part: Part, j: Any, columns: Any, o: Array, decay: Array) -> Array:
    """Add probabilities times some columns of page j to sums that fade; then the page is free."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    slot, first, size = jax.lax.rem(j, jnp.int32(DEPTH)), (part.begin + j) * s.k_s.shape[1], s.k_s.shape[1]

    @pl.when(first + size > part.last + 1)  # stale NaN times 0 would be NaN
    def clear() -> None:
        for c in range(0, columns.size, CLEARED):
            some = s.k_s.at[slot, :, pl.ds(columns.start + c, CLEARED)]
            value = transfer_gpu.load(some, layout=gpu.Layout.WGMMA)
            ki = gpu.broadcasted_iota(jnp.int32, (size, CLEARED), 0, layout=gpu.Layout.WGMMA) + first
            some[...] = jnp.where(ki <= part.last, value, jnp.zeros_like(value))
        gpu.commit_smem()

    def product(acc: Any) -> Any:
        gpu.wgmma(acc, s.p_s, s.k_s.at[slot, :, columns])
        return acc[...] if how.interpreted else None

    o = o * _across(decay, columns.size)
    if how.interpreted:  # it knows no sums that were begun elsewhere
        o = o + pl.run_scoped(product, gpu.ACC((ROWS, columns.size), jnp.float32))
    else:
        o = pl.run_state(product)(gpu.ACC.init(o))
    gpu.barrier_arrive(s.free.at[slot])
    return o


def _rows(ref: Any, **how: Any) -> Array:
    """Load a number for each row."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    return transfer_gpu.load(ref, layout=gpu.Layout.WGMMA.reduce(1), **how)


def _across(x: Array, n: int) -> Array:
    return jax.lax.broadcast_in_dim(x, (ROWS, n), [0])


def _whole(shape: tuple[int, ...], value: float, layout: Any) -> Array:
    from jax.experimental.pallas import mosaic_gpu as gpu

    return gpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)
