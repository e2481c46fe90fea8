"""Read and write config.json: each field of a family's Config names its Hugging Face key once, for both directions.

Every key of a file is read by the family, or known not to change what a forward pass computes (by its name, or because its
value says "no"), or an error. Sizes are bounded, so that a file cannot ask for a spec without end.
"""

import dataclasses
import difflib
import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from fdel.models.keys import (
    ANY,
    DIVIDES,
    LARGEST,
    MOST,
    NEUTRAL,
    OUTER,
    POSITIVE,
    SWITCHES,
    TEXT,
    ConfigError,
    Keys,
    is_dropout,
    is_neutral,
    mapping,
    show,
)  # fmt: skip
from fdel.models.rope import rope, rope_to_hf

__all__ = [
    "ANY", "ConfigError", "computed", "from_hf", "head_dim", "hf", "layer_types", "rope", "rope_to_hf", "source",
    "text_part", "to_hf",
]  # fmt: skip

REQUIRED: Any = object()


def hf(key: str, default: Any = REQUIRED, *, choices: tuple = ()) -> Any:
    """Declare a Config field that stands in config.json under `key`.

    `default` is what transformers assumes when the key is absent: a value, or a function of the config dict. `choices`
    lists the values that are understood; any other is a ConfigError.
    """
    meta = {"key": key, "default": default, "choices": choices}
    if default is REQUIRED or callable(default):
        return dataclasses.field(metadata=meta)
    return dataclasses.field(default=default, metadata=meta)


def computed(read: Callable[[dict], Any], write: Callable[[Any], dict], **kwargs: Any) -> Any:
    """Declare a Config field that is computed from the config dict; `write(value)` gives the keys to save."""
    return dataclasses.field(metadata={"read": read, "write": write}, **kwargs)


def source() -> Any:
    """Declare the field that keeps the original config.json text, so that saving loses none of its other keys."""
    return dataclasses.field(default="{}", compare=False, repr=False)


def _check(name: str, key: str, value: Any, hint: Any, choices: tuple) -> Any:
    """Give the value in the type of its field `name`; a ConfigError says what is wrong with it."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in kinds:
        return None
    kind, found = kinds[0], f"config field {key!r}: found {show(value)}"
    if kind is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST:
        value = float(value)
    base = typing.get_origin(kind) or kind
    if base is tuple and isinstance(value, list):
        value = tuple(value)
    if not isinstance(value, base) or (isinstance(value, bool) and base is not bool):
        raise ConfigError(f"{found}, expected a value of type {base.__name__}")
    if base is float and not math.isfinite(value):
        raise ConfigError(f"{found}, expected a finite number")
    most = MOST.get(name, LARGEST)
    if base is int and not (1 if name in POSITIVE else 0) <= value <= most:
        wanted = "positive" if name in POSITIVE else "non-negative"
        raise ConfigError(f"{found}, expected a {wanted} integer of at most {most}")
    if choices and value not in choices:
        raise ConfigError(f"{found}, understood are {', '.join(map(repr, choices))}")
    return value


def _read(field: dataclasses.Field, d: Keys, hint: Any, where: str) -> Any:
    """Read one field; what goes wrong inside a family's reader becomes a ConfigError that shows what it has read."""
    key, default = field.metadata.get("key"), field.metadata.get("default")
    mine = Keys(d)
    try:
        if key is None:
            return field.metadata["read"](mine)
        value = mine.get(key, default)
        if callable(default) and mine.get(key) is None:
            value = default(mine)
    except ConfigError:
        raise
    except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError, RecursionError) as e:
        found = ", ".join(f"{k!r}: found {show(d[k])}" for k in sorted(mine.read) if k in d)
        raise ConfigError(f"config fields {found}: not understood together ({type(e).__name__}: {e})") from e
    finally:
        d.read |= mine.read
    if value is REQUIRED:
        raise ConfigError(f"config field {key!r} is missing; {where} needs it")
    return _check(field.name, key, value, hint, field.metadata["choices"])


