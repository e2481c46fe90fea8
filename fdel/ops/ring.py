"""Attention over rows that are divided between devices (mesh axis `sp`): context parallelism.

Each device holds T / n consecutive tokens of every row. `ring_attention` passes keys and values round, and holds one part
at a time (arXiv:2310.01889); `gathered_attention` fetches them all at once, which is simpler, and cheaper where keys are
few. Both skip what the causal mask or a window hides, and both are exact: parts are joined by their log-sum-exp.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from fdel.ops.flash import NEG, Mask, Where, blocked, flash_attention, flash_backward, flash_forward, named, unblocked
from fdel.ops.shard import context, divided

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
    run = divided(local, {AXIS}, (rows,) * 4, (rows, rows))
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
        where = Where(segments, all_segments, rank * q.shape[1], jnp.int32(0))
        return flash_attention(q, k, v, where, mask=mask, alibi=alibi)

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
    n = context(AXIS)[AXIS]
    slopes = None if alibi is None else alibi.reshape(k.shape[2], -1)

    def part(rank: Array, q: Array, k: Array, v: Array, segments: Array) -> tuple[Array, Array]:
        length = q.shape[1]
        circle = Circle(mask, min(BLOCK, length), n, length)
        *qkv, where = blocked(circle.block, q, k, v, Where(segments, segments, rank * length, rank * length))
        out, lse = _ring(circle, *qkv, where, slopes)
        return unblocked(out, length), unblocked(lse, length)[..., 0]

    return _divided(part, q, k, v, segments, sinks)


class Circle(NamedTuple):
    """What all devices of a ring have in common."""

    mask: Mask
    block: int
    devices: int
    length: int  # tokens per device

    def turn(self, tree: Any) -> Any:
        """Pass a tree of arrays on to the next device."""
        to = [(d, (d + 1) % self.devices) for d in range(self.devices)]
        return jax.tree.map(lambda x: lax.ppermute(x, AXIS, to), tree)

    def arrived(self, where: Where, segments: Array, hop: Array) -> Where:
        """Say which keys are here at a hop; at hop 0 they are the device's own."""
        start = (where.k_start - hop * self.length) % (self.devices * self.length)
        return replace(where, k_segments=segments, k_start=start)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(c: Circle, q: Array, k: Array, v: Array, where: Where, slopes: Any) -> tuple:
    """On one device, `flash_forward` over the keys of all, in its layout."""

    def hop(carry: tuple, i: Array) -> tuple[tuple, None]:
        out, lse, (k, v, segments) = carry
        new, new_lse = flash_forward(c.mask, c.block, q, k, v, c.arrived(where, segments, i), None, slopes)
        both = jnp.logaddexp(lse, new_lse)
        out = out * jnp.exp(lse - both) + new * jnp.exp(new_lse - both)
        return (out, both, c.turn((k, v, segments))), None

    empty = jnp.zeros((*q.shape[:4], v.shape[-1]), jnp.float32), jnp.full((*q.shape[:4], 1), NEG, jnp.float32)
    (out, lse, _), _ = lax.scan(hop, (*empty, (k, v, where.k_segments)), jnp.arange(c.devices))
    return out.astype(q.dtype), lse


def _ring_forward(c: Circle, *args: Any) -> tuple:
    out, lse = named(_ring(c, *args))
    return (out, lse), (*args, out, lse)


def _ring_backward(c: Circle, saved: tuple, cotangents: tuple) -> tuple:
    """Send keys and values round once more, and with them their gradients, which arrive where they belong."""
    q, k, v, where, slopes, out, lse = saved

    def hop(carry: tuple, i: Array) -> tuple[tuple, None]:
        dq, (k, v, segments, dk, dv) = carry
        here = c.arrived(where, segments, i)
        new = flash_backward(c.mask, c.block, (q, k, v, here, None, slopes, out, lse), cotangents)
        return (dq + new[0], c.turn((k, v, segments, dk + new[1], dv + new[2]))), None

    zero = lambda x: jnp.zeros(x.shape, jnp.float32)
    start = zero(q), (k, v, where.k_segments, zero(k), zero(v))
    (dq, (*_, dk, dv)), _ = lax.scan(hop, start, jnp.arange(c.devices))
    nothing = jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), where)
    no_slopes = None if slopes is None else jnp.zeros_like(slopes)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), nothing, no_slopes


_ring.defvjp(_ring_forward, _ring_backward)
