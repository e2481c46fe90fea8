"""The program of `paged_attention_gpu` for pages of keys and of values, in 16 or in 8 bits.

*Few queries*, as in decoding: keys are the rows of both products and queries the columns, scores [page queries] = K Q^T
and sums [H queries] = V^T P^T. So a group of a few query heads costs products, exponentials and registers for 8 columns,
not for the 64 rows of a tensor core's tile; the greatest score of a column is found across the four warps, and
probabilities go through shared memory. *Many queries*, of prompts: 64 are the rows; probabilities stay in registers.

Pages in 8 bits are copied as they are stored, and become bfloat16 in registers on their way to a second place in shared
memory, which tensor cores read. A token's scale is one number for a key head (`ops.quantized_pages`): the keys' multiplies
scores, the values' probabilities, in float32, so decoded numbers are exact.

Bytes read: keys and values once for each key head and tile of queries. FLOPs: 4 * tile * keys * head_dim.
"""

import functools
import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fdel.kernels import transfer_gpu
from fdel.ops.mask import NEG

TILES = (8, 16, 32, 64)  # queries of a program; the last are rows, others columns
CHANNELS = (64, 128, 256)  # of a head
DEPTH = 2  # pages on their way
DEVICE, MEMORY, TOGETHER = (
    132,
    227 * 2**10,
    (3, 2),
)  # multiprocessors; bytes of each; programs that share it, of few or many queries
LOG2E = math.log2(math.e)


def tile(queries: int, width: int, bits: int) -> int:
    """Say how many queries a program takes, of so many of a block and key head. Sums of wider heads want all registers."""
    most = 32 if (width, bits) == (256, 8) else TILES[-1]
    return next((n for n in TILES if queries <= n), most) if queries <= most else most


