"""What a recipe says about a model before any weight is read: its config, with changes, and which matrices are adapted."""

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from fdel import models, params
from fdel.params.hf_layout import matrix
from fdel.params.quantize import MATRICES
from fdel.recipe import names, parse
from fdel.recipe.methods import Lora
from fdel.recipe.read import Recipe
from fdel.recipe.schema import Model as Source
from fdel.recipe.settled import Settled

DROPOUT = "dropout|pdrop|layerdrop|drop_path"  # in the names of config.json
SECONDS = 5  # for a pattern of target_modules


def given(source: Source, section: str = "model") -> str:
    """Give the directory or Hub id of a model; a RecipeError if there is none."""
    if not source.name_or_path:
        raise parse.RecipeError(f"{section}.name_or_path: missing; give a directory or a Hub id")
    return source.name_or_path


def name_of(recipe: Recipe) -> str:
    """Name the model, as those who ask a server do."""
    return Path(recipe.model.name_or_path or recipe.trainer.save_directory).resolve().name


def read(recipe: Recipe) -> tuple[ModuleType, Any]:
    """Read the config of the model, as `model.config` or its directory has it, with `base_config.values`.

    Hub ids are fetched. RecipeError for values that nothing reads, ConfigError for a config that fdel does not understand.
    """
    source = recipe.model
    if source.config is not None:
        d = parse.plain(source.config)
        family = models.of_config(d)
        cfg = family.Config.from_hf(d)
    else:
        family, cfg = models.read_config(params.resolve(given(source), revision=source.extra_kwargs.revision))
    return family, changed(recipe, family, cfg)


def changed(recipe: Recipe, family: ModuleType, cfg: Any) -> Any:
    """Give a config with `base_config.values`; a RecipeError lists those that the family does not read."""
    kept, faults = json.loads(cfg.source), []
    ours = sorted({f.metadata["key"] for f in dataclasses.fields(cfg) if "key" in f.metadata})
    for key, value in parse.plain(recipe.base_config.values or {}).items():
        where = f"base_config.values.{key}"
        reason: Exception | None = None
        try:
            after = family.Config.from_hf(kept | {key: value})
        except (ValueError, TypeError, KeyError) as e:
            after, reason = cfg, e
        if reason is not None and key in {*ours, *kept}:
            faults.append(f"{where}: {parse.shown(value)}: {reason}")
        elif reason is not None or (after == cfg and kept.get(key) != value):
            otherwise = f"it reads {', '.join(ours)}, and the keys of rope"
            near = names.hint("base_config.values", key, [*ours, *kept], otherwise=otherwise)
            faults.append(f"{where}: {family.MODEL_TYPE} does not read it; {near}")
        else:
            kept, cfg = kept | {key: value}, after
    parse.fail(faults)
    return cfg


def few_bits(s: Settled, found: bool) -> list[str]:
    """Say what a run cannot do with a model whose weights are in few bits in its files, if they were `found` to be."""
    if found and s.format:
        return ["quantization.model: the model's files are in few bits already; remove it, or use fdel convert first"]
    return (
        ["trainer.lora: missing; the model's files are in few bits, which are not trained"]
        if found and not s.lora
        else []
    )


def dropout(s: Settled, cfg: Any) -> list[str]:
    """Say which dropout a config asks for that nobody has switched off; this version has none."""
    chosen = s.recipe.trainer.disable_dropout
    off = not s.method.keeps_dropout if chosen is None else chosen
    unread = "summary" if s.method.head else "summary|classifier"  # of heads that are not there
    number = lambda v: isinstance(v, int | float) and not isinstance(v, bool) and v != 0
    rates = {k: v for k, v in json.loads(cfg.source).items() if number(v) and re.search(DROPOUT, k)}
    found = [f"{k} {v}" for k, v in rates.items() if not re.match(unread, k)]
    if off or not found:
        return []
    return [
        f"trainer.disable_dropout: config.json asks for dropout ({', '.join(found)}), which is not in this version; set "
        "trainer.disable_dropout: true to train without it"
    ]


def changed_alike(recipe: Recipe, model: models.Model) -> Any:
    """Give the config of a loaded model with `base_config.values`; a RecipeError if its tensors have other shapes then."""
    cfg = changed(recipe, model.family, model.cfg)
    same_shapes(model.family, cfg, model.cfg)
    return cfg


def same_shapes(family: ModuleType, cfg: Any, other: Any) -> None:
    """Raise a RecipeError if a checkpoint's tensors are not those of a changed config."""
    shapes = lambda cfg: [(path, p.shape) for path, p in params.named_leaves(family.spec(cfg))]
    if cfg != other and shapes(cfg) != shapes(other):
        raise parse.RecipeError(
            "base_config.values: the checkpoint's tensors have other shapes than these values ask for; to start from "
            "random weights, give a directory that holds a config.json alone, or model.config"
        )


