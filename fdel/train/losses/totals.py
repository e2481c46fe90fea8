"""From the terms of tokens to the sums that a policy loss returns: of the loss, and of its metrics."""

from collections.abc import Collection
from typing import Any

import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array

from fdel.train.extremes import Extreme, among
from fdel.train.losses.sequences import PerToken, Tokens, sequence_mean, sequence_sum, starts

Sums = dict[str, Any]
# The least and the largest share of clipped tokens that a sequence has: TRL's names, and whose share it is.
EXTREMES = {"clip_ratio/low_min": ("clip_ratio/low_mean", False), "clip_ratio/high_max": ("clip_ratio/high_mean", True)}


def summed(
    t: Tokens, term: PerToken, metrics: Sums, average: str, length: int | None = None, by_sequence: Collection[str] = ()
) -> tuple[Array, Sums]:
    """Sum a loss and its metrics, each over what it is a mean of: those named `by_sequence` over sequences, else tokens.

    `average` says of what the loss is the mean: "tokens", "means" or "sums" of sequences, or "length", the sequences as if
    all had `length` tokens. Extremes among the metrics stay as they are.
    """
    lengths = sequence_sum(t.mask, t.segments)
    per_sequence = t.mask / jnp.maximum(lengths, 1)
    sequences = (starts(t.segments, t.mask.shape) & (lengths > 0)).sum(dtype=jnp.float32)
    tokens = t.mask.sum()
    weight = tokens if average == "tokens" else sequences
    weight = weight * float(length or 1) if average == "length" else weight
    over = lambda x, mask: jnp.where(mask > 0, x * mask, 0).sum()
    total = over(term, per_sequence if average == "means" else t.mask)
    pair = lambda k, x: (over(x, per_sequence), sequences) if k in by_sequence else (over(x, t.mask), tokens)
    sums = {k: x if isinstance(x, Extreme) else pair(k, stop_gradient(x)) for k, x in metrics.items()}
    for name, (mean, largest) in EXTREMES.items():
        if mean in metrics:
            share = stop_gradient(sequence_mean(metrics[mean].astype(jnp.float32), t.mask, t.segments))
            sums[name] = among(share, t.mask > 0, largest=largest)
    return total, {"weight": weight} | sums
