"""Read nested frozen dataclasses from plain data and write them back; every fault is told at once, with its path."""

import dataclasses
import json
import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fdel.recipe import names

MISFIT: Any = object()
LONGEST = 120  # characters of a value in a message
METHODS = ("trainer_type", "quantization_method")  # another method is never a misspelling of one
NAMES = {
    str: "text", int: "a whole number", float: "a number", bool: "true or false", type(None): "null", Any: "a value",
}  # fmt: skip


def key(
    default: Any, doc: str, *, choices: Sequence = (), honours: Sequence = (), refuse: str = "", by: Sequence[str] = (),
    needs: str = "", of: Sequence[str] = (), **more: Any,
) -> Any:  # fmt: skip
    """Declare a key of a run file.

    `choices` are the values that exist. With `refuse`, the reason, only the default and the values in `honours` can be
    honoured. `by` names the trainer types that read the key; none: all. `needs` is another key of the section without
    which nothing reads this one: it has to be set, or to be one `of` some values. A number is at least `least`, at most
    `most`, and more than 0 if `positive`.
    """
    meta = {"doc": doc, "choices": tuple(choices), "honours": tuple(honours), "refuse": refuse, "by": tuple(by)}
    return dataclasses.field(default=default, metadata=meta | {"needs": needs, "of": tuple(of)} | more)


class RecipeError(ValueError):
    """A run file that says something unknown, ill-typed or impossible, with a line for each of its `faults`."""

    def __init__(self, *faults: str, title: str = "") -> None:
        super().__init__("\n".join([title, *(f"  {f}" for f in faults)]) if title else "\n".join(faults))
        self.faults = faults


def fail(faults: Sequence[str]) -> None:
    """Raise a RecipeError if there are faults."""
    if faults:
        raise RecipeError(*faults, title="the recipe has faults:")


def section(cls: type, data: Mapping[str, Any], path: str, faults: list[str]) -> Any:
    """Read a dataclass from a mapping; faults are added to the list, and their keys keep their defaults."""
    hints, fields = typing.get_type_hints(cls), {f.name: f for f in dataclasses.fields(cls)}
    values = {}
    for name, value in data.items():
        where = f"{path}.{name}" if path else str(name)
        ours = names.synonym(path, str(name))
        if ours is not None and (ours in data or ours in values):
            faults.append(f"{where}: is {ours}, which is given too; remove one")
        elif ours is None and name not in fields:
            faults.append(f"{where}: unknown key; {names.hint(path, str(name), fields)}")
        else:
            values[ours or name] = _value(fields[ours or name], hints[ours or name], value, where, faults)
    return cls(**{name: value for name, value in values.items() if value is not MISFIT})


def _value(field: dataclasses.Field, hint: Any, value: Any, where: str, faults: list[str]) -> Any:
    found, m = item(hint, value, where, faults), field.metadata
    if m["choices"] and found not in (None, MISFIT, *m["choices"]):
        known = [str(c) for c in m["choices"] if not m["refuse"] or c in m["honours"]]
        near = names.hint(where, str(found), known, guess=field.name not in METHODS)
        faults.append(f"{where}: found {shown(found)}; {near}")
        return MISFIT
    return found


def convert(hint: Any, value: Any, path: str, faults: list[str]) -> Any:
    """Convert plain data to a type, MISFIT if it is none of it; faults inside sections and lists go to the list."""
    if isinstance(hint, types.UnionType):
        if value is None and type(None) in typing.get_args(hint):
            return None
        found = (convert(kind, value, path, faults) for kind in typing.get_args(hint))
        return next((x for x in found if x is not MISFIT), MISFIT)
    origin, args = typing.get_origin(hint) or hint, typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        value = {} if value is None else value
        return section(hint, value, path, faults) if isinstance(value, Mapping) else MISFIT  # type: ignore[arg-type]
    if origin is tuple:
        items = isinstance(value, list | tuple)
        return tuple(item(args[0], v, f"{path}[{i}]", faults) for i, v in enumerate(value)) if items else MISFIT
    if origin is Mapping:
        if not isinstance(value, Mapping):
            return MISFIT
        read = {str(k): item(args[1], v, f"{path}.{k}", faults) for k, v in value.items()}
        return types.MappingProxyType(read)  # frozen, as the rest
    if hint is float:
        return number(value)
    if hint is Any:
        return frozen(value)
    return value if isinstance(value, hint) and (hint is bool or not isinstance(value, bool)) else MISFIT


