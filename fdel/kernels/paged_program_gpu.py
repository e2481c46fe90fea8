"""The program of `paged_attention_gpu` for pages of keys and of values, in 16 or in 8 bits.

Keys are the rows of both products and queries the columns: scores [page rows] = K Q^T and sums [H rows] = V^T P^T. So a
group of a few query heads costs products, exponentials and registers for 8 columns, not for the 64 rows of a tensor core's
tile; the greatest score of a column is found across the four warps, and probabilities go through shared memory. Pages in 8
bits are copied as they are stored, and become bfloat16 in registers on their way to a second place in shared memory, which
tensor cores read (`decode_gpu`). A token's scale is one number for a key head (`ops.quantized_pages`): the keys' multiplies
scores, the values' probabilities, in float32, so decoded numbers are exact.

Bytes read: keys and values once for each key head and tile of rows. FLOPs: 4 * columns * keys * head_dim.
"""

import functools
import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fdel.ops.mask import NEG

COLUMNS = (8, 16, 32, 64)  # query rows of a program
WIDE = {64: 64, 128: 64, 256: 32}  # their most, by the channels of a head: sums stay in registers
DEPTH = 2  # pages on their way
HELD = 32  # columns whose bounds stay in registers; those of more are read for each page
DEVICE, MEMORY, TOGETHER = 132, 227 * 2**10, 4  # multiprocessors; bytes of each; programs that share one at most
LOG2E = math.log2(math.e)
ALL: tuple = () if jax.version.__version_info__ >= (0, 12) else ((),)  # the index of all, which older ones ask for


def columns(rows: int, width: int) -> int:
    """Say how many query rows a program takes, of so many of a block with heads of so many channels."""
    return next((n for n in COLUMNS if rows <= n), WIDE[width]) if rows <= WIDE[width] else WIDE[width]


