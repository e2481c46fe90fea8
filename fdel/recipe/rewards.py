"""From a recipe to reward functions: verifiers by name, functions of one's own, reward models."""

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fdel import models, params, text
from fdel.recipe import parse
from fdel.recipe.methods.samples import RewardFunction
from fdel.train.rollout import judges, verify
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
    if f.path is not None:
        own: Reward = isolated(f.path, timeout=0.9 * timeout) if f.isolated else _imported(f.path)
        return f.path.rpartition(":")[2], own
    if f.model is not None:
        folder = params.resolve(f.model)
        model = models.load(folder)
        length = min(LONGEST, getattr(model.cfg, "max_positions", None) or LONGEST)
        return Path(f.model).name, judges.reward_model(
            judges.row_scores(model, length=length), judges.text_ids(text.load(folder))
        )
    make: Callable[..., Reward] = getattr(verify, str(f.name))
    return str(f.name), make() if f.column is None else make(f.column)


def _imported(path: str) -> Any:
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
