"""Trainer types: each is one record, and a new one is one file and one line."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel import models, ops, params, recipe, text
from fdel.models import llama
from fdel.recipe import methods, settled, trainer
from fdel.train import data, metrics

ROOT = Path(__file__).parents[1]
CFG = llama.Config(vocab=300, embed=32, ffn=48, layers=1, heads=4, kv_heads=2, head_dim=8, rope=ops.Rope(8, 1e4))
TOY = '''"""A toy: every token counts `strength` times."""

from dataclasses import dataclass

from fdel.recipe.methods.method import Method, Objective, Text, texts
from fdel.recipe.parse import key
from fdel.train import losses


@dataclass(frozen=True)
class Keys(Text):
    """Keys of trainer_type toy."""

    strength: float = key(3.0, "how often a token counts", positive=True)


def objective(k, model, *, remat):
    """Compose the loss."""
    loss = losses.sft(*model[:2], remat=remat)

    def stronger(params, batch, given):
        total, sums = loss(params, batch, given)
        return k.strength * total, sums

    return Objective(stronger)


METHODS = (Method("toy", Keys, 1e-3, objective, data=texts, column="text"),)
'''


@pytest.mark.slow
def test_a_new_trainer_type_is_one_file_and_one_line(tmp_path):
    """As a newcomer writes it, in a copy of the package: listed, validated from YAML, refused elsewhere, and trained."""
    shutil.copytree(ROOT / "fdel", tmp_path / "fdel", ignore=shutil.ignore_patterns("__pycache__"))
    folder = tmp_path / "fdel" / "recipe" / "methods"
    (folder / "toy.py").write_text(TOY)
    registry = (folder / "__init__.py").read_text()
    (folder / "__init__.py").write_text(registry.replace('    "sft",\n', '    "sft",\n    "toy",\n', 1))
    weights = params.init(llama.spec(CFG), jax.random.key(0), dtype=jnp.float32)
    models.save(models.Model(llama, CFG, weights), tmp_path / "model")
    text.save(text.train_bpe(["hello world, hello token"], 300), tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text('{"text": "hello world, hello token, hello"}\n' * 8)
    base = {"model": {"name_or_path": "model"}, "mixture": {"informs": [{"data_files": "rows.jsonl"}]},
            "sharding": {"axis_dims": [1] * 5}, "actions": ["validate", "train"]}  # fmt: skip
    common = {"max_training_steps": 1, "total_batch_size": 4, "max_length": 16, "log_steps": 1}
    for name, keys in (("toy", {"strength": 2}), ("sft", {}), ("wrong", {"trainer_type": "sft", "strength": 2})):
        document = base | {"trainer": {"trainer_type": name, **common, **keys, "save_directory": name}}
        (tmp_path / f"{name}.yaml").write_text(json.dumps(document))

    def fdel(*args: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "fdel", "run", *args]
        env = os.environ | {"PYTHONPATH": str(tmp_path)}
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)

    shown = " ".join(fdel("--keys").stdout.split())
    assert (
        "strength how often a token counts [toy] (a number; 3.0)" in shown and "[sft, toy, distillation, gkd" in shown
    )
    assert "trainer.strength: trainer_type sft does not read it (toy: yes)" in fdel("wrong.yaml").stderr
    for name in ("toy", "sft"):
        done = fdel(f"{name}.yaml")
        assert done.returncode == 0, done.stderr
    (toy,), (sft,) = (metrics.read(tmp_path / name) for name in ("toy", "sft"))
    np.testing.assert_allclose(toy["loss"], 2 * sft["loss"], rtol=1e-6)
    assert (toy["learning_rate"], sft["learning_rate"]) == (pytest.approx(1e-3), pytest.approx(2e-5))
    assert models.load(tmp_path / "toy" / "model").cfg == models.read_config(tmp_path / "model")[1]


@pytest.mark.parametrize("name", methods.METHODS)
def test_a_record_declares_what_a_type_is(name):
    """Each key has a reader's default and a text; the data settings exist; keys of others are in no record."""
    m = methods.METHODS[name]
    own = {f.name: f for f in dataclasses.fields(m.keys)}
    known = {f.name: f for f in dataclasses.fields(trainer.Trainer)}
    for key, f in own.items():
        assert f.metadata["doc"] and f.default is not dataclasses.MISSING and name in known[key].metadata["by"]
        assert known[key].default in (f.default, None)
    readers = {key for key, f in known.items() if name in f.metadata["by"]}
    assert readers == set(own)
    assert data.Settings(**m.data(m.keys())).kind in data.settings.CHOICES["kind"]
    assert methods.read(trainer.Trainer(trainer_type=name)) == (m, m.keys())