def together(rows: int, size: int, width: int, bits: int) -> int:
    """Count the programs that run at once on an H100 or H200."""
    pages = 2 * size * width * (DEPTH * bits // 8 + (2 if bits == 8 else 0))
    need = pages + 2 * columns(rows, width) * (width + size) + 128 * columns(rows, width)
    return DEVICE * min(TOGETHER, MEMORY // need)


def run(how: Any, given: dict[str, Array]) -> tuple[Float[Array, "blocks K splits H rows"], Array]:
    """Give each part's output and log-sum-exp [blocks K splits rows] in float32.

    Given are q [blocks K rows H], whole tiles of `columns`; pages k and v [P page H] and, in 8 bits, k_scale and v_scale
    [P page]; table [blocks width]; bounds [blocks 2 rows]; span [blocks 3]; and slopes [K rows] or nothing.
    """
    from jax.experimental.pallas import mosaic_gpu as gpu

    q, k = given["q"], given["k"]
    (blocks, heads, rows, width), size = q.shape, k.shape[1]
    many, eight = columns(rows, width), k.dtype.itemsize == 1
    line = min(128, width * k.dtype.itemsize)
    swizzled = lambda n, lanes: (gpu.TilingTransform((8, lanes)), gpu.SwizzleTransform(n))
    half: Any = functools.partial(gpu.SMEM, dtype=q.dtype, transforms=swizzled(128, 64))
    page = gpu.SMEM((DEPTH, size, width), k.dtype, transforms=swizzled(line, line // k.dtype.itemsize))
    scratch: dict[str, Any] = {
        "q_s": half((many, width)), "k_s": page, "v_s": page, "p_s": half((many, size)),
        "q_bar": gpu.Barrier(), "full": gpu.Barrier(num_arrivals=4 if eight else 2, num_barriers=DEPTH),
    }  # fmt: skip
    if eight:
        number = gpu.SMEM((DEPTH, size), jnp.float32)
        scratch |= {"ks_s": number, "vs_s": number, "kd_s": half((size, width)), "vd_s": half((size, width))}
    of = lambda *shape: jax.ShapeDtypeStruct((blocks, heads, how.splits, *shape), jnp.float32)
    kernel = gpu.kernel(
        functools.partial(_program, how=how, names=(*given, "out", "lse"), heads=heads, many=many),
        out_type=(of(width, rows), of(rows)),
        scratch_types=scratch,
        grid=(blocks * (rows // many), heads, how.splits),
        grid_names=("block", "head", "split"),
        compiler_params=gpu.CompilerParams(
            lowering_semantics=gpu.LoweringSemantics.Lane, reduction_scratch_bytes=128 * many
        ),
    )
    return kernel(*given.values())


def _program(*refs: Any, how: Any, names: tuple[str, ...], heads: int, many: int, **memory: Any) -> None:
    """Attend from one tile of rows to one part of its pages; `refs` are the arguments and results of `run`'s kernel."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    r = SimpleNamespace(**dict(zip(names, refs, strict=True)), **memory)
    at, head, split = (jax.lax.axis_index(name) for name in ("block", "head", "split"))
    tiles = r.q.shape[2] // many
    block, rows = jax.lax.div(at, jnp.int32(tiles)), pl.ds(jax.lax.rem(at, jnp.int32(tiles)) * many, many)
    begin, end = r.span[block, 0], r.span[block, 1]
    each = jax.lax.div(end - begin + (how.splits - 1), jnp.int32(how.splits))
    begin = begin + split * each
    count = jnp.maximum(jnp.minimum(end - begin, each), 0)
    copied = [(r.k, r.k_s), (r.v, r.v_s)]
    if hasattr(r, "k_scale"):
        copied += [(r.k_scale, r.ks_s), (r.v_scale, r.vs_s)]

    def fetch(j: Any) -> None:
        page, slot = r.table[block, begin + j] * heads + head, jax.lax.rem(j, jnp.int32(DEPTH))
        for pages, to in copied:
            gpu.copy_gmem_to_smem(pages.at[page], to.at[slot], r.full.at[slot])

    for j in range(DEPTH):
        pl.when(j < count)(functools.partial(fetch, jnp.int32(j)))
    gpu.copy_gmem_to_smem(r.q.at[block, head, rows], r.q_s, r.q_bar)
    column = lambda ref: gpu.load(ref, *ALL, layout=gpu.Layout.WGMMA.reduce(0), optimized=False)

    def about_columns() -> None:
        r.low, r.high = (column(r.bounds.at[block, i, rows]) for i in range(2))
        r.slope = column(r.slopes.at[head, rows]) if hasattr(r, "slopes") else None

    about_columns()
    gpu.barrier_wait(r.q_bar)

    def step(j: Any, carry: tuple) -> tuple:
        if many > HELD:
            about_columns()
        carry = _attend(r, how, j, (begin + j) * r.k.shape[1], r.span[block, 2], carry)
        pl.when(j + DEPTH < count)(lambda: fetch(j + DEPTH))
        return carry

    size, width = r.k.shape[1:]
    whole = lambda shape, value, layout: gpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)
    start = (
        whole((many,), NEG, gpu.Layout.WGMMA.reduce(0)),
        *(whole((n, many), 0, gpu.Layout.WGMMA) for n in (size, width)),
    )
    top, total, o = jax.lax.fori_loop(0, count, step, start)
    total = jnp.maximum(total.sum(axis=0), 1e-30)  # of a row that sees nothing: 0
    r.out.at[block, head, split, :, rows][...] = o * _down(1 / total, width)
    r.lse.at[block, head, split, rows][...] = jnp.where(top <= NEG / 2, NEG, (top + jnp.log2(total)) * (1 / LOG2E))


def _attend(r: Any, how: Any, j: Any, first: Any, last: Any, carry: tuple) -> tuple:
    """Attend to page j, whose first key is `first`: greatest scores of columns, sums of exponentials, and of values.

    `last` is the last key of the block. Columns of no query see nothing.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    top, total, o = carry
    (size, width), many, eight = r.k.shape[1:], r.q_s.shape[0], hasattr(r, "kd_s")
    slot, shape, scale = jax.lax.rem(j, jnp.int32(DEPTH)), (r.k.shape[1], r.q_s.shape[0]), how.scale
    across = lambda x: jax.lax.broadcast_in_dim(x, shape, [0])
    row = gpu.Layout.WGMMA.reduce(1)
    token = lambda ref: gpu.load(ref.at[slot], *ALL, layout=row)
    keys, values = (r.kd_s, r.vd_s) if eight else (r.k_s.at[slot], r.v_s.at[slot])
    gpu.barrier_wait(r.full.at[slot])
    if r.v.dtype != jnp.int8:
        pl.when(first + size > last + 1)(lambda: _clear(r.v_s.at[slot], last - first))
    if eight:
        _decode(r.k_s, slot, r.kd_s)
        _decode(r.v_s, slot, r.vd_s)
        scale = across(token(r.ks_s) * scale)
    gpu.commit_smem()

    def products(acc: Any) -> Array:
        gpu.wgmma(acc, keys, r.q_s.transpose((1, 0)))
        return acc[...]

    x = pl.run_scoped(products, gpu.ACC(shape, jnp.float32)) * scale
    if how.softcap is not None:
        x = jnp.tanh(x * (1 / how.softcap)) * how.softcap
    ki = gpu.broadcasted_iota(jnp.int32, shape, 0, layout=gpu.Layout.WGMMA) + first
    low, high = _down(r.low, size), _down(r.high, size)
    if r.slope is not None:
        x = x + _down(r.slope, size) * (ki - high).astype(jnp.float32)
    seen = (ki >= low) & (ki <= high)
    x = jnp.where(seen, x * LOG2E, NEG)
    new = jnp.maximum(top, x.max(axis=0))
    decay, p = jnp.exp2(top - new), jnp.exp2(x - _down(jnp.maximum(new, NEG / 2), size))
    total = total * _down(decay, size) + p
    if eight:
        written = gpu.broadcasted_iota(jnp.int32, (size,), 0, layout=row) <= last - first
        p = p * across(jnp.where(written, token(r.vs_s), 0.0))  # what no token wrote may have a scale of NaN
    p = gpu.layout_cast(p.astype(r.p_s.dtype), gpu.Layout.WGMMA_TRANSPOSED)
    r.p_s.transpose((1, 0))[...] = p
    gpu.commit_smem()

    def sums(acc: Any) -> Any:
        gpu.wgmma(acc, values.transpose((1, 0)), r.p_s.transpose((1, 0)))
        return acc[...] if how.interpreted else None

    o = o * _down(decay, width)
    if how.interpreted:  # it knows no sums that were begun elsewhere
        return new, total, o + pl.run_scoped(sums, gpu.ACC((width, many), jnp.float32))
    return new, total, pl.run_state(sums)(gpu.ACC.init(o))


def _clear(values: Any, last: Any) -> None:
    """Write zeros after row `last`: what no token wrote may be NaN, and that times 0 too."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    size, width = values.shape
    layout, part = _layout(values)
    for c in range(0, width, part):
        some = values.at[:, pl.ds(c, part)]
        value = gpu.load(some, *ALL, layout=layout)
        there = gpu.broadcasted_iota(jnp.int32, (size, part), 0, layout=layout) <= last
        if value.dtype.itemsize == 1:  # of which devices know bits alone
            some[...] = value & jnp.where(there, 255, 0).astype(value.dtype)
        else:
            some[...] = jnp.where(there, value, jnp.zeros_like(value))


def _decode(pages: Any, slot: Any, to: Any) -> None:
    """Write a page of integers, or of the bits of e4m3, as bfloat16."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    layout, part = _layout(pages.at[slot])
    for c in range(0, pages.shape[2], part):
        x = gpu.load(pages.at[slot, :, pl.ds(c, part)], *ALL, layout=layout)
        if x.dtype == jnp.uint8:  # devices turn two of them into float16 at once
            x = jax.lax.bitcast_convert_type(x, jnp.float8_e4m3fn).astype(jnp.float16).astype(jnp.float32)
        to.at[:, pl.ds(c, part)][...] = x.astype(jnp.bfloat16)


def _layout(page: Any) -> tuple[Any, int]:
    """Say where a thread has numbers of a page, and how many channels are loaded at once: 128 bytes at most."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    if page.dtype.itemsize == 2:
        return gpu.Layout.WGMMA, 64
    return gpu.Layout.WGMMA_UPCAST_2X, min(128, page.shape[1])


def _down(x: Array, n: int) -> Array:
    """Repeat a number of each column in n rows."""
    return jax.lax.broadcast_in_dim(x, (n, *x.shape), [1])
