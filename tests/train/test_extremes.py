"""Largest and smallest numbers among the sums of a loss: over microbatches, devices and batches of evaluation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel import params, train
from fdel.train import extremes

X = np.array([3.0, -1.0, 7.0, 2.0, 5.0, 0.5, -4.0, 6.0], np.float32)


def loss(weights, batch, given):
    x = batch["x"] * weights["w"]
    found = {"top": extremes.among(x, x > -9), "low": extremes.among(x, x > 0, largest=False)}
    return x.sum(), {"weight": jnp.float32(len(x)), "none": extremes.among(x, x > 99), **found}


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_they_are_compared_and_not_added(parts) -> None:
    g = train.normalize(train.accumulate(train.grads(loss), parts))
    _, metrics = jax.jit(g)({"w": jnp.float32(2)}, {"x": X})
    assert {k: float(metrics[k]) for k in ("top", "low", "none", "loss")} == {
        "top": 14, "low": 1, "none": 0, "loss": float(2 * X.mean())}  # fmt: skip


def test_over_devices() -> None:
    g = train.normalize(train.parallel.reduce_once(train.accumulate(train.grads(loss), 2)))
    mesh = params.make_mesh({"dp": 4, "fsdp": 2})
    with jax.set_mesh(mesh):
        rows = jax.device_put(X, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("dp")))
        whole = jax.device_put(jnp.float32(2), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
        _, metrics = jax.jit(g)({"w": whole}, {"x": rows})
    assert {k: float(metrics[k]) for k in ("top", "low", "none")} == {"top": 14, "low": 1, "none": 0}


def test_over_batches_of_evaluation() -> None:
    state = train.init_state({"w": jnp.float32(2)}, train.optim.adamw(1e-3))
    found = train.evaluator(jax.jit(loss), [{"x": X[:4]}, {"x": X[4:]}])(state)
    assert (found["eval_top"], found["eval_low"], found["eval_none"]) == (14, 1, 0)
    assert found["eval_loss"] == pytest.approx(2 * X.mean())