def test_a_recipe_is_settled_once():
    """A settled recipe stays as it is; its facts are those of its keys, with the defaults of its trainer type."""
    sections = {"model": {"name_or_path": "m"}, "mixture": {"informs": [{}], "batch_size": 16, "pack_tokens": True}}
    s = settled.settle(recipe.from_dict(sections | {"trainer": {"gradient_checkpointing": True}}))
    assert settled.settle(s) is s and (s.rows, s.eval_rows, s.length, s.rate) == (16, 16, 1024, 2e-5)
    assert (s.packed, s.shuffled, s.lora, s.reference, s.remat) == (True, True, None, None, "nothing_saveable")
    of = lambda kind, **keys: settled.settle(recipe.from_dict({"trainer": {"trainer_type": kind, **keys}}))
    assert (of("dpo").keys.beta, of("gkd").keys.beta, of("gkd", beta=0.2).keys.beta) == (0.1, 0.5, 0.2)
    assert [of("kto", loss_type=x).kl for x in ("kto", "apo_zero_unpaired")] == [True, False]
    assert [of("dpo", lora=x).reference for x in (None, {})] == ["start", "base"] and of("simpo").reference is None
    assert of("dpo", loss_type=["sigmoid", "sft"]).keys.loss_type == ("sigmoid", "sft")
    with pytest.raises(recipe.RecipeError, match="only trainer_type dpo has several at once"):
        of("kto", loss_type=["kto", "apo_zero_unpaired"])


@pytest.mark.slow
def test_three_completions_of_a_prompt_are_learnt(tmp_path):
    """TPO of a run file, in one part and in two: the loss of the first step by the model's own logits, in float64."""
    weights = params.init(llama.spec(CFG), jax.random.key(0), dtype=jnp.float32)
    models.save(models.Model(llama, CFG, weights), tmp_path / "model")
    tok = text.train_bpe(["one and one is two or three"] * 3, 300)
    text.save(tok, tmp_path / "model")
    rows = [{"prompt": "one and", "chosen": " one" * (i + 1), "rejected": " three" * (1 + i % 2),
             "reference": " is two" * (1 + i % 3)}
            for i in range(4)]  # fmt: skip
    runs = {}
    for parts in (1, 2):
        trainer = {"trainer_type": "tpo", "beta": 0.5, "tpo_alpha": 0.3, "learning_rate": 1e-2, "total_batch_size": 4,
                   "max_length": 32, "max_training_steps": 10, "log_steps": 1, "gradient_accumulation_steps": parts,
                   "save_directory": str(tmp_path / str(parts))}  # fmt: skip
        given = {"model": {"name_or_path": str(tmp_path / "model")}, "trainer": trainer}
        recipe.train(recipe.from_dict(given | {"sharding": {"axis_dims": [1] * 5}}), rows)
        runs[parts] = metrics.read(tmp_path / str(parts))

    def likely(prompt, said):
        ids, start = [*text.encode(tok, prompt + said), tok.ids["eos"]], len(text.encode(tok, prompt))
        logits = np.asarray(llama.forward(weights, jnp.asarray([ids]), CFG)[0][0], np.float64)
        logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        return sum(logp[i - 1, ids[i]] for i in range(start, len(ids))), len(ids) - start

    found = [[likely(row["prompt"], row[name]) for name in ("chosen", "rejected", "reference")] for row in rows]
    margins = np.array([chosen[0] - rejected[0] for chosen, rejected, _ in found])
    gold = -sum(x[2][0] for x in found) / sum(x[2][1] for x in found)
    want = np.log1p(np.exp(-0.5 * margins)).mean() + 0.3 * gold
    for rows_of in runs.values():
        np.testing.assert_allclose(rows_of[0]["loss"], want, rtol=1e-4)
        assert rows_of[-1]["nll_loss"] < 0.7 * rows_of[0]["nll_loss"]
        assert rows_of[-1]["rewards/accuracies"] == 1
    for name in ("loss", "grad_norm", "nll_loss"):
        np.testing.assert_allclose(*([row[name] for row in runs[n]] for n in runs), rtol=2e-4, err_msg=name)
