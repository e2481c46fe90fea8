"""The gradient of the gated delta rule on Hopper with a decay of each key channel: what has no order, in XLA.

Algorithm: that of `delta_backward_gpu`, with the notation of `delta_channels_gpu`. Given S before each chunk, G, the
gradient of the state after it, and dv, with r = v - (D_i k_i)^T S, w = T r, Q_ij = q_i^T D_ij k_j and M_ij = k_i^T D_ij k_j
(j < i),
  dw_i = sum_j Q_ji dy_j + G^T D'_i k_i;  db_i = (dw - M^T dv)_i^T (r - M w)_i
  dQ_ij = dy_i^T w_j;  dM_ij = -dv_i^T w_j
and the gradients of D_i q_i, D_i k_i and D'_i k_i are S dy_i, -S dv_i and G w_i. The levels of halves are computed again:
where D_ij is a product of a factor of i and one of j, each with its own sum of log decays, dQ and dM give the gradients of
factors times q and k by products of matrices. What a sum of log decays gets goes to all log decays in it, by a product with
the transposed matrix of ones and zeros: no difference of large sums.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fdel.kernels.delta_channels_gpu import LOG2E, NEVER, Prepared
from fdel.kernels.delta_walk_gpu import CHUNK, WIDTH


def gradients(
    inputs: list[Float[Array, "B T NH"]], real: Bool[Array, "B T"], start: Bool[Array, "B T"], prepared: Prepared,
    states: tuple[Array, Array],
) -> tuple[Array, ...]:  # fmt: skip
    """Give dq, dk and the gradients of log decays [B T NH], and of beta [B T N], a row at a time.

    `inputs` are g, q, k, v, dy and dv; `real` tells which are tokens, `start` which begin a sequence. `states` are those
    before each chunk and the gradients of those after it.
    """

    def row(given: tuple) -> tuple[Array, ...]:
        wide, (real, start), squares, decays, states = given
        heads, t = len(decays), len(real)
        cut = lambda x: jnp.moveaxis(x.reshape(-1, CHUNK, heads, WIDTH), 2, 0)  # [N chunks C H]
        g, *wide = [jnp.where(real[:, None], x, 0) for x in wide]
        g = log2_decays(g, real[:, None], start[:, None])
        squares = [x.reshape(heads, -1, CHUNK, CHUNK) for x in squares]
        found = _of_chunks([cut(x) for x in (g, *wide)], squares, decays.reshape(heads, -1, 1, WIDTH), *states)
        return tuple(jnp.moveaxis(x, 0, 2).reshape(t, -1) for x in found)

    p = prepared
    wide = [*inputs, p.reads, p.seen, p.wrote]
    return jax.lax.map(row, (wide, (real, start), [p.solve, p.pairs, p.keys], p.decays, states))


def _of_chunks(
    wide: list[Float[Array, "N chunks C H"]], squares: list[Float[Array, "N chunks C C"]],
    decays: Float[Array, "N chunks 1 H"], state: Float[Array, "N chunks H H"], gradient: Float[Array, "N chunks H H"],
) -> tuple[Array, ...]:  # fmt: skip
    """Give dq, dk and the gradients of log decays [N chunks C H], and of beta [N chunks C 1]."""
    g, q, k, v, dy, dv, reads, seen, wrote = wide
    solve, qk, kk = squares
    i, j = jnp.arange(CHUNK)[:, None], jnp.arange(CHUNK)
    single = lambda x: x.astype(jnp.float32)
    r = v - dot(seen, state)
    w = dot(solve, r)
    dw = dot(qk.mT, dy) + dot(wrote, gradient)
    dbeta = jnp.sum((dw - dot(kk.mT, dv)) * (r - dot(kk, w)), -1, keepdims=True)
    dqk, dkk = jnp.where(j <= i, dot(dy, w.mT), 0), jnp.where(j < i, -dot(dv, w.mT), 0)
    of_reads, of_seen, of_wrote = dot(dy, state.mT), -dot(dv, state.mT), dot(w, gradient.mT)
    begin, end = (jnp.exp2(_sums(which, g)) for which in (j <= i, j > i))
    same = jnp.sum(jnp.where(i == j, dqk, 0), -1, keepdims=True)
    dq, dk = begin * of_reads + same * k, begin * of_seen + end * of_wrote + same * q
    first, last = single(reads) * of_reads + single(seen) * of_seen, single(wrote) * of_wrote
    whole = decays * jnp.sum(single(state) * single(gradient), -1)[..., None, :]
    dg = _sums(j >= i, first) + _sums(j < i, last) + whole

    def level(found: tuple[Array, Array, Array], size: Array) -> tuple[tuple[Array, Array, Array], None]:
        far, second = i ^ j, i & size != 0
        which = (far < size) & (second & (j <= i) | ~second & (j > i))
        here = (far >= size) & (far < 2 * size) & (j < i)
        factor = jnp.exp2(_sums(which, g))
        near, query = k * factor, q * factor
        of_keys, of_queries = (jnp.where(here, x, 0) for x in (dkk, dqk))
        of_query = dot(of_queries, near)
        of_near = dot(of_keys, near) + dot(of_keys.mT, near) + dot(of_queries.mT, query)
        dq, dk, dg = found
        dg = dg + _sums(which.T, of_near * near + of_query * query)
        return (dq + of_query * factor, dk + of_near * factor, dg), None

    sizes = jnp.left_shift(1, jnp.arange(CHUNK.bit_length() - 1))
    (dq, dk, dg), _ = jax.lax.scan(level, (dq, dk, dg), sizes)
    return dq.astype(q.dtype), dk.astype(k.dtype), dg, dbeta


def dot(a: Array, b: Array) -> Array:
    """Multiply in bfloat16 with sums in float32."""
    half = lambda x: x.astype(jnp.bfloat16)
    return jnp.matmul(half(a), half(b), preferred_element_type=jnp.float32)


def _sums(which: Array, x: Float[Array, "... C H"]) -> Float[Array, "... C H"]:
    """Sum x over the tokens j for which `which` [i j], with 16 bits of each."""
    high = x.astype(jnp.bfloat16)
    return dot(jnp.concatenate([which, which], 1), jnp.concatenate([high, (x - high).astype(high.dtype)], -2))


def log2_decays(g: Float[Array, "B T NH"], real: Any, start: Any) -> Float[Array, "B T NH"]:
    """Give what `delta_channels_gpu.prepare` sums of log decays: `real` tells tokens, `start` where sequences begin."""
    return jnp.where(start, NEVER, jnp.where(real, jnp.maximum(g * LOG2E, NEVER), 0))
