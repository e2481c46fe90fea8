"""Attention over pages on NVIDIA Hopper: a Pallas Mosaic GPU kernel for decoding and for chunks of prompts.

Algorithm: online softmax (Milakov and Gimelshein, arXiv 1805.02867) in the tiles of FlashAttention (arXiv 2205.14135), with
the keys of a sequence divided between programs, whose results are merged by their log-sum-exps (Flash-Decoding). A program
serves some query rows of a key head, that is its query heads times the tokens of a block, and walks its share of the
pages, which are fetched as the table names them, some ahead; products run on tensor cores in bfloat16 or float16. It is
written in `paged_program_gpu`, that for latents, pages without values, in `latent_program_gpu`.

Beside the pages, each part's output is written, and read again by the merge: 4 * splits * rows * (head_dim + 1) bytes.
Interpreted; decoding was measured on an H100 (docs/kernels_hopper.md).
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from fdel.kernels import latent_program_gpu as latents
from fdel.kernels import paged_program_gpu as program
from fdel.kernels.device import no_hopper, unknown
from fdel.ops.batch import Paged, Pages
from fdel.ops.mask import NEG, Mask, PerHead

SPLITS = (1, 2, 4, 8, 16)  # into how many parts keys may be divided
PAGES = (64,)  # tokens of a page
MEASURED = (64, 128, 576)  # channels of heads, and of latents


class Call(NamedTuple):
    """What is static: the mask's scale and softcap, and the parts of the keys.

    `interpreted`: sums are added to what a product gives, and latents' probabilities go through shared memory, since the
    interpreter knows no other way.
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
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it attends in bfloat16 and float16; found {q.dtype}"
    if state.k_scale is None and not q.dtype == state.k.dtype == v.dtype:
        return f"it attends in the dtype of the pages; found {q.dtype}, {state.k.dtype}, {v.dtype}"
    if state.k_scale is not None and (why := _eight(state, q)):
        return why
    equal, channels = q.shape[-1] == state.k.shape[-1] == v.shape[-1], program.CHANNELS
    if state.v is not None and (not equal or q.shape[-1] not in channels or v_dim not in (None, v.shape[-1])):
        return f"heads of {q.shape[-1]}, {state.k.shape[-1]}, {v.shape[-1]} channels; expected equal, of {channels}"
    if state.v is None and (why := latents.unsupported(state.k.shape, v_dim or q.shape[-1])):
        return why
    if state.k.shape[3] not in PAGES:
        return f"pages of {state.k.shape[3]} tokens; expected one of {PAGES}"
    if state.v is None and alibi is not None:
        return "alibi slopes over latents"
    return "tokens that see later ones (Paged.ahead)" if batch.ahead is not None else None


def unproven(batch: Paged, _: Pages, __: Any, q: Array, *, alibi: PerHead = None, **___: Any) -> str | None:
    """Say why the kernel is taken only where it is named, or None: decoding was measured on an H100."""
    if why := unknown():
        return why
    if batch.block > 1 or alibi is not None or q.dtype != jnp.bfloat16 or q.shape[-1] not in MEASURED:
        heads = " or ".join(map(str, MEASURED))
        return f"it has been measured with a token of each sequence, in bfloat16, of heads of {heads}, without slopes"
    return None


def _eight(state: Pages, q: Array) -> str | None:
    """Say why pages in 8 bits cannot be served, or None."""
    if state.v is None or state.v_scale is None or state.k_scale is None:
        return "latents in 8 bits; expected the dtype of the queries"
    if q.dtype != jnp.bfloat16:
        return f"pages in 8 bits become bfloat16; found queries in {q.dtype}"
    if state.k.dtype != state.v.dtype or state.k.dtype not in (jnp.int8, jnp.uint8):
        return f"pages with scales in {state.k.dtype} and {state.v.dtype}; expected int8, or the bits of fp8 in uint8"
    counts = state.k_scale.shape[3], state.v_scale.shape[3]
    return None if counts == (1, 1) else f"{counts[0]} and {counts[1]} scales of a token's head; expected 1"


