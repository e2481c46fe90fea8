"""Losses: pure functions of token statistics, log-probabilities and masks that return sums, never means.

For a training step, each comes with its model: `sft`, `distill`, `reward`, ... build the `loss(params, batch)` of
`train.grads`; `likelihoods` with `dpo_objective`, ... and `embedding` build the two halves of `train.gradcache`.
"""

from fdel.models.classifier import spec as reward_spec
from fdel.train.losses.distill import (
    Terms,
    attention_mse,
    distill,
    generalized_jsd,
    hidden_mse,
    soft_targets,
    sparse_distill,
    sparse_kl,
    top_k_kl,
)
from fdel.train.losses.embedding import embed, embedding, info_nce, last_token, matryoshka, mean_token, triplet
from fdel.train.losses.head import logits_sum, token_stats, token_sum
from fdel.train.losses.likelihoods import (
    completion_sums,
    likelihoods,
    on_adapters,
    with_balance,
    with_mean_lengths,
)
from fdel.train.losses.model import rows, run, score, shift
from fdel.train.losses.pairs import cpo_objective, dpo_objective, orpo_objective
from fdel.train.losses.preference import cpo, dpo, ld_weights, log_odds, orpo
from fdel.train.losses.reward import bradley_terry, process_reward, process_row, reward, score_rows
from fdel.train.losses.sft import dft, nll, sft
from fdel.train.losses.stats import IGNORE, TokenStats, from_logits
from fdel.train.losses.unpaired import (
    apo_zero_unpaired,
    bco,
    bco_objective,
    kto,
    kto_kl,
    kto_objective,
    running_mean,
    track_rewards,
    udm_weights,
)

__all__ = [
    "IGNORE", "Terms", "TokenStats", "apo_zero_unpaired", "attention_mse", "bco", "bco_objective", "bradley_terry",
    "completion_sums", "cpo", "cpo_objective", "dft", "distill", "dpo", "dpo_objective", "embed", "embedding",
    "from_logits", "generalized_jsd", "hidden_mse", "info_nce", "kto", "kto_kl", "kto_objective", "last_token",
    "ld_weights", "likelihoods", "log_odds", "logits_sum", "matryoshka", "mean_token", "nll", "on_adapters", "orpo",
    "orpo_objective", "process_reward", "process_row", "reward", "reward_spec", "rows", "run", "running_mean", "score",
    "score_rows", "sft", "shift", "soft_targets", "sparse_distill", "sparse_kl", "token_stats", "token_sum", "top_k_kl",
    "track_rewards", "triplet", "udm_weights", "with_balance", "with_mean_lengths",
]  # fmt: skip
