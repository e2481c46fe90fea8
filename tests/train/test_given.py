"""What a loss is given: the step, a key of its own for each step, microbatch and replica, and what is named."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fdel import train
from fdel.train import parallel
from fdel.train.evaluation import evaluator

KEY = jax.random.fold_in(jax.random.key(7), 5)


def dropped(params, batch, given):
    """A linear layer with dropout: half of its inputs, chosen by the key."""
    keep = jax.random.bernoulli(given["key"], 0.5, batch["x"].shape)
    return jnp.tanh((batch["x"] * keep) @ params)


def loss(params, batch, given):
    return (dropped(params, batch, given) ** 2).sum(), {"weight": jnp.float32(len(batch["x"]))}


def coupled(out, batch, given):
    """A loss that sees all rows at once."""
    return -jnp.diagonal(jax.nn.log_softmax(out @ out.T)).sum(), {"weight": jnp.float32(len(out))}


def arrays(rows: int = 8):
    r = np.random.default_rng(0)
    return jnp.asarray(r.normal(size=(6, 5)), jnp.float32), {"x": jnp.asarray(r.normal(size=(rows, 6)), jnp.float32)}


def micro(batch, n: int, i: int):
    return jax.tree.map(lambda x: x[i::n], batch)


def test_the_step_and_a_key_are_always_given():
    """The key is fold_in(key(seed), step), so that a run that goes on draws what it would have drawn."""

    def noise(params, batch, given):
        return params * 0.0, {"weight": 1.0, "step": given["step"], "drawn": jax.random.uniform(given["key"])}

    step = jax.jit(train.update(train.grads(noise), optax.sgd(1.0), seed=7))
    state = train.init_state(jnp.ones(()), optax.sgd(1.0))
    for i in range(6):
        state, metrics = step(state, None)
        assert metrics["step"] == i
        assert metrics["drawn"] == jax.random.uniform(jax.random.fold_in(jax.random.key(7), i))


def test_each_microbatch_has_a_key_of_its_own():
    """The gradient of the whole is the sum of four parts', each with its number folded into the key: 1e-6."""
    params, batch = arrays()
    got, sums = jax.jit(train.accumulate(train.grads(loss), 4))(params, batch, {"key": KEY})
    parts = [
        jax.value_and_grad(lambda p, i=i: loss(p, micro(batch, 4, i), {"key": jax.random.fold_in(KEY, i)})[0])(params)
        for i in range(4)
    ]
    np.testing.assert_allclose(got, sum(g for _, g in parts), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(sums["loss"], sum(v for v, _ in parts), rtol=1e-6)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_both_passes_of_gradcache_draw_the_same(n):
    """Against one gradient through all rows, whose microbatches drop what their keys say: 1e-6."""
    params, batch = arrays()

    def whole(p):
        out = jnp.zeros((8, 5))
        for i in range(n):
            key = jax.random.fold_in(KEY, i) if n > 1 else KEY
            out = out.at[i::n].set(dropped(p, micro(batch, n, i), {"key": key}))
        return coupled(out, batch, {})[0]

    want, want_grad = jax.value_and_grad(whole)(params)
    got, sums = jax.jit(train.gradcache(dropped, coupled, n))(params, batch, {"key": KEY})
    np.testing.assert_allclose(sums["loss"], want, rtol=1e-6)
    np.testing.assert_allclose(got, want_grad, atol=1e-6 * np.abs(want_grad).max(), rtol=1e-6)


@pytest.mark.slow
def test_each_replica_has_a_key_of_its_own():
    """Eight replicas with equal rows drop different inputs, those of fold_in(fold_in(key, replica), microbatch)."""
    mesh = jax.make_mesh((8,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))
    params, batch = arrays(2)
    batch = jax.tree.map(lambda x: jnp.tile(x, (8, 1)), batch)
    g = parallel.reduce_once(train.accumulate(train.grads(loss), 2))
    with jax.set_mesh(mesh):
        placed = jax.device_put(batch, NamedSharding(mesh, P("dp")))
        got, _ = jax.jit(g)(params, placed, {"key": KEY, "other": jnp.ones(3)})
    want = jnp.zeros_like(params)
    for replica in range(8):
        for i in range(2):
            key = jax.random.fold_in(jax.random.fold_in(KEY, replica), i)
            part = jax.tree.map(lambda x, r=replica, i=i: x[2 * r + i : 2 * r + i + 1], batch)
            want += jax.grad(lambda p, part=part, key=key: loss(p, part, {"key": key})[0])(params)
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max(), rtol=0)


def test_keywords_are_traced_and_not_donated():
    """A jitted step takes other arrays under the same names without compiling again, and leaves them alive."""
    scaled = lambda p, b, given: ((p * given["scale"]["x"]).sum(), {"weight": 1.0})
    step = chex.assert_max_traces(train.update(train.grads(scaled), optax.sgd(1.0)), n=1)
    step, state = jax.jit(step, donate_argnums=0), train.init_state(jnp.ones(2), optax.sgd(1.0))
    for x in (1.0, 3.0):
        scale = {"x": jnp.full(2, x)}
        before = np.asarray(state.params)
        state, _ = step(state, None, scale=scale)
        assert (before - state.params == x).all() and scale["x"].tolist() == [x, x]


def test_what_is_wrong_is_named():
    sgd, start = optax.sgd(1.0), lambda **extra: train.init_state(jnp.ones(()), optax.sgd(1.0), **extra)
    two = lambda params, batch: (params, {"weight": 1.0})
    with pytest.raises(
        TypeError, match=r"\(params, batch\): expected \(params, batch, given\); add the third parameter"
    ):
        train.grads(two)
    with pytest.raises(TypeError, match=r"expected \(params, batch, given\)"):
        train.gradcache(two, coupled, 2)
    with pytest.raises(TypeError, match=r"\(o, b\): expected \(outputs, batch, given\)"):
        train.gradcache(dropped, lambda o, b: (o, {}), 2)
    fine = lambda params, batch, given: (params, {"weight": 1.0})
    for name, options in (("key", {}), ("step", {}), ("ema", {"reads": ("ema",)})):
        with pytest.raises(ValueError, match=f"{name}: given twice"):
            train.update(train.grads(fine), sgd, **options)(start(ema=1.0), None, **{name: 0})
    with pytest.raises(
        ValueError, match=r"needs 'loss_scale' and was given \['key', 'step'\]; call step\(state, batch, loss"
    ):
        train.update(train.grads(train.precision.scaled(fine)), sgd)(start(), None)


def test_an_evaluation_draws_the_same_each_time():
    """Its key is folded from the number of the batch; the step, extras and keywords are those of training."""

    def noisy(params, batch, given):
        drawn = jax.random.uniform(given["key"])
        return drawn, {"weight": 1.0, "step": given["step"], "both": given["offset"] + given["seen"]}

    evaluate = evaluator(jax.jit(noisy), [None, None], given={"offset": 2.0}, reads=("seen",), seed=3)
    state = train.init_state(jnp.ones(()), optax.sgd(1.0), seen=jnp.float32(1))
    rows = [evaluate(train.TrainState(jnp.int32(i), state.params, state.opt_state, state.extra)) for i in (4, 9)]
    want = [float(jax.random.uniform(jax.random.fold_in(jax.random.key(3), i))) for i in range(2)]
    assert [r["eval_step"] for r in rows] == [4, 9] and all(r["eval_both"] == 3 for r in rows)
    np.testing.assert_allclose([r["eval_loss"] for r in rows], np.mean(want), rtol=1e-6)
