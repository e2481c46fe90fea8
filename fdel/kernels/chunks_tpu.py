"""What kernels for recurrences on TPUs share: chunks of tokens, sums of log decays, padding, and products.

A step of a grid takes a chunk of `CHUNK` tokens of some heads. What belongs to a token and a head alone is laid along a
chunk's tokens, as rows [numbers, tokens], the last two of which tell whether a token is one, and whether it begins a
sequence.

Log decays are summed within a chunk in two parts: multiples of 1 / UNIT, whose sums and differences are exact, and the
rest, whose sums stay below 1. So a difference of two sums has the digits of the decays between them, whatever came before.
A sequence begins with a decay of exp(-NOTHING), which is 0. In bfloat16 products are of bfloat16 with float32 sums, as
XLA:TPU multiplies float32 by default; decays and states are float32. In float32 all is.
"""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fdel.kernels.device import no_tpu
from fdel.ops.batch import Batch, Packed

LANES, CHUNK = 128, 128
NOTHING, UNIT = 1024.0, 64.0  # sums of CHUNK of NOTHING, in steps of 1 / UNIT, are exact in float32
NEVER = -1e30  # a log decay of nothing
VMEM = 48 * 2**20  # bytes that a program may use: of 64 MiB on v5p, 128 on v6e
NT, NN = (((1,), (1,)), ((), ())), (((1,), (0,)), ((), ()))  # axes of a product


def unsupported(batch: Batch, *inputs: Array) -> str | None:
    """Say why no such kernel can serve a call with this batch, and inputs that are multiplied, or None."""
    if why := no_tpu():
        return why
    if isinstance(batch, Packed) and (batch.key_segment_ids is not None or batch.prefix_ids is not None):
        return "it serves Packed batches without key_segment_ids and prefix_ids"
    if len(found := {x.dtype for x in inputs}) > 1 or not found <= {jnp.dtype("bfloat16"), jnp.dtype("float32")}:
        return f"inputs are all bfloat16 or all float32; found {', '.join(sorted(map(str, found)))}"
    return None


def padded(x: Float[Array, "B T ..."], n: int) -> Float[Array, "B T+n ..."]:
    """Add n tokens of zeros."""
    return jnp.pad(x, [(0, 0), (0, n), *[(0, 0)] * (x.ndim - 2)])


def flat(x: Float[Array, "B T N H"]) -> Float[Array, "B T NH"]:
    """Lay heads beside each other. Fewer tokens than a chunk are padded; a later chunk may end beyond the tokens."""
    return padded(x.reshape(*x.shape[:2], -1), max(0, CHUNK - x.shape[1]))


def tokens(batch: Packed, chunk: int = CHUNK) -> tuple[Bool[Array, "B T"], Bool[Array, "B T"]]:
    """Tell which tokens are no padding, and which begin a sequence, of whole chunks."""
    segments = jnp.pad(batch.segment_ids, ((0, 0), (0, -batch.segment_ids.shape[1] % chunk)), constant_values=-1)
    change = segments[:, 1:] != segments[:, :-1]
    return segments >= 0, jnp.pad(change, ((0, 0), (1, 0)), constant_values=True)


def cleared(x: Float[Array, "B T N"], valid: Bool[Array, "B T"]) -> Float[Array, "B T N"]:
    """Fill whole chunks, in float32; padding is 0."""
    return jnp.where(valid[..., None], padded(x.astype(jnp.float32), valid.shape[1] - x.shape[1]), 0)


def sums(g: Float[Array, "B T N"], starts: Bool[Array, "B T"]) -> tuple[Array, Array]:
    """Sum log decays over the tokens of a chunk up to each, in whole steps of 1 / UNIT and the rest."""
    high = jnp.maximum(jnp.round(g * UNIT) / UNIT, -NOTHING)
    low = jnp.where(high > -NOTHING, g - high, 0)
    high, low = jnp.where(starts[..., None], -NOTHING, high), jnp.where(starts[..., None], 0, low)
    total = lambda x: jnp.cumsum(x.reshape(len(x), -1, CHUNK, x.shape[-1]), 2).reshape(x.shape)
    return total(high), total(low)


