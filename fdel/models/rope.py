"""Rotary parameters of a config.json, in the spellings of transformers 4 and 5."""

from collections.abc import Mapping
from typing import Any

from fdel.models.keys import ConfigError, mapping, show
from fdel.ops.rope import Rope, components

ROPE_KEYS = {name: name for name in ("factor", "beta_fast", "beta_slow", "mscale", "truncate")} | {
    "original": "original_max_position_embeddings", "attention": "attention_factor", "mscale_all": "mscale_all_dim",
    "low_freq": "low_freq_factor", "high_freq": "high_freq_factor", "short": "short_factor", "long": "long_factor",
    "short_mscale": "short_mscale", "long_mscale": "long_mscale", "partial": "partial_rotary_factor",
}  # fmt: skip
ROPE_KNOWN = {*ROPE_KEYS.values(), "rope_type", "type", "rope_theta", "finetuned"}
ROPE_KNOWN |= {"mrope_section", "mrope_interleaved"}  # of three components of positions: in text they are equal
ROPE_NEEDS = {
    "default": (),
    "proportional": (),
    **dict.fromkeys(("linear", "dynamic", "yarn"), ("factor",)),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor"),
}


def rope(
    d: Mapping[str, Any], dim: int, *, theta: float = 10000.0, layer_type: str | None = None, also: tuple[str, ...] = ()
) -> Rope:
    """Read rotary parameters: `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (older files).

    `dim` is the head size; `partial_rotary_factor` reduces it to the rotated channels. `layer_type` selects one of the
    per-layer-type dicts. `also` names further keys of the dict, which the family reads by itself.
    """
    old, new = d.get("rope_scaling"), d.get("rope_parameters")
    p = dict(mapping("rope_parameters", new or old))
    if layer_type is not None and layer_type in p:
        p = dict(mapping(f"rope_parameters.{layer_type}", p[layer_type]))
    kind = str(p.get("rope_type", p.get("type", "default")))
    kind = {"su": "longrope", "mrope": "default"}.get(kind, kind)
    if kind not in ROPE_NEEDS:
        raise ConfigError(f"config field 'rope_type': found {show(kind)}, understood are {', '.join(ROPE_NEEDS)}")
    unknown = [k for k, v in p.items() if k not in ROPE_KNOWN.union(also) and v is not None]
    if unknown:
        found = f"found {show(p[unknown[0]])}, understood are {', '.join(sorted(ROPE_KNOWN))}"
        raise ConfigError(f"config field 'rope_parameters.{unknown[0]}': {found}")
    missing = [k for k in ROPE_NEEDS[kind] if p.get(k) is None]
    longest = d.get("max_position_embeddings", 0)
    outer = d.get("original_max_position_embeddings")
    original = _number(p, "original_max_position_embeddings", 0) or outer or longest
    if kind == "longrope" and p.get("factor") is None and original:
        p["factor"] = longest / original
    if missing:
        raise ConfigError(f"config field 'rope_parameters' of type {kind!r} lacks {', '.join(missing)}")
    fraction = p.get("partial_rotary_factor", d.get("partial_rotary_factor", 1.0))
    values = {k: p[key] for k, key in ROPE_KEYS.items() if p.get(key) is not None} | {"original": int(original)}
    values["partial"] = fraction
    values |= {k: tuple(map(float, values[k])) for k in ("short", "long") if k in values}
    others = ("short", "long", "original", "truncate")
    numbers = {k: _number(p, ROPE_KEYS[k], v) for k, v in values.items() if k not in others}
    base = _number(p, "rope_theta", d.get("rope_theta", theta))
    fraction = 1.0 if kind == "proportional" else fraction  # which is of the pairs that turn
    odd = int(dim * fraction) % 2 and (
        fraction == 1 or kind != "default"
    )  # 21 of 42 channels turn as 22, as transformers'
    if not 0 < numbers["partial"] <= 1 or base == 0 or odd:
        wanted = "a positive theta and an even number of channels"
        found = f"found theta {base}, {show(fraction)} of {dim} channels"
        raise ConfigError(f"config field 'rope_parameters': {found}; expected {wanted}")
    dim = int(dim * fraction)
    if kind == "longrope" and not len(values["short"]) == len(values["long"]) == dim // 2:
        raise ConfigError(f"config field 'rope_parameters': short_factor and long_factor need {dim // 2} numbers each")
    return Rope(dim, base, kind, **(values | numbers), **_sections(p, dim // 2))


def _sections(p: Mapping[str, Any], pairs: int) -> dict[str, Any]:
    """Read how many pairs turn by each component of a position; none where the parameters do not say it."""
    sections, interleaved = p.get("mrope_section"), p.get("mrope_interleaved") or False
    if sections is None:
        return {}
    if not isinstance(sections, list | tuple) or not all(type(n) is int and 0 <= n <= pairs for n in sections):
        found = f"found {show(sections)}, expected three numbers of pairs, {pairs} together"
        raise ConfigError(f"config field 'rope_parameters.mrope_section': {found}")
    if not isinstance(interleaved, bool):
        found = f"found {show(interleaved)}, expected true or false"
        raise ConfigError(f"config field 'rope_parameters.mrope_interleaved': {found}")
    try:
        components(Rope(2 * pairs, 1.0, sections=tuple(sections), interleaved=interleaved))
    except ValueError as e:
        raise ConfigError(f"config field 'rope_parameters.mrope_section': {e}") from e
    return {"sections": tuple(sections), "interleaved": interleaved}


def _number(p: Mapping[str, Any], key: str, default: Any) -> float:
    """Read a finite number that is not negative, out of rotary parameters."""
    value = default if p.get(key) is None else p[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1e30:
        raise ConfigError(f"config field 'rope_parameters.{key}': found {show(value)}, expected a number from 0 on")
    return float(value)


def rope_to_hf(r: Rope) -> dict[str, Any]:
    """Write rotary parameters as transformers 5 does."""
    default = Rope(r.dim, r.theta, r.kind)
    changed = {key: getattr(r, k) for k, key in ROPE_KEYS.items() if getattr(r, k) != getattr(default, k)}
    changed = {k: list(v) if isinstance(v, tuple) else v for k, v in changed.items()}
    if r.kind == "default":
        changed = {k: v for k, v in changed.items() if k == "partial_rotary_factor"}
    needed = {key: getattr(r, k) for k, key in ROPE_KEYS.items() if key in ROPE_NEEDS[r.kind] and key not in changed}
    if r.sections:
        changed |= {"mrope_section": list(r.sections)} | ({"mrope_interleaved": True} if r.interleaved else {})
    return {"rope_type": r.kind, "rope_theta": r.theta} | needed | changed
