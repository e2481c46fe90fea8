"""Rewards of what a completion is like: how long it is, and whether it is JSON of a schema."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fdel.train.losses.stats import check_range
from fdel.train.rollout.verify import Verifier, column_of, texts


def overlong(limit: int, cache: int) -> Verifier:
    """Penalise completions that come near a limit of tokens, softly (DAPO, arXiv:2503.14476, equation 13).

    0 up to limit - cache tokens, from there down to -1 at the limit, -1 behind it.
    >>> overlong(10, 4)(completion_ids=[[1] * 6, [1] * 9, [1] * 11])
    [0.0, -0.75, -1.0]
    """
    if not 0 < cache <= limit:
        raise ValueError(f"limit={limit!r}, cache={cache!r}; expected 0 < cache <= limit, in tokens")
    return lambda completion_ids, **columns: [-min(1.0, max(0, len(x) - limit + cache) / cache) for x in completion_ids]


def length_penalty(limit: int, scale: float = 1.0) -> Verifier:
    """Penalise each token: -scale times the completion's share of `limit` tokens, at most all of it.
    >>> length_penalty(10)(completion_ids=[[], [1] * 4, [1] * 20])
    [0.0, -0.4, -1.0]
    """
    check_range(above=True, limit=limit, scale=scale)
    return lambda completion_ids, **columns: [-scale * min(1.0, len(x) / limit) for x in completion_ids]


def json_schema(schema: Mapping[str, Any] | None = None, *, column: str = "schema") -> Verifier:
    """Reward completions that are JSON and fit a JSON schema: the one given, or that of each row's column, None without.

    A column holds schemas, or texts of them. Schemas that refer to others elsewhere find nothing there. Needs the extra
    `rewards` (jsonschema); ValueError for what is no schema.
    """
    try:
        import jsonschema
        import referencing
    except ImportError as e:
        raise ImportError("json_schema needs jsonschema: pip install 'fdel[rewards]'") from e

    def validator(schema: Any) -> Any:
        schema = json.loads(schema) if isinstance(schema, str) else schema
        kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
        try:
            kind.check_schema(schema)
        except jsonschema.SchemaError as e:
            raise ValueError(f"no JSON schema: {e.message}") from e
        return kind(schema, registry=referencing.Registry())

    one = None if schema is None else validator(schema)

    def verify(completions: Sequence[Any], **columns: Any) -> list[float | None]:
        said = texts(completions)
        if one is not None:
            return [float(_fits(one, x)) for x in said]
        schemas = column_of(columns, column)
        return [None if s is None else float(_fits(validator(s), x)) for x, s in zip(said, schemas, strict=True)]

    return verify


def _fits(validator: Any, text: str) -> bool:
    """Tell whether a text is JSON, without NaN and Infinity, and fits."""
    try:
        return bool(validator.is_valid(json.loads(text, parse_constant=_no_number)))
    except (ValueError, RecursionError):
        return False  # no JSON, or nested deeper than anything that is asked for


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
