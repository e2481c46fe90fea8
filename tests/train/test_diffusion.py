"""The loss of GIDD: as its formulas in numpy say, and an optimiser lowers it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel import models, ops, params, train
from fdel.models import gidd, llama
from fdel.ops.diffusion import Noise, corrupt, elbo, log_snr_at
from tests.models import tiny

CFG = gidd.Config.from_hf(tiny.TINY["gidd"].values)
NOISE = Noise(CFG.vocab, 2, CFG.noise_type, CFG.min_log_snr, CFG.max_log_snr)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(3, 110, (2, 12)))


@pytest.mark.slow
def test_loss_is_the_sum_of_its_formula():
    """In float64 from the model's own logits: 1e-4. A token that is not learnt stays, and counts nothing.

    In chunks of five tokens; gradients are those of the formula on all logits at once (1e-5 of the greatest).
    """
    weights = jax.jit(lambda k: params.init(gidd.spec(CFG), k))(jax.random.key(0))
    weights["layers"] = jax.tree.map(lambda x: x * 20, weights["layers"])
    key, mask = jax.random.key(4), np.ones((2, 12), bool)
    mask[:, :4] = False
    batch = {"tokens": TOKENS, "mask": jnp.asarray(mask), "lengths": jnp.array([12, 9])}
    chunked = train.losses.diffusion(gidd, CFG, NOISE, weighting="elbo", most=1e9, chunk=5)
    (loss, sums), grads = jax.jit(jax.value_and_grad(chunked, has_aux=True))(weights, batch, {"key": key})
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
    level = jnp.asarray(snr, jnp.float32) * jnp.ones((2, 12))

    def whole(weights):
        z = gidd.forward(weights, noisy, CFG, ops.packed(TOKENS, batch["lengths"]))[0]
        each = jnp.multiply(*elbo(NOISE, z, noisy, TOKENS, level)) / (jax.nn.sigmoid(level) * jax.nn.sigmoid(-level))
        return jnp.where(learn, each, 0).sum() * (sigmoid(9.0) - sigmoid(-9.0))

    for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(jax.jit(jax.grad(whole))(weights)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


def test_the_logits_of_a_row_are_never_there_at_once():
    """Gradients of 1,024 tokens in chunks of 32 take less than 1/2 of one copy of the logits, which has 32 MiB."""
    cfg = dataclasses.replace(CFG, vocab=8192, layers=1, embed=16, ffn=16, max_positions=1024)
    loss = train.losses.diffusion(gidd, cfg, Noise(8192, 2), chunk=32)
    given = jax.eval_shape(lambda: {"key": jax.random.key(0)})
    batch = {"tokens": jax.ShapeDtypeStruct((16, 64), jnp.int32)}
    program = jax.jit(jax.grad(loss, has_aux=True)).lower(params.abstract(gidd.spec(cfg), jnp.float32), batch, given)
    memory = program.compile().memory_analysis().temp_size_in_bytes
    assert memory < 1024 * 8192 * 4 / 2, memory / 2**20


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="weighting='x'; expected 'elbo' or 'log_snr'"):
        train.losses.diffusion(gidd, CFG, NOISE, weighting="x")
    with pytest.raises(ValueError, match="the loss needs 'key'"):
        train.losses.diffusion(gidd, CFG, NOISE)({}, {"tokens": TOKENS}, {})
    with pytest.raises(ValueError, match="gidd: its tokens see later ones, so there is no next token to predict"):
        train.losses.sft(gidd, CFG)
    assert models.family("gidd") is gidd and train.losses.sft(llama, llama.Config.from_hf(tiny.BASE))
