"""From a recipe to the parts of a run: mesh, tokenizer, models, optimizer. Each is a plain function of the recipe."""

import dataclasses
import json
import math
import re
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from fdel import models, params, plan, text, train
from fdel.ops.weights import LowRank
from fdel.params.hf_layout import matrix
from fdel.params.quantize import change, quantized_paths
from fdel.recipe import config, methods, parse
from fdel.recipe.read import Recipe
from fdel.recipe.schema import Model as Source
from fdel.recipe.settled import Settled, settle

Mesh = jax.sharding.Mesh

# ---- mesh and models -----------------------------------------------------------------------------------------------


def build_mesh(recipe: Recipe | Settled) -> Mesh:
    """Make the mesh of `sharding`, of the devices that do not sample alone; with all sizes 1, of the first device."""
    every, apart = jax.devices(), getattr(settle(recipe).keys, "sampling_devices", 0)
    s, devices = settle(recipe).recipe.sharding, every[: max(0, len(every) - apart)]
    shape = dict(zip(s.axis_names, s.axis_dims, strict=True))
    if s.dcn_axis_dims is not None:
        return params.make_mesh(shape, devices, slices=dict(zip(s.axis_names, s.dcn_axis_dims, strict=True)))
    one, n = set(s.axis_dims) == {1}, jax.process_count()
    if one and n > 1:
        raise parse.RecipeError(
            f"sharding.axis_dims: all 1 is the first device alone, but there are {n} processes; use -1"
        )
    return params.make_mesh(shape, devices[:1] if one else devices)


def build_tokenizer(recipe: Recipe | Settled) -> text.Tokenizer:
    """Load the tokenizer of `model.tokenizer`, or the model's."""
    m = settle(recipe).recipe.model
    revision = None if m.tokenizer else m.extra_kwargs.revision
    return text.load(params.resolve(m.tokenizer or config.given(m), revision=revision))


def build_model(recipe: Recipe | Settled, mesh: Mesh | None = None) -> models.Model:
    """Load the model that is trained onto `mesh`, by default that of `sharding`; quantized, with adapters, if it is so.

    For trainer_types with a head its params are those of `models.heads`, the head new unless the checkpoint has one.
    """
    s = settle(recipe)
    r, seed = s.recipe, s.recipe.trainer.seed
    model = load(s, r.model, s.param_dtype, build_mesh(s) if mesh is None else mesh, "model")
    parse.fail(config.few_bits(s, bool(quantized_paths(model.params))))
    if more := s.method.config(s.keys):
        source = json.dumps(json.loads(model.cfg.source) | more)
        model = model._replace(cfg=dataclasses.replace(model.cfg, source=source))
    spec = spec_of(s, model)
    if s.method.head and not models.heads.kind_of(model.params):  # else it is one already: its training goes on
        inner = {k: v for k, v in model.params.items() if k in spec["model"]}
        head = {k: v for k, v in spec.items() if k != "model"}
        new = params.init(head, jax.random.key(seed), dtype=inner["embed"].dtype)
        model = model._replace(params={"model": inner} | new)
    if s.format and not s.rounds:
        model = quantized(s, model)
    if lora := s.lora:
        where = config.lora_targets(lora, adaptable(s, model))
        how: dict[str, Any] = {"where": where, "spec": spec, "rslora": lora.use_rslora}
        add = lambda p, key: params.lora.add(p, lora.r, lora.lora_alpha, key=key, **how)
        model = model._replace(params=jax.jit(add, donate_argnums=0)(model.params, jax.random.key(seed)))
        lost = ", ".join(params.peft.without_place(spec, model.params))  # told before they are trained
        parse.fail([f"trainer.lora.target_modules: adapters of {lost} cannot be written; name others"] if lost else ())
    if r.loader.verbose:
        count, size = params.count(spec), params.nbytes(model.params)
        print(f"{config.name_of(r)}: {model.family.MODEL_TYPE}, {count:,} parameters, {size:,} bytes")
    return model


