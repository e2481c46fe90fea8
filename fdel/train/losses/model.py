"""From a batch to what losses read: the model's hidden states, the labels, and the statistics of every token.

A batch is a dict of arrays with the rows in front, so that `accumulate` can divide it. Its keys:

    tokens  int[B T], or int[B 2 T] for pairs: [:, 0] the chosen and [:, 1] the rejected sequence
    mask    bool, as tokens: the tokens to be learnt (the completion's); absent: all of them
    lengths int, as tokens without T: the real tokens of each row, the rest is padding at its end; absent: all
    packed  ops.Packed for tokens [B T] with several sequences in a row; it replaces `lengths`
"""

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fdel import ops
from fdel.train.losses.head import CHUNK, token_stats
from fdel.train.losses.stats import IGNORE, TokenStats

Batch = Mapping[str, Any]


def shift(
    tokens: Int[Array, "B T"], segment_ids: Int[Array, "B T"], mask: Bool[Array, "B T"] | None = None
) -> Int[Array, "B T"]:
    """Label every token with the next one of its segment; IGNORE at the last token of a segment and where id < 0.

    `mask` tells which tokens are to be learnt, all if None: the completion's, or the assistant's.
    """
    following = lambda x, last: jnp.pad(x[:, 1:], ((0, 0), (0, 1)), constant_values=last)
    learn = (following(segment_ids, -1) == segment_ids) & (segment_ids >= 0)
    if mask is not None:
        learn &= following(mask, 0) != 0
    return jnp.where(learn, following(tokens, 0), IGNORE)


def rows(batch: Batch) -> tuple[Int[Array, "R T"], ops.Packed, Int[Array, "R T"]]:
    """Flatten a batch's leading axes into rows: (tokens, what each may attend to, labels as from `shift`)."""
    flat = lambda x, rank: x.reshape(-1, *x.shape[x.ndim - rank :])
    tokens = flat(batch["tokens"], 1)
    lengths = flat(batch["lengths"], 0) if "lengths" in batch else None
    packed = batch["packed"] if "packed" in batch else ops.packed(tokens, lengths)
    mask = flat(batch["mask"], 1) if "mask" in batch else None
    return tokens, packed, shift(tokens, packed.segment_ids, mask)


def score(
    family: ModuleType, cfg: Any, *, chunk: int = CHUNK, **options: Any
) -> Callable[[Any, Batch], tuple[TokenStats, Float[Array, "... T"]]]:
    """Build `score(params, batch)` -> (the statistics of every token to be learnt, its weight 1 or 0), as batch's tokens.

    Place t holds what the model says there of token t + 1; statistics are 0 where the weight is. `options` go to
    `family.hidden` (remat="dots_saveable", ...).
    """

    def scored(params: Any, batch: Batch) -> tuple[TokenStats, Array]:
        tokens, packed, labels = rows(batch)
        x, _ = family.hidden(params, tokens, cfg, packed, **options)
        stats = token_stats(x, family.head(params, cfg), labels, chunk=chunk)
        back = lambda a: a.reshape(batch["tokens"].shape)
        return jax.tree.map(back, stats), back(labels >= 0).astype(jnp.float32)

    return scored
