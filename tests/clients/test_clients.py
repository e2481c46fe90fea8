"""OpenAI's own client against a server in a process of its own; `make clients` runs the others, each in an environment."""

import sys

import pytest

from tests.clients import run


@pytest.mark.slow
def test_client(tmp_path):
    with run.server(tmp_path) as server:
        done = run.check("openai", [sys.executable], *server, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("ok ") and "openai" in done.stdout.splitlines()[-1]
