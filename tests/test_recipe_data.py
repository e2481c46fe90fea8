"""Run files whose data needs more than rows: a reference's log-probabilities computed before, embeddings, judged steps."""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel import models, ops, params, recipe, text
from fdel.models import llama
from fdel.recipe import build, config, fits, ref_logps
from fdel.serve.engine.engine import Engine, Settings
from fdel.train import losses, metrics

CFG = llama.Config(vocab=300, embed=32, ffn=48, layers=1, heads=4, kv_heads=2, head_dim=8, rope=ops.Rope(8, 1e4))
WORDS = "the cat sat on a mat and saw that it was good , so what is 2 + 2 ? four it is".split()
ONE = {"axis_dims": [1, 1, 1, 1, 1]}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> tuple[Path, Path]:
    """Two models of one kind with different weights, and a tokenizer."""
    found = []
    for seed, name in enumerate(("model", "other")):
        path = tmp_path_factory.mktemp(name)
        weights = jax.jit(lambda key: params.init(llama.spec(CFG), key, dtype=jnp.float32))(jax.random.key(seed))
        weights = jax.tree.map(lambda x: 3 * x, weights)
        models.save(models.Model(llama, CFG, weights), path)
        text.save(text.train_bpe([" ".join(WORDS)], 300), path)
        found.append(path)
    return tuple(found)


def words(rng, n: int) -> str:
    return " ".join(rng.choice(WORDS, n))


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def made(model: Path, rows: Path, out: Path, held: Path | None = None, **trainer) -> recipe.Recipe:
    settings = {"total_batch_size": 4, "max_training_steps": 4, "max_length": 24, "log_steps": 1, "learning_rate": 1e-2}
    settings |= {"scheduler": "constant", "save_directory": str(out)} | trainer
    mixture = {"informs": [{"data_files": str(rows)}]}
    if held is not None:
        mixture["eval_informs"] = [{"data_files": str(held)}]
        settings["evaluation_steps"] = 2
    sections = {"model": {"name_or_path": str(model)}, "mixture": mixture, "trainer": settings, "sharding": ONE}
    return recipe.from_dict(sections)


def curve(out: Path) -> list[dict]:
    return [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in metrics.read(out)]


# ---- a reference computed before -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> tuple[Path, Path]:
    """Pairs to learn, and as many others to evaluate on that they make no whole batches."""
    rng, path = np.random.default_rng(0), tmp_path_factory.mktemp("pairs")
    row = lambda: {"prompt": words(rng, 3), "chosen": " " + words(rng, 4), "rejected": " " + words(rng, 6)}
    return write(path / "train.jsonl", [row() for _ in range(13)]), write(
        path / "held.jsonl", [row() for _ in range(7)]
    )


@pytest.fixture(scope="module")
def rated(tmp_path_factory) -> tuple[Path, Path]:
    """As `pairs`, of single completions with a label."""
    rng, path = np.random.default_rng(1), tmp_path_factory.mktemp("rated")
    row = lambda i: {"prompt": words(rng, 3), "completion": " " + words(rng, 2 + i % 5), "label": i % 3 > 0}
    found = {
        name: write(path / f"{name}.jsonl", [row(i) for i in range(n)]) for name, n in (("train", 13), ("held", 7))
    }
    return found["train"], found["held"]


def dpo(tiny, pairs, out: Path, **trainer) -> recipe.Recipe:
    wanted = made(tiny[0], pairs[0], out, pairs[1], **{"trainer_type": "dpo", "ld_alpha": 0.7} | trainer)
    return wanted.set("reference_model", {"name_or_path": str(tiny[1])})


