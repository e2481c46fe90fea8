"""Trainer types. A new one is a file here whose METHODS hold it, and the name of that file in FILES."""

import dataclasses
import functools
import importlib
import operator
import typing
from collections.abc import Iterator
from types import NoneType
from typing import Any

from fdel.recipe.methods.method import Lora, Method, Objective

FILES = (
    "sft",
    "preference",
    "reward",
    "classification",
    "question",
    "distill",
    "taught",
    "self_taught",
    "embedding",
    "diffusion",
    "masked",
    "samples",
    "online",
    "ppo",
)
METHODS: dict[str, Method] = {
    m.name: m for file in FILES for m in importlib.import_module(f"{__name__}.{file}").METHODS
}

__all__ = ["METHODS", "Lora", "Method", "Objective", "declared", "read", "types"]


def types(**facts: Any) -> tuple[str, ...]:
    """Name the types whose record has these facts, as `types(teacher=True)`."""
    return tuple(m.name for m in METHODS.values() if all(bool(getattr(m, f)) == v for f, v in facts.items()))


def declared() -> Iterator[tuple[str, Any, dataclasses.Field]]:
    """Yield (name, type, field) of every key that some types read and others do not.

    Its default is theirs, None where theirs differ; then its text says them.
    """
    found: dict[str, list[tuple[str, Any, dataclasses.Field]]] = {}
    for m in METHODS.values():
        hints = typing.get_type_hints(m.keys)
        for f in dataclasses.fields(m.keys):
            found.setdefault(f.name, []).append((m.name, hints[f.name], f))
    for name, readers in found.items():
        same = len({f.default for *_, f in readers}) == 1
        default: Any = readers[0][2].default if same else None
        kinds = [hint for _, hint, _ in readers] + ([] if same else [NoneType])
        meta = dict(readers[0][2].metadata) | {"by": tuple(m for m, *_ in readers), "doc": _doc(readers, same)}
        yield name, functools.reduce(operator.or_, kinds), dataclasses.field(default=default, metadata=meta)


def _doc(readers: list[tuple[str, Any, dataclasses.Field]], same: bool) -> str:
    """Join what a key means to its readers, with their defaults where these are not the same."""
    groups: dict[str, dict[Any, list[str]]] = {}
    for name, _, f in readers:
        groups.setdefault(f.metadata["doc"], {}).setdefault(f.default, []).append(name)
    texts = []
    for doc, by in groups.items():
        known = [(d, f" ({', '.join(names)})" if len(by) > 1 else "") for d, names in by.items() if d is not None]
        text = doc if same or not known else f"{doc}, default: {', '.join(f'{d}{who}' for d, who in known)}"
        texts.append(text if len(groups) == 1 else f"{', '.join(sum(by.values(), []))}: {text}")
    return "; ".join(texts)


def read(trainer: Any) -> tuple[Method, Any]:
    """Give the method of a section `trainer` and the keys that it reads, with its defaults; ValueError if there is none."""
    if trainer.trainer_type not in METHODS:
        raise ValueError(f"trainer_type {trainer.trainer_type} is not in this version")
    method, given = METHODS[trainer.trainer_type], {}
    for f in dataclasses.fields(method.keys):
        value = getattr(trainer, f.name)
        if isinstance(value, tuple) and not _several(method, f.name):
            if len(value) != 1:
                types = ", ".join(m.name for m in METHODS.values() if _several(m, f.name))
                raise ValueError(f"{f.name}={[*value]}; only trainer_type {types} has several at once")
            (value,) = value
        if value is not None:
            given[f.name] = value
    return method, method.keys(**given)


def _several(method: Method, name: str) -> bool:
    """Whether a key of a method takes a list."""
    hint = typing.get_type_hints(method.keys).get(name)
    return any(typing.get_origin(kind) is tuple for kind in (*typing.get_args(hint), hint))