def from_scratch(source: Source) -> bool:
    """Whether a model starts from random weights: a config, in the run file or alone in its directory."""
    if source.config is not None or source.name_or_path is None:
        return source.config is not None
    there = Path(source.name_or_path).expanduser()
    weights = any(any(there.glob(p)) for p in ("*.safetensors*", "*.bin*", "*.pt", "*.pth", "*.gguf"))
    return (there / "config.json").is_file() and not weights


# ---- adapters ------------------------------------------------------------------------------------------------------


def lora_targets(lora: Lora, spec: Any) -> str:
    """Find the matrices that are adapted, as a pattern of their paths.

    As in PEFT, a text is a pattern of modules' whole names in the checkpoint, and a list has names, or their ends.
    What matches nothing, or some layers alone, is a RecipeError.
    """
    if lora.target_modules == "all-linear":
        return MATRICES
    modules = {
        path: [name.removesuffix(".weight") for name in params.hf_names(p)]
        for path, p in params.named_leaves(spec)
        if p.hf and matrix(p)
    }
    ends = lambda m, name: m == name or m.endswith(f".{name}")
    last = sorted({m.rpartition(".")[2] for found in modules.values() for m in found})
    known = "matrix", last, f"matrices are {', '.join(last)}"
    return _chosen("trainer.lora.target_modules", lora.target_modules, modules, ends, known)


def trainable(wanted: str | Sequence[str], spec: Any) -> str:
    """Find the arrays of `trainer.trainable`, as a pattern of their paths.

    A text is a pattern of modules' whole names in the checkpoint; a list has modules, or parts of their names, whose arrays
    are all wanted. What matches nothing, or some layers alone, is a RecipeError.
    """
    modules = {
        path: [re.sub(r"\.(weight|bias)$", "", name) for name in params.hf_names(p)]
        for path, p in params.named_leaves(spec)
        if p.hf
    }
    within = lambda m, name: f".{name}." in f".{m}."
    parts = sorted({x for found in modules.values() for m in found for x in m.split(".") if not x.isdigit()})
    known = "part of a module's name", parts, f"parts are {', '.join(parts)}"
    return _chosen("trainer.trainable", wanted, modules, within, known)


def _chosen(
    key: str, wanted: str | Sequence[str], modules: Mapping[str, Sequence[str]], match: Callable[[str, str], bool],
    known: tuple[str, Sequence[str], str],
) -> str:  # fmt: skip
    """Choose paths by their modules' names, for a key: a pattern of these paths. `known`: what names in a list are."""
    every, (noun, names_of, otherwise) = sorted({m for found in modules.values() for m in found}), known
    if isinstance(wanted, str):
        chosen = _matching(key, wanted, every)
        if not chosen:
            raise parse.RecipeError(
                f"{key}: no module matches the pattern {wanted!r}; modules are called "
                f"{', '.join(every[:3])}, ...; names stand in a list, as [q_proj, v_proj]"
            )
    else:
        near = lambda name: names.hint("", name, names_of, otherwise=otherwise)
        unknown = [w for w in wanted if not any(match(m, w) for m in every)]
        parse.fail([f"{key}: {w!r} is no {noun}; {near(w)}" for w in unknown])
        chosen = {m for m in every if any(match(m, w) for w in wanted)}
    some = [path for path, found in modules.items() if chosen & {*found} and not chosen >= {*found}]
    if some:
        raise parse.RecipeError(
            f"{key}: matches some layers of {', '.join(some)} and not all; layers that are alike are chosen together"
        )
    return "|".join(f"^{re.escape(path)}$" for path, found in modules.items() if chosen >= {*found})


def _matching(key: str, pattern: str, modules: Sequence[str]) -> set[str]:
    """Find the names that a pattern matches as a whole, in a process that is ended where it takes long."""
    code = (
        "import json, re, sys\n"
        "pattern, names = json.load(sys.stdin)\n"
        "try: found = re.compile(pattern)\n"
        "except (re.error, RecursionError, OverflowError) as e: sys.exit(f'is no pattern: {e}')\n"
        "json.dump([n for n in names if found.fullmatch(n)], sys.stdout)"
    )
    command = [sys.executable, "-I", "-c", code]
    given = json.dumps([pattern, modules])
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired as e:
        raise parse.RecipeError(f"{key}: {pattern!r} takes more than {SECONDS} s to match") from e
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["its process ended"])[-1]
        raise parse.RecipeError(f"{key}: {parse.shown(pattern)} {reason}")
    return set(json.loads(done.stdout))
