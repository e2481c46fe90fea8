"""What of a recipe fits neither model nor devices, found without reading a weight; and `validate`, which says so."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.sharding import AbstractMesh

from fdel import models, params
from fdel.models.keys import quantization
from fdel.recipe import build, check, config, parse, serving
from fdel.recipe.read import Recipe
from fdel.recipe.settled import Settled, settle
from fdel.recipe.step import build_objective
from fdel.serve.engine.settings import unsupported

SPLIT = ("dp", "fsdp", "ep")  # axes over which rows are divided


def validate(recipe: Recipe | Settled, devices: int | None = None) -> Settled:
    """Settle a recipe that can be done, or raise a RecipeError that lists all that cannot be done.

    Of a model that lies here, config.json is read: its keys, modules and sizes have to fit. `devices`: as many are there.
    """
    raw = recipe.recipe if isinstance(recipe, Settled) else recipe
    parse.fail(check.faults(raw))
    parse.fail(faults(recipe, devices))
    return settle(recipe)


def faults(recipe: Recipe | Settled, devices: int | None = None) -> list[str]:
    """List what does not fit the model, if its config is here, and the devices, if their number is known."""
    s = settle(recipe)
    served = any(a.name in ("eval", "serve") for a in s.recipe.actions)
    if not s.trains and not served:
        return []
    sizes, found, apart = None, [], getattr(s.keys, "sampling_devices", 0)
    if apart and devices is not None:
        if devices <= apart:
            return [f"trainer.sampling_devices: {apart} of {devices} devices leave none that trains; lower it"]
        devices -= apart
    try:
        sizes = mesh_sizes(s.recipe, devices)
    except ValueError as e:
        found.append(f"sharding.axis_dims: {e}")
    try:
        model = _model(s)
        if sizes and s.trains:
            found += rows(s, sizes)
        if model is not None:
            found += [*_trained(s, model, sizes)] if s.trains else []
            found += [*_served(s, model, None if s.trains else sizes)] if served else []
    except parse.RecipeError as e:
        found += e.faults
    except (ValueError, OSError) as e:
        found.append(str(e))
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
        found = ", ".join(wrong or free)
        raise ValueError(f"{found}: each size is at least 1, and at most one is -1, the devices left")
    fixed = math.prod(n for n in sizes.values() if n != -1)
    if devices is not None and fixed > 1 and (devices % fixed or (not free and devices != fixed)):
        wanted = f"a multiple of {fixed}" if free else str(fixed)
        raise ValueError(f"{wanted} devices are asked for, and {devices} are there")
    if free and devices is None:
        return None
    return {a: slices[a] * ((devices or 1) // fixed if a in free else n) for a, n in sizes.items()}


def rows(s: Settled, sizes: Mapping[str, int]) -> Iterator[str]:
    """Say which rows cannot be divided among devices."""
    devices, parts = math.prod(sizes[a] for a in SPLIT), s.recipe.trainer.gradient_accumulation_steps
    each = getattr(s.method.samples, "each", 1) * getattr(s.keys, "samples_per_row", 1)
    for name, n in (
        ("total_batch_size", s.rows // each),
        ("eval_batch_size", s.recipe.trainer.eval_batch_size or devices),
    ):
        if n % devices:
            yield f"trainer.{name}: {n} rows cannot be divided among {devices} devices (dp, fsdp, ep)"
    if (part := s.rows // each // parts) % sizes["dp"]:
        yield (
            f"trainer.gradient_accumulation_steps: each of {parts} parts has {part} rows, which cannot be divided among "
            f"{sizes['dp']} replicas (dp); choose fewer parts, or more rows"
        )


def _model(s: Settled, name: str = "model") -> models.Model | None:
    """Make a model of shapes, without weights; None if its config is on the Hub."""
    source = getattr(s.recipe, name)
    path = source.name_or_path or ""
    here = Path(path).expanduser().is_dir()
    if source.config is None and not here:
        if path.startswith((".", "/", "~")) or path.count("/") > 1:
            raise parse.RecipeError(f"{name}.name_or_path: {path} is no directory")
        return None
    family, cfg = config.read(s.recipe) if name == "model" else models.read_config(Path(path).expanduser())
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


def _trained(s: Settled, model: models.Model, sizes: Mapping[str, int] | None) -> Iterator[str]:
    recipe, spec = s.recipe, model.family.spec(model.cfg)
    yield from _sharded(spec, sizes, s.train_rules)
    yield from config.dropout(s, model.cfg)
    scratch = config.from_scratch(recipe.model)
    yield from config.few_bits(s, not scratch and bool(quantization(json.loads(model.cfg.source))))
    if s.lora:
        if scratch:
            yield "model: adapters of random weights learn little; train all weights, or give a checkpoint with weights"
        config.lora_targets(s.lora, build.adaptable(s, model))
    build.trained_whole(s, model)
    reference = _model(s, "reference_model") if recipe.reference_model else None
    if reference and (reference.family, reference.cfg) != (model.family, model.cfg) and not recipe.base_config.values:
        yield "reference_model: its config.json differs from the model's; give one of its kind"
    teacher = _model(s, "teacher_model") if recipe.teacher_model else None
    if recipe.teacher_model is None or teacher:
        try:
            build_objective(s, model, teacher=teacher)
        except ValueError as e:
            yield f"trainer: {e}"


def _served(s: Settled, model: models.Model, sizes: Mapping[str, int] | None) -> Iterator[str]:
    yield from _sharded(params.unstack(model.family.spec(model.cfg)), sizes, s.serve_rules)
    e, context = s.recipe.esurge, getattr(model.cfg, "max_positions", None)
    wanted, draft, other = e.max_model_len, e.draft_model, None
    if wanted and context and wanted > context:
        yield f"esurge.max_model_len: found {wanted}, and the model has {context} positions; give no more, or leave it out"
    if draft and Path(draft).expanduser().is_dir():
        other = models.Model(*models.read_config(Path(draft).expanduser()), None)
    if reason := unsupported(model, serving.settings(s), other):
        yield serving.in_run_files(s.recipe, reason)
