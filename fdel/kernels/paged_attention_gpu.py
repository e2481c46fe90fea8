"""Attention over pages on NVIDIA Hopper: a Pallas Mosaic GPU kernel for decoding and for chunks of prompts.

Algorithm: online softmax (Milakov and Gimelshein, arXiv 1805.02867) in the tiles of FlashAttention (arXiv 2205.14135), with
the keys of a sequence divided between programs, whose results are merged by their log-sum-exps (Flash-Decoding). A program
serves up to 64 query rows of a key head, that is its query heads times the tokens of a block, and walks its share of the
pages: they are fetched as the table names them, `DEPTH` ahead; both products run on tensor cores in bfloat16 or float16.

Bytes read: keys and values once for each key head and 64 rows, 4 * keys * head_dim; written, and read again by the merge:
4 * splits * rows * (head_dim + 1). FLOPs: 4 * 64 * keys * head_dim, also where fewer rows are used: 64 for each byte, of
which a group of 4 heads uses a sixteenth. Latents, pages without values, have a program of their own, `latent_program_gpu`.
Compiled for H100; it has not run on a GPU yet.
"""

import functools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fdel.kernels import latent_program_gpu as latents
from fdel.kernels.device import no_hopper
from fdel.ops.batch import Paged, Pages
from fdel.ops.mask import NEG, Mask, PerHead

ROWS = 64  # of a program: what one product of a warpgroup takes
DEPTH = 2  # pages on their way; two programs of 128 channels then share a multiprocessor's memory
PROGRAMS = 2 * 132  # that fill an H100 or H200
SPLITS = (1, 2, 4, 8, 16)  # into how many parts keys may be divided
PAGES = (64,)  # tokens of a page; with 128 its registers spill
CHANNELS = (64, 128)  # of a head
LOG2E = math.log2(math.e)


class Call(NamedTuple):
    """What is static: the mask's scale and softcap, the parts of the keys, and where probabilities are for the product.

    They stay in registers on a GPU; the interpreter, which is meant by `interpreted`, knows operands in shared memory only.
    """

    scale: float
    softcap: float | None
    splits: int
    interpreted: bool = False


def unsupported(
    batch: Paged, state: Pages, layer: Any, q: Array, *,
    mask: Mask, sinks: PerHead = None, alibi: PerHead = None, v_dim: int | None = None,
) -> str | None:  # fmt: skip
    """Say why the kernel cannot serve this call, or None."""
    if why := no_hopper():
        return why
    v = state.k if state.v is None else state.v
    if state.k_scale is not None or state.v_scale is not None:
        return "pages in 8 bits; expected the dtype of the queries"
    if not q.dtype == state.k.dtype == v.dtype or q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it attends in bfloat16 and float16; found {q.dtype}, {state.k.dtype}, {v.dtype}"
    equal = q.shape[-1] == state.k.shape[-1] == v.shape[-1]
    if state.v is not None and (not equal or q.shape[-1] not in CHANNELS or v_dim not in (None, v.shape[-1])):
        return f"heads of {q.shape[-1]}, {state.k.shape[-1]}, {v.shape[-1]} channels; expected equal, of {CHANNELS}"
    if state.v is None and (why := latents.unsupported(state.k.shape, v_dim or q.shape[-1])):
        return why
    if state.k.shape[3] not in PAGES:
        return f"pages of {state.k.shape[3]} tokens; expected one of {PAGES}"
    if batch.ahead is not None:
        return "tokens that see later ones (Paged.ahead)"
    return None if alibi is None else "alibi slopes, which it does not have"


