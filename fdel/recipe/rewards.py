"""From a recipe to reward functions and environments: by name, functions of one's own, reward models, judges."""

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fdel import models, params, text
from fdel.recipe import parse
from fdel.recipe.methods.samples import Environment, RewardFunction
from fdel.serve import Engine, SamplingParams, Settings
from fdel.train.rollout import Turn, form, judges, programs, turns, verify
from fdel.train.rollout.endpoint import ask_endpoint
from fdel.train.rollout.isolated import isolated
from fdel.train.rollout.rewards import Reward

LONGEST = 4096  # tokens that a reward model reads, if it has no limit of its own


def build_rewards(keys: Any) -> dict[str, Reward]:
    """Make the reward functions of a trainer type's keys, by their names in metrics; models are loaded.

    RecipeError for one that is not there.
    """
    found: dict[str, Reward] = {}
    for i, f in enumerate(getattr(keys, "reward_functions", ())):
        try:
            name, function = _function(f, keys.reward_timeout)
        except (ImportError, OSError, AttributeError, ValueError) as e:
            raise parse.RecipeError(f"trainer.reward_functions[{i}]: {e}") from e
        if name in found:
            raise parse.RecipeError(f"trainer.reward_functions[{i}]: {name} is there twice")
        found[name] = function
    return found


def _function(f: RewardFunction, timeout: float) -> tuple[str, Reward]:
    """Make one function, with its name."""
    options = dict(f.options or {})
    if f.path is not None:
        own: Reward = isolated(f.path, timeout=0.9 * timeout) if f.isolated else imported(f.path)
        return f.path.rpartition(":")[2], own
    if f.model is not None:
        folder = params.resolve(f.model)
        model = models.load(folder)
        length = min(LONGEST, getattr(model.cfg, "max_positions", None) or LONGEST)
        return Path(f.model).name, judges.reward_model(
            judges.row_scores(model, length=length), judges.text_ids(text.load(folder))
        )
    if f.name is None:
        return "judge", _judge(f, options)
    make: Callable[..., Reward] = next(getattr(x, f.name) for x in (verify, form, programs) if hasattr(x, f.name))
    return f.name, called(make, **options, **({} if f.column is None else {"column": f.column}))


def _judge(f: RewardFunction, options: dict[str, Any]) -> Reward:
    """Make a reward of what a model says of samples."""
    low, high = options.pop("low", 1.0), options.pop("high", 10.0)
    template = options.pop("template", judges.RATE)
    if f.endpoint is not None:
        if (file := options.pop("key_file", None)) is not None:
            options["key"] = Path(file).expanduser().read_text().strip()
        ask = called(ask_endpoint, base_url=f.endpoint, **options)
    else:
        folder = params.resolve(str(f.judge))
        asked = called(SamplingParams, **{"max_tokens": 8, "temperature": 0.0} | options)
        engine = Engine(models.load(folder), Settings(max_length=LONGEST), tokenizer=(tok := text.load(folder)))
        ask = judges.ask_engine(engine, tok, asked)
    return judges.judge(ask, template, judges.rating(low, high))


def called(f: Callable, /, **options: Any) -> Any:
    """Call a function with options from a run file; ValueError names those that it does not have, or lacks."""
    try:
        inspect.signature(f).bind(**options)
    except TypeError as e:
        known = ", ".join(inspect.signature(f).parameters)
        raise ValueError(f"options: {e}; known are {known}") from e
    return f(**options)


def imported(path: str) -> Any:
    """Import a function of a file (rewards.py:length) or of a module (package.module:length)."""
    source, _, name = path.rpartition(":")
    try:
        if source.endswith(".py"):
            spec: Any = importlib.util.spec_from_file_location(Path(source).stem, source)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(source)
        return getattr(module, name)
    except (ImportError, OSError, AttributeError, ValueError) as e:
        raise ValueError(f"path {path}: expected FILE.py:FUNCTION or MODULE:FUNCTION ({e})") from e


def tools(e: Environment | None) -> list[Callable]:
    """Import the functions that an environment offers; RecipeError for what is none."""
    if e is None or e.tools is None:
        return []
    try:
        found = imported(e.tools)
        functions = list(found) if isinstance(found, list | tuple) else [found]
        [turns.schema(f) for f in functions]
    except (TypeError, ValueError) as error:
        raise parse.RecipeError(f"trainer.environment.tools: {error}") from error
    return functions


def build_turn(e: Environment | None, tok: text.Tokenizer, engine: Engine | None = None) -> Turn | None:
    """Make what answers the model, for an engine of it; None without an environment. RecipeError for what is none."""
    if e is None:
        return None
    try:
        if e.path is not None:
            return imported(e.path)
        sight = None if engine is None else engine.sight
        return turns.tools(tok, tools(e), parser=e.parser, timeout=e.tool_timeout, most=e.max_turns, sight=sight)
    except ValueError as error:
        raise parse.RecipeError(f"trainer.environment: {error}") from error
