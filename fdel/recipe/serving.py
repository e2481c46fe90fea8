"""Serve the model that a recipe names, or that it has just trained; run benchmarks on it."""

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from fdel import models, params
from fdel.recipe import check, config, parse
from fdel.recipe.build import build_mesh, build_tokenizer
from fdel.recipe.read import Recipe
from fdel.recipe.schema import CACHED, EvalAction, ServeAction
from fdel.recipe.settled import Settled, settle
from fdel.serve.engine import engine, weights
from fdel.serve.server import evaluate as benchmarks
from fdel.serve.server import launch

# ---- serving -------------------------------------------------------------------------------------------------------


def serve(recipe: Recipe, action: ServeAction, trained: models.Model | None = None) -> None:
    """Answer requests until SIGTERM; raises as `prepare` does."""
    how, keys = prepare(recipe, action)
    model, tok = load(recipe) if trained is None else trained, build_tokenizer(recipe)
    logging.getLogger("fdel").setLevel("ERROR" if recipe.esurge.silent_mode else action.log_level.upper())
    s, pooling = settle(recipe), None
    if trained is None:
        m = recipe.model
        pooling = models.pooling.read(params.resolve(config.given(m), revision=m.extra_kwargs.revision))
    elif s.method.pooling:
        pooling = s.method.pooling(s.keys)
    launch.listen(launch.served(model, tok, config.name_of(recipe), how, pooling=pooling), how, keys)


def prepare(recipe: Recipe, action: ServeAction) -> tuple[launch.ServerOptions, Any]:
    """Say how to serve, and read the keys, before anything is trained or loaded.

    RecipeError for what cannot be served as it is asked, ValueError for an address that needs keys and for a bad file.
    """
    parse.fail(faults(recipe, action))
    how = options(recipe, action)
    try:
        return how, launch.check(how)
    except ValueError as e:
        reason = str(e).replace("--api-key-file", "api_key_file").replace("--insecure", "require_api_key: false")
        raise parse.RecipeError(f"actions.serve: {reason.replace('tool_parser=', 'tool_parser_name=')}") from e


def faults(recipe: Recipe, action: ServeAction) -> list[str]:
    """List what serving cannot honour."""
    e, keys = recipe.esurge, action.api_key_file
    return engine_faults(recipe, "serve") + check.when(
        (action.require_api_key and keys is None,
         "actions.serve.api_key_file: missing; require_api_key needs one, see `fdel keys`"),
        (e.strict_context and e.auto_truncate_prompt,
         "esurge.strict_context: refuses the prompts that esurge.auto_truncate_prompt cuts; remove one"),
        (action.require_api_key is False and keys is not None,
         "actions.serve.api_key_file: require_api_key is false, so that nobody reads it; remove one of the two"),
        (e.silent_mode and action.log_level != "info",
         "actions.serve.log_level: esurge.silent_mode logs nothing; remove one of the two"),
        (recipe.loader.precision is not None, "loader.precision: the server does not read it; remove it"),
    )  # fmt: skip


def engine_faults(recipe: Recipe, action: str) -> list[str]:
    """List what no engine can honour, whatever the action does with it."""
    method, cache = settle(recipe).method, recipe.quantization.kv_cache
    return check.when(
        (method.head and not method.samples and action == "eval" and any(a.name == "train" for a in recipe.actions),
         f"actions.{action}: a model of trainer_type {method.name} writes no text; remove it"),
        (cache.quantization_method not in (None, *CACHED),
         f"quantization.kv_cache.quantization_method: {cache.quantization_method} is for weights; use 8bit or fp8"),
        (cache.group_size is not None,
         "quantization.kv_cache.group_size: each token and head has a scale of its own; remove it"),
    )  # fmt: skip


def translated(section: Any, kind: type) -> dict[str, Any]:
    """Read what a section of a run file says of the settings of the server, or of its engine, by their own names."""
    names = {f.metadata["setting"]: f.name for f in dataclasses.fields(section) if f.metadata.get("setting")}
    return {f.name: getattr(section, names[f.name]) for f in dataclasses.fields(kind) if f.name in names}


def in_run_files(recipe: Recipe, reason: str) -> str:
    """Give a message with the names of run files in place of the engine's."""
    for f in dataclasses.fields(recipe.esurge):
        if name := f.metadata.get("setting"):
            reason = reason.replace(f"{name}=", f"esurge.{f.name}=")
    return reason.replace("kv_cache_dtype=", "quantization.kv_cache=")


