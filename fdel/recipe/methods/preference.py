"""Preferences: pairs against a reference (DPO) or without one (CPO, SimPO and AlphaPO, ORPO), beside a completion to
imitate (TPO), and rated completions against a reference (KTO, BCO)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from fdel import models
from fdel.recipe.methods.method import Generating, Method, Objective, Synced, balanced
from fdel.recipe.parse import key
from fdel.train import losses


@dataclass(frozen=True)
class Completions(Generating):
    """Keys of the types that compare completions of prompts."""

    max_prompt_length: int | None = key(None, "tokens of a prompt, which loses its start; default: any", positive=True)
    max_completion_length: int | None = key(None, "tokens of a completion, which loses its end; default: any",
        positive=True)  # fmt: skip
    beta: float = key(0.1, "strength of the preference")


@dataclass(frozen=True)
class Referred(Completions):
    """Keys of the types that compare with a reference model."""

    precompute_ref_log_probs: bool = key(False,
        "compute the reference's log-probabilities once before training, not in every step")  # fmt: skip


def preference(
    name: str, keys: type, rate: float, loss: Callable, *, kind: str = "pairs", means: bool = False,
    coupled: Callable[[Any], bool] = lambda k: False, more: Callable[[Any], dict] = lambda k: {}, **facts: Any,
) -> Method:  # fmt: skip
    """Declare a type that compares completions: `loss(keys)` gives the objective of `losses.completions` of each row.

    kind: "pairs", "triples" or "unpaired" rows. coupled: whether these keys make a row's loss depend on others. means: the
    loss has means over the tokens of chosen completions. more: further data settings. `facts` are those of `Method`.
    """

    def data(k: Any) -> dict[str, Any]:
        return {"kind": kind, "max_prompt": k.max_prompt_length, "max_completion": k.max_completion_length, **more(k)}

    def objective(k: Any, model: models.Model, *, remat: str | None) -> Objective:
        ld_alpha = getattr(k, "ld_alpha", None)
        rows = losses.completion_logps(*model[:2], ld_alpha=ld_alpha, router=bool(k.routers), remat=remat)
        return Objective(
            rows, balanced(k, loss(k)), coupled(k), losses.completions.with_mean_lengths if means else None
        )

    return Method(name, keys, rate, objective, loss, data, **facts)


# ---- pairs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dpo(Synced, Referred):
    """Keys of trainer_type dpo, in TRL's variants."""

    loss_type: str | tuple[str, ...] = key("sigmoid", "variant of the loss, as in TRL")
    loss_weights: tuple[float, ...] | None = key(None, "weights of several loss types; default: 1")
    label_smoothing: float = key(0.0, "share of wrong labels")
    f_divergence_type: str = key("reverse_kl", "divergence from the reference")
    f_alpha_divergence_coef: float = key(0.5, "of f_divergence_type alpha_divergence", needs="f_divergence_type",
        of=("alpha_divergence",))  # fmt: skip
    discopop_tau: float = key(0.05, "of loss_type discopop", needs="loss_type", of=("discopop",))
    ld_alpha: float | None = key(None, "weight of the tokens past the shorter completion")
    use_weighting: bool = key(False, "weigh pairs by their probability (WPO)")

    @property
    def kinds(self) -> tuple[str, ...]:
        """The loss types, one or several."""
        return self.loss_type if isinstance(self.loss_type, tuple) else (self.loss_type,)


@dataclass(frozen=True)
class Simpo(Completions):
    """Keys of trainer_type simpo."""

    loss_type: str = key("simpo", "variant of the loss, as in TRL")
    label_smoothing: float = key(0.0, "share of wrong labels")
    alpha: float = key(0.0, "AlphaPO's shape")
    simpo_gamma: float = key(0.5, "margin of loss_type simpo", needs="loss_type", of=("simpo", "alphapo"))


@dataclass(frozen=True)
class Cpo(Simpo):
    """Keys of trainer_type cpo."""

    loss_type: str = key("sigmoid", "variant of the loss, as in TRL")
    cpo_alpha: float = key(1.0, "weight of the chosen completions' likelihood")


@dataclass(frozen=True)
class Orpo(Completions):
    """Keys of trainer_type orpo."""

    beta: float | None = key(None, "strength of the preference")  # type: ignore[assignment]  # 0.1, or lambda_orpo
    lambda_orpo: float | None = key(None, "another name of orpo's beta")


