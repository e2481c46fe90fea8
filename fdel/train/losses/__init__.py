"""Losses: pure functions of token statistics, log-probabilities and masks that return sums, never means.

For a training step, each comes with its model: `sft`, `distill`, `reward`, ... build the `loss(params, batch, given)` of
`train.grads`; `completion_logps` with `dpo_objective`, ... and `embedding` build the two halves of `train.gradcache`.
Formulas alone are in `preference`, `unpaired` and `policy`, statistics of tokens in `stats` and `head`, batches in
`forward`; for learning from own samples see `sampled`.
"""

from . import completions, forward, head, penalties, policy, preference, sampled, stats, unpaired
from .classes import classification, score_rows, token_classification
from .completions import completion_logps, on_adapters
from .contrastive import (
    embedding,
    first_token,
    info_nce,
    last_token,
    matryoshka,
    mean_token,
    sentence_embeddings,
    triplet,
)
from .discrete_diffusion import diffusion
from .distillation import Terms, distill, generalized_jsd, soft_targets, sparse_distill
from .head import token_stats, token_sum
from .masked import masked_lm
from .on_policy import prefix_weighted, sampled_distill, taught_gradient
from .online import a2po_objective, nash_md_gradient, online_dpo_objective, tpo_objective, xpo_objective
from .pairs import cpo_objective, dpo_objective, orpo_objective
from .policy import Policy
from .reward_model import process_reward, reward
from .sampled import adaptive_entropy, policy_gradient, policy_objective, policy_outputs, start_entropy, token_logps
from .self_distillation import self_distill
from .spans import question_answering
from .supervised import dft, nll, sft
from .unpaired import bco_objective, kto_objective
from .value import ppo, token_values

__all__ = [
    "sft", "nll", "dft", "distill", "sparse_distill", "Terms", "generalized_jsd", "soft_targets",
    "classification", "token_classification", "question_answering", "masked_lm",
    "diffusion", "reward", "process_reward", "score_rows", "embedding", "info_nce", "triplet", "matryoshka",
    "sentence_embeddings", "first_token", "last_token", "mean_token", "completion_logps", "on_adapters", "dpo_objective",
    "cpo_objective", "orpo_objective", "kto_objective", "bco_objective", "token_stats", "token_sum",
    "Policy", "policy_gradient", "policy_outputs", "policy_objective", "token_logps", "ppo", "token_values",
    "online_dpo_objective", "xpo_objective", "nash_md_gradient", "a2po_objective", "tpo_objective", "sampled_distill",
    "self_distill", "taught_gradient", "prefix_weighted",
    "adaptive_entropy", "start_entropy",
    "completions", "forward", "head", "penalties", "policy", "preference", "sampled", "stats", "unpaired",
]  # fmt: skip
