"""From a recipe to the parts of a run: mesh, tokenizer, models, data, optimizer. Each is a plain function of the recipe."""

import math
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fdel import models, params, plan, text, train
from fdel.recipe import check, config, objective, parse
from fdel.recipe.read import Recipe
from fdel.recipe.schema import DTYPES, METHODS
from fdel.recipe.schema import Model as Source
from fdel.recipe.trainer import HEADED, RATES, Lora

# ---- mesh and models -----------------------------------------------------------------------------------------------


def build_mesh(recipe: Recipe) -> jax.sharding.Mesh:
    """Make the mesh of `sharding`; with all sizes 1, of the first device."""
    s = recipe.sharding
    shape = dict(zip(s.axis_names, s.axis_dims, strict=True))
    if s.dcn_axis_dims is not None:
        return params.make_mesh(shape, slices=dict(zip(s.axis_names, s.dcn_axis_dims, strict=True)))
    if set(s.axis_dims) == {1} and jax.process_count() > 1:
        raise parse.RecipeError(
            f"sharding.axis_dims: all 1 is the first device alone, but there are {jax.process_count()} processes; use -1"
        )
    return params.make_mesh(shape, jax.devices()[:1] if set(s.axis_dims) == {1} else None)


def rules_of(recipe: Recipe, base: params.Rules = params.TRAIN) -> params.Rules:
    """Say where axes of weights lie: as `base` does, but for `sharding.rules`."""
    return {**base, **(recipe.sharding.rules or {})}


def build_tokenizer(recipe: Recipe) -> text.Tokenizer:
    """Load the tokenizer of `model.tokenizer`, or the model's."""
    m = recipe.model
    revision = None if m.tokenizer else m.extra_kwargs.revision
    return text.load(params.resolve(m.tokenizer or config.given(m), revision=revision))


def compute_dtype(recipe: Recipe) -> Any:
    """The dtype of `loader.dtype`, None if computation has the parameters'."""
    return None if recipe.loader.dtype is None else jnp.dtype(DTYPES[recipe.loader.dtype])


def build_model(recipe: Recipe, mesh: jax.sharding.Mesh | None = None) -> models.Model:
    """Load the model that is trained onto `mesh`, by default that of `sharding`; quantized, with adapters, if it is so.

    For trainer_types reward and prm its params are those of `models.classifier`, with a new head unless
    the checkpoint has one.
    """
    t, loader = recipe.trainer, recipe.loader
    frozen = check.adapters(recipe)
    name = loader.param_dtype or (loader.dtype if frozen else None)
    mesh = build_mesh(recipe) if mesh is None else mesh
    model = load(recipe, recipe.model, None if name is None else jnp.dtype(DTYPES[name]), mesh, "model")
    spec = spec_of(recipe, model)
    if t.trainer_type in HEADED and "score" in model.params:
        return model  # is one already: its training goes on
    if t.trainer_type in HEADED:
        inner = {k: v for k, v in model.params.items() if k in spec["model"]}
        head = {k: v for k, v in spec.items() if k != "model"}
        return model._replace(
            params={"model": inner} | params.init(head, jax.random.key(t.seed), dtype=inner["embed"].dtype)
        )
    if method := check.weights_format(recipe):
        group = recipe.quantization.model.group_size
        model = model._replace(params=params.quantize(model.params, METHODS[method], spec=spec, group=group))
    if frozen:
        lora = t.lora or Lora()
        where = config.lora_targets(lora, spec)
        add = lambda p, key: params.lora.add(
            p, lora.r, lora.lora_alpha, where, key=key, spec=spec, rslora=lora.use_rslora
        )
        key = jax.random.key(t.seed)
        model = model._replace(params=jax.jit(add, donate_argnums=0)(model.params, key))
    if loader.verbose:
        count, size = params.count(spec), params.nbytes(model.params)
        print(f"{config.name_of(recipe)}: {model.family.MODEL_TYPE}, {count:,} parameters, {size:,} bytes")
    return model


def spec_of(recipe: Recipe, model: models.Model) -> Any:
    """The spec tree of the model's parameters, for trainer_types reward and prm with their heads."""
    family, cfg = model.family, model.cfg
    if recipe.trainer.trainer_type not in HEADED:
        return family.spec(cfg)
    steps = recipe.trainer.trainer_type == "prm"  # two classes with a bias, as transformers classifies tokens
    return models.classifier.spec(family, cfg, 2 if steps else 1, steps)


def build_teacher(recipe: Recipe, mesh: jax.sharding.Mesh | None = None) -> models.Model | None:
    """Load the model to distil, in the dtype of the computation; None without one."""
    if recipe.teacher_model is None:
        return None
    mesh = build_mesh(recipe) if mesh is None else mesh
    return load(recipe, recipe.teacher_model, compute_dtype(recipe), mesh, "teacher_model")


def build_reference(recipe: Recipe, model: models.Model) -> Any:
    """Give the parameters to compare with: those of `reference_model`, or a copy of the model's as they are now.

    None where trainer_type has no reference, where it is the model without its adapters, and where its log-probabilities
    were computed before (`ref_logps.precompute`).
    """
    dtype = compute_dtype(recipe)
    if recipe.trainer.precompute_ref_log_probs:
        return None
    if recipe.reference_model is not None:
        return load_reference(recipe, model)
    if recipe.trainer.trainer_type not in check.REFERENCE or check.adapters(recipe):
        return None
    copy: Callable = lambda p: jax.tree.map(jnp.copy, p)
    return jax.jit(copy if dtype is None else train.compute(copy, dtype, spec_of(recipe, model)))(model.params)


