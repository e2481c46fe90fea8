"""Preferences over own samples: online DPO, XPO, Nash-MD; A*PO and TPO.

Objectives go under `train.gradcache(losses.completion_logps(family, cfg), objective, 1)`, in `accumulate`. Formulas and
defaults are those of TRL 1.16, of XPO and Nash-MD 1.12's.
"""

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import jax.numpy as jnp
from jax.lax import stop_gradient
from jaxtyping import Array

from fdel.train.given import NOTHING, Given
from fdel.train.losses.completions import Batch, Objective, Outputs, completion_metrics, counted, ref_logps
from fdel.train.losses.preference import cpo, dpo, mean_length, mean_nll
from fdel.train.losses.sampled import policy_outputs, routers_of, sampled_tokens
from fdel.train.losses.sequences import Tokens, sequence_sum, starts
from fdel.train.losses.stats import check_call, check_range

Sums = dict[str, Any]


def xpo_objective(*, beta: float = 0.1, alpha: float = 1e-5, loss_type: str = "sigmoid") -> Objective:
    """Build the objective of XPO (arXiv:2405.21046): DPO, and alpha * the log-probability of the reference's sample.

    Pairs are [:, 0] the policy's sample and [:, 1] the reference's; batch["better"], bool[B], tells whether the first won.
    `loss_type` is "sigmoid" or "ipo", the latter of sums, not of means over tokens. alpha=0 with two samples of the policy
    is online DPO (arXiv:2402.04792).
    """
    if loss_type not in ("sigmoid", "ipo"):
        raise ValueError(f"loss_type={loss_type!r}; expected 'sigmoid' or 'ipo'")
    check_range(above=True, beta=beta)
    check_range(alpha=alpha)

    def objective(o: Outputs, batch: Batch, given: Given = NOTHING) -> tuple[Array, Sums]:
        logps, ref, better, rows = o["logps"], ref_logps(o), batch["better"].astype(bool), counted(o)
        won = jnp.stack([better, ~better], 1)
        sides = [jnp.where(better, x[:, i], x[:, 1 - i]) for x in (logps, ref) for i in (0, 1)]
        one = jnp.ones_like(sides[0])
        preferred = dpo(*sides, beta=beta, loss_type=loss_type, chosen_lengths=one, rejected_lengths=one, present=rows)
        explored = jnp.where(rows, alpha * logps[:, 1], 0)
        rewards = beta * (logps - ref)
        margins = jnp.where(rows, jnp.where(won, rewards, -rewards).sum(1), 0)
        metrics = completion_metrics(o, logps, rewards, won)
        metrics |= {"loss/dpo": preferred.sum(), "rewards/margins": margins.sum()}
        metrics |= {"rewards/accuracies": (margins > 0).sum(dtype=margins.dtype)}
        metrics |= {"objective/kl": jnp.where(rows, (logps - ref).mean(1), 0).sum()}
        return (preferred + explored).sum(), metrics | ({"loss/xpo": explored.sum()} if alpha else {})

    return objective


online_dpo_objective = partial(xpo_objective, alpha=0.0)


def nash_md(t: Tokens, beta: float = 0.1) -> tuple[Array, Sums]:
    """Sum beta * log(policy / reference) * log policy - (P - 1/2) * log policy over drawn tokens (arXiv:2312.00886).

    The first factor has no gradient. P - 1/2 are the tokens' advantages, P how likely their sample is preferred to one of
    the mixture of policy and reference. The weight is the number of samples.
    """
    if t.reference is None:
        raise ValueError("Nash-MD needs a reference: give the batch 'ref_logps', or the step reference=params")
    drift = stop_gradient(jnp.where(t.mask > 0, t.logp - t.reference, 0))
    over = lambda x: jnp.where(t.mask > 0, x, 0).sum()
    score, kl = over(t.advantages * t.logp), over(drift * t.logp)
    there = starts(t.segments, t.mask.shape) & (sequence_sum(t.mask, t.segments) > 0)
    sums = {"weight": there.sum(dtype=jnp.float32), "loss/score": score, "loss/kl": kl, "objective/kl": drift.sum()}
    return beta * kl - score, sums | {"entropy": (over(t.entropy), t.mask.sum())}


