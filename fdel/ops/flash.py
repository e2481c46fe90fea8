"""Softmax attention in key blocks with an online softmax (arXiv:2205.14135): forward and backward never hold [T, S].

Plain XLA, and the reference for every attention kernel. `dense.dense_attention` states the formula.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from fdel.ops.cpu import each_row, over_queries, row_dots
from fdel.ops.mask import HIDDEN, NEG, Mask, Segments, sides, visible


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


# ---- blocks --------------------------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Where:
    """Which tokens of a row queries and keys are: their segments, and the indices in the row of the first of each."""

    q_segments: Int[Array, "B T"]
    k_segments: Int[Array, "B S"]
    q_start: Int[Array, ""]
    k_start: Int[Array, ""]

    def q_index(self, i: Any, block: int) -> Array:
        """Indices in the row of query block i."""
        return self.q_start + i * block + jnp.arange(block)

    def k_index(self, j: Any, block: int) -> Array:
        """Indices in the row of key block j."""
        return self.k_start + j * block + jnp.arange(block)


def _cut(x: Array, i: Any, size: int, axis: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, i * size, size, axis)


def _key_range(m: Mask, first: Any, block: int, start: Any, n: int) -> tuple[Any, Any]:
    """Which of the n key blocks from index `start` the queries from index `first` can see, one block of them."""
    low: Any = 0
    high: Any = n
    if m.window is not None:
        low = jnp.clip((first - m.window + 1 - start) // block, 0, n)
    if m.causal or m.window is not None:
        last = first + block - 1 + (0 if m.causal or m.window is None else m.window - 1)
        high = jnp.clip((last - start) // block + 1, 0, n)
    return low, high


def _query_range(m: Mask, first: Any, block: int, start: Any, n: int) -> tuple[Any, Any]:
    """Which of the n query blocks from index `start` can see the keys from index `first`, one block of them."""
    low: Any = 0
    high: Any = n
    if m.causal or m.window is not None:
        low = jnp.clip((first - (0 if m.causal or m.window is None else m.window - 1) - start) // block, 0, n)
    if m.window is not None:
        high = jnp.clip((first + block + m.window - 2 - start) // block + 1, 0, n)
    return low, high


def _loop(bounds: tuple[Any, Any], body: Any, carry: Any, n: int) -> Any:
    return body(0, carry) if n == 1 else jax.lax.fori_loop(bounds[0], bounds[1], body, carry)


def _join(x: Array) -> Array:
    """Concatenate stacked blocks [n, ..., block, H] along their axis."""
    return jnp.moveaxis(x, 0, -3).reshape(*x.shape[1:-2], -1, x.shape[-1])


def flash_forward(m: Mask, block: int, q: Array, k: Array, v: Array, where: Where, sinks: Any, alibi: Any) -> tuple:
    """Attend, in the layout of `blocked`: (output, log-sum-exp of the scores [B K G T 1])."""
    n = k.shape[2] // block

    def rows(i: Any) -> tuple:
        qb, qs, qi = _cut(q, i, block, 3), _cut(where.q_segments, i, block, 1), where.q_index(i, block)

        def step(j: Any, carry: tuple) -> tuple:
            ki = where.k_index(j, block)
            seen = visible(m, qi, ki, qs, _cut(where.k_segments, j, block, 1))[:, None, None]
            s = scores(m, qb, _cut(k, j, block, 2), alibi, qi, ki)
            return online(carry, s, seen, _cut(v, j, block, 2))

        carry = begin(qb.shape[:4], v.shape[-1], sinks)
        top, total, out = _loop(_key_range(m, qi[0], block, where.k_start, n), step, carry, n)
        safe = jnp.where(total == 0, 1, total)
        return (out / safe).astype(q.dtype), top + jnp.log(safe)

    return jax.tree.map(_join, jax.lax.map(rows, jnp.arange(q.shape[3] // block)))


def named(forward: tuple[Array, Array]) -> tuple[Array, Array]:
    """Mark what a backward pass needs of the forward one, for remat policies: with it no attention is computed twice."""
    out, lse = forward
    return checkpoint_name(out, "attn_output"), checkpoint_name(lse, "attn_output")


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _flash(m: Mask, block: int, q: Array, k: Array, v: Array, where: Where, sinks: Any, alibi: Any) -> tuple:
    def one(qs: Array, ks: Array, q: Array, k: Array, v: Array) -> tuple:
        return flash_forward(m, block, q, k, v, replace(where, q_segments=qs, k_segments=ks), sinks, alibi)

    return each_row(one, where.q_segments, where.k_segments, q, k, v, loop=q.shape[3] > block)


def _flash_fwd(m: Mask, block: int, q: Array, k: Array, v: Array, where: Where, sinks: Any, alibi: Any) -> tuple:
    out, lse = named(_flash.fun(m, block, q, k, v, where, sinks, alibi))  # not _flash: gradients are differentiated too
    return (out, lse), (q, k, v, where, sinks, alibi, out, lse)


def score_gradients(
    m: Mask, of_queries: tuple, k: Array, v: Array, seen: Array, alibi: Any, qi: Array, ki: Array
) -> tuple[Array, Array]:
    """Compute probabilities and score gradients, both [B K G q s], from (q, dout, lse, delta) of some queries."""
    q, dout, lse, delta = of_queries
    s = scores(m, q, k, None, qi, ki)
    slope = 1.0 if m.softcap is None else 1 - jnp.square(s / m.softcap)
    if alibi is not None:
        s = s + alibi[:, :, None, None] * (ki - qi[:, None])
    p = jnp.where(seen, jnp.exp(s - lse), 0)
    dp = jnp.einsum("bkgqh,bksh->bkgqs", dout, v, preferred_element_type=jnp.float32)
    ds = p * (dp - delta) * slope * m.scale
    return p.astype(q.dtype), ds.astype(q.dtype)


def sink_gradients(sinks: Any, lse: Array, delta: Array) -> Any:
    """Pull back to the sinks [K G], if there are any."""
    if sinks is None:
        return None
    return -(jnp.exp(sinks[..., None, None] - lse) * delta).sum((0, 3, 4)).astype(sinks.dtype)


def flash_backward(m: Mask, block: int, saved: tuple, cotangents: tuple) -> tuple:
    """Pull back; `saved` is (the arguments of `flash_forward`, out, lse). Of more keys than these, if lse is theirs."""
    q, k, v, where, sinks, alibi, out, lse = saved
    dout, dlse = cotangents
    n = q.shape[3] // block
    delta = row_dots(dout, out) - dlse

    def pair(i: Any, j: Any) -> tuple:
        """Probabilities and score gradients of query block i against key block j, both [B K G q s]."""
        qi, ki = where.q_index(i, block), where.k_index(j, block)
        qs, ks = _cut(where.q_segments, i, block, 1), _cut(where.k_segments, j, block, 1)
        seen = visible(m, qi, ki, qs, ks)[:, None, None]
        of_queries = (_cut(x, i, block, 3) for x in (q, dout, lse, delta))
        return score_gradients(m, tuple(of_queries), _cut(k, j, block, 2), _cut(v, j, block, 2), seen, alibi, qi, ki)

    f32 = {"preferred_element_type": jnp.float32}

    def keys(dq: Array, j: Any) -> tuple:
        """Add key block j's part of dq; return it with the block's dk and dv."""

        def step(i: Any, carry: tuple) -> tuple:
            dq, dk, dv = carry
            p, ds = pair(i, j)
            new = _cut(dq, i, block, 3) + jnp.einsum("bkgqs,bksh->bkgqh", ds, _cut(k, j, block, 2), **f32)
            dk += over_queries(_cut(q, i, block, 3), ds)
            dv += over_queries(_cut(dout, i, block, 3), p)
            return jax.lax.dynamic_update_slice_in_dim(dq, new, i * block, 3), dk, dv

        zeros = [jnp.zeros((*x.shape[:2], x.shape[3], block)) for x in (k, v)]
        bounds = _query_range(m, where.k_start + j * block, block, where.q_start, n)
        dq, dk, dv = _loop(bounds, step, (dq, *zeros), n)
        return dq, (dk.swapaxes(2, 3), dv.swapaxes(2, 3))

    summed: tuple = jax.lax.scan(keys, jnp.zeros(q.shape), jnp.arange(k.shape[2] // block))
    dq, (dk, dv) = summed
    dsinks = sink_gradients(sinks, lse, delta)
    dalibi = None if alibi is None else jnp.zeros_like(alibi)
    return dq.astype(q.dtype), _join(dk).astype(k.dtype), _join(dv).astype(v.dtype), no_gradient(where), dsinks, dalibi


def no_gradient(integers: Any) -> Any:
    """Give the cotangents that JAX wants for a tree of integers."""
    return jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), integers)


def _flash_bwd(m: Mask, block: int, saved: tuple, cotangents: tuple) -> tuple:
    """Pull back; on CPU in blocks of half the size, since more arrays of a block's size are in use than forward."""
    q, k, v, where, sinks, alibi, out, lse = saved
    halve = jax.default_backend() == "cpu" and block % 2 == 0 and q.shape[3] > block
    used = block // 2 if halve else block

    def one(qs: Array, ks: Array, q: Array, k: Array, v: Array, out: Array, lse: Array, *ct: Array) -> tuple:
        here = replace(where, q_segments=qs, k_segments=ks)
        dq, dk, dv, _, dsinks, _ = flash_backward(m, used, (q, k, v, here, sinks, alibi, out, lse), ct)
        return dq, dk, dv, None if dsinks is None else dsinks[None]

    arrays = where.q_segments, where.k_segments, q, k, v, out, lse, *cotangents
    dq, dk, dv, dsinks = each_row(one, *arrays, loop=q.shape[3] > block)
    dsinks = None if sinks is None else dsinks.sum(0)
    return dq, dk, dv, no_gradient(where), dsinks, None if alibi is None else jnp.zeros_like(alibi)


