"""QLoRA from run files: adapters on a base of every format, against the same adapters on the base made plain."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel import models, ops, params, recipe, text
from fdel.models import llama
from fdel.ops.weights import Quantized, is_weight
from fdel.params import lora
from fdel.params.quantize import FORMATS, NAMES
from fdel.recipe import fits
from tests.models.tiny import TINY
from tests.params import test_published as published

CFG = llama.Config(vocab=300, embed=64, ffn=96, layers=2, heads=4, kv_heads=2, head_dim=16, rope=ops.Rope(16, 1e4))
METHODS = [*FORMATS, *NAMES]
DEAR = [pytest.mark.slow, pytest.mark.matrix]
STEPS, PRESENT = 3, ("nf4", "a8q")  # formats that CI tries too
ROWS = np.random.default_rng(0)
BATCH = {"tokens": ROWS.integers(0, 32, (4, 12)), "lengths": ROWS.integers(6, 13, 4)}
BATCH |= {"mask": np.broadcast_to(np.arange(12) > 2, (4, 12))}


def made(model: Path, method: str | None = None, **trainer) -> recipe.Recipe:
    few = {"quantization": {"model": {"quantization_method": method}}} if method else {}
    trainer = {"lora": {"r": 4}, "learning_rate": 0.01, "max_length": 12, "gradient_accumulation_steps": 2} | trainer
    return recipe.from_dict(
        {"model": {"name_or_path": str(model)}, "loader": {"dtype": "float32"}, "sharding": {"axis_dims": [1] * 5},
         "trainer": trainer, "mixture": {"informs": [{"data_files": "d.jsonl"}], "batch_size": 4}, "actions": ["train"],
         **few})  # fmt: skip


@functools.cache
def checkpoint(path: Path) -> Path:
    spec = llama.spec(CFG)
    model = models.Model(llama, CFG, jax.jit(lambda key: params.init(spec, key, dtype=jnp.float32))(jax.random.key(0)))
    models.save(model, path)
    text.save(text.train_bpe(["hello world"], 300), path)
    return path


def check(wanted: recipe.Recipe, formats: set[str], rtol: float) -> None:
    """Train a few steps: the base keeps its bits, and each gradient is that on the plain base, to rtol of its greatest."""
    assert recipe.faults(wanted) == [] and fits.faults(wanted) == []
    model = recipe.build_model(wanted)
    _, base = lora.split(model.params)
    kept = [w for w in jax.tree.leaves(base, is_leaf=is_weight) if isinstance(getattr(w, "base", None), Quantized)]
    assert {w.base.format for w in kept} == formats and len(kept) == 7
    plain = jax.jit(lambda p: lora.split(params.dequantize(p, jnp.float32))[1])(model.params)
    run = recipe.build_step(wanted, model, STEPS)
    grads = jax.jit(recipe.build_objective(wanted, model).grads)
    batch, state, losses = jax.tree.map(jnp.asarray, BATCH), run.state, []
    before = jax.tree.map(np.asarray, base)
    for _ in range(STEPS):
        got, want = (grads(state.params, batch, {"base": b})[0] for b in (run.given["base"], plain))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert np.abs(a - b).max() <= rtol * np.abs(b).max()
        state, metrics = run.step(state, batch, **run.given)
        losses.append(float(metrics["loss"]))
    assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(got))
    assert losses[-1] < losses[0]
    jax.tree.map(np.testing.assert_array_equal, before, run.given["base"])


@pytest.mark.slow
@pytest.mark.parametrize("method", [m if m in PRESENT else pytest.param(m, marks=DEAR) for m in METHODS])
def test_adapters_learn_on_what_is_quantized_in_memory(method, tmp_path_factory):
    """Gradients in float32 to 1e-5; where products round activations, they differ by that: 0.1 at 8 bits, 1 at four."""
    format = NAMES.get(method, method)
    _, _, stored, bits = FORMATS[format]
    check(made(checkpoint(tmp_path_factory.getbasetemp() / "qlora"), method), {stored}, {0: 1e-5, 8: 0.1, 4: 1}[bits])


@pytest.mark.slow
def test_all_weights_learn_for_a_format_and_are_served_in_it(tmp_path, monkeypatch):
    """Each gradient is that at the rounded weights; what is saved is not rounded, what is served then is."""
    monkeypatch.chdir(tmp_path)
    Path("d.jsonl").write_text('{"text": "hello world, hello"}\n' * 8)
    source, few, ways = (
        checkpoint(tmp_path / "model"),
        {"spec": llama.spec(CFG), "group": 32},
        {"max_training_steps": 2},
    )
    plain = made(source, lora=None, save_directory="out", **ways).set("actions", ["train", "serve"])
    wanted = plain.set("quantization", {"model": {"quantization_method": "int4", "group_size": 32}})
    wanted = wanted.set("quantization.straight_through", True)
    assert recipe.faults(wanted) == [] and fits.faults(wanted) == []
    model, batch = recipe.build_model(wanted), jax.tree.map(jnp.asarray, BATCH)
    near = params.dequantize(params.quantize(model.params, "int4", **few))
    got = jax.jit(recipe.build_objective(wanted, model).grads)(model.params, batch, {})[0]
    want = jax.jit(recipe.build_objective(plain, model).grads)(near, batch, {})[0]
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())
    served = []
    monkeypatch.setattr("fdel.recipe.serving.serve", lambda r, action, trained: served.append(trained))
    (result, _) = recipe.run(wanted)
    saved = models.load(result.directory).params
    want = params.quantize(saved, "int4", **few)
    jax.tree.map(np.testing.assert_array_equal, served[0].params, want)
    assert np.abs(saved["layers"]["q"] - params.dequantize(want)["layers"]["q"]).max() > 0


def test_adapters_that_peft_has_no_place_for_are_refused_before_they_are_trained(tmp_path):
    """DBRX's experts: to PEFT all of a layer are one matrix. Attention alone can be adapted."""
    family, cfg = (
        models.family("dbrx"),
        models.family("dbrx").Config.from_hf(TINY["dbrx"].values | {"model_type": "dbrx"}),
    )
    models.save(
        models.Model(family, cfg, params.init(family.spec(cfg), jax.random.key(0), dtype=jnp.float32)), tmp_path
    )
    with pytest.raises(recipe.RecipeError, match=r"adapters of layers.experts.down, .* cannot be written; name others"):
        recipe.build_model(made(tmp_path))
    recipe.build_model(made(tmp_path, lora={"r": 4, "target_modules": ["Wqkv", "out_proj"]}))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [
    k if k == "ct_4_sorted" else pytest.param(k, marks=DEAR) for k in published.KINDS
])  # fmt: skip
def test_adapters_learn_on_files_of_others(kind, tmp_path):
    """GPTQ, AWQ, compressed-tensors, fp8, bitsandbytes and modelopt: gradients in float32 to 1e-5."""
    published.checkpoint(tmp_path, kind)
    check(made(tmp_path), {published.KINDS[kind][2]}, 1e-5)


