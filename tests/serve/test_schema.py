"""Generated requests: schemathesis reads the server's own document and looks for crashes and answers that break it.

By hand, against any server: `schemathesis run http://HOST/openapi.json -H "Authorization: Bearer KEY" --exclude-path
/admin/drain --phases fuzzing --max-examples 100 --checks not_a_server_error,response_schema_conformance,...`
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serve.wire import at_rest, chat, wait_for

PROGRAM = shutil.which("schemathesis", path=str(Path(sys.executable).parent)) or shutil.which("schemathesis")
CHECKS = "not_a_server_error,response_schema_conformance,content_type_conformance,status_code_conformance"
# Of each route: 750 in all, with `make matrix` 3,000.
EXAMPLES = [50, pytest.param(200, marks=pytest.mark.matrix)]


@pytest.mark.slow
@pytest.mark.skipif(PROGRAM is None, reason="schemathesis is not installed")
@pytest.mark.parametrize("examples", EXAMPLES)
def test_generated_requests(examples, running, monkeypatch, tmp_path):
    monkeypatch.setattr(running.state, "timeout", 0.3)  # many ask for long answers
    command = [
        PROGRAM, "run", f"http://127.0.0.1:{running.port}/openapi.json", "--phases", "fuzzing",
        "-H", f"Authorization: Bearer {running.secrets['admin']}", "--exclude-path", "/admin/drain",
        "--max-examples", str(examples), "--checks", CHECKS, "--request-timeout", "60", "--seed", "1", "--no-color",
        "--continue-on-failure",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    print(done.stdout[-6000:], done.stderr[-1000:])
    found = re.search(r"([\d,]+) generated", done.stdout)
    assert done.returncode == 0 and found and int(found[1].replace(",", "")) > 10 * examples, done.stdout[-6000:]
    monkeypatch.undo()
    wait_for(lambda: at_rest(running))
    assert chat(running)[0] == 200
