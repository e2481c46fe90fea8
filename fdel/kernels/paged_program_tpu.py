"""The program of attention over pages on TPUs, for `paged_attention_tpu`.

Algorithm: online softmax (Milakov and Gimelshein, arXiv 1805.02867) over groups of pages, in the manner of ragged paged
attention (arXiv 2604.15464). A step of the grid serves a run: it walks the pages that the run sees; all heads of a page are
one copy, as the page table names it, and while one group of pages is attended to the next one is on its way, also that of
the next run. The query heads of a key head are rows of one product. Rows of other runs in the same tile see nothing in
this walk. Pages without values have them in the first channels of the keys, which are then copied once for both products.
Pages in 8 bits are copied with their scales, and become numbers here: see `paged_formats_tpu`.

Bytes read: keys and values once for each run, 4 * keys * kv_heads * head_dim in bfloat16, of latents 2 * keys * C; in 8
bits half, and 4 bytes for each scale, and as many unused. FLOPs: 2 * rows * keys * (channels of keys + channels of values).
"""

import functools
import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fdel.kernels import paged_formats_tpu as formats
from fdel.kernels import paged_prompt_tpu as prompt
from fdel.ops.batch import Pages
from fdel.ops.mask import NEG, Mask
from fdel.ops.paged import LANES

KEYS = {
    True: 1024,
    False: 512,
}  # of a group of pages at most, of decoding and of prompts, whose last one is seen in part
GROUP = {True: 2 * 2**20, False: 4 * 2**20}  # its bytes at most, of both; two groups are in memory
VMEM = 48 * 2**20  # bytes that a program may use: of 64 MiB on v5p, 128 on v6e
ROWS = 512  # of one product at most
TOGETHER = 8  # pages whose copies set off in a round of a loop
UNROLL = 8  # products of few rows that are computed side by side
RUN = 5  # numbers of a block's run
LOG2E = math.log2(math.e)
# Arguments, result, memory:
NAMES = "layer spans table q start {pages} out {copies} {read} top total sums {prompt} turn arrived"


class Tile(NamedTuple):
    """What a call computes in a tile: its blocks, its tokens, channels of values."""

    mask: Mask
    many: int
    tokens: int
    values: int


