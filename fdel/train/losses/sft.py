"""Supervised fine-tuning and pre-training: the negative log-likelihood of the next token."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from fdel.train.losses.head import CHUNK, token_sum
from fdel.train.losses.model import Batch, rows
from fdel.train.losses.stats import TokenStats


def nll(stats: TokenStats, weights: Float[Array, "..."]) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Sum -weights * log p[label] over tokens; with the sums of weights, entropy and correct guesses."""
    total = lambda x: (weights * x).sum()
    sums = {"entropy": total(stats.entropy), "mean_token_accuracy": total(stats.top1)}
    return -total(stats.logp), {"weight": weights.sum(), **sums}


def sft(family: ModuleType, cfg: Any, *, chunk: int = CHUNK, **options: Any) -> Callable:
    """Build `loss(params, batch) -> (sum, sums)` for `train.grads`, the next token's `nll` on a model family.

    For the batch see `losses.model`. `options` go to `family.hidden` (remat="dots_saveable", ...).
    """

    def loss(params: Any, batch: Batch) -> tuple[Array, dict[str, Array]]:
        tokens, packed, labels = rows(batch)
        x, _ = family.hidden(params, tokens, cfg, packed, **options)
        return token_sum(nll, x, family.head(params, cfg), labels, (labels >= 0).astype(jnp.float32), chunk=chunk)

    return loss
