"""Attention in training batches on TPUs, forward and backward: Pallas Mosaic TPU kernels (`flash_program_tpu`).

They serve what jax's splash attention, whose masks are static, does not: parts of a row in a ring, keys with segments of
their own (prompts that samples share, hidden keys), tokens that see later ones, rows of any length; and they skip tiles
that no segment shares, so that a row of many sequences costs what these see. `flash_tiles` tells which tiles meet, and
`flash_walk_tpu` lists them, and the grid walks that list: its length is computed, and nothing is begun for the others.

Algorithm: FlashAttention's (arXiv 2205.14135, 2307.08691). With s = softcap(scale q k), p = exp(s - lse) and
delta = dout . out - dlse,
  dv = sum p dout;  ds = p (dout . v - delta) softcap'(s);  dk = scale sum ds q;  dq = scale sum ds k
in two kernels, one for dk and dv, one for dq, which no program shares: so the order of sums is always the same. FLOPs for
each pair of a query and a key in a tile: forward 2 H + 2 Hv, backward 8 H + 6 Hv. Compiled for v5p and v6e, and
interpreted; it has not run on a TPU.
"""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from fdel.kernels import flash_gradients_tpu as gradients
from fdel.kernels import flash_program_tpu as program
from fdel.kernels.device import no_tpu
from fdel.kernels.flash_tiles import Tiles, ranges, sight, tests
from fdel.kernels.flash_walk_tpu import LOG2E, Call, Walk, pairs
from fdel.ops import mask as M
from fdel.ops.mask import NEG, Attended, Keys, Mask, Passes, PerHead, Queries, Values, Where
from fdel.ops.paged import LANES

HEADS = 8  # query heads of a key head in one program, at most
ROWS = 2048  # queries of a program, of all of its heads, at most
TILE = 512, 1024  # keys of a tile: as many as queries, but no fewer and, as queries, no more
PAIRS = 2**16  # of tiles in a list: of 8 bytes each in the scalar processor's memory of 1 MiB


def unsupported(
    q: Array, k: Array, v: Array, where: Where, *, mask: Mask, sinks: PerHead, alibi: PerHead, bias: Any = None
) -> str | None:
    """Say why the kernel cannot serve this call, or None."""
    if why := no_tpu():
        return why
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (jnp.bfloat16, jnp.float32):
        return f"it attends in bfloat16 and float32; found {q.dtype}, {k.dtype}, {v.dtype}"
    if q.shape[3] % 64 or (v.shape[3] % LANES and v.shape[3] != 64) or max(q.shape[3], v.shape[3]) > 256:
        found = f"heads of {q.shape[3]} and {v.shape[3]} channels"
        return f"{found}; expected a multiple of 64 for keys, and 64, 128 or 256 for values, of at most 256"
    for name, value in (("alibi slopes", alibi), ("a bias", bias)):
        if value is not None:
            return f"{name}, which it does not have"
    if (many := max(_most(mask, where, q, k, of_keys) for of_keys in (False, True))) > PAIRS:
        return f"up to {many} pairs of tiles; expected at most {PAIRS}, as many as its list may have"
    return None


def call(
    q: Queries, k: Keys, v: Values, where: Where, *, mask: Mask, sinks: PerHead, alibi: None, bias: None
) -> Attended:
    """Attend within segments: (output, log-sum-exps in float32)."""
    return M.attention(Passes(forward, backward), mask, q, k, v, where, sinks, alibi)


