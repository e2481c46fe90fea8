"""README's table of families, made of what their files declare: `python tests/models/table.py` writes it into README.md."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "models")]  # before an installed fdel

import tiny  # noqa: E402

from fdel import models  # noqa: E402

README, MARKS = ROOT / "README.md", ("<!-- works -->", "<!-- /works -->")
CELLS = ("family", "model_type", "what it is", "remembers", "can be watched")


def row(name: str) -> tuple[str, ...]:
    """A family: the first line of its file, the state that serving keeps for it, and its taps."""
    family = models.family(name)
    what = (family.__doc__ or "").partition("\n")[0].partition(": ")[2].rstrip(".").replace("|", "\\|")
    state = family.state_spec(family.Config.from_hf(tiny.TINY[name].values), pages=1, page=1, rows=1)
    kept = [part for part in ("pages", "slots") if getattr(state, part) is not None]
    return name, family.MODEL_TYPE, what, ", ".join(kept) or "nothing (no generation)", ", ".join(family.hidden.taps)


def table() -> str:
    """The table in Markdown."""
    line = lambda cells: f"| {' | '.join(cells)} |"
    return "\n".join([line(CELLS), line(["---"] * len(CELLS)), *(line(row(name)) for name in models.families())])


def parts() -> tuple[str, str, str]:
    """README before the table, the table, and README after it."""
    before, rest = README.read_text().split(MARKS[0])
    block, after = rest.split(MARKS[1])
    return before, block.strip(), after


if __name__ == "__main__":
    before, _, after = parts()
    README.write_text(f"{before}{MARKS[0]}\n{table()}\n{MARKS[1]}{after}")
