"""Attention over what a batch may see: segments of the same call (`Packed`) or a paged cache (`Paged`)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from fdel.ops import dispatch, quantized_pages, ring, short
from fdel.ops.batch import Batch, Packed, Paged, Pages
from fdel.ops.dense import dense_attention, dense_weights
from fdel.ops.flash import begin, flash_attention, no_gradient, online, scores
from fdel.ops.mask import Mask, Segments
from fdel.ops.watch import watch_attention

GROUP, CPU_GROUP = 512, 64  # keys per step of the paged loop; on CPU what is gathered must stay in the nearest cache


def _grouped(q: Array, k: Array, *, sinks: Any, alibi: Any, bias: Any) -> tuple[Array, Array, dict[str, Any]]:
    """Lay arguments of `attend` out as `dense_attention` wants them."""
    b, t, n, _ = q.shape
    group = lambda x: None if x is None else x.reshape(k.shape[2], -1)
    if bias is not None:
        bias = jnp.broadcast_to(bias, (b, n, t, t)).reshape(b, k.shape[2], -1, t, t)
    q = q.reshape(b, t, k.shape[2], -1, q.shape[3]).transpose(0, 2, 3, 1, 4)
    return q, k.swapaxes(1, 2), {"sinks": group(sinks), "alibi": group(alibi), "bias": bias}


def _dense(q: Array, k: Array, v: Array, segments: Segments, *, mask: Mask, **kwargs: Any) -> Array:
    qg, kg, given = _grouped(q, k, **kwargs)
    out = dense_attention(qg, kg, v.swapaxes(1, 2), segments, mask=mask, **given)
    return checkpoint_name(out.transpose(0, 3, 1, 2, 4).reshape(*q.shape[:3], -1), "attn_output")


def _softmax(mask: Mask, q: Array, k: Array, segments: Segments, given: dict[str, Any]) -> Array:
    qg, kg, given = _grouped(q, k, **given)
    p = dense_weights(qg, kg, segments, mask=mask, **given)
    return p.reshape(q.shape[0], q.shape[2], *p.shape[3:])


# Its backward pass begins with q and k: a scan, or a policy that saves dots, would keep [N T S] of layers nobody watches.
_weights = jax.custom_vjp(_softmax, nondiff_argnums=(0,))


def _weights_bwd(mask: Mask, saved: tuple, cotangent: Array) -> tuple:
    q, k, segments, given = saved
    dq, dk, dgiven = jax.vjp(lambda q, k, given: _softmax(mask, q, k, segments, given), q, k, given)[1](cotangent)
    return dq, dk, no_gradient(segments), dgiven


_weights.defvjp(lambda mask, *args: (_softmax(mask, *args), args), _weights_bwd)


def _flash(q: Array, k: Array, v: Array, segments: Segments, *, mask: Mask, sinks: Any, alibi: Any, bias: Any) -> Array:
    return flash_attention(q, k, v, segments, mask=mask, sinks=sinks, alibi=alibi)[0]


def _divided(attention: Callable) -> Callable:
    return lambda q, k, v, segments, *, bias, **kwargs: attention(q, k, v, segments, **kwargs)


PACKED = {
    "ring": dispatch.Implementation(_divided(ring.ring_attention), ring.unsupported),
    "gathered": dispatch.Implementation(_divided(ring.gathered_attention), ring.unsupported),
    "short": dispatch.Implementation(_divided(short.short_attention), short.unsupported),
    "flash": dispatch.Implementation(
        _flash, lambda *a, bias, **k: None if bias is None else "an additive bias needs all scores in memory"
    ),
    "dense": dispatch.Implementation(_dense, lambda *a, **k: None),
}


def attend(
    batch: Batch,
    state: Any,
    layer: Any,
    q: Float[Array, "... T N H"],
    k: Float[Array, "... T K H"],
    v: Float[Array, "... T K Hv"],
    *,
    mask: Mask,
    sinks: Float[Array, " N"] | None = None,
    alibi: Float[Array, " N"] | None = None,
    bias: Float[Array, "... N T S"] | None = None,
    impl: str | None = None,
) -> tuple[Float[Array, "... T N Hv"], Any]:
    """Attend and remember: softmax(softcap(scale q k^T) + bias) v over the keys that `batch` and `mask` let q see.

    Packed: q, k, v are [B T heads H] and tokens see their own segment. Paged: [T heads H], keys and values are written to
    the pages of layer `layer` first. Head n of N uses key head n // (N / K). Scores and sums are float32. `sinks` adds one
    score per head to the denominator; `alibi` holds slopes (arXiv:2108.12409); `bias` (Packed only) is added to scores.
    With a Packed batch, state may ask for the softmax itself (`ops.attention_weights`).
    Returns the output in q's dtype and the new state. What a batch cannot honour is a ValueError: with Paged causal=False,
    bias and impl, and state that is not for this kind of batch.
    """
    if isinstance(batch, Packed):
        if isinstance(state, Pages):
            raise ValueError("a Packed batch leaves no keys and values in Pages; use a Paged batch, or state None")
        kwargs: dict[str, Any] = {"sinks": sinks, "alibi": alibi, "bias": bias}
        q, k, v = (checkpoint_name(x, f"attn_{n}") for x, n in ((q, "query"), (k, "key"), (v, "value")))
        name = dispatch.choose(PACKED, impl, q, k, v, batch.segments, mask=mask, **kwargs)
        state = watch_attention(state, layer, lambda: _weights(mask, q, k, batch.segments, kwargs))
        return PACKED[name].call(q, k, v, batch.segments, mask=mask, **kwargs), state
    if bias is not None:
        raise ValueError("an additive bias is not supported with a Paged batch; express it as alibi slopes")
    if impl is not None:
        raise ValueError(f"impl={impl!r} names a way to attend in a Packed batch; with a Paged batch leave it out")
    if not mask.causal:
        raise ValueError(
            "Mask.causal=False with a Paged batch: tokens to come are not in its pages; use a Packed batch"
        )
    if not isinstance(state, Pages):
        found = "none" if state is None else f"{type(state).__name__} (weights are watched in Packed calls)"
        raise ValueError(f"a Paged batch needs state, Pages of params.init(family.state_spec(cfg, ...)); found {found}")
    state = write_pages(batch, state, layer, k, v)
    return paged_attention(batch, state, layer, q, mask=mask, sinks=sinks, alibi=alibi, v_dim=v.shape[-1]), state


def explain(q: Array, k: Array, v: Array, segments: Segments, **kwargs: Any) -> str:
    """Describe which implementation `attend` takes for a Packed call with these arguments, and why."""
    defaults = {"sinks": None, "alibi": None, "bias": None}
    return dispatch.describe(PACKED, q, k, v, segments, **(defaults | kwargs))


def write_pages(batch: Paged, state: Pages, layer: Any, k: Array, v: Array | None) -> Pages:
    """Store the keys and values of new tokens; padding (position -1) and pages out of range are dropped."""
    size = state.k.shape[3]
    table = jnp.repeat(batch.page_table, batch.block, axis=0, total_repeat_length=batch.positions.shape[0])
    page = jnp.take_along_axis(table, jnp.maximum(batch.positions, 0)[:, None] // size, 1, mode="clip")[:, 0]
    page = jnp.where(batch.positions < 0, state.k.shape[1], page)
    offset = batch.positions % size

    def put(pages: Array, scales: Array | None, x: Array) -> tuple[Array, Array | None]:
        if scales is None:
            return pages.at[layer, page, :, offset].set(x.astype(pages.dtype), mode="drop"), None
        values, scale = quantized_pages.encode(x, pages.dtype, scales.shape[3])
        put = pages.at[layer, page, :, offset].set(values, mode="drop")
        return put, scales.at[layer, page, :, :, offset].set(scale, mode="drop")

    keys, k_scale = put(state.k, state.k_scale, k)
    if state.v is None or v is None:
        return Pages(keys, state.v, k_scale, state.v_scale)
    values, v_scale = put(state.v, state.v_scale, v)
    return Pages(keys, values, k_scale, v_scale)


def _load(pages: Array, scales: Array | None, layer: Any, ids: Array, dtype: Any) -> Array:
    """Read the pages `ids` [b p] of a layer as [b K p*page H]; those in 8 bits become numbers of `dtype`."""
    x = pages.at[layer, ids].get(mode="clip").swapaxes(1, 2)
    if scales is not None:
        scale = scales.at[layer, ids].get(mode="clip").transpose(0, 2, 1, 4, 3)
        x = quantized_pages.decode(x, scale, dtype)
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _oldest(qi: Array, window: int) -> Array:
    """Give the oldest position that a window reaches from blocks of query positions; blocks of padding see none."""
    starts = jnp.where(qi.max(-1, keepdims=True) < 0, jnp.iinfo(jnp.int32).max, qi[..., :1])
    return jnp.maximum(starts.min() - window + 1, 0)


def paged_attention(
    batch: Paged,
    state: Pages,
    layer: Any,
    q: Float[Array, "T N H"],
    *,
    mask: Mask,
    sinks: Float[Array, " N"] | None = None,
    alibi: Float[Array, " N"] | None = None,
    v_dim: int | None = None,
) -> Float[Array, "T N Hv"]:
    """Attend over cached pages with an online softmax over groups of pages; formula as in `attend`.

    The loop runs from the first group that any query's window reaches to the longest context in the batch. On CPU each
    block has a loop of its own, which ends at its last token: what it gathers stays in the nearest cache. Without `v`
    pages, values are the first `v_dim` channels of the keys. What unused page tails hold (even NaN) has no effect.
    """
    _, total_pages, kv_heads, size, _ = state.k.shape
    blocks, width = batch.page_table.shape
    on_cpu = jax.default_backend() == "cpu"
    per_step = min(max(1, (CPU_GROUP if on_cpu else GROUP) // size), width)
    keys, steps = per_step * size, -(-width // per_step)
    table = jnp.pad(batch.page_table, ((0, 0), (0, steps * per_step - width)), constant_values=total_pages)
    qi = batch.positions.reshape(blocks, 1, 1, batch.block)
    group = lambda x: None if x is None else x.reshape(kv_heads, -1)
    q = q.reshape(blocks, batch.block, kv_heads, -1, q.shape[-1]).transpose(0, 2, 3, 1, 4)  # [b K G q H]
    v_dim = state.k.shape[-1] if v_dim is None else v_dim

    def some(q: Array, qi: Array, table: Array) -> Array:
        """Attend from some of the blocks."""
        last = qi.max(-1)[..., None]

        def step(j: Any, carry: tuple) -> tuple:
            ids = jax.lax.dynamic_slice_in_dim(table, j * per_step, per_step, 1)
            ki = j * keys + jnp.arange(keys)
            k = _load(state.k, state.k_scale, layer, ids, q.dtype)
            v = k[..., :v_dim] if state.v is None else _load(state.v, state.v_scale, layer, ids, q.dtype)
            v = jnp.where((ki <= last)[..., 0, :, None], v, 0)  # stale NaN times 0 would be NaN
            seen = ki <= qi[..., None]
            if mask.window is not None:
                seen &= ki > qi[..., None] - mask.window
            return online(carry, scores(mask, q, k.astype(q.dtype), group(alibi), qi, ki), seen, v)

        carry = begin(q.shape[:4], v_dim, group(sinks))
        if steps == 1:
            _, total, out = step(0, carry)
        else:
            first = 0 if mask.window is None else _oldest(qi, mask.window) // keys
            _, total, out = jax.lax.fori_loop(first, jnp.max(last) // keys + 1, step, carry)
        return (out / jnp.where(total == 0, 1, total)).astype(q.dtype)

    if steps > 1 and on_cpu:
        out = jax.lax.map(lambda x: some(*x)[0], jax.tree.map(lambda x: x[:, None], (q, qi, table)))
    else:
        out = some(q, qi, table)
    return out.transpose(0, 3, 1, 2, 4).reshape(blocks * batch.block, -1, v_dim)
