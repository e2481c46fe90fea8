"""Learning from a teacher's distributions: on given texts, and on own samples."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np

from fdel import models
from fdel.recipe.methods.method import Generating, Method, Objective, Text, texts
from fdel.recipe.methods.samples import Sampling, weighed
from fdel.recipe.parse import key
from fdel.train import losses


@dataclass(frozen=True)
class Distillation(Text):
    """Keys of trainer_type distillation."""

    alpha: float = key(0.9, "the teacher's share of the loss")
    temperature: float = key(2.0, "of both models' distributions")
    hidden_state_loss_weight: float = key(0.0, "weight of the squared distance of hidden states")
    hidden_state_layers: tuple[int, ...] | None = key(None,
        "which: 0 enters layer 0, i leaves layer i - 1, -1 is the last, the default",
        needs="hidden_state_loss_weight")  # fmt: skip
    attention_loss_weight: float = key(0.0, "weight of the squared distance of attention weights; takes 4 bytes * "
        "heads * max_length^2 for each row and layer that is matched, in both models")  # fmt: skip
    attention_layers: tuple[int, ...] | None = key(None,
        "which, among the layers that attend; -1 is the last; default: all", needs="attention_loss_weight")  # fmt: skip
    attention_normalize: bool = key(False, "divide attention weights by their sum",
        refuse="a softmax sums to 1 already; remove it")  # fmt: skip


def divergence(k: Any) -> Callable:
    """Choose the divergence from the teacher, by beta and temperature. Out of range: ValueError."""
    if not 0 <= k.beta <= 1:
        raise ValueError(f"beta={k.beta}; expected a number from 0 (forward KL) to 1 (reverse KL)")
    return partial(losses.generalized_jsd, beta=k.beta, temperature=k.temperature)


def distillation(k: Distillation, model: models.Model, *, remat: str | None, teacher: models.Model) -> Objective:
    """Compose the loss against the teacher's soft targets, hidden states and attention weights."""
    weight, width = k.hidden_state_loss_weight, teacher.cfg.embed
    if weight and model.cfg.embed != width:
        raise ValueError(
            f"hidden_state_loss_weight={weight}: the student's hidden states have {model.cfg.embed} channels and the "
            f"teacher's {width}; set it to 0, or learn a projection with losses.distill"
        )
    layers = (-1,) if k.hidden_state_layers is None else k.hidden_state_layers
    terms = losses.Terms(
        weight, layers, attention_weight=k.attention_loss_weight, attention_layers=k.attention_layers, **k.routers
    )
    target = partial(losses.soft_targets, temperature=k.temperature)
    return Objective(losses.distill(*model[:2], *teacher[:2], target=target, alpha=k.alpha, terms=terms, remat=remat))


# ---- on own samples ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gkd(Text, Sampling):
    """Keys of trainer_type gkd (arXiv:2306.13649)."""

    num_generations: int = key(1, "samples of each prompt", least=1)
    beta: float = key(0.5, "from forward (0) to reverse KL (1)")
    temperature: float = key(1.0, "of both models' distributions, and of sampling", positive=True)
    lmbda: float = key(0.0, "share of the steps that learn the student's own samples; the others learn rows of the data",
        least=0, most=1)  # fmt: skip
    seq_kd: bool = key(False, "the teacher writes the texts of these others, for the prompts of the data; it is then in "
        "memory twice")  # fmt: skip


def gkd_divergence(k: Gkd) -> Callable:
    """Choose the divergence; ValueError for keys of sampling where no step samples, or not every one."""
    of_samples = {f.name for f in fields(Sampling)} - {f.name for f in fields(Generating)} - {"temperature"}
    given = [f.name for f in fields(k) if f.name in of_samples and getattr(k, f.name) != f.default]
    if k.seq_kd and k.lmbda == 1:
        raise ValueError("seq_kd: with lmbda=1 all steps learn the student's samples; lower it, or remove seq_kd")
    if given and not (k.lmbda or k.seq_kd):
        raise ValueError(f"{given[0]}: nothing is sampled with lmbda=0; set lmbda, or remove it")
    if k.rollout_ahead and k.lmbda < 1 and not k.seq_kd:
        raise ValueError(f"rollout_ahead={k.rollout_ahead} with lmbda={k.lmbda}: only some steps sample; set it to 0")
    return divergence(k)


@dataclass(frozen=True)
class OnPolicyDistillation(Sampling):
    """Keys of trainer_type on_policy_distillation: the student learns the teacher's distributions on its own samples."""

    num_generations: int = key(1, "samples of each prompt", least=1)
    beta: float = key(1.0, "from forward (0) to reverse KL (1)")


def distil(
    k: Gkd | OnPolicyDistillation, model: models.Model, *, remat: str | None, teacher: models.Model
) -> Objective:
    """Compose the loss: the divergence from the teacher at every token that is learnt."""
    terms, target = losses.Terms(**k.routers), divergence(k)
    return Objective(losses.distill(*model[:2], *teacher[:2], target=target, alpha=1.0, terms=terms, remat=remat))


unrewarded = weighed(lambda k, samples, rewards: (np.zeros(len(samples)), None))
METHODS = (
    Method(
        "distillation", Distillation, 2e-5, distillation, data=texts, column="text", teacher=True, keeps_dropout=True
    ),
    Method(
        "on_policy_distillation",
        OnPolicyDistillation,
        2e-5,
        distil,
        divergence,
        lambda k: {"kind": "prompt"},
        teacher=True,
        samples=unrewarded,
    ),
    Method(
        "gkd",
        Gkd,
        2e-5,
        distil,
        gkd_divergence,
        texts,
        column="text",
        teacher=True,
        samples=replace(
            unrewarded,
            share=lambda k: 1.0 if k.seq_kd else k.lmbda,
            writes=lambda k: k.lmbda if k.seq_kd else None,
        ),
    ),
)
