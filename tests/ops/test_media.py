"""Media in the place of tokens: rows of their own, several parts, on devices, and models that take none."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fdel import ops, params
from fdel.models import llama
from fdel.ops.carry import begin

RNG = np.random.default_rng(0)
INDEX = np.array([[-1, 2, -1, 0], [1, 1, -1, -1], [-1, -1, -1, -1], [0, 1, 2, 3]] * 2)
X = RNG.normal(size=(8, 4, 6)).astype(np.float32)


def wanted(values: np.ndarray) -> np.ndarray:
    out = X.copy()
    for b, t in zip(*np.nonzero(INDEX >= 0), strict=True):
        out[b, t] = values[b, INDEX[b, t]]
    return out


@pytest.mark.parametrize("parts", [None, 3])
def test_entries_of_a_row(parts):
    values = RNG.normal(size=(8, 4, *([parts] if parts else []), 6)).astype(np.float32)
    first = values if parts is None else values[:, :, 0]
    got = ops.place(jnp.array(X), ops.Media(jnp.array(INDEX), jnp.array(values)))
    np.testing.assert_array_equal(got, wanted(first))
    for part in range(parts or 0):
        got = ops.entries(ops.Media(jnp.array(INDEX), jnp.array(values)), part)
        np.testing.assert_array_equal(got[INDEX >= 0], wanted(values[:, :, part])[INDEX >= 0])


def test_one_row_of_all_entries():
    values = RNG.normal(size=(4, 6)).astype(np.float32)
    got = ops.place(jnp.array(X[3]), ops.Media(jnp.array([3, -1, 0, 4]), jnp.array(values, jnp.bfloat16)))
    assert got.dtype == jnp.float32 and np.isnan(got[3]).all()  # there is no entry 4
    want = np.stack([values[3], X[3, 1], values[0]])
    np.testing.assert_allclose(got[:3], want, rtol=1e-2)


def test_gradients_reach_entries_and_other_tokens():
    values = jnp.array(RNG.normal(size=(8, 4, 6)), jnp.float32)
    weight = jnp.array(RNG.normal(size=X.shape), jnp.float32)
    loss = lambda x, values: (ops.place(x, ops.Media(jnp.array(INDEX), values)) * weight).sum()
    to_x, to_values = jax.grad(loss, (0, 1))(jnp.array(X), values)
    np.testing.assert_array_equal(to_x, np.where(INDEX[..., None] >= 0, 0, weight))
    want = np.zeros(values.shape, np.float32)
    for b, t in zip(*np.nonzero(INDEX >= 0), strict=True):
        want[b, INDEX[b, t]] += weight[b, t]
    np.testing.assert_allclose(to_values, want, rtol=1e-6)


def test_rows_on_devices_fetch_nothing():
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    values = jnp.array(RNG.normal(size=(8, 4, 6)), jnp.float32)
    arrays = [jax.device_put(a, NamedSharding(mesh, P("fsdp"))) for a in (jnp.array(X), jnp.array(INDEX), values)]
    with jax.set_mesh(mesh):
        program = jax.jit(lambda x, index, values: ops.place(x, ops.Media(index, values))).lower(*arrays).compile()
    np.testing.assert_array_equal(program(*arrays), wanted(np.asarray(values)))
    assert not any(name in program.as_text() for name in ("all-gather", "all-reduce", "all-to-all"))


def test_a_model_of_text_refuses_media():
    cfg = llama.Config(vocab=8, embed=8, ffn=8, layers=1, heads=2, kv_heads=1, head_dim=4, rope=ops.Rope(4, 1e4))
    weights = params.init(llama.spec(cfg), jax.random.key(0), dtype=jnp.float32)
    tokens = jnp.ones((1, 3), int)
    for name, value in ("media", ops.Media(tokens)), ("rotary", jnp.ones((1, 3, 3), int)):
        with pytest.raises(ValueError, match=f"batch.{name}: the model takes text alone"):
            llama.forward(weights, tokens, cfg, replace(ops.packed(tokens), **{name: value}))


def test_a_model_that_turns_by_positions_refuses_three_components():
    tokens = jnp.ones((1, 3), int)
    batch = replace(ops.packed(tokens), rotary=jnp.ones((1, 3, 3), int))
    with pytest.raises(ValueError, match="batch.rotary: the model turns tokens by their positions; leave it out$"):
        begin(tokens, batch, None, None, ("hidden",), ("media",))


def test_media_that_are_not_encoded():
    with pytest.raises(ValueError, match="expected what `encode` gives"):
        ops.place(jnp.zeros((3, 6)), ops.Media(jnp.zeros(3, int)))
