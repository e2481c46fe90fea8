"""The reference's log-probabilities, computed once before training: then no reference model is in memory beside it."""

import hashlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fdel import models, params, text
from fdel.recipe import build, check
from fdel.recipe import data as sets
from fdel.recipe.parse import plain
from fdel.recipe.read import Recipe
from fdel.train import data, losses
from fdel.train.evaluation import everywhere, per_example


def precompute(
    recipe: Recipe,
    model: models.Model,
    tok: text.Tokenizer,
    mesh: jax.sharding.Mesh,
    dataset: data.Data,
    evaluation: data.Data | None,
) -> tuple[data.Data, data.Data | None]:
    """Give the data of training and of evaluation the column "ref_logps", if the recipe asks for it.

    With KTO's own loss also "kl_ref_logps", of the batches' "kl". Call it in `jax.set_mesh(mesh)`, before anything is
    trained. What was computed is kept in `mixture.save.path`, or in `<save_directory>/reference`, under the hash of the
    data and of the reference: a run that goes on reads it.
    """
    if not recipe.trainer.precompute_ref_log_probs:
        return dataset, evaluation
    asked = {"train": dataset}
    files = {"train": _file(recipe, tok, dataset.sources, sets.build_settings(recipe))}
    if evaluation is not None:
        asked["eval"] = evaluation
        files["eval"] = _file(recipe, tok, evaluation.sources, sets.evaluation_settings(recipe))
    if not everywhere(all(f.is_file() for f in files.values())):
        logps, rows = _logps(recipe, model), _rows(recipe, mesh)
        for name, file in files.items():
            if jax.process_index() == 0:
                print(f"reference: log-probabilities of {asked[name].examples} examples", file=sys.stderr)
            found = per_example(logps, asked[name], rows, params.batch_sharding(mesh))
            _write(file, np.moveaxis(found, 1, 0))
    names = ("ref_logps", "kl_ref_logps") if check.mismatched(recipe) else ("ref_logps",)
    columns = lambda file: dict(zip(names, np.load(file), strict=True))
    given = {name: data.with_columns(asked[name], **columns(file)) for name, file in files.items()}
    return given["train"], given.get("eval")


def _logps(recipe: Recipe, model: models.Model) -> Callable[[Any], jax.Array]:
    """Build batch -> the reference's log-probabilities [rows 1 ...], or [rows 2] with those of "kl".

    See `build.build_reference` for which model that is.
    """
    outputs = losses.likelihoods(model.family, model.cfg, ld_alpha=recipe.trainer.ld_alpha)
    run = build.cast(recipe, build.spec_of(recipe, model))(lambda p, batch: outputs(p, batch)["logps"])
    weights = model.params
    if recipe.reference_model is not None:
        weights = build.load_reference(recipe, model)
    elif check.adapters(recipe):
        weights = params.lora.unload(params.lora.split(weights)[1])

    def precise(weights: Any, batch: Any) -> jax.Array:
        sides = (batch, batch["kl"]) if "kl" in batch else (batch,)
        with jax.default_matmul_precision(recipe.loader.precision):
            each = [run(weights, {k: side[k] for k in ("tokens", "mask", "lengths")}) for side in sides]
            return jnp.stack(each, 1)

    jitted = jax.jit(precise)
    return lambda batch: jitted(weights, batch)


def _rows(recipe: Recipe, mesh: jax.sharding.Mesh) -> int:
    """Rows of a batch: those of evaluation, or of a microbatch of training, as many on each device."""
    t, devices = recipe.trainer, mesh.shape["dp"] * mesh.shape["fsdp"] * mesh.shape["ep"]
    return t.eval_batch_size or -(-check.batch_rows(recipe) // t.gradient_accumulation_steps // devices) * devices


def _file(recipe: Recipe, tok: text.Tokenizer, given: Sequence[data.Source], settings: data.Settings) -> Path:
    """Name the file by the hash of the examples, and of what decides about the reference's numbers."""
    tok, source = sets.ending(recipe, tok), recipe.reference_model or recipe.model
    keys = [data.key(s, tok, settings) for s in given]
    weights: list[tuple] = []
    if source.name_or_path:
        folder = params.resolve(source.name_or_path, revision=source.extra_kwargs.revision)
        weights = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(folder.iterdir()) if p.is_file()]
    how = [
        plain(x) for x in (source.config, recipe.trainer.seed, recipe.loader, recipe.quantization, recipe.base_config)
    ]
    facts = json.dumps([keys, weights, how, check.adapters(recipe), recipe.trainer.ld_alpha, check.mismatched(recipe)])
    directory = recipe.mixture.save.path or Path(recipe.trainer.save_directory) / "reference"
    return Path(directory) / f"ref_logps-{hashlib.sha256(facts.encode()).hexdigest()[:32]}.npy"


def _write(file: Path, column: np.ndarray) -> None:
    """Write on the first process, while the others wait; the file is complete or absent."""
    if jax.process_index() == 0:
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f".{file.name}.part-{os.getpid()}")
        with part.open("wb") as f:
            np.save(f, column)
        part.replace(file)
    everywhere(True)