def item(hint: Any, value: Any, path: str, faults: list[str]) -> Any:
    """Convert what stands at a path; a misfit is a fault."""
    found = convert(hint, value, path, faults)
    if found is MISFIT:
        faults.append(f"{path}: found {shown(value)}, expected {expected(hint)}")
    return found


def number(value: Any) -> Any:
    """Read a finite float; YAML takes 2e-5, without a point, for text."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return MISFIT
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return MISFIT
    return found if math.isfinite(found) else MISFIT


def frozen(value: Any, depth: int = 16) -> Any:
    """Copy plain data of bounded depth, mappings read-only; MISFIT for what JSON could not write."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else MISFIT
    if not isinstance(value, list | tuple | Mapping) or not depth:
        return MISFIT
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    inner = {str(k): frozen(v, depth - 1) for k, v in items}
    if any(v is MISFIT for v in inner.values()):
        return MISFIT
    return types.MappingProxyType(inner) if isinstance(value, Mapping) else tuple(inner.values())


def shown(value: Any) -> str:
    """Write a value that was found, cut where it is long."""
    text = repr(plain(value))
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}... ({type(value).__name__})"


def expected(hint: Any) -> str:
    """Describe a type in words."""
    if isinstance(hint, types.UnionType):
        return " or ".join(expected(kind) for kind in typing.get_args(hint))
    if dataclasses.is_dataclass(hint):
        return "a mapping"
    origin, args = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin is tuple:
        return f"a list of {expected(args[0])}"
    return "a mapping" if origin is Mapping else NAMES.get(hint, str(hint))


def plain(value: Any, *, defaults: bool = False) -> Any:
    """Write a value as plain data; of sections only the keys that differ from their defaults, or all with `defaults`."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        shown = [f for f in dataclasses.fields(value) if defaults or getattr(value, f.name) != f.default]
        return {f.name: plain(getattr(value, f.name), defaults=defaults) for f in shown}
    if isinstance(value, Mapping):
        return {k: plain(v, defaults=defaults) for k, v in value.items()}
    return [plain(v, defaults=defaults) for v in value] if isinstance(value, list | tuple) else value


def walk(value: Any, path: str = "") -> Iterator[tuple[str, dataclasses.Field, Any]]:
    """Yield (dotted path, field, section) of every key of a dataclass and of those inside of it."""
    if isinstance(value, tuple):
        for i, x in enumerate(value):
            yield from walk(x, f"{path}[{i}]")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for f in dataclasses.fields(value):
            where = f"{path}.{f.name}" if path else f.name
            yield where, f, value
            yield from walk(getattr(value, f.name), where)


def table(cls: type, path: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Yield (dotted path, type, default, meaning) of every key that a dataclass declares."""
    hints = typing.get_type_hints(cls)
    for f in dataclasses.fields(cls):
        if "doc" not in f.metadata:
            continue
        where = f"{path}.{f.name}" if path else f.name
        kinds = typing.get_args(hints[f.name]) or (hints[f.name],)
        inner = next((k for k in kinds if dataclasses.is_dataclass(k)), None)
        m = f.metadata
        only = f" [{', '.join(m['by'])}]" if m.get("by") else ""
        refused = f" ({m['refuse']})" if m.get("refuse") else ""
        default = "" if inner else json.dumps(plain(f.default), ensure_ascii=False)
        yield where, "" if inner else expected(hints[f.name]), default, m["doc"] + only + refused
        if inner:
            yield from table(inner, where + ("[]" if typing.get_origin(hints[f.name]) is tuple else ""))  # type: ignore[arg-type]
