"""Attention over a paged cache of keys and values, and writing to it.

Where a program runs decides how pages are named, never what comes out. On CPU a few pages at a time are read, which stay in
the nearest cache. Accelerators name each head's page and each head's row: a scatter of all heads of a token at once wants a
layout that no gather has, and XLA:TPU then copies the whole cache for each layer; a gather of whole pages is transposed
afterwards. Rows of a TPU hold 128 numbers, so shorter heads lie side by side there (`heads_per_row`), and what fills no row
ends with zeros (`row_width`): latents, heads of 80 or 96 channels, one head of 64.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from fdel.ops import platform, quantized_pages
from fdel.ops.batch import Paged, Pages
from fdel.ops.cpu import each_row
from fdel.ops.dispatch import Implementation, kernel, operation
from fdel.ops.mask import Mask, PerHead, begin, finish, online, scores
from fdel.ops.platform import context
from fdel.ops.shard import AXES, whole_rows
from fdel.ops.weights import device_rows

LANES = 128  # numbers in a row of a TPU's registers
GROUP = {"cpu": 64, "gpu": 512, "tpu": 512}  # keys per step of the loop
FEW, TOGETHER = 512, 32  # where no sequence has more keys than that, a CPU takes so many that decode at a time

_CACHE, _PER_HEAD = "layers pages kv_heads", {"sinks": "heads", "alibi": "heads"}
_RAGGED = Implementation(
    lambda *_, **__: None,
    lambda *_, **__: (
        "jax's ragged_paged_attention wants one array [pages page 2*K H] of keys and values in turn; these are "
        "[layers pages K page H], apart: each step would copy the layer's cache"
    ),
)
OF_ROWS = "vanilla flash_attn2 blockwise blocksparse ring scan_ring_attention sdpa cudnn cuda_flash_attn2".split()
AUTO = "without a name the first that can is taken"
ALSO = {  # EasyDeL's names
    **dict.fromkeys(("page_attention", "decode", "regressive_decode", "autoregressive_decodeattn"), "xla"),
    **dict.fromkeys(("ragged_page_attention_v2", "ragged_page_attention_v3"), "mosaic"), "unified_attention": "hopper",
}  # fmt: skip


def heads_per_row(kv_heads: int, head_dim: int) -> int:
    """Say how many heads lie side by side in a row of the cache: on TPUs as many as it holds, elsewhere one."""
    most = LANES // head_dim if platform.target() == "tpu" else 1
    return next((n for n in range(most, 0, -1) if kv_heads % n == 0), 1)


def _layout(kv_heads: int, state: Pages, size: int) -> tuple[int, int]:
    """Read from a cache's shape how many heads of `size` channels lie side by side, and a device's `device_rows`."""
    _, _, rows, _, width = state.k.shape
    devices = math.prod(context(*AXES["attending"]).values())
    for side in range(min(kv_heads, max(1, width // size)), 0, -1):
        if kv_heads % side == 0 and kv_heads // side == rows:
            return side, 0
        if kv_heads % side == 0 and (own := device_rows(kv_heads // side, devices)) and own * devices == rows:
            return side, own
    found = f"a cache of {rows} rows of {width} numbers, for {kv_heads} heads of {size} on tp={devices}"
    raise ValueError(f"{found}; make it of params.spread(family.state_spec(cfg, ...), mesh), and set that mesh")


def _first(rows: int, own: int, devices: int) -> Int[Array, " devices"]:
    """Give the first row of a cache that each device has."""
    return jnp.minimum(jnp.arange(devices) * rows // devices, rows - own)


def row_width(channels: int) -> int:
    """Say how many numbers a row of so many has in the cache: on TPUs whole registers, as memory has them anyway.

    Else XLA:TPU makes the pages the innermost axis, which need no filling, and each step copies the cache and back.
    """
    return -(-channels // LANES) * LANES if platform.target() == "tpu" else channels


def filled(x: Array, channels: int) -> Array:
    """Append zeros to the last axis, up to `channels`."""
    more = channels - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, more)]) if more else x


def write_pages(batch: Paged, state: Pages, layer: Any, k: Array, v: Array | None) -> Pages:
    """Store the keys and values of new tokens; padding (position -1) and pages out of range are dropped."""
    side, own = _layout(k.shape[1], state, k.shape[2])
    if side > 1:  # heads join in rows; the compiler would divide a row's channels, and then gather all pages
        k, v = jax.tree.map(lambda x: whole_rows(x.reshape(len(x), -1, x.shape[2] * side)), (k, v))
    if own:  # each device writes the rows that its query heads need
        total, devices = k.shape[1], state.k.shape[2] // own
        each = (_first(total, own, devices)[:, None] + jnp.arange(own)).reshape(-1)
        k, v = jax.tree.map(lambda x: whole_rows(x[:, each]), (k, v))
    return _write_pages(batch, state, layer, k, v)


@operation("", _CACHE, "", "tokens kv_heads", "tokens kv_heads", out=_CACHE, mosaic=kernel("write_pages_tpu"))
def _write_pages(batch: Paged, state: Pages, layer: Any, k: Array, v: Array | None) -> Pages:
    _, total_pages, heads, size, _ = state.k.shape
    table = jnp.repeat(batch.page_table, batch.block, axis=0, total_repeat_length=batch.positions.shape[0])
    page = jnp.take_along_axis(table, jnp.maximum(batch.positions, 0)[:, None] // size, 1, mode="clip")[:, 0]
    page = jnp.where((batch.positions < 0) | (page < 0), total_pages, page)  # jax counts negative ones from the end
    offset = batch.positions % size
    where: tuple = (layer, page[:, None], jnp.arange(heads), offset[:, None])
    if platform.target() == "cpu":
        where = (layer, page, slice(None), offset)

    def put(pages: Array, scales: Array | None, x: Array) -> tuple[Array, Array | None]:
        x = filled(x.reshape(len(x), heads, -1), pages.shape[-1])
        if scales is None:
            return pages.at[where].set(x.astype(pages.dtype), mode="drop"), None
        n = quantized_pages.scales(pages.shape[-1])
        values, scale = quantized_pages.encode(x, pages.dtype, n)
        put = pages.at[where].set(values, mode="drop")
        if n == 1 or scales.shape[4] == size:
            return put, scales.at[layer, page, :, :, offset].set(scale, mode="drop")
        row, first = quantized_pages.scale_places(n, size, scales.shape[3])
        each = lambda x: x[:, None, None]
        at = layer, each(page), jnp.arange(heads)[:, None], row, first + each(offset)
        return put, scales.at[at].set(scale, mode="drop")

    keys, k_scale = put(state.k, state.k_scale, k)
    if state.v is None or v is None:
        return Pages(keys, state.v, k_scale, state.v_scale)
    values, v_scale = put(state.v, state.v_scale, v)
    return Pages(keys, values, k_scale, v_scale)


def _load(pages: Array, scales: Array | None, layer: Any, ids: Array, dtype: Any) -> Array:
    """Read the pages `ids` [b p] of a layer as [b rows p*page channels]; those in 8 bits become numbers of `dtype`."""
    if platform.target() == "cpu":
        x = pages.at[layer, ids].get(mode="clip").swapaxes(1, 2)
    else:
        x = pages.at[layer, ids[:, None], jnp.arange(pages.shape[2])[:, None]].get(mode="clip")
    if scales is not None:
        scale = scales.at[layer, ids].get(mode="clip").swapaxes(1, 2)
        scale = quantized_pages.page_scales(scale, quantized_pages.scales(x.shape[-1]), x.shape[-2])
        x = quantized_pages.decode(x, scale, dtype)
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _oldest(qi: Array, window: int) -> Array:
    """Give the oldest position that a window reaches from blocks of query positions; blocks of padding see none."""
    starts = jnp.where(qi.max(-1, keepdims=True) < 0, jnp.iinfo(jnp.int32).max, qi[..., :1])
    return jnp.maximum(starts.min() - window + 1, 0)


def paged_attention(
    batch: Paged, state: Pages, layer: Any, q: Float[Array, "T N H"], *,
    mask: Mask, sinks: PerHead = None, alibi: PerHead = None, v_dim: int | None = None, kv_heads: int | None = None,
) -> Float[Array, "T N Hv"]:  # fmt: skip
    """Attend over cached pages; formula as in `attend`.

    Without `v` pages, values are the first `v_dim` channels of the keys. What unused page tails hold (even NaN) has no
    effect. Where a row of the cache holds several heads, a query has zeros beside its own head's channels: nothing is cut
    along heads, which devices may divide. Without `kv_heads` a row holds as many heads as fit.
    """
    rows, width, size = state.k.shape[2], state.k.shape[-1], q.shape[-1]
    side, own = _layout(kv_heads, state, size) if kv_heads and state.v is not None else (width // size, 0)
    if own and kv_heads:
        return _own_rows(batch, state, layer, q, kv_heads // side, own, side, mask, sinks, alibi, v_dim)
    attend = partial(_paged_attention, batch, state, layer, mask=mask, sinks=sinks, alibi=alibi)
    if state.v is None:
        return attend(q, v_dim=v_dim)
    values = side * (v_dim or min(size, state.v.shape[-1] // side))  # numbers of a row that are no filling
    place = (jnp.arange(q.shape[1]) * rows * side // q.shape[1] % side)[:, None]  # the head's place in its row
    if side > 1:
        q = jnp.where(place == jnp.arange(side * size) // size, jnp.tile(q, side), 0)
    first, *more = jnp.split(attend(filled(q, width), v_dim=state.v.shape[-1])[..., :values], side, -1)
    for i, out in enumerate(more):
        first = jnp.where(place == i + 1, out, first)
    return first


def _own_rows(
    batch: Paged, state: Pages, layer: Any, q: Float[Array, "T N H"], rows: int, own: int, side: int,
    mask: Mask, sinks: PerHead, alibi: PerHead, v_dim: int | None,
) -> Float[Array, "T N Hv"]:  # fmt: skip
    """Attend on each device with its query heads, to its `own` rows of the model's `rows`: see `device_rows`.

    A row's query heads may be of two devices. Each computes all of them, and those of another device are zeros there.
    """
    axes, heads = tuple(context(*AXES["attending"])), q.shape[1]
    group, devices = heads // rows, state.k.shape[2] // own

    def local(batch: Paged, state: Pages, layer: Any, q: Array, sinks: PerHead, alibi: PerHead) -> Array:
        device = jax.lax.axis_index(axes)
        place = device * (heads // devices) - _first(rows, own, devices)[device] * group

        def among(x: Array | None, axis: int) -> Array | None:
            if x is None:
                return None
            blank = jnp.zeros((*x.shape[:axis], own * group, *x.shape[axis + 1 :]), x.dtype)
            return jax.lax.dynamic_update_slice_in_dim(blank, x, place, axis)

        per_head = {"sinks": among(sinks, 0), "alibi": among(alibi, 0)}
        about: dict[str, Any] = {"v_dim": v_dim, "kv_heads": own * side, **per_head}
        out = paged_attention(batch, state, layer, among(q, 1), mask=mask, **about)  # type: ignore[arg-type]
        return jax.lax.dynamic_slice_in_dim(out, place, heads // devices, 1)

    cache, of_heads = P(None, None, axes), P(axes)
    specs = P(), cache, P(), P(None, axes), of_heads, of_heads
    # Nothing is summed between devices, so bfloat16 may cross on a CPU too: `shard.divided` would widen its cache.
    run = jax.shard_map(local, in_specs=specs, out_specs=P(None, axes), axis_names={*axes}, check_vma=False)
    return run(batch, state, jnp.asarray(layer), q, sinks, alibi)


def _axes(batch: Paged, state: Pages, *_: Any, **__: Any) -> tuple[tuple[str, ...], str]:
    """Divide heads, each with its keys; a key head that all share, as that of latent attention, is whole everywhere."""
    return ("", "" if state.k.shape[2] == 1 else _CACHE, "", "tokens heads"), "tokens heads"


@operation(
    _axes, named=_PER_HEAD,
    hopper=kernel("paged_attention_gpu", unproven=True), mosaic=kernel("paged_attention_tpu"), ragged=_RAGGED,
    also={**ALSO, **dict.fromkeys(OF_ROWS, "it attends within rows, as attend=dense, and reads no pages"), "auto": AUTO},
)  # fmt: skip
def _paged_attention(
    batch: Paged, state: Pages, layer: Any, q: Float[Array, "T N H"], *,
    mask: Mask, sinks: PerHead = None, alibi: PerHead = None, v_dim: int | None = None,
) -> Float[Array, "T N Hv"]:  # fmt: skip
    """Attend with an online softmax over groups of pages.

    The loop runs from the first group that any query's window reaches to the longest context in the batch. On CPU each
    block has a loop of its own, which ends at its last token: what it gathers stays in the nearest cache. One query is too
    little work there for a second core: where no sequence is long, those that decode share a loop.
    """
    _, total_pages, kv_heads, size, channels = state.k.shape
    blocks, width = batch.page_table.shape
    per_step = min(max(1, GROUP[platform.target()] // size), width)
    keys, steps = per_step * size, -(-width // per_step)
    table = jnp.pad(batch.page_table, ((0, 0), (0, steps * per_step - width)), constant_values=total_pages)
    qi = batch.positions.reshape(blocks, 1, 1, batch.block)
    ends = qi if batch.ahead is None else qi + batch.ahead.reshape(qi.shape)  # the last position that each sees
    group = lambda x: None if x is None else x.reshape(kv_heads, -1)
    q = q.reshape(blocks, batch.block, kv_heads, -1, q.shape[-1]).transpose(0, 2, 3, 1, 4)  # [b K G q H]
    values, q = q.shape[-1] if v_dim is None else v_dim, filled(q, channels)

    def some(q: Array, qi: Array, ends: Array, table: Array) -> Array:
        """Attend from some of the blocks."""
        last = ends.max(-1)[..., None]

        def step(j: Any, carry: tuple) -> tuple:
            ids = jax.lax.dynamic_slice_in_dim(table, j * per_step, per_step, 1)
            ki = j * keys + jnp.arange(keys)
            k = _load(state.k, state.k_scale, layer, ids, q.dtype)
            v = k[..., :values] if state.v is None else _load(state.v, state.v_scale, layer, ids, q.dtype)
            v = jnp.where((ki <= last)[..., 0, :, None], v, 0)  # stale NaN times 0 would be NaN
            seen = ki <= ends[..., None]
            if mask.window is not None:
                seen &= ki > qi[..., None] - mask.window
            if mask.chunk is not None:
                seen &= ki // mask.chunk == qi[..., None] // mask.chunk
            return online(carry, scores(mask, q, k.astype(q.dtype), group(alibi), qi, ki), seen, v)

        carry = begin(q.shape[:4], values, group(sinks))
        if steps == 1:
            carry = step(0, carry)
        else:
            first = 0 if mask.window is None else _oldest(qi, mask.window) // keys
            carry = jax.lax.fori_loop(first, jnp.max(last) // keys + 1, step, carry)
        return finish(carry)[0].astype(q.dtype)

    together = TOGETHER if batch.block == 1 and width * size <= FEW else 1
    out = each_row(some, q, qi, ends, table, loop=steps > 1, together=together)
    return out.transpose(0, 3, 1, 2, 4).reshape(blocks * batch.block, -1, out.shape[-1])
