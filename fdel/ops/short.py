"""Softmax attention of short rows without loops: a block of queries meets all keys that it may see in one product.

Plain XLA for CPU, where many small products and the steps of a loop cost more than the scores of a block take memory.
`dense.dense_attention` states the formula, `flash.flash_attention` is for rows of any length.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fdel.ops.cpu import each_row, over_queries, row_dots
from fdel.ops.flash import named, no_gradient, score_gradients, scores, sink_gradients, unblocked
from fdel.ops.mask import NEG, Mask, Segments, sides, visible

LONGEST = 1024  # tokens of a row


def unsupported(q: Array, *_: Array, bias: Any, **__: Any) -> str | None:
    """Say why these arguments of `attend` need another implementation, or None."""
    if bias is not None:
        return "an additive bias needs all scores in memory"
    if jax.default_backend() != "cpu":
        return "it is written for CPU"
    return None if q.shape[1] <= LONGEST else f"rows of {q.shape[1]} tokens are longer than {LONGEST}"


def short_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K Hv"],
    segments: Segments,
    *,
    mask: Mask,
    sinks: Float[Array, " N"] | None = None,
    alibi: Float[Array, " N"] | None = None,
    block: int = 128,
) -> Float[Array, "B T N Hv"]:
    """Attend within segments; differentiable in q, k, v and sinks (alibi slopes are constants).

    Holds a boolean [B T T] and, of one row at a time where no mesh divides them, the scores of `block` queries.
    """
    (b, t, *_), kv_heads = q.shape, k.shape[2]
    group = lambda x: None if x is None else x.reshape(kv_heads, -1)
    q = q.reshape(b, t, kv_heads, -1, q.shape[3]).transpose(0, 2, 3, 1, 4)
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    out, _ = _short(mask, block, q, k, v, segments, group(sinks), group(alibi))
    return unblocked(out, t)


def _seen(m: Mask, segments: Segments, q: Array) -> Bool[Array, "B 1 1 T S"]:
    """Who sees whom: outside of the loop over rows, since inside XLA computes it again for every head and use.

    It depends on q in form: else JAX computes it before the loop over layers, and there one for each head.
    """
    segments, _ = jax.lax.optimization_barrier((segments, q))
    i = jnp.arange(q.shape[3])
    return visible(m, i, i, *sides(segments))[:, None, None]


def _blocks(m: Mask, block: int, length: int) -> Iterator[tuple[slice, slice]]:
    """Blocks of queries, and the keys that each may see."""
    ahead = 0 if m.causal else length if m.window is None else m.window - 1
    for i in range(0, length, block):
        end = min(i + block, length)
        yield slice(i, end), slice(0 if m.window is None else max(0, i - m.window + 1), min(end + ahead, length))


def _indices(*parts: slice) -> list[Array]:
    return [jnp.arange(p.start, p.stop) for p in parts]


def _forward(m: Mask, block: int, q: Array, k: Array, v: Array, seen: Array, sinks: Any, alibi: Any) -> tuple:
    """Return (output [B K G T Hv], log-sum-exp of the scores [B K G T 1], or `NEG` of a query that sees nothing)."""
    each = []
    for qs, ks in _blocks(m, block, q.shape[3]):
        s = scores(m, q[:, :, :, qs], k[:, :, ks], alibi, *_indices(qs, ks))
        s = jnp.where(seen[..., qs, ks], s, NEG)
        top = s.max(-1, keepdims=True)
        if sinks is not None:
            top = jnp.maximum(top, sinks[..., None, None])
        p = jnp.exp(s - top)
        total = p.sum(-1, keepdims=True)
        if sinks is not None:
            total += jnp.exp(sinks[..., None, None] - top)
        out = jnp.einsum("bkgqs,bksh->bkgqh", p.astype(v.dtype), v[:, :, ks], preferred_element_type=jnp.float32)
        nothing = top == NEG
        out = jnp.where(nothing, 0, out / total).astype(q.dtype)
        each.append((out, jnp.where(nothing, NEG, top + jnp.log(total))))
    return tuple(jnp.concatenate(parts, 3) for parts in zip(*each, strict=True))


def _backward(m: Mask, block: int, alibi: Any, *arrays: Array) -> tuple:
    """Return (dq, dk, dv, delta), the last one as in `flash.flash_backward`."""
    q, k, v, seen, out, lse, dout, dlse = arrays
    delta = row_dots(dout, out) - dlse
    dq, dk, dv = [], *(jnp.zeros(x.swapaxes(2, 3).shape) for x in (k, v))
    for qs, ks in _blocks(m, block, q.shape[3]):
        some = tuple(x[:, :, :, qs] for x in (q, dout, lse, delta))
        p, ds = score_gradients(m, some, k[:, :, ks], v[:, :, ks], seen[..., qs, ks], alibi, *_indices(qs, ks))
        dq.append(jnp.einsum("bkgqs,bksh->bkgqh", ds, k[:, :, ks], preferred_element_type=jnp.float32))
        dk = dk.at[..., ks].add(over_queries(q[:, :, :, qs], ds))
        dv = dv.at[..., ks].add(over_queries(dout[:, :, :, qs], p))
    cast = lambda dx, x: dx.swapaxes(2, 3).astype(x.dtype)
    return jnp.concatenate(dq, 3).astype(q.dtype), cast(dk, k), cast(dv, v), delta


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _short(m: Mask, block: int, q: Array, k: Array, v: Array, segments: Segments, sinks: Any, alibi: Any) -> tuple:
    one = lambda q, k, v, seen: _forward(m, block, q, k, v, seen, sinks, alibi)
    return each_row(one, q, k, v, _seen(m, segments, q), loop=q.shape[3] > block)


def _short_fwd(m: Mask, block: int, *args: Any) -> tuple:
    found = named(_short.fun(m, block, *args))  # not _short: gradients are differentiated too
    return found, (*args, *found)


def _short_bwd(m: Mask, block: int, saved: tuple, cotangents: tuple) -> tuple:
    q, k, v, segments, sinks, alibi, out, lse = saved
    arrays = q, k, v, _seen(m, segments, q), out, lse, *cotangents
    dq, dk, dv, delta = each_row(partial(_backward, m, block, alibi), *arrays, loop=q.shape[3] > block)
    no_slopes = None if alibi is None else jnp.zeros_like(alibi)
    dsinks = sink_gradients(sinks, lse, delta)
    return dq, dk, dv, no_gradient(segments), dsinks, no_slopes


_short.defvjp(_short_fwd, _short_bwd)