def from_hf(cls: type, d: Mapping[str, Any], **only: Any) -> Any:
    """Build a Config from the dict of a config.json, or of its `text_config` where the file is of several modalities.

    `only` names keys of which a family understands one value: that, or what a function of the Config gives, or `ANY`.
    ConfigError for what is missing, of a wrong type or beyond the bounds, and for keys that nothing here knows.
    """
    if not isinstance(d, Mapping) or not all(isinstance(key, str) for key in d):
        raise ConfigError(f"config.json: found {show(d)}, expected an object")
    if d.get("text_config") is not None:
        flat = text_part(d, cls.__module__)
        try:
            return from_hf(cls, flat, **only)
        except ConfigError as e:
            raise ConfigError(f"text_config: {e}") from e
    keys, values = Keys(d), dict[str, Any]()
    hints = typing.get_type_hints(cls)
    fields = [f for f in dataclasses.fields(cls) if "key" in f.metadata or "read" in f.metadata]
    for f in sorted(fields, key=lambda f: "read" in f.metadata):  # readers find the plain values checked
        values[f.name] = _read(f, keys, hints[f.name], cls.__module__)
        if "key" in f.metadata:  # with its default, if it was absent
            dict.__setitem__(keys, f.metadata["key"], values[f.name])
    _fit(values)
    cfg = cls(**values, source=json.dumps(d))
    for key, value in only.items():
        want = value(cfg) if callable(value) else value
        if value is not ANY and d.get(key, want) not in (want, None):
            raise ConfigError(f"config field {key!r}: found {show(d[key])}, only {want!r} is understood")
    _known({k: v for k, v in d.items() if k not in keys.read | set(only)}, keys.read, cls.__module__)
    return cfg


def _fit(values: Mapping[str, Any]) -> None:
    """Refuse sizes that do not fit each other."""
    size = lambda name: values.get(name) or 0
    apart = () if "experts" in values else (("groups", "heads"),)  # of a router, or of heads
    for part, whole in (*DIVIDES, *apart):
        if size(part) and size(whole) % size(part):
            raise ConfigError(
                f"config fields: found {part} = {size(part)}, which does not divide {whole} = {size(whole)}"
            )
    if size("experts") and not 1 <= size("top_k") <= size("experts"):
        raise ConfigError(f"config field 'num_experts_per_tok': found {size('top_k')} of {size('experts')} experts")


def _known(rest: Mapping[str, Any], read: set[str], where: str, also: frozenset[str] = frozenset()) -> None:
    """Refuse keys that nothing reads, unless they are known not to change a forward pass."""
    wrong = []
    also |= {"sliding_window"} if rest.get("use_sliding_window") is False else set()
    for key, value in rest.items():
        if key in NEUTRAL or key in also or is_dropout(key) or is_neutral(key, value):
            continue
        near = difflib.get_close_matches(key, read, 1)
        wrong.append(f"{key!r}: found {show(value)}" + (f" (did you mean {near[0]!r}?)" if near else ""))
    if wrong:
        more = f" and {len(wrong) - 10} more" if len(wrong) > 10 else ""
        fix = "remove what does not change what the model computes; else the model needs a family that reads it"
        raise ConfigError(f"config field {', '.join(wrong[:10])}{more}, which {where} does not read; {fix}")


def text_part(d: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Give the config of the language model inside one of several modalities, with what stands around it for all parts."""
    inner = mapping("text_config", d["text_config"])
    _known({k: v for k, v in d.items() if k not in SWITCHES}, set(), where, OUTER)
    around = {k: v for k, v in d.items() if k in TEXT and v is not None}
    return {k: v for k, v in inner.items() if k != "architectures"} | around


def to_hf(cfg: Any) -> dict[str, Any]:
    """Write a Config as the dict of a config.json; keys that fdel does not read are kept from the original.

    All but `quantization_config`: what is saved has the dtype of its arrays.
    """
    out = json.loads(cfg.source)
    out.pop("quantization_config", None)
    for f in dataclasses.fields(cfg):
        value = getattr(cfg, f.name)
        if "write" in f.metadata:
            out |= f.metadata["write"](value)
        elif "key" in f.metadata:
            out[f.metadata["key"]] = list(value) if isinstance(value, tuple) else value
    return out


def head_dim(d: dict) -> int:
    """Head size where config.json leaves it out: hidden_size / num_attention_heads."""
    return d["hidden_size"] // d["num_attention_heads"]


def layer_types(d: Mapping[str, Any], default: list[str], known: tuple[str, ...]) -> tuple[str, ...]:
    """Read the kind of each layer, one per layer and each of `known`; `default` where config.json leaves it out."""
    kinds, n = d.get("layer_types") or default, len(default)
    if not isinstance(kinds, list) or len(kinds) != n or any(k not in known for k in kinds):
        found = f"found {show(kinds)}, expected {n} values out of {', '.join(known)}"
        raise ConfigError(f"config field 'layer_types': {found}")
    return tuple(kinds)
