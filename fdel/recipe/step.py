"""From a recipe to a training step: the objective on the model, the optimizer, and what is kept beside the parameters."""

import dataclasses
import logging
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fdel import models, params, train
from fdel.ops.contraction import widen
from fdel.ops.dispatch import met, without_effect
from fdel.params.quantize import quantized_paths
from fdel.recipe import build, parse, samples
from fdel.recipe.read import Recipe
from fdel.recipe.settled import Settled, settle
from fdel.train import debug, losses, parallel
from fdel.train.evaluation import evaluator
from fdel.train.metrics import reporting
from fdel.train.steps import Metrics, Step

log = logging.getLogger(__name__)


class Composed(NamedTuple):
    """A loss `(params, batch, given) -> (sum, sums)` of a whole batch, and its gradient function in microbatches."""

    loss: Callable
    grads: Callable


class TrainingRun(NamedTuple):
    """A composed run: `state, metrics = step(state, batch, **given)` in `jax.set_mesh(mesh)`, jitted, the state donated.

    `loss(params, batch, given)` is the objective, which `reads` these extras too. `complete(params)` joins trained params
    with the frozen ones.
    """

    step: Callable
    state: train.TrainState
    given: dict[str, Any]
    loss: Callable
    reads: tuple[str, ...]
    complete: Callable


def build_objective(
    recipe: Recipe | Settled, model: models.Model, *, teacher: models.Model | None = None,
    lay: Callable[[Callable], Callable] = lambda g: g,
) -> Composed:  # fmt: skip
    """Build the objective of a trainer type; where weights are frozen its params are those of `lora.split`.

    It is given "base", the frozen part of the model, if there is one; "reference", unless that is the base without
    adapters or the batch has its numbers; "teacher"; and the extras of the type. `lay` goes around gradient functions of a
    microbatch. ValueError for keys that fit neither each other nor the model.
    """
    s = settle(recipe)
    if s.method.teacher and teacher is None:
        raise ValueError(f"trainer_type {s.method.name} learns from a teacher; pass it")
    more: dict[str, Any] = {"teacher": teacher} if s.method.teacher else {}
    quiet = model._replace(cfg=losses.forward.still(model.cfg))
    found = s.method.objective(s.keys, quiet, remat=s.remat, **more)
    rows = build.cast(s, model, found.rows)
    rows = _rounded(s, model, rows) if s.rounds else rows
    if s.frozen:
        rows = losses.on_adapters(rows, reference=s.reference == "base")
    moves = s.recipe.trainer.router_bias_update_speed
    routed = _routed(s, model)
    count = (lambda g: train.count_choices(routed(g), build.spec_of(s, model))) if moves else routed
    n, total, prepare, loss = s.recipe.trainer.gradient_accumulation_steps, found.total, found.prepare, rows
    if total is not None:
        loss = lambda params, batch, given: total(rows(params, batch, given), batch, given)
        if found.coupled:
            return Composed(loss, count(lay(train.gradcache(rows, total, n))))
    apart = count(parallel.reduce_once(train.accumulate(lay(train.grads(loss)), n)))
    if prepare is None:
        return Composed(loss, apart)
    return Composed(loss, lambda params, batch, given: apart(params, prepare(batch), given))


def _rounded(s: Settled, model: models.Model, f: Callable) -> Callable:
    """Make a function compute with weights rounded to `quantization.model`, whose gradients are those of the weights."""
    spec, group = build.spec_of(s, model), s.recipe.quantization.model.group_size
    near = lambda p: params.straight_through(p, str(s.format), spec=spec, group=group)
    return lambda p, batch, given: f(near(p), batch, given)


def _routed(s: Settled, model: models.Model) -> Callable[[Callable], Callable]:
    """Say what is done to routers: as keys say, else as the model's config.json does, if the model has any."""
    asked = {"router_jitter_noise": s.recipe.trainer.router_jitter_noise}
    asked["router_capacity_factor"] = getattr(s.keys, "router_capacity_factor", None)
    for name, value in asked.items():
        if value and not getattr(model.cfg, "experts", None):
            raise ValueError(f"{name}={value}, but {model.family.__name__} has no experts; remove it")
    jitter, capacity = asked.values()
    jitter = getattr(model.cfg, "jitter", 0.0) if jitter is None else jitter
    return lambda g: train.route(g, jitter=jitter or 0.0, capacity=capacity)


