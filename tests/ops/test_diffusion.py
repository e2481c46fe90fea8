"""Discrete diffusion against its definition: every transition enumerated, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel.ops import diffusion as D

V, MASK = 5, 3
NOISES = [D.Noise(V, MASK, shift=s) for s in (-30.0, -1.0, 0.5, 30.0)]
rng = np.random.default_rng(0)
X_HAT = rng.dirichlet(np.ones(V))
X_HAT[MASK] = 0
X_HAT /= X_HAT.sum()
sigmoid = lambda x: 1 / (1 + np.exp(-np.float64(x)))


def pi(n, snr):
    out = np.full(V, sigmoid(snr + n.shift) / (V - 1))
    out[MASK] = 1 - sigmoid(snr + n.shift)
    return out


def marginal(n, probs, snr):
    return sigmoid(snr) * probs + (1 - sigmoid(snr)) * pi(n, snr)


def transition(n, less, snr):
    """q(z_t | z_s) [s t]: what takes every marginal at `less` to that at `snr`."""
    ratio = sigmoid(snr) / sigmoid(less)
    change = (1 - sigmoid(snr)) * pi(n, snr) - ratio * (1 - sigmoid(less)) * pi(n, less)
    return ratio * np.eye(V) + change


def bayes(n, probs, less, snr):
    """p(z_s | z_t) [t s] for tokens of distribution `probs`."""
    joint = marginal(n, probs, less)[:, None] * transition(n, less, snr)
    return (joint / joint.sum(0)).T


@pytest.mark.parametrize("n", NOISES, ids=str)
def test_marginals_and_posteriors_are_those_of_the_markov_chain(n):
    less, snr = 0.7, -0.4
    step = transition(n, less, snr)
    np.testing.assert_allclose(step.sum(1), 1, atol=1e-12)
    np.testing.assert_allclose(marginal(n, X_HAT, less) @ step, marginal(n, X_HAT, snr), atol=1e-12)
    got = D.marginal(n, jnp.asarray(X_HAT, jnp.float32), jnp.float32(snr))
    np.testing.assert_allclose(got, marginal(n, X_HAT, snr), atol=2e-6)
    probs = jnp.broadcast_to(jnp.asarray(X_HAT, jnp.float32), (V, V))
    level = lambda x: jnp.full(V, x, jnp.float32)
    reached = marginal(n, X_HAT, snr) > 1e-9
    got = np.asarray(D.posterior(n, probs, jnp.arange(V), level(snr), level(less)))
    np.testing.assert_allclose(got[reached], bayes(n, X_HAT, less, snr)[reached], atol=5e-6)


@pytest.mark.parametrize("n", NOISES[1:3], ids=str)
def test_elbo_is_the_limit_of_the_chains_divergences(n):
    """Over 4,000 steps of alpha from its least to its greatest, for a prediction that looks at nothing: 1 %."""
    x, alphas = 1, np.linspace(sigmoid(n.low), sigmoid(n.high), 4001)
    snrs, truth = np.log(alphas / (1 - alphas)), np.eye(V)[x]
    want = got = 0.0
    for snr, less in zip(snrs[:-1], snrs[1:], strict=True):
        true, guess = bayes(n, truth, less, snr), bayes(n, X_HAT, less, snr)
        ratio = np.where(true > 0, np.log(np.maximum(true, 1e-300)) - np.log(np.maximum(guess, 1e-300)), 0)
        want += marginal(n, truth, snr) @ (true * ratio).sum(-1)
    logits = jnp.asarray(np.log(np.maximum(X_HAT, 1e-30)), jnp.float32)
    middle = jnp.asarray((snrs[:-1] + snrs[1:]) / 2, jnp.float32)[:, None] + jnp.zeros(V)
    shape = middle.shape
    weight, divergence = D.elbo(
        n, jnp.broadcast_to(logits, (*shape, V)), jnp.broadcast_to(jnp.arange(V), shape), jnp.full(shape, x), middle
    )
    q = np.stack([marginal(n, truth, s) for s in np.asarray(middle)[:, 0]])
    got = (np.asarray(weight * divergence) * q).sum(-1) @ np.diff(snrs)
    np.testing.assert_allclose(got, want, rtol=1e-2)


def test_masks_alone_give_the_loss_of_masked_diffusion():
    """arXiv:2406.07524, eq. 10: the negative log-likelihood over 1 - alpha, by alpha, where a token is masked."""
    n, alpha = D.Noise(V, MASK, shift=-60.0), 0.3
    snr = jnp.full((2,), np.log(alpha / (1 - alpha)))
    logits = jnp.broadcast_to(jnp.asarray(np.log(np.maximum(X_HAT, 1e-30)), jnp.float32), (2, V))
    weight, divergence = D.elbo(n, logits, jnp.array([MASK, 1]), jnp.array([1, 1]), snr)
    by_alpha = np.asarray(weight * divergence) / (alpha * (1 - alpha))
    np.testing.assert_allclose(by_alpha, [-np.log(X_HAT[1]) / (1 - alpha), 0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("n", NOISES, ids=str)
def test_corrupted_tokens_have_the_marginal_distribution(n):
    """Of 40,000: five standard deviations."""
    count, snr = 40_000, 0.3
    got = D.corrupt(n, jax.random.key(0), jnp.full(count, 2), jnp.float32(snr))
    want = marginal(n, np.eye(V)[2], snr)
    share = np.bincount(np.asarray(got), minlength=V) / count
    assert (np.abs(share - want) <= 5 * np.sqrt(want * (1 - want) / count) + 1e-9).all()


def test_denoising_draws_what_the_model_predicts_and_leaves_the_rest():
    n, rows = NOISES[2], 8192
    tokens = jnp.tile(jnp.array([4, 0, 0, 2]), (rows, 1))
    free = jnp.array([False, True, True, False])[None].repeat(rows, 0)
    logits = lambda z: jnp.broadcast_to(jnp.log(jnp.asarray(X_HAT, jnp.float32) + 1e-30), (*z.shape, V))
    out = np.asarray(jax.jit(lambda k: D.denoise(n, logits, k, tokens, free, steps=16))(jax.random.key(1)))
    assert (out[:, [0, 3]] == [4, 2]).all()
    want = marginal(n, X_HAT, n.high)
    share = np.bincount(out[:, 1:3].ravel(), minlength=V) / (2 * rows)
    assert (np.abs(share - want) <= 5 * np.sqrt(want / (2 * rows)) + 1e-3).all()
    with pytest.raises(ValueError, match="steps=0, temperature=1.0; expected at least one step"):
        D.denoise(n, logits, jax.random.key(1), tokens, free, steps=0)
    with pytest.raises(ValueError, match="expected mask in 0 to vocab - 1"):
        D.Noise(4, 4)
