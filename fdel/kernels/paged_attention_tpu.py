"""Attention over pages on TPUs: a Pallas Mosaic TPU kernel for decoding and for chunks of prompts in one call.

Algorithm: online softmax (Milakov and Gimelshein, arXiv 1805.02867) over groups of pages, in the manner of ragged paged
attention (arXiv 2604.15464). A step of the grid serves a *run*: the tokens of up to `TOKENS // block` blocks that follow
each other in one sequence. It walks the pages that the run sees; all heads of a page are one copy, as the page table names
it, and while one group of pages is attended to the next one is on its way, also that of the next run. The query heads
of a key head are rows of one product. Rows of other runs in the same tile see nothing in this walk.

Bytes read: keys and values once for each run, 4 * keys * kv_heads * head_dim in bfloat16. FLOPs: 4 * rows * keys *
head_dim. Interpreted on CPU and compiled for v5p and v6e; it has not run on a TPU yet.
"""

import functools
import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fdel.ops.batch import Paged, Pages
from fdel.ops.mask import NEG, Mask, PerHead
from fdel.ops.paged import LANES, gathered, spread
from fdel.ops.platform import target

KEYS = 1024  # of a group of pages at most
GROUP = {True: 2 * 2**20, False: 4 * 2**20}  # its bytes at most, of decoding and of prompts; two groups are in memory
TOKENS = 128  # of a tile of queries
TILE = 24 * 2**20  # bytes of queries, outputs and sums of a tile
VMEM = 48 * 2**20  # bytes that a program may use: of 64 MiB on v5p, 128 on v6e
SMEM = 512 * 2**10  # bytes of a page table in the memory of scalars, 1 MiB
ROWS = 512  # of one product at most
UNROLL = 8  # products of few rows that are computed side by side
OLD = ("v2", "v3", "v4")  # in the names of TPUs with 16 MiB of fast memory
LOG2E = math.log2(math.e)


def unsupported(
    batch: Paged, state: Pages, layer: Any, q: Array, *,
    mask: Mask, sinks: PerHead = None, alibi: PerHead = None, v_dim: int | None = None,
) -> str | None:  # fmt: skip
    """Say why the kernel cannot serve this call, or None."""
    if target() != "tpu":
        return f"it is written for TPUs; the target is {target()}"
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None and any(old in device.device_kind for old in OLD):
        return f"it needs the memory of v5 or later; the mesh is of {device.device_kind}"
    if state.v is None or v_dim not in (None, q.shape[-1]):
        return "values that are channels of the keys (latent attention)"
    if state.k_scale is not None or state.v_scale is not None:
        return "pages in 8 bits; expected the dtype of the queries"
    if not q.dtype == state.k.dtype == state.v.dtype or q.dtype not in (jnp.bfloat16, jnp.float32):
        return f"it attends in bfloat16 and float32; found {q.dtype}, {state.k.dtype}, {state.v.dtype}"
    width, least = state.k.shape[-1], 32 // q.dtype.itemsize
    if state.v.shape != state.k.shape or width % LANES:
        return f"rows of {width} and {state.v.shape[-1]} numbers; expected equal multiples of {LANES}"
    if state.k.shape[3] % least:
        return f"pages of {state.k.shape[3]} tokens; expected a multiple of {least}"
    if (need := _table_bytes(batch)) > SMEM:
        return f"a page table of {need} bytes; expected at most {SMEM}"
    if (need := batch.block * _token_bytes(state, q)) > TILE:
        return f"blocks of {batch.block} tokens take {need} bytes of queries and sums; expected at most {TILE}"
    if batch.ahead is not None:
        return "tokens that see later ones (Paged.ahead)"
    return None if alibi is None else "alibi slopes, which it does not have"


