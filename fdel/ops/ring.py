"""Attention over rows that are divided between devices (mesh axis `sp`): context parallelism.

Each device holds T / n consecutive tokens of every row. `ring_attention` passes keys and values round, and holds one part
at a time (arXiv:2310.01889); `gathered_attention` fetches them all at once, which is simpler, and cheaper where keys are
few. Both skip what the causal mask or a window hides, and both are exact: parts are joined by their log-sum-exp.

Under a causal mask the last device of a ring would have work at every hop and the first at none but its own, while all wait
for the slowest. So devices first exchange halves: each gets one early and one late half, which together see as many keys on
every device (zig-zag; arXiv:2311.09431 has the problem). The output goes back: no one else sees the exchange.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from fdel.ops.flash import Where, blocked, flash_attention, flash_backward, flash_forward, named, no_gradient, unblocked
from fdel.ops.mask import NEG, Mask, Segments, sides
from fdel.ops.shard import context, divided

AXIS = "sp"
BLOCK = 128  # as in `flash_attention`


def unsupported(q: Array, k: Array, v: Array, segments: Segments, *, bias: Any, **_: Any) -> str | None:
    """Say why rows cannot be attended to in parts here, or None."""
    n = context(AXIS).get(AXIS)
    if n is None:
        return "no mesh with an axis sp > 1 is set (jax.set_mesh), or it is divided already"
    if q.shape[1] % n:
        return f"rows of {q.shape[1]} tokens cannot be divided by sp={n}"
    return None if bias is None else "an additive bias needs all scores in memory"


def _divided(part: Callable, q: Array, k: Array, v: Array, segments: Segments, sinks: Array | None) -> Array:
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
    segments: Segments,
    *,
    mask: Mask,
    sinks: Float[Array, " N"] | None = None,
    alibi: Float[Array, " N"] | None = None,
) -> Float[Array, "B T N Hv"]:
    """Attend as `flash_attention` does, each device with its queries to the keys and values of all."""

    def part(rank: Array, q: Array, k: Array, v: Array, segments: Segments) -> tuple[Array, Array]:
        mine, keys = sides(segments)
        k, v, keys = (lax.all_gather(x, AXIS, axis=1, tiled=True) for x in (k, v, keys))
        where = Where(mine, keys, rank * q.shape[1], jnp.int32(0))
        return flash_attention(q, k, v, where, mask=mask, alibi=alibi)

    return _divided(part, q, k, v, segments, sinks)


def ring_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K Hv"],
    segments: Segments,
    *,
    mask: Mask,
    sinks: Float[Array, " N"] | None = None,
    alibi: Float[Array, " N"] | None = None,
) -> Float[Array, "B T N Hv"]:
    """Attend as `flash_attention` does, each device with its queries to one device's keys and values after another."""
    n = context(AXIS)[AXIS]
    slopes = None if alibi is None else alibi.reshape(k.shape[2], -1)

    def part(rank: Array, q: Array, k: Array, v: Array, segments: Segments) -> tuple[Array, Array]:
        pieces = 2 if mask.causal and mask.window is None and q.shape[1] % 2 == 0 else 1
        length = q.shape[1] // pieces
        circle = Circle(mask, min(BLOCK, -(-length // pieces)), n, pieces, length)
        q, k, v, segments = jax.tree.map(circle.deal, (q, k, v, segments))
        where = Where(*sides(segments), circle.starts(rank), circle.starts(rank))
        *qkv, where = jax.vmap(partial(blocked, circle.block))(q, k, v, where)
        found = _ring(circle, *qkv, where, slopes)
        out, lse = (circle.collect(jax.vmap(lambda x: unblocked(x, length))(x)) for x in found)
        return out, lse[..., 0]

    return _divided(part, q, k, v, segments, sinks)


class Circle(NamedTuple):
    """What all devices of a ring have in common."""

    mask: Mask
    block: int
    devices: int
    pieces: int  # 1: each device holds consecutive tokens. 2: a half from the front and one from the back
    length: int  # tokens of a piece

    def turn(self, tree: Any) -> Any:
        """Pass a tree of arrays on to the next device."""
        to = [(d, (d + 1) % self.devices) for d in range(self.devices)]
        return jax.tree.map(lambda x: lax.ppermute(x, AXIS, to), tree)

    def starts(self, rank: Array) -> Array:
        """Index in the row of the first token of each piece that a device holds, int[pieces]."""
        if self.pieces == 1:
            return rank[None] * self.length
        pair = jnp.stack([rank, 2 * self.devices - 1 - rank])
        return jnp.where(rank % 2 == 0, pair, pair[::-1]) * self.length

    def deal(self, x: Array) -> Array:
        """From consecutive tokens [B pieces*length ...] to the pieces that the device holds, [pieces B length ...]."""
        x = jnp.stack(jnp.split(x, self.pieces, 1))
        return x if self.pieces == 1 else jnp.stack([lax.ppermute(x[i], AXIS, self._route(i)) for i in (0, 1)])

    def collect(self, x: Array) -> Array:
        """Undo `deal`."""
        if self.pieces == 2:
            back = [[(to, d) for d, to in self._route(i)] for i in (0, 1)]
            x = jnp.stack([lax.ppermute(x[i], AXIS, back[i]) for i in (0, 1)])
        return jnp.concatenate(list(x), 1)

    def _route(self, i: int) -> list[tuple[int, int]]:
        """Where each device's half i goes: half h of the row to device h, or from the middle on counted from the end."""
        halves = [2 * d + i for d in range(self.devices)]
        return [(d, min(h, 2 * self.devices - 1 - h)) for d, h in enumerate(halves)]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(c: Circle, q: Array, k: Array, v: Array, where: Where, slopes: Any) -> tuple:
    """On one device, `flash_forward` of each piece over the keys of all, in its layout with the pieces in front."""
    rank = lax.axis_index(AXIS)

    def hop(carry: tuple, i: Array) -> tuple[tuple, None]:
        out, lse, held = carry

        def piece(xs: tuple) -> tuple:
            q, segments, start, *found = xs

            def join(found: list, keys: tuple) -> tuple[list, None]:
                (out, lse), (k, v, k_segments, k_start) = found, keys
                here = Where(segments, k_segments, start, k_start)
                new, new_lse = flash_forward(c.mask, c.block, q, k, v, here, None, slopes)
                both = jnp.logaddexp(lse, new_lse)
                return [out * jnp.exp(lse - both) + new * jnp.exp(new_lse - both), both], None

            return tuple(lax.scan(join, found, (*held, c.starts((rank - i) % c.devices)))[0])

        out, lse = lax.map(piece, (q, where.q_segments, where.q_start, out, lse))
        return (out, lse, c.turn(held)), None

    empty = jnp.zeros((*q.shape[:-1], v.shape[-1]), jnp.float32), jnp.full((*q.shape[:-1], 1), NEG, jnp.float32)
    (out, lse, _), _ = lax.scan(hop, (*empty, (k, v, where.k_segments)), jnp.arange(c.devices))
    return out.astype(q.dtype), lse


def _ring_forward(c: Circle, *args: Any) -> tuple:
    out, lse = named(_ring.fun(c, *args))  # not _ring: gradients are differentiated too
    return (out, lse), (*args, out, lse)


def _ring_backward(c: Circle, saved: tuple, cotangents: tuple) -> tuple:
    """Send keys and values round once more, and with them their gradients, which arrive where they belong."""
    q, k, v, where, slopes, out, lse = saved
    rank = lax.axis_index(AXIS)

    def hop(carry: tuple, i: Array) -> tuple[tuple, None]:
        dq, held, sums = carry

        def piece(sums: tuple, xs: tuple) -> tuple[tuple, Array]:
            dq, q, segments, start, out, lse, dout, dlse = xs

            def pull(dq: Array, keys: tuple) -> tuple[Array, tuple]:
                k, v, k_segments, k_start, dk, dv = keys
                here = Where(segments, k_segments, start, k_start)
                saved = q, k, v, here, None, slopes, out, lse
                new = flash_backward(c.mask, c.block, saved, (dout, dlse))
                return dq + new[0], (dk + new[1], dv + new[2])

            dq, sums = lax.scan(pull, dq, (*held, c.starts((rank - i) % c.devices), *sums))
            return sums, dq

        sums, dq = lax.scan(piece, sums, (dq, q, where.q_segments, where.q_start, out, lse, *cotangents))
        return (dq, *c.turn((held, sums))), None

    zero = lambda x: jnp.zeros(x.shape, jnp.float32)
    start = zero(q), (k, v, where.k_segments), (zero(k), zero(v))
    (dq, _, (dk, dv)), _ = lax.scan(hop, start, jnp.arange(c.devices))
    no_slopes = None if slopes is None else jnp.zeros_like(slopes)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), no_gradient(where), no_slopes


_ring.defvjp(_ring_forward, _ring_backward)
