"""From the sections `mixture` and `trainer` to data sets: which files, which columns, how rows become batches."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from fdel import text
from fdel.recipe import check, config, parse
from fdel.recipe.build import build_mesh
from fdel.recipe.read import Recipe
from fdel.recipe.schema import Inform
from fdel.recipe.trainer import TEXT
from fdel.train import data, processes

FORMATS = ("json", "jsonl", "parquet", "arrow", "csv", "text")
KINDS = {"kto": "unpaired", "bco": "unpaired", "prm": "process", "embedding": "embedding"}
KINDS |= dict.fromkeys(TEXT, "sft")  # the others are "pairs"
PACKING = {"bfd": "best_fit", "bfd_split": "best_fit_split", "wrapped": "wrapped"}
COLUMNS = (
    "text", "messages", "prompt", "completion", "chosen", "rejected", "label", "input_ids", "margin", "tools",
    "completions", "labels", "anchor", "query", "positive", "negative",
)  # fmt: skip
BLOCK = 2048


def build_settings(recipe: Recipe) -> data.Settings:
    """Say how rows become batches of training."""
    t, m = recipe.trainer, recipe.mixture
    kind = KINDS.get(t.trainer_type, "pairs")
    learn = {None: "auto", True: "completion", False: "all"}[t.completion_only_loss]
    packed = m.pack_tokens or t.packing
    truncate = t.trainer_type != "reward" if m.tokenization.truncation is None else m.tokenization.truncation
    endless = t.num_train_epochs is None and t.max_training_steps is not None
    block = m.mixture_block_size or (BLOCK if m.block_mixture else None)
    return data.Settings(
        kind=kind, batch=check.batch_rows(recipe), length=check.row_length(recipe),
        packing=PACKING[t.packing_strategy] if packed else None,
        learn="assistant" if t.assistant_only_loss else learn, overlong="truncate" if truncate else "drop",
        shuffle=check.shuffled(recipe), seed=m.seed,
        epochs=None if endless else t.num_train_epochs or 3, window=m.shuffle_buffer_size or data.Settings.window,
        stop=m.stop_strategy, block=block, stream=m.pack_on_the_fly, prefetch=m.prefetch_buffer_size,
        threads=m.prefetch_workers, negatives=t.negatives, separator=t.step_separator,
        last_only=t.train_on_last_step_only, kl=check.mismatched(recipe), max_prompt=t.max_prompt_length,
        max_completion=t.max_completion_length, fcm_min_ratio=t.fcm_min_ratio, fcm_max_ratio=t.fcm_max_ratio,
    )  # fmt: skip


def evaluation_settings(recipe: Recipe) -> data.Settings:
    """Say how rows become batches of evaluation: all of them once, in order, unpacked, none of it hidden."""
    rows = recipe.trainer.eval_batch_size or check.batch_rows(recipe)
    return dataclasses.replace(
        build_settings(recipe), batch=rows, packing=None, shuffle=False, epochs=1, block=None, stream=False,
        partial="pad", last_only=False, fcm_min_ratio=0.0, fcm_max_ratio=0.0,
    )  # fmt: skip


def build_dataset(recipe: Recipe, tok: text.Tokenizer, rows: Any = None) -> data.Data:
    """Read and tokenise the training data, `rows` if they are given; this process's rows of each batch.

    `rows` are what `data.dataset` takes: a list of dicts, a `datasets.Dataset`, a `data.Source` or several.
    """
    return _dataset(recipe, recipe.mixture.informs, rows, build_settings(recipe), tok)


def build_evaluation(recipe: Recipe, tok: text.Tokenizer, rows: Any = None) -> data.Data | None:
    """Read and tokenise the data of evaluation, `rows` if they are given; None without any. Each row comes once."""
    informs = [dataclasses.replace(x, name=None, weight=None) for x in recipe.mixture.eval_informs]
    return _dataset(recipe, informs, rows, evaluation_settings(recipe), tok) if informs or rows is not None else None


def _dataset(
    recipe: Recipe, informs: Sequence[Inform], rows: Any, settings: data.Settings, tok: text.Tokenizer
) -> data.Data:
    given, cache = build_sources(recipe, informs) if rows is None else rows, recipe.mixture.save.path
    mine, parts = (0, 1) if jax.process_count() == 1 else processes.share(build_mesh(recipe))
    settings = dataclasses.replace(settings, vocab=config.read(recipe)[1].vocab)
    try:
        return data.dataset(
            given, settings, ending(recipe, tok), cache_directory=cache, process_index=mine, process_count=parts
        )
    except ValueError as e:
        said = str(e).replace("partial='pad'", "a smaller trainer.total_batch_size")
        raise parse.RecipeError(f"mixture.informs: {said}") from e


def build_sources(recipe: Recipe, informs: Sequence[Inform]) -> list[data.Source]:
    """Give the sources of data sets, with the columns that are asked for. Hub data sets are fetched (extra `hub`)."""
    weights = recipe.mixture.mixture_weights or {}
    return [_source(recipe, x, weights.get(x.name or "", x.weight)) for x in informs]


def _source(recipe: Recipe, inform: Inform, weight: float | None) -> data.Source:
    rename = dict(inform.format_fields or {})
    field = inform.content_field
    if field is not None and field not in COLUMNS:
        kind = recipe.trainer.trainer_type
        rename[field] = "text" if kind in TEXT else "anchor" if kind == "embedding" else "prompt"
    kept = None if field is None else (rename.get(field, field), *inform.additional_fields, *rename.values())
    files = (inform.data_files,) if isinstance(inform.data_files, str) else inform.data_files
    folder = None
    if inform.type not in FORMATS:
        folder = _folder(inform.type)
        files = (str(folder),) if files is None else tuple(str(folder / f) for f in files)
    if files is None:
        raise parse.RecipeError(f"mixture.informs: type {inform.type!r} needs data_files")
    split = inform.split or inform.dataset_split_name or "train"
    return data.Source(
        files, inform.type if inform.type in FORMATS else None, split, rename, _only(kept), repr(kept), weight,
        inform.num_rows, folder,
    )  # fmt: skip


def _only(columns: tuple[str, ...] | None) -> Callable[[dict], dict] | None:
    """Keep some columns of a row; one that is missing makes it a bad row."""
    if columns is None:
        return None

    def only(row: dict[str, Any]) -> dict[str, Any]:
        missing = [c for c in columns if c not in row]
        if missing:
            raise ValueError(f"no column {missing[0]!r} (found {', '.join(row)}); see content_field, additional_fields")
        return {c: row[c] for c in columns}

    return only


def _folder(name: str) -> Path:
    if Path(name).is_dir():
        return Path(name)
    try:
        from huggingface_hub import snapshot_download
    except ImportError as e:
        raise ImportError(f"data set {name}: no such directory; from the Hub it needs: pip install 'fdel[hub]'") from e
    return Path(snapshot_download(name, repo_type="dataset"))


def ending(recipe: Recipe, tok: text.Tokenizer) -> text.Tokenizer:
    """Give the tokenizer that ends texts with `mixture.pack_eos_token_id`, or as it is."""
    wanted = recipe.mixture.pack_eos_token_id
    if wanted is None or wanted == tok.ids.get("eos"):
        return tok
    token = tok.backend.id_to_token(wanted)
    if token is None:
        raise parse.RecipeError(f"mixture.pack_eos_token_id: the tokenizer has no token {wanted}")
    return dataclasses.replace(tok, special={**tok.special, "eos_token": token})