def attend(
    tile: Tile, spans: Int[Array, "blocks 5"], table: Int[Array, "blocks width"], layer: Any,
    q: Float[Array, "tiles K rows C"], start: Float[Array, "parts K rows lanes"], state: Pages,
) -> Float[Array, "tiles K rows Cv"]:  # fmt: skip
    """Attend from tiles of blocks, each with rows of every query head of a key head.

    `spans` are the blocks' runs: position and index in the tile of the first token, tokens, pages from and to. `start`
    holds each row's first greatest score times log2(e), of a sink, or `NEG`; its parts are of equally many tiles in turn.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    tiles, heads, rows, width = q.shape
    _, pages, _, size, _ = state.k.shape
    blocks, cores = len(table), 2 if tiles % 2 == 0 else 1  # a v5p has two, which share the steps
    each, of_part = blocks // cores, blocks // len(start)
    kinds = [x for x in (state.k, state.v) if x is not None]
    scales = [x for x in (state.k_scale, state.v_scale) if x is not None]
    of_page = sum(math.prod(x.shape[2:]) * x.dtype.itemsize for x in (*kinds, *scales))
    group = max(1, min(KEYS[tile.tokens == 1] // size, GROUP[tile.tokens == 1] // of_page, table.shape[1]))
    of_tile = lambda width: pl.BlockSpec(
        (None, heads, rows, width), lambda c, i, *_: ((c * each + i) // tile.many, 0, 0, 0)
    )
    numbers = pltpu.VMEM((heads, rows, LANES), jnp.float32)
    names, read, more = _names(state, tile.tokens > 1), [], []
    if (
        state.k_scale is not None
    ):  # a group's keys as numbers, or what its scores and its probabilities are multiplied with
        lanes = state.k_scale.shape[4]
        keys = pltpu.VMEM((heads, -(-group * size // lanes) * lanes), jnp.float32)
        read = [pltpu.VMEM((group * size, width), q.dtype)] if state.k_scale.shape[3] > 1 else [keys, keys]
    if tile.tokens > 1:
        more = prompt.memory(_part(rows), group * size, q.dtype)
    scratch = [
        *[pltpu.VMEM((2, group, *x.shape[2:]), x.dtype) for x in (*kinds, *scales)], *read,
        numbers, numbers, pltpu.VMEM((heads, rows, tile.values), jnp.float32), *more,
        pltpu.SMEM((1,), jnp.int32), pltpu.SemaphoreType.DMA((2, len(kinds) + len(scales))),
    ]  # fmt: skip
    run = pl.pallas_call(
        functools.partial(_program, tile=tile, names=names),
        out_shape=jax.ShapeDtypeStruct((*q.shape[:3], tile.values), q.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(cores, each),
            in_specs=[
                of_tile(width),
                pl.BlockSpec((None, heads, rows, LANES), lambda c, i, *_: ((c * each + i) // of_part, 0, 0, 0)),
                *[pl.BlockSpec(memory_space=pl.ANY) for _ in (*kinds, *scales)],
            ],
            out_specs=of_tile(tile.values),
            scratch_shapes=scratch,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM, disable_bounds_checks=True
        ),
        name="paged_attention",
    )
    flat = lambda x: jnp.asarray(x, jnp.int32).reshape(-1)  # memory of scalars would hold whole tiles of rows
    return run(flat(layer), flat(spans), flat(jnp.clip(table, 0, pages - 1)), q, start, *kinds, *scales)


def _names(state: Pages, many: bool) -> list[str]:
    """Name what a program gets; arrays that are copied in groups of pages have an end in fast memory, `_s`."""
    pages = [name for name in ("k", "v", "k_scale", "v_scale") if getattr(state, name) is not None]
    read = "" if state.k_scale is None else "decoded" if state.k_scale.shape[3] > 1 else "k_times v_times"
    copies, more = " ".join(f"{x}_s" for x in pages), prompt.NAMES if many else ""
    return NAMES.format(pages=" ".join(pages), copies=copies, read=read, prompt=more).split()


def _program(*refs: Any, tile: Tile, names: list[str]) -> None:
    """Attend from one run to its pages, a group at a time; `refs` are the arguments, the result and the memory."""
    from jax.experimental import pallas as pl

    r = SimpleNamespace(**dict(zip(names, refs, strict=True)))
    r.copied = [(getattr(r, name.removesuffix("_s")), getattr(r, name)) for name in names if name.endswith("_s")]
    step, steps = pl.program_id(1), pl.num_programs(1)
    here = pl.program_id(0) * steps + step
    group, size = r.k_s.shape[1], r.k_s.shape[3]
    groups = lambda at: pl.cdiv(r.spans[at * RUN + 4] - r.spans[at * RUN + 3], group)
    count = groups(here)

    @pl.when(step == 0)
    def _() -> None:
        r.turn[0] = 0
        _fetch(r, here, 0, 0)

    @pl.when(step % tile.many == 0)
    def _() -> None:
        r.top[...] = r.start[...]
        share = 1 if tile.tokens == 1 else 1 / LANES  # prompts add up lanes at the end
        r.total[...] = jnp.full_like(r.total, share)  # of a sink; without one it fades as soon as there is a key
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
        first = (r.spans[here * RUN + 3] + j * group) * size
        _attend(r, tile, here, slot, first)

    jax.lax.fori_loop(0, count, walk, None)
    r.turn[0] = (base + count) % 2

    @pl.when((step + 1) % tile.many == 0)
    def _() -> None:
        for h in range(r.out.shape[0]):
            total = r.total[h][:, :1] if tile.tokens == 1 else r.total[h].sum(1, keepdims=True)
            r.out[h] = (r.sums[h] / total).astype(r.out.dtype)


def _fetch(r: Any, at: Any, j: Any, slot: Any, wait: bool = False) -> None:
    """Start, or wait for, the copies of group j of the pages of block `at`."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    group = r.k_s.shape[1]
    first, width = r.spans[at * RUN + 3] + j * group, r.table.shape[0] * RUN // r.spans.shape[0]
    count = jnp.minimum(r.spans[at * RUN + 4] - first, group)

    def one(i: Any, _: None) -> None:
        page = r.table[at * width + first + i]
        for n, (pages, here) in enumerate(r.copied):
            copy = pltpu.make_async_copy(pages.at[r.layer[0], page], here.at[slot, i], r.arrived.at[slot, n])
            copy.wait() if wait else copy.start()

    if wait:  # a wait counts bytes, so one is enough for a whole group

        @pl.when(count == group)
        def _() -> None:
            for n, (_, here) in enumerate(r.copied):
                pltpu.make_async_copy(here.at[slot], here.at[slot], r.arrived.at[slot, n]).wait()

        pl.when(count < group)(lambda: jax.lax.fori_loop(0, count, one, None))
        return

    def several(g: Any, _: None) -> None:
        for i in range(TOGETHER):
            one(g * TOGETHER + i, None)

    if group >= TOGETHER:
        jax.lax.fori_loop(0, count // TOGETHER, several, None)
    jax.lax.fori_loop(count // TOGETHER * TOGETHER if group >= TOGETHER else 0, count, one, None)


def _attend(r: Any, tile: Tile, at: Any, slot: Any, first: Any) -> None:
    """Add the group of pages in `slot`, whose first key is `first`, to the sums of all heads."""
    from jax.experimental import pallas as pl

    mask = tile.mask
    start, index, count = (r.spans[at * RUN + i] for i in range(3))
    heads, rows = r.k_s.shape[2], r.q.shape[1]
    part = _part(rows)
    parts = rows // part
    work = heads * parts
    by = mask.scale * (LOG2E if mask.softcap is None else 1 / mask.softcap)
    read = _read(r, tile, slot, start + count - first, by)
    cap = lambda x: x if mask.softcap is None else jnp.tanh(x) * (mask.softcap * LOG2E)
    seen = lambda row, shape, key: _seen(mask, tile.tokens, row, shape, (start, index, count, first + key))
    if tile.tokens > 1:
        whole = prompt.whole(mask, tile.tokens, r.k_s.shape[1] * r.k_s.shape[3], (start, index, count, first))
        what = prompt.Part(heads, part, mask, cap, seen)
        if not hasattr(r, "v_s"):  # a mask costs latents 6 to 10 % on a v6e; code for both is long
            prompt.attend(r, what, read)
            return
        pl.when(whole)(lambda: prompt.attend(r, what._replace(seen=None), read))
        pl.when(~whole)(lambda: prompt.attend(r, what, read))
        return

    def head(n: Any) -> None:
        h, mine = n // parts, pl.ds(pl.multiple_of(n % parts * part, 8), part)
        v, times = read.v(h), read.v_times(h)
        x = jax.lax.dot_general(r.q[h, mine], read.k(h), (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        x = cap(x * read.k_times(h))
        x = jnp.where(seen(n % parts * part, x.shape, 0), x, NEG)
        old = r.top[h, mine]
        new = jnp.maximum(old, x.max(1, keepdims=True))
        decay, p = jnp.exp2(old - new), jnp.exp2(x - jnp.maximum(new[:, :1], NEG / 2))
        r.top[h, mine], r.total[h, mine] = new, r.total[h, mine] * decay + p.sum(1, keepdims=True)
        p = p if times is None else p * times
        more = jnp.dot(p.astype(v.dtype), v, preferred_element_type=jnp.float32)
        r.sums[h, mine] = r.sums[h, mine] * decay[:, :1] + more

    some = next(n for n in range(min(UNROLL, max(2, ROWS // part), work), 0, -1) if work % n == 0)

    def several(g: Any, _: None) -> None:
        for i in range(some):
            head(g * some + i)

    jax.lax.fori_loop(0, work // some, several, None)


def _part(rows: int) -> int:
    """Give the rows of a product."""
    return next(n for n in range(min(ROWS, rows), 0, -8) if rows % n == 0)


def _read(r: Any, tile: Tile, slot: Any, count: Any, by: float) -> prompt.Read:
    """Prepare the group in `slot`, of which no token has more than `count` keys, and give what reads a head of it."""
    from jax.experimental import pallas as pl

    _, group, heads, size, width = r.k_s.shape
    keys, dtype, values = group * size, r.q.dtype, getattr(r, "v_s", r.k_s)
    k = lambda h: r.k_s[slot, :, h].reshape(keys, width)
    v = lambda h: values[slot, :, h, :, : tile.values].reshape(keys, tile.values)
    scale, none = lambda h: by, lambda h: None
    if hasattr(r, "decoded"):
        formats.decoded(r.k_s, r.k_scale_s, r.decoded, slot, count)
        return prompt.Read(lambda h: r.decoded[...], lambda h: r.decoded[:, : tile.values], scale, none)
    if hasattr(r, "k_times"):
        unit = formats.unit(r.k_s.dtype)
        formats.factors(r.k_scale_s, r.k_times, slot, size, by * unit)
        formats.factors(getattr(r, "v_scale_s", r.k_scale_s), r.v_times, slot, size, unit, count)
        numbers = [lambda h, x=x: formats.numbers(x(h), dtype) for x in (k, v)]
        times = [lambda h, x=x: x[pl.ds(h, 1), :keys] for x in (r.k_times, r.v_times)]
        return prompt.Read(*numbers, *times)

    @pl.when(count < keys)  # what is there may be NaN, and that times 0 too
    def clear() -> None:
        def page(i: Any, _: None) -> None:
            ki = jax.lax.broadcasted_iota(jnp.int32, (heads, size, width), 1) + i * size
            value = values[slot, i]
            values[slot, i] = jnp.where(ki < count, value, jnp.zeros_like(value))

        jax.lax.fori_loop(count // size, group, page, None)

    return prompt.Read(k, v, scale, none)


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
