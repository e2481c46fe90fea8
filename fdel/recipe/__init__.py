"""The declarative run file: one frozen `Recipe`, read from YAML or JSON, and plain functions that build and run it.

    recipe = from_yaml("sft.yaml").set("trainer.learning_rate", 2e-5)
    validate(recipe)
    train(recipe)

`parse` reads any nested dataclass; `schema` and `trainer` declare the keys; `read` has the recipe; `check` says what cannot
be done, `fits` what fits neither the model nor the devices; `names` knows what other projects call things; `config`,
`build`, `data`, `objective` and `step` make the parts of a run, and `actions` runs it.
"""

from fdel.recipe.actions import Result, export, prepare, run, summary, train
from fdel.recipe.build import (
    build_mesh,
    build_model,
    build_optimizer,
    build_reference,
    build_schedule,
    build_teacher,
    build_tokenizer,
    planned,
)
from fdel.recipe.check import faults
from fdel.recipe.data import build_dataset, build_evaluation, build_settings, build_sources
from fdel.recipe.evaluating import evaluate
from fdel.recipe.fits import validate
from fdel.recipe.parse import RecipeError
from fdel.recipe.read import Recipe, dumps, from_dict, from_json, from_yaml, load, reference, to_dict
from fdel.recipe.serving import build_engine
from fdel.recipe.step import Training, build_evaluate, build_step, final_params

__all__ = [
    "Recipe",
    "RecipeError",
    "Result",
    "Training",
    "build_dataset",
    "build_engine",
    "build_evaluate",
    "build_evaluation",
    "build_mesh",
    "build_model",
    "build_optimizer",
    "build_reference",
    "build_schedule",
    "build_settings",
    "build_sources",
    "build_step",
    "build_teacher",
    "build_tokenizer",
    "dumps",
    "evaluate",
    "export",
    "faults",
    "final_params",
    "from_dict",
    "from_json",
    "from_yaml",
    "load",
    "planned",
    "prepare",
    "reference",
    "run",
    "summary",
    "to_dict",
    "train",
    "validate",
]
