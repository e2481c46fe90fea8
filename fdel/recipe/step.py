"""From a recipe to a training step: the objective on the model, the optimizer, and what is kept beside the parameters."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fdel import models, params, train
from fdel.ops.shard import widen
from fdel.recipe import build, check, objective
from fdel.recipe.read import Recipe
from fdel.train import parallel
from fdel.train.evaluation import evaluator
from fdel.train.metrics import Row, reporting
from fdel.train.steps import Metrics, Step


class Training(NamedTuple):
    """A composed run: `state, metrics = step(state, batch, *fixed)` in `jax.set_mesh(mesh)`, jitted, the state donated.

    `loss(params, batch, *rest)` is the objective, `rest(state)` what follows the batch.
    `complete(params)` joins trained params with the frozen ones.
    """

    step: Callable
    state: train.TrainState
    fixed: tuple
    loss: Callable
    rest: Callable
    complete: Callable


def build_step(recipe: Recipe, model: models.Model, steps: int, mesh: jax.sharding.Mesh | None = None) -> Training:
    """Compose the step of a run of `steps` steps for a model of `build_model`; teacher and reference are loaded.

    Call it in `jax.set_mesh(mesh)`, by default that of `sharding`. The model's trained parameters are donated.
    """
    t, mesh = recipe.trainer, build.build_mesh(recipe) if mesh is None else mesh
    spec, adapted = build.spec_of(recipe, model), check.adapters(recipe)
    teacher = build.build_teacher(recipe, mesh)
    reference = build.build_reference(recipe, model)
    trained, frozen = params.lora.split(model.params) if adapted else (model.params, None)
    rate, optimizer = build.build_schedule(recipe, steps), build.build_optimizer(recipe, spec, steps)

    def fresh(trained: Any, reference: Any) -> train.TrainState:
        return train.init_state(trained, optimizer, **_extras(recipe, trained, reference))

    at = parallel.state_shardings(
        jax.eval_shape(fresh, trained, reference), params.shardings(spec, mesh, build.rules_of(recipe))
    )
    found = objective.build(
        t, model, teacher=teacher, adapted=adapted,
        own_reference=recipe.reference_model is not None or t.precompute_ref_log_probs,
        cast=build.cast(recipe, spec), lay=lambda g: parallel.constrain(g, at.params),
    )  # fmt: skip
    reads = [name for name in ("reference", "bco") if name in at.extra]
    fixed = (
        *([frozen] if adapted else []),
        *([reference] if reference is not None and "reference" not in reads else []),
    )
    fixed += () if teacher is None else (teacher.params,)
    half = any(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(trained))
    apply = {"apply": train.add_stochastic(t.seed)} if half else {}  # bfloat16 would lose small updates
    g = train.normalize(found.grads)
    step = train.update(g, optimizer, reads=reads, skip_nonfinite=t.skip_nonfinite, **apply)
    step = _around(recipe, step, rate)
    return Training(
        step=jax.jit(step, donate_argnums=0, out_shardings=(at, None), compiler_options=train.compiler_options()),
        state=jax.jit(fresh, out_shardings=at, donate_argnums=0)(trained, reference),
        fixed=fixed,
        loss=found.loss,
        rest=lambda state: (*(state.extra[name] for name in reads), *fixed),
        complete=(lambda p: params.lora.join(p, frozen)) if adapted else lambda p: p,
    )


def _extras(recipe: Recipe, trained: Any, reference: Any) -> dict[str, Any]:
    t, extras = recipe.trainer, {}
    if t.sync_ref_model:
        extras["reference"] = reference
    if t.trainer_type == "bco":
        extras["bco"] = {"mean": jnp.zeros(()), "count": jnp.zeros(())}
    if t.ema_decay is not None:
        extras["ema"] = jax.tree.map(widen, trained)
    return extras


def _around(recipe: Recipe, step: Step, rate: Callable) -> Step:
    """Wrap a step in what keeps averages and references; report the learning rate."""
    t = recipe.trainer
    if t.trainer_type == "bco":
        step = train.losses.track_rewards(step)
    if t.ema_decay is not None:
        step = train.ema(step, t.ema_decay)
    if t.sync_ref_model:
        step = train.sync_reference(step, t.ref_model_mixup_alpha, t.ref_model_sync_steps)

    def precise(state: train.TrainState, batch: Any, *fixed: Any) -> tuple[train.TrainState, Metrics]:
        with jax.default_matmul_precision(recipe.loader.precision):
            return step(state, batch, *fixed)

    return reporting(precise, learning_rate=rate)


def final_params(recipe: Recipe, state: train.TrainState) -> Any:
    """Give the trained parameters to evaluate and to save: the moving average's, or schedule-free's, where there is one."""
    if recipe.trainer.ema_decay is not None:
        return jax.tree.map(lambda a, p: a.astype(p.dtype), state.extra["ema"], state.params)
    return train.averaged(state) if recipe.trainer.optimizer == "schedule_free" else state.params


def build_evaluate(recipe: Recipe, training: Training, data: Iterable | None, mesh: jax.sharding.Mesh) -> Any:
    """Build `evaluate(state)` for `loop.fit`: the means of the objective over all of `data`; None without data."""
    if data is None:
        return None
    loss, sharding = jax.jit(training.loss), params.batch_sharding(mesh)

    def evaluate(state: train.TrainState) -> Row:
        fixed = training.rest(state)
        return evaluator(loss, data, fixed=fixed, sharding=sharding)(
            dataclasses.replace(state, params=final_params(recipe, state))
        )

    return evaluate
