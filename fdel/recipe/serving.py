"""Serve the model that a recipe names, or that it has just trained."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

from fdel import models, params
from fdel.recipe import check, config, parse
from fdel.recipe.build import build_mesh, build_tokenizer, rules_of
from fdel.recipe.read import Recipe
from fdel.recipe.schema import DTYPES, METHODS, ServeAction
from fdel.recipe.trainer import HEADED
from fdel.serve import engine, launch, weights


def serve(recipe: Recipe, action: ServeAction, trained: models.Model | None = None) -> None:
    """Answer requests until SIGTERM; raises as `prepare` does."""
    how, keys = prepare(recipe, action)
    model, tok = load(recipe) if trained is None else trained, build_tokenizer(recipe)
    logging.getLogger("fdel").setLevel("ERROR" if recipe.esurge.silent_mode else action.log_level.upper())
    launch.listen(launch.served(model, tok, config.name_of(recipe), how), how, keys)


def prepare(recipe: Recipe, action: ServeAction) -> tuple[launch.Options, Any]:
    """Say how to serve, and read the keys, before anything is trained or loaded.

    RecipeError for what cannot be served as it is asked, ValueError for an address that needs keys and for a bad file.
    """
    parse.fail(faults(recipe, action))
    how = options(recipe, action)
    try:
        return how, launch.check(how)
    except ValueError as e:
        said = str(e).replace("--api-key-file", "api_key_file").replace("--insecure", "require_api_key: false")
        raise parse.RecipeError(f"actions.serve: {said.replace('tool_parser=', 'tool_parser_name=')}") from e


def faults(recipe: Recipe, action: ServeAction) -> list[str]:
    """List what serving cannot honour."""
    found = engine_faults(recipe, "serve")
    if action.require_api_key and action.api_key_file is None:
        found.append("actions.serve.api_key_file: missing; require_api_key needs one, see `fdel keys`")
    if recipe.esurge.strict_context and recipe.esurge.auto_truncate_prompt:
        found.append("esurge.strict_context: refuses the prompts that esurge.auto_truncate_prompt cuts; remove one")
    if action.require_api_key is False and action.api_key_file is not None:
        found.append(
            "actions.serve.api_key_file: require_api_key is false, so that nobody reads it; remove one of the two"
        )
    if recipe.esurge.silent_mode and action.log_level != "info":
        found.append("actions.serve.log_level: esurge.silent_mode logs nothing; remove one of the two")
    if recipe.loader.precision is not None:
        found.append("loader.precision: the server does not read it; remove it")
    return found


def engine_faults(recipe: Recipe, action: str) -> list[str]:
    """List what no engine can honour, whatever the action does with it."""
    found, trained = [], any(a.name == "train" for a in recipe.actions)
    if recipe.trainer.trainer_type in HEADED and trained:
        found.append(
            f"actions.{action}: a model of trainer_type {recipe.trainer.trainer_type} writes no text; remove it"
        )
    cache = recipe.quantization.kv_cache
    if cache.quantization_method == "nf4":
        found.append("quantization.kv_cache.quantization_method: nf4 is for weights; use 8bit or fp8")
    if cache.group_size is not None:
        found.append("quantization.kv_cache.group_size: each token and head has a scale of its own; remove it")
    return found


def options(recipe: Recipe, action: ServeAction) -> launch.Options:
    """Translate the keys of serving."""
    e, keys = recipe.esurge, action.api_key_file
    return launch.Options(
        host=action.host, port=action.port, memory=e.hbm_utilization, insecure=action.require_api_key is False,
        tool_parser=action.tool_parser_name if action.enable_function_calling else "none",
        key_file=None if keys is None or action.require_api_key is False else Path(keys),
        truncate=(e.truncate_mode or "left") if e.auto_truncate_prompt else None, settings=settings(recipe),
        draft=e.draft_model, rules=rules_of(recipe, params.SERVE),
    )  # fmt: skip


def settings(recipe: Recipe) -> engine.Settings:
    """Translate the keys of the engine."""
    e, kv = recipe.esurge, recipe.quantization.kv_cache.quantization_method
    return engine.Settings(
        rows=e.max_num_seqs, max_length=e.max_model_len, cache=None if e.enable_prefix_caching else False,
        overlap=e.overlap_execution, kv_cache_dtype=None if kv is None else METHODS[kv],
        drafts=e.draft_tokens or (3 if e.draft_model else 0),
    )  # fmt: skip


def build_engine(recipe: Recipe, trained: models.Model | None = None, *, rows: int | None = None) -> engine.Engine:
    """Make the engine of `esurge` for the model that a recipe names, or that it has just trained.

    `rows` at a time, if that is less than esurge.max_num_seqs. `serve.ask` chats with it.
    """
    model, tok = load(recipe) if trained is None else trained, build_tokenizer(recipe)
    how = options(recipe, ServeAction())
    wanted = dataclasses.replace(how.settings, rows=min(how.settings.rows, rows or how.settings.rows))
    return launch.make_engine(model, tok, dataclasses.replace(how, settings=wanted))


def load(recipe: Recipe) -> models.Model:
    """Load the model onto the mesh of `sharding`, quantized if it is so."""
    m, names, mesh, method = recipe.model, recipe.loader, build_mesh(recipe), check.weights_format(recipe)
    dtype = DTYPES.get(names.param_dtype or names.dtype or "")
    model = weights.load(
        config.given(m), dtype=dtype, mesh=mesh if mesh.size > 1 else None, revision=m.extra_kwargs.revision,
        quantize=METHODS[method] if method else None, group=recipe.quantization.model.group_size,
        rules=rules_of(recipe, params.SERVE),
    )  # fmt: skip
    cfg = config.changed(recipe, model.family, model.cfg)
    config.same_shapes(model.family, cfg, model.cfg)
    return model._replace(cfg=cfg)
