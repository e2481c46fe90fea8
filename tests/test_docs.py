"""What README says, done: its table is generated from the registry, its tour and its commands run."""

import dataclasses
import json
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import yaml

from fdel import cli, models, ops, params, recipe, text
from fdel.models import llama
from fdel.recipe import names, parse

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


# ---- docs/migrating.md -------------------------------------------------------------------------------------------------

MIGRATING = ROOT / "docs" / "migrating.md"


def tables() -> str:
    """The tables of names.json, as docs/migrating.md has them; `python tests/test_docs.py` writes them there."""
    parts = []
    for section, rows in names.rows().items():
        title = {"": "The top of a run file", "python": "Python and commands"}.get(section, f"`{section}`")
        parts.append(f"## {title}\n\n| theirs | from | fdel | |\n|---|---|---|---|")
        for name, (projects, ours, note) in rows.items():
            same = "same" if ours.startswith("=") else note
            here = f"`{ours.removeprefix('=')}`" if ours else "-"
            parts[-1] += f"\n| `{name}` | {projects} | {here} | {same} |"
    return "\n\n".join(parts) + "\n"


def test_the_migration_tables_are_those_of_the_messages():
    head, found = MIGRATING.read_text().split("<!-- names -->\n\n")
    assert found == tables(), "run python tests/test_docs.py"
    for _, ours, _ in names.rows()["python"].values():
        at, *parts = ours.split(".")
        if at == "fdel":
            assert pkgutil.resolve_name(f"fdel.{parts[0]}:{'.'.join(parts[1:])}") is not None, ours
    for key in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)`", head):
        known = {where.replace("[]", "") for where, *_ in parse.table(recipe.Recipe)}
        assert key in known or key.split(".")[0] not in {k.split(".")[0] for k in known}, key


@pytest.mark.slow
def test_the_examples_of_the_migration_page_run(tmp_path, monkeypatch):
    """Each run file as it stands, with a tiny model, few steps and one device; then the Python code on the first."""
    monkeypatch.chdir(tmp_path)
    said = [f"What is the capital of {x}? It is a town." for x in ("France", "Spain", "Italy", "Peru")]
    Path("texts.jsonl").write_text("".join(json.dumps({"text": s}) + "\n" for s in said * 4))
    pair = {"prompt": said[0], "chosen": " yes it is", "rejected": " no"}
    Path("pairs.jsonl").write_text((json.dumps(pair) + "\n") * 16)
    cfg = llama.Config(vocab=512, embed=32, ffn=48, layers=1, heads=4, kv_heads=2, head_dim=8, rope=ops.Rope(8, 1e4))
    weights = params.init(llama.spec(cfg), jax.random.key(0), dtype=jnp.float32)
    models.save(models.Model(llama, cfg, weights), "my-model")
    tok = text.train_bpe(said, 300)
    text.save(
        dataclasses.replace(tok, templates={"default": "{% for m in messages %}{{ m.content }}{% endfor %}"}),
        "my-model",
    )
    page = MIGRATING.read_text()
    files = [yaml.safe_load(block.split("```")[0]) for block in page.split("```yaml\n")[1:]]
    changes = {"trainer": {"max_training_steps": 2}, "sharding": {"axis_dims": [1] * 5}}
    for i, document in enumerate(files):
        wanted = recipe.from_dict(document).merge(changes)
        wanted.to_yaml("run.yaml" if i == 0 else "other.yaml")
        _, result = recipe.run(wanted)
        assert result.metrics["step"] == 2 and result.directory.is_dir()
    code = page.split("```python\n")[1].split("```")[0]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.endswith("2 assistant\n"), done.stderr


def test_links_lead_somewhere():
    for page in (ROOT / "README.md", ROOT / "docs" / "architecture.md", MIGRATING, ROOT / "CONTRIBUTING.md"):
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


if __name__ == "__main__":
    MIGRATING.write_text(MIGRATING.read_text().split("<!-- names -->")[0] + "<!-- names -->\n\n" + tables())
