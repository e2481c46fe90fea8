"""Penalties on tokens that stand before a place already, so that a loss sees the distribution that a sampler drew from.

The sampler's are in `serve.engine.sampling`. Presence and frequency penalties are not here: they count what was written
since the sampler was last asked, and in a sample of several turns no batch tells where that was.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fdel.ops.batch import Packed
from fdel.ops.shard import row_lookup

Change = tuple[Callable[..., Array], tuple[Any, ...], tuple[Any, ...]]


def repetition(
    penalty: float, tokens: Int[Array, "R T"], packed: Packed, places: Int[Array, "R K"], vocab: int
) -> Change:
    """Give the `change`, `data` and `beside` of `token_stats` that penalise what a place's sequence has up to it.

    Positive logits of such tokens are divided by `penalty`, others multiplied (arXiv:1909.05858, as transformers and vLLM:
    prompt and output alike). A sample that shares its prompt's segment (`Packed.prefix_ids`) has it before its own tokens.
    Rows of one sequence need int32 [R V]; others a mask of each chunk's logits, made of R * chunk * T writes.
    """
    at = jnp.minimum(places, tokens.shape[1] - 1)
    if packed.single:
        return partial(_in_row, penalty), (at,), (row_lookup(partial(_first, vocab), tokens),)
    prefixes = jnp.full_like(packed.segment_ids, -2) if packed.prefix_ids is None else packed.prefix_ids
    take = lambda x, at: jnp.take_along_axis(x, at, 1)
    data = at, *(row_lookup(take, x, at) for x in (packed.segment_ids, prefixes))
    return partial(_in_segments, penalty), data, (tokens, packed.segment_ids)


def penalised(z: Float[Array, "... V"], seen: Bool[Array, "... V"], penalty: float) -> Float[Array, "... V"]:
    """Divide positive logits of tokens that were seen by the penalty, and multiply others.

    That commutes with a division by a temperature, which the head has done already.
    >>> penalised(jnp.array([2.0, -2.0, 1.0]), jnp.array([True, True, False]), 2.0)
    Array([ 1., -4.,  1.], dtype=float32)
    """
    return jnp.where(seen, jnp.where(z > 0, z / penalty, z * penalty), z)


def _first(vocab: int, tokens: Array) -> Int[Array, "R V"]:
    """Find where each token stands first in a row; T where it does not."""
    r, t = tokens.shape
    return jnp.full((r, vocab), t, jnp.int32).at[jnp.arange(r)[:, None], tokens].min(jnp.arange(t), mode="drop")


def _in_row(penalty: float, z: Array, at: Array, first: Array) -> Array:
    return penalised(z, first[:, None] <= at[..., None], penalty)


def _in_segments(
    penalty: float, z: Array, at: Array, segment: Array, prefix: Array, tokens: Array, segments: Array
) -> Array:
    def find(at: Array, segment: Array, prefix: Array, tokens: Array, segments: Array) -> Array:
        here = segments[:, None]
        mine = (jnp.arange(tokens.shape[1]) <= at[..., None]) & (
            (here == segment[..., None]) | (here == prefix[..., None])
        )
        row, place = jnp.arange(len(at))[:, None, None], jnp.arange(at.shape[1])[:, None]
        ids = jnp.where(mine, tokens[:, None], z.shape[-1])
        return jnp.zeros(z.shape, bool).at[row, place, ids].set(True, mode="drop")

    return penalised(z, row_lookup(find, at, segment, prefix, tokens, segments), penalty)