def options(recipe: Recipe | Settled, action: ServeAction) -> launch.ServerOptions:
    """Translate the keys of serving."""
    s = settle(recipe)
    e, keys = s.recipe.esurge, action.api_key_file
    return launch.ServerOptions(
        **translated(e, launch.ServerOptions), **translated(action, launch.ServerOptions),
        insecure=action.require_api_key is False,
        tool_parser=action.tool_parser_name if action.enable_function_calling else "none",
        key_file=None if keys is None or action.require_api_key is False else Path(keys),
        truncate=(e.truncate_mode or "left") if e.auto_truncate_prompt else None, settings=settings(s),
        rules=s.serve_rules,
    )  # fmt: skip


def settings(recipe: Recipe | Settled) -> engine.Settings:
    """Translate the keys of the engine."""
    s = settle(recipe)
    e = s.recipe.esurge
    found = translated(e, engine.Settings) | {"drafts": e.draft_tokens or (3 if e.draft_model else 0)}
    cache = None if e.enable_prefix_caching else False
    return engine.Settings(**found, cache=cache, kv_cache_dtype=s.cache_format, kernels=s.kernels)


def build_engine(
    recipe: Recipe | Settled, trained: models.Model | None = None, *, rows: int | None = None
) -> engine.Engine:
    """Make the engine of `esurge` for the model that a recipe names, or that it has just trained.

    `rows` at a time, if that is less than esurge.max_num_seqs. `serve.ask` chats with it.
    """
    s = settle(recipe)
    model, tok = load(s) if trained is None else trained, build_tokenizer(s)
    how = options(s, ServeAction())
    wanted = dataclasses.replace(how.settings, rows=min(how.settings.rows, rows or how.settings.rows))
    return launch.make_engine(model, tok, dataclasses.replace(how, settings=wanted))


def load(recipe: Recipe | Settled) -> models.Model:
    """Load the model onto the mesh of `sharding`, quantized if it is so."""
    s = settle(recipe)
    m, mesh = s.recipe.model, build_mesh(s)
    model = weights.load(
        config.given(m), dtype=s.param_dtype or s.dtype, mesh=mesh if mesh.size > 1 else None,
        revision=m.extra_kwargs.revision, quantize=s.format, group=s.recipe.quantization.model.group_size,
        rules=s.serve_rules,
    )  # fmt: skip
    return model._replace(cfg=config.changed_alike(s.recipe, model))


# ---- benchmarks ----------------------------------------------------------------------------------------------------


def evaluate(
    recipe: Recipe, action: EvalAction | Sequence[str], trained: models.Model | None = None, manager: Any = None
) -> dict[str, Any]:
    """Run tasks, or an action's, print and write their scores, and return lm_eval's results.

    `manager` is what `prepare_evaluation` gives; errors are its own.
    """
    action = action if isinstance(action, EvalAction) else EvalAction(tuple(action))
    manager = prepare_evaluation(recipe, action) if manager is None else manager
    if recipe.esurge.silent_mode:
        logging.getLogger("fdel").setLevel("ERROR")
    with jax.default_matmul_precision(recipe.loader.precision):
        runs, tok = build_engine(recipe, trained, rows=recipe.eval.batch_size), build_tokenizer(recipe)
        results = benchmarks.evaluate(runs, tok, evaluation_options(recipe, action), config.name_of(recipe), manager)
    benchmarks.report(results, action.output_path, action.print_results)
    return results


def prepare_evaluation(recipe: Recipe, action: EvalAction) -> Any:
    """Find the tasks, before anything is trained or loaded.

    RecipeError for what cannot be evaluated as it is asked, ValueError for tasks that are unknown, ImportError without
    lm_eval, FileExistsError for an output_path that is there.
    """
    parse.fail(engine_faults(recipe, "eval"))
    benchmarks.new_file(action.output_path)
    return benchmarks.find(evaluation_options(recipe, action))


def evaluation_options(recipe: Recipe, action: EvalAction) -> benchmarks.Options:
    """Translate the keys of evaluation."""
    found = translated(recipe.eval, benchmarks.Options) | translated(action, benchmarks.Options)
    return benchmarks.Options(**found | {"progress": recipe.eval.use_tqdm and not recipe.esurge.silent_mode})
