"""From the sections `mixture` and `trainer` to data sets: which files, which columns, how rows become batches."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax

from fdel import text
from fdel.recipe import config, parse, seeing
from fdel.recipe.build import build_mesh
from fdel.recipe.read import Recipe
from fdel.recipe.schema import Inform
from fdel.recipe.settled import Settled, settle
from fdel.train import data, processes

FORMATS = ("json", "jsonl", "parquet", "arrow", "csv", "text")
PACKING = {"bfd": "best_fit", "bfd_split": "best_fit_split", "wrapped": "wrapped"}
COLUMNS = (
    "text", "messages", "prompt", "completion", "chosen", "rejected", "reference", "label", "input_ids", "margin", "tools",
    "completions", "labels", "tokens", "anchor", "query", "positive", "negative",
)  # fmt: skip
BLOCK = 2048


def build_settings(recipe: Recipe | Settled) -> data.Settings:
    """Say how rows become batches of training."""
    s = settle(recipe)
    t, m = s.recipe.trainer, s.recipe.mixture
    endless = t.num_train_epochs is None and t.max_training_steps is not None
    fields: dict[str, Any] = dict(
        batch=s.rows, length=s.length, packing=PACKING[t.packing_strategy] if s.packed else None, shuffle=s.shuffled,
        seed=m.seed, epochs=None if endless else t.num_train_epochs or 3,
        window=m.shuffle_buffer_size or data.Settings.window, stop=m.stop_strategy,
        block=m.mixture_block_size or (BLOCK if m.block_mixture else None), stream=m.pack_on_the_fly,
        prefetch=m.prefetch_buffer_size, threads=m.prefetch_workers,
    ) | s.method.data(s.keys)  # fmt: skip
    if m.tokenization.truncation is not None:
        fields["overlong"] = "truncate" if m.tokenization.truncation else "drop"
    return data.Settings(**fields)


def evaluation_settings(recipe: Recipe | Settled) -> data.Settings:
    """Say how rows become batches of evaluation: all of them once, in order, unpacked, none of it hidden."""
    return dataclasses.replace(
        build_settings(recipe), batch=settle(recipe).eval_rows, packing=None, shuffle=False, epochs=1, block=None,
        stream=False, partial="pad", last_only=False, fcm_min_ratio=0.0, fcm_max_ratio=0.0,
    )  # fmt: skip


def build_dataset(recipe: Recipe | Settled, tok: text.Tokenizer, rows: Any = None) -> data.Data:
    """Read and tokenise the training data, `rows` if they are given; this process's rows of each batch.

    `rows` are what `data.dataset` takes: a list of dicts, a `datasets.Dataset`, a `data.Source` or several.
    """
    s = settle(recipe)
    return _dataset(s, s.recipe.mixture.informs, rows, build_settings(s), tok)


def build_evaluation(recipe: Recipe | Settled, tok: text.Tokenizer, rows: Any = None) -> data.Data | None:
    """Read and tokenise the data of evaluation, `rows` if they are given; None without any. Each row comes once."""
    s = settle(recipe)
    informs = [dataclasses.replace(x, name=None, weight=None) for x in s.recipe.mixture.eval_informs]
    return _dataset(s, informs, rows, evaluation_settings(s), tok) if informs or rows is not None else None


def _dataset(
    s: Settled, informs: Sequence[Inform], rows: Any, settings: data.Settings, tok: text.Tokenizer
) -> data.Data:
    given, cache = build_sources(s, informs) if rows is None else rows, s.recipe.mixture.save.path
    mine, parts = (0, 1) if jax.process_count() == 1 else processes.share(build_mesh(s))
    settings = dataclasses.replace(settings, vocab=config.read(s.recipe)[1].vocab, sight=seeing.seeing(s.recipe))
    try:
        return data.dataset(
            given, settings, ending(s.recipe, tok), cache_directory=cache, process_index=mine, process_count=parts
        )
    except ValueError as e:
        reason = str(e).replace("partial='pad'", "a smaller trainer.total_batch_size")
        raise parse.RecipeError(f"mixture.informs: {reason}") from e


def build_sources(recipe: Recipe | Settled, informs: Sequence[Inform]) -> list[data.Source]:
    """Give the sources of data sets, with the columns that are asked for. Hub data sets are fetched (extra `hub`)."""
    s, found = settle(recipe), list[data.Source]()
    weights = s.recipe.mixture.mixture_weights or {}
    for x in informs:
        rename, field = dict(x.format_fields or {}), x.content_field
        folder: Path | None = None
        if field is not None and field not in COLUMNS:
            rename[field] = s.method.column
        kept = None if field is None else (rename.get(field, field), *x.additional_fields, *rename.values())
        files = (x.data_files,) if isinstance(x.data_files, str) else x.data_files
        if x.type not in FORMATS:
            folder = _folder(x.type)
            files = (str(folder),) if files is None else tuple(str(folder / f) for f in files)
        if files is None:
            raise parse.RecipeError(f"mixture.informs: type {x.type!r} needs data_files")
        format, split = x.type if x.type in FORMATS else None, x.split or x.dataset_split_name or "train"
        only, weight = None if kept is None else partial(_only, kept), weights.get(x.name or "", x.weight)
        found.append(data.Source(files, format, split, rename, only, repr(kept), weight, x.num_rows, folder))
    return found


def _only(columns: Sequence[str], row: dict[str, Any]) -> dict[str, Any]:
    """Keep some columns of a row; one that is missing makes it a bad row."""
    if missing := [c for c in columns if c not in row]:
        raise ValueError(f"no column {missing[0]!r} (found {', '.join(row)}); see content_field, additional_fields")
    return {c: row[c] for c in columns}


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
