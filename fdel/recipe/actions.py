"""Do what a recipe asks for: train a model and export it, and the other actions, in their order."""

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from fdel import models, params, report, text
from fdel.recipe import check, config, evaluating, fits, parse, serving
from fdel.recipe.build import build_mesh, build_model, build_tokenizer, spec_of
from fdel.recipe.data import build_dataset, build_evaluation
from fdel.recipe.read import Recipe, dumps, to_dict
from fdel.recipe.ref_logps import precompute
from fdel.recipe.step import build_evaluate, build_step, final_params
from fdel.recipe.trainer import HEADED, RATES
from fdel.train import loop, metrics, processes
from fdel.train.evaluation import everywhere


class Result(NamedTuple):
    """What training gave: the model with its trained parameters (adapters among them), where it is, the last metrics."""

    model: models.Model
    directory: Path
    metrics: dict[str, Any]


# ---- training ------------------------------------------------------------------------------------------------------


def train(recipe: Recipe, train_dataset: Any = None, eval_dataset: Any = None) -> Result:
    """Train as the recipe says, from the last checkpoint in `save_directory` if there is one, and export the model.

    Rows from memory take the place of `mixture.informs` and `eval_informs`: lists of dicts, a `datasets.Dataset`, or
    `data.Source`s. RecipeError for what cannot be done, before anything is loaded; the data is read before the model.
    """
    assumed = check.given(recipe, informs=train_dataset, eval_informs=eval_dataset)
    fits.validate(dataclasses.replace(assumed, actions=()), jax.device_count())
    parse.fail(config.dropout(recipe, config.read(recipe)[1]))
    t, tok = recipe.trainer, build_tokenizer(recipe)
    dataset = build_dataset(recipe, tok, train_dataset)
    _tell(f"data: {dataset.report if dataset.batches else 'a stream, whose rows are counted when it was read'}")
    evaluation, steps = build_evaluation(recipe, tok, eval_dataset), run_length(recipe, dataset)
    mesh = build_mesh(recipe)
    _may_begin(recipe, mesh)
    with jax.set_mesh(mesh):
        model = build_model(recipe, mesh)
        dataset, evaluation = precompute(recipe, model, tok, mesh, dataset, evaluation)
        training = build_step(recipe, model, steps, mesh)
        settings = loop.Loop(
            steps=steps, directory=t.save_directory, log_every=t.log_steps, eval_every=t.evaluation_steps or 0,
            save_every=t.save_steps or steps, keep=t.save_total_limit or 0, keep_best=int(bool(t.metric_for_best_model)),
            metric=t.metric_for_best_model or "eval_loss", greater_is_better=t.greater_is_better,
            patience=t.early_stopping_patience or 0, steps_per_epoch=dataset.batches or 0,
            flops_per_token=3 * report.flops_per_token(model.family, model.cfg, check.row_length(recipe) // 2),
            report_to=(*["tensorboard"] * t.use_tensorboard, *["wandb"] * t.use_wandb),
        )  # fmt: skip
        state = loop.fit(
            training.step, training.state, dataset, settings, fixed=training.fixed,
            evaluate=build_evaluate(recipe, training, evaluation, mesh), sharding=params.batch_sharding(mesh),
            config=to_dict(recipe),
        )  # fmt: skip
        model = model._replace(params=training.complete(final_params(recipe, state)))
    if dataset.batches is None:
        _tell(f"data: {dataset.report}")
    return Result(model, export(recipe, model, tok), metrics.read(t.save_directory)[-1])


def _tell(line: str) -> None:
    if jax.process_index() == 0:
        print(line, file=sys.stderr)


def run_length(recipe: Recipe, dataset: Any) -> int:
    """Count the steps of a run: those of all epochs, or `max_training_steps` if they are fewer."""
    known = [n for n in (recipe.trainer.max_training_steps, dataset.total) if n]
    if not known:
        raise parse.RecipeError("trainer.max_training_steps: missing; the length of a stream is not known")
    return min(known)


def _may_begin(recipe: Recipe, mesh: jax.sharding.Mesh) -> None:
    t = recipe.trainer
    parse.fail([*fits.rows(recipe, mesh.shape)])
    found = Path(t.save_directory) / "checkpoints"
    if not t.resume_if_possible and found.is_dir() and any(found.iterdir()):
        raise parse.RecipeError(
            f"trainer.resume_if_possible: false, but {found} has checkpoints; choose a new directory"
        )


# ---- export --------------------------------------------------------------------------------------------------------


def export(recipe: Recipe, model: models.Model, tok: text.Tokenizer) -> Path:
    """Write the model and its tokenizer to `<save_directory>/model` in hub layout, adapters as PEFT does.

    With `lora.merge`, the model with its adapters merged goes to `<save_directory>/merged` too.
    """
    t, out, first = recipe.trainer, Path(recipe.trainer.save_directory) / "model", jax.process_index() == 0
    spec = spec_of(recipe, model)
    if t.trainer_type in HEADED:
        save_classifier(model, tok, out)
    elif check.adapters(recipe):
        if first:
            params.save_peft(spec, model.params, out, base_name=str(recipe.model.name_or_path))
        if t.lora is not None and t.lora.merge:
            merged = out.with_name("merged")
            models.save(model._replace(params=params.dequantize(params.lora.merge(model.params))), merged)
            if first:
                text.save(tok, merged)
    else:
        models.save(model, out)
    if first:
        text.save(tok, out)
    everywhere(True)  # who goes on finds it complete
    return out


def save_classifier(model: models.Model, tok: text.Tokenizer, path: Path) -> None:
    """Save a model with a head of its own; transformers finds the last token of a padded row by pad_token_id."""
    models.save(model, path)
    if jax.process_index() > 0:
        return
    config = json.loads((path / "config.json").read_text())
    if config.get("pad_token_id") is None:
        config["pad_token_id"] = tok.ids.get("pad", tok.ids.get("eos"))
        (path / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


# ---- actions -------------------------------------------------------------------------------------------------------


def prepare(recipe: Recipe, devices: int | None = None) -> list[Any]:
    """Find out that every action can be done, before the first; give what each needs, None for most.

    `devices`: as many are there, by default here. RecipeError, ValueError and OSError for what cannot be done.
    """
    fits.validate(recipe, jax.device_count() if devices is None else devices)
    alone = [a.name for a in recipe.actions if a.name in ("eval", "serve")] if jax.process_count() > 1 else []
    parse.fail([f"actions.{name}: one process alone does it; run it by itself, on the saved model" for name in alone])
    ways: dict[str, Callable[..., Any]] = {"eval": evaluating.prepare, "serve": serving.prepare}
    return [ways[a.name](recipe, a.settings) if a.name in ways else None for a in recipe.actions]


def run(recipe: Recipe) -> list[Any]:
    """Do the recipe's actions one after the other; give what each gave: a Result, the results of benchmarks, or None.

    RecipeError if one of them cannot be done, before the first.
    """
    parse.fail([] if recipe.actions else ["actions: missing; write what to do, such as [validate, train]"])
    d = recipe.distributed
    processes.join(d.coordinator, d.processes, d.process_id)
    ready, first = prepare(recipe), jax.process_index() == 0
    trained, given = None, []
    for action, found in zip(recipe.actions, ready, strict=True):
        result: Any = None
        if action.name == "train":
            result = train(recipe)
            trained = result.model
            if first:
                print(f"saved to {result.directory}")
        elif not first:
            pass  # one process speaks and writes
        elif action.name == "print":
            print(summary(recipe))
        elif action.name == "dump_config":
            print(dumps(recipe, defaults=True), end="")
        elif action.name == "validate":
            print("the recipe is valid")
        elif action.name == "serve":
            serving.serve(recipe, action.settings, trained)  # reads the keys again: training may have taken days
        elif action.name == "eval":
            result = evaluating.evaluate(recipe, action.settings, trained, found)
        else:
            {"to_json": Recipe.to_json, "to_yaml": Recipe.to_yaml}[action.name](recipe, action.settings.path)
        given.append(result)
    return given


def summary(recipe: Recipe) -> str:
    """Describe a run in a few lines: what is trained, on what, how long, and every key that is not its default."""
    t, m = recipe.trainer, recipe.mixture
    method = check.weights_format(recipe)
    how = f"adapters on {method} weights" if method else "adapters" if check.adapters(recipe) else "all weights"
    rate = RATES.get(t.trainer_type) if t.learning_rate is None else t.learning_rate
    rows = [
        ("model", recipe.model.name_or_path or "random weights, of model.config"),
        ("trainer", f"{t.trainer_type}, {how}, {t.optimizer} at {rate:g}" if rate else t.trainer_type),
        ("data", ", ".join(str(x.name or x.data_files or x.type) for x in m.informs) or "none"),
        ("a step", f"{check.batch_rows(recipe)} rows of {check.row_length(recipe)} tokens"),
        ("actions", ", ".join(a.name for a in recipe.actions) or "none"),
    ]
    given = [
        f"{path} = {parse.plain(value)!r}"
        for path, f, section in recipe.keys()
        if (value := getattr(section, f.name)) != f.default and path != "actions"
        if not dataclasses.is_dataclass(value) and not _sections(value)
    ]
    return "\n".join([*(f"{k:<8} {v}" for k, v in rows), "", *given])


def _sections(value: Any) -> bool:
    return isinstance(value, tuple) and any(dataclasses.is_dataclass(x) for x in value)
