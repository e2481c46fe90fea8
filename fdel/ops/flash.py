"""Softmax attention in key blocks with an online softmax (arXiv:2205.14135): forward and backward never hold [T, S].

Plain XLA, in natural layout outside and [B K G T H] inside. `attention.dense_attention` states the formula.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fdel.ops import mask as M
from fdel.ops.cpu import alone, backward_block, each_row, over_queries, row_dots
from fdel.ops.mask import Attended, Keys, Mask, Passes, PerHead, Queries, Values, Where
from fdel.ops.platform import target

# By XLA:TPU's estimate 512 takes a quarter of the cycles of 128 in rows of 4,096 tokens; on CPU twice the time.
BLOCKS = {"cpu": 128, "gpu": 512, "tpu": 512}
WHOLE = 512  # where no block is skipped: on a CPU a sixth less time than 128, of 1500 states of a sound

Part = tuple[Any, int]  # the first of some queries or keys, and their number


class Schedule(NamedTuple):
    """How work is cut: blocks in loops of the program, whose bounds follow mask and offsets, or, without `loop`, one
    product for each block and all on the other side that it may meet. Small products and steps of a loop cost a CPU more
    than such scores take memory; without loop, a boolean [B T S] is held and rows are whole.
    """

    block: int = 128  # tokens; stay in a CPU's cache: half the time of 512
    loop: bool = True


def flash_attention(
    q: Queries, k: Keys, v: Values, where: Where, *, mask: Mask, sinks: PerHead = None, alibi: PerHead = None,
    schedule: Schedule | None = None,
) -> Attended:  # fmt: skip
    """Attend within segments, block by block; returns (output, log-sum-exp of the scores in float32).

    Queries and keys are the same T tokens, or parts of the same rows on several devices. Blocks outside of the causal or
    window band are skipped. Differentiable in q, k, v and sinks (alibi slopes are constants); memory is
    O(T block). The formula is `dense_attention`'s.
    """
    schedule = schedule or Schedule(BLOCKS[target()] if any(r is not None for r in mask.reach) else WHOLE)
    whole = _whole(mask, q, k, where, sinks, alibi) if schedule.loop else 0
    return M.attention(passes(schedule, whole), mask, q, k, v, where, sinks, alibi)


@cache
def passes(schedule: Schedule, whole: int = 0) -> Passes:
    """Give the two passes of a schedule; `whole` is what `_whole` gives."""
    forward = partial(_head_by_head, whole) if whole else partial(_forward, schedule)
    return Passes(forward, partial(_backward, schedule))


def _whole(m: Mask, q: Array, k: Array, where: Where, sinks: Any, alibi: Any) -> int:
    """Give how many queries a CPU takes at once where all keys are seen, head by head; 0 where it has to go by blocks."""
    plain = where.full and m == Mask(m.scale, causal=False) and sinks is None and alibi is None
    if not plain or where.k_segments is not None or where.q_start is not None:
        return 0
    if not alone():
        return 0
    rows = q.shape[1] * q.shape[2] // k.shape[2]
    size = next(n for n in range(min(rows, WHOLE), 0, -1) if rows % n == 0)
    return size if size >= min(rows, 64) else 0


def _head_by_head(size: int, m: Mask, q: Array, k: Array, v: Array, *_: Any) -> tuple:
    """Attend to all keys: what one head needs stays in cache, and nothing is masked: a third less time than in blocks."""
    kv_heads, f32 = k.shape[2], {"preferred_element_type": jnp.float32}
    grouped, heads = M.grouped(q, kv_heads), lambda x: x.swapaxes(1, 2).reshape(-1, x.shape[1], x.shape[3])

    def head(qkv: tuple) -> Any:
        q, k, v = qkv

        def some(q: Array) -> tuple:
            s = jnp.einsum("qh,sh->qs", q, k, **f32) * m.scale
            top = s.max(-1, keepdims=True)
            p = jnp.exp(s - top)
            total = p.sum(-1, keepdims=True)
            out = jnp.einsum("qs,sh->qh", p.astype(v.dtype), v, **f32) / total
            return out.astype(q.dtype), top + jnp.log(total)

        return jax.lax.map(some, q)

    found = jax.lax.map(head, (grouped.reshape(len(q) * kv_heads, -1, size, q.shape[3]), heads(k), heads(v)))
    out, lse = (M.ungrouped(x.reshape(*grouped.shape[:4], x.shape[-1])) for x in found)
    return out, lse[..., 0]


def _blocked(s: Schedule, q: Array, k: Array, where: Where, *more: Array) -> tuple:
    """Pad arrays [B T|S ...] to whole blocks: (schedule with the block's size, where, padded arrays)."""
    longest = max(q.shape[1], k.shape[1])
    block = min(s.block, longest) if s.loop else -(-longest // -(-longest // s.block))
    widths = lambda x: ((0, 0), (0, -x.shape[1] % block), *((0, 0),) * (x.ndim - 2))
    grow = lambda x, fill=0: jnp.pad(x, widths(x), constant_values=fill)
    (qs, ks), ahead = where.sides, where.ahead
    ahead = ahead if ahead is None else grow(ahead)
    where = replace(where, q_segments=grow(qs, -2), k_segments=grow(ks, M.HIDDEN), ahead=ahead)
    return (s._replace(block=block), where, *map(grow, (q, k, *more)))


def span(first: Any, size: int, reach: tuple[int | None, int | None], length: int) -> tuple[Any, Any]:
    """Give the first and the end, of `length` tokens, that some tokens from index `first` on reach."""
    back, ahead = reach
    clip = (lambda x: min(max(x, 0), length)) if isinstance(first, int) else partial(jnp.clip, min=0, max=length)
    return 0 if back is None else clip(first - back), length if ahead is None else clip(first + size + ahead)


def _cut(x: Array, part: Part, axis: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, *part, axis)


def _each(s: Schedule, length: int, f: Callable, carry: Any) -> tuple[Any, Any]:
    """Run f(carry, first) -> (carry, arrays [..., block, H]) for every block; the arrays are joined."""
    firsts = range(0, length, s.block)
    if s.loop:
        carry, found = jax.lax.scan(f, carry, jnp.arange(0, length, s.block))
        return carry, jax.tree.map(lambda x: jnp.moveaxis(x, 0, -3).reshape(*x.shape[1:-2], -1, x.shape[-1]), found)
    each = []
    for first in firsts:
        carry, new = f(carry, first)
        each.append(new)
    return carry, jax.tree.map(lambda *x: jnp.concatenate(x, -2), *each)


def _over(s: Schedule, reached: tuple[Any, Any], length: int, step: Callable, carry: Any) -> Any:
    """Run step(part, carry) -> carry over what is reached of the other side."""
    low, high = reached
    if length == s.block:
        return step((0, length), carry)
    if not s.loop:
        return step((low, high - low), carry)
    blocks = low // s.block, -(-high // s.block)
    return jax.lax.fori_loop(*blocks, lambda j, carry: step((j * s.block, s.block), carry), carry)


def _sight(s: Schedule, m: Mask, where: Where, q: Array) -> tuple[Array, ...]:
    """Give what `_seen` reads, arrays [B ...]: segment ids, or who sees whom.

    The latter outside of the loop over rows, since inside XLA computes it again for every head and use. The barrier makes
    it depend on q in form: else JAX computes it before the loop over layers, and there one for each head.
    """
    if s.loop:
        return (*where.sides, *([] if where.ahead is None else [where.ahead]))
    ((qs, ks), ahead), _ = jax.lax.optimization_barrier(((where.sides, where.ahead), q))
    return (M.visible(m, jnp.arange(qs.shape[1]), jnp.arange(ks.shape[1]), qs, ks, ahead)[:, None, None],)


def _reach(s: Schedule, m: Mask, where: Where, sight: tuple[Array, ...]) -> tuple[Any, Any]:
    """Give `Mask.reach`, and ahead as far as any query of the rows at hand looks."""
    back, ahead = m.reach
    if where.ahead is None or not m.causal:
        return back, ahead
    return back, sight[2].max() if s.loop else None


def _seen(m: Mask, where: Where, sight: tuple[Array, ...], queries: Part, keys: Part) -> tuple[Array, Array, Array]:
    """Give indices in the row of some queries and keys, and which of them see each other [B 1 1 q s]."""
    qi, ki = (start + part[0] + jnp.arange(part[1]) for start, part in zip(where.starts, (queries, keys), strict=True))
    if len(sight) == 1:
        return qi, ki, _cut(_cut(sight[0], queries, 3), keys, 4)
    sides = (_cut(x, part, 1) for x, part in zip(sight, (queries, keys, queries), strict=False))
    return qi, ki, M.visible(m, qi, ki, *sides)[:, None, None]


def _forward(s: Schedule, m: Mask, q: Array, k: Array, v: Array, where: Where, sinks: Any, alibi: Any) -> tuple:
    (_, length, *_), kv_heads, dtype = q.shape, k.shape[2], q.dtype
    s, where, q, k, v = _blocked(s, q, k, where, v)
    sinks, alibi, (q_start, k_start) = M.grouped(sinks, kv_heads), M.grouped(alibi, kv_heads), where.starts

    def one(q: Array, k: Array, v: Array, *sight: Array) -> tuple:
        def rows(_: None, first: Any) -> tuple:
            queries = first, s.block
            qb = _cut(q, queries, 3)

            def step(keys: Part, carry: tuple) -> tuple:
                qi, ki, seen = _seen(m, where, sight, queries, keys)
                return M.online(carry, M.scores(m, qb, _cut(k, keys, 2), alibi, qi, ki), seen, _cut(v, keys, 2))

            reached = span(q_start + first - k_start, s.block, _reach(s, m, where, sight), k.shape[2])
            out, lse = M.finish(_over(s, reached, k.shape[2], step, M.begin(qb.shape[:4], v.shape[-1], sinks)))
            return None, (out.astype(dtype), lse)

        return _each(s, q.shape[3], rows, None)[1]

    arrays = M.grouped(q, kv_heads), k.swapaxes(1, 2), v.swapaxes(1, 2), *_sight(s, m, where, q)
    out, lse = (M.ungrouped(x)[:, :length] for x in each_row(one, *arrays, loop=q.shape[1] > s.block))
    return out, lse[..., 0]


def _backward(
    s: Schedule, m: Mask, q: Array, k: Array, v: Array, where: Where, sinks: Any, alibi: Any, *after: Array
) -> tuple:
    out, lse, dout, dlse = after
    shapes, kv_heads = (q.shape, k.shape, v.shape), k.shape[2]
    delta = row_dots(dout, out)[..., 0] - dlse
    dsinks = None if sinks is None else -(jnp.exp(sinks - lse) * delta).sum((0, 1)).astype(sinks.dtype)
    s, where, q, k, v, dout, lse, delta = _blocked(s, q, k, where, v, dout, lse[..., None], delta[..., None])
    s = s._replace(block=backward_block(s.block, q.shape[1])) if s.loop else s
    alibi, (q_start, k_start) = M.grouped(alibi, kv_heads), where.starts
    f32 = {"preferred_element_type": jnp.float32}

    def one(k: Array, v: Array, *arrays: Array) -> tuple:
        of_queries, sight = arrays[:4], arrays[4:]

        def columns(dq: Array, first: Any) -> tuple:
            """Add a key block's part of dq; return it with the block's dk and dv."""
            keys = first, s.block
            kb, vb = _cut(k, keys, 2), _cut(v, keys, 2)

            def step(queries: Part, carry: tuple) -> tuple:
                dq, dk, dv = carry
                qi, ki, seen = _seen(m, where, sight, queries, keys)
                some = tuple(_cut(x, queries, 3) for x in of_queries)
                p, ds = M.score_gradients(m, some, kb, vb, seen, alibi, qi, ki)
                new = _cut(dq, queries, 3) + jnp.einsum("bkgqs,bksh->bkgqh", ds, kb, **f32)
                dk += over_queries(some[0], ds)
                dv += over_queries(some[1], p)
                return jax.lax.dynamic_update_slice_in_dim(dq, new, queries[0], 3), dk, dv

            reached = span(k_start + first - q_start, s.block, _reach(s, m, where, sight)[::-1], dq.shape[3])
            zeros = (jnp.zeros((*x.shape[:2], x.shape[3], s.block)) for x in (k, v))
            dq, dk, dv = _over(s, reached, dq.shape[3], step, (dq, *zeros))
            return dq, (dk.swapaxes(2, 3), dv.swapaxes(2, 3))

        dq, (dk, dv) = _each(s, k.shape[2], columns, jnp.zeros(arrays[0].shape))
        return tuple(dx.astype(q.dtype) for dx in (dq, dk, dv))

    arrays = k.swapaxes(1, 2), v.swapaxes(1, 2), *(M.grouped(x, kv_heads) for x in (q, dout, lse, delta))
    dq, dk, dv = each_row(one, *arrays, *_sight(s, m, where, q), loop=q.shape[1] > s.block)
    grads = M.ungrouped(dq), dk.swapaxes(1, 2), dv.swapaxes(1, 2)
    return *(dx[:, : shape[1]] for dx, shape in zip(grads, shapes, strict=True)), dsinks
