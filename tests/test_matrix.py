"""Combinations that no list of tests has: family x loss x mesh x adapter x quantization, drawn from a seed.

What each must satisfy: a step on the mesh is the step on one device (loss to 1e-5, gradients to 1e-4 of each array's
largest), and steps along its own gradient lower its loss. CI draws SOME of them, `make matrix` all.
"""

import random
from functools import partial

import jax
import numpy as np
import optax
import pytest

from fdel import models, params
from fdel.train import losses
from tests.models import tiny

SOME, ALL, SEED = 4, 60, 5
ROWS, LENGTH = 4, 12
FAMILIES = [n for n, e in tiny.TINY.items() if ":" not in n and e.causal]
MESHES = [{"fsdp": 4}, {"dp": 2, "tp": 2}, {"sp": 2, "tp": 2}, {"fsdp": 2, "ep": 2}, {"ep": 2, "tp": 2}, {"sp": 4}]
PAIRS = ("dpo", "cpo", "orpo")
LOSSES = ("sft", "dft", "z_loss", "reward", *PAIRS, "kto")
FORMS = (None, None, "int8", "fp8", "nf4")


def draw(i: int) -> tuple:
    """A combination: (family, loss, mesh, whether with adapters, form of the frozen weights).

    The family is the one with the largest of numbers that belong to their names: a new one changes few combinations.
    """
    rng = random.Random(f"{SEED} {i}")
    family = max(FAMILIES, key=lambda name: random.Random(f"{SEED} {i} {name}").random())
    loss, mesh = rng.choice(LOSSES), rng.choice(MESHES)
    adapted = rng.random() < 0.6
    return family, loss, mesh, adapted, rng.choice(FORMS) if adapted else None


def objective(name: str, family, cfg):
    """Loss(params, batch) and the shape of its tokens."""
    of_tokens = {"sft": losses.nll, "dft": losses.dft, "z_loss": partial(losses.nll, z_loss=1e-2)}
    if name in of_tokens:
        return losses.sft(family, cfg, loss=of_tokens[name]), (ROWS, LENGTH)
    if name == "reward":
        return losses.reward(family, cfg), (ROWS, 2, LENGTH)
    outputs = losses.completion_logps(family, cfg)
    made = {"dpo": losses.dpo_objective, "cpo": losses.cpo_objective, "orpo": losses.orpo_objective}
    of = losses.kto_objective() if name == "kto" else made[name]()
    loss = lambda p, batch, given=None: of(outputs(p, batch), batch)
    return loss, (ROWS, LENGTH) if name == "kto" else (ROWS, 2, LENGTH)


@pytest.mark.slow
@pytest.mark.parametrize("i", [i if i < SOME else pytest.param(i, marks=pytest.mark.matrix) for i in range(ALL)])
def test_a_drawn_combination(i):
    name, loss_name, axes, adapted, form = draw(i)
    family = models.family(name)
    cfg = family.Config.from_hf(tiny.TINY[name].values)
    spec = family.spec(cfg)
    mesh = params.make_mesh(axes, devices=jax.devices()[:4])
    loss, shape = objective(loss_name, family, cfg)
    rng = np.random.default_rng(i)
    batch = {"tokens": rng.integers(3, 100, shape)}
    if loss_name in ("dpo", "kto"):
        batch["ref_logps"] = rng.normal(-30, 1, shape[:-1]).astype(np.float32)
    if loss_name == "kto":
        batch |= {"label": np.arange(ROWS) % 2 == 0}
        batch["kl"] = {"tokens": rng.integers(3, 100, shape), "ref_logps": batch["ref_logps"] - 1}

    if loss_name == "reward":
        spec = models.heads.spec(family, cfg, "sequence")
    weights = jax.jit(lambda k: params.init(spec, k))(jax.random.key(i))
    weights = jax.tree.map(lambda x: x + 0.05 * jax.random.normal(jax.random.key(x.size), x.shape), weights)
    if adapted:
        small = params.quantize(weights, form, spec=spec) if form else weights
        grown = params.lora.add(small, 4, 8.0, key=jax.random.key(1), spec=spec)
        trained, frozen = params.lora.split(grown)
        trained = jax.tree.map(lambda x: x + 0.05, trained)
        full = lambda p: params.lora.join(p, frozen)
    else:
        trained, full = weights, lambda p: p

    def value(p, batch):
        total, sums = loss(full(p), batch)
        return total / sums["weight"]

    run = jax.jit(jax.value_and_grad(value))
    want, slope = run(trained, batch)
    assert np.isfinite(want)
    with jax.set_mesh(mesh):
        placed = jax.device_put(batch, params.batch_sharding(mesh))
        at = params.shardings(spec, mesh) if trained is weights else jax.NamedSharding(mesh, jax.P())
        got, grads = run(jax.device_put(trained, at), placed)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(slope), strict=True):
        np.testing.assert_allclose(a, b, atol=max(1e-4 * np.abs(b).max(), 1e-6), rtol=0)
    norm = optax.tree.norm(slope)
    moved = jax.tree.map(lambda p, g: p - 1e-3 / norm * g, trained, slope)  # so little that routers choose alike
    if loss_name != "dft":  # whose weights have no gradient, so that its value is not what falls
        assert run(moved, batch)[0] < want, (name, loss_name, float(norm))
