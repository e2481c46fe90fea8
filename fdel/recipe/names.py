"""What EasyDeL, EasyLM and TRL call things: names.json says what each is here, or why there is none.

Messages about run files and docs/migrating.md are readings of that file. Its sections are those of run files and, of some
keys, their values; a row is [project, what fdel calls it, note]. Where that begins with "=", the meaning is the same, and
run files may use either name.
"""

import difflib
import functools
import json
import re
from collections.abc import Collection
from importlib import resources

FEW = 40  # names that a message lists
ELSEWHERE = "`fdel run --keys` lists what there is"


@functools.cache
def rows() -> dict[str, dict[str, tuple[str, str, str]]]:
    """Read the table: section -> name -> (projects, ours, note)."""
    return json.loads(resources.files("fdel.recipe").joinpath("names.json").read_text("utf-8"))


def _of(path: str, name: str) -> tuple[str, str, str] | None:
    """Find a name in the section of a path, such as "mixture.informs[2]"."""
    section = re.sub(r"\[\d+\]", "", path).replace("eval_informs", "informs").replace("kv_cache", "model")
    section = re.sub(r"^(teacher|reference)_model", "model", section)
    return rows().get(section, {}).get(name)


def synonym(path: str, name: str) -> str | None:
    """Give the key of a section that another project calls by `name` and means the same; None without one."""
    found = _of(path, name)
    return found[1][1:] if found and found[1].startswith("=") else None


def hint(path: str, name: str, known: Collection[str], *, guess: bool = True, otherwise: str = ELSEWHERE) -> str:
    """Say what fdel has in place of an unknown name: by the table, by likeness if `guess`, or all that is known, if few."""
    if found := _of(path, name):
        projects, ours, note = found
        if not ours:
            return f"{projects} has it; here: {note}"
        return f"fdel calls it {ours.removeprefix('=')}" + (f" ({note})" if note else "")
    near = difflib.get_close_matches(name, known, 1, 0.75) if guess else []
    if near:
        return f"did you mean {near[0]!r}?"
    return f"known are {', '.join(known)}" if len(known) <= FEW else otherwise
