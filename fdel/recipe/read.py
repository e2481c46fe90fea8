"""The recipe: a whole run as one frozen value, read from and written to YAML and JSON."""

import dataclasses
import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fdel.recipe import files, names, parse, schema
from fdel.recipe.parse import key
from fdel.recipe.schema import ACTIONS, ALIASES, SERVING, Action, FileAction
from fdel.recipe.trainer import Trainer

WRAPPERS = ("config", "elm", "elarge_model")


@dataclass(frozen=True)
class Recipe:
    """All sections of a run file. `set` gives a changed one; equal recipes are equal runs."""

    model: schema.Model = key(schema.Model(), "the model")
    teacher_model: schema.Model | None = key(None, "the model to distil")
    reference_model: schema.Model | None = key(None,
        "the reference of dpo, kto and bco; default: the model at the start")  # fmt: skip
    loader: schema.Loader = key(schema.Loader(), "precision and loading")
    sharding: schema.Sharding = key(schema.Sharding(), "the device mesh")
    distributed: schema.Distributed = key(schema.Distributed(), "the processes of a run")
    quantization: schema.Quantization = key(schema.Quantization(), "weights of few bits")
    base_config: schema.BaseConfig = key(schema.BaseConfig(), "changes of the model's configuration")
    esurge: schema.Esurge = key(schema.Esurge(), f"the inference engine; {SERVING}")
    mixture: schema.Mixture = key(schema.Mixture(), "the data")
    trainer: Trainer = key(Trainer(), "the training")
    eval: schema.Eval = key(schema.Eval(), f"benchmarks; {SERVING}")
    actions: tuple[Action, ...] = key((), f"what to do, in order: {', '.join(ACTIONS)}")

    def set(self, path: str, value: Any) -> "Recipe":
        """Give the recipe with one key changed, as in `set("trainer.learning_rate", 2e-5)`.

        A section takes a mapping, which replaces it; None gives it its defaults. RecipeError as from `from_dict`.
        """
        at = data = to_dict(self)
        *sections, last = path.split(".")
        for name in sections:
            at[name] = at.get(name) or {}
            at = at[name]
            if not isinstance(at, dict):
                raise parse.RecipeError(f"{path}: {name!r} is no section; set the whole of it")
        at[last] = parse.plain(value)
        return from_dict(data)

    def merge(self, values: Mapping[str, Any]) -> "Recipe":
        """Give the recipe with the keys of nested mappings changed; all others stay. Lists are replaced.

        RecipeError as from `from_dict`.
        """
        return from_dict(_merged(to_dict(self), values))

    def __str__(self) -> str:
        """Write what differs from the defaults, as a run file."""
        return dumps(self).rstrip()

    def keys(self) -> Iterator[tuple[str, dataclasses.Field, Any]]:
        """Yield (dotted path, field, section) of every key, those of actions among them."""
        yield from parse.walk(dataclasses.replace(self, actions=()))
        for i, action in enumerate(self.actions):
            yield from parse.walk(action.settings, f"actions[{i}].{action.name}")

    def to_yaml(self, path: str | Path) -> None:
        """Write what differs from the defaults as YAML; `from_yaml` gives an equal recipe."""
        Path(path).write_text(dumps(self), "utf-8")

    def to_json(self, path: str | Path) -> None:
        """Write what differs from the defaults as JSON; `from_json` gives an equal recipe."""
        Path(path).write_text(json.dumps(to_dict(self), indent=2) + "\n", "utf-8")


def from_dict(data: Mapping[str, Any]) -> Recipe:
    """Read a recipe from plain data, as a run file holds it: sections at the top, or inside `config`, and `actions`.

    `elm` and `elarge_model` are other names of `config`. RecipeError lists every unknown key and misfit.
    """
    data = dict(data)
    inside = [name for name in WRAPPERS if name in data]
    actions = data.pop("actions", None)
    if inside:
        others = sorted(map(str, data.keys() - {inside[0]}))
        parse.fail([f"{name}: unknown beside {inside[0]!r}, which holds the sections" for name in others])
        sections = data[inside[0]] or {}
        if not isinstance(sections, Mapping):
            raise parse.RecipeError(f"{inside[0]}: found {parse.shown(sections)}, expected a mapping of sections")
        data = dict(sections)
        actions = data.pop("actions", actions)
    faults: list[str] = []
    recipe = parse.section(Recipe, data, "", faults)
    if not isinstance(actions, list | tuple | None):
        wanted = "a list of names, each with a mapping where it has settings"
        faults.append(f"actions: found {parse.shown(actions)}, expected {wanted}")
    listed = actions if isinstance(actions, list | tuple) else ()
    found = tuple(_action(a, f"actions[{i}]", faults) for i, a in enumerate(listed))
    parse.fail(faults)
    return dataclasses.replace(recipe, actions=found)


