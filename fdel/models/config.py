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

from fdel.models import keys as K
from fdel.models.keys import ANY, ConfigError, Keys, show
from fdel.models.rope import rope, rope_to_hf
from fdel.ops import ACTIVATIONS
from fdel.ops.rope import Rope

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


def act(key: str = "hidden_act", default: str = "silu") -> Any:
    """Declare the field `act`: one of `ops.ACTIVATIONS`."""
    return hf(key, default, choices=tuple(ACTIVATIONS))


def head_dim(d: dict) -> int:
    """Head size where config.json leaves it out: hidden_size / num_attention_heads."""
    return d["hidden_size"] // d["num_attention_heads"]


def given_head_dim(d: dict) -> int:
    """Head size: head_dim, or `head_dim(d)`."""
    return d.get("head_dim") or head_dim(d)


Default = float | Callable[[dict], float]


def rotary(dim: Callable[[dict], int] = given_head_dim, theta: Default = 10000.0, partial: Default = 1.0) -> Any:
    """Declare the field `rope` of heads of dim(config dict) channels.

    theta and partial: what files without them mean, a number or a function of the config dict.
    """

    def read(d: dict) -> Rope:
        base, share = (x(d) if callable(x) else x for x in (theta, partial))
        return rope(d | {"partial_rotary_factor": d.get("partial_rotary_factor", share)}, dim(d), theta=base)

    written = lambda r: {} if partial == 1 else {"partial_rotary_factor": r.partial}
    return computed(read, lambda r: {"rope_parameters": rope_to_hf(r) | written(r)})


@typing.dataclass_transform(frozen_default=True, kw_only_default=True)
def config(cls: type) -> Any:
    """Make a family's Config of a class with fields: frozen, with `from_hf` and `to_hf` unless it has them.

    Its field `source` keeps the text of the original config.json, so that saving loses none of its other keys. The class
    may have DEFAULTS, what transformers assumes for what a file leaves out, over the defaults of inherited fields: by the
    field's name, or by the key where a function reads it; ONLY, keys of which it understands one value: that, or what a
    function of the Config gives, or `ANY`; and NESTED, the keys of objects whose own keys are read and written as
    "object.key".
    """
    cls.__annotations__["source"] = str
    cls.source = dataclasses.field(default="{}", compare=False, repr=False)  # type: ignore[attr-defined]
    inherited = dataclasses.fields(cls.__base__) if dataclasses.is_dataclass(cls.__base__) else ()
    keys = {f.name: f.metadata.get("key", f.name) for f in inherited}
    keys |= {name: f.metadata["key"] for name, f in vars(cls).items() if "key" in getattr(f, "metadata", ())}
    defaults = {keys.get(name, name): value for name, value in getattr(cls, "DEFAULTS", {}).items()}
    cls.DEFAULTS = defaults  # type: ignore[attr-defined]
    for f in inherited:
        if f.name not in cls.__annotations__ and f.metadata.get("key") in defaults:
            cls.__annotations__[f.name] = f.type
            setattr(cls, f.name, dataclasses.field(default=defaults[f.metadata["key"]], metadata=f.metadata))
    for name, method in (("from_hf", classmethod(from_hf)), ("to_hf", to_hf)):
        if not hasattr(cls, name):
            setattr(cls, name, method)
    return dataclasses.dataclass(frozen=True, kw_only=True)(cls)


def _check(name: str, key: str, value: Any, hint: Any, choices: tuple) -> Any:
    """Give the value in the type of its field `name`; a ConfigError says what is wrong with it."""
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in kinds:
        return None
    kind, found = kinds[0], f"config field {key!r}: found {show(value)}"
    if kind is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) <= K.LARGEST:
        value = float(value)
    base = typing.get_origin(kind) or kind
    if base is tuple and isinstance(value, list):
        value = tuple(value)
    if not isinstance(value, base) or (isinstance(value, bool) and base is not bool):
        raise ConfigError(f"{found}, expected a value of type {base.__name__}")
    if base is float and not math.isfinite(value):
        raise ConfigError(f"{found}, expected a finite number")
    most = K.MOST.get(name, K.LARGEST)
    if base is int and not (1 if name in K.POSITIVE else 0) <= value <= most:
        wanted = "positive" if name in K.POSITIVE else "non-negative"
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


