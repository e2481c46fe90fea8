"""What kernels for attention over rows share: tiles of queries and keys, which of them meet, and who sees whom inside.

Who sees whom is put in numbers of each query, computed once for a call: the first and the last key that causal mask, window
and `Where.ahead` let it see, counted from the first key at hand (so that a part of a row needs no start), and the segments
whose keys it sees. Tiles of queries and keys that cannot meet are left out at both ends of what a program walks; in tiles
that see each other wholly no mask is computed.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from fdel.ops.mask import HIDDEN, Mask, Where

LOW, HIGH, SEGMENT, SECOND, NUMBERS = range(5)  # of each query, and how many there are
FIRST, WHOLE_FROM, WHOLE_TO, END, BOUNDS = range(5)  # of the tiles that a tile walks, and how many there are
FILLED = -2  # segment of queries that fill a tile
_MOST = jnp.iinfo(jnp.int32).max


class Tiles(NamedTuple):
    """Queries and keys of a tile."""

    queries: int
    keys: int


class Tests(NamedTuple):
    """What a mask asks of a query and a key, besides their segments: static. `two`: a query has two segments."""

    low: bool
    high: bool
    two: bool


def tests(mask: Mask, where: Where) -> Tests:
    """Tell what has to be tested."""
    back, ahead = mask.reach
    return Tests(back is not None, ahead is not None, where.q_segments.ndim == 3)


def sight(
    mask: Mask, where: Where, queries: int, keys: int, tiles: Tiles
) -> tuple[Int[Array, "B 4 T"], Int[Array, "B S"]]:
    """Give the numbers of so many queries and the segments of so many keys, both filled up to whole tiles."""
    (qs, ks), (q_start, k_start), (back, ahead) = where.sides, where.starts, mask.reach
    own = jnp.broadcast_to(jnp.arange(queries, dtype=jnp.int32) + (q_start - k_start), qs.shape[:2])
    low = jnp.zeros_like(own) if back is None else own - back
    high = jnp.full_like(own, keys - 1) if ahead is None else own + ahead
    high = high if where.ahead is None or not mask.causal else own + where.ahead
    segments = (qs, qs) if qs.ndim == 2 else (qs[..., 0], qs[..., 1])
    fill = lambda x, size, value: jnp.pad(x.astype(jnp.int32), ((0, 0), (0, -x.shape[1] % size)), constant_values=value)
    each = zip((low, high, *segments), (_MOST, -1, FILLED, FILLED), strict=True)
    return jnp.stack([fill(x, tiles.queries, value) for x, value in each], 1), fill(ks, tiles.keys, HIDDEN)


def ranges(
    numbers: Int[Array, "B 4 T"], k_segments: Int[Array, "B S"], tiles: Tiles, of_keys: bool = False
) -> Int[Array, "B tiles 4"]:
    """Tell what each tile of queries walks of tiles of keys, or `of_keys` the reverse; the arguments are those of `sight`.

    From `FIRST` to before `END` stand all tiles that may meet it. Those from `WHOLE_FROM` to before `WHOLE_TO` it sees
    wholly, queries that fill a tile aside; FIRST <= WHOLE_FROM <= WHOLE_TO <= END. Nothing: four zeros.
    """
    q = numbers.reshape(*numbers.shape[:2], -1, tiles.queries)
    k = jax.lax.bitcast_convert_type(k_segments.reshape(len(k_segments), -1, tiles.keys), jnp.uint32)
    valid, shown = q[:, LOW] <= q[:, HIGH], k_segments.reshape(k.shape) != HIDDEN
    segments = [
        jax.lax.bitcast_convert_type(q[:, i], jnp.uint32) for i in (SEGMENT, SECOND)
    ]  # so ids rise: -1 ends rows
    least = lambda x, real: jnp.where(real, x, x.dtype.type(jnp.iinfo(x.dtype).max)).min(-1)
    most = lambda x, real: jnp.where(real, x, x.dtype.type(jnp.iinfo(x.dtype).min)).max(-1)
    a, b = (lambda x: x[:, :, None]), (lambda x: x[:, None, :])  # a tile of queries, a tile of keys
    k_least, k_most = b(least(k, shown)), b(most(k, shown))
    first = jnp.arange(k.shape[1], dtype=jnp.int32)[None, None] * tiles.keys
    last = first + tiles.keys - 1
    meet = (last >= a(least(q[:, LOW], valid))) & (first <= a(most(q[:, HIGH], valid)))
    share = [(a(least(s, valid)) <= k_most) & (k_least <= a(most(s, valid))) for s in segments]
    meet &= (share[0] | share[1]) & a(valid.any(-1)) & b(shown.any(-1))
    one = (a(least(segments[0], valid)) == k_most) & (k_least == a(most(segments[0], valid))) & (k_least == k_most)
    whole = meet & one & b(shown.all(-1))
    whole &= (first >= a(most(q[:, LOW], valid))) & (last <= a(least(q[:, HIGH], valid)))
    if of_keys:
        meet, whole = meet.swapaxes(1, 2), whole.swapaxes(1, 2)
    return _spans(meet, whole)


def _spans(meet: Bool[Array, "B tiles n"], whole: Bool[Array, "B tiles n"]) -> Int[Array, "B tiles 4"]:
    """Give the first and the end of what meets, and those of the first tiles that are whole one after another."""
    n = meet.shape[2]
    at = jnp.arange(n, dtype=jnp.int32)
    begin = jnp.where(meet, at, n).min(-1)
    end = jnp.where(meet, at + 1, 0).max(-1)
    whole_from = jnp.minimum(jnp.where(whole, at, n).min(-1), end)
    whole_to = jnp.minimum(jnp.where(~whole & (at >= whole_from[..., None]), at, n).min(-1), end)
    return jnp.stack([jnp.minimum(begin, end), whole_from, whole_to, end], -1)