def _merged(old: Any, new: Mapping[str, Any]) -> dict[str, Any]:
    inside = lambda k, v: _merged(old.get(k) or {}, v) if isinstance(v, Mapping) and k != "actions" else parse.plain(v)
    return {**old, **{k: inside(k, v) for k, v in new.items()}}


def _action(found: Any, path: str, faults: list[str]) -> Action:
    name, settings = found, None
    if isinstance(found, Mapping) and len(found) == 1:
        name, settings = next(iter(found.items()))
    name = ALIASES.get(str(name), str(name))
    if name not in ACTIONS:
        faults.append(f"{path}: {parse.shown(name)} is no action; {names.hint('actions', name, [*ACTIONS, *ALIASES])}")
        return Action(name)
    kind = ACTIONS[name]
    if kind is FileAction and isinstance(settings, str):
        settings = {"path": settings}
    if not isinstance(settings or {}, Mapping) or (kind is None and settings):
        takes = "a mapping of its settings" if kind else "nothing"
        faults.append(f"{path}.{name}: found {parse.shown(settings)}, expected {takes}")
        return Action(name)
    return Action(name, parse.section(kind, settings or {}, f"{path}.{name}", faults) if kind else None)


def to_dict(recipe: Recipe, *, defaults: bool = False) -> dict[str, Any]:
    """Write a recipe as plain data: the keys that differ from their defaults, or all of them."""
    actions = [a.name if a.settings is None else {a.name: parse.plain(a.settings)} for a in recipe.actions]
    data = parse.plain(dataclasses.replace(recipe, actions=()), defaults=defaults)
    return {k: v for k, v in data.items() if k != "actions"} | ({"actions": actions} if actions or defaults else {})


def dumps(recipe: Recipe, *, defaults: bool = False) -> str:
    """Write a recipe as YAML text."""
    return files.dump_yaml(to_dict(recipe, defaults=defaults))


def load(path: str | Path) -> Recipe:
    """Read a run file, as JSON if it is named so, else as YAML."""
    return from_json(path) if Path(path).suffix == ".json" else from_yaml(path)


def from_yaml(path: str | Path) -> Recipe:
    """Read a run file in YAML. RecipeError lists its faults; needs the extra `train`."""
    return from_dict(files.from_file(path, json=False))


def from_json(path: str | Path) -> Recipe:
    """Read a run file in JSON. RecipeError lists its faults."""
    return from_dict(files.from_file(path, json=True))


def reference() -> str:
    """Write every key with its meaning, its type and its default, section by section, in lines of 120 characters."""
    kinds = {f"actions[].{name}": kind for name, kind in ACTIONS.items() if kind}
    titles = {path: (settings.__doc__ or "").strip() for path, settings in kinds.items()}
    sections: dict[str, list[str]] = {}
    for where, kind, default, doc in [
        *parse.table(Recipe), *(row for path, settings in kinds.items() for row in parse.table(settings, path)),
    ]:  # fmt: skip
        section, _, name = where.rpartition(".")
        if kind:
            type = kind.removesuffix(" or null") if default == "null" else f"{kind}; {default}"
            entry = textwrap.fill(f"{name:<28} {doc} ({type})", 116, subsequent_indent=" " * 29)
            sections.setdefault(section, []).append(textwrap.indent(entry, "    "))
        else:
            titles |= {where: doc, f"{where}[]": doc}
    shown: dict[str, str] = {}
    for path, lines in sections.items():
        first = shown.setdefault("\n".join(lines), path)
        lines[:] = textwrap.wrap(f"{path}: {titles[path]}", 120) + (lines if first == path else [f"    as {first}"])
    return "\n\n".join("\n".join(lines) for lines in sections.values())
