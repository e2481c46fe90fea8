"""Classifiers: losses and gradients as transformers' classes give them, rows with labels, and whole runs."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel import models, recipe, text, train
from fdel.models import heads
from fdel.train import data, losses, metrics

SINGLE, MULTI, REGRESSION = data.settings.CHOICES["problem"]
LENGTHS = np.array([7, 3, 5])
LABELS = {
    SINGLE: np.array([2, 0, 1]),
    MULTI: np.array([[1, 0, 1], [0, 0, 0], [0.25, 1, 0]], np.float32),
    REGRESSION: np.array([[0.5], [-1.5], [2.0]], np.float32),
    "token": np.where(np.arange(7) % 3 == 1, -100, np.arange(21).reshape(3, 7) % 3),
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), [
    ("llama", SINGLE), ("roberta", SINGLE), ("roberta", MULTI), ("llama", REGRESSION), ("llama", "token"),
    ("roberta", "token"),
])  # fmt: skip
def test_losses_and_gradients_are_those_of_transformers(name, kind, tmp_path):
    """*ForSequenceClassification of each problem_type and *ForTokenClassification, padded rows, all gradients: 1e-5.

    Two microbatches of different weight give the same gradient.
    """
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    st = pytest.importorskip("safetensors.numpy")
    from tests.models import tiny

    n = 1 if kind == REGRESSION else 3
    more = {"pad_token_id": 0, "num_labels": n}
    cfg = getattr(transformers, tiny.TINY[name].config)(**json.loads(json.dumps(tiny.TINY[name].values)) | more)
    stem = {"llama": "Llama", "roberta": "Roberta"}[name]
    ending = "TokenClassification" if kind == "token" else "SequenceClassification"
    oracle = getattr(transformers, f"{stem}For{ending}")(cfg).eval()
    tiny.randomise(oracle, 1)
    oracle.save_pretrained(tmp_path)
    real = np.arange(7) < LENGTHS[:, None]
    tokens = np.where(real, np.random.default_rng(0).integers(3, 64, (3, 7)), 0)
    labels = np.where(real, LABELS["token"], -100) if kind == "token" else LABELS[kind]
    their = torch.tensor(labels[:, 0] if kind == REGRESSION else labels)  # of shape [B], as scores without their axis
    want = oracle(torch.tensor(tokens), attention_mask=torch.tensor(real), labels=their).loss
    want.backward()
    assert kind == "token" or oracle.config.problem_type == kind
    model = models.load(tmp_path, dtype=jnp.float32)
    made = losses.token_classification if kind == "token" else losses.classification
    loss = made(*model[:2], **({} if kind == "token" else {"problem": kind}))
    empty = lambda x, fill: np.concatenate([x, np.full_like(x[:1], fill)])  # a row of padding, for two of two
    batch = {"tokens": empty(tokens, 0), "lengths": empty(LENGTHS, 0), "labels": empty(LABELS[kind], 0)}
    step = train.normalize(train.accumulate(train.grads(loss), 2))
    grads, sums = jax.jit(step)(model.params, batch, {})
    np.testing.assert_allclose(sums["loss"], want.item(), rtol=1e-5)
    models.save(model._replace(params=grads), tmp_path / "grads")
    got = st.load_file(tmp_path / "grads" / "model.safetensors")
    seen = {k: p.grad.numpy() for k, p in oracle.named_parameters() if p.grad is not None}
    for k, g in seen.items():
        np.testing.assert_allclose(got[k], g, atol=1e-5 * max(1.0, np.abs(g).max()), err_msg=k)
    assert sum(np.abs(g).max() > 1e-4 for g in seen.values()) > 10


def test_the_loss_of_each_problem_by_its_formula():
    """Float64 numpy, and the metrics; labels that are none count for nothing."""
    rng = np.random.default_rng(0)
    z = rng.normal(size=(4, 3))
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    y = np.array([2, 0, 1, 1])
    got, sums = losses.classes.one_label(jnp.asarray(z), jnp.asarray(y[:, None]))
    np.testing.assert_allclose(got, -np.log(p[np.arange(4), y]), rtol=1e-5)
    assert sums["accuracy"].tolist() == (z.argmax(1) == y).tolist()
    several, s = (rng.random((4, 3)) > 0.5) * 1.0, 1 / (1 + np.exp(-z))
    got, sums = losses.classes.some_labels(jnp.asarray(z), jnp.asarray(several))
    np.testing.assert_allclose(got, -(several * np.log(s) + (1 - several) * np.log(1 - s)).mean(1), rtol=1e-5)
    np.testing.assert_allclose(sums["accuracy"], ((s > 0.5) == several).mean(1))
    got, sums = losses.classes.numbers(jnp.asarray(z), jnp.asarray(several))
    np.testing.assert_allclose(got, ((z - several) ** 2).mean(1), rtol=1e-5)
    np.testing.assert_allclose(sums["mean_absolute_error"], np.abs(z - several).mean(1), rtol=1e-5)
    with pytest.raises(ValueError, match=r"problem='two'; expected one of single_label"):
        losses.classification(models.llama, None, problem="two")


# ---- rows --------------------------------------------------------------------------------------------------------------


TOK = text.train_bpe(["the cat sat on a mat , and it was good ; the old cats of Ünna"] * 3, 300)


def batches(rows: list[dict], tok=TOK, **settings) -> list[dict]:
    given = data.Settings(batch=len(rows), length=12, shuffle=False, bad_rows="raise", **settings)
    return list(data.dataset(rows, given, tok))


def test_labelled_rows():
    """Names or numbers, multi-hot of names or given, numbers; texts, chats and prompts."""
    chat = text.Tokenizer(
        **{**vars(TOK), "templates": {"default": "{% for m in messages %}{{ m.content }}{% endfor %}"}}
    )
    rows = [{"text": "the cat", "label": "b"}, {"messages": [{"role": "user", "content": "sat on"}], "label": 0},
            {"prompt": "a mat", "labels": True}]  # fmt: skip
    (batch,) = batches(rows, chat, kind="labelled", labels=("a", "b"))
    assert batch["labels"].tolist() == [1, 0, 1] and "mask" not in batch
    plain = lambda t: TOK.backend.encode(t).ids
    want = [plain("the cat"), plain("sat on"), plain("a mat")]
    assert [t[:n].tolist() for t, n in zip(batch["tokens"], batch["lengths"], strict=True)] == want
    rows = [{"text": "a", "label": x} for x in (["c", "a"], [], [0, 0.5, 1])]
    (batch,) = batches(rows, kind="labelled", labels=("a", "b", "c"), problem=MULTI)
    assert batch["labels"].tolist() == [[1, 0, 1], [0, 0, 0], [0, 0.5, 1]]
    (batch,) = batches([{"text": "a", "label": x} for x in (1, 2.5)], kind="labelled", problem=REGRESSION)
    assert batch["labels"].tolist() == [1, 2.5]


def test_tagged_words_keep_their_labels():
    """Each word's label stands at the first token that ends in it; a long row loses its end; the ids are the text's."""
    words, labels = ["the", "Ünna", ",", "catssat", "good"], ["x", None, "y", 0, -100]
    rows = [{"tokens": words, "labels": labels}, {"tokens": ["mat"] * 30, "labels": ["y"] * 30}]
    given = data.Settings(kind="tagged", labels=("x", "y"), batch=2, length=24, shuffle=False, bad_rows="raise")
    (batch,) = data.dataset(rows, given, TOK)
    e = TOK.backend.encode(" ".join(words))
    n = batch["lengths"][0]
    assert batch["tokens"][0, :n].tolist() == e.ids and n > len(words)
    said: dict[int, int] = {}
    for i, (_, end) in enumerate(e.offsets):
        said.setdefault(" ".join(words)[:end].count(" "), i)
    want = np.full(24, -100)
    want[[said[0], said[2], said[3]]] = [0, 1, 0]
    assert batch["labels"][0].tolist() == want.tolist()
    assert batch["lengths"][1] == 24 and (batch["labels"][1] == 1).sum() > 5


@pytest.mark.parametrize(("row", "settings", "message"), [
    ({"text": "a"}, {"kind": "labelled"}, "no label"),
    ({"text": "a", "label": "q"}, {"kind": "labelled", "labels": ("a", "b")}, "label 'q'; expected one of a, b, or 0 to 1"),
    ({"text": "a", "label": 2}, {"kind": "labelled", "labels": ("a", "b")}, "label 2; expected one of"),
    ({"text": "a", "label": -1}, {"kind": "labelled", "labels": ("a", "b")}, "label -1; expected one of"),
    ({"text": "a", "label": [1]}, {"kind": "labelled", "labels": ("a", "b"), "problem": MULTI}, "2 numbers from 0 to 1"),
    ({"text": "a", "label": [1, 2]}, {"kind": "labelled", "labels": ("a", "b"), "problem": MULTI}, "2 numbers from 0"),
    ({"text": "a", "label": float("nan")}, {"kind": "labelled", "problem": REGRESSION}, "expected 1 finite numbers"),
    ({"text": "a", "label": "1"}, {"kind": "labelled", "problem": REGRESSION}, "expected 1 finite numbers"),
    ({"tokens": ["a"], "labels": [0, 1]}, {"kind": "tagged", "labels": ("a", "b")}, "1 tokens and 2 labels"),
    ({"tokens": "a", "labels": [0]}, {"kind": "tagged", "labels": ("a", "b")}, "expected tokens, a list of words"),
    ({"tokens": ["a"], "labels": [None]}, {"kind": "tagged", "labels": ("a", "b")}, "no token to learn"),
])  # fmt: skip
def test_rows_without_a_label_that_can_be_learnt(row, settings, message):
    with pytest.raises(ValueError, match=message):
        batches([row], **settings)


def test_a_cache_keeps_labels(tmp_path):
    """Vectors of labels come back from disk as they were; another problem is another cache."""
    rows = [{"text": "a", "label": [0.5, 1]}, {"text": "the cat", "label": [0, 0]}]
    given = dict(kind="labelled", labels=("a", "b"), batch=2, length=8, shuffle=False)
    for _ in range(2):
        (batch,) = data.dataset(rows, data.Settings(**given, problem=MULTI), TOK, cache_directory=tmp_path)
        assert batch["labels"].tolist() == [[0.5, 1], [0, 0]]
    (batch,) = data.dataset(rows, data.Settings(**given, problem=REGRESSION), TOK, cache_directory=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


# ---- run files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("keys", "message"), [
    ({"trainer_type": "classification", "labels": ["a"]}, "labels=['a']; expected at least 2 different names"),
    ({"trainer_type": "classification", "labels": ["a", "a"]}, "expected at least 2 different names"),
    ({"trainer_type": "classification", "problem_type": MULTI}, "expected at least 1 different names"),
    ({"trainer_type": "token_classification"}, "labels=[]; expected at least 2 different names"),
    ({"trainer_type": "token_classification", "problem_type": MULTI}, "token_classification does not read it"),
])  # fmt: skip
def test_labels_that_cannot_be_learnt(keys, message):
    sections = {"model": {"name_or_path": "org/model"}, "mixture": {"informs": [{"data_files": "x"}]}, "trainer": keys}
    assert any(message in fault for fault in recipe.faults(recipe.from_dict(sections)))


@pytest.mark.slow
def test_a_run_learns_words_and_is_repeated_by_transformers(tmp_path: Path):
    """RoBERTa learns tags in a run; config.json names them, transformers gives the eval_loss; then it goes on as it is."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from tests.models import tiny

    entry = tiny.TINY["roberta"]
    tiny.TINY["roberta:300"] = entry._replace(values=entry.values | {"vocab_size": 300})
    try:
        tiny.checkpoint("roberta:300", tmp_path / "start")
    finally:
        del tiny.TINY["roberta:300"]
    text.save(TOK, tmp_path / "start")
    kind = {"cat": "THING", "mat": "THING", "sat": "O", "on": "O", "the": None}
    rng = np.random.default_rng(0)
    drawn = [[str(w) for w in rng.choice(list(kind), 5)] for _ in range(16)]
    rows = [{"tokens": w, "labels": [kind[x] for x in w]} for w in drawn if {*w} != {"the"}]
    sections = {
        "model": {"name_or_path": str(tmp_path / "start")}, "sharding": {"axis_dims": [1] * 5},
        "trainer": {"trainer_type": "token_classification", "labels": ["O", "THING"], "max_training_steps": 6,
                    "total_batch_size": 8, "max_length": 16, "log_steps": 1, "learning_rate": 3e-3, "evaluation_steps": 6,
                    "save_directory": str(tmp_path / "run")},
    }  # fmt: skip
    model, out, last = recipe.train(recipe.from_dict(sections), rows, rows[:3])
    curve = [row["loss"] for row in metrics.read(tmp_path / "run") if "loss" in row]
    assert curve[-1] < 0.8 * curve[0]
    theirs = transformers.AutoModelForTokenClassification.from_pretrained(out).eval()
    assert theirs.config.id2label == {0: "O", 1: "THING"} and heads.label_names(model.cfg, 2) == ["O", "THING"]
    (batch,) = data.dataset(
        rows[:3], data.Settings(kind="tagged", labels=("O", "THING"), batch=3, length=16, shuffle=False), text.load(out)
    )
    real = np.arange(batch["tokens"].shape[1]) < batch["lengths"][:, None]
    pad = theirs.config.pad_token_id
    tokens = torch.tensor(np.where(real, batch["tokens"], pad)).long()
    with torch.no_grad():
        want = theirs(tokens, attention_mask=torch.tensor(real), labels=torch.tensor(batch["labels"]).long()).loss
    np.testing.assert_allclose(last["eval_loss"], want.item(), rtol=1e-4)