def call(
    batch: Paged, state: Pages, layer: Any, q: Float[Array, "T N H"], *,
    mask: Mask, sinks: PerHead = None, alibi: None = None, v_dim: int | None = None,
) -> Float[Array, "T N H"]:  # fmt: skip
    """Attend over cached pages; see `unsupported` for what it can serve, `paged_attention` for the meaning."""
    _, _, heads, size, width = state.k.shape
    blocks, block, side = len(batch.page_table), batch.block, width // q.shape[-1]
    most = 1 if block == 1 else max(1, min(TOKENS, TILE // _token_bytes(state, q)) // block)
    many = next(n for n in range(most, 0, -1) if blocks % n == 0)
    tiles, tokens = blocks // many, many * block
    q = q.reshape(tiles, tokens, heads, -1, q.shape[-1]).transpose(0, 2, 3, 1, 4)  # [tiles K G tokens H]
    q = q if side == 1 else spread(q, side)
    rows = q.shape[2] * tokens
    fill = -rows % 8
    lay = lambda x: jnp.pad(x.reshape(*x.shape[:-3], rows, x.shape[-1]), [(0, 0)] * (x.ndim - 3) + [(0, fill), (0, 0)])
    start = jnp.full((heads, rows + fill, LANES), NEG, jnp.float32)
    if sinks is not None:
        of_rows = jnp.broadcast_to((sinks.astype(jnp.float32) * LOG2E).reshape(heads, -1, 1, 1), (*q.shape[1:4], LANES))
        start = lay(of_rows)
    out = _kernel(mask, many, tokens, _spans(batch, mask, many, size), batch.page_table, layer, lay(q), start, state)
    out = out[:, :, :rows].reshape(q.shape)
    out = out if side == 1 else gathered(out, side)
    return out.transpose(0, 3, 1, 2, 4).reshape(blocks * block, -1, out.shape[-1])


def _table_bytes(batch: Paged) -> int:
    """Give the bytes of the page table as the memory of scalars holds it: rows of whole tiles."""
    blocks, width = batch.page_table.shape
    return 4 * -(-blocks // 8) * 8 * -(-width // LANES) * LANES


def _token_bytes(state: Pages, q: Array) -> int:
    """Give the bytes of a token in a tile: queries and outputs twice, starts twice, three sums, all in rows of lanes."""
    width = state.k.shape[-1]
    return q.shape[1] * (4 * width * q.dtype.itemsize + 4 * width + 4 * 4 * LANES)


def _spans(batch: Paged, mask: Mask, many: int, size: int) -> Int[Array, "blocks 5"]:
    """Give each block's run: position and index in the tile of its first token, tokens, pages from and to.

    A block that goes on where the one before it in the tile ends belongs to that one's run, and has no tokens of its own.
    """
    positions = batch.positions.reshape(-1, many, batch.block).astype(jnp.int32)
    counts, starts = (positions >= 0).sum(2), positions[:, :, 0]
    table = batch.page_table.reshape(len(starts), many, -1)
    same = (starts[:, 1:] == starts[:, :-1] + batch.block) & (counts[:, 1:] > 0) & (counts[:, :-1] == batch.block)
    same &= (table[:, 1:] == table[:, :-1]).all(2)
    leads = jnp.pad(~same, ((0, 0), (1, 0)), constant_values=True)
    run = jnp.cumsum(leads, 1)
    counts = jnp.where(leads, ((run[:, :, None] == run[:, None]) * counts[:, None]).sum(2), 0)
    first = jnp.zeros_like(starts)
    if mask.window is not None:
        first = jnp.maximum(first, starts - mask.window + 1)
    if mask.chunk is not None:
        first = jnp.maximum(first, starts // mask.chunk * mask.chunk)
    index = jnp.broadcast_to(jnp.arange(many) * batch.block, starts.shape)
    end = jnp.where(counts > 0, jnp.minimum((starts + counts + size - 1) // size, table.shape[2]), 0)
    spans = [starts, index, counts, jnp.minimum(first // size, end), end]  # a walk never has less than no pages
    return jnp.stack(spans, -1).reshape(-1, 5).astype(jnp.int32)


def _kernel(
    mask: Mask, many: int, tokens: int, spans: Int[Array, "blocks 5"], table: Int[Array, "blocks width"], layer: Any,
    q: Float[Array, "tiles K rows C"], start: Float[Array, "K rows lanes"], state: Any,
) -> Float[Array, "tiles K rows C"]:  # fmt: skip
    """Attend from tiles of `many` blocks, each with `tokens` tokens of every query head of a key head."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    tiles, heads, rows, width = q.shape
    _, pages, _, size, _ = state.k.shape
    blocks, cores = len(table), 2 if tiles % 2 == 0 else 1  # a v5p has two, which share the steps
    each = blocks // cores
    of_page = 2 * heads * size * width * q.dtype.itemsize
    group = max(1, min(KEYS // size, GROUP[tokens == 1] // of_page, table.shape[1]))
    tile = pl.BlockSpec((None, heads, rows, width), lambda c, i, *_: ((c * each + i) // many, 0, 0, 0))
    buffer = pltpu.VMEM((2, group, heads, size, width), q.dtype)
    numbers = pltpu.VMEM((heads, rows, LANES), jnp.float32)
    scratch = [
        buffer, buffer, numbers, numbers, pltpu.VMEM((heads, rows, width), jnp.float32),
        pltpu.SMEM((1,), jnp.int32), pltpu.SemaphoreType.DMA((2, 2)),
    ]  # fmt: skip
    run = pl.pallas_call(
        functools.partial(_program, mask=mask, many=many, tokens=tokens),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(cores, each),
            in_specs=[
                tile,
                pl.BlockSpec((heads, rows, LANES), lambda c, i, *_: (0, 0, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=tile,
            scratch_shapes=scratch,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM, disable_bounds_checks=True
        ),
        name="paged_attention",
    )
    where = jnp.asarray(layer, jnp.int32).reshape(1)
    return run(where, spans, jnp.clip(table, 0, pages - 1).astype(jnp.int32), q, start, state.k, state.v)


def _program(*refs: Any, mask: Mask, many: int, tokens: int) -> None:
    """Attend from one run to its pages, a group at a time; `refs` are the arguments, the result and the memory."""
    from jax.experimental import pallas as pl

    names = "layer spans table q start k v out k_s v_s top total sums turn arrived".split()
    r = SimpleNamespace(**dict(zip(names, refs, strict=True)))
    step, steps = pl.program_id(1), pl.num_programs(1)
    here = pl.program_id(0) * steps + step
    group, size = r.k_s.shape[1], r.k_s.shape[3]
    groups = lambda at: pl.cdiv(r.spans[at, 4] - r.spans[at, 3], group)
    count = groups(here)

    @pl.when(step == 0)
    def _() -> None:
        r.turn[0] = 0
        _fetch(r, here, 0, 0)

    @pl.when(step % many == 0)
    def _() -> None:
        r.top[...] = r.start[...]
        r.total[...] = jnp.ones_like(r.total)  # of a sink; without one it fades as soon as there is a key
        r.sums[...] = jnp.zeros_like(r.sums)

    def follow(j: Any, slot: Any) -> None:
        """Let the pages after group j set off, if any are to come on this core."""
        last = j + 1 >= count
        at, j = jnp.where(last, here + 1, here), jnp.where(last, 0, j + 1)
        pl.when(~last | (step + 1 < steps))(lambda: _fetch(r, at, j, slot))

    pl.when(count == 0)(lambda: follow(0, r.turn[0]))
    base = r.turn[0]

    def walk(j: Any, _: None) -> None:
        slot = (base + j) % 2
        follow(j, 1 - slot)
        _fetch(r, here, j, slot, wait=True)
        first = (r.spans[here, 3] + j * group) * size
        _attend(r, mask, tokens, here, slot, first)

    jax.lax.fori_loop(0, count, walk, None)
    r.turn[0] = (base + count) % 2

    @pl.when((step + 1) % many == 0)
    def _() -> None:
        for h in range(r.out.shape[0]):
            r.out[h] = (r.sums[h] / r.total[h][:, :1]).astype(r.out.dtype)


def _fetch(r: Any, at: Any, j: Any, slot: Any, wait: bool = False) -> None:
    """Start, or wait for, the copies of group j of the pages of block `at`."""
    from jax.experimental.pallas import tpu as pltpu

    group = r.k_s.shape[1]
    first = r.spans[at, 3] + j * group

    def one(i: Any, _: None) -> None:
        page = r.table[at, first + i]
        for n, (pages, here) in enumerate(((r.k, r.k_s), (r.v, r.v_s))):
            copy = pltpu.make_async_copy(pages.at[r.layer[0], page], here.at[slot, i], r.arrived.at[slot, n])
            copy.wait() if wait else copy.start()

    jax.lax.fori_loop(0, jnp.minimum(r.spans[at, 4] - first, group), one, None)


def _attend(r: Any, mask: Mask, tokens: int, at: Any, slot: Any, first: Any) -> None:
    """Add the group of pages in `slot`, whose first key is `first`, to the sums of all heads."""
    from jax.experimental import pallas as pl

    start, index, count = (r.spans[at, i] for i in range(3))
    _, group, heads, size, width = r.k_s.shape
    rows, keys, end = r.q.shape[1], group * size, start + count
    part = next(n for n in range(min(ROWS, rows), 0, -8) if rows % n == 0)
    parts = rows // part
    work = heads * parts

    @pl.when(first + keys > end)  # what is there may be NaN, and that times 0 too
    def clear() -> None:
        def page(i: Any, _: None) -> None:
            ki = jax.lax.broadcasted_iota(jnp.int32, (heads, size, width), 1) + first + i * size
            value = r.v_s[slot, i]
            r.v_s[slot, i] = jnp.where(ki < end, value, jnp.zeros_like(value))

        jax.lax.fori_loop((end - first) // size, group, page, None)

    def head(n: Any) -> None:
        h, mine = n // parts, pl.ds(pl.multiple_of(n % parts * part, 8), part)
        k, v = (pages[slot, :, h].reshape(keys, width) for pages in (r.k_s, r.v_s))
        x = jax.lax.dot_general(r.q[h, mine], k, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        if mask.softcap is None:
            x = x * (mask.scale * LOG2E)
        else:
            x = jnp.tanh(x * (mask.scale / mask.softcap)) * (mask.softcap * LOG2E)
        x = jnp.where(_seen(mask, tokens, n % parts * part, x.shape, (start, index, count, first)), x, NEG)
        old = r.top[h, mine]
        new = jnp.maximum(old, x.max(1, keepdims=True))
        decay, p = jnp.exp2(old - new), jnp.exp2(x - jnp.maximum(new[:, :1], NEG / 2))
        r.top[h, mine], r.total[h, mine] = new, r.total[h, mine] * decay + p.sum(1, keepdims=True)
        more = jnp.dot(p.astype(v.dtype), v, preferred_element_type=jnp.float32)
        r.sums[h, mine] = r.sums[h, mine] * decay[:, :1] + more

    some = next(n for n in range(min(UNROLL, max(2, ROWS // part), work), 0, -1) if work % n == 0)

    def several(g: Any, _: None) -> None:
        for i in range(some):
            head(g * some + i)

    jax.lax.fori_loop(0, work // some, several, None)


def _seen(mask: Mask, tokens: int, row: Any, shape: tuple[int, ...], run: tuple) -> Array:
    """Tell which keys rows from `row` see, which are `tokens` tokens of each query head in turn."""
    start, index, count, first = run
    token = jax.lax.rem(jax.lax.broadcasted_iota(jnp.int32, (shape[0], 1), 0) + row, jnp.int32(tokens)) - index
    qi, ki = start + token, jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    seen = ki <= jnp.where((token >= 0) & (token < count), qi, -1) - first
    low = jnp.zeros_like(qi) if mask.window is None else qi - (mask.window - 1)
    if mask.chunk is not None:
        low = jnp.maximum(low, jax.lax.div(qi, jnp.int32(mask.chunk)) * mask.chunk)
    return seen if mask.window is None and mask.chunk is None else seen & (ki >= low - first)