@dataclass(frozen=True)
class Tpo(Completions):
    """Keys of trainer_type tpo (arXiv:2405.16681); defaults are TRL's."""

    beta: float = key(0.01, "strength of the preference", positive=True)
    loss_type: str = key("sigmoid", "variant of the loss, as in TRL", choices=("sigmoid", "hinge", "ipo", "tpo-l"))
    label_smoothing: float = key(0.0, "share of wrong labels")
    tpo_alpha: float = key(1.0, "weight of the likelihood of the completions in the column reference", least=0)
    tpo_l_gamma: float = key(0.5, "margin of loss_type tpo-l", needs="loss_type", of=("tpo-l",))


def dpo(k: Dpo) -> Callable:
    """Choose the losses over pairs of dpo."""
    if k.kinds == ("sft",):
        raise ValueError("loss_type sft alone compares nothing; use trainer_type sft, or a list with another loss")
    if k.loss_weights is not None and len(k.kinds) == 1:
        raise ValueError(f"loss_weights: loss_type {k.kinds[0]} is one loss, which needs no weight; remove it")
    return losses.dpo_objective(
        loss_type=k.kinds, loss_weights=k.loss_weights, wpo=k.use_weighting, beta=k.beta,
        label_smoothing=k.label_smoothing, f_divergence=k.f_divergence_type, f_alpha=k.f_alpha_divergence_coef,
        tau=k.discopop_tau,
    )  # fmt: skip


def cpo(k: Simpo) -> Callable:
    """Choose the loss over pairs of cpo and simpo, which has no likelihood."""
    kind, cpo_alpha = k.loss_type, k.cpo_alpha if isinstance(k, Cpo) else 0.0
    if kind == "alphapo":  # as TRL has it: simpo without the likelihood of cpo, whose reward has a shape
        if not k.alpha or cpo_alpha not in (0.0, 1.0):
            raise ValueError("loss_type alphapo needs alpha, such as 0.25 (with 0 it is simpo), and has no cpo_alpha")
        kind, cpo_alpha = "simpo", 0.0
    settings: dict[str, Any] = dict(loss_type=kind, beta=k.beta, alpha=k.alpha, gamma=k.simpo_gamma)
    return losses.cpo_objective(cpo_alpha=cpo_alpha, label_smoothing=k.label_smoothing, **settings)


def orpo(k: Orpo) -> Callable:
    """Choose the loss over pairs of orpo."""
    given = {b for b in (k.beta, k.lambda_orpo) if b is not None} or {0.1}
    if len(given) > 1:
        raise ValueError("lambda_orpo: differs from beta; they are one thing, give one")
    return losses.orpo_objective(beta=given.pop())


def tpo(k: Tpo) -> Callable:
    """Choose the loss over triples of tpo."""
    return losses.tpo_objective(
        beta=k.beta,
        tpo_alpha=k.tpo_alpha,
        loss_type=k.loss_type,
        gamma=k.tpo_l_gamma,
        label_smoothing=k.label_smoothing,
    )


# ---- single completions --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kto(Synced, Referred):
    """Keys of trainer_type kto."""

    loss_type: str = key("kto", "variant of the loss, as in TRL")
    desirable_weight: float = key(1.0, "weight of desirable rows")
    undesirable_weight: float = key(1.0, "weight of undesirable rows")

    @property
    def mismatched(self) -> bool:
        """Whether the loss is KTO's own, which also reads prompts with other rows' completions."""
        return self.loss_type == "kto"


def kto(k: Kto) -> Callable:
    """Choose the loss over rows of kto."""
    weights = dict(desirable_weight=k.desirable_weight, undesirable_weight=k.undesirable_weight)
    return losses.kto_objective(loss_type=k.loss_type, beta=k.beta, **weights)


METHODS = (
    # aot sorts all pairs of a batch
    preference("dpo", Dpo, 1e-6, dpo, coupled=lambda k: bool({"aot", "aot_unpaired"} & {*k.kinds}), means=True,
               reference=True),
    preference("cpo", Cpo, 1e-6, cpo, means=True),
    preference("simpo", Simpo, 1e-6, cpo),
    preference("orpo", Orpo, 1e-6, orpo, means=True),
    preference("tpo", Tpo, 5e-7, tpo, kind="triples", means=True),
    preference("kto", Kto, 1e-6, kto, kind="unpaired", coupled=lambda k: k.mismatched,
               more=lambda k: {"kl": k.mismatched}, reference=True),
    preference(  # the state keeps the running mean of rewards that bco compares with
        "bco", Referred, 5e-7, lambda k: losses.bco_objective(beta=k.beta), kind="unpaired", coupled=lambda k: True,
        reference=True, extra={"bco": lambda: {"mean": jnp.zeros(()), "count": jnp.zeros(())}},
        keep=losses.unpaired.track_rewards,
    ),
)  # fmt: skip
