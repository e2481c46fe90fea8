"""The declarative run file: one frozen `Recipe`, read from YAML or JSON, and plain functions that build and run it.

    recipe = from_yaml("sft.yaml").set("trainer.learning_rate", 2e-5)
    validate(recipe)
    train(recipe)

`parse` reads any nested dataclass; `schema`, `trainer` and `methods` (a file for each trainer type) declare the keys;
`read` has the recipe; `check` says what cannot be done, `fits` what fits neither the model nor the devices; `settled` has
what the keys say together, derived once; `names` knows what other projects call things; `config`, `build`, `data` and
`step` make the parts of a run, and `actions` runs it.
"""

import inspect

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
from fdel.recipe.fits import validate
from fdel.recipe.parse import RecipeError
from fdel.recipe.read import Recipe, dumps, from_dict, from_json, from_yaml, load, reference, to_dict
from fdel.recipe.serving import build_engine, evaluate
from fdel.recipe.settled import Settled, settle
from fdel.recipe.step import TrainingRun, build_evaluate, build_objective, build_step, final_params

__all__ = [name for name, x in globals().items() if name[0] != "_" and not inspect.ismodule(x)]
