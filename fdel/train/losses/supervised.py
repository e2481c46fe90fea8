"""Supervised fine-tuning and pre-training: the negative log-likelihood of the next token, and its variants.

What is learnt is the batch's mask: the completions' tokens, the assistant's, or all where it is absent.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fdel.train.given import NOTHING, Given
from fdel.train.losses.forward import Batch, forward_pass, next_tokens, router_terms, rows
from fdel.train.losses.head import CHUNK, token_sum
from fdel.train.losses.stats import TokenStats, check_call, check_range

Sums = dict[str, Array]


def nll(
    stats: TokenStats, weights: Float[Array, "..."], *, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> tuple[Float[Array, ""], Sums]:
    """Sum -weights * log p[label] over tokens; with the sums of weights, entropy and correct guesses.

    `label_smoothing` is the target's share that is spread evenly over the vocabulary (arXiv:1512.00567). `z_loss` times
    (log sum_v exp z)^2 is added, which keeps logits from drifting (arXiv:2204.02311), and becomes a metric.
    >>> stats = losses.stats.from_logits(jnp.zeros((2, 4)), jnp.array([1, 3]))
    >>> losses.nll(stats, jnp.ones(2))[0]  # 2 log 4
    Array(2.7725887, dtype=float32)
    """
    check_range(0, 1, label_smoothing=label_smoothing)
    check_range(z_loss=z_loss)
    loss = -stats.logp
    if label_smoothing:
        loss = (1 - label_smoothing) * loss + label_smoothing * (stats.logsumexp - stats.mean_logit)
    extra = {}
    if z_loss:
        penalty = z_loss * stats.logsumexp**2
        loss, extra = loss + penalty, {"z_loss": (weights * penalty).sum()}
    return (weights * loss).sum(), _sums(stats, weights) | extra


def dft(stats: TokenStats, weights: Float[Array, "..."]) -> tuple[Float[Array, ""], Sums]:
    """Sum -weights * p * log p over the labels' p, the first one without gradient (arXiv:2508.05629); sums as `nll`.
    >>> losses.dft(losses.stats.from_logits(jnp.zeros((2, 4)), jnp.array([1, 3])), jnp.ones(2))[0]
    Array(0.6931472, dtype=float32)
    """
    return -(weights * jax.lax.stop_gradient(jnp.exp(stats.logp)) * stats.logp).sum(), _sums(stats, weights)


def _sums(stats: TokenStats, weights: Array) -> Sums:
    total = lambda x: (weights * x).sum()
    return {"weight": weights.sum(), "entropy": total(stats.entropy), "mean_token_accuracy": total(stats.top1)}


def sft(
    family: ModuleType,
    cfg: Any,
    *,
    loss: Callable = nll,
    router_aux_loss_coef: float = 0.0,
    router_z_loss_coef: float = 0.0,
    chunk: int = CHUNK,
    remat: str | None = None,
) -> Callable:
    """Build `loss(params, batch, given) -> (sum, sums)` for `train.grads`: `nll`, or another, of the next token.

    `loss` is a sum over tokens, as in `sft(family, cfg, loss=partial(nll, label_smoothing=0.1))` or `loss=dft`. For the
    batch and `remat` see `losses.forward`. `router_aux_loss_coef` times
    `ops.load_balancing` is added to each token of a mixture of experts, for each microbatch by itself as in transformers,
    and `router_z_loss_coef` times the router's z-loss (`router_terms`); a model without experts is then a ValueError.
    >>> losses.sft(llama, cfg)(weights, {"tokens": tokens}, {})[1]["weight"]  # 4 rows of 6 tokens predict 5 each
    Array(20., dtype=float32)
    """
    check_range(router_aux_loss_coef=router_aux_loss_coef, router_z_loss_coef=router_z_loss_coef)
    check_range(1, chunk=chunk)
    check_call(lambda x: loss(TokenStats(*[x] * len(TokenStats._fields)), x), (1,))
    next_tokens(family, cfg)
    forward = forward_pass(family, cfg, router=router_aux_loss_coef + router_z_loss_coef != 0, remat=remat)

    def next_token(params: Any, batch: Batch, given: Given = NOTHING) -> tuple[Array, Sums]:
        tokens, packed, labels = rows(batch)
        out = forward(params, tokens, packed)
        weights = (labels >= 0).astype(jnp.float32)
        total, sums = token_sum(loss, out.hidden, family.head(params, cfg), labels, weights, chunk=chunk)
        return router_terms(total, sums, out.balance, router_aux_loss_coef, router_z_loss_coef)

    return next_token
