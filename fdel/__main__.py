"""Run the command line as `python -m fdel`."""

from fdel.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
