"""Embedding losses and pooling against sentence-transformers (fixture), missing negatives, and exact microbatches."""

import functools
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fdel import ops, train
from fdel.train.losses.contrastive import (
    cosine_distance,
    embedding,
    euclidean_distance,
    info_nce,
    last_token,
    matryoshka,
    mean_token,
    sentence_embeddings,
    triplet,
)

FIXTURE = Path(__file__).parent / "fixtures" / "other_st.npz"
euclidean = partial(triplet, margin=5.0, distance=euclidean_distance)
LOSSES = {
    "info_nce": info_nce,
    "info_nce_in_batch": info_nce,
    "triplet_cosine": triplet,
    "triplet_euclidean": euclidean,
    "matryoshka": matryoshka(info_nce, (12, 8, 3), (1.0, 0.5, 0.25)),
    "matryoshka_triplet": matryoshka(euclidean, (12, 4)),
}


@functools.cache
def fixture() -> dict[str, np.ndarray]:
    with np.load(FIXTURE) as file:
        return dict(file)


def close(got, want, rtol):
    """Compare trees leaf by leaf, relative to the leaf's largest value."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=rtol * max(np.abs(b).max(), 1e-30), rtol=0)


def value_and_grad(loss, x, present=None):
    """The mean over rows and its gradient in the embeddings."""
    present = np.ones(x.shape[:2], bool) if present is None else present
    return jax.jit(jax.value_and_grad(lambda x: loss(x, present).mean()))(x)


# ---- the losses ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOSSES)
def test_loss_is_sentence_transformers(name: str) -> None:
    """MultipleNegativesRankingLoss with two hard negatives and with none, TripletLoss, MatryoshkaLoss: 1e-5."""
    want = fixture()[f"{name}/mean_loss"], fixture()[f"{name}/grad"]
    close(value_and_grad(LOSSES[name], fixture()["embeddings"][:, : want[1].shape[1]]), want, 1e-5)


@pytest.mark.slow
def test_absent_negatives() -> None:
    """A row may have fewer hard negatives: the float64 formula over the documents that are there, 1e-5."""
    x = fixture()["embeddings"].astype(np.float64)
    present = np.array([[1, 1, 1, 1], [1, 1, 0, 1], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]], bool)
    u = x / np.linalg.norm(x, axis=-1, keepdims=True)
    documents = u[:, 1:][present[:, 1:]]
    scores = u[:, 0] @ documents.T / 0.05
    want = np.log(np.exp(scores).sum(1)) - (u[:, 0] * u[:, 1]).sum(1) / 0.05
    got, grad = value_and_grad(info_nce, np.float32(x), present)
    close(got, want.mean(), 1e-5)
    assert (grad[~present] == 0).all() and (grad[present] != 0).any(-1).all()
    one = np.maximum(0, 0.2 + u[0, 0] @ u[0, 2] - u[0, 0] @ u[0, 1]) + np.maximum(
        0, 0.2 + u[0, 0] @ u[0, 3] - u[0, 0] @ u[0, 1]
    )
    close(triplet(np.float32(x), present)[0], one, 1e-5)
    assert triplet(np.float32(x), present)[2] == 0


@pytest.mark.slow
def test_padding_rows_change_nothing() -> None:
    """Rows of empty sequences add neither loss nor negatives, nor gradients; nothing but them has loss and gradient 0."""
    x, junk = fixture()["embeddings"], np.ones((2, 4, 12), np.float32)
    objective = jax.jit(jax.value_and_grad(embedding(tiny, None)[1], has_aux=True))
    lengths = np.full((5, 4), 7)
    want, grad = objective(x, {"lengths": lengths})
    more = {"lengths": np.concatenate([lengths, np.zeros((2, 4), int)])}
    got, more_grad = objective(np.concatenate([x, junk]), more)
    close((got, more_grad[:5]), (want, grad), 1e-6)
    assert got[1]["weight"] == 5 and (more_grad[5:] == 0).all()
    (value, _), grad = objective(x, {"lengths": 0 * lengths})
    assert value == 0 and (grad == 0).all()
    lengths[0, 0] = lengths[1, 1] = 0  # no query, no positive: only their documents count
    (value, sums), _ = objective(x, {"lengths": lengths})
    close(value, info_nce(x, lengths > 0)[2:].sum(), 1e-6)
    assert sums["weight"] == 3


@pytest.mark.parametrize("name", LOSSES)
def test_extreme_embeddings_have_finite_gradients(name: str) -> None:
    """Zeros, equal and opposite vectors, and lengths from 1e-8 to 1e8."""
    x = np.ones((5, 3, 12), np.float32) * np.array([0, 1, -1, 1e-8, 1e8], np.float32)[:, None, None]
    x[3, 1] *= -1
    value, grad = value_and_grad(LOSSES[name], x)
    assert np.isfinite(value) and np.isfinite(grad).all()


def test_distances() -> None:
    a, b = jnp.array([[3.0, 4.0], [1.0, 0.0]]), jnp.array([[0.0, 0.0], [0.0, 2.0]])
    np.testing.assert_allclose(euclidean_distance(a, b), [5, 5**0.5], rtol=1e-6)
    np.testing.assert_allclose(cosine_distance(a, jnp.array([[6.0, 8.0], [0.0, 2.0]])), [0, 1], atol=1e-6)
    assert (jax.grad(lambda a: euclidean_distance(a, a).sum())(a) == 0).all()


def test_wrong_arguments() -> None:
    x, present = np.ones((2, 2, 4), np.float32), np.ones((2, 2), bool)
    with pytest.raises(ValueError, match="no hard negatives"):
        triplet(x, present)
    with pytest.raises(ValueError, match=r"dims \(8, 2\) for embeddings of 4"):
        matryoshka(info_nce, (8, 2))(x, present)
    tokens, packed = ops.pack([[1, 2], [3]], 4)
    with pytest.raises(ValueError, match="one sequence per row"):
        sentence_embeddings(tiny, None)(tiny_params(), {"tokens": tokens, "packed": packed})


# ---- pooling -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "pool"), [("mean", mean_token), ("last", last_token)])
def test_pooling_is_sentence_transformers(name: str, pool) -> None:
    """Their Pooling on ragged rows: 1e-6."""
    hidden, lengths = fixture()["pool/hidden"], fixture()["pool/lengths"]
    close(pool(hidden, np.arange(hidden.shape[1]) < lengths[:, None]), fixture()[f"pool/{name}"], 1e-6)


def test_mean_adds_up_in_float32() -> None:
    """In bfloat16 a sum of 512 ones sticks at 256."""
    assert (mean_token(jnp.ones((1, 512, 2), jnp.bfloat16), jnp.ones((1, 512), bool)) == 1).all()


# ---- microbatches --------------------------------------------------------------------------------------------------

V, E, T = 23, 8, 6
tiny = SimpleNamespace(
    hidden=lambda params, tokens, cfg, packed, state=None, taps=None, remat=None: (
        jnp.tanh(params["embed"][tokens] @ params["w"]),
        None,
        None,
    ),
)


def tiny_params():
    r = np.random.default_rng(0)
    return {"embed": r.normal(size=(V, E)), "w": r.normal(size=(E, E))}


MICRO = {
    "info_nce": embedding(tiny, None, pool=mean_token),
    "triplet": embedding(tiny, None, loss=matryoshka(triplet, (8, 4))),
}


@functools.cache
def gradient(name: str, n: int):
    return jax.jit(train.normalize(train.gradcache(*MICRO[name], n)))


@pytest.mark.slow
@pytest.mark.parametrize("n", [4, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MICRO)
@settings(max_examples=6)
@given(lengths=st.lists(st.integers(0, T), min_size=16, max_size=16), seed=st.integers(0, 99))
def test_gradient_does_not_depend_on_microbatches(name: str, n: int, lengths: list[int], seed: int) -> None:
    """Microbatches of ragged rows, with absent documents and queries, see the same negatives: float64, 1e-11."""
    r = np.random.default_rng(seed)
    batch = {"tokens": r.integers(0, V, (4, 4, T)), "lengths": np.reshape(lengths, (4, 4))}
    with jax.enable_x64(True):
        close(gradient(name, n)(tiny_params(), batch), gradient(name, 1)(tiny_params(), batch), 1e-11)


@pytest.mark.slow
def test_accumulation_would_lose_negatives() -> None:
    """The property is not empty: microbatches that do not see each other have another loss."""
    outputs, objective = MICRO["info_nce"]
    loss = lambda params, batch, given: objective(outputs(params, batch, given), batch, given)
    batch = {"tokens": np.random.default_rng(0).integers(0, V, (4, 3, T))}
    params = jax.tree.map(np.float32, tiny_params())
    _, sums = gradient("info_nce", 1)(params, batch)
    _, fewer = jax.jit(train.normalize(train.accumulate(train.grads(loss), 2)))(params, batch)
    assert fewer["loss"] < 0.9 * sums["loss"]
