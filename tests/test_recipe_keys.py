"""Every key that passes does something: whatever is accepted changes the loss, the optimizer, the data or the loop."""

import dataclasses
import re
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel import models, ops, params, recipe, train
from fdel.models import heads, mixtral, roberta
from fdel.recipe import methods, trainer
from fdel.recipe.samples import task_settings
from fdel.recipe.settled import settle
from fdel.train.losses import preference

CFG = mixtral.Config(vocab=64, embed=16, ffn=16, layers=1, heads=2, kv_heads=1, head_dim=8, experts=2,
                     rope=ops.Rope(8, 1e4))  # fmt: skip
LOSSES = {
    "sft": ("nll", "dft"), "cpo": ("sigmoid", "hinge", "ipo", "simpo", "alphapo"), "embedding": ("info_nce", "triplet"),
    "tpo": ("sigmoid", "hinge", "ipo", "tpo-l"),
    "dpo": (*preference.DPO, ("sigmoid", "sft")), "kto": ("kto", "apo_zero_unpaired"),
}  # fmt: skip
VARIANTS = [(kind, loss) for kind in trainer.TYPES for loss in LOSSES.get(kind, (None,))]
NEEDS = {"exo_pair": {"label_smoothing": 0.01}, "alphapo": {"alpha": 0.5}}
OF_TYPE = {"diffusion": {"mask_token_id": 3}, "masked_lm": {"mask_token_id": 3}}  # keys that a type cannot do without
COMPARED = ("online_dpo", "xpo", "nash_md")
REWARDED = ("grpo", "gspo", "gfpo", "rlvr", "rloo", "ppo", "a2po", "sdpo", *COMPARED)
OF_TYPE |= dict.fromkeys(REWARDED, {"reward_functions": [{"name": "exact"}]})
OF_TYPE |= dict.fromkeys(("classification", "token_classification"), {"labels": ["no", "yes"]})
IDLE = {"rloo": ["beta"], **dict.fromkeys(("a2po", *COMPARED), ["temperature"])}  # of rewards, and of sampling alone
# Another value than the default for each key whose effect is in the loss or in how rows become batches.
VALUES: dict[str, Any] = {
    "beta": 0.3, "lambda_orpo": 0.3, "label_smoothing": 0.1, "z_loss": 1e-3, "alpha": 0.25, "temperature": 3.0,
    "hidden_state_loss_weight": 0.1, "hidden_state_layers": [0], "attention_loss_weight": 0.1, "attention_layers": [0],
    "attention_normalize": True, "lmbda": 0.5, "cpo_alpha": 0.5, "simpo_gamma": 0.9, "ld_alpha": 0.5,
    "tpo_alpha": 0.5, "tpo_l_gamma": 0.9,
    "f_divergence_type": "js_divergence", "f_alpha_divergence_coef": 0.3, "discopop_tau": 0.1, "use_weighting": True,
    "loss_weights": [2.0], "desirable_weight": 2.0, "undesirable_weight": 2.0, "center_rewards_coefficient": 0.01,
    "pooling": "mean", "margin": 0.3, "matryoshka_dims": [8], "router_aux_loss_coef": 0.01, "router_z_loss_coef": 0.01,
    "negatives": 2,
    "gradient_checkpointing": "dots_saveable", "completion_only_loss": False, "assistant_only_loss": True,
    "packing": True, "packing_strategy": "wrapped", "step_separator": "\n\n", "train_on_last_step_only": True,
    "max_length": 77, "max_prompt_length": 33, "max_completion_length": 34,
    "fcm_max_ratio": 0.3, "labels": ["one", "other"],
    "problem_type": "multi_label_classification",
    "total_batch_size": 16, "num_train_epochs": 7, "num_generations": 4,
    "mask_token_id": 5, "mlm_probability": 0.3, "weighting": "elbo", "max_loss_weight": 2.0,
    "epsilon": 0.05, "epsilon_high": 0.07, "delta": 1.01, "importance_sampling_level": "sequence_token",
    "entropy_coef": 0.01, "top_entropy_quantile": 0.5, "off_policy_mask_threshold": 0.01,
    "importance_sampling_mode": "token_mask", "vf_coef": 0.5, "cliprange_value": 0.05, "beta2": 0.3,
    "iw_opd_gamma": 0.3, "iw_opd_epsilon": 0.03, "rkl_advantage": False, "single_step_decomposition": False,
    "length_normalization": False, "sdpo_policy_loss_mode": "hybrid", "distillation_weight": 0.5,
    "distillation_mode": "full_logits", "distillation_alpha": 0.5, "distillation_is_clip": 1.5,
}  # fmt: skip
# Keys of other parts of a run. Those of the loop and of saving are read whatever else is said.
OPTIMIZER = {
    "learning_rate": 0.3, "weight_decay": 0.3, "clip_grad": None, "adam_beta1": 0.5, "adam_beta2": 0.5,
    "adam_epsilon": 1e-3, "moments": "bfloat16", "warmup_steps": 5, "warmup_ratio": 0.5, "learning_rate_end": 1e-5,
}  # fmt: skip
PLACES = np.broadcast_to(np.arange(2, 12), (4, 10))  # of `batch_of`
NEEDY = {  # keys that only others make sense of; what else says so is tested by name
    "early_stopping_patience": 3, "greater_is_better": True, "ref_model_sync_steps": 7, "ref_model_mixup_alpha": 0.5,
    "fcm_min_ratio": 0.1, "use_bias_correction_kl": False, "importance_sampling_cap": 2.0,
    "distillation_topk": 7, "distillation_add_tail": True,
}  # fmt: skip
# Keys of what is sampled and how it is rewarded: tests/test_recipe_samples.py finds what they do.
SAMPLING = {
    "reward_functions", "reward_timeout", "top_p", "top_k", "min_p", "repetition_penalty", "sampling_timeout",
    "presence_penalty", "frequency_penalty",
    "steps_per_generation", "num_iterations", "rollout_ahead", "sampling_devices", "sampler_sleeps",
    "mask_truncated_completions", "log_completions",
    "num_completions_to_print", "scale_rewards", "multi_objective_aggregation", "num_remains_in_group", "filter_by",
    "difficulty_column", "normalize_advantages", "missing_eos_penalty", "mixture_coef", "environment", "kl_coef",
    "kl_estimator", "whiten_rewards", "gamma", "lam", "samples_per_row", "pack_samples",
    "seq_kd", "num_value_samples", "filter_all_incorrect", "beta1",
    "use_successful_as_teacher", "success_reward_threshold", "dont_reprompt_on_self_success", "max_reprompt_len",
    "remove_thinking_from_demonstration", "include_environment_feedback", "environment_feedback_only_without_solution",
    "reprompt_template", "solution_template", "feedback_template", "teacher_model_kind", "teacher_update_rate",
    "teacher_sync_steps",
}  # fmt: skip
LOOP = {
    "max_training_steps", "eval_batch_size", "gradient_accumulation_steps", "seed", "ema_decay",
    "router_bias_update_speed", "router_jitter_noise", "router_capacity_factor", "skip_nonfinite", "debug",
    "lora", "log_steps", "evaluation_steps", "save_steps", "save_directory", "save_total_limit", "resume_if_possible",
    "metric_for_best_model", "use_wandb", "use_tensorboard", "precompute_ref_log_probs", "sync_ref_model",
    "trainer_type", "optimizer", "scheduler", "loss_type", "disable_dropout", "trainable",
}  # fmt: skip