def call(
    batch: Paged, state: Pages, layer: Any, q: Float[Array, "T N H"], *,
    mask: Mask, sinks: PerHead = None, alibi: PerHead = None, v_dim: int | None = None,
) -> Float[Array, "T N Hv"]:  # fmt: skip
    """Attend over cached pages; see `unsupported` for what it can serve, `paged_attention` for the meaning."""
    (_, _, kv_heads, size, width), blocks = state.k.shape, len(batch.page_table)
    rows = batch.block * (q.shape[1] // kv_heads)
    if state.v is None:
        tile, fill = latents.ROWS, latents.PROGRAMS
    else:
        about = width, 8 * state.k.dtype.itemsize
        tile, fill = program.tile(rows, *about), program.together(rows, size, *about)
    parts = splits(blocks * kv_heads * -(-rows // tile), batch.page_table.shape[1], fill)
    return attend(batch, state, layer, q, mask, sinks, Call(mask.scale, mask.softcap, parts), v_dim, alibi)


def splits(programs: int, pages: int, fill: int) -> int:
    """Choose parts of so many pages for programs of which `fill` run at once: those with the shortest rounds.

    To begin, write and merge a part is taken to cost what two of 128 pages do.
    """
    return min((n for n in SPLITS if n <= max(1, pages)), key=lambda n: -(-n * programs // fill) / n * (1 + n / 64))


def attend(
    batch: Paged, state: Pages, layer: Any, q: Float[Array, "T N H"], mask: Mask, sinks: PerHead, how: Call,
    v_dim: int | None = None, alibi: PerHead = None,
) -> Float[Array, "T N Hv"]:  # fmt: skip
    """Lay out queries as rows of their key head, run a program on the parts of the keys, and merge what they give."""
    _, pages, kv_heads, size, width = state.k.shape
    blocks, block = len(batch.page_table), batch.block
    lay = lambda x: x.reshape(blocks, block, kv_heads, -1, width).swapaxes(1, 2).reshape(blocks, kv_heads, -1, width)
    rows = block * (q.shape[1] // kv_heads)
    tile = latents.ROWS if state.v is None else program.tile(rows, width, 8 * state.k.dtype.itemsize)
    fill = -rows % (8 if state.v is None and rows < tile else tile)  # 8: rows of a tile in shared memory
    queries = jnp.pad(lay(q), ((0, 0), (0, 0), (0, fill), (0, 0)))
    bounds, span = _reach(batch, mask, rows // block, size, tile)
    table = (jnp.clip(batch.page_table, 0, pages - 1) + layer * pages).astype(jnp.int32)
    flat = lambda x: x.reshape(-1, size, width)
    if state.v is None:
        out, lse = latents.run(how, v_dim or width, queries, flat(state.k), table, bounds, span)
    else:
        given = {"q": queries, "k": flat(state.k), "v": flat(state.v), "table": table, "bounds": bounds, "span": span}
        if state.k_scale is not None and state.v_scale is not None:
            given |= {"k_scale": state.k_scale.reshape(-1, size), "v_scale": state.v_scale.reshape(-1, size)}
        if alibi is not None:
            slopes = jnp.tile(alibi.astype(jnp.float32).reshape(kv_heads, -1), (1, block))
            given["slopes"] = jnp.pad(slopes, ((0, 0), (0, fill)))
        out, lse = program.run(how, given)
    out, lse = _merge(out[..., :rows, :], lse[..., :rows], sinks, block)
    out = out.reshape(blocks, kv_heads, block, -1, out.shape[-1]).swapaxes(1, 2)
    return out.reshape(*q.shape[:2], -1).astype(q.dtype)


def _reach(batch: Paged, mask: Mask, group: int, size: int, tile: int) -> tuple[Array, Array]:
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
    return jnp.pad(rows, ((0, 0), (0, 0), (0, -rows.shape[2] % tile)), constant_values=-1), span


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