def quantized(s: Settled, model: models.Model) -> models.Model:
    """Bring a model's matrices into the format of `quantization.model`."""
    group, spec = s.recipe.quantization.model.group_size, spec_of(s, model)
    return model._replace(params=params.quantize(model.params, str(s.format), spec=spec, group=group))


def spec_of(s: Settled, model: models.Model) -> Any:
    """The spec tree of the model's parameters, with the head of trainer types that have one."""
    if s.method.head is None:
        return models.spec_of(model)
    return models.heads.spec(model.family, model.cfg, *s.method.head(s.keys))


def adaptable(s: Settled, model: models.Model) -> Any:
    """The spec tree of what adapters may adapt: all but a head, which is trained whole."""
    spec = spec_of(s, model)
    return {"model": spec["model"]} if s.method.head else spec


def trained_whole(s: Settled, model: models.Model) -> str:
    """Find what is trained whole, where not everything is: a head, and `trainer.trainable`, as a pattern of paths.

    A RecipeError for what nothing matches, and for what has an adapter too.
    """
    wanted, head = s.recipe.trainer.trainable, models.heads.WHOLE
    if wanted is None:
        return head
    own = config.trainable(wanted, spec := spec_of(s, model))
    where = config.lora_targets(s.lora, adaptable(s, model)) if s.lora else "$."
    matrices = (path for path, p in params.named_leaves(spec) if matrix(p) and re.search(where, path))
    if both := [path for path in matrices if re.search(own, path)]:
        found = f"{', '.join(both[:3])} would have adapters"
        raise parse.RecipeError(f"trainer.trainable: {found}; name others in lora.target_modules, or here")
    return f"{head}|{own}"


def build_teacher(recipe: Recipe | Settled, mesh: Mesh | None = None) -> models.Model | None:
    """Load the model to distil, in the dtype of the computation; None without one."""
    s = settle(recipe)
    if s.recipe.teacher_model is None:
        return None
    return load(s, s.recipe.teacher_model, s.dtype, build_mesh(s) if mesh is None else mesh, "teacher_model")


def build_reference(recipe: Recipe | Settled, model: models.Model) -> Any:
    """Give the parameters to compare with: those of `reference_model`, or a copy of the model's as they are now.

    None where trainer_type has no reference, where it is the model without its adapters, and where its log-probabilities
    were computed before (`ref_logps.precompute`).
    """
    s = settle(recipe)
    if s.precomputed or s.reference not in ("reference_model", "start"):
        return None
    if s.reference == "reference_model":
        return load_reference(s, model)
    return jax.jit(cast(s, model, lambda p, *_: jax.tree.map(jnp.copy, p)))(model.params, None)


def load_reference(s: Settled, model: models.Model) -> Any:
    """Load the parameters of `reference_model`, in the dtype of the computation; another kind is a RecipeError."""
    other = load(s, s.recipe.reference_model or Source(), s.dtype, build_mesh(s), "reference_model")
    if (other.family, other.cfg) != (model.family, model.cfg):
        raise parse.RecipeError("reference_model: its config.json differs from the model's; give one of its kind")
    return other.params


def cast(s: Settled, model: models.Model, f: Callable) -> Callable:
    """Make a function of parameters compute in `loader.dtype`."""
    return f if s.dtype is None or s.lora else train.precision.compute(f, s.dtype, spec_of(s, model))


def load(s: Settled, source: Source, dtype: Any, mesh: Mesh, name: str) -> models.Model:
    """Load the model of a section onto a mesh, with `base_config.values`; not the teacher.

    The model that is trained may start from random weights: those of trainer.seed.
    """
    if name == "model" and config.from_scratch(source):
        family, cfg = config.read(s.recipe)
        spec, seed = family.spec(cfg), s.recipe.trainer.seed
        if jax.process_index() == 0:
            print(f"model: random weights, of trainer.seed {seed}", file=sys.stderr)
        at = params.shardings(spec, mesh, s.train_rules)
        start = jax.jit(lambda key: params.init(spec, key, dtype=dtype or jnp.float32), out_shardings=at)
        return models.Model(family, cfg, start(jax.random.key(seed)))
    directory = params.resolve(config.given(source, name), revision=source.extra_kwargs.revision)
    model = models.load(directory, dtype=dtype, mesh=mesh, rules=s.train_rules)
    _check_head(s, model, name)
    return model if name == "teacher_model" else model._replace(cfg=config.changed_alike(s.recipe, model))


