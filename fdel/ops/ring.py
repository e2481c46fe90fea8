"""Attention over rows that are divided between devices (mesh axis `sp`): context parallelism.

Each device holds T / n consecutive tokens of every row. `ring_attention` passes keys and values round, and holds one part
at a time (arXiv:2310.01889); `gathered_attention` fetches them all at once, which is simpler, and cheaper where keys are
few. Both skip what the causal mask or a window hides, and both are exact: parts are joined by their log-sum-exp.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from fdel.ops.flash import NEG, Mask, Where, blocked, flash_attention, flash_backward, flash_forward, unblocked
from fdel.ops.shard import context

AXIS = "sp"
BLOCK = 128  # as in `flash_attention`


def unsupported(q: Array, k: Array, v: Array, segments: Array, *, bias: Any, **_: Any) -> str | None:
    """Say why rows cannot be attended to in parts here, or None."""
    n = context(AXIS).get(AXIS)
    if n is None:
        return "no mesh with an axis sp > 1 is set (jax.set_mesh), or it is divided already"
    if q.shape[1] % n:
        return f"rows of {q.shape[1]} tokens cannot be divided by sp={n}"
    return None if bias is None else "an additive bias needs all scores in memory"


def _divided(part: Callable, q: Array, k: Array, v: Array, segments: Array, sinks: Array | None) -> Array:
    """Run `part(rank, q, k, v, segments)` -> (out, lse) on every device's part of the rows, and add the sinks."""
    rows = P(None, AXIS)
    local = lambda *parts: part(lax.axis_index(AXIS), *parts)
    run = jax.shard_map(local, in_specs=(rows,) * 4, out_specs=(rows, rows), axis_names={AXIS}, check_vma=False)
    out, lse = run(q, k, v, segments)
    if sinks is None:
        return out
    return (out * jax.nn.sigmoid(lse - sinks)[..., None]).astype(q.dtype)


def gathered_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K Hv"],
    segments: Int[Array, "B T"],
    *,
    mask: Mask,
    sinks: Float[Array, " N"] | None = None,
    alibi: Float[Array, " N"] | None = None,
) -> Float[Array, "B T N Hv"]:
    """Attend as `flash_attention` does, each device with its queries to the keys and values of all."""

    def part(rank: Array, q: Array, k: Array, v: Array, segments: Array) -> tuple[Array, Array]:
        k, v, all_segments = (lax.all_gather(x, AXIS, axis=1, tiled=True) for x in (k, v, segments))
        where = (all_segments, rank * q.shape[1], 0)
        return flash_attention(q, k, v, segments, mask=mask, alibi=alibi, keys=where)

    return _divided(part, q, k, v, segments, sinks)


def ring_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K Hv"],
    segments: Int[Array, "B T"],
    *,
    mask: Mask,
    sinks: Float[Array, " N"] | None = None,
    alibi: Float[Array, " N"] | None = None,
) -> Float[Array, "B T N Hv"]:
    """Attend as `flash_attention` does, each device with its queries to one device's keys and values after another."""
    n, kv_heads = context(AXIS)[AXIS], k.shape[2]
    slopes = None if alibi is None else alibi.reshape(kv_heads, -1)

    def part(rank: Array, q: Array, k: Array, v: Array, segments: Array) -> tuple[Array, Array]:
        length = q.shape[1]
        block = min(BLOCK, length)
        *qkv, where = blocked(block, q, k, v, segments, segments)
        out, lse = _ring(mask, block, n, length, *qkv, where, rank, slopes)
        return unblocked(out, length), unblocked(lse, length)[..., 0]

    return _divided(part, q, k, v, segments, sinks)


def _around(n: int, tree: Any) -> Any:
    return jax.tree.map(lambda x: lax.ppermute(x, AXIS, [(d, (d + 1) % n) for d in range(n)]), tree)


def _place(where: Where, rank: Array, i: Array, n: int, length: int, k_segments: Array) -> Where:
    """What the keys are that arrive at hop i."""
    return Where(where.q_segments, k_segments, rank * length, (rank - i) % n * length)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _ring(
    m: Mask, block: int, n: int, length: int, q: Array, k: Array, v: Array, where: Where, rank: Array, slopes: Any
) -> tuple:
    """On one device, `flash_forward` over the keys of all, in its layout."""

    def hop(carry: tuple, i: Array) -> tuple[tuple, None]:
        out, lse, (k, v, segments) = carry
        new, new_lse = flash_forward(m, block, q, k, v, _place(where, rank, i, n, length, segments), None, slopes)
        both = jnp.logaddexp(lse, new_lse)
        out = out * jnp.exp(lse - both) + new * jnp.exp(new_lse - both)
        return (out, both, _around(n, (k, v, segments))), None

    empty = jnp.zeros((*q.shape[:4], v.shape[-1]), jnp.float32), jnp.full((*q.shape[:4], 1), NEG, jnp.float32)
    (out, lse, _), _ = lax.scan(hop, (*empty, (k, v, where.k_segments)), jnp.arange(n))
    return out.astype(q.dtype), lse


def _ring_forward(m: Mask, block: int, n: int, length: int, *args: Any) -> tuple:
    out, lse = _ring(m, block, n, length, *args)
    return (out, lse), (*args, out, lse)


def _ring_backward(m: Mask, block: int, n: int, length: int, saved: tuple, cotangents: tuple) -> tuple:
    """Send keys and values round once more, and with them their gradients, which arrive where they belong."""
    q, k, v, where, rank, slopes, out, lse = saved

    def hop(carry: tuple, i: Array) -> tuple[tuple, None]:
        dq, (k, v, segments, dk, dv) = carry
        here = _place(where, rank, i, n, length, segments)
        new = flash_backward(m, block, (q, k, v, here, None, slopes, out, lse), cotangents)
        return (dq + new[0], _around(n, (k, v, segments, dk + new[1], dv + new[2]))), None

    zero = lambda x: jnp.zeros(x.shape, jnp.float32)
    (dq, (_, _, _, dk, dv)), _ = lax.scan(hop, (zero(q), (k, v, where.k_segments, zero(k), zero(v))), jnp.arange(n))
    nothing = lambda tree: jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), tree)
    no_slopes = None if slopes is None else jnp.zeros_like(slopes)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), nothing(where), nothing(rank), no_slopes


_ring.defvjp(_ring_forward, _ring_backward)
