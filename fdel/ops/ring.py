"""Attention over rows that are divided between devices (mesh axis `sp`): context parallelism.

Each device holds T / n consecutive tokens of every row. `ring_attention` passes keys and values round, and holds one part
at a time (arXiv:2310.01889). It composes the two passes of an implementation: what the causal mask or a window hides they
skip, and parts are joined by their log-sum-exp, which is exact.

Under a causal mask the last device of a ring would have work at every hop and the first at none but its own, while all wait
for the slowest. So devices first exchange halves: each gets one early and one late half, which together see as many keys on
every device (zig-zag; arXiv:2311.09431 has the problem). The output goes back: no one else sees the exchange.
"""

import importlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from fdel.ops import dispatch, flash
from fdel.ops import mask as M
from fdel.ops.division import divide
from fdel.ops.mask import Attended, Keys, Mask, Passes, PerHead, Queries, Values, Where
from fdel.ops.platform import context
from fdel.ops.shard import AXES, divided

AXIS = "sp"


def no_bias(*_: Any, bias: Any, **__: Any) -> str | None:
    """Say why an implementation in blocks does not serve an additive bias, or None."""
    return None if bias is None else "an additive bias needs all scores in memory"


def unsupported(q: Array, k: Array, v: Array, where: Where, *, bias: Any, **_: Any) -> str | None:
    """Say why rows cannot be attended to in parts here, or None."""
    n = context(AXIS).get(AXIS)
    if n is None:
        return "no mesh with an axis sp > 1 is set (jax.set_mesh), or it is divided already"
    if q.shape[1] % n:
        return f"rows of {q.shape[1]} tokens cannot be divided by sp={n}"
    if where.ahead is not None:
        return "tokens that see later ones (Packed.ahead), whose keys may be on another device"
    return no_bias(bias=bias)


LOOPS = flash.passes(flash.Schedule())
_ROWS, _HEADS = "rows tokens heads head_dim", "rows tokens heads"


def _kernel(module: str, unproven: bool = False) -> dispatch.Implementation:
    """Give the two passes of fdel/kernels/<module>.py, its `forward` and `backward`, as an implementation of parts."""
    load, whole = partial(importlib.import_module, f"fdel.kernels.{module}"), dispatch.kernel(module, unproven=unproven)

    def of_part(why: Callable[..., str | None]) -> Callable[..., str | None]:
        return lambda m, q, k, v, where, sinks, alibi: why(q, k, v, where, mask=m, sinks=sinks, alibi=alibi)

    passes = (lambda *a: load().forward(*a)), (lambda *a: load().backward(*a))
    reasons = of_part(whole.unsupported), of_part(whole.passed_over)
    return dispatch.Implementation(passes[0], reasons[0], local=True, backward=passes[1], passed_over=reasons[1])


# What attends to a part: implementations in two passes, each called as `mask.Passes` says.
PARTS = dispatch.Table(
    "attend_part",
    {
        "hopper": _kernel("flash_attention_gpu", unproven=True),
        "hopper_ordered": _kernel("flash_ordered_gpu", unproven=True),
        "mosaic": _kernel("flash_attention_tpu"),
        "flash": dispatch.Implementation(LOOPS.forward, backward=LOOPS.backward),
    },
    ("", _ROWS, _ROWS, _ROWS, "rows tokens", "heads", "heads", _ROWS, _HEADS, _ROWS, _HEADS),
    out=(_ROWS, _HEADS),
)


def _passes(*args: Any) -> Passes:
    """Choose an implementation for these arguments; a local one is divided further along rows and heads."""
    way = dispatch.choose(PARTS, None, *args)
    if not way.local:
        return Passes(way.call, way.backward)
    outs = PARTS.out, (_ROWS, _ROWS, _ROWS, "heads")
    return Passes(*(divide(f, PARTS, out) for f, out in zip((way.call, way.backward), outs, strict=True)))


def _sharing(heads: int, kv_heads: int) -> int:
    """Count the devices along mesh axis `tp` that share a key head, if they are several: else each would have all heads."""
    tp = math.prod(context(*AXES["attending"]).values())
    return 1 if kv_heads % tp == 0 or tp % kv_heads or heads % tp else tp // kv_heads


