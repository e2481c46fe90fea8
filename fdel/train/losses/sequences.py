"""Sums over the sequences of packed rows, per token: what belongs to a sequence stands at each of its tokens."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

PerToken = Float[Array, "R T"]
Segments = Int[Array, "R T"] | None  # rising along a row, as in `ops.Packed`; None: each row is one sequence


def starts(segments: Segments, shape: tuple[int, ...]) -> Bool[Array, "R T"]:
    """Find the first token of each sequence.
    >>> starts(jnp.array([[0, 0, 1]]), (1, 3))
    Array([[ True, False,  True]], dtype=bool)
    """
    if segments is None:
        return jnp.broadcast_to(jnp.arange(shape[-1]) == 0, shape)
    return jnp.diff(segments, prepend=segments[:, :1] - 1) != 0


def sequence_sum(x: PerToken, segments: Segments) -> PerToken:
    """Sum x over each token's sequence.
    >>> sequence_sum(jnp.array([[1.0, 2.0, 3.0]]), jnp.array([[0, 0, 1]]))
    Array([[3., 3., 3.]], dtype=float32)
    """
    if segments is None:
        return jnp.broadcast_to(x.sum(-1, keepdims=True), x.shape)
    index = jnp.cumsum(starts(segments, x.shape), -1) - 1
    one = lambda x, i: jax.ops.segment_sum(x, i, len(x), indices_are_sorted=True)[i]
    return jax.vmap(one)(x, index)


def sequence_mean(x: PerToken, mask: PerToken, segments: Segments) -> PerToken:
    """Average x over the tokens of each sequence where mask is 1; 0 if there are none."""
    return sequence_sum(jnp.where(mask > 0, x, 0), segments) / jnp.maximum(sequence_sum(mask, segments), 1)
