"""The clients whose packages are installed here, against a server in a process of its own; `make clients` runs all."""

import importlib.util
import sys

import pytest

from tests.clients import run

PACKAGES = {"openai": "openai", "langchain": "langchain_openai", "instructor": "instructor", "litellm": "litellm"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with run.server(tmp_path_factory.mktemp("clients")) as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKAGES)
def test_client(name, server, tmp_path):
    if importlib.util.find_spec(PACKAGES[name]) is None:
        pytest.skip(f"{PACKAGES[name]} is not installed; `make clients` runs it in an environment of its own")
    done = run.check(name, [sys.executable], *server, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("ok ") and name in done.stdout.splitlines()[-1]
