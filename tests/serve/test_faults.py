"""A small run of the fault benchmark: a server process that is killed, whose steps raise, whose clients leave."""

import importlib
from pathlib import Path

import pytest


@pytest.mark.slow
def test_what_survives_is_right_and_nothing_is_kept(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    assert importlib.import_module("faults").main(40) == []
