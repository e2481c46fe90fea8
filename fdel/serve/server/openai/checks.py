"""Check JSON from strangers: strict parsing, and checks of values that are composed into tables."""

import functools
import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

DEPTH = 64  # containers inside containers
NONE: dict[str, Any] = {"not": {}}  # the schema of what is known, and never taken
DIGITS = 20  # of an integer: what 64 bits need
TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}  # by status
VALUES = 300_000  # in one body; OpenAI's limit on the tokens of a request for embeddings. Plain parsing: 15 ms


@dataclass(frozen=True)
class Check:
    """A check: (value, path) -> value, or an APIError; and the JSON schema of what it takes (or of a little more)."""

    run: Callable[[Any, str], Any]
    schema: Mapping[str, Any]

    def __call__(self, value: Any, path: str = "") -> Any:
        """Return the value as the server uses it; APIError if it is wrong."""
        return self.run(value, path)


class APIError(Exception):
    """A request that is refused, as OpenAI's clients know it: its type follows from the HTTP status.

    `retry`: seconds after which to try again; other `headers` go with it too (x-should-retry).
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400,
                 retry: int | None = None, headers: Mapping[str, str] | None = None) -> None:  # fmt: skip
        super().__init__(message)
        self.message, self.param, self.code, self.status = message, param, code, status
        self.type = TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
        self.headers = {**(headers or {}), **({} if retry is None else {"Retry-After": str(retry)})}


def failure(message: str = "the server failed", code: str = "internal") -> APIError:
    """Make the error of a fault that is the server's own, which clients shall not try again."""
    return APIError(message, status=500, code=code, headers={"x-should-retry": "false"})


def refuse(path: str, what: str, code: str | None = None) -> NoReturn:
    """Raise the APIError of a wrong value."""
    raise APIError(f"{path}: {what}", param=path, code=code)


def load(body: bytes) -> dict[str, Any]:
    """Parse the body of a request: one JSON object in UTF-8. APIError for what JSON or this server does not allow.

    Refused: NaN and infinities, integers beyond 20 digits, keys that come twice, lone surrogates, deep nesting, and more
    than `VALUES` values, those of JSON inside of strings included. It takes up to half a second for each megabyte.
    """
    count = _Count()
    hooks: dict[str, Any] = {"object_pairs_hook": functools.partial(_object, count), "parse_float": _float,
             "parse_int": functools.partial(_integer, count), "parse_constant": _constant}  # fmt: skip
    try:
        value = json.loads(body.decode(), **hooks)
    except UnicodeDecodeError as e:
        raise APIError(f"the body is not UTF-8, at byte {e.start}") from e
    except json.JSONDecodeError as e:
        raise APIError(f"the body is not JSON: {e.msg} at character {e.pos}") from e
    except RecursionError as e:
        raise APIError(f"the body is nested too deep; the most is {DEPTH}") from e
    if not isinstance(value, dict):
        raise APIError(f"the body is {_name(value)}; expected an object")
    count = _Count()
    todo: list[tuple[Any, int]] = [(value, 1)]
    while todo:
        inner, depth = todo.pop()
        if isinstance(inner, str):
            if not inner.isascii() and re.search("[\ud800-\udfff]", inner):
                raise APIError("the body has a string with a lone surrogate, which is no character")
            if inner.lstrip()[:1] in ("{", "["):  # arguments of calls, schemas as text
                count.add(inner.count(",") + inner.count("[") + inner.count("{"))
            continue
        if depth > DEPTH:
            raise APIError(f"the body is nested too deep; the most is {DEPTH}")
        values = [*inner, *inner.values()] if isinstance(inner, dict) else inner
        count.add(len(values))
        todo += [(v, depth + 1) for v in values if isinstance(v, str | dict | list)]
    return value


@dataclass
class _Count:
    """Values of a body that were seen."""

    seen: int = 0

    def add(self, n: int) -> None:
        self.seen += n
        if self.seen > VALUES:
            raise APIError(f"the body has more than {VALUES:,} values; send less at a time")


