"""The reference's log-probabilities, computed once before training: then no reference model is in memory beside it."""

import dataclasses
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
from fdel.recipe import build, seeing
from fdel.recipe import data as sets
from fdel.recipe.parse import plain
from fdel.recipe.read import Recipe
from fdel.recipe.settled import Settled, settle
from fdel.train import data, losses
from fdel.train.evaluation import everywhere, per_example


def precompute(
    recipe: Recipe | Settled, model: models.Model, tok: text.Tokenizer, mesh: jax.sharding.Mesh, dataset: data.Data,
    evaluation: data.Data | None,
) -> tuple[data.Data, data.Data | None]:  # fmt: skip
    """Give the data of training and of evaluation the column "ref_logps", if the recipe asks for it.

    With KTO's own loss also "kl_ref_logps", of the batches' "kl". Call it in `jax.set_mesh(mesh)`, before anything is
    trained. What was computed is kept in `mixture.save.path`, or in `<save_directory>/reference`, under the hash of the
    data and of the reference: a run that goes on reads it.
    """
    s = settle(recipe)
    if not s.precomputed:
        return dataset, evaluation
    wanted = {"train": dataset}
    files = {"train": _file(s, tok, dataset.sources, sets.build_settings(s))}
    if evaluation is not None:
        wanted["eval"] = evaluation
        files["eval"] = _file(s, tok, evaluation.sources, sets.evaluation_settings(s))
    if not everywhere(all(f.is_file() for f in files.values())):
        t, devices = s.recipe.trainer, mesh.shape["dp"] * mesh.shape["fsdp"] * mesh.shape["ep"]
        # Those of evaluation, or of a microbatch of training, as many on each device.
        rows = t.eval_batch_size or -(-s.rows // t.gradient_accumulation_steps // devices) * devices
        logps = _logps(s, model)
        for name, file in files.items():
            if jax.process_index() == 0:
                print(f"reference: log-probabilities of {wanted[name].examples} examples", file=sys.stderr)
            found = per_example(logps, wanted[name], rows, params.batch_sharding(mesh))
            _write(file, np.moveaxis(found, 1, 0))
    names = ("ref_logps", "kl_ref_logps") if s.kl else ("ref_logps",)
    columns = lambda file: dict(zip(names, np.load(file), strict=True))
    given = {name: data.with_columns(wanted[name], **columns(file)) for name, file in files.items()}
    return given["train"], given.get("eval")


def _logps(s: Settled, model: models.Model) -> Callable[[Any], jax.Array]:
    """Build batch -> the reference's log-probabilities [rows 1 ...], or [rows 2] with those of "kl".

    See `build.build_reference` for which model that is.
    """
    cfg = losses.forward.still(model.cfg)
    outputs = losses.completion_logps(model.family, cfg, ld_alpha=s.recipe.trainer.ld_alpha)
    score, weights = build.cast(s, model, outputs), model.params
    if s.reference == "reference_model":
        weights = build.load_reference(s, model)
    elif s.reference == "base":
        weights = params.lora.unload(params.lora.split(weights)[1])

    def precise(weights: Any, batch: Any) -> jax.Array:
        sides = (batch, batch["kl"]) if "kl" in batch else (batch,)
        with s.computing():
            names = ("tokens", "mask", "lengths", *losses.forward.SEEN)
            each = [score(weights, {k: side[k] for k in names if k in side}) for side in sides]
            return jnp.stack([o["logps"] for o in each], 1)

    jitted = jax.jit(precise)
    return lambda batch: jitted(weights, batch)


def _file(recipe: Recipe | Settled, tok: text.Tokenizer, given: Sequence[data.Source], settings: data.Settings) -> Path:
    """Name the file by the hash of the examples, and of what decides about the reference's numbers."""
    s = settle(recipe)
    r, t = s.recipe, s.recipe.trainer
    tok, source = sets.ending(r, tok), r.reference_model or r.model
    settings = dataclasses.replace(settings, sight=seeing.seeing(r))
    keys = [data.key(s, tok, settings) for s in given]
    weights: list[tuple] = []
    if source.name_or_path:
        folder = params.resolve(source.name_or_path, revision=source.extra_kwargs.revision)
        weights = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(folder.iterdir()) if p.is_file()]
    how = [plain(x) for x in (source.config, t.seed, r.loader, r.quantization, r.base_config)]
    facts = json.dumps([keys, weights, how, s.lora is not None, t.ld_alpha, s.kl])
    directory = r.mixture.save.path or Path(t.save_directory) / "reference"
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