def from_hf(cls: type, d: Mapping[str, Any]) -> Any:
    """Build a Config from the dict of a config.json; of its `text_config` if there is one that no field `text` reads.

    ConfigError for what is missing, of a wrong type or beyond the bounds, and for keys that nothing here knows.
    """
    if not isinstance(d, Mapping) or not all(isinstance(key, str) for key in d):
        raise ConfigError(f"config.json: found {show(d)}, expected an object")
    if d.get("text_config") is not None and "text" not in cls.__dataclass_fields__:  # type: ignore[attr-defined]
        flat = text_part(d, cls.__module__)
        try:
            return cls.from_hf(flat)  # type: ignore[attr-defined]
        except ConfigError as e:
            raise ConfigError(f"text_config: {e}") from e
    only, inner = getattr(cls, "ONLY", {}), {key: K.mapping(key, d.get(key)) for key in getattr(cls, "NESTED", ())}
    given = {k: v for k, v in d.items() if k not in inner}
    given |= {f"{key}.{k}": v for key, part in inner.items() for k, v in part.items()}
    keys, values = Keys(getattr(cls, "DEFAULTS", {}) | given), dict[str, Any]()
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
        if value is not ANY and keys.get(key, want) not in (want, None):
            raise ConfigError(f"config field {key!r}: found {show(keys[key])}, only {want!r} is understood")
    _known({k: v for k, v in given.items() if k not in keys.read | set(only)}, keys.read, cls.__module__)
    return cfg


def _fit(values: Mapping[str, Any]) -> None:
    """Refuse sizes that do not fit each other."""
    size = lambda name: values.get(name) or 0
    apart = () if "experts" in values else (("groups", "heads"),)  # of a router, or of heads
    for part, whole in (*K.DIVIDES, *apart):
        if size(part) and size(whole) % size(part):
            found = f"found {part} = {size(part)}, which does not divide {whole} = {size(whole)}"
            raise ConfigError(f"config fields: {found}")
    if size("experts") and not 1 <= size("top_k") <= size("experts"):
        raise ConfigError(f"config field 'num_experts_per_tok': found {size('top_k')} of {size('experts')} experts")
    each, groups = size("experts") // (size("groups") or 1), size("topk_groups")
    if groups and "method" not in values and not (each > 1 and size("top_k") <= groups * each <= size("experts")):
        found = f"found {size('top_k')} of {size('experts')} experts in {groups} of {size('groups')} groups"
        raise ConfigError(f"config fields 'num_experts_per_tok', 'topk_group', 'n_group': {found}, which lack experts")


def _known(rest: Mapping[str, Any], read: set[str], where: str, also: frozenset[str] = frozenset()) -> None:
    """Refuse keys that nothing reads, unless they are known not to change a forward pass."""
    wrong = []
    also |= {"sliding_window"} if rest.get("use_sliding_window") is False else set()
    for key, value in rest.items():
        if key.rpartition(".")[2] in K.NEUTRAL or key in also or K.is_dropout(key) or K.is_neutral(key, value):
            continue
        near = difflib.get_close_matches(key, read, 1)
        wrong.append(f"{key!r}: found {show(value)}" + (f" (did you mean {near[0]!r}?)" if near else ""))
    if wrong:
        more = f" and {len(wrong) - 10} more" if len(wrong) > 10 else ""
        fix = "remove what does not change what the model computes; else the model needs a family that reads it"
        raise ConfigError(f"config field {', '.join(wrong[:10])}{more}, which {where} does not read; {fix}")