def load_reference(recipe: Recipe, model: models.Model) -> Any:
    """Load the parameters of `reference_model`, in the dtype of the computation; another kind is a RecipeError."""
    other = load(
        recipe, recipe.reference_model or Source(), compute_dtype(recipe), build_mesh(recipe), "reference_model"
    )
    if (other.family, other.cfg) != (model.family, model.cfg):
        raise parse.RecipeError("reference_model: its config.json differs from the model's; give one of its kind")
    return other.params


def cast(recipe: Recipe, spec: Any) -> Callable[[Callable], Callable]:
    """Give what goes around functions of parameters, so that they compute in `loader.dtype`."""
    dtype = compute_dtype(recipe)
    if dtype is None or check.adapters(recipe):
        return lambda f: f
    return lambda f: train.compute(f, dtype, spec)


def load(
    recipe: Recipe, source: Source, dtype: Any, mesh: jax.sharding.Mesh | None, name: str, rules: Any = params.TRAIN
) -> models.Model:
    """Load the model of a section onto a mesh by rules and `sharding.rules`, with `base_config.values`; not the teacher.

    The model that is trained may start from random weights: those of trainer.seed.
    """
    rules = rules_of(recipe, rules)
    if name == "model" and config.from_scratch(source):
        family, cfg = config.read(recipe)
        spec, seed = family.spec(cfg), recipe.trainer.seed
        if jax.process_index() == 0:
            print(f"model: random weights, of trainer.seed {seed}", file=sys.stderr)
        at = None if mesh is None else params.shardings(spec, mesh, rules)
        made = jax.jit(lambda key: params.init(spec, key, dtype=dtype or jnp.float32), out_shardings=at)
        return models.Model(family, cfg, made(jax.random.key(seed)))
    directory = params.resolve(config.given(source, name), revision=source.extra_kwargs.revision)
    model = models.load(directory, dtype=dtype, mesh=mesh, rules=rules)
    _fits(recipe, model, name)
    if name == "teacher_model":
        return model
    cfg = config.changed(recipe, model.family, model.cfg)
    config.same_shapes(model.family, cfg, model.cfg)
    return model._replace(cfg=cfg)


def _fits(recipe: Recipe, model: models.Model, name: str) -> None:
    """Raise RecipeError for a classifier where text is learnt, and for one with other labels than are learnt."""
    if "score" not in model.params:
        return
    found = f"{name}.name_or_path: is a classifier of {len(model.params['score'])} labels"
    if recipe.trainer.trainer_type not in HEADED or name != "model":
        raise parse.RecipeError(f"{found}, which writes no text; only trainer_type {' and '.join(HEADED)} train one")
    want = [(path, p.shape) for path, p in params.named_leaves(spec_of(recipe, model))]
    if want != [(path, p.shape) for path, p in params.named_leaves(models.spec_of(model))]:
        head = "two labels with a bias" if recipe.trainer.trainer_type == "prm" else "one label without a bias"
        raise parse.RecipeError(f"{found}; trainer_type {recipe.trainer.trainer_type} trains a head of {head}")


def planned(recipe: Recipe) -> tuple[Any, Any, plan.Training]:
    """Give what `fdel plan` wants: family, config, and the step. RecipeError if it knows no such step."""
    t, s = recipe.trainer, recipe.sharding
    if t.trainer_type != "sft" or check.adapters(recipe):
        raise parse.RecipeError("plan knows the step of trainer_type sft that trains all weights, and no other")
    if s.rules:
        raise parse.RecipeError("sharding.rules: plan knows fdel's own alone; remove them")
    slices = s.dcn_axis_dims or (1,) * len(s.axis_dims)
    sizes = zip(s.axis_names, s.axis_dims, slices, strict=True)
    mesh = ",".join(f"{a}={n if n == -1 else n * m}" for a, n, m in sizes)
    dtype = DTYPES[recipe.loader.param_dtype or "bf16"]
    training = plan.Training(
        mesh, check.batch_rows(recipe), check.row_length(recipe), t.gradient_accumulation_steps, dtype, t.optimizer,
        objective.remat(t),
    )  # fmt: skip
    return *config.read(recipe), training


# ---- optimizer -----------------------------------------------------------------------------------------------------


def build_schedule(recipe: Recipe, steps: int) -> optax.Schedule:
    """Build the learning rate of a run of `steps` steps."""
    t = recipe.trainer
    peak = RATES[t.trainer_type] if t.learning_rate is None else t.learning_rate
    warmup = t.warmup_steps or math.ceil((t.warmup_ratio or 0) * steps)
    options = {} if t.learning_rate_end is None else {"final": t.learning_rate_end / peak}
    return train.schedule(t.scheduler, peak, warmup=min(warmup, steps - 1), steps=steps, **options)


def build_optimizer(recipe: Recipe, spec: Any, steps: int) -> optax.GradientTransformation:
    """Build the optimizer of a run of `steps` steps; `spec` is that of the parameters. All adapters decay."""
    t = recipe.trainer
    options: dict[str, Any] = {"weight_decay": t.weight_decay, "clip": t.clip_grad}
    if t.optimizer == "adamw":
        options |= {"b1": t.adam_beta1, "b2": t.adam_beta2, "eps": t.adam_epsilon, "moments": t.moments}
    if check.adapters(recipe):
        options["mask"] = None
    return train.optimizer(t.optimizer, build_schedule(recipe, steps), spec=spec, **options)
