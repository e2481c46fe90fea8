"""What a recipe's model sees and hears: how that is prepared, and which runs cannot learn from it."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from fdel import models, params
from fdel.media import sight
from fdel.media.sight import Sight
from fdel.recipe import parse
from fdel.recipe.read import Recipe
from fdel.recipe.settled import Settled
from fdel.train import data, processes
from fdel.train.rollout.sight import shown

PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def seeing(recipe: Recipe) -> Sight | None:
    """Read how the model sees, of the image processor's file in its directory; None if it does not.

    RecipeError where videos are to be heard, and the model does not take them so.
    """
    source = recipe.model
    found: Sight | None = None
    try:
        if source.name_or_path:
            found = sight.read(params.resolve(source.name_or_path, revision=source.extra_kwargs.revision))
    except ValueError as e:
        raise parse.RecipeError(f"model.name_or_path: {e}") from e
    if not recipe.mixture.use_audio_in_video:
        return found
    if found is None or not (found.video and found.sound and found.sound.marks):
        raise parse.RecipeError("mixture.use_audio_in_video: this model takes no videos with sounds; remove it")
    return replace(found, heard=True)


def processor_files(recipe: Recipe) -> list[Path]:
    """List the files of the model's directory that say how images are prepared."""
    source = recipe.model
    if not source.name_or_path:
        return []
    folder = Path(params.resolve(source.name_or_path, revision=source.extra_kwargs.revision))
    return [f for name in PROCESSORS if (f := folder / name).is_file()]


def media(recipe: Recipe, tasks: data.Tasks, *, more: bool = False) -> Callable[..., Mapping[str, Any]]:
    """Give what makes the images of these tasks' samples a part of their batch, for `rollout.collate`.

    If any task shows or plays something, or an environment may (`more`), the batches of several processes have one shape:
    all of them call it at the same time.
    """
    see = seeing(recipe)
    shows = lambda: (more and see is not None) or any(task.images for task in tasks.rows)
    return partial(shown, sight=see, agree=processes.most if jax.process_count() > 1 and shows() else None)


def checked(s: Settled, tasks: data.Tasks) -> data.Tasks:
    """Give tasks back; a RecipeError for those that show or play anything where the teacher reads text alone."""
    source = s.recipe.teacher_model
    if source is not None and source.name_or_path and any(task.images for task in tasks.rows):
        found = params.resolve(source.name_or_path, revision=source.extra_kwargs.revision)
        family, _ = models.read_config(found)
        if not hasattr(family, "encode"):
            why = f"{family.MODEL_TYPE} reads text alone, and the prompts show or play; give a teacher that sees"
            raise parse.RecipeError(f"teacher_model: {why}")
    return tasks
