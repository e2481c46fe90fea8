"""What a recipe cannot be on its model and its devices, found without reading a weight; and `validate`, which says so."""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.sharding import AbstractMesh

from fdel import models, params
from fdel.recipe import check, config, objective, parse, serving
from fdel.recipe.build import rules_of
from fdel.recipe.read import Recipe
from fdel.recipe.trainer import Lora
from fdel.serve.settings import unsupported

# What the engine calls its settings, and a run file.
CALLED = {"rows": "esurge.max_num_seqs", "max_length": "esurge.max_model_len", "drafts": "esurge.draft_tokens",
          "kv_cache_dtype": "quantization.kv_cache"}  # fmt: skip
SPLIT = ("dp", "fsdp", "ep")  # axes over which rows are divided


def validate(recipe: Recipe, devices: int | None = None) -> None:
    """Raise a RecipeError that lists all that cannot be done.

    Of a model that lies here, config.json is read: its keys, modules and sizes have to fit. `devices`: as many are there.
    """
    parse.fail(check.faults(recipe))
    parse.fail(faults(recipe, devices))


def faults(recipe: Recipe, devices: int | None = None) -> list[str]:
    """List what does not fit the model, if its config is here, and the devices, if their number is known."""
    trained = check.trains(recipe)
    served = [a.name for a in recipe.actions if a.name in ("eval", "serve")]
    if not trained and not served:
        return []
    sizes, found = None, []
    try:
        sizes = mesh_sizes(recipe, devices)
    except ValueError as e:
        found.append(f"sharding.axis_dims: {e}")
    try:
        model = _model(recipe)
        if sizes and trained:
            found += rows(recipe, sizes)
        if model is not None:
            found += [*_trained(recipe, model, sizes)] if trained else []
            found += [*_served(recipe, model, None if trained else sizes)] if served else []
    except (ValueError, OSError) as e:
        found += str(e).removeprefix("the recipe has faults:\n  ").split("\n  ")
    return list(dict.fromkeys(found))


def mesh_sizes(recipe: Recipe, devices: int | None) -> dict[str, int] | None:
    """Give the size of each axis; None where they depend on devices that are not known. ValueError if these do not do."""
    s = recipe.sharding
    sizes = dict(zip(s.axis_names, s.axis_dims, strict=True))
    slices = dict(zip(s.axis_names, s.dcn_axis_dims or (1,) * len(s.axis_names), strict=True))
    devices = None if devices is None else devices // math.prod(slices.values())  # of one
    wrong = [f"{a}={n}" for a, n in sizes.items() if n < 1 and n != -1]
    free = [a for a, n in sizes.items() if n == -1]
    if wrong or len(free) > 1:
        raise ValueError(
            f"{', '.join(wrong or free)}: each size is at least 1, and at most one is -1, the devices left"
        )
    fixed = math.prod(n for n in sizes.values() if n != -1)
    if devices is not None and fixed > 1 and (devices % fixed or (not free and devices != fixed)):
        wanted = f"a multiple of {fixed}" if free else str(fixed)
        raise ValueError(f"{wanted} devices are asked for, and {devices} are there")
    if free and devices is None:
        return None
    return {a: slices[a] * ((devices or 1) // fixed if a in free else n) for a, n in sizes.items()}


def rows(recipe: Recipe, sizes: Mapping[str, int]) -> Iterator[str]:
    """Say which rows cannot be divided among devices."""
    t, devices = recipe.trainer, math.prod(sizes[a] for a in SPLIT)
    for name, n in (("total_batch_size", check.batch_rows(recipe)), ("eval_batch_size", t.eval_batch_size or devices)):
        if n % devices:
            yield f"trainer.{name}: {n} rows cannot be divided among {devices} devices (dp, fsdp, ep)"
    parts, part = t.gradient_accumulation_steps, check.batch_rows(recipe) // t.gradient_accumulation_steps
    if part % sizes["dp"]:
        yield (
            f"trainer.gradient_accumulation_steps: each of {parts} parts has {part} rows, which cannot be divided among "
            f"{sizes['dp']} replicas (dp); choose fewer parts, or more rows"
        )


def _model(recipe: Recipe, name: str = "model") -> models.Model | None:
    """Make a model of shapes, without weights; None if its config is on the Hub."""
    source = getattr(recipe, name)
    path = source.name_or_path or ""
    here = Path(path).expanduser().is_dir()
    if source.config is None and not here:
        if path.startswith((".", "/", "~")) or path.count("/") > 1:
            raise parse.RecipeError(f"{name}.name_or_path: {path} is no directory")
        return None
    family, cfg = config.read(recipe) if name == "model" else models.read_config(Path(path).expanduser())
    if name == "model" and not config.from_scratch(source):
        config.same_shapes(family, cfg, models.read_config(Path(path).expanduser())[1])
    return models.Model(family, cfg, params.abstract(family.spec(cfg), jnp.float32))


def _sharded(spec: Any, sizes: Mapping[str, int] | None, rules: Any) -> Iterator[str]:
    if sizes and math.prod(sizes.values()) > 1:
        ordered = {a: sizes[a] for a in params.AXES}
        try:
            params.shardings(spec, AbstractMesh(tuple(ordered.values()), tuple(ordered)), rules)  # type: ignore[arg-type]
        except ValueError as e:
            yield "sharding.axis_dims: " + re.sub(r"rules \| \{.*?\}(, in a run file| or) ", "", str(e))


def _trained(recipe: Recipe, model: models.Model, sizes: Mapping[str, int] | None) -> Iterator[str]:
    t, spec = recipe.trainer, model.family.spec(model.cfg)
    yield from _sharded(spec, sizes, rules_of(recipe))
    yield from config.dropout(recipe, model.cfg)
    if check.adapters(recipe):
        if config.from_scratch(recipe.model):
            yield "model: adapters of random weights learn little; train all weights, or give a checkpoint with weights"
        config.lora_targets(t.lora or Lora(), spec)
    reference = _model(recipe, "reference_model") if recipe.reference_model else None
    if reference and (reference.family, reference.cfg) != (model.family, model.cfg) and not recipe.base_config.values:
        yield "reference_model: its config.json differs from the model's; give one of its kind"
    teacher = _model(recipe, "teacher_model") if recipe.teacher_model else None
    if recipe.teacher_model is None or teacher:
        try:
            objective.build(t, model, teacher=teacher, own_reference=True)
        except ValueError as e:
            yield f"trainer: {e}"


def _served(recipe: Recipe, model: models.Model, sizes: Mapping[str, int] | None) -> Iterator[str]:
    yield from _sharded(params.unstack(model.family.spec(model.cfg)), sizes, rules_of(recipe, params.SERVE))
    asked, context = recipe.esurge.max_model_len, getattr(model.cfg, "max_positions", None)
    if asked and context and asked > context:
        yield f"esurge.max_model_len: found {asked}, and the model has {context} positions; give no more, or leave it out"
    draft = recipe.esurge.draft_model
    other = None
    if draft and Path(draft).expanduser().is_dir():
        other = models.Model(*models.read_config(Path(draft).expanduser()), None)
    if reason := unsupported(model, serving.settings(recipe), other):
        for ours, name in CALLED.items():
            reason = reason.replace(f"{ours}=", f"{name}=")
        yield reason
