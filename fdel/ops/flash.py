"""Softmax attention in key blocks with an online softmax (arXiv:2205.14135): forward and backward never hold [T, S].

Plain XLA, and the reference for every attention kernel. `dense_attention` states the formula and takes an additive bias.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

NEG = -1e30  # finite, so that rows without a visible key stay free of NaN


@dataclass(frozen=True)
class Mask:
    """What a query may see, as a specification: hashable, so it is static under jit.

    `window` is the number of visible keys including the query's own; `softcap` bounds the scores: c tanh(s / c).
    """

    scale: float
    causal: bool = True
    window: int | None = None
    softcap: float | None = None


def visible(m: Mask, qi: Array, ki: Array, qs: Array, ks: Array) -> Array:
    """Boolean mask [B q s] from indices [q], [s] and segment ids [B q], [B s]."""
    seen = qs[:, :, None] == ks[:, None, :]
    ahead = ki[None, :] - qi[:, None]
    if m.causal:
        seen &= ahead <= 0
    if m.window is not None:
        seen &= ahead > -m.window if m.causal else jnp.abs(ahead) < m.window
    return seen


def online(carry: tuple, s: Array, seen: Array, v: Array) -> tuple:
    """Add keys to running (largest score, sum of exponentials, weighted values), each [B K G q ...]."""
    top, total, out = carry
    s = jnp.where(seen, s, NEG)
    new = jnp.maximum(top, s.max(-1, keepdims=True))
    p = jnp.where(seen, jnp.exp(s - new), 0)
    decay = jnp.exp(top - new)
    pv = jnp.einsum("bkgqs,bksh->bkgqh", p.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return new, total * decay + p.sum(-1, keepdims=True), out * decay + pv


def begin(shape: tuple, v_dim: int, sinks: Array | None) -> tuple:
    """Start `online` for queries of shape (B, K, G, q): empty, or holding each head's sink [K G]."""
    rows = (*shape, 1)
    top = jnp.full(rows, NEG) if sinks is None else jnp.broadcast_to(sinks[..., None, None], rows).astype(jnp.float32)
    return top, jnp.full(rows, 0.0 if sinks is None else 1.0), jnp.zeros((*shape, v_dim), jnp.float32)


def scores(m: Mask, q: Array, k: Array, alibi: Array | None, qi: Array, ki: Array) -> Array:
    """Float32 scores [B K G q s] = softcap(scale q k) + alibi (key index - query index); qi is [q] or [B 1 1 q]."""
    s = jnp.einsum("bkgqh,bksh->bkgqs", q, k, preferred_element_type=jnp.float32) * m.scale
    if m.softcap is not None:
        s = m.softcap * jnp.tanh(s / m.softcap)
    if alibi is not None:
        s = s + alibi[:, :, None, None] * (ki - qi[..., None])
    return s


def dense_attention(
    q: Float[Array, "B K G T H"],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T Hv"],
    segments: Int[Array, "B T"],
    *,
    mask: Mask,
    sinks: Float[Array, "K G"] | None = None,
    alibi: Float[Array, "K G"] | None = None,
    bias: Float[Array, "B K G T S"] | None = None,
) -> Float[Array, "B K G T Hv"]:
    """Compute softmax(softcap(scale q k^T) + bias) v over visible keys, with all scores in memory.

    A sink is one more score per head in the denominator only (arXiv:2309.17453). A row that sees nothing gives 0.
    """
    index = jnp.arange(q.shape[3])
    s = scores(mask, q, k, alibi, index, index)
    if bias is not None:
        s = s + bias
    seen = visible(mask, index, index, segments, segments)[:, None, None]
    s = jnp.where(seen, s, NEG)
    top = jnp.max(s, -1, keepdims=True)
    sink = jnp.full(top.shape[1:3], NEG) if sinks is None else sinks.astype(jnp.float32)
    top = jax.lax.stop_gradient(jnp.maximum(top, sink[..., None, None]))
    p = jnp.where(seen, jnp.exp(s - top), 0)
    total = p.sum(-1, keepdims=True) + jnp.exp(sink[..., None, None] - top)
    p = p / jnp.where(total == 0, 1, total)
    return jnp.einsum("bkgqs,bksh->bkgqh", p.astype(v.dtype), v, preferred_element_type=jnp.float32).astype(q.dtype)