def made(kind: str, loss: Any = None, **keys: Any) -> recipe.Recipe:
    keys = ({} if loss is None else {"loss_type": loss}) | NEEDS.get(loss, {}) | OF_TYPE.get(kind, {}) | keys
    base = {"model": {"name_or_path": "m"}, "mixture": {"informs": [{"data_files": "d"}]}, "actions": ["train"]}
    base |= {"teacher_model": {"name_or_path": "t"}} if kind in methods.types(teacher=True) else {}
    return recipe.from_dict({**base, "trainer": {"trainer_type": kind, **keys}})


def kind_of(name: str) -> str:
    method = methods.METHODS[name]
    return method.data(method.keys())["kind"]


def batch_of(kind: str) -> dict[str, Any]:
    pairs = kind_of(kind) == "pairs" or kind in COMPARED[:2]
    rng, shape = np.random.default_rng(0), (4, *[2] * pairs, *[3] * (kind_of(kind) in ("embedding", "triples")))
    rows = lambda: {
        "tokens": rng.integers(0, 64, (*shape, 12)), "lengths": rng.integers(6, 13, shape),
        "mask": np.broadcast_to(np.arange(12) > 2, (*shape, 12)),
    }  # fmt: skip
    if methods.METHODS[kind].samples and kind != "gkd":
        more = {
            name: rng.normal(size=(4, 12)).astype(np.float32)
            for name in ("advantages", "old", "logps", "values", "returns")
        }
        more |= {"advantage": more["advantages"][:, 0]}
        more |= (
            {f"told_{name}": x for name, x in rows().items()} | {"told_places": PLACES, "places": PLACES}
            if kind == "sdpo"
            else {}
        )
        return rows() | ({"better": np.arange(4) % 2 > 0} if pairs else more)
    labels = (*shape, 12) if kind in ("prm", "token_classification", "question_answering") else (*shape, 1)
    batch = rows() | ({"labels": rng.integers(-1, 2, labels)} if kind in methods.types(head=True) else {})
    return batch | ({"label": np.arange(4) % 3 > 0, "kl": rows()} if kind in ("kto", "bco") else {})


