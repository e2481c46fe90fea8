"""Do what a recipe asks for: train a model and export it, and the other actions, in their order."""

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from fdel import models, params, report, text
from fdel.recipe import config, fits, parse, samples, seeing, serving
from fdel.recipe.build import build_mesh, build_model, build_tokenizer, quantized, spec_of, trained_whole
from fdel.recipe.data import build_dataset, build_evaluation
from fdel.recipe.read import Recipe, dumps, to_dict
from fdel.recipe.ref_logps import precompute
from fdel.recipe.rewards import build_rewards
from fdel.recipe.schema import Inform
from fdel.recipe.settled import Settled, settle
from fdel.recipe.step import build_evaluate, build_step, final_params
from fdel.train import loop, metrics, processes
from fdel.train.evaluation import everywhere
from fdel.train.rollout import Mixed


class Result(NamedTuple):
    """What training gave: the model as it is saved (adapters in its parameters, no critic), where it is, last metrics."""

    model: models.Model
    directory: Path
    metrics: dict[str, Any]


# ---- training ------------------------------------------------------------------------------------------------------


def train(recipe: Recipe | Settled, train_dataset: Any = None, eval_dataset: Any = None) -> Result:
    """Train as the recipe says, from the last checkpoint in `save_directory` if there is one, and export the model.

    Rows from memory take the place of `mixture.informs` and `eval_informs`: lists of dicts, a `datasets.Dataset`, or
    `data.Source`s. RecipeError for what cannot be done, before anything is loaded; the data is read before the model.
    """
    recipe = recipe.recipe if isinstance(recipe, Settled) else recipe
    rows = {"informs": train_dataset, "eval_informs": eval_dataset}
    memory: dict[str, Any] = {name: (Inform(data_files="memory"),) for name, x in rows.items() if x is not None}
    twice = [name for name in memory if getattr(recipe.mixture, name)]
    parse.fail([f"mixture.{name}: there are rows from memory too; give one" for name in twice])
    mixture = dataclasses.replace(recipe.mixture, **memory)
    fits.validate(dataclasses.replace(recipe, actions=(), mixture=mixture), jax.device_count())
    s = settle(recipe)
    if s.sampling and jax.process_count() > 1:
        parse.fail([*samples.several_processes(s)])
    parse.fail(config.dropout(s, config.read(recipe)[1]))
    t, tok = recipe.trainer, build_tokenizer(s)
    functions = build_rewards(s.keys)  # now, if one is not there
    tasks: Any = samples.build_tasks(s, tok, train_dataset) if s.sampling else None
    dataset: Any = tasks if s.sampling == 1 else build_dataset(s, tok, train_dataset)
    _tell(f"data: {dataset.report if dataset.batches else 'a stream, whose rows are counted when it was read'}")
    held_out: Any = samples.build_tasks(s, tok, eval_dataset, held_out=True) if s.sampling == 1 else None
    evaluation, mesh = None if s.sampling == 1 else build_evaluation(s, tok, eval_dataset), build_mesh(s)
    if not (known := [n for n in (t.max_training_steps, dataset.total) if n]):
        raise parse.RecipeError("trainer.max_training_steps: missing; the length of a stream is not known")
    steps, old = min(known), Path(t.save_directory) / "checkpoints"
    parse.fail([*fits.rows(s, mesh.shape)])
    if not t.resume_if_possible and old.is_dir() and any(old.iterdir()):
        raise parse.RecipeError(f"trainer.resume_if_possible: false, but {old} has checkpoints; choose a new directory")
    with jax.set_mesh(mesh):
        model = build_model(s, mesh)
        dataset, evaluation = precompute(s, model, tok, mesh, dataset, evaluation)
        policy: Any = samples.build_policy(s, model, tok) if s.sampling else None  # first: the step donates the model
        training = build_step(s, model, steps, mesh)
        batches = dataset if policy is None else samples.build_source(s, policy, training, tok, tasks, functions)
        evaluate = build_evaluate(s, training, evaluation, mesh)
        if held_out is not None:
            sampled = samples.build_evaluate(s, policy, batches, tok, held_out, functions)
            evaluate = lambda state: sampled(dataclasses.replace(state, params=final_params(s, state)))
        if 0 < s.sampling < 1:
            batches = Mixed(dataset, batches, s.sampling, seed=t.seed)
        settings = loop.Loop(
            steps=steps, directory=t.save_directory, log_every=t.log_steps, eval_every=t.evaluation_steps or 0,
            save_every=t.save_steps or steps, keep=t.save_total_limit or 0, keep_best=int(bool(t.metric_for_best_model)),
            metric=t.metric_for_best_model or "eval_loss", greater_is_better=t.greater_is_better,
            patience=t.early_stopping_patience or 0, steps_per_epoch=dataset.batches or 0,
            flops_per_token=3 * report.flops_per_token(model.family, model.cfg, s.length // 2),
            report_to=(*["tensorboard"] * t.use_tensorboard, *["wandb"] * t.use_wandb),
        )  # fmt: skip
        state = loop.fit(
            training.step, training.state, batches, settings, given=training.given,
            evaluate=evaluate, sharding=params.batch_sharding(mesh), config=to_dict(recipe),
        )  # fmt: skip
        model = model._replace(params=training.complete(final_params(s, state)))
    if dataset.batches is None:
        _tell(f"data: {dataset.report}")
    where, critic = export(s, model, tok), models.heads.kind_of(model.params) == "value"
    model = model._replace(params=models.heads.inner(model.params)) if critic else model
    return Result(model, where, metrics.read(t.save_directory)[-1])


def _tell(line: str) -> None:
    if jax.process_index() == 0:
        print(line, file=sys.stderr)


# ---- export --------------------------------------------------------------------------------------------------------


def export(recipe: Recipe | Settled, model: models.Model, tok: text.Tokenizer) -> Path:
    """Write the model and its tokenizer to `<save_directory>/model` in hub layout, adapters as PEFT does.

    With `lora.merge`, the model with its adapters merged goes to `<save_directory>/merged` too. A policy with a critic is
    written alone, and both together to `<save_directory>/critic`.
    """
    s, first = settle(recipe), jax.process_index() == 0
    out = Path(s.recipe.trainer.save_directory) / "model"
    if s.lora:
        if first:
            task = models.heads.TASKS.get(models.heads.kind_of(model.params), "CAUSAL_LM")
            how = {"base_name": str(s.recipe.model.name_or_path), "whole": trained_whole(s, model), "task_type": task}
            params.save_peft(spec_of(s, model), model.params, out, **how)
        if s.lora.merge:
            merged = out.with_name("merged")
            models.save(model._replace(params=params.dequantize(params.lora.merge(model.params))), merged)
            if first:
                text.save(tok, merged)
    else:
        if models.heads.kind_of(model.params) == "value":  # whoever serves the policy has no use for its critic
            models.save(model, out.with_name("critic"))
            model = model._replace(params=models.heads.inner(model.params))
        models.save(model, out)
    whole = out.with_name("merged") if s.lora and s.lora.merge else out
    if first and s.method.head and (file := whole / "config.json").is_file():
        said = json.loads(file.read_text())
        if said.get("pad_token_id") is None:  # by which transformers finds the last token of a padded row
            said["pad_token_id"] = tok.ids.get("pad", tok.ids.get("eos"))
            file.write_text(json.dumps(said, indent=2, sort_keys=True) + "\n")
    if first:
        for file in seeing.processor_files(s.recipe):
            for there in {out, whole}:
                (there / file.name).write_bytes(file.read_bytes())
        text.save(tok, out)
        if s.method.pooling:
            models.pooling.write(s.method.pooling(s.keys), whole, getattr(model.cfg, "width", model.cfg.embed))
    everywhere(True)  # who goes on finds it complete
    return out


# ---- actions -------------------------------------------------------------------------------------------------------


def prepare(recipe: Recipe | Settled, devices: int | None = None) -> list[Any]:
    """Find out that every action can be done, before the first; give what each needs, None for most.

    `devices`: as many are there, by default here. RecipeError, ValueError and OSError for what cannot be done.
    """
    s = fits.validate(recipe, jax.device_count() if devices is None else devices)
    actions = s.recipe.actions
    alone = [a.name for a in actions if a.name in ("eval", "serve")] if jax.process_count() > 1 else []
    parse.fail([f"actions.{name}: one process alone does it; run it by itself, on the saved model" for name in alone])
    ways: dict[str, Callable[..., Any]] = {"eval": serving.prepare_evaluation, "serve": serving.prepare}
    return [ways[a.name](s.recipe, a.settings) if a.name in ways else None for a in actions]


def run(recipe: Recipe) -> list[Any]:
    """Do the recipe's actions one after the other; give what each gave: a Result, the results of benchmarks, or None.

    RecipeError if one of them cannot be done, before the first.
    """
    parse.fail([] if recipe.actions else ["actions: missing; write what to do, such as [validate, train]"])
    d = recipe.distributed
    processes.join(d.coordinator, d.processes, d.process_id)
    ready, s = prepare(recipe), settle(recipe)
    speaks: dict[str, Callable[[], str]] = {
        "print": lambda: summary(recipe) + "\n", "dump_config": lambda: dumps(recipe, defaults=True),
        "validate": lambda: "the recipe is valid\n",
    }  # fmt: skip
    trained, given = None, []
    for action, found in zip(recipe.actions, ready, strict=True):
        result: Any = None
        if action.name == "train":
            result = train(s)
            trained = quantized(s, result.model) if s.rounds else result.model
        if jax.process_index() > 0:
            pass  # one process speaks and writes
        elif action.name == "train":
            print(f"saved to {result.directory}")
        elif action.name in speaks:
            print(speaks[action.name](), end="")
        elif action.name == "serve":
            serving.serve(recipe, action.settings, trained)  # reads the keys again: training may have taken days
        elif action.name == "eval":
            result = serving.evaluate(recipe, action.settings, trained, found)
        else:
            {"to_json": Recipe.to_json, "to_yaml": Recipe.to_yaml}[action.name](recipe, action.settings.path)
        given.append(result)
    return given


def summary(recipe: Recipe) -> str:
    """Describe a run in a few lines: what is trained, on what, how long, and every key that is not its default."""
    s = settle(recipe)
    how = (
        f"all weights, for {s.format}"
        if s.rounds
        else f"adapters on {s.format} weights"
        if s.format
        else "adapters"
        if s.lora
        else "some weights"
        if s.frozen
        else "all weights"
    )
    rows = [
        ("model", recipe.model.name_or_path or "random weights, of model.config"),
        ("trainer", f"{s.method.name}, {how}, {recipe.trainer.optimizer} at {s.rate:g}"),
        ("data", ", ".join(str(x.name or x.data_files or x.type) for x in recipe.mixture.informs) or "none"),
        ("a step", f"{s.rows} rows of {s.length} tokens"),
        ("actions", ", ".join(a.name for a in recipe.actions) or "none"),
    ]
    given = [
        f"{path} = {parse.plain(value)!r}"
        for path, f, section in recipe.keys()
        if (value := getattr(section, f.name)) != f.default and path != "actions"
        if not any(map(dataclasses.is_dataclass, value if isinstance(value, tuple) else (value,)))
    ]
    return "\n".join([*(f"{k:<8} {v}" for k, v in rows), "", *given])