REFERRED = {  # how the loss is asked for, and what it would be of equal models
    "dpo": ({}, np.log(2)),
    "kto": ({"trainer_type": "kto"}, 0.5),
    "apo": ({"trainer_type": "kto", "loss_type": "apo_zero_unpaired"}, 0.5),
    "bco": ({"trainer_type": "bco"}, np.log(2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dpo", *(pytest.param(k, marks=pytest.mark.matrix) for k in ("kto", "apo", "bco"))])
def test_a_reference_computed_before_is_the_one_computed_in_each_step(tiny, pairs, rated, tmp_path, monkeypatch, kind):
    """Losses, gradient norms and evaluations within 1e-6; afterwards the step holds no reference.

    A run that is cut off goes on bit by bit, and computes nothing again. KTO reads rows in their order.
    """
    options, start = REFERRED[kind]

    def asked(out: Path, **trainer) -> recipe.Recipe:
        if kind == "dpo":
            return dpo(tiny, pairs, out, **trainer)
        wanted = dpo(tiny, rated, out, ld_alpha=None, **options, **trainer)
        return wanted.set("mixture.shuffle_buffer_size", 0 if kind == "kto" else None)

    recipe.train(asked(tmp_path / "online"))
    wanted = asked(tmp_path / "before", precompute_ref_log_probs=True)
    recipe.train(wanted)
    rows, others = curve(tmp_path / "before"), curve(tmp_path / "online")
    assert [r["step"] for r in rows] == [1, 2, 3, 4] and abs(rows[0]["loss"] - start) > 1e-4
    assert kind != "kto" or max(r["kl"] for r in rows) > 0
    assert rows[0].keys() == others[0].keys()
    for a, b in zip(rows, others, strict=True):
        np.testing.assert_allclose([a[k] for k in b], list(b.values()), rtol=2e-5, atol=1e-6)
    model = recipe.build_model(wanted)
    assert recipe.build_step(wanted, model, 4).given == {} and build.build_reference(wanted, model) is None
    recipe.train(wanted.set("trainer.save_directory", str(tmp_path / "parts")).set("trainer.max_training_steps", 2))
    monkeypatch.setattr(ref_logps, "per_example", None)
    recipe.train(wanted.set("trainer.save_directory", str(tmp_path / "parts")))
    strip = lambda rows: [{k: v for k, v in r.items() if k not in ("epoch",)} for r in rows]
    assert strip(curve(tmp_path / "parts")) == strip(rows)


@pytest.mark.slow
@pytest.mark.parametrize("adapted", [False, True])
def test_the_column_is_what_the_reference_says_of_each_example(tiny, pairs, tmp_path, adapted):
    """In the examples' own order, against one row at a time; the model at the start, or what is under the adapters."""
    lora = {"lora": {"r": 2}} if adapted else {}
    wanted = made(tiny[0], pairs[0], tmp_path, trainer_type="dpo", precompute_ref_log_probs=True, **lora)
    tok, model, mesh = recipe.build_tokenizer(wanted), recipe.build_model(wanted), recipe.build_mesh(wanted)
    if adapted:  # adapters that do something
        model = model._replace(params=jax.tree.map(lambda x: x + 0.1, model.params))
        model = model._replace(params=params.lora.join(params.lora.split(model.params)[0], under(wanted)))
    data, none = ref_logps.precompute(wanted, model, tok, mesh, recipe.build_dataset(wanted, tok), None)
    assert none is None
    start = models.load(tiny[0], dtype=jnp.float32)
    score = jax.jit(lambda p, b: losses.completion_logps(llama, CFG)(p, b)["logps"])
    for _, batch in zip(range(3), data, strict=False):
        found = batch.pop("ref_logps")
        assert found.dtype == np.float32 and found.shape == (4, 2)
        for i in range(4):
            alone = score(start.params, {k: v[i : i + 1] for k, v in batch.items() if k != "margin"})
            np.testing.assert_allclose(found[i], alone[0], rtol=1e-5)


def under(wanted: recipe.Recipe):
    return params.lora.split(recipe.build_model(wanted).params)[1]


def test_a_copied_reference_has_the_dtype_of_the_computation(tiny, pairs, tmp_path):
    wanted = made(tiny[0], pairs[0], tmp_path, trainer_type="dpo")
    model = recipe.build_model(wanted)
    for name, dtype in ((None, jnp.float32), ("bf16", jnp.bfloat16)):
        copy = recipe.build_reference(wanted.set("loader.dtype", name), model)
        jax.tree.map(lambda x, y, d=dtype: np.testing.assert_array_equal(x, y.astype(d)), copy, model.params)
        assert {x.dtype for x in jax.tree.leaves(copy)} == {jnp.dtype(dtype)}
    assert copy["embed"] is not model.params["embed"]


def test_what_decides_about_the_reference_names_its_file(tiny, pairs, tmp_path):
    wanted = dpo(tiny, pairs, tmp_path, precompute_ref_log_probs=True)
    tok, sources = recipe.build_tokenizer(wanted), recipe.build_sources(wanted, wanted.mixture.informs)
    name = lambda r: ref_logps._file(r, tok, sources, recipe.build_settings(r)).name
    changes = [
        ("trainer.ld_alpha", 0.5),
        ("trainer.max_length", 20),
        ("loader.dtype", "bf16"),
        ("reference_model", None),
    ]
    names = [name(wanted), *(name(wanted.set(*c)) for c in changes)]
    assert len(set(names)) == 5
    assert name(wanted.set("trainer.learning_rate", 1.0).set("trainer.total_batch_size", 8)) == names[0]


# ---- embeddings ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_embeddings_learn_and_are_evaluated_on_every_row(tiny, tmp_path):
    """In two microbatches; the last evaluation is the loss of the saved model over held rows, batch by batch."""
    rng, doc = np.random.default_rng(0), lambda words: {"query": f"the {words}", "positive": f"a {words}"}
    data = [doc(w) | {"negative": words(rng, 2) if i % 2 else None} for i, w in enumerate(WORDS)]
    train, held = write(tmp_path / "train.jsonl", data), write(tmp_path / "held.jsonl", data[:6])
    options = {"trainer_type": "embedding", "gradient_accumulation_steps": 2, "pooling": "mean", "temperature": 0.2}
    wanted = made(tiny[0], train, tmp_path / "run", held, max_training_steps=8, **options)
    model, out, last = recipe.train(wanted.set("trainer.matryoshka_dims", [32, 16]))
    rows = metrics.read(tmp_path / "run")
    assert rows[-1]["loss"] < 0.7 * rows[0]["loss"] and rows[-1]["positive_similarity"] > rows[0]["positive_similarity"]
    tok, saved = text.load(out), models.load(out)
    assert models.pooling.read(out) == models.pooling.Pooling(("mean",))
    embed = jax.jit(losses.sentence_embeddings(llama, CFG, pool=losses.mean_token))
    score = jax.jit(lambda x, there: sum(losses.info_nce(x[..., :n], there, temperature=0.2).sum() for n in (32, 16)))
    total = 0.0
    for start, stop in ((0, 4), (4, 6)):
        said = [[r["query"], r["positive"], r["negative"]] for r in data[start:stop]]
        ids = [[text.encode(tok, t) if t else [] for t in row] for row in said]
        tokens = np.array([[x + [0] * (24 - len(x)) for x in row] for row in ids], np.int32)
        lengths = np.array([[len(x) for x in row] for row in ids])
        x, present = embed(saved.params, {"tokens": tokens, "lengths": lengths}), lengths > 0
        total += float(score(x, present))
    np.testing.assert_allclose(last["eval_loss"], total / 6, rtol=1e-4)


# ---- judged steps --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_judged_steps_learn_and_transformers_reads_the_model(tiny, tmp_path):
    """Adapters, and a head trained whole: transformers' token classifier gives the merged model's scores.

    Evaluation has every step of every row; an engine of the start with another head serves the adapters, head and all.
    """
    rng = np.random.default_rng(0)
    good = lambda fine: ("it is four" if fine else "it is " + words(rng, 3), bool(fine))
    solved = [[good(rng.integers(2)) for _ in range(3)] for _ in range(14)]
    data = [{"prompt": "2 + 2 ?", "completions": [s for s, _ in x], "labels": [y for _, y in x]} for x in solved]
    train, held = write(tmp_path / "train.jsonl", data), write(tmp_path / "held.jsonl", data[:5])
    options = {"trainer_type": "prm", "train_on_last_step_only": True, "max_length": 128, "max_training_steps": 8}
    wanted = made(tiny[0], train, tmp_path / "run", held, **options, lora={"r": 4, "merge": True})
    model, adapters, last = recipe.train(wanted)
    out = adapters.with_name("merged")
    start = recipe.build_model(wanted.set("trainer.lora", None).set("trainer.seed", 5))
    learnt = params.load_peft(models.spec_of(start), start.params, adapters)
    assert not np.allclose(learnt["token"]["bias"], start.params["token"]["bias"])
    merged = models.load(out)
    jax.tree.map(np.testing.assert_array_equal, params.lora.merge(learnt), merged.params)
    served = Engine(start, Settings(max_length=16), adapters={"judge": learnt})
    want = Engine(merged, Settings(max_length=16)).classify([5, 6, 7])
    np.testing.assert_allclose(served.classify([5, 6, 7], adapter="judge"), want, atol=1e-4)
    losses_of = [row["loss"] for row in metrics.read(tmp_path / "run")]
    assert min(losses_of[-3:]) < losses_of[0]
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    theirs = transformers.AutoModelForTokenClassification.from_pretrained(out).eval()
    total, count, tok = 0.0, 0, text.load(out)
    ids = lambda t: tok.backend.encode(t, add_special_tokens=False).ids
    for row in data[:5]:
        tokens, at = ids(row["prompt"]), []
        for step in row["completions"]:
            tokens += ids(step) + ids("\n")
            at.append(len(tokens) - 1)
        with torch.no_grad():
            logp = theirs(torch.tensor([tokens])).logits[0].log_softmax(-1)
        total -= sum(float(logp[i, int(y)]) for i, y in zip(at, row["labels"], strict=True))
        count += len(at)
    np.testing.assert_allclose(last["eval_loss"], total / count, rtol=1e-4)


# ---- what is refused -----------------------------------------------------------------------------------------------

IMPOSSIBLE = [
    ({"trainer_type": "orpo", "beta": 0.2, "lambda_orpo": 0.1}, "lambda_orpo: differs from beta"),
    ({"trainer_type": "prm", "step_separator": ""}, "step_separator: found '', expected a text"),
    ({"trainer_type": "dpo", "precompute_ref_log_probs": True, "sync_ref_model": True}, "sync_ref_model changes the"),
    ({"trainer_type": "kto", "precompute_ref_log_probs": True}, "set mixture.shuffle_buffer_size: 0"),
    ({"trainer_type": "cpo", "precompute_ref_log_probs": True}, "trainer_type cpo does not read it"),
    ({"trainer_type": "embedding", "loss_type": "sigmoid"}, "loss_type='sigmoid'; expected info_nce or triplet"),
    ({"trainer_type": "embedding", "loss_type": "triplet", "negatives": 0}, "needs negatives of at least 1"),
    ({"trainer_type": "embedding", "margin": 0.5}, "'info_nce' does not read it"),
    ({"trainer_type": "embedding", "negatives": -1}, "expected 0 or more"),
    ({"trainer_type": "sft", "pooling": "mean"}, "trainer.pooling: trainer_type sft does not read it"),
]


@pytest.mark.parametrize(("settings", "message"), IMPOSSIBLE, ids=lambda x: x if isinstance(x, str) else "")
def test_what_cannot_be_done_is_refused(settings, message):
    wanted = made(Path("m"), Path("d.jsonl"), Path("out"), **settings)
    assert any(message in fault for fault in recipe.faults(wanted)), recipe.faults(wanted)


def test_a_stream_has_no_reference_computed_before():
    wanted = made(Path("m"), Path("d.jsonl"), Path("out"), trainer_type="dpo", precompute_ref_log_probs=True)
    assert recipe.faults(wanted) == []
    assert "a stream keeps nothing" in recipe.faults(wanted.set("mixture.pack_on_the_fly", True))[0]


# ---- what a newcomer gets wrong, and what comes from memory --------------------------------------------------------


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> Path:
    rng, path = np.random.default_rng(2), tmp_path_factory.mktemp("said")
    return write(path / "said.jsonl", [{"text": words(rng, 6), "content": words(rng, 6)} for _ in range(16)])


@pytest.mark.parametrize(("trainer", "inform", "match"), [
    ({}, {"content_field": "bogus"}, "no row has the column 'bogus'; found are content, text"),
    ({}, {"format_fields": {"nothere": "text"}}, "no row has the column 'nothere'; found are content, text"),
    ({}, {"format_fields": {"nothere": "tools"}}, "no row has the column 'nothere'; found are content, text"),
    ({}, {"content_field": "prompt"}, "no column 'prompt' .found text, content"),
    ({}, {"content_field": "content", "additional_fields": ["tools"]}, "no column 'tools' .found text"),
    ({}, {"split": "bogus"}, "files have the split 'train' alone"),
    ({}, {"split": "train[:x]"}, "expected a name and a slice"),
    *(({"trainer_type": t}, {"content_field": "bogus"}, "no row has the column 'bogus'; found are content, text")
      for t in ("dpo", "orpo", "kto", "bco", "reward", "prm", "embedding")),
])  # fmt: skip
def test_columns_and_splits_that_are_not_there(tiny, said, tmp_path, trainer, inform, match):
    wanted = made(tiny[0], said, tmp_path, **trainer)
    wanted = wanted.set("mixture.informs", [{"data_files": str(said), **inform}])
    with pytest.raises(ValueError, match=match):
        recipe.build_dataset(wanted, recipe.build_tokenizer(wanted))


def test_the_column_that_is_named_is_the_one_that_is_read(tiny, said, tmp_path):
    wanted = made(tiny[0], said, tmp_path, max_training_steps=None, num_train_epochs=1, total_batch_size=2)
    wanted = wanted.set("mixture.shuffle_buffer_size", 0)
    tok, rows = recipe.build_tokenizer(wanted), [json.loads(line) for line in said.read_text().splitlines()]
    for split, chosen in (("train", rows), ("train[:50%]", rows[:8]), ("train[10:14]", rows[10:14])):
        informs = [{"data_files": str(said), "content_field": "content", "split": split}]
        data = recipe.build_dataset(wanted.set("mixture.informs", informs), tok)
        lines = [text.decode(tok, t[:n].tolist()) for b in data for t, n in zip(b["tokens"], b["lengths"], strict=True)]
        assert data.examples == len(chosen) and all(
            r["content"].startswith(s[:8]) for r, s in zip(chosen, lines, strict=False)
        )


@pytest.mark.slow
def test_rows_from_memory_train_as_those_of_a_file(tiny, pairs, tmp_path):
    """Bit by bit, lists and `datasets`; evaluation and a reference computed before too. Both ways at once are refused."""
    datasets = pytest.importorskip("datasets", reason="makes one")
    rows, held = ([json.loads(line) for line in p.read_text().splitlines()] for p in pairs)
    options = {"precompute_ref_log_probs": True, "max_prompt_length": 2, "max_completion_length": 5}
    recipe.train(dpo(tiny, pairs, tmp_path / "file", **options))
    for name, given in (("list", rows), ("datasets", datasets.Dataset.from_list(rows))):
        wanted = dpo(tiny, pairs, tmp_path / name, **options)
        with pytest.raises(recipe.RecipeError, match="mixture.informs: there are rows from memory too; give one"):
            recipe.train(wanted, train_dataset=given)
        wanted = wanted.set("mixture", {})
        with pytest.raises(recipe.RecipeError, match="mixture.informs: empty"):
            recipe.train(wanted, eval_dataset=held)
        recipe.train(wanted, train_dataset=given, eval_dataset=held)
        assert curve(tmp_path / name) == curve(tmp_path / "file")


def test_tokens_that_the_model_has_not_are_refused(tiny, said, tmp_path):
    """Before the model is loaded, with the token and its place; a stream says so too."""
    path = tmp_path / "larger"
    text.save(text.train_bpe([" ".join(WORDS)] * 3, 400, [f"<|{i}|>" for i in range(100)]), path)
    for stream in (False, True):
        wanted = made(tiny[0], said, tmp_path / "run").set("model.tokenizer", str(path))
        with pytest.raises(
            ValueError, match=r"said.jsonl:\d+: token 3\d\d, '.+', is none of the model's 300; the tokenizer has"
        ):
            recipe.train(wanted.set("mixture.pack_on_the_fly", stream))
    assert not (tmp_path / "run/model").exists()


@pytest.mark.slow
def test_a_forgetful_run_repeats_its_masks(tiny, said, tmp_path):
    """A run that goes on is one that never stopped, bit by bit; microbatches and a mesh change nothing but rounding."""
    one, keys = tiny[0], {"fcm_min_ratio": 0.2, "fcm_max_ratio": 0.6, "packing": True}
    recipe.train(made(one, said, tmp_path / "whole", held=said, **keys))
    recipe.train(made(one, said, tmp_path / "parts", held=said, **keys | {"max_training_steps": 2}))
    recipe.train(made(one, said, tmp_path / "parts", held=said, **keys))
    whole = curve(tmp_path / "whole")
    assert curve(tmp_path / "parts") == whole
    recipe.train(made(one, said, tmp_path / "micro", held=said, **keys, gradient_accumulation_steps=2))
    mesh = {"axis_dims": [1, 2, 1, 2, 2]}
    recipe.train(made(one, said, tmp_path / "mesh", held=said, **keys).set("sharding", mesh))
    recipe.train(made(one, said, tmp_path / "plain", held=said, packing=True))
    losses = lambda name: [row["loss"] for row in curve(tmp_path / name) if "loss" in row]
    np.testing.assert_allclose(losses("micro"), losses("whole"), rtol=1e-5)
    np.testing.assert_allclose(losses("mesh"), losses("whole"), rtol=1e-5)
    assert np.abs(np.subtract(losses("plain"), losses("whole"))).min() > 1e-3


@pytest.mark.slow
def test_a_run_that_learns_nothing_publishes_nothing(tiny, said, tmp_path):
    model = models.load(tiny[0])
    broken = jax.tree.map(lambda x: x * jnp.nan, model.params)
    models.save(model._replace(params=broken), tmp_path / "broken")
    text.save(text.load(tiny[0]), tmp_path / "broken")
    with pytest.raises(FloatingPointError, match="none of the 4 steps had a finite loss"):
        recipe.train(made(tmp_path / "broken", said, tmp_path / "run"))
    assert not (tmp_path / "run/model").exists()


@pytest.mark.slow
def test_a_stream_tells_its_rows_at_the_end(tiny, said, tmp_path, capsys):
    recipe.train(made(tiny[0], said, tmp_path, max_training_steps=2).set("mixture.pack_on_the_fly", True))
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("data: ")]
    assert told[0] == "data: a stream, whose rows are counted when it was read"
    assert int(told[1].split()[1]) >= 8 and "rows read" in told[1]
    assert metrics.read(tmp_path)[-1]["tokens_per_second"] > 0


@pytest.mark.parametrize(("given", "trainer", "asked"), [
    ({"attention_dropout": 0.1}, {}, "attention_dropout 0.1"),
    ({"attn_pdrop": 0.1, "resid_pdrop": 0.2, "summary_first_dropout": 0.1}, {}, "attn_pdrop 0.1, resid_pdrop 0.2"),
    ({"attention_dropout": 0.1}, {"trainer_type": "embedding"}, "attention_dropout 0.1"),
    ({"attention_dropout": 0.1}, {"trainer_type": "dpo", "disable_dropout": False}, "attention_dropout 0.1"),
    ({"classifier_dropout": 0.1}, {"trainer_type": "prm", "disable_dropout": False}, "classifier_dropout 0.1"),
    ({"attention_dropout": 0.1}, {"disable_dropout": True}, None),
    ({"attention_dropout": 0.1}, {"trainer_type": "dpo"}, None),
    ({"attention_dropout": 0.0, "resid_pdrop": None, "use_dropout": False}, {"disable_dropout": False}, None),
    ({"classifier_dropout": 0.1}, {}, None),
])  # fmt: skip
def test_dropout_is_switched_off_by_name_or_refused(tiny, said, tmp_path, given, trainer, asked):
    before = json.loads((tiny[0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(before | given))
    wanted = made(tmp_path, said, tmp_path / "run", **trainer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "from_scratch", lambda source: True)
        said = "; ".join(fits.faults(wanted, 1))
    assert ("asks for dropout" in said) == (asked is not None)
    assert asked is None or re.search(rf"asks for dropout \({asked}\).*set trainer.disable_dropout: true", said)