@pytest.mark.parametrize(("method", "trainer", "message"), [
    (None, {"lora": None}, "trainer.lora: missing; the model's files are in few bits"),
    ("int8", {}, "quantization.model: the model's files are in few bits already"),
])  # fmt: skip
def test_what_a_base_in_few_bits_cannot_do_is_said_before_it_is_loaded(method, trainer, message, tmp_path):
    """By what config.json says, and once more by what was loaded, which is all that a file without it has."""
    published.checkpoint(tmp_path, "gptq")
    wanted = made(tmp_path, method, **trainer)
    assert [message in fault for fault in fits.faults(wanted)] == [True]
    with pytest.raises(recipe.RecipeError, match=message):
        recipe.build_model(wanted)


@pytest.mark.slow
def test_adapters_on_a_published_base_are_exported_and_merged(tmp_path):
    """PEFT's files give the same model on the same base; merged, it is plain, and config.json says nothing of few bits."""
    published.checkpoint(tmp_path / "base", "gptq")
    tok = text.train_bpe(["hello world"], 300)
    wanted = made(tmp_path / "base", lora={"r": 4, "merge": True}, save_directory=str(tmp_path / "out"))
    model = recipe.build_model(wanted)
    trained, base = lora.split(model.params)
    trained = jax.tree.map(lambda x: x + 0.1, trained)
    model = model._replace(params=lora.join(trained, base))
    recipe.actions.export(wanted, model, tok)
    again, merged = models.load(tmp_path / "base", dtype=jnp.float32), models.load(tmp_path / "out" / "merged")
    again = params.load_peft(models.spec_of(again), again.params, tmp_path / "out" / "model")
    want = params.dequantize(lora.merge(model.params))
    for got in (params.dequantize(lora.merge(again)), merged.params):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), got, want)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "merged" / "config.json").read_text())
