"""Checks inside a jitted step: what cannot be right is named by its path, on eight devices too; what is right stays."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.experimental import checkify

from fdel import params, train
from fdel.train import debug

VOCAB = 16


def loss(params, batch, given):
    """The norm of the embeddings of each row: at zero its gradient is NaN."""
    rows = params["layers"]["embed"][batch["tokens"]] * params["layers"]["scale"]
    return jnp.sqrt((rows**2).sum((1, 2))).sum() + given["base"].sum(), {"weight": jnp.float32(len(rows))}


@pytest.fixture(scope="module")
def run():
    """A checked step, one without checks, a state and a batch, divided among eight devices."""
    mesh = params.make_mesh({"fsdp": 8})
    with jax.set_mesh(mesh):
        at = jax.NamedSharding(mesh, jax.P("fsdp"))
        weights = {"layers": {"embed": jnp.ones((VOCAB, 4), device=at), "scale": jnp.ones(4)}}
        batch, optimizer = {"tokens": jnp.zeros((8, 2), jnp.int32, device=at)}, optax.sgd(0.1)
        g = debug.checked(train.normalize(train.grads(loss)), VOCAB)
        plain = jax.jit(train.update(train.normalize(train.grads(loss)), optimizer, skip_nonfinite=True))
        step = debug.jit(train.update(g, optimizer, skip_nonfinite=True))
        yield step, plain, train.init_state(weights, optimizer), batch


def test_what_is_right_stays(run):
    step, plain, state, batch = run
    chex.assert_trees_all_equal(step(state, batch, base=jnp.ones(2)), plain(state, batch, base=jnp.ones(2)))


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_a_token_out_of_range_is_named(run, token):
    step, _, state, batch = run
    bad = {"tokens": batch["tokens"].at[7, 1].set(token)}
    with pytest.raises(
        checkify.JaxRuntimeError, match=r"batch\.tokens: 1 of 16 are bad; expected token ids of 0 \.\. 15"
    ):
        step(state, bad, base=jnp.ones(2))


@pytest.mark.parametrize("number", [jnp.nan, jnp.inf])
def test_a_weight_that_is_not_finite_is_named(run, number):
    step, _, state, batch = run
    layers = state.params["layers"]
    bad = dataclasses.replace(state, params={"layers": layers | {"scale": layers["scale"].at[2].set(number)}})
    with pytest.raises(checkify.JaxRuntimeError, match=r"params\.layers\.scale: 1 of 4 .* finite float32\[4\]"):
        step(bad, batch, base=jnp.ones(2))
    with pytest.raises(checkify.JaxRuntimeError, match=r"base: 1 of 2"):
        step(state, batch, base=jnp.array([1.0, number]))


def test_a_gradient_that_is_not_finite_is_named(run):
    """Its weights are finite, and `skip_nonfinite` would skip the step."""
    step, _, state, batch = run
    bad = dataclasses.replace(state, params=jax.tree.map(jnp.zeros_like, state.params))
    with pytest.raises(checkify.JaxRuntimeError, match=r"gradient\.layers\.embed: 4 of 64"):
        step(bad, batch, base=jnp.ones(2))