def rows_of(
    numbers: list[Float[Array, "B T N"]], heads: int, valid: Bool[Array, "B T"], starts: Bool[Array, "B T"]
) -> tuple[Array, Array]:
    """Give which chunks have no padding, and the rows of each group of heads, [B groups numbers T], of whole tiles."""
    group = lambda x: x.reshape(*x.shape[:2], -1, heads).transpose(0, 2, 3, 1)
    parts = list(map(group, numbers))
    shared = jnp.stack([valid, starts], 1)[:, None].astype(jnp.float32)
    parts.append(jnp.broadcast_to(shared, (len(valid), parts[0].shape[1], *shared.shape[2:])))
    rows = jnp.concatenate(parts, 2)
    rows = jnp.pad(rows, ((0, 0), (0, 0), (0, -rows.shape[2] % 8), (0, 0)))
    return valid.reshape(-1, CHUNK).all(1).astype(jnp.int32), rows


def of_heads(
    numbers: Float[Array, "B groups numbers T"], kinds: int, heads: int
) -> Float[Array, "kinds B groups heads chunks C"]:
    """Cut rows that a backward pass gives: `heads` of each kind, and the rest of a tile."""
    numbers = numbers[:, :, : kinds * heads]
    return jnp.moveaxis(numbers.reshape(*numbers.shape[:2], kinds, heads, -1, CHUNK), 2, 0)


def of_tokens(x: Float[Array, "B groups heads chunks C"]) -> Float[Array, "B T N"]:
    """Lay numbers of heads as a batch's."""
    return jnp.moveaxis(x.reshape(len(x), x.shape[1] * x.shape[2], -1), 1, 2)


def decay_gradient(pairs: Array, first: Array, last: Array) -> Float[Array, "B groups heads chunks C"]:
    """Sum what log decays get: of pairs of tokens, of each token from the chunk's begin up to it, from it to the end."""
    before = jnp.pad(jnp.cumsum(last, -1)[..., :-1], [(0, 0)] * (last.ndim - 1) + [(1, 0)])
    return pairs + jnp.flip(jnp.cumsum(jnp.flip(first, -1), -1), -1) + before


def number(r: SimpleNamespace) -> Array:
    """Count a step's chunk among those of all rows; what asks under a condition finds it in r, as `program_id` cannot."""
    from jax.experimental import pallas as pl

    return r.number if hasattr(r, "number") else pl.program_id(0) * pl.num_programs(2) + pl.program_id(2)


def begin(r: SimpleNamespace, valid: Bool[Array, "C 1"], names: Iterable[str]) -> None:
    """Empty the state in the first chunk of a Packed row; write zeros over padding in the inputs of these names."""
    from jax.experimental import pallas as pl

    def empty() -> None:
        r.state[...] = jnp.zeros_like(r.state)

    if not hasattr(r, "slot"):
        pl.when(pl.program_id(2) == 0)(empty)

    @pl.when(r.whole[number(r)] == 0)
    def _() -> None:
        for name in names:
            x = getattr(r, name)
            x[...] = jnp.where(valid, x[...].astype(jnp.float32), 0).astype(x.dtype)


def decay_pairs(high: tuple[Array, Array], low: tuple[Array, Array]) -> tuple[Array, Array, Array]:
    """Give the decays from token j to token i [C C], from the start to i in all lanes [C C], from j to the end [1 C].

    The two sums of decays of each token, in a column and in a row.
    """
    (high_i, low_i), (high_j, low_j) = (
        [jnp.broadcast_to(x, (CHUNK, CHUNK)) for x in (high[0], low[0])],
        (high[1], low[1]),
    )
    i, j = places((CHUNK, CHUNK))
    pairs = jnp.exp(jnp.where(j <= i, (high_i - high_j) + (low_i - low_j), NEVER))
    return pairs, jnp.exp(high_i + low_i), jnp.exp((high_j[:, -1:] - high_j) + (low_j[:, -1:] - low_j))


def dot(a: Array, b: Array, axes: Any, dtype: Any) -> Array:
    """Multiply in dtype, with float32 sums."""
    precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
    return jax.lax.dot_general(
        a.astype(dtype), b.astype(dtype), axes, preferred_element_type=jnp.float32, precision=precision
    )


def places(shape: tuple[int, ...]) -> tuple[Array, Array]:
    """Give the rows and the lanes of an array."""
    row, lane = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    return row, lane
