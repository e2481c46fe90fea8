"""Run benchmarks on the model that a recipe names, or that it has just trained."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from fdel import models
from fdel.recipe import config, parse, serving
from fdel.recipe.build import build_tokenizer
from fdel.recipe.read import Recipe
from fdel.recipe.schema import EvalAction
from fdel.serve import evaluate as benchmarks


def evaluate(
    recipe: Recipe, action: EvalAction | Sequence[str], trained: models.Model | None = None, manager: Any = None
) -> dict[str, Any]:
    """Run tasks, or an action's, print and write their scores, and return lm_eval's results. `manager`: see `prepare`.

    RecipeError, ValueError and FileExistsError as `prepare`.
    """
    action = action if isinstance(action, EvalAction) else EvalAction(tuple(action))
    manager = prepare(recipe, action) if manager is None else manager
    output = None if action.output_path is None else Path(action.output_path)
    if recipe.esurge.silent_mode:
        logging.getLogger("fdel").setLevel("ERROR")
    with jax.default_matmul_precision(recipe.loader.precision):
        made = serving.build_engine(recipe, trained, rows=recipe.eval.batch_size)
        tok = build_tokenizer(recipe)
        results = benchmarks.evaluate(made, tok, options(recipe, action), config.name_of(recipe), manager)
    benchmarks.report(results, output, action.print_results)
    return results


def prepare(recipe: Recipe, action: EvalAction) -> Any:
    """Find the tasks, before anything is trained or loaded.

    RecipeError for what cannot be evaluated as it is asked, ValueError for tasks that are unknown, ImportError without
    lm_eval, FileExistsError for an output_path that is there.
    """
    parse.fail(serving.engine_faults(recipe, "eval"))
    benchmarks.new_file(None if action.output_path is None else Path(action.output_path))
    return benchmarks.find(options(recipe, action))


def options(recipe: Recipe, action: EvalAction) -> benchmarks.Options:
    """Translate the keys of evaluation."""
    e = recipe.eval
    return benchmarks.Options(
        tasks=action.tasks, include_path=None if action.include_path is None else Path(action.include_path),
        num_fewshot=action.num_fewshot, limit=e.limit, max_new_tokens=e.max_new_tokens, temperature=e.temperature,
        top_p=e.top_p, batch=e.batch_size, apply_chat_template=e.apply_chat_template,
        system_instruction=e.system_instruction, cache_requests=e.cache_requests,
        progress=e.use_tqdm and not recipe.esurge.silent_mode,
    )  # fmt: skip
