"""From a run file to plain data, in time that is bounded by its size: what a stranger wrote cannot hang who reads it."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from fdel.recipe import parse

SIZE = 1 << 18  # bytes of a run file
DEPTH = 32  # sections inside of sections
NODES = 50_000  # values, with those that aliases repeat
DIGITS = 64  # characters of a number


def from_file(path: str | Path, json: bool) -> Mapping[str, Any]:
    """Read the sections of a run file in JSON or YAML (extra `train`).

    RecipeError for a file that is neither, that holds no mapping, a key twice, or more than a run file needs.
    """
    with Path(path).open("rb") as file:
        raw = file.read(SIZE + 1)
    if len(raw) > SIZE:
        raise parse.RecipeError(f"{path} is larger than {SIZE >> 10} KiB, which no run file needs; is it one?")
    try:
        text = raw.decode("utf-8-sig")
        data = from_json(text) if json else from_yaml(text)
    except parse.RecipeError as e:
        raise parse.RecipeError(f"{path}: {e}") from e
    except UnicodeDecodeError as e:
        raise parse.RecipeError(f"{path} is no text in UTF-8: {e.reason} at byte {e.start}") from e
    if not isinstance(data, Mapping):
        raise parse.RecipeError(f"{path} holds {parse.shown(data)}, expected a mapping of sections")
    return data


def from_json(text: str) -> Any:
    """Read JSON without NaN and without keys that stand twice; RecipeError for what is none."""

    def section(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            raise parse.RecipeError(f"{next(n for n in names if names.count(n) > 1)}: stands twice; remove one")
        return found

    def constant(name: str) -> Any:
        raise parse.RecipeError(f"{name} is no number of JSON; use a finite one, or null")

    def number(digits: str) -> int:
        if len(digits) > DIGITS:
            raise parse.RecipeError(f"a number of {len(digits)} digits, expected at most {DIGITS}")
        return int(digits)

    try:
        return json.loads(text, object_pairs_hook=section, parse_constant=constant, parse_int=number)
    except json.JSONDecodeError as e:
        raise parse.RecipeError(f"is not JSON: {e}") from e
    except RecursionError as e:
        raise parse.RecipeError(f"sections lie more than {DEPTH} deep in each other") from e


def from_yaml(text: str) -> Any:
    """Read YAML of bounded depth and size, aliases expanded; RecipeError for what is none, with all faults of its keys."""
    yaml, faults, sizes = yaml_module(), list[str](), dict[int, int]()

    class Loader(yaml.SafeLoader):  # type: ignore[name-defined]
        depth = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            self.depth += 1
            if self.depth > DEPTH:
                raise parse.RecipeError(f"sections lie more than {DEPTH} deep in each other")
            alias, above = self.check_event(yaml.AliasEvent), len(faults)
            node = super().compose_node(parent, index)
            self.depth -= 1
            if not alias:
                inside = [x for pair in node.value for x in pair] if node.id == "mapping" else node.value
                sizes[id(node)] = 1 + (0 if node.id == "scalar" else sum(sizes[id(x)] for x in inside))
                faults[above:above] = _faults(node)  # before those of what is inside
            elif id(node) not in sizes:
                line = node.start_mark.line + 1
                raise parse.RecipeError(f"line {line}: an alias stands inside of what it names")
            return node

    loader = Loader(text)
    try:
        node = loader.get_single_node()
        parse.fail(faults)
        if node is not None and sizes[id(node)] > NODES:  # as often as aliases repeat them
            raise parse.RecipeError(f"has more than {NODES:,} values once its aliases are expanded; write fewer")
        return None if node is None else loader.construct_document(node)
    except parse.RecipeError:
        raise
    except (yaml.YAMLError, ValueError, OverflowError) as e:
        raise parse.RecipeError(f"is not YAML: {e}") from e
    finally:
        loader.dispose()


def _faults(node: Any) -> Iterator[str]:
    """Find a mapping's keys that stand twice, of which YAML would take the last, or are no text; and endless numbers."""
    line = f"line {node.start_mark.line + 1}"
    if node.id == "scalar" and len(node.value) > DIGITS and node.tag.rpartition(":")[2] in ("int", "float"):
        yield f"{line}: a number of {len(node.value)} digits, expected at most {DIGITS}"
    names = set()
    for k, _ in node.value if node.id == "mapping" else ():
        where = f"line {k.start_mark.line + 1}"
        if k.id != "scalar":
            yield f"{where}: a {k.id} as a key, expected a name"
        elif k.value in names:
            yield f"{k.value}: stands twice, again in {where}; remove one"
        else:
            names.add(k.value)


def dump_yaml(data: Any) -> str:
    """Write plain data as YAML text, keys in their order."""
    return yaml_module().safe_dump(data, sort_keys=False, allow_unicode=True, width=110)


def yaml_module() -> ModuleType:
    """Import pyyaml, or say which extra has it."""
    try:
        import yaml
    except ImportError as e:
        raise ImportError("run files in YAML need pyyaml: pip install 'fdel[train]'; JSON needs nothing") from e
    return yaml