def ring_attention(
    q: Queries, k: Keys, v: Values, where: Where, *, mask: Mask, sinks: PerHead, alibi: PerHead, bias: None = None
) -> Attended:
    """Attend by the passes of another, each device with its queries to one device's keys and values after another."""
    n, times = context(AXIS)[AXIS], _sharing(q.shape[2], k.shape[2])
    k, v = (x if times == 1 else jnp.repeat(x, times, 2) for x in (k, v))

    def part(q: Array, k: Array, v: Array, sides: tuple[Array, Array]) -> tuple[Array, Array]:
        pieces = 2 if mask.causal and mask.window is None and q.shape[1] % 2 == 0 else 1
        circle = Circle(n, pieces, q.shape[1] // pieces)
        q, k, v, sides = jax.tree.map(circle.deal, (q, k, v, sides))
        where = Where(sides[0][0], sides[1][0], jnp.int32(0), jnp.int32(0))
        passes = _passes(mask, q[0], k[0], v[0], where, None, alibi)
        ring = Passes(*(partial(f, circle, passes) for f in (_forward, _backward)))
        return jax.tree.map(circle.collect, M.attention(ring, mask, q, k, v, sides, None, alibi))

    rows = P(None, AXIS)
    out, lse = divided(part, {AXIS}, (rows,) * 4, (rows, rows))(q, k, v, where.sides)
    if sinks is None:
        return out, lse
    return (out * jax.nn.sigmoid(lse - sinks)[..., None]).astype(q.dtype), jnp.logaddexp(lse, sinks)


class Circle(NamedTuple):
    """What all devices of a ring have in common."""

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


def _forward(c: Circle, passes: Passes, m: Mask, *args: Any) -> tuple:
    """On one device, attend from each piece to the keys of all; arrays [pieces B length ...], out in float32 between."""
    q, k, v, sides, _, slopes = args
    (q_segments, k_segments), rank = sides, lax.axis_index(AXIS)

    def hop(carry: tuple, i: Array) -> tuple[tuple, None]:
        out, lse, held = carry

        def piece(xs: tuple) -> tuple:
            q, segments, start, *found = xs

            def join(found: list, keys: tuple) -> tuple[list, None]:
                (out, lse), (k, v, k_segments, k_start) = found, keys
                where = Where(segments, k_segments, start, k_start)
                new, new_lse = passes.forward(m, q, k, v, where, None, slopes)
                both = jnp.logaddexp(lse, new_lse)
                share = lambda part: jnp.exp(part - both)[..., None]
                return [out * share(lse) + new * share(new_lse), both], None

            return tuple(lax.scan(join, found, (*held, c.starts((rank - i) % c.devices)))[0])

        out, lse = lax.map(piece, (q, q_segments, c.starts(rank), out, lse))
        return (out, lse, c.turn(held)), None

    empty = jnp.zeros((*q.shape[:-1], v.shape[-1]), jnp.float32), jnp.full(q.shape[:-1], M.NEG, jnp.float32)
    (out, lse, _), _ = lax.scan(hop, (*empty, (k, v, k_segments)), jnp.arange(c.devices))
    return out.astype(q.dtype), lse


def _backward(c: Circle, passes: Passes, m: Mask, *saved: Any) -> tuple:
    """Send keys and values round once more, and with them their gradients, which arrive where they belong."""
    q, k, v, sides, _, slopes, *after = saved
    (q_segments, k_segments), rank = sides, lax.axis_index(AXIS)

    def hop(carry: tuple, i: Array) -> tuple[tuple, None]:
        dq, held, sums = carry

        def piece(sums: tuple, xs: tuple) -> tuple[tuple, Array]:
            dq, q, segments, start, *after = xs

            def pull(dq: Array, keys: tuple) -> tuple[Array, tuple]:
                k, v, k_segments, k_start, dk, dv = keys
                where = Where(segments, k_segments, start, k_start)
                new = passes.backward(m, q, k, v, where, None, slopes, *after)
                return dq + new[0], (dk + new[1], dv + new[2])

            dq, sums = lax.scan(pull, dq, (*held, c.starts((rank - i) % c.devices), *sums))
            return sums, dq

        sums, dq = lax.scan(piece, sums, (dq, q, q_segments, c.starts(rank), *after))
        return (dq, *c.turn((held, sums))), None

    zero = lambda x: jnp.zeros(x.shape, jnp.float32)
    start = zero(q), (k, v, k_segments), (zero(k), zero(v))
    (dq, _, (dk, dv)), _ = lax.scan(hop, start, jnp.arange(c.devices))
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None
