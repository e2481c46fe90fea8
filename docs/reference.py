"""Write the reference of the public packages as HTML: `make docs`, or `python docs/reference.py DIRECTORY [MODULE ...]`."""

import sys
from pathlib import Path

import pdoc
import pdoc.render

from fdel import models, serve

PUBLIC = ("fdel", *(f"fdel.models.{name}" for name in models.families()))


def build(directory: Path, modules: tuple[str, ...] = PUBLIC) -> None:
    """Write a page of each module, and of what it exports, into `directory`."""
    vars(serve).update(
        {name: getattr(serve, name) for name in serve.__all__}
    )  # they load on first use: pdoc wants them now
    pdoc.render.configure(docformat="markdown")
    pdoc.pdoc(*modules, output_directory=directory)


if __name__ == "__main__":
    build(Path(sys.argv[1]), tuple(sys.argv[2:]) or PUBLIC)