def _check_head(s: Settled, model: models.Model, name: str) -> None:
    """Raise RecipeError for a classifier where text is learnt, and for one with other labels than are learnt."""
    kind, labels = models.heads.kind_of(model.params), models.heads.count(model.params)
    if kind is None:
        return
    found = f"{name}.name_or_path: is a classifier of {labels} labels"
    if s.method.head is None or name != "model":
        kinds = " and ".join(methods.types(head=True))
        raise parse.RecipeError(f"{found}, which writes no text; only trainer_type {kinds} train one")
    wanted, n = s.method.head(s.keys)
    if (kind, labels) != (wanted, n):
        raise parse.RecipeError(
            f"{found} for a {kind}; trainer_type {s.method.name} trains a head of {n} label{'s' * (n > 1)} for a {wanted}"
        )


def planned(recipe: Recipe | Settled) -> tuple[Any, Any, plan.Training]:
    """Give what `fdel plan` wants: family, config, and the step. RecipeError if it knows no such step."""
    s = settle(recipe)
    t, at = s.recipe.trainer, s.recipe.sharding
    if s.method.name != "sft" or s.frozen:
        raise parse.RecipeError("plan knows the step of trainer_type sft that trains all weights, and no other")
    if at.rules:
        raise parse.RecipeError("sharding.rules: plan knows fdel's own alone; remove them")
    sizes = zip(at.axis_names, at.axis_dims, at.dcn_axis_dims or (1,) * len(at.axis_dims), strict=True)
    mesh = ",".join(f"{a}={n if n == -1 else n * m}" for a, n, m in sizes)
    dtype = "bfloat16" if s.param_dtype is None else s.param_dtype.name
    step = plan.Training(mesh, s.rows, s.length, t.gradient_accumulation_steps, dtype, t.optimizer, s.remat)
    return *config.read(s.recipe), step


# ---- optimizer -----------------------------------------------------------------------------------------------------


def build_schedule(recipe: Recipe | Settled, steps: int) -> optax.Schedule:
    """Build the learning rate of a run of `steps` steps."""
    s = settle(recipe)
    t = s.recipe.trainer
    warmup = t.warmup_steps or math.ceil((t.warmup_ratio or 0) * steps)
    options = {} if t.learning_rate_end is None else {"final": t.learning_rate_end / s.rate}
    return train.schedule(t.scheduler, s.rate, warmup=min(warmup, steps - 1), steps=steps, **options)


def build_optimizer(recipe: Recipe | Settled, spec: Any, steps: int) -> optax.GradientTransformation:
    """Build the optimizer of a run of `steps` steps; `spec` is that of the parameters.

    All adapters decay, and of what is trained whole beside them what has two axes.
    """
    s = settle(recipe)
    t = s.recipe.trainer
    options: dict[str, Any] = {"weight_decay": t.weight_decay, "clip": t.clip_grad}
    if t.optimizer == "adamw":
        options |= {"b1": t.adam_beta1, "b2": t.adam_beta2, "eps": t.adam_epsilon, "moments": t.moments}
    if s.frozen:
        found = dict(params.named_leaves(train.optim.decay_mask(spec)))
        decays = lambda path, w: jax.tree.map(lambda _: isinstance(w, LowRank) or found[path], w)
        options["mask"] = (lambda p: change(decays, p)) if s.method.head or t.trainable else None
    return train.optimizer(t.optimizer, build_schedule(s, steps), spec=spec, **options)