def text_part(d: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Give the config of the language model inside one of several modalities, with what stands around it for all parts."""
    inner = K.mapping("text_config", d["text_config"])
    _known({k: v for k, v in d.items() if k not in K.SWITCHES}, set(inner), where, K.OUTER)
    around = {k: v for k, v in d.items() if k in K.TEXT and v is not None}
    return {k: v for k, v in inner.items() if k != "architectures"} | around


def to_hf(cfg: Any) -> dict[str, Any]:
    """Write a Config as the dict of a config.json; keys that fdel does not read are kept from the original.

    All but `quantization_config`: what is saved has the dtype of its arrays.
    """
    out = json.loads(cfg.source)
    out.pop("quantization_config", None)
    for f in dataclasses.fields(cfg):
        value = getattr(cfg, f.name)
        written = f.metadata["write"](value) if "write" in f.metadata else {f.metadata.get("key"): value}
        for key, value in written.items():
            outer, dot, inner = (key or "").rpartition(".")
            part = out.setdefault(outer, {}) if dot else out
            if key is not None:
                part[inner] = list(value) if isinstance(value, tuple) else value
    return out


def layer_types(
    d: Mapping[str, Any], default: list[str], known: tuple[str, ...], key: str = "layer_types"
) -> tuple[str, ...]:
    """Read the kind of each layer, one per layer and each of `known`; `default` where config.json leaves it out."""
    kinds, n = d.get(key) or default, len(default)
    if not isinstance(kinds, list) or len(kinds) != n or any(k not in known for k in kinds):
        found = f"found {show(kinds)}, expected {n} values out of {', '.join(known)}"
        raise ConfigError(f"config field {key!r}: {found}")
    return tuple(kinds)


FULL, SLIDING = "full_attention", "sliding_attention"


def pattern(every: int, key: str = "sliding_window_pattern") -> Any:
    """Declare `kinds`, FULL or SLIDING attention of each layer: layer_types, or every n-th full, n = `key` or `every`."""

    def read(d: dict) -> tuple[str, ...]:
        n = d.get(key) or every
        return layer_types(
            d, [SLIDING if (i + 1) % n else FULL for i in range(d["num_hidden_layers"])], (FULL, SLIDING)
        )

    return computed(read, lambda kinds: {"layer_types": list(kinds)})


def ropes(read: Callable[[dict], tuple[Rope, Rope]]) -> Any:
    """Declare `rope` where layers that attend in a window have parameters of their own: those, and those of the others."""
    written = lambda pair: dict(zip((SLIDING, FULL), map(rope_to_hf, pair), strict=True))
    return computed(read, lambda pair: {"rope_parameters": written(pair)})


class MultiHead:
    """Sizes of heads that divide the hidden size, each with keys and values of its own."""

    head_dim = property(lambda self: self.embed // self.heads)
    kv_heads = property(lambda self: self.heads)


@config
class Decoder:
    """The fields that nearly every decoder has. Its DEFAULTS say what transformers assumes for absent keys."""

    DEFAULTS: typing.ClassVar[Mapping[str, Any]] = {}
    ONLY: typing.ClassVar[Mapping[str, Any]] = {}
    attn_bias = mlp_bias = False  # what llama.py reads, and the files of some families say
    o_bias = window = None
    kinds = tuple[Any, ...]()
    fused = False  # whether the file has all experts of a layer in one tensor, see `builders.moe`
    vocab: int = hf("vocab_size")
    embed: int = hf("hidden_size")
    ffn: int = hf("intermediate_size")
    layers: int = hf("num_hidden_layers")
    heads: int = hf("num_attention_heads")
    kv_heads: int = hf("num_key_value_heads", lambda d: d["num_attention_heads"])
    head_dim: int = hf("head_dim", head_dim)
    norm_eps: float = hf("rms_norm_eps", 1e-6)
    act: str = act()
    max_positions: int = hf("max_position_embeddings", 2048)
    tied: bool = hf("tie_word_embeddings", False)
    rope: Rope = rotary()
