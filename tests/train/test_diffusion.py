"""The loss of GIDD: as its formulas in numpy say, and an optimiser lowers it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel import models, ops, params, train
from fdel.models import gidd, llama
from fdel.ops.diffusion import Noise, corrupt, log_snr_at
from tests.models import tiny

CFG = gidd.Config.from_hf(tiny.TINY["gidd"].values)
NOISE = Noise(CFG.vocab, 2, CFG.noise_type, CFG.min_log_snr, CFG.max_log_snr)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(3, 110, (2, 12)))


@pytest.mark.slow
def test_loss_is_the_sum_of_its_formula():
    """In float64 from the model's own logits: 1e-4. A token that is not learnt stays, and counts nothing."""
    weights = jax.jit(lambda k: params.init(gidd.spec(CFG), k))(jax.random.key(0))
    weights["layers"] = jax.tree.map(lambda x: x * 20, weights["layers"])
    key, mask = jax.random.key(4), np.ones((2, 12), bool)
    mask[:, :4] = False
    batch = {"tokens": TOKENS, "mask": jnp.asarray(mask), "lengths": jnp.array([12, 9])}
    loss, sums = jax.jit(train.losses.diffusion(gidd, CFG, NOISE, weighting="elbo", most=1e9))(
        weights, batch, {"key": key}
    )
    when, what = jax.random.split(key)
    snr = np.asarray(log_snr_at(NOISE, jax.random.uniform(when, (2, 1))), np.float64)
    learn = mask & (np.arange(12) < np.array([[12], [9]]))
    noisy = np.where(learn, corrupt(NOISE, what, TOKENS, jnp.asarray(snr, jnp.float32)), TOKENS)
    z = np.asarray(gidd.forward(weights, noisy, CFG, ops.packed(TOKENS, batch["lengths"]))[0], np.float64)
    z[..., 2] = -np.inf
    x_hat = np.exp(z - z.max(-1, keepdims=True))
    x_hat /= x_hat.sum(-1, keepdims=True)
    sigmoid = lambda x: 1 / (1 + np.exp(-x))
    share, alpha, ids = sigmoid(snr + NOISE.shift), sigmoid(snr), np.arange(CFG.vocab)
    pi = np.where(ids == 2, 1 - share, share / (CFG.vocab - 1))[:, None]
    slope = (share * (1 - share))[:, :, None] * np.where(ids == 2, -1, 1 / (CFG.vocab - 1))
    q, p = (alpha[:, :, None] * x + (1 - alpha[:, :, None]) * pi for x in (np.eye(CFG.vocab)[TOKENS], x_hat))
    at = lambda x: np.take_along_axis(np.broadcast_to(x, q.shape), noisy[..., None], -1)[..., 0]
    ratio = at(q) / at(p)
    weight = (at(pi) - at(slope)) / (at(pi) + np.exp(snr) * (noisy == TOKENS)) / (alpha * (1 - alpha))
    each = weight * ((q * np.log(q / p)).sum(-1) + ratio - np.log(ratio) - 1) * (sigmoid(9.0) - sigmoid(-9.0))
    assert sums["weight"] == learn.sum() and (noisy != np.asarray(TOKENS)).any()
    np.testing.assert_allclose(loss, each[learn].sum(), rtol=1e-4)
    np.testing.assert_allclose(sums["elbo"], loss, rtol=1e-6)


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="weighting='x'; expected 'elbo' or 'log_snr'"):
        train.losses.diffusion(gidd, CFG, NOISE, weighting="x")
    with pytest.raises(ValueError, match="the loss needs 'key'"):
        train.losses.diffusion(gidd, CFG, NOISE)({}, {"tokens": TOKENS}, {})
    with pytest.raises(ValueError, match="gidd: its tokens see later ones, so there is no next token to predict"):
        train.losses.sft(gidd, CFG)
    assert models.family("gidd") is gidd and train.losses.sft(llama, llama.Config.from_hf(tiny.BASE))