def build_step(
    recipe: Recipe | Settled, model: models.Model, steps: int, mesh: jax.sharding.Mesh | None = None
) -> TrainingRun:
    """Compose the step of a run of `steps` steps for a model of `build_model`; teacher and reference are loaded.

    Call it in `jax.set_mesh(mesh)`, by default that of `sharding`. The model's trained parameters are donated.
    """
    s = settle(recipe)
    steps *= getattr(s.keys, "updates", 1)
    t, mesh = s.recipe.trainer, build.build_mesh(s) if mesh is None else mesh
    spec, teacher, reference = build.spec_of(s, model), build.build_teacher(s, mesh), build.build_reference(s, model)
    trained, frozen = model.params, None
    if s.frozen:
        trained, frozen = params.lora.split(model.params, build.trained_whole(s, model))
    few = [
        f"trainer.trainable: {p} is in few bits, which are not trained; leave it out" for p in quantized_paths(trained)
    ]
    parse.fail(few)
    optimizer = build.build_optimizer(s, spec, steps)

    def fresh(trained: Any, reference: Any) -> train.TrainState:
        extras = {name: start() for name, start in s.method.extra.items()}
        if s.moves:
            extras["reference"] = reference
        if t.ema_decay is not None:
            extras["ema"] = jax.tree.map(widen, trained)
        return train.init_state(trained, optimizer, **extras)

    shapes = jax.eval_shape(fresh, trained, reference)
    at = parallel.state_shardings(shapes, params.shardings(spec, mesh, s.train_rules))
    found = build_objective(s, model, teacher=teacher, lay=lambda g: parallel.constrain(g, at.params))
    reads = tuple(name for name in ("reference", *s.method.extra) if name in at.extra)
    parts = {"base": frozen, "reference": reference, "teacher": None if teacher is None else teacher.params}
    half = any(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(trained))
    apply = {"apply": train.precision.add_stochastic(t.seed)} if half else {}  # bfloat16 would lose small updates
    g = train.normalize(found.grads)
    g, jit = (debug.checked(g, model.cfg.vocab), debug.jit) if t.debug else (g, jax.jit)
    step = train.update(g, optimizer, reads=reads, skip_nonfinite=t.skip_nonfinite, seed=t.seed, **apply)
    step = train.balance(step, t.router_bias_update_speed) if t.router_bias_update_speed else step
    step = _around(s, step, build.build_schedule(s, steps))
    step = samples.learning(s, model._replace(cfg=losses.forward.still(model.cfg)), step)
    step = jit(step, donate_argnums=0, out_shardings=(at, None), compiler_options=train.compiler_options())
    state = jax.jit(fresh, out_shardings=at, donate_argnums=0)(trained, reference)
    given = {name: part for name, part in parts.items() if part is not None and name not in reads}
    complete = (lambda p: params.lora.join(p, frozen)) if s.frozen else lambda p: p
    return TrainingRun(step, state, given, found.loss, reads, complete)


def _around(s: Settled, step: Step, rate: Callable) -> Step:
    """Wrap a step in what keeps averages and references; report the learning rate."""
    t, step = s.recipe.trainer, s.method.keep(step)
    if t.ema_decay is not None:
        step = train.ema(step, t.ema_decay)
    if s.moves:
        step = train.sync_reference(step, *s.moves)

    def precise(state: train.TrainState, batch: Any, /, **given: Any) -> tuple[train.TrainState, Metrics]:
        with s.computing():
            if s.kernels:  # this runs once for each compiled step
                with met() as known:
                    jax.eval_shape(step, state, batch, **given)
                if why := without_effect(s.kernels, known()):
                    log.warning("loader.kernels: in a training step %s", why)
            return step(state, batch, **given)

    return reporting(precise, learning_rate=rate)


def final_params(recipe: Recipe | Settled, state: train.TrainState) -> Any:
    """Give the trained parameters to evaluate and to save: the moving average's, or schedule-free's, where there is one."""
    t = settle(recipe).recipe.trainer
    if t.ema_decay is not None:
        return jax.tree.map(lambda a, p: a.astype(p.dtype), state.extra["ema"], state.params)
    return train.optim.averaged(state) if t.optimizer == "schedule_free" else state.params


def build_evaluate(
    recipe: Recipe | Settled, training: TrainingRun, data: Iterable | None, mesh: jax.sharding.Mesh
) -> Any:
    """Build `evaluate(state)` for `loop.fit`: the means of the objective over all of `data`; None without data."""
    if data is None:
        return None
    at, seed = params.batch_sharding(mesh), settle(recipe).recipe.trainer.seed
    means = evaluator(jax.jit(training.loss), data, given=training.given, reads=training.reads, seed=seed, sharding=at)
    return lambda state: means(dataclasses.replace(state, params=final_params(recipe, state)))