def together(queries: int, size: int, width: int, bits: int) -> int:
    """Count the programs that run at once on an H100 or H200."""
    pages, many = 2 * size * width * (DEPTH * bits // 8 + (2 if bits == 8 else 0)), tile(queries, width, bits)
    need = pages + 2 * many * (width + size) + 2**11
    return DEVICE * min(TOGETHER[many > 16], MEMORY // need)


def run(how: Any, given: dict[str, Array]) -> tuple[Float[Array, "blocks K splits rows H"], Array]:
    """Give each part's output and log-sum-exp [blocks K splits rows] in float32.

    Given are q [blocks K rows H], whole tiles; pages k and v [P page H] and, in 8 bits, k_scale and v_scale [P page]; table
    [blocks width]; bounds [blocks 2 rows]; span [blocks 3]; and slopes [K rows] or nothing.
    """
    from jax.experimental.pallas import mosaic_gpu as gpu

    q, k = given["q"], given["k"]
    (blocks, heads, rows, width), size = q.shape, k.shape[1]
    many, eight = tile(rows, width, 8 * k.dtype.itemsize), k.dtype.itemsize == 1
    line = 64 if eight else 128
    swizzled = lambda n, lanes: (gpu.TilingTransform((8, lanes)), gpu.SwizzleTransform(n))
    half: Any = functools.partial(gpu.SMEM, dtype=q.dtype, transforms=swizzled(128, 64))
    page = gpu.SMEM((DEPTH, size, width), k.dtype, transforms=swizzled(line, line // k.dtype.itemsize))
    scratch: dict[str, Any] = {
        "q_s": half((many, width)), "k_s": page, "v_s": page,
        "q_bar": gpu.Barrier(), "full": gpu.Barrier(num_arrivals=4 if eight else 2, num_barriers=DEPTH),
    }  # fmt: skip
    if eight:
        number = gpu.SMEM((DEPTH, size), jnp.float32)
        scratch |= {"ks_s": number, "vs_s": number, "kd_s": half((size, width)), "vd_s": half((size, width))}
    if (few := many < TILES[-1]) or how.interpreted:
        scratch["p_s"] = half((many, size))
    of = lambda *shape: jax.ShapeDtypeStruct((blocks, heads, how.splits, *shape), jnp.float32)
    kernel = gpu.kernel(
        functools.partial(_program, how=how, names=(*given, "out", "lse"), heads=heads, many=many),
        kernel_name="paged_attention",
        out_type=(of(*((width, rows) if few else (rows, width))), of(rows)),
        scratch_types=scratch,
        grid=(blocks * (rows // many), heads, how.splits),
        grid_names=("block", "head", "split"),
        compiler_params=gpu.CompilerParams(
            lowering_semantics=gpu.LoweringSemantics.Lane, reduction_scratch_bytes=128 * min(many, 32)
        ),
    )
    out, lse = kernel(*given.values())
    return out.swapaxes(3, 4) if few else out, lse


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
    r.axis = 0 if many < TILES[-1] else 1  # that of keys in scores, and of channels in sums
    query = lambda ref: transfer_gpu.load(ref, layout=gpu.Layout.WGMMA.reduce(r.axis), optimized=False)
    r.low, r.high = (query(r.bounds.at[block, i, rows]) for i in range(2))
    r.slope = query(r.slopes.at[head, rows]) if hasattr(r, "slopes") else None
    gpu.barrier_wait(r.q_bar)

    def step(j: Any, carry: tuple) -> tuple:
        carry = _attend(r, how, j, (begin + j) * r.k.shape[1], r.span[block, 2], carry)
        pl.when(j + DEPTH < count)(lambda: fetch(j + DEPTH))
        return carry

    size, width = r.k.shape[1:]
    whole = lambda shape, value, layout: gpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)
    row, sums = gpu.Layout.WGMMA.reduce(r.axis), whole(_shape(r.axis, width, many), 0, gpu.Layout.WGMMA)
    total = whole((size, many), 0, gpu.Layout.WGMMA) if r.axis == 0 else whole((many,), 0, row)
    top, total, o = jax.lax.fori_loop(0, count, step, (whole((many,), NEG, row), total, sums))
    total = jnp.maximum(total.sum(axis=0) if r.axis == 0 else total, 1e-30)  # of a row that sees nothing: 0
    place = (slice(None), rows) if r.axis == 0 else (rows, slice(None))
    transfer_gpu.store(r.out.at[block, head, split, *place], o * _spread(1 / total, r.axis, width))
    transfer_gpu.store(
        r.lse.at[block, head, split, rows], jnp.where(top <= NEG / 2, NEG, (top + jnp.log2(total)) * (1 / LOG2E))
    )


def _attend(r: Any, how: Any, j: Any, first: Any, last: Any, carry: tuple) -> tuple:
    """Attend to page j, whose first key is `first`: greatest scores of queries, sums of exponentials, and of values.

    `last` is the last key of the block. What is no query sees nothing. Exponentials of few queries are added up at the end.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    top, total, o = carry
    (size, width), many, eight, axis = r.k.shape[1:], r.q_s.shape[0], hasattr(r, "kd_s"), r.axis
    slot, shape, scale = jax.lax.rem(j, jnp.int32(DEPTH)), _shape(axis, size, many), how.scale
    each = lambda x: _spread(x, axis, size)  # a query's number, for its scores
    token = gpu.Layout.WGMMA.reduce(1 - axis)
    of_token = lambda ref: transfer_gpu.load(ref.at[slot], layout=token)
    keys, values = (r.kd_s, r.vd_s) if eight else (r.k_s.at[slot], r.v_s.at[slot])
    gpu.barrier_wait(r.full.at[slot])
    if r.v.dtype != jnp.int8:
        pl.when(first + size > last + 1)(lambda: _clear(r.v_s.at[slot], last - first))
    if eight:
        _decode(r.k_s, slot, r.kd_s)
        _decode(r.v_s, slot, r.vd_s)
        scale = _spread(of_token(r.ks_s) * scale, 1 - axis, many)
    gpu.commit_smem()

    def products(acc: Any) -> Array:
        gpu.wgmma(acc, *((keys, r.q_s.transpose((1, 0))) if axis == 0 else (r.q_s, keys.transpose((1, 0)))))
        return acc[...]

    x = pl.run_scoped(products, gpu.ACC(shape, jnp.float32)) * scale
    if how.softcap is not None:
        x = jnp.tanh(x * (1 / how.softcap)) * how.softcap
    ki = gpu.broadcasted_iota(jnp.int32, shape, axis, layout=gpu.Layout.WGMMA) + first
    if r.slope is not None:
        x = x + each(r.slope) * (ki - each(r.high)).astype(jnp.float32)
    x = jnp.where((ki >= each(r.low)) & (ki <= each(r.high)), x * LOG2E, NEG)
    new = jnp.maximum(top, x.max(axis=axis))
    decay, p = jnp.exp2(top - new), jnp.exp2(x - each(jnp.maximum(new, NEG / 2)))
    total = total * each(decay) + p if axis == 0 else total * decay + p.sum(axis=1)
    if eight:
        written = gpu.broadcasted_iota(jnp.int32, (size,), 0, layout=token) <= last - first
        scale = jnp.where(written, of_token(r.vs_s), 0.0)  # what no token wrote may have a scale of NaN
        p = p * _spread(scale, 1 - axis, many)
    operand: Any = p.astype(r.q_s.dtype)
    if axis == 0:
        r.p_s.transpose((1, 0))[...] = gpu.layout_cast(operand, gpu.Layout.WGMMA_TRANSPOSED)
    elif how.interpreted:  # it knows operands in shared memory only
        r.p_s[...] = operand
    if axis == 0 or how.interpreted:
        gpu.commit_smem()
        operand = r.p_s

    def sums(acc: Any) -> Any:
        gpu.wgmma(acc, *((values.transpose((1, 0)), operand.transpose((1, 0))) if axis == 0 else (operand, values)))
        return acc[...] if how.interpreted else None

    o = o * _spread(decay, axis, width)
    if how.interpreted:  # it knows no sums that were begun elsewhere
        return new, total, o + pl.run_scoped(sums, gpu.ACC(o.shape, jnp.float32))
    return new, total, pl.run_state(sums)(gpu.ACC.init(o))


def _clear(values: Any, last: Any) -> None:
    """Write zeros after row `last`: what no token wrote may be NaN, and that times 0 too."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    size, width = values.shape
    layout, part = _layout(values)
    for c in range(0, width, part):
        some = values.at[:, pl.ds(c, part)]
        value = transfer_gpu.load(some, layout=layout)
        there = gpu.broadcasted_iota(jnp.int32, (size, part), 0, layout=layout) <= last
        if value.dtype.itemsize == 1:  # of which devices know bits alone
            some[...] = value & jnp.where(there, 255, 0).astype(value.dtype)
        else:
            some[...] = jnp.where(there, value, jnp.zeros_like(value))


def _decode(pages: Any, slot: Any, to: Any) -> None:
    """Write a page of integers, or of the bits of e4m3, as bfloat16."""
    from jax.experimental import pallas as pl

    layout, part = _layout(pages.at[slot])
    for c in range(0, pages.shape[2], part):
        x = transfer_gpu.load(pages.at[slot, :, pl.ds(c, part)], layout=layout)
        if x.dtype == jnp.uint8:  # devices turn two of them into float16 at once
            x = jax.lax.bitcast_convert_type(x, jnp.float8_e4m3fn).astype(jnp.float16).astype(jnp.float32)
        to.at[:, pl.ds(c, part)][...] = x.astype(jnp.bfloat16)


def _layout(page: Any) -> tuple[Any, int]:
    """Say where a thread has numbers of a page, and how many channels are loaded at once: 128 bytes at most."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    if page.dtype.itemsize == 2:
        return gpu.Layout.WGMMA, 64
    return gpu.Layout.WGMMA_UPCAST_2X, 64


def _shape(axis: int, n: int, many: int) -> tuple[int, int]:
    return (n, many) if axis == 0 else (many, n)


def _spread(x: Array, axis: int, n: int) -> Array:
    """Repeat numbers n times along a new axis."""
    return jax.lax.broadcast_in_dim(x, _shape(axis, n, x.shape[0]), [1 - axis])
