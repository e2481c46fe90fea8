"""Objectives over pairs of completions: DPO, CPO, SimPO, ORPO on a model.

    outputs, objective = losses.completion_logps(llama, cfg), losses.dpo_objective(beta=0.1)
    g = train.gradcache(outputs, objective, n)                       # exact for every loss
    g = train.accumulate(train.gradcache(outputs, objective, 1), n)  # a forward pass less, where pairs are independent
    step = train.update(train.normalize(g), optimizer, reads=("reference",))

Pairs depend on each other in "aot" and "aot_unpaired", and in NLL terms, which are means over tokens (`with_mean_lengths`).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fdel.train.given import NOTHING, Given
from fdel.train.losses.completions import Batch, Objective, Outputs, completion_metrics, counted, ref_logps
from fdel.train.losses.stats import check_call, check_range

from .preference import CPO_MEANS, SMOOTHED, SORTED, cpo, cpo_reward, dpo, log_odds, mean_length, mean_nll, orpo


def dpo_objective(
    *,
    loss_type: str | Sequence[str] = "sigmoid",
    loss_weights: Sequence[float] | None = None,
    wpo: bool = False,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    f_divergence: str = "reverse_kl",
    **options: Any,
) -> Objective:
    """Build the objective of `dpo`, or of several of its losses, added up with `loss_weights` (ones if None).

    `wpo` weighs each pair by its probability under the policy (arXiv:2406.11827, eq. 2). `label_smoothing` goes to the
    losses that read it, `options` to `dpo`.
    """
    types = [loss_type] if isinstance(loss_type, str) else list(loss_type)
    weights = [1.0] * len(types) if loss_weights is None else list(loss_weights)
    if len(weights) != len(types) or not types:
        raise ValueError(f"{len(weights)} loss_weights for the loss types {types}; give one for each")
    if wpo and (mixed := sorted({*SORTED, "sft"} & set(types))):
        raise ValueError(f"wpo weighs pairs, but {', '.join(mixed)} gives no loss per pair; leave one of the two out")
    anyone = not set(types) & set(SMOOTHED)  # if no loss reads it, the first one complains
    eps = {t: label_smoothing if anyone or t in SMOOTHED else 0.0 for t in types}
    check_range(above=False, **{f"loss_weights[{i}]": w for i, w in enumerate(weights)})
    common: dict[str, Any] = dict(beta=beta, f_divergence=f_divergence, **options)
    for t in types:
        one = partial(dpo, loss_type=t, label_smoothing=eps[t], **common)
        check_call(lambda x, one=one: one(x, x, x, x, chosen_lengths=x, rejected_lengths=x), (1,))

    def objective(o: Outputs, batch: Batch, given: Given = NOTHING) -> tuple[Array, dict[str, Any]]:
        ref = ref_logps(o)
        known: dict[str, Any] = dict(zip(("chosen_lengths", "rejected_lengths"), _sides(o["lengths"]), strict=True))
        known |= common | {"present": counted(o)}

        def loss(t: str) -> Array:
            if t == "sft":
                return _mean_nll(o, batch)
            return dpo(*_sides(o["logps"]), *_sides(ref), loss_type=t, label_smoothing=eps[t], **known)

        losses = sum((w * loss(t) for w, t in zip(weights, types, strict=True)), jnp.zeros(()))
        if wpo:
            losses *= jax.lax.stop_gradient(jnp.exp(_per_token(o, "aligned").sum(-1)))
        metrics = _metrics(o, o["logps"], beta * (o["logps"] - ref))
        accuracy = o["top1"][:, 0].sum(), o["lengths"][:, 0].sum()
        return losses.sum(), metrics | {"mean_token_accuracy": accuracy}

    return objective


def cpo_objective(
    *, cpo_alpha: float = 1.0, loss_type: str = "sigmoid", beta: float = 0.1, alpha: float = 0.0, **options: Any
) -> Objective:
    """Build the objective of `cpo` + cpo_alpha * the chosen completions' NLL; SimPO and AlphaPO have cpo_alpha=0."""
    check_range(cpo_alpha=cpo_alpha)
    check_call(partial(cpo, loss_type=loss_type, beta=beta, alpha=alpha, **options), (1,), (1,))

    def objective(o: Outputs, batch: Batch, given: Given = NOTHING) -> tuple[Array, dict[str, Any]]:
        logps = _per_token(o, "logps") if loss_type in CPO_MEANS else o["logps"]
        losses = cpo(*_sides(logps), loss_type=loss_type, beta=beta, alpha=alpha, **options)
        losses = jnp.where(counted(o), losses, 0) + cpo_alpha * _mean_nll(o, batch)
        metrics = _metrics(o, logps, beta * cpo_reward(logps, alpha))
        return losses.sum(), metrics | {"nll_loss": (o["nll"][:, 0].sum(), o["lengths"][:, 0].sum())}

    return objective


def orpo_objective(*, beta: float = 0.1) -> Objective:
    """Build the objective of `orpo` + the NLL of the chosen sequences, prompts included."""
    check_call(partial(orpo, beta=beta), (1,), (1,))

    def objective(o: Outputs, batch: Batch, given: Given = NOTHING) -> tuple[Array, dict[str, Any]]:
        logps = _per_token(o, "logps")
        total = lambda x: jnp.where(counted(o), x, 0).sum()
        ratio = total(orpo(*_sides(logps), beta=beta))
        odds = {"log_odds_ratio": -ratio / beta, "log_odds_chosen": total(-jnp.diff(log_odds(logps))[:, 0])}
        nll = total(o["text_nll"][:, 0]), total(o["text_lengths"][:, 0])
        metrics = _metrics(o, logps, beta * logps)
        return ratio + _mean_nll(o, batch, "text_").sum(), metrics | odds | {"nll_loss": nll}

    return objective


def _sides(x: Float[Array, "B 2"]) -> tuple[Array, Array]:
    if x.shape[1:] != (2,):
        raise ValueError(f"found outputs of shape {x.shape}; a loss over pairs needs [B, 2], from tokens [B, 2, T]")
    return x[:, 0], x[:, 1]


def _mean_nll(o: Outputs, batch: Batch, prefix: str = "") -> Float[Array, " B"]:
    """The chosen rows' NLL over their mean length, that of the whole batch if the batch has it."""
    present, name = counted(o), f"mean_{prefix}length"
    length = batch[name] if name in batch else mean_length(o[f"{prefix}lengths"][:, 0], present)
    return mean_nll(o[f"{prefix}nll"][:, 0], length, present)


def _per_token(o: Outputs, name: str) -> Float[Array, "B 2"]:
    return o[name] / jnp.maximum(o["lengths"], 1)


def _metrics(o: Outputs, logps: Float[Array, "B 2"], rewards: Float[Array, "B 2"]) -> dict[str, Any]:
    margins = jnp.where(counted(o), rewards[:, 0] - rewards[:, 1], 0)
    metrics = completion_metrics(o, logps, rewards, jnp.broadcast_to(jnp.array([True, False]), rewards.shape))
    return metrics | {"rewards/margins": margins.sum(), "rewards/accuracies": (margins > 0).sum(dtype=margins.dtype)}
