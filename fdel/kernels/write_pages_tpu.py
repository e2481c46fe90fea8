"""Writing new tokens to pages on TPUs: a Pallas Mosaic TPU kernel that changes the cache in place.

Memory holds several tokens of a page in a register's rows, so none can be written alone. What is copied is a *part* of a
page: as many tokens as fill such rows. Parts are read, their new tokens put in their places, and written; all of a step
of the grid are on their way at once. A part belongs to its sequence's first block with tokens of it, so no two copies
meet. Scales are parts of a whole page each. Interpreted on CPU and compiled for v5p and v6e; it has not run on a TPU yet.

Bytes: each part three times, its new numbers twice. XLA's scatter writes one row of one head after the other.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fdel.kernels.device import no_tpu
from fdel.ops import quantized_pages
from fdel.ops.batch import Paged, Pages
from fdel.ops.paged import LANES, filled

ROWS = 1024  # of new tokens and heads; fewer take 2 ns each on a v5p
TOGETHER = 64  # parts of a step at most
MEMORY = 24 * 2**20  # bytes of a step's parts: old ones, and new ones of two steps
VMEM = 48 * 2**20


class Parts(NamedTuple):
    """Parts of pages that new tokens go to, and which tokens these are."""

    plan: Int[Array, "parts 4"]  # page, its first token, first and last + 1 new token of the part
    tokens: Int[Array, "parts size"]  # of the call, in a part's order


def unsupported(batch: Paged, state: Pages, layer: Any, k: Array, v: Array | None) -> str | None:
    """Say why the kernel cannot serve this call, or None."""
    if why := no_tpu():
        return why
    few = state.k_scale is not None and state.k.dtype in (jnp.int8, jnp.uint8)
    if not few and state.k.dtype not in (jnp.bfloat16, jnp.float32):
        return f"it writes bfloat16, float32 and 8 bits; found {state.k.dtype}"
    heads, size, width = state.k.shape[2:]
    least = 32 // state.k.dtype.itemsize
    if not few:  # to change bytes and their scales XLA:TPU copies those of all layers to other layouts and back
        if batch.block == 1:
            return "one token of each sequence: XLA's scatter moves fewer bytes"
        if (found := len(k) * heads) < ROWS:
            return f"{found} rows: XLA's scatter takes no longer than copies need to set out; expected {ROWS}"
    if width % LANES or size % least or (state.v is not None and state.v.shape[-1] % LANES):
        return f"pages of {size} tokens of {width} numbers; expected multiples of {least} and {LANES}"
    lanes = LANES if state.k_scale is None else state.k_scale.shape[4]
    return f"scales in rows of {lanes}; expected a multiple of {LANES}" if lanes % LANES else None


def call(batch: Paged, state: Pages, layer: Any, k: Array, v: Array | None) -> Pages:
    """Store the keys and values of new tokens; see `unsupported` for what it can serve, `write_pages` for the meaning."""
    _, total, heads, size, _ = state.k.shape
    pairs = [(state.k, state.k_scale, k)]
    if state.v is not None and v is not None:
        pairs.append((state.v, state.v_scale, v))
    pages, kept, new, scales = [], [], [], []
    for stored, scale, x in pairs:
        x = filled(x.reshape(len(x), heads, -1), stored.shape[-1])
        pages.append(stored)
        if scale is None:
            new.append(x.astype(stored.dtype))
            continue
        x, each = quantized_pages.encode(x, stored.dtype, quantized_pages.scales(x.shape[-1]))
        new.append(x)
        kept.append(scale)
        scales.append(each)
    parts = _parts(batch, total, size, 32 // state.k.dtype.itemsize)
    in_order = [jnp.swapaxes(_ordered(x, parts, batch.block), 1, 2) for x in new]  # [parts K size width]
    out = _put(parts.plan, layer, pages, in_order)
    if kept:
        parts = _parts(batch, total, size, size)
        in_order = [_rows(_ordered(x, parts, batch.block), *old.shape[3:]) for x, old in zip(scales, kept, strict=True)]
        kept = _put(parts.plan, layer, kept, in_order, period=size)
    second = lambda x, old: x[1] if len(x) > 1 else old
    first = lambda x: x[0] if x else None
    return Pages(out[0], second(out, state.v), first(kept), second(kept, state.v_scale))


def _ordered(x: Array, parts: Parts, block: int) -> Array:
    """Give tokens [T ...] as parts hold them, [parts size ...]; the part of a block of one has it everywhere."""
    if block > 1:
        return x[parts.tokens]
    return jnp.broadcast_to(x[:, None], (*parts.tokens.shape, *x.shape[1:]))


def _rows(x: Float[Array, "parts size K n"], rows: int, lanes: int) -> Float[Array, "parts K rows lanes"]:
    """Lay scales out as a page has them: `quantized_pages.scale_rows`."""
    parts, size, heads, n = x.shape
    side = lanes // size
    x = jnp.pad(x.transpose(0, 2, 3, 1), ((0, 0), (0, 0), (0, side * rows - n), (0, 0)))
    x = x.reshape(parts, heads, side, rows, size).swapaxes(2, 3).reshape(parts, heads, rows, side * size)
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, lanes - side * size)))


def _parts(batch: Paged, total: int, page: int, size: int) -> Parts:
    """Find the parts of `size` tokens that the blocks' tokens lie in."""
    blocks, width = batch.page_table.shape
    block, table = batch.block, batch.page_table.astype(jnp.int32)
    positions, order = batch.positions.reshape(blocks, block).astype(jnp.int32), jnp.arange(blocks)
    if block > 1:  # those of a sequence one after the other, which others' may stand between
        of = jnp.argmax((table[:, None] == table).all(-1), 1)
        order = jnp.lexsort((positions[:, 0], of))
        positions, table = positions[order], table[order]
    start, count = positions[:, 0], (positions >= 0).sum(1)
    goes_on = (start[1:] == start[:-1] + block) & (count[1:] > 0) & (count[:-1] == block)
    goes_on = jnp.pad(goes_on & (table[1:] == table[:-1]).all(1), (1, 0))
    run = jnp.cumsum(~goes_on)
    end = jnp.where(run[:, None] == run, start + count, 0).max(1)  # of the blocks that follow each other
    base = (start // size)[:, None] * size + jnp.arange((block + size - 2) // size + 1 if block > 1 else 1) * size
    index = jnp.minimum(base // page, width - 1)
    where = jnp.take_along_axis(table, index, 1)
    low, high = jnp.maximum(base, start[:, None]) - base, jnp.minimum(base + size, end[:, None]) - base
    mine = (count > 0)[:, None] & (base // page < width) & (where >= 0) & (where < total)
    mine &= (base < (start + count)[:, None]) & ~(goes_on[:, None] & (base < start[:, None]))
    plan = jnp.stack([jnp.clip(where, 0, total - 1), base % page, low, jnp.where(mine, high, low)], -1)
    token = (jnp.arange(blocks) * block - start)[:, None, None] + base[..., None] + jnp.arange(size)
    token = jnp.clip(token, 0, blocks * block - 1).reshape(-1, size)
    return Parts(plan.reshape(-1, 4).astype(jnp.int32), order[token // block] * block + token % block)


def _put(plan: Int[Array, "parts 4"], layer: Any, pages: list[Array], new: list[Array], period: int = 0) -> list[Array]:
    """Put new numbers [parts K rows width] into parts of pages [layers pages K size width], in place.

    New tokens are rows of a part; with a `period` the part of a row that a page's tokens take, and again from there.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    of_part = sum(x[0].size * x.dtype.itemsize for x in new)
    most = max(1, min(TOGETHER, MEMORY // (3 * of_part)))
    steps = -(-len(plan) // most)
    each = -(-len(plan) // steps)
    more = lambda x: jnp.pad(x, [(0, steps * each - len(x))] + [(0, 0)] * (x.ndim - 1))
    block = lambda x: pl.BlockSpec((each, *x.shape[1:]), lambda i, *_: (i, 0, 0, 0))
    anywhere = [pl.BlockSpec(memory_space=pl.ANY) for _ in pages]
    run = pl.pallas_call(
        functools.partial(_program, count=len(pages), period=period),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pages],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(steps,),
            in_specs=[*anywhere, *map(block, new)],
            out_specs=anywhere,
            scratch_shapes=[*[pltpu.VMEM((each, *x.shape[1:]), x.dtype) for x in new], pltpu.SemaphoreType.DMA((2,))],
        ),
        input_output_aliases={2 + i: i for i in range(len(pages))},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM, disable_bounds_checks=True
        ),
        name="write_pages",
    )
    return list(run(jnp.asarray(layer, jnp.int32).reshape(1), more(plan), *pages, *map(more, new)))


def _program(layer: Any, plan: Any, *refs: Any, count: int, period: int) -> None:
    """Read the parts of a step, put new numbers in their places, write them back."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    news, pages, olds, done = (
        refs[count : 2 * count],
        refs[2 * count : 3 * count],
        refs[3 * count : 4 * count],
        refs[-1],
    )
    each, heads, rows, width = olds[0].shape
    first = pl.program_id(0) * each

    def over(body: Any) -> None:
        def one(i: Any, _: None) -> None:
            page, token, low, high = (plan[first + i, n] for n in range(4))
            pl.when(high > low)(lambda: body(i, page, token, low, high))

        jax.lax.fori_loop(0, each, one, None)

    def copies(i: Any, page: Any, token: Any, back: bool) -> list:
        found = []
        for there, here in zip(pages, olds, strict=True):
            part = there.at[layer[0], page, :, pl.ds(0 if period else pl.multiple_of(token, rows), rows)]
            ends = (here.at[i], part) if back else (part, here.at[i])
            found.append(pltpu.make_async_copy(*ends, done.at[int(back)]))
        return found

    def start(i: Any, page: Any, token: Any, *_: Any) -> None:
        for copy in copies(i, page, token, False):
            copy.start()

    def arrive(i: Any, page: Any, token: Any, *_: Any) -> None:
        for copy in copies(i, page, token, False):
            copy.wait()

    def change(i: Any, page: Any, token: Any, low: Any, high: Any) -> None:
        for new, old in zip(news, olds, strict=True):
            taken = _taken(rows, width, old.dtype, low, high, period)
            for h in range(heads):
                words = [pltpu.bitcast(x[i, h], jnp.int32) for x in (old, new)]
                old[i, h] = pltpu.bitcast(words[0] & ~taken | words[1] & taken, old.dtype)
        for copy in copies(i, page, token, True):
            copy.start()

    def end(i: Any, page: Any, token: Any, *_: Any) -> None:
        for copy in copies(i, page, token, True):
            copy.wait()

    over(start)
    over(arrive)  # all of them: a wait counts bytes, whichever part they are of
    over(change)
    over(end)


def _taken(rows: int, width: int, dtype: Any, low: Any, high: Any, period: int) -> Int[Array, "words width"]:
    """Give the bits of words that new tokens take: a word holds a number of each of its rows, the first in the lowest."""
    beside = 4 // dtype.itemsize
    shape = rows // beside, width
    if period:
        token = jax.lax.rem(jax.lax.broadcasted_iota(jnp.int32, shape, 1), jnp.int32(period))
        return jnp.where((token >= low) & (token < high), jnp.int32(-1), jnp.int32(0))
    bits, out = 32 // beside, jnp.zeros(shape, jnp.int32)
    for i in range(beside):
        token = jax.lax.broadcasted_iota(jnp.int32, shape, 0) * beside + i
        one = np.uint32((2**bits - 1) << (bits * i)).view(np.int32)
        out |= jnp.where((token >= low) & (token < high), jnp.int32(one), jnp.int32(0))
    return out
