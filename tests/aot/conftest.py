"""Compile as users do, and print the table of programs at the end."""

import jax
import pytest
from aot_programs import target

from fdel import aot
from fdel.report import render

HEAD = ("model", "program", "devices", "compile s", "arguments MiB", "temporaries MiB", "loops", "sent MiB",
        "collectives", "estimate ms")  # fmt: skip


@pytest.fixture(params=["v5p", "v6e", "h100"])
def chip(request) -> str:
    """A chip whose compiler is here."""
    if why := aot.missing(target(request.param, 1)):
        pytest.skip(why)
    return request.param


@pytest.fixture(autouse=True)
def real_compilers():
    """The suite compiles quickly and keeps programs; neither is wanted here."""
    jax.config.update("jax_disable_most_optimizations", False)
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_enable_compilation_cache", True)


def pytest_terminal_summary(terminalreporter) -> None:
    """Print what every program came to."""
    reports = [r for name in ("passed", "failed") for r in terminalreporter.getreports(name)]
    rows = [tuple(map(str, v)) for r in reports for k, v in r.user_properties if k == "program"]
    if rows:
        terminalreporter.write_line(render([HEAD, *rows]))