_flash.defvjp(_flash_fwd, _flash_bwd)


def flash_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K Hv"],
    segments: Segments | Where,
    *,
    mask: Mask,
    sinks: Float[Array, " N"] | None = None,
    alibi: Float[Array, " N"] | None = None,
    block: int = 128,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]:
    """Attend within segments, block by block; returns (output, log-sum-exp of the scores in float32).

    Queries and keys are the same T tokens, or, with a `Where`, parts of the same rows on several devices. Blocks outside
    the causal or window band are skipped. Differentiable in q, k, v and sinks (alibi slopes are constants); memory is
    O(T block). The formula is `dense_attention`'s. 128 keys at a time stay in a CPU's cache: half the time of 512.
    """
    kv_heads, length = k.shape[2], q.shape[1]
    block = min(block, max(length, k.shape[1]))
    where = segments if isinstance(segments, Where) else Where(*sides(segments), jnp.int32(0), jnp.int32(0))
    q, k, v, where = blocked(block, q, k, v, where)
    group = lambda x: None if x is None else x.reshape(kv_heads, -1)
    out, lse = _flash(mask, block, q, k, v, where, group(sinks), group(alibi))
    return unblocked(out, length), unblocked(lse, length)[..., 0]


def blocked(block: int, q: Array, k: Array, v: Array, where: Where) -> tuple[Array, Array, Array, Where]:
    """Lay [B T N H] queries out as [B K G T H], keys and values as [B K S H], all padded to whole blocks."""
    grow = lambda x, fill=0: jnp.pad(
        x, ((0, 0), (0, -x.shape[1] % block), *((0, 0),) * (x.ndim - 2)), constant_values=fill
    )
    where = replace(where, q_segments=grow(where.q_segments, -2), k_segments=grow(where.k_segments, HIDDEN))
    q, k, v = grow(q), grow(k), grow(v)
    q = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3]).transpose(0, 2, 3, 1, 4)
    return q, k.swapaxes(1, 2), v.swapaxes(1, 2), where


def unblocked(x: Array, length: int) -> Array:
    """Undo the layout of [B K G T H]: [B length N H]."""
    x = x.transpose(0, 3, 1, 2, 4)
    return x.reshape(*x.shape[:2], -1, x.shape[-1])[:, :length]
