"""Preferences over own samples: online DPO compares two of the policy, XPO and Nash-MD one with another model's.

A*PO compares a sample's reward with what the reference's samples of its prompt tell of the best that can be had.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from fdel import models
from fdel.recipe.methods.method import Method, Objective, Samples, balanced
from fdel.recipe.methods.samples import Scored, check_rewards
from fdel.recipe.parse import key
from fdel.train import losses
from fdel.train.rollout import Rewards, Sample, advantages


@dataclass(frozen=True)
class Compared(Scored):
    """Keys of the types that compare two samples of a prompt."""

    num_generations: int = key(2, "samples of each prompt, which are compared", least=2, most=2)
    temperature: float = key(0.9, "of sampling", positive=True)
    beta: float = key(0.1, "strength of the preference", positive=True)
    missing_eos_penalty: float | None = key(
        None, "taken off the reward of a sample that did not end by itself", least=0
    )


@dataclass(frozen=True)
class OnlineDpo(Compared):
    """Keys of trainer_type online_dpo (arXiv:2402.04792)."""

    loss_type: str = key("sigmoid", "variant of the loss, as in TRL", choices=("sigmoid", "ipo"))


@dataclass(frozen=True)
class Xpo(OnlineDpo):
    """Keys of trainer_type xpo (arXiv:2405.21046)."""

    alpha: float = key(1e-5, "weight of the log-probability of the reference's samples", least=0)


@dataclass(frozen=True)
class NashMd(Compared):
    """Keys of trainer_type nash_md (arXiv:2312.00886)."""

    mixture_coef: float = key(0.5, "share of the reference in the mixture that draws the other sample", least=0, most=1)


@dataclass(frozen=True)
class A2po(Scored):
    """Keys of trainer_type a2po (arXiv:2505.20686); defaults are TRL's."""

    num_generations: int = key(1, "samples of each prompt", least=1)
    num_value_samples: int = key(8, "samples of the reference of each prompt, by which its value is estimated, in each "
        "step anew", least=1)  # fmt: skip
    beta1: float = key(0.5, "temperature of that estimate", positive=True)
    beta2: float = key(1e-3, "of the regression", positive=True)
    filter_all_incorrect: bool = key(True, "leave out prompts whose samples of the reference have rewards of 0 alone")


READ = ("tokens", "mask", "lengths", "places", *losses.forward.SEEN)  # columns of whole completions


def compared(k: Compared, samples: Sequence[Sample], rewards: Rewards) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Give the scores of the first and of the second samples, and which pairs are learnt: both have a score."""
    ended = np.array([s.finish == "stop" for s in samples])
    scores = rewards.total - np.where(ended, 0.0, k.missing_eos_penalty or 0.0)
    known = ~np.isnan(scores) & (ended | (not k.mask_truncated_completions))
    return scores[::2], scores[1::2], known[::2] & known[1::2]


def pairs(k: Compared, samples: Sequence[Sample], rewards: Rewards, put: Callable) -> dict[str, Any]:
    """Make rows of two samples, [B 2 T], and tell which of them is better; the first of equal ones."""
    first, second, known = compared(k, samples, rewards)
    rows = put(samples, np.zeros(len(samples)), learn=np.repeat(known, 2))
    two = lambda x: x.reshape(-1, 2, *x.shape[1:])
    paired = {name: jax.tree.map(two, rows[name]) for name in READ if name in rows}
    better = np.pad(first >= second, (0, len(paired["tokens"]) - len(first)))
    return paired | {"better": better}


def against_mixture(k: Compared, samples: Sequence[Sample], rewards: Rewards, put: Callable) -> dict[str, Any]:
    """Learn the policy's samples by how likely they are preferred to the mixture's: sigmoid of the scores' difference."""
    first, second, known = compared(k, samples, rewards)
    preferred = 1 / (1 + np.exp(np.where(known, second - first, 0.0)))
    return put(samples[::2], preferred - 0.5, learn=known, rows=len(known))


def valued(k: A2po, samples: Sequence[Sample], rewards: Rewards, put: Callable) -> dict[str, Any]:
    """Learn the policy's samples by their rewards less the prompt's value, of which the reference's samples tell."""
    n, m = k.num_generations, k.num_value_samples
    total = rewards.total.reshape(-1, n + m)
    value = advantages.optimal_value(total[:, n:].reshape(-1), m, k.beta1).reshape(-1, m)[:, :1]
    gained = (total[:, :n] - value).reshape(-1)
    hopeless = k.filter_all_incorrect & (np.nan_to_num(total[:, n:]) == 0).all(1)
    mine = [s for i, s in enumerate(samples) if i % (n + m) < n]
    ended = np.array([s.finish == "stop" for s in mine]) | (not k.mask_truncated_completions)
    rows = put(mine, np.zeros(len(mine)), learn=ended & ~np.isnan(gained) & ~np.repeat(hopeless, n))
    advantage = np.pad(np.nan_to_num(gained), (0, len(rows["tokens"]) - len(mine))).astype(np.float32)
    return {name: rows[name] for name in READ if name in rows} | {"advantage": advantage}


def regression(k: A2po, model: models.Model, *, remat: str | None) -> Objective:
    """Compose the loss of A*PO."""
    rows = losses.completion_logps(*model[:2], router=bool(k.routers), remat=remat)
    total = losses.a2po_objective(beta2=k.beta2)
    return Objective(rows, balanced(k, total))


def preference(k: OnlineDpo, model: models.Model, *, remat: str | None) -> Objective:
    """Compose the loss of pairs."""
    rows = losses.completion_logps(*model[:2], router=bool(k.routers), remat=remat)
    total = losses.xpo_objective(beta=k.beta, alpha=getattr(k, "alpha", 0.0), loss_type=k.loss_type)
    return Objective(rows, balanced(k, total))


def nash_md(k: NashMd, model: models.Model, *, remat: str | None) -> Objective:
    """Compose the loss of single samples."""
    return Objective(losses.nash_md_gradient(*model[:2], beta=k.beta, remat=remat, **k.routers))


def declare(name: str, keys: type, objective: Callable[..., Objective], samples: Samples, rate: float = 5e-7) -> Method:
    """Declare a type: rewards are needed, and a reference."""
    data = lambda k: {"kind": "prompt"}
    return Method(name, keys, rate, objective, check_rewards, data, samples=samples, reference=True)


METHODS = (
    declare("online_dpo", OnlineDpo, preference, Samples(pairs, each=2)),
    declare("xpo", Xpo, preference, Samples(pairs, each=2, rival=lambda k: 1.0)),
    declare("nash_md", NashMd, nash_md, Samples(against_mixture, each=2, rival=lambda k: k.mixture_coef)),
    declare(
        "a2po",
        A2po,
        regression,
        Samples(valued, rival=lambda k: 1.0, sides=lambda k: (k.num_generations, k.num_value_samples)),
        1e-6,
    ),
)
