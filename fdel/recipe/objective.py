"""From the section `trainer` to a loss and its gradients: the objective of each trainer type, with TRL's defaults."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fdel import models, train
from fdel.ops import Slots
from fdel.recipe.trainer import REFERENCE, Trainer
from fdel.train import losses, parallel
from fdel.train.data.settings import check_ratios


class Objective(NamedTuple):
    """A loss `(params, batch, *rest) -> (sum, sums)` of a whole batch, and its gradient function in microbatches."""

    loss: Callable
    grads: Callable


def loss_types(t: Trainer) -> tuple[str, ...]:
    """Give the variants of the loss, TRL's default where none is given."""
    default = {"sft": "nll", "simpo": "simpo", "kto": "kto", "embedding": "info_nce"}.get(t.trainer_type, "sigmoid")
    return t.loss_type if isinstance(t.loss_type, tuple) else (t.loss_type or default,)


# ---- losses of texts, of pairs and of rated completions ------------------------------------------------------------


def token_loss(t: Trainer) -> Callable:
    """Choose the loss over tokens of trainer_type sft. What does not go together: ValueError."""
    (kind,) = loss_types(t)
    if kind not in ("nll", "dft") or (kind == "dft" and (t.label_smoothing or t.z_loss)):
        raise ValueError(f"loss_type={kind!r}; expected nll, or dft without label_smoothing and z_loss")
    return losses.dft if kind == "dft" else partial(losses.nll, label_smoothing=t.label_smoothing, z_loss=t.z_loss)


def target(t: Trainer) -> Callable:
    """Choose how far the student is from the teacher: soft targets, or gkd's divergence. Out of range: ValueError."""
    if t.trainer_type == "distillation":
        return partial(losses.soft_targets, temperature=2.0 if t.temperature is None else t.temperature)
    beta, temperature = 0.5 if t.beta is None else t.beta, 1.0 if t.temperature is None else t.temperature
    if not 0 <= beta <= 1:
        raise ValueError(f"beta={beta}; expected a number from 0 (forward KL) to 1 (reverse KL)")
    return partial(losses.generalized_jsd, beta=beta, temperature=temperature)


def similarity(t: Trainer) -> Callable:
    """Choose the loss over embeddings of trainer_type embedding. What does not go together: ValueError."""
    (kind,) = loss_types(t)
    if kind not in ("info_nce", "triplet"):
        raise ValueError(f"loss_type={kind!r}; expected info_nce or triplet")
    if kind == "triplet" and (t.temperature is not None or not t.negatives):
        raise ValueError("loss_type='triplet' has no temperature, and needs negatives of at least 1")
    if kind == "info_nce" and t.margin != 0.2:
        raise ValueError(f"margin={t.margin}: loss_type='info_nce' does not read it; remove it, or use triplet")
    temperature = 0.05 if t.temperature is None else t.temperature
    one = partial(losses.triplet, margin=t.margin) if kind == "triplet" else None
    one = one or partial(losses.info_nce, temperature=temperature)
    return one if t.matryoshka_dims is None else losses.matryoshka(one, t.matryoshka_dims)


def _beta(t: Trainer) -> float:
    return next((b for b in (t.beta, t.lambda_orpo) if b is not None), 0.1)


def _dpo(t: Trainer) -> Callable:
    kinds = loss_types(t)
    if kinds == ("sft",):
        raise ValueError("loss_type sft alone compares nothing; use trainer_type sft, or a list with another loss")
    if t.loss_weights is not None and len(kinds) == 1:
        raise ValueError(f"loss_weights: loss_type {kinds[0]} is one loss, which needs no weight; remove it")
    return losses.dpo_objective(
        loss_type=loss_types(t), loss_weights=t.loss_weights, wpo=t.use_weighting, beta=_beta(t),
        label_smoothing=t.label_smoothing, f_divergence=t.f_divergence_type, f_alpha=t.f_alpha_divergence_coef,
        tau=t.discopop_tau,
    )  # fmt: skip


