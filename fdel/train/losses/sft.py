"""Supervised fine-tuning and pre-training: the negative log-likelihood of the next token."""

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fdel import ops
from fdel.train.losses.head import CHUNK, token_sum
from fdel.train.losses.stats import IGNORE, TokenStats


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


def nll(stats: TokenStats, weights: Float[Array, "..."]) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Sum -weights * log p[label] over tokens; with the sums of weights, entropy and correct guesses."""
    total = lambda x: (weights * x).sum()
    sums = {"entropy": total(stats.entropy), "mean_token_accuracy": total(stats.top1)}
    return -total(stats.logp), {"weight": weights.sum(), **sums}


def sft(family: ModuleType, cfg: Any, *, chunk: int = CHUNK, **options: Any) -> Callable:
    """Build `loss(params, batch) -> (sum, sums)` for `train.grads`, the next token's `nll` on a model family.

    batch is a dict: "tokens" int[B T]; "packed" ops.Packed, if absent every row is one sequence; "mask" bool[B T] of
    the tokens to learn (see `shift`), if absent all. `options` go to `family.hidden` (remat="dots_saveable", ...).
    """

    def loss(params: Any, batch: Mapping[str, Any]) -> tuple[Array, dict[str, Array]]:
        tokens = batch["tokens"]
        packed = batch["packed"] if "packed" in batch else ops.packed(tokens)
        labels = shift(tokens, packed.segment_ids, batch.get("mask"))
        x, _ = family.hidden(params, tokens, cfg, packed, **options)
        return token_sum(nll, x, family.head(params, cfg), labels, (labels >= 0).astype(jnp.float32), chunk=chunk)

    return loss