def _object(count: _Count, pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    count.add(1)
    out = dict(pairs)
    if len(out) < len(pairs):
        seen: set[str] = set()
        twice = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        raise APIError(f"the body has the key {twice[:64]!r} twice in one object")
    return out


def _integer(count: _Count, digits: str) -> int:
    count.add(1)
    if len(digits.lstrip("-")) > DIGITS:
        raise APIError(f"the body has an integer of {len(digits)} digits; the most is {DIGITS}")
    return int(digits)


def _float(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise APIError(f"the body has the number {digits[:20]}, which is too large")
    return value


def _constant(name: str) -> NoReturn:
    raise APIError(f"the body has {name}, which is not JSON")


def number(low: float, high: float, kind: type = float) -> Check:
    """A number in a range; where it is an integer (`kind` int), true, 1.0 and "1" are none."""
    types, form = ((int,), "d") if kind is int else ((int, float), "g")

    def check(value: Any, path: str) -> float:
        if type(value) not in types:
            refuse(path, f"expected {'an integer' if kind is int else 'a number'}, found {_name(value)}")
        if not low <= value <= high:
            refuse(path, f"found {value}, expected {low:{form}} to {high:{form}}")
        return kind(value)

    return Check(check, {"type": "integer" if kind is int else "number", "minimum": low, "maximum": high})


integer = functools.partial(number, kind=int)


def _boolean(value: Any, path: str) -> bool:
    if not isinstance(value, bool):
        refuse(path, f"expected true or false, found {_name(value)}")
    return value


boolean = Check(_boolean, {"type": "boolean"})
anything = Check(lambda value, path: value, {})


def text(most: int, least: int = 0, pattern: str = "") -> Check:
    """A string with a length, in characters."""

    def check(value: Any, path: str) -> str:
        _expect(str, value, path)
        if not least <= len(value) <= most:
            refuse(path, f"found {len(value)} characters, expected {least} to {most}")
        if pattern and not re.fullmatch(pattern, value):
            refuse(path, f"expected a string of the form {pattern}")
        return value

    form = {"pattern": f"^{pattern}$"} if pattern else {}
    return Check(check, {"type": "string", "minLength": least, "maxLength": most, **form})


def choice(*values: str) -> Check:
    """One of some strings."""

    def check(value: Any, path: str) -> str:
        if not isinstance(value, str) or value not in values:
            refuse(path, f"found {_show(value)}, expected {' or '.join(values)}")
        return value

    return Check(check, {"enum": list(values)})


def only(*values: Any) -> Check:
    """A parameter that this server does not implement, but whose neutral values are fine."""

    def check(value: Any, path: str) -> Any:
        if not any(type(value) is type(v) and value == v for v in values):
            allowed = " or ".join(json.dumps(v) for v in values)
            refuse(path, f"not supported; leave it out{', or pass ' + allowed if values else ''}", "unsupported_value")
        return value

    return Check(check, {"enum": list(values)} if values else {"type": "null"})


def array(item: Check, least: int, most: int) -> Check:
    """A list with a length."""

    def check(value: Any, path: str) -> list:
        _expect(list, value, path)
        if not least <= len(value) <= most:
            refuse(path, f"found {len(value)} items, expected {least} to {most}")
        return [item(v, f"{path}[{i}]") for i, v in enumerate(value)]

    return Check(check, {"type": "array", "items": item.schema, "minItems": least, "maxItems": most})


def mapping(key: Callable[[Any, str], Any], item: Check, most: int) -> Check:
    """An object with any keys."""

    def check(value: Any, path: str) -> dict:
        _expect(dict, value, path)
        if len(value) > most:
            refuse(path, f"found {len(value)} entries, expected at most {most}")
        return {key(k, path): item(v, f"{path}.{k:.64}") for k, v in value.items()}

    return Check(check, {"type": "object", "additionalProperties": item.schema, "maxProperties": most})


def record(fields: Mapping[str, Check], required: Collection[str] = ()) -> Check:
    """An object with these fields and no others; null is the same as an absent field."""

    def check(value: Any, path: str) -> dict:
        _expect(dict, value, path)
        dot = f"{path}." if path else ""
        for key in value:
            if key not in fields:
                refuse(f"{dot}{key:.64}", "unknown parameter", "unknown_parameter")
        out = {k: fields[k](v, dot + k) for k, v in value.items() if v is not None}
        for key in required:
            if key not in out:
                refuse(dot + key, "missing", "missing_required_parameter")
        return out

    null = {"type": "null"}
    properties = {k: f.schema if k in required else {"anyOf": [f.schema, null]} for k, f in fields.items()}
    whole = {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}
    return Check(check, whole)


def either(strings: Check, lists: Check) -> Check:
    """A string, or a list."""
    run = lambda value, path: (strings if isinstance(value, str) else lists)(value, path)
    return Check(run, {"anyOf": [strings.schema, lists.schema]})


def tagged(tag: str, kinds: Mapping[str, Check], default: str | None = None) -> Check:
    """An object whose field `tag` says which check it is for."""

    def check(value: Any, path: str) -> dict:
        _expect(dict, value, path)
        kind = value.get(tag, default)
        if not isinstance(kind, str) or kind not in kinds:
            taken = [k for k, c in kinds.items() if c.schema != NONE]
            refuse(f"{path}.{tag}", f"found {_show(kind)}, expected {' or '.join(taken)}")
        return kinds[kind](value, path)

    needed = [] if default is not None else [tag]
    named = lambda kind: {"type": "object", "properties": {tag: {"const": kind}}, "required": needed}
    return Check(check, {"anyOf": [{"allOf": [named(kind), c.schema]} for kind, c in kinds.items()]})


_NAMES = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}


def _name(value: Any) -> str:
    return _NAMES.get(type(value), "null")


def _show(value: Any) -> str:
    return repr(value[:64]) if isinstance(value, str) else _name(value)


def _expect(kind: type, value: Any, path: str) -> None:
    if not isinstance(value, kind):
        refuse(path, f"expected {_NAMES[kind]}, found {_name(value)}")