# ---- blocks --------------------------------------------------------------------------------------------------------


def _cut(x: Array, i: Any, size: int, axis: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, i * size, size, axis)


def _key_range(m: Mask, i: Any, block: int, n: int) -> tuple[Any, Any]:
    """Key blocks that query block i can see."""
    low = 0 if m.window is None else jnp.maximum(i * block - m.window + 1, 0) // block
    if m.causal:
        return low, i + 1
    return low, n if m.window is None else jnp.minimum((i * block + block + m.window - 2) // block + 1, n)


def _query_range(m: Mask, j: Any, block: int, n: int) -> tuple[Any, Any]:
    """Query blocks that can see key block j."""
    high = n if m.window is None else jnp.minimum((j * block + block + m.window - 2) // block + 1, n)
    if m.causal:
        return j, high
    return (0 if m.window is None else jnp.maximum(j * block - m.window + 1, 0) // block), high


def _loop(bounds: tuple[Any, Any], body: Any, carry: Any, n: int) -> Any:
    return body(0, carry) if n == 1 else jax.lax.fori_loop(bounds[0], bounds[1], body, carry)


def _join(x: Array) -> Array:
    """Concatenate stacked blocks [n, ..., block, H] along their axis."""
    return jnp.moveaxis(x, 0, -3).reshape(*x.shape[1:-2], -1, x.shape[-1])


def _forward(m: Mask, block: int, q: Array, k: Array, v: Array, segments: Array, sinks: Any, alibi: Any) -> tuple:
    n = q.shape[3] // block

    def rows(i: Any) -> tuple:
        qb, qs, qi = _cut(q, i, block, 3), _cut(segments, i, block, 1), i * block + jnp.arange(block)

        def step(j: Any, carry: tuple) -> tuple:
            ki = j * block + jnp.arange(block)
            seen = visible(m, qi, ki, qs, _cut(segments, j, block, 1))[:, None, None]
            s = scores(m, qb, _cut(k, j, block, 2), alibi, qi, ki)
            return online(carry, s, seen, _cut(v, j, block, 2))

        carry = begin(qb.shape[:4], v.shape[-1], sinks)
        top, total, out = _loop(_key_range(m, i, block, n), step, carry, n)
        safe = jnp.where(total == 0, 1, total)
        return (out / safe).astype(q.dtype), top + jnp.log(safe)

    return jax.tree.map(_join, jax.lax.map(rows, jnp.arange(n)))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _flash(m: Mask, block: int, q: Array, k: Array, v: Array, segments: Array, sinks: Any, alibi: Any) -> tuple:
    return _forward(m, block, q, k, v, segments, sinks, alibi)


def _flash_fwd(m: Mask, block: int, q: Array, k: Array, v: Array, segments: Array, sinks: Any, alibi: Any) -> tuple:
    out, lse = _forward(m, block, q, k, v, segments, sinks, alibi)
    return (out, lse), (q, k, v, segments, sinks, alibi, out, lse)


def _flash_bwd(m: Mask, block: int, saved: tuple, cotangents: tuple) -> tuple:
    q, k, v, segments, sinks, alibi, out, lse = saved
    dout, dlse = cotangents
    n = q.shape[3] // block
    delta = (dout.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1, keepdims=True) - dlse
    index = lambda i: i * block + jnp.arange(block)

    def pair(i: Any, j: Any) -> tuple:
        """Probabilities and score gradients of query block i against key block j, both [B K G q s]."""
        qi, ki = index(i), index(j)
        s = scores(m, _cut(q, i, block, 3), _cut(k, j, block, 2), None, qi, ki)
        slope = 1.0 if m.softcap is None else 1 - jnp.square(s / m.softcap)
        if alibi is not None:
            s = s + alibi[:, :, None, None] * (ki - qi[:, None])
        seen = visible(m, qi, ki, _cut(segments, i, block, 1), _cut(segments, j, block, 1))[:, None, None]
        p = jnp.where(seen, jnp.exp(s - _cut(lse, i, block, 3)), 0)
        dp = jnp.einsum(
            "bkgqh,bksh->bkgqs", _cut(dout, i, block, 3), _cut(v, j, block, 2), preferred_element_type=jnp.float32
        )
        ds = p * (dp - _cut(delta, i, block, 3)) * slope * m.scale
        return p.astype(q.dtype), ds.astype(q.dtype)

    f32 = {"preferred_element_type": jnp.float32}

    def keys(dq: Array, j: Any) -> tuple:
        """Add key block j's part of dq; return it with the block's dk and dv."""

        def step(i: Any, carry: tuple) -> tuple:
            dq, dk, dv = carry
            p, ds = pair(i, j)
            new = _cut(dq, i, block, 3) + jnp.einsum("bkgqs,bksh->bkgqh", ds, _cut(k, j, block, 2), **f32)
            dk += jnp.einsum("bkgqs,bkgqh->bksh", ds, _cut(q, i, block, 3), **f32)
            dv += jnp.einsum("bkgqs,bkgqh->bksh", p, _cut(dout, i, block, 3), **f32)
            return jax.lax.dynamic_update_slice_in_dim(dq, new, i * block, 3), dk, dv

        zeros = [jnp.zeros((*x.shape[:2], block, x.shape[3])) for x in (k, v)]
        dq, dk, dv = _loop(_query_range(m, j, block, n), step, (dq, *zeros), n)
        return dq, (dk, dv)

    summed: tuple = jax.lax.scan(keys, jnp.zeros(q.shape), jnp.arange(n))
    dq, (dk, dv) = summed
    dsinks = None
    if sinks is not None:
        dsinks = -(jnp.exp(sinks[..., None, None] - lse) * delta).sum((0, 3, 4)).astype(sinks.dtype)
    dalibi = None if alibi is None else jnp.zeros_like(alibi)
    return dq.astype(q.dtype), _join(dk).astype(k.dtype), _join(dv).astype(v.dtype), None, dsinks, dalibi


_flash.defvjp(_flash_fwd, _flash_bwd)


def flash_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K Hv"],
    segments: Int[Array, "B T"],
    *,
    mask: Mask,
    sinks: Float[Array, " N"] | None = None,
    alibi: Float[Array, " N"] | None = None,
    block: int = 128,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]:
    """Attend within segments, block by block; returns (output, log-sum-exp of the scores in float32).

    Queries and keys are the same T tokens. Blocks outside the causal or window band are skipped. Differentiable in q, k,
    v and sinks (alibi slopes are constants); memory is O(T block). The formula is `dense_attention`'s. 128 keys at a time
    stay in a CPU's cache: forward and backward take half the time of 512.
    """
    b, t, heads, _ = q.shape
    block = min(block, t)
    pad = -t % block
    grow = lambda x: jnp.pad(x, ((0, 0), (0, pad), (0, 0), (0, 0)))
    group = lambda x: None if x is None else x.reshape(k.shape[2], -1)
    if pad:
        q, k, v = grow(q), grow(k), grow(v)
        segments = jnp.pad(segments, ((0, 0), (0, pad)), constant_values=-2)
    qg = q.reshape(b, t + pad, k.shape[2], -1, q.shape[3]).transpose(0, 2, 3, 1, 4)
    kt, vt = k.swapaxes(1, 2), v.swapaxes(1, 2)
    out, lse = _flash(mask, block, qg, kt, vt, segments, group(sinks), group(alibi))
    merge = lambda x: x.transpose(0, 3, 1, 2, 4).reshape(b, t + pad, heads, -1)[:, :t]
    return merge(out), merge(lse)[..., 0]
