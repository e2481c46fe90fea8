"""Read and write config.json: each field of a family's Config names its Hugging Face key once, for both directions."""

import dataclasses
import json
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from fdel.ops.rope import Rope

REQUIRED: Any = object()


class ConfigError(ValueError):
    """A config.json field that is missing, or has a value that fdel does not understand."""


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


def _check(key: str, value: Any, hint: Any, choices: tuple) -> Any:
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in kinds:
        return None
    kind = kinds[0]
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    base = typing.get_origin(kind) or kind
    if base is tuple and isinstance(value, list):
        value = tuple(value)
    if not isinstance(value, base) or (isinstance(value, bool) and base is not bool):
        raise ConfigError(f"config field {key!r}: found {value!r}, expected a value of type {base.__name__}")
    if base is int and value < 0:
        raise ConfigError(f"config field {key!r}: found {value}, expected a non-negative integer")
    if choices and value not in choices:
        raise ConfigError(f"config field {key!r}: found {value!r}, understood are {', '.join(map(repr, choices))}")
    return value


def from_hf(cls: type, d: Mapping[str, Any]) -> Any:
    """Build a Config from the dict of a config.json. Missing, ill-typed and unknown values raise ConfigError."""
    values: dict[str, Any] = {}
    hints = typing.get_type_hints(cls)
    for f in dataclasses.fields(cls):
        if "read" in f.metadata:
            values[f.name] = f.metadata["read"](dict(d))
        elif "key" in f.metadata:
            key, default = f.metadata["key"], f.metadata["default"]
            value = d.get(key, default)
            if callable(default) and d.get(key) is None:
                value = default(dict(d))
            if value is REQUIRED:
                raise ConfigError(f"config field {key!r} is missing; {cls.__module__} needs it")
            values[f.name] = _check(key, value, hints[f.name], f.metadata["choices"])
    heads, kv_heads = values.get("heads"), values.get("kv_heads")
    if heads and kv_heads and heads % kv_heads:
        raise ConfigError(f"config field 'num_key_value_heads': found {kv_heads}, which does not divide {heads} heads")
    return cls(**values, source=json.dumps(d))


def to_hf(cfg: Any) -> dict[str, Any]:
    """Write a Config as the dict of a config.json; keys that fdel does not read are kept from the original."""
    out = json.loads(cfg.source)
    for f in dataclasses.fields(cfg):
        value = getattr(cfg, f.name)
        if "write" in f.metadata:
            out |= f.metadata["write"](value)
        elif "key" in f.metadata:
            out[f.metadata["key"]] = list(value) if isinstance(value, tuple) else value
    return out


def refuse(d: Mapping[str, Any], **expected: Any) -> None:
    """Raise ConfigError for a key whose value differs from the only one understood; an absent key passes."""
    for key, value in expected.items():
        if d.get(key, value) != value:
            raise ConfigError(f"config field {key!r}: found {d[key]!r}, only {value!r} is understood")


def head_dim(d: dict) -> int:
    """Head size where config.json leaves it out: hidden_size / num_attention_heads."""
    return d["hidden_size"] // d["num_attention_heads"]


def layer_types(d: Mapping[str, Any], default: list[str], known: tuple[str, ...]) -> tuple[str, ...]:
    """Read the kind of each layer, one per layer and each of `known`; `default` where config.json leaves it out."""
    kinds, n = d.get("layer_types") or default, len(default)
    if len(kinds) != n or any(k not in known for k in kinds):
        raise ConfigError(f"config field 'layer_types': found {kinds!r}, expected {n} values out of {', '.join(known)}")
    return tuple(kinds)


# ---- rope ----------------------------------------------------------------------------------------------------------

ROPE_KEYS = {
    "factor": "factor",
    "original": "original_max_position_embeddings",
    "attention": "attention_factor",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all": "mscale_all_dim",
    "truncate": "truncate",
    "low_freq": "low_freq_factor",
    "high_freq": "high_freq_factor",
    "short": "short_factor",
    "long": "long_factor",
}
ROPE_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor"),
}


def rope(d: Mapping[str, Any], dim: int, *, theta: float = 10000.0, layer_type: str | None = None) -> Rope:
    """Read rotary parameters: `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (older files).

    `dim` is the head size; `partial_rotary_factor` reduces it to the rotated channels. `layer_type` selects one of the
    per-layer-type dicts.
    """
    p = dict(d.get("rope_parameters") or d.get("rope_scaling") or {})
    if layer_type is not None and isinstance(p.get(layer_type), Mapping):
        p = dict(p[layer_type])
    kind = str(p.get("rope_type", p.get("type", "default")))
    kind = {"su": "longrope"}.get(kind, kind)
    if kind not in ROPE_NEEDS:
        raise ConfigError(f"config field 'rope_type': found {kind!r}, understood are {', '.join(ROPE_NEEDS)}")
    missing = [k for k in ROPE_NEEDS[kind] if k not in p]
    longest = d.get("max_position_embeddings", 0)
    original = p.get("original_max_position_embeddings") or d.get("original_max_position_embeddings") or longest
    if kind == "longrope" and "factor" not in p and original:
        p["factor"] = longest / original
    if missing:
        raise ConfigError(f"config field 'rope_parameters' of type {kind!r} lacks {', '.join(missing)}")
    fraction = p.get("partial_rotary_factor", d.get("partial_rotary_factor", 1.0))
    values = {k: p[key] for k, key in ROPE_KEYS.items() if p.get(key) is not None} | {"original": int(original)}
    values |= {k: tuple(map(float, values[k])) for k in ("short", "long") if k in values}
    numbers = {k: float(v) for k, v in values.items() if k not in ("short", "long", "original", "truncate")}
    dim = int(dim * fraction)
    if kind == "longrope" and not len(values["short"]) == len(values["long"]) == dim // 2:
        raise ConfigError(f"config field 'rope_parameters': short_factor and long_factor need {dim // 2} numbers each")
    return Rope(dim, float(p.get("rope_theta", d.get("rope_theta", theta))), kind, **(values | numbers))


def rope_to_hf(r: Rope) -> dict[str, Any]:
    """Write rotary parameters as transformers 5 does (`partial_rotary_factor` is the family's business)."""
    default = Rope(r.dim, r.theta, r.kind)
    changed = {key: getattr(r, k) for k, key in ROPE_KEYS.items() if getattr(r, k) != getattr(default, k)}
    changed = {k: list(v) if isinstance(v, tuple) else v for k, v in changed.items()}
    if r.kind == "default":
        changed = {}
    needed = {key: getattr(r, k) for k, key in ROPE_KEYS.items() if key in ROPE_NEEDS[r.kind] and key not in changed}
    return {"rope_type": r.kind, "rope_theta": r.theta} | needed | changed