def _cpo(t: Trainer) -> Callable:
    (kind,), cpo_alpha = loss_types(t), 0.0 if t.trainer_type == "simpo" else t.cpo_alpha
    if kind == "alphapo":  # as TRL has it: simpo without the likelihood of cpo, whose reward has a shape
        if not t.alpha or t.cpo_alpha not in (0.0, 1.0):
            raise ValueError("loss_type alphapo needs alpha, such as 0.25 (with 0 it is simpo), and has no cpo_alpha")
        kind, cpo_alpha = "simpo", 0.0
    settings: dict[str, Any] = dict(loss_type=kind, beta=_beta(t), alpha=t.alpha or 0.0, gamma=t.simpo_gamma)
    settings["label_smoothing"] = t.label_smoothing
    one = jax.ShapeDtypeStruct((1,), jnp.float32)
    jax.eval_shape(partial(losses.cpo, **settings), one, one)  # raises what the objective would raise much later
    return losses.cpo_objective(cpo_alpha=cpo_alpha, **settings)


def _kto(t: Trainer) -> Callable:
    (kind,) = loss_types(t)
    weights = dict(desirable_weight=t.desirable_weight, undesirable_weight=t.undesirable_weight)
    return losses.kto_objective(loss_type=kind, beta=_beta(t), **weights)


PREFERENCES: dict[str, Callable[[Trainer], Callable]] = {
    "dpo": _dpo,
    "cpo": _cpo,
    "simpo": _cpo,
    "orpo": lambda t: losses.orpo_objective(beta=_beta(t)),
    "kto": _kto,
    "bco": lambda t: losses.bco_objective(beta=_beta(t)),
}


def check(t: Trainer) -> None:
    """Raise ValueError for options of the loss that do not go together."""
    if t.trainer_type != "dpo" and len(loss_types(t)) != 1:
        raise ValueError(f"loss_type={list(loss_types(t))}; only trainer_type dpo has several at once")
    if t.trainer_type in PREFERENCES:
        PREFERENCES[t.trainer_type](t)
    elif t.trainer_type == "sft":
        token_loss(t)
        check_ratios(t.fcm_min_ratio, t.fcm_max_ratio)
    elif t.trainer_type == "gkd":
        target(t)
    elif t.trainer_type == "embedding":
        similarity(t)


def coupled(t: Trainer) -> bool:
    """Whether a row's loss depends on the other rows of its batch: sorted pairs, KTO's and BCO's reference points."""
    return t.trainer_type == "bco" or bool({"aot", "aot_unpaired", "kto"} & {*loss_types(t)})


# ---- with a model --------------------------------------------------------------------------------------------------


def build(
    t: Trainer,
    model: models.Model,
    *,
    teacher: models.Model | None = None,
    adapted: bool = False,
    own_reference: bool = False,
    cast: Callable[[Callable], Callable] = lambda f: f,
    lay: Callable[[Callable], Callable] = lambda g: g,
) -> Objective:
    """Build the objective of a trainer type; `adapted` makes its params the adapters of `lora.split`.

    After the batch come: bco's running mean; the frozen part of the model, if `adapted`; the reference (`own_reference`:
    the model without its adapters is none, or the batch has its numbers) or the teacher. `cast` goes around what is called
    with params, `lay` around gradient functions of a microbatch.
    """
    n, options = t.gradient_accumulation_steps, _options(t)
    alone = partial(losses.on_adapters, reference=False) if adapted else lambda f: f
    if t.trainer_type == "embedding":
        pool = losses.mean_token if t.pooling == "mean" else losses.last_token
        embeddings, among = losses.embedding(*model[:2], loss=similarity(t), pool=pool, **options)
        embeddings, objective = alone(cast(embeddings)), lambda x, batch, *_: among(x, batch)
        loss = lambda params, batch, *rest: objective(embeddings(params, batch, *rest), batch)
        return Objective(loss, lay(train.gradcache(embeddings, objective, n)))
    if t.trainer_type not in PREFERENCES:
        loss = alone(cast(_whole(t, model, teacher)))
        return Objective(loss, _apart(loss, n, lay))
    router = t.router_aux_loss_coef != 0
    outputs = cast(losses.likelihoods(model.family, model.cfg, ld_alpha=t.ld_alpha, router=router, **options))
    if adapted:
        base_is_reference = t.trainer_type in REFERENCE and not own_reference
        outputs = losses.on_adapters(outputs, reference=base_is_reference)
    objective = PREFERENCES[t.trainer_type](t)
    if router:
        objective = losses.with_balance(objective, t.router_aux_loss_coef)
    if t.trainer_type == "bco":  # the running mean comes first, the objective wants it alone
        outputs, objective = _after(outputs), lambda o, batch, mean, *_, f=objective: f(o, batch, mean)
    loss = lambda params, batch, *rest: objective(outputs(params, batch, *rest), batch, *rest)
    if coupled(t):
        return Objective(loss, lay(train.gradcache(outputs, objective, n)))
    apart = _apart(loss, n, lay)
    if t.trainer_type in ("kto", "simpo"):
        return Objective(loss, apart)
    return Objective(loss, lambda params, batch, *rest: apart(params, losses.with_mean_lengths(batch), *rest))


