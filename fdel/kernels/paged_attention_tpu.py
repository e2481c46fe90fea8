"""Attention over pages on TPUs: a Pallas Mosaic TPU kernel for decoding and for chunks of prompts in one call.

The program is `paged_program_tpu`; here queries are laid out for it. A *run* is the tokens of up to `TOKENS // block`
blocks that follow each other in one sequence. The query heads of a key head are rows of one tile; if those of a block
fill more than `TILE`, as 128 heads of latent attention do in a prompt, they are cut in parts, each with its own walk.
Latent attention (pages without values, which are the first channels of the keys) reads each page once for both products.
Pages in 8 bits, int8 or e4m3, are copied as they are and become numbers of the queries' dtype in fast memory.
Interpreted on CPU and compiled for v5p and v6e; it has not run on a TPU yet.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fdel.kernels import paged_program_tpu as program
from fdel.kernels.device import no_tpu
from fdel.ops import quantized_pages
from fdel.ops.batch import Paged, Pages
from fdel.ops.mask import NEG, Mask, PerHead
from fdel.ops.paged import LANES, filled

TOKENS = 128  # of a tile of queries
TILE = 24 * 2**20  # bytes of queries, outputs and sums of a tile
SMEM = 768 * 2**10  # bytes of a page table, and of runs, in the memory of scalars, 1 MiB


def unsupported(
    batch: Paged, state: Pages, layer: Any, q: Array, *,
    mask: Mask, sinks: PerHead = None, alibi: PerHead = None, v_dim: int | None = None,
) -> str | None:  # fmt: skip
    """Say why the kernel cannot serve this call, or None."""
    if why := no_tpu():
        return why
    v = state.k if state.v is None else state.v
    kept = state.k.dtype if state.k_scale is not None and state.k.dtype in (jnp.int8, jnp.uint8) else q.dtype
    if not kept == state.k.dtype == v.dtype or q.dtype not in (jnp.bfloat16, jnp.float32):
        return f"it attends in bfloat16 and float32; found {q.dtype}, {state.k.dtype}, {v.dtype}"
    width, least = state.k.shape[-1], 32 // kept.itemsize
    if v.shape != state.k.shape or width % LANES or (state.v is not None and v_dim not in (None, q.shape[-1])):
        return f"rows of {width} and {v.shape[-1]} numbers; expected equal multiples of {LANES}"
    if (values := _values(state, q, v_dim)) % LANES:
        return f"values in the first {values} of {width} channels; expected a multiple of {LANES}"
    if state.k.shape[3] % least:
        return f"pages of {state.k.shape[3]} tokens; expected a multiple of {least}"
    if why := _scales(state):
        return why
    fits = _parts(batch, state, q, v_dim)
    if fits is None:
        need = batch.block * _token_bytes(state, q, v_dim) // (q.shape[1] // state.k.shape[2])
        return f"blocks of {batch.block} tokens take {need} bytes of queries and sums a head; expected at most {TILE}"
    if (need := fits * _table_bytes(batch)) > SMEM:
        return f"a page table of {need} bytes; expected at most {SMEM}"
    if batch.ahead is not None:
        return "tokens that see later ones (Paged.ahead)"
    return None if alibi is None else "alibi slopes, which it does not have"


def call(
    batch: Paged, state: Pages, layer: Any, q: Float[Array, "T N H"], *,
    mask: Mask, sinks: PerHead = None, alibi: None = None, v_dim: int | None = None,
) -> Float[Array, "T N H"]:  # fmt: skip
    """Attend over cached pages; see `unsupported` for what it can serve, `paged_attention` for the meaning."""
    _, _, heads, size, width = state.k.shape
    blocks, block = len(batch.page_table), batch.block
    parts, values = _parts(batch, state, q, v_dim) or 1, _values(state, q, v_dim)
    most = 1 if block == 1 else max(1, min(TOKENS, TILE * parts // _token_bytes(state, q, v_dim)) // block)
    many = next(n for n in range(most, 0, -1) if blocks % n == 0)
    tiles, tokens = blocks // many, many * block
    q = q.reshape(tiles, tokens, heads, parts, -1, q.shape[-1]).transpose(3, 0, 2, 4, 1, 5)
    q = filled(q.reshape(parts * tiles, *q.shape[2:]), width)  # [parts*tiles K G tokens H]
    rows = q.shape[2] * tokens
    fill = -rows % 8
    lay = lambda x: jnp.pad(x.reshape(*x.shape[:-3], rows, x.shape[-1]), [(0, 0)] * (x.ndim - 3) + [(0, fill), (0, 0)])
    start = jnp.full((parts, heads, rows + fill, LANES), NEG, jnp.float32)
    if sinks is not None:
        logits = (sinks.astype(jnp.float32) * program.LOG2E).reshape(heads, parts, -1, 1, 1).swapaxes(0, 1)
        start = lay(jnp.broadcast_to(logits, (parts, *q.shape[1:4], LANES)))
    spans, table = (jnp.tile(x, (parts, 1)) for x in (_spans(batch, mask, many, size), batch.page_table))
    out = program.attend(program.Tile(mask, many, tokens, values), spans, table, layer, lay(q), start, state)
    out = out[:, :, :rows].reshape(*q.shape[:-1], values)
    out = out.reshape(parts, tiles, *out.shape[1:]).transpose(1, 4, 2, 0, 3, 5)
    return out.reshape(blocks * block, -1, out.shape[-1])


def _scales(state: Pages) -> str | None:
    """Say why the scales of pages in 8 bits cannot be read, or None."""
    if state.k_scale is None:
        return None
    n, size = quantized_pages.scales(state.k.shape[-1]), state.k.shape[3]
    if n > 1 and (state.v is not None or state.k.shape[2] > 1):
        return f"{n} scales a token for {state.k.shape[2]} heads; expected one, or latents"
    if LANES % size and size % LANES:
        return f"pages of {size} tokens in 8 bits; expected a multiple of {LANES}, or what divides it"
    if (found := state.k_scale.shape[3:]) != (rows := quantized_pages.scale_rows(n, size)):
        return f"scales in {found[0]} rows of {found[1]}; expected {rows[0]} of {rows[1]}, as TPUs have them"
    return None


def _values(state: Pages, q: Array, v_dim: int | None) -> int:
    """Give the numbers of a row of values, which of latents are the first of the keys'."""
    return state.v.shape[-1] if state.v is not None else v_dim or q.shape[-1]


def _table_bytes(batch: Paged) -> int:
    """Give the bytes of the page table and of the blocks' runs, which the memory of scalars holds one after the other."""
    blocks, width = batch.page_table.shape
    return 4 * blocks * (width + program.RUN)


def _token_bytes(state: Pages, q: Array, v_dim: int | None) -> int:
    """Give the bytes of a token in a tile: queries and outputs twice, starts twice, three sums, all in rows of lanes."""
    width, values = state.k.shape[-1], _values(state, q, v_dim)
    return q.shape[1] * (2 * (width + values) * q.dtype.itemsize + 4 * values + 4 * 4 * LANES)


def _parts(batch: Paged, state: Pages, q: Array, v_dim: int | None) -> int | None:
    """Give the parts in which a block's query heads are cut, so that a part fits a tile; None if no cut does."""
    group, need = q.shape[1] // state.k.shape[2], batch.block * _token_bytes(state, q, v_dim)
    return next((n for n in range(1, group + 1) if group % n == 0 and need <= n * TILE), None)


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
