"""Reward models: a linear head on the hidden states, learnt from pairs (Bradley-Terry) or from labelled steps.

Parameters are {"model": the family's, without its output projection, "sequence": its head for rewards, or "token": that for
steps}; see `models.heads`.
"""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import jax.numpy as jnp
from jax.nn import log_sigmoid
from jaxtyping import Array, Float

from fdel.train.given import NOTHING, Given
from fdel.train.losses.classes import Sums, score_rows, token_classification
from fdel.train.losses.forward import Batch
from fdel.train.losses.head import CHUNK
from fdel.train.losses.stats import IGNORE, check_range


def bradley_terry(
    chosen: Float[Array, " B"],
    rejected: Float[Array, " B"],
    margin: Float[Array, " B"] | float = 0.0,
    *,
    center_rewards_coefficient: float = 0.0,
) -> Float[Array, " B"]:
    """Compute -log sigmoid(chosen - rejected - margin) + coefficient * (chosen + rejected)^2 per pair of rewards.

    The margin says by how much the chosen one is better (arXiv:2307.09288); the square keeps rewards around 0
    (arXiv:2312.09244).
    >>> bradley_terry(jnp.array([1.0]), jnp.array([0.0]))
    Array([0.3132617], dtype=float32)
    """
    check_range(center_rewards_coefficient=center_rewards_coefficient)
    return -log_sigmoid(chosen - rejected - margin) + center_rewards_coefficient * (chosen + rejected) ** 2


def reward(
    family: ModuleType, cfg: Any, *, center_rewards_coefficient: float = 0.0, remat: str | None = None
) -> Callable:
    """Build `loss(params, batch, given) -> (sum, sums)` for `train.grads`: `bradley_terry` of pairs, int tokens [B 2 T].

    The batch may hold "margin", float[B]. A pair with an empty sequence counts for nothing. Of TRL's metrics, the smallest
    and the largest reward are missing: they are no sums.
    """
    check_range(center_rewards_coefficient=center_rewards_coefficient)
    scores = score_rows(family, cfg, remat=remat)

    def loss(params: Any, batch: Batch, given: Given = NOTHING) -> tuple[Array, Sums]:
        r = scores(params, batch)[..., 0]
        weights = (batch["lengths"] > 0).all(1).astype(r.dtype) if "lengths" in batch else jnp.ones(len(r), r.dtype)
        chosen, rejected = r[:, 0], r[:, 1]
        margin = batch["margin"] if "margin" in batch else 0.0
        losses = bradley_terry(chosen, rejected, margin, center_rewards_coefficient=center_rewards_coefficient)
        total = lambda x: (weights * x).sum()
        metrics = {"accuracy": chosen > rejected, "margin": chosen - rejected, "mean_reward": (chosen + rejected) / 2}
        return total(losses), {"weight": weights.sum()} | {k: total(v) for k, v in metrics.items()}

    return loss


def process_reward(family: ModuleType, cfg: Any, *, chunk: int = CHUNK, remat: str | None = None) -> Callable:
    """Build `loss(params, batch, given) -> (sum, sums)` for `train.grads`: the cross-entropy of the class of each step.

    The batch holds "labels", as tokens: a step's class at the last token of its separator (see `process_row`), negative
    elsewhere. The score at a token judges the step that ends there (arXiv:2211.14275, 2305.20050).
    """
    return token_classification(family, cfg, chunk=chunk, remat=remat)


def process_row(
    prompt: Sequence[int],
    steps: Sequence[Sequence[int]],
    labels: Sequence[int],
    separator: Sequence[int],
    *,
    last_only: bool = False,
) -> tuple[list[int], list[int]]:
    """Join a prompt and its steps to (tokens, labels); each step's label stands at the end of the separator after it.

    With `last_only` only the last step's does. All are token ids. Unequal numbers of steps and labels, or an empty
    separator, are a ValueError.
    """
    if not separator:
        raise ValueError("the separator is empty; expected the token ids that end a step, where its label stands")
    tokens, marks = list(prompt), [IGNORE] * len(prompt)
    for step, label in zip(steps, labels, strict=True):
        tokens += [*step, *separator]
        marks += [IGNORE] * (len(step) + len(separator) - 1) + [label]
    if last_only:
        marks[:-1] = [IGNORE] * (len(marks) - 1)
    return tokens, marks