def _plan(m: Mask, where: Where, q: Array, k: Array) -> Call:
    """Choose what is static: tiles and how many of a key head's query heads a program has are taken from the shapes."""
    group = q.shape[2] // k.shape[2]
    fit = lambda n: group % n == 0 and (q.shape[2] > n or n == 1)  # a v5p's two cores share programs
    heads = next(n for n in range(min(HEADS, group), 0, -1) if fit(n))
    whole = lambda n: -(-n // LANES) * LANES
    queries = min(max(LANES, ROWS // heads // LANES * LANES), TILE[1], whole(q.shape[1]))
    tiles = Tiles(queries, min(max(TILE[0], queries), whole(k.shape[1])))
    return Call(m.scale, m.softcap, tests(m, where), heads, group // heads, tiles)


def _most(m: Mask, where: Where, q: Array, k: Array, of_keys: bool) -> int:
    """Count the pairs of tiles that may meet, each tile with one at least."""
    (queries, keys), (back, ahead) = _plan(m, where, q, k).tiles, m.reach if where.q_start is None else (None, None)
    ahead = None if where.ahead is not None else ahead
    first, low = np.arange(0, q.shape[1], queries)[:, None], np.arange(0, k.shape[1], keys)
    meet = np.ones((first.size, low.size), bool)
    meet &= True if back is None else low + keys - 1 >= first - back
    meet &= True if ahead is None else low <= first + queries - 1 + ahead
    return len(q) * int(np.maximum(meet.sum(0 if of_keys else 1), 1).sum())


def _filled(x: Array, axis: int, size: int, value: float = 0) -> Array:
    return jnp.pad(x, [(0, -x.shape[i] % size * (i == axis)) for i in range(x.ndim)], constant_values=value)


def _walked(m: Mask, where: Where, q: Array, k: Array, of_keys: bool) -> tuple[Walk, Array, Array]:
    """List the pairs, and give the numbers of queries [B 8 T] and the segments of keys [B 1 S], filled up."""
    tiles = _plan(m, where, q, k).tiles
    numbers, segments = sight(m, where, q.shape[1], k.shape[1], tiles)
    walk = pairs(ranges(numbers, segments, tiles, of_keys), _most(m, where, q, k, of_keys), of_keys)
    return walk, _filled(numbers, 1, 8), segments[:, None]


def forward(m: Mask, q: Queries, k: Keys, v: Values, where: Where, sinks: PerHead, alibi: None) -> Attended:
    """Attend as `mask.Passes` says."""
    how = _plan(m, where, q, k)
    walk, numbers, segments = _walked(m, where, q, k, of_keys=False)
    lay = lambda x, size: _filled(x.swapaxes(1, 2), 2, size)
    start = jnp.full(q.shape[2], NEG) if sinks is None else sinks.astype(jnp.float32) * LOG2E
    arrays = lay(q, how.tiles.queries), lay(k, how.tiles.keys), lay(v, how.tiles.keys), numbers, segments
    out, lse = program.run(how, walk, *arrays, jnp.broadcast_to(start[:, None, None], (len(start), 1, LANES)))
    return out.swapaxes(1, 2)[:, : q.shape[1]], lse[:, :, 0].swapaxes(1, 2)[:, : q.shape[1]]


def backward(m: Mask, q: Array, k: Array, v: Array, where: Where, sinks: PerHead, alibi: None, *after: Array) -> tuple:
    """Give (dq, dk, dv, dsinks): `mask.Passes.backward`; `after` are out, lse, dout and dlse."""
    out, lse, dout, dlse = after
    how = _plan(m, where, q, k)
    delta = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), -1) - dlse
    dsinks = None if sinks is None else -(jnp.exp(sinks - lse) * delta).sum((0, 1)).astype(sinks.dtype)
    stats = jnp.stack([lse * LOG2E, delta], 2)  # [B T 2 N]
    lay = lambda x, size: _filled(x.swapaxes(1, 2), 2, size)
    of_queries, of_keys = (functools.partial(lay, size=size) for size in how.tiles)
    stats = _filled(stats.transpose(0, 3, 2, 1), 3, how.tiles.queries)
    arrays = of_queries(q), of_keys(k), of_keys(v), of_queries(dout.astype(q.dtype)), stats
    walked = lambda of_keys: _walked(m, where, q, k, of_keys)
    (by_queries, *sight), (by_keys, *_) = walked(False), walked(True)
    a = gradients.Arrays(*arrays, *sight)
    dq, (dk, dv) = gradients.of_queries(how, by_queries, a), gradients.of_keys(how, by_keys, a)
    cut = lambda dx, x: dx.swapaxes(1, 2)[:, : x.shape[1]]
    return cut(dq, q), cut(dk, k), cut(dv, v), dsinks
