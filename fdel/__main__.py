"""Run the command line as `python -m fdel`; `python -m fdel recipe.yaml` is `fdel run recipe.yaml`."""

import sys

from fdel.cli import main

if __name__ == "__main__":
    args = sys.argv[1:]
    file = next((a for a in args if not a.startswith("-")), "").endswith((".yaml", ".yml", ".json"))
    raise SystemExit(main(["run", *args] if file else args))