def shown(f: Any, *args: Any) -> str:
    """The program of f's result, without what does not reach it, such as metrics."""
    jaxpr = jax.make_jaxpr(f)(*args).jaxpr
    needed, kept = {v for v in jaxpr.outvars if hasattr(v, "count") or not hasattr(v, "val")}, []
    for e in reversed(jaxpr.eqns):
        if needed & set(e.outvars):
            needed |= {v for v in e.invars if not hasattr(v, "val")}
            kept.append(e)
    pruned = jaxpr.replace(eqns=kept[::-1], effects=jaxpr.effects) if hasattr(jaxpr, "replace") else jaxpr
    return re.sub(r"0x[0-9a-f]+", "", str(pruned))


@cache
def model_of(kind: str) -> models.Model:
    if kind == "masked_lm":
        cfg = roberta.Config(vocab=64, embed=16, ffn=16, layers=1, heads=2, rows=40)
        return models.Model(roberta, cfg, params.abstract(roberta.spec(cfg), jnp.float32))
    spec = mixtral.spec(CFG)
    if kind in methods.types(head=True):
        spec = heads.spec(mixtral, CFG, *methods.METHODS[kind].head(made(kind).trainer))
    return models.Model(mixtral, CFG, params.abstract(spec, jnp.float32))


def data_of(found: recipe.Recipe) -> Any:
    """What the data makes of a recipe."""
    return (task_settings if settle(found).sampling else recipe.build_settings)(found)


def program_of(found: recipe.Recipe) -> str:
    """What a loss makes of a recipe."""
    t, model = found.trainer, model_of(found.trainer.trainer_type)
    given = {"bco": {"mean": jnp.zeros(()), "count": jnp.zeros(())}, "teacher": model.params, "key": jax.random.key(0)}
    given |= {"reference": model.params} if t.trainer_type in methods.types(reference=True) else {}
    loss = recipe.build_objective(found, model, teacher=model).loss
    value = lambda *args: loss(*args)[0]
    gradient = lambda p, *args: jax.grad(value)(p, *args)
    program = gradient if t.gradient_checkpointing else value
    return shown(program, model.params, batch_of(t.trainer_type), given)


def test_every_key_of_the_trainer_is_looked_at_here():
    assert {f.name for f in dataclasses.fields(trainer.Trainer)} == {*VALUES, *OPTIMIZER, *NEEDY, *LOOP, *SAMPLING}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "loss"), VARIANTS, ids=str)
def test_a_key_of_the_loss_has_an_effect_or_is_refused(kind, loss):
    base, idle, refused = made(kind, loss), [], []
    assert recipe.faults(base) == []
    before, data = program_of(base), data_of(base)
    for name, value in VALUES.items():
        found = made(kind, loss, **{name: value})
        if recipe.faults(found):
            refused.append(name)
        elif name == "gradient_checkpointing":  # which no loss of a type treats otherwise than another
            first = next(other for k, other in VARIANTS if k == kind) == loss
            assert not first or program_of(found) != shown_gradient(base), name
        elif data_of(found) == data and program_of(found) == before:
            idle.append(name)
    assert idle == IDLE.get(kind, []) and ("lmbda" in refused) == (kind != "gkd")


def shown_gradient(base: recipe.Recipe) -> str:
    return program_of(base.set("trainer.gradient_checkpointing", "everything_saveable"))


@pytest.mark.parametrize("scheduler", sorted(train.schedules.SCHEDULES))
@pytest.mark.parametrize("optimizer", sorted(train.optim.OPTIMIZERS))
def test_a_key_of_the_optimizer_has_an_effect_or_is_refused(optimizer, scheduler):
    spec = {"a": params.Param("vocab embed", (8, 4), params.normal(1.0), "a.weight")}
    weights = {"a": jnp.arange(32.0).reshape(8, 4)}

    def effect(found):
        made, rate = recipe.build_optimizer(found, spec, 20), recipe.build_schedule(found, 20)
        extra = {"grad_fn": lambda p: p} if optimizer == "sophia" else {}
        step = lambda w: made.update(w, made.init(w), w, **extra)[0]
        return [float(rate(s)) for s in range(21)], str(jax.make_jaxpr(step)(weights))

    base = made("sft", optimizer=optimizer, scheduler=scheduler)
    if recipe.faults(base):
        return
    before, idle = effect(base), []
    for name, value in OPTIMIZER.items():
        found = base.set(f"trainer.{name}", value)
        if not recipe.faults(found) and effect(found) == before:
            idle.append(name)
    assert idle == []