def remat(t: Trainer) -> str | None:
    """Name the policy of gradient_checkpointing; true saves nothing, as in TRL; "none" is no policy."""
    asked = t.gradient_checkpointing
    return "nothing_saveable" if asked is True else None if asked == "none" else asked or None


def _options(t: Trainer) -> dict[str, Any]:
    return {"remat": remat(t)}


def _whole(t: Trainer, model: models.Model, teacher: models.Model | None) -> Callable:
    family, cfg, options = *model[:2], _options(t)
    if t.trainer_type == "sft":
        _only_attends(t, model)
        return losses.sft(family, cfg, loss=token_loss(t), router_aux_loss_coef=t.router_aux_loss_coef, **options)
    if t.trainer_type == "reward":
        return losses.reward(family, cfg, center_rewards_coefficient=t.center_rewards_coefficient, **options)
    if t.trainer_type == "prm":
        return losses.process_reward(family, cfg, **options)
    if teacher is None:
        raise ValueError(f"trainer_type {t.trainer_type} learns from a teacher; pass it")
    alpha = 1.0 if t.trainer_type == "gkd" else 0.9 if t.alpha is None else t.alpha
    if t.hidden_state_loss_weight and cfg.embed != teacher.cfg.embed:
        raise ValueError(
            f"hidden_state_loss_weight={t.hidden_state_loss_weight}: the student's hidden states have {cfg.embed} channels "
            f"and the teacher's {teacher.cfg.embed}; set it to 0, or learn a projection with losses.distill"
        )
    layers = (-1,) if t.hidden_state_layers is None else t.hidden_state_layers
    terms = losses.Terms(
        t.hidden_state_loss_weight, layers, t.router_aux_loss_coef, t.attention_loss_weight, t.attention_layers
    )
    pair = family, cfg, teacher.family, teacher.cfg
    return losses.distill(*pair, target=target(t), alpha=alpha, terms=terms, **options)


def _only_attends(t: Trainer, model: models.Model) -> None:
    """Raise ValueError if keys are to be hidden from layers that have none."""
    state = model.family.state_spec(model.cfg, pages=1, rows=1) if t.fcm_max_ratio else None
    if any(isinstance(x, Slots) for x in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, Slots))):
        name = model.family.__name__.rpartition(".")[2]
        raise ValueError(
            f"fcm_max_ratio={t.fcm_max_ratio:g}: {name} has recurrent layers, which hide no key; remove it"
        )


def _apart(loss: Callable, n: int, lay: Callable) -> Callable:
    return parallel.reduce_once(train.accumulate(lay(train.grads(loss)), n))


def _after(outputs: Callable) -> Callable:
    return lambda params, batch, mean, *rest: outputs(params, batch, *rest)
