"""Question answering, against transformers' classes: the loss, and what of a row is marked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel import models, ops, params, recipe, text, train
from fdel.models import llama
from fdel.train import data, losses, metrics

torch = pytest.importorskip("torch", reason="the oracle is transformers on torch (extra `test`)")
transformers = pytest.importorskip("transformers")
SIZES = dict(vocab_size=120, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
KINDS = {
    "Llama": dict(num_key_value_heads=2), "Roberta": dict(pad_token_id=1, max_position_embeddings=40, type_vocab_size=1),
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_the_loss_is_that_of_transformers(name, tmp_path):
    """Of full rows; padding, which theirs also looks at, changes nothing here. 1e-5."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **KINDS[name])
    oracle = getattr(transformers, f"{name}ForQuestionAnswering")(config).eval()
    with torch.no_grad():
        for p in oracle.parameters():
            p.normal_(0, 0.1)
    oracle.save_pretrained(tmp_path)
    model = models.load(tmp_path, dtype=jnp.float32)
    tokens = np.random.default_rng(0).integers(3, 120, (2, 12))
    with torch.no_grad():
        want = oracle(
            torch.tensor(tokens), start_positions=torch.tensor([3, 0]), end_positions=torch.tensor([7, 0])
        ).loss
    labels = np.zeros((2, 12), np.int32)
    labels[0, 3], labels[0, 7], labels[1, 0] = 1, 2, 3
    loss = jax.jit(losses.question_answering(*model[:2]))
    total, sums = loss(model.params, {"tokens": tokens, "labels": labels})
    np.testing.assert_allclose(total / 2, want, rtol=1e-5)
    assert sums["weight"] == 2
    grown = lambda x, fill: np.pad(x, ((0, 1), (0, 4)), constant_values=fill)
    padded = {"tokens": grown(tokens, 5), "labels": grown(labels, -1), "lengths": np.array([12, 12, 0])}
    again, more = (
        train.grads(losses.question_answering(*model[:2]))(model.params, padded)[0],
        loss(model.params, padded),
    )
    np.testing.assert_allclose(more[0], total, rtol=1e-6)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(again)) and more[1]["weight"] == 2


def test_what_is_marked():
    """The tokens that an answer's characters stand in; the first of all without one; a wrong place is told."""
    tok = text.train_bpe(["who said it ? the cat said it on the mat"] * 3, 300)
    row = {"question": "who said it?", "context": "the cat said it on the mat"}
    answers = ({"text": ["cat said"], "answer_start": [4]}, {"text": [], "answer_start": []},
               {"text": ["dog"], "answer_start": [4]})  # fmt: skip
    rows = [row | {"answers": a} for a in answers]
    found = data.dataset(rows, data.Settings(kind="spans", batch=2, length=64, shuffle=False, epochs=1), tok)
    (batch,) = list(found)
    assert "the context has no 'dog' at 4" in str(found.report)
    first, none = batch["labels"]
    begin, end = (int(np.flatnonzero(first == mark)[0]) for mark in (1, 2))
    assert text.decode(tok, batch["tokens"][0, begin : end + 1]).strip() == "cat said"
    assert (first > 0).sum() == 2 and none[0] == 3 and (none > 0).sum() == 1


def test_an_answer_beyond_the_row_is_left_out():
    tok = text.train_bpe(["a b c d"] * 3, 300)
    row = {"question": "a", "context": "b " * 30 + "c", "answers": {"text": ["c"], "answer_start": [60]}}
    with pytest.raises(ValueError, match="its answer is not within length=16"):
        data.dataset([row] * 2, data.Settings(kind="spans", batch=2, length=16), tok)


@pytest.mark.slow
def test_a_run_file_learns_where_answers_stand(tmp_path):
    """From a language model: the head is new; what is saved gives transformers the same spans, to 1e-4."""
    cfg = llama.Config(vocab=300, embed=32, ffn=48, layers=2, heads=4, kv_heads=2, head_dim=8, rope=ops.Rope(8, 1e4))
    weights = params.init(llama.spec(cfg), jax.random.key(0), dtype=jnp.float32)
    models.save(models.Model(llama, cfg, weights), tmp_path / "start")
    tok = text.train_bpe(["who said it ? the cat said it to the dog and ran"] * 3, 300)
    text.save(tok, tmp_path / "start")
    answer = lambda name, i: {"text": [name], "answer_start": [3 * i + 4]}
    rows = [{"question": "who ran?", "context": f"{'so ' * i}the {name} ran", "answers": answer(name, i)}
            for i in range(4) for name in ("cat", "dog")]  # fmt: skip
    trainer = {"trainer_type": "question_answering", "learning_rate": 1e-2, "total_batch_size": 8, "max_length": 32,
               "max_training_steps": 30, "num_train_epochs": 30, "log_steps": 1,
               "save_directory": str(tmp_path / "run")}  # fmt: skip
    wanted = {"model": {"name_or_path": str(tmp_path / "start")}, "trainer": trainer, "actions": ["train"]}
    result = recipe.train(recipe.from_dict(wanted | {"sharding": {"axis_dims": [1] * 5}}), rows)
    found = metrics.read(tmp_path / "run")
    assert found[-1]["loss"] < 0.2 * found[0]["loss"] and found[-1]["exact_match"] > 0.8
    oracle = transformers.AutoModelForQuestionAnswering.from_pretrained(result.directory).eval()
    ids = np.array([text.encode(tok, ("who ran?", "so the dog ran"))])
    x, *_ = llama.hidden(result.model.params["model"], ids, result.model.cfg)
    with torch.no_grad():
        said = oracle(torch.tensor(ids))
    got = models.heads.outputs(result.model.params, x)
    for i, want in enumerate((said.start_logits, said.end_logits)):
        np.testing.assert_allclose(got[..., i], want, atol=1e-4)