def nash_md_gradient(
    family: ModuleType, cfg: Any, *, beta: float = 0.1, router_aux_loss_coef: float = 0.0, router_z_loss_coef: float = 0.0,
    **settings: Any,
) -> Callable[..., tuple[Array, Sums]]:  # fmt: skip
    """Build `loss(params, batch, given) -> (sum, sums)` of `nash_md`; batch and `settings` as those of `policy_outputs`.

    Coefficients are those of `policy_objective`.
    """
    check_range(beta=beta)
    router, with_routers = routers_of(router_aux_loss_coef, router_z_loss_coef)
    outputs = policy_outputs(family, cfg, **{"router": router} | settings)

    def loss(params: Any, batch: Batch, given: Given = NOTHING) -> tuple[Array, Sums]:
        o = outputs(params, batch, given)
        return with_routers(*nash_md(sampled_tokens(o, batch), beta), o)

    return loss


def a2po_objective(*, beta2: float = 1e-3) -> Objective:
    """Build the objective of A*PO (arXiv:2505.20686): (beta2 * log policy / reference - advantage)^2, a regression.

    Single completions; batch["advantage"], float[B], is the reward - `rollout.advantages.optimal_value` of the prompt.
    """
    check_range(above=True, beta2=beta2)

    def objective(o: Outputs, batch: Batch, given: Given = NOTHING) -> tuple[Array, Sums]:
        rows = counted(o)
        implicit = jnp.where(rows, beta2 * (o["logps"] - ref_logps(o)), 0)
        advantage = jnp.where(rows, batch["advantage"], 0)
        sums = {"weight": rows.sum(dtype=jnp.float32), "entropy": (o["entropy"].sum(), o["lengths"].sum())}
        sums |= {"implicit_reward": stop_gradient(implicit).sum(), "advantage": advantage.sum()}
        return ((implicit - advantage) ** 2).sum(), sums

    return objective


def tpo_objective(
    *, beta: float = 0.01, tpo_alpha: float = 1.0, loss_type: str = "sigmoid", gamma: float = 0.5, **options: Any
) -> Objective:
    """Build the objective of TPO (arXiv:2405.16681): `cpo` of two completions, and tpo_alpha * the NLL of a third one.

    Triples, int tokens [B 3 T]: chosen, rejected, gold. `loss_type` is that of `cpo`, or "tpo-l", of means over tokens
    with the margin `gamma`. The NLL is a mean over all gold tokens (`with_mean_lengths`).
    """
    kind = {"tpo-l": "simpo"}.get(loss_type, loss_type)
    check_range(tpo_alpha=tpo_alpha)
    loss = lambda chosen, rejected: cpo(chosen, rejected, beta=beta, loss_type=kind, gamma=gamma, **options)
    check_call(loss, (1,), (1,))

    def objective(o: Outputs, batch: Batch, given: Given = NOTHING) -> tuple[Array, Sums]:
        if o["logps"].shape[1:] != (3,):
            raise ValueError(f"found outputs of shape {o['logps'].shape}; TPO needs [B 3]: chosen, rejected, gold")
        rows = counted(o)
        logps = o["logps"] / jnp.maximum(o["lengths"], 1) if kind in ("ipo", "simpo") else o["logps"]
        preferred = jnp.where(rows, loss(logps[:, 0], logps[:, 1]), 0)
        length = batch["mean_length"] if "mean_length" in batch else mean_length(o["lengths"][:, 2], rows)
        gold = mean_nll(o["nll"][:, 2], length, rows)
        pair = {k: v[:, :2] for k, v in o.items() if v.ndim > 1}
        metrics = completion_metrics(pair, logps[:, :2], beta * logps[:, :2], jnp.array([[True, False]]))
        margins = jnp.where(rows, beta * (logps[:, 0] - logps[:, 1]), 0)
        metrics |= {"rewards/margins": margins.sum(), "rewards/accuracies": (margins > 0).sum(dtype=margins.dtype)}
        nll = o["nll"][:, 2].sum(), o["lengths"][:, 2].sum()
        return (preferred + tpo_alpha * gold).sum(), metrics | {"nll_loss": nll}

    return objective
