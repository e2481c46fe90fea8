"""Masked language modelling: BERT's shares of tokens; loss and gradients as transformers' RobertaForMaskedLM gives them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel import models, ops, train
from fdel.models import llama, roberta
from fdel.train import losses
from fdel.train.losses.masked import hide, special_ids


def test_what_is_hidden():
    """15 % are asked for; of these 80 % are masks, 10 % others, 10 % as they are: within 5 standard deviations."""
    tokens = np.random.default_rng(0).integers(5, 1000, (40, 500))
    learn = np.arange(500) % 5 > 0
    seen, labels = hide(jax.random.key(0), jnp.asarray(tokens), jnp.asarray(learn & (tokens > 0)), mask=3, vocab=1000)
    asked = np.asarray(labels) >= 0
    assert not asked[:, ~learn].any() and (np.asarray(seen)[~asked] == tokens[~asked]).all()
    assert (np.asarray(labels)[asked] == tokens[asked]).all() and (np.asarray(labels)[~asked] == -100).all()
    shares = [asked[:, learn].mean(), (np.asarray(seen)[asked] == 3).mean()]
    same = (np.asarray(seen)[asked] == tokens[asked]).mean()
    np.testing.assert_allclose(shares, [0.15, 0.8], atol=0.04)
    assert abs(same - 0.1) < 0.03 and abs(1 - same - shares[1] - 0.1) < 0.03
    again = hide(jax.random.key(0), jnp.asarray(tokens), jnp.asarray(learn & (tokens > 0)), mask=3, vocab=1000)
    other = hide(jax.random.key(1), jnp.asarray(tokens), jnp.asarray(learn & (tokens > 0)), mask=3, vocab=1000)
    assert (again[0] == seen).all() and not (other[0] == seen).all()


@pytest.mark.slow
def test_loss_and_gradients_are_robertas(tmp_path):
    """RobertaForMaskedLM on what `hide` made of padded rows, with the same labels; all gradients: 1e-5."""
    torch, st = pytest.importorskip("torch"), pytest.importorskip("safetensors.numpy")
    from tests.models import tiny

    oracle = tiny.checkpoint("roberta", tmp_path)
    model = models.load(tmp_path, dtype=jnp.float32)
    lengths, pad = np.array([24, 15]), oracle.config.pad_token_id
    real = np.arange(24) < lengths[:, None]
    tokens = np.where(real, np.random.default_rng(0).integers(3, 128, (2, 24)), pad)
    tokens[real & (tokens == pad)] += 1
    tokens[:, 0] = oracle.config.bos_token_id
    assert {oracle.config.bos_token_id, pad} <= {*special_ids(model.cfg)}
    loss, key = losses.masked_lm(*model[:2], 4, probability=0.4), jax.random.key(2)
    batch = {"tokens": tokens, "lengths": lengths}
    grads, sums = jax.jit(train.normalize(train.grads(loss)))(model.params, batch, {"key": key})
    learn = real & ~np.isin(tokens, special_ids(model.cfg))
    seen, labels = hide(key, jnp.asarray(tokens), jnp.asarray(learn), mask=4, vocab=model.cfg.vocab, probability=0.4)
    assert (np.asarray(seen)[real] != pad).all()  # torch gives a pad's embedding no gradient
    as_torch = lambda x: torch.tensor(np.asarray(x)).long()
    want = oracle(as_torch(seen), attention_mask=torch.tensor(real), labels=as_torch(labels)).loss
    want.backward()
    np.testing.assert_allclose(sums["loss"], want.item(), rtol=1e-5)
    models.save(model._replace(params=grads), tmp_path / "grads")
    got = st.load_file(tmp_path / "grads" / "model.safetensors")
    found = {k: p.grad.numpy() for k, p in oracle.named_parameters() if p.grad is not None and k in got}
    for k, g in found.items():
        np.testing.assert_allclose(got[k], g, atol=1e-5 * max(1.0, np.abs(g).max()), err_msg=k)
    assert len(found) > 30 and sums["weight"] == (np.asarray(labels) >= 0).sum() > 5


def test_what_cannot_be_filled_in():
    cfg = roberta.Config(vocab=64, embed=32, ffn=48, layers=1, heads=4, rows=40)
    with pytest.raises(ValueError, match="mask_token_id=64; expected the id of the mask token, below 64"):
        losses.masked_lm(roberta, cfg, 64)
    with pytest.raises(ValueError, match=r"probability=0; expected a finite number above 0 to 1"):
        losses.masked_lm(roberta, cfg, 3, probability=0)
    with pytest.raises(ValueError, match="its tokens see no later ones"):
        other = dict(vocab=64, embed=32, ffn=48, layers=1, heads=4, kv_heads=2, head_dim=8, rope=ops.Rope(8, 1e4))
        losses.masked_lm(llama, llama.Config(**other), 3)
