"""Question answering, against transformers' classes: the loss, and what of a row is marked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel import models, text, train
from fdel.train import data, losses

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