def call(
    batch: Paged, state: Pages, layer: Any, q: Float[Array, "T N H"], *,
    mask: Mask, sinks: PerHead = None, alibi: None = None, v_dim: int | None = None,
) -> Float[Array, "T N Hv"]:  # fmt: skip
    """Attend over cached pages; see `unsupported` for what it can serve, `paged_attention` for the meaning."""
    blocks, kv_heads = len(batch.page_table), state.k.shape[2]
    tiles, fill = -(-batch.block * (q.shape[1] // kv_heads) // ROWS), latents.PROGRAMS if state.v is None else PROGRAMS
    how = Call(mask.scale, mask.softcap, splits(blocks * kv_heads * tiles, batch.page_table.shape[1], fill))
    return attend(batch, state, layer, q, mask, sinks, how, v_dim)


def splits(programs: int, pages: int, fill: int = PROGRAMS) -> int:
    """Choose parts of so many pages for programs of which `fill` run at once: those with the shortest rounds.

    To begin, write and merge a part is taken to cost what two of 128 pages do.
    """
    return min((n for n in SPLITS if n <= max(1, pages)), key=lambda n: -(-n * programs // fill) / n * (1 + n / 64))


def attend(
    batch: Paged, state: Pages, layer: Any, q: Float[Array, "T N H"], mask: Mask, sinks: PerHead, how: Call,
    v_dim: int | None = None,
) -> Float[Array, "T N Hv"]:  # fmt: skip
    """Lay out queries as rows of their key head, run the kernel on the parts of the keys, and merge what they give."""
    _, pages, kv_heads, size, width = state.k.shape
    blocks, block = len(batch.page_table), batch.block
    lay = lambda x: x.reshape(blocks, block, kv_heads, -1, width).swapaxes(1, 2).reshape(blocks, kv_heads, -1, width)
    rows = block * (q.shape[1] // kv_heads)
    fill = -rows % (8 if rows < ROWS else ROWS)  # 8: rows of a tile in shared memory
    queries = jnp.pad(lay(q), ((0, 0), (0, 0), (0, fill), (0, 0)))
    bounds, span = _reach(batch, mask, rows // block, size)
    table = jnp.clip(batch.page_table, 0, pages - 1) + layer * pages
    flat = lambda x: x.reshape(-1, size, width)
    where = table.astype(jnp.int32), bounds, span
    if state.v is None:
        out, lse = latents.run(how, v_dim or width, queries, flat(state.k), *where)
    else:
        out, lse = _kernel(how, queries, flat(state.k), flat(state.v), *where)
    out, lse = _merge(out[..., :rows, :], lse[..., :rows], sinks, block)
    out = out.reshape(blocks, kv_heads, block, -1, out.shape[-1]).swapaxes(1, 2)
    return out.reshape(*q.shape[:2], -1).astype(q.dtype)


def _reach(batch: Paged, mask: Mask, group: int, size: int) -> tuple[Array, Array]:
    """Give the first and the last key that each row sees, [blocks 2 rows], and [blocks 3]: pages from, to, last key."""
    last = batch.positions.reshape(-1, batch.block).astype(jnp.int32)
    first = jnp.zeros_like(last)
    if mask.window is not None:
        first = jnp.maximum(first, last - mask.window + 1)
    if mask.chunk is not None:
        first = jnp.maximum(first, last // mask.chunk * mask.chunk)
    first = jnp.where(last < 0, jnp.iinfo(jnp.int32).max, first)
    ends = last.max(1)
    span = jnp.stack([jnp.where(ends < 0, 0, first.min(1) // size), (ends + size) // size, ends], 1)
    rows = jnp.repeat(jnp.stack([first, last], 1), group, 2)
    return jnp.pad(rows, ((0, 0), (0, 0), (0, -rows.shape[2] % ROWS)), constant_values=-1), span


def _merge(out: Array, lse: Array, sinks: PerHead, block: int) -> tuple[Array, Array]:
    """Weigh the parts [blocks K splits rows H] by their log-sum-exps [blocks K splits rows]; a sink adds to the sum."""
    top = lse.max(2)
    sink = None
    if sinks is not None:
        sink = jnp.tile(sinks.astype(jnp.float32).reshape(lse.shape[1], -1), (1, block))  # [K rows]
        top = jnp.maximum(top, sink)
    parts = jnp.where(lse <= NEG / 2, 0, jnp.exp(lse - top[:, :, None]))
    total = parts.sum(2) + (0 if sink is None else jnp.exp(sink - top))
    total = jnp.where(total == 0, 1, total)
    return (out * parts[..., None]).sum(2) / total[..., None], top + jnp.log(total)


def _kernel(
    how: Call, q: Float[Array, "blocks K rows H"], k: Float[Array, "P page H"], v: Float[Array, "P page H"],
    table: Int[Array, "blocks width"], bounds: Int[Array, "blocks 2 rows"], span: Int[Array, "blocks 3"],
) -> tuple[Array, Array]:  # fmt: skip
    """Give each part's output [blocks K splits rows H] and log-sum-exp [blocks K splits rows] in float32."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    blocks, heads, rows, width = q.shape
    tile, size = min(rows, ROWS), k.shape[1]
    tiled = lambda n: (gpu.TilingTransform((8, n)), gpu.SwizzleTransform(128))
    half: Any = functools.partial(gpu.SMEM, dtype=q.dtype, transforms=tiled(64))
    scratch: dict[str, Any] = {
        "q_s": half((ROWS, width)), "k_s": half((DEPTH, size, width)), "v_s": half((DEPTH, size, width)),
        "o_s": gpu.SMEM((ROWS, width), jnp.float32, transforms=tiled(32)), "lse_s": gpu.SMEM((ROWS,), jnp.float32),
        "first_s": gpu.SMEM((ROWS,), jnp.int32), "last_s": gpu.SMEM((ROWS,), jnp.int32),
        "q_bar": gpu.Barrier(num_barriers=3), "k_bar": gpu.Barrier(num_barriers=DEPTH),
        "v_bar": gpu.Barrier(num_barriers=DEPTH),
    }  # fmt: skip
    if how.interpreted:
        scratch["p_s"] = half((ROWS, size))
    parts, tiles = (blocks, heads, how.splits), -(-rows // ROWS)
    of = lambda *shape: jax.ShapeDtypeStruct((*parts, *shape), jnp.float32)
    run = gpu.kernel(
        functools.partial(_program, how=how, heads=heads, tile=tile),
        out_type=(of(rows, width), of(tiles * ROWS)),
        scratch_types=scratch,
        grid=(blocks * tiles, heads, how.splits),
        grid_names=("block", "head", "split"),
        compiler_params=gpu.CompilerParams(lowering_semantics=gpu.LoweringSemantics.Lane),
    )
    return run(q, k, v, table, bounds, span)


def _program(*refs: Any, how: Call, heads: int, tile: int, **memory: Any) -> None:
    """Attend from one tile of rows to one part of its pages; `refs` are the arguments and results of `_kernel`."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    q, k, v, table, bounds, span, out, lse = refs
    at, head, split = (jax.lax.axis_index(name) for name in ("block", "head", "split"))
    tiles, s = q.shape[2] // tile, SimpleNamespace(**memory)
    block, mine = jax.lax.div(at, jnp.int32(tiles)), pl.ds(0, tile)
    first = jax.lax.rem(at, jnp.int32(tiles)) * tile
    here, rows = (
        pl.ds(first, tile),
        pl.ds(first, ROWS),
    )  # numbers of rows are copied for whole tiles, 128 bytes at least
    begin, end = span[block, 0], span[block, 1]
    each = jax.lax.div(end - begin + (how.splits - 1), jnp.int32(how.splits))
    begin = begin + split * each
    count = jnp.maximum(jnp.minimum(end - begin, each), 0)

    def fetch(j: Any) -> None:
        page, slot = table[block, begin + j] * heads + head, jax.lax.rem(j, jnp.int32(DEPTH))
        gpu.copy_gmem_to_smem(k.at[page], s.k_s.at[slot], s.k_bar.at[slot])
        gpu.copy_gmem_to_smem(v.at[page], s.v_s.at[slot], s.v_bar.at[slot])

    for j in range(DEPTH):
        pl.when(j < count)(functools.partial(fetch, jnp.int32(j)))
    gpu.copy_gmem_to_smem(q.at[block, head, here], s.q_s.at[mine], s.q_bar.at[0])
    gpu.copy_gmem_to_smem(bounds.at[block, 0, rows], s.first_s, s.q_bar.at[1])
    gpu.copy_gmem_to_smem(bounds.at[block, 1, rows], s.last_s, s.q_bar.at[2])
    for i in range(3):
        gpu.barrier_wait(s.q_bar.at[i])
    s.o_s[...], s.lse_s[...] = _walk(s, how, begin, count, span[block, 2], fetch)
    gpu.commit_smem()
    gpu.copy_smem_to_gmem(s.o_s.at[mine], out.at[block, head, split, here])
    gpu.copy_smem_to_gmem(s.lse_s, lse.at[block, head, split, rows])
    gpu.wait_smem_to_gmem(0)


def _walk(s: Any, how: Call, begin: Any, count: Any, last: Any, fetch: Callable[[Any], None]) -> tuple[Array, Array]:
    """Attend to `count` pages from page `begin`: output and log-sum-exp. `last` is the last key of the block.

    Rows of no query hold what was in memory: they are not copied out, and no row reads another.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    size, width = s.k_s.shape[1:]
    row = gpu.Layout.WGMMA.reduce(1)
    columns = lambda x, n: jax.lax.broadcast_in_dim(x, (ROWS, n), [0])
    keys = lambda shape, axis: gpu.broadcasted_iota(jnp.int32, shape, axis, layout=gpu.Layout.WGMMA)
    index: tuple = () if jax.version.__version_info__ >= (0, 12) else ((),)  # of all, which older ones ask for
    load = lambda x, layout: gpu.load(x, *index, layout=layout)
    low, high = (columns(load(x, layout=row), size) for x in (s.first_s, s.last_s))
    whole = lambda shape, value, layout: gpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    def step(j: Any, carry: tuple) -> tuple:
        top, total, o = carry
        slot, first = jax.lax.rem(j, jnp.int32(DEPTH)), (begin + j) * size
        gpu.barrier_wait(s.k_bar.at[slot])

        def products(acc: Any) -> Array:
            gpu.wgmma(acc, s.q_s, s.k_s.at[slot].transpose((1, 0)))
            return acc[...]

        x = pl.run_scoped(products, gpu.ACC((ROWS, size), jnp.float32)) * how.scale
        if how.softcap is not None:
            x = jnp.tanh(x * (1 / how.softcap)) * how.softcap
        ki = keys((ROWS, size), 1) + first
        x = jnp.where((ki >= low) & (ki <= high), x * LOG2E, NEG)
        new = jnp.maximum(top, x.max(axis=1))
        decay, p = jnp.exp2(top - new), jnp.exp2(x - columns(jnp.maximum(new, NEG / 2), size))
        gpu.barrier_wait(s.v_bar.at[slot])

        @pl.when(first + size > last + 1)  # stale NaN times 0 would be NaN
        def _() -> None:
            seen = keys((size, width), 0) + first <= last
            value = load(s.v_s.at[slot], layout=gpu.Layout.WGMMA)
            s.v_s.at[slot][...] = jnp.where(seen, value, jnp.zeros_like(value))
            gpu.commit_smem()

        operand = p.astype(s.v_s.dtype)
        if how.interpreted:
            s.p_s[...] = operand
            gpu.commit_smem()
            operand = s.p_s

        def values(acc: Any) -> Array:
            gpu.wgmma(acc, operand, s.v_s.at[slot])
            return acc[...]

        o = o * columns(decay, width) + pl.run_scoped(values, gpu.ACC((ROWS, width), jnp.float32))
        pl.when(j + DEPTH < count)(lambda: fetch(j + DEPTH))
        return new, total * decay + p.sum(axis=1), o

    begun = whole((ROWS,), NEG, row), whole((ROWS,), 0, row), whole((ROWS, width), 0, gpu.Layout.WGMMA)
    top, total, o = jax.lax.fori_loop(0, count, step, begun)
    total = jnp.maximum(total, 1e-30)  # of a row that sees nothing: 0
    return o * columns(1 / total, width), jnp.where(top <= NEG / 2, NEG, (top + jnp.log2(total)) * (1 / LOG2E))
