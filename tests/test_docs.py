"""What README says, done: its table is generated from the registry, its tour and its commands run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from fdel import cli, models, recipe

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_the_table_names_every_family_and_no_other():
    block = README.split("<!-- works -->")[1].split("<!-- /works -->")[0]
    rows = [[c.strip() for c in line.split("|")[1:3]] for line in block.strip().splitlines()[2:]]
    assert rows == [[name, models.family(name).MODEL_TYPE] for name in models.families()]


@pytest.mark.slow
def test_the_tour_runs(tmp_path):
    code, engine = (
        README.split(f"<!-- {mark} -->")[1].split("```python\n")[1].split("```")[0] for mark in ("tour", "engine")
    )
    assert len([line for line in code.splitlines() if line.strip()]) <= 20 + 1  # the blank line between is free
    done = subprocess.run(
        [sys.executable, "-c", code + engine], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    loss, *tokens = done.stdout.splitlines()
    assert re.fullmatch(r"loss 6\.\d\d over 248 tokens", loss)
    assert [len(t.split(",")) for t in tokens] == [8, 126]


def test_the_run_file_is_valid():
    wanted = recipe.from_dict(yaml.safe_load(README.split("```yaml\n")[1].split("```")[0]))
    assert recipe.faults(wanted) == [] and [a.name for a in wanted.actions] == ["validate", "train"]


def test_links_lead_somewhere():
    for page in (ROOT / "README.md", ROOT / "docs" / "architecture.md", ROOT / "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert target.startswith("http") or (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("command", sorted(set(re.findall(r"`(fdel [a-z]+) [A-Z]", README)) - {"fdel COMMAND"}))
def test_the_commands_exist(command, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([*command.split()[1:], "--help"])
    assert ended.value.code == 0 and "usage: " + command in capsys.readouterr().out


@pytest.mark.slow
def test_the_custom_loop_learns():
    """Thirty lines on public functions, on the eight devices of these tests."""
    file = ROOT / "examples" / "custom_loop.py"
    assert sum(bool(line.strip()) for line in file.read_text().splitlines()) <= 30
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", done.stdout)]
    margins = [float(x) for x in re.findall(r"margin ([\d.]+)", done.stdout)]
    assert len(losses) == 20 and abs(losses[0] - 0.6931) < 1e-3 and losses[-1] < 0.2
    assert margins[0] == 0 and margins[-1] > 1
