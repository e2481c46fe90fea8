"""Half precision: stochastic rounding without bias, loss scaling as torch's GradScaler, compute in another dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fdel import train
from fdel.params.spec import Param, ones

# ---- stochastic rounding -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_rounding_is_unbiased() -> None:
    """Each value becomes one of its two neighbours, with a mean within five standard errors of it."""
    r = np.random.default_rng(0)
    x = jnp.asarray(r.normal(size=64) * 10.0 ** r.integers(-30, 30, 64), jnp.float32)
    got = np.asarray(
        jax.vmap(train.precision.round_stochastic, (None, 0))(x, jax.random.split(jax.random.key(1), 4000)), np.float64
    )
    x = np.asarray(x, np.float64)
    gap = 2.0 ** (np.floor(np.log2(np.abs(x))) - 7)  # bfloat16 has 7 bits after the first
    low = np.floor(x / gap) * gap
    assert ((got == low) | (got == low + gap)).all()
    p = (x - low) / gap
    assert (np.abs((got - low).mean(0) / gap - p) < 5 * np.sqrt(p * (1 - p) / 4000) + 1e-12).all()


@pytest.mark.slow
def test_rounding_guards_its_ends() -> None:
    """No finite value becomes infinite or NaN, and no NaN or infinity becomes finite; exact values stay."""
    top = float(jnp.finfo(jnp.float32).max)
    x = jnp.array([top, -top, jnp.inf, -jnp.inf, jnp.nan, 0.0, -0.0, 1.0, -1.5, 2.0**-130], jnp.float32)
    largest = float(jnp.finfo(jnp.bfloat16).max)
    for seed in range(20):
        got = np.asarray(train.precision.round_stochastic(x, jax.random.key(seed)), np.float32)
        np.testing.assert_array_equal(got, [largest, -largest, np.inf, -np.inf, np.nan, 0, 0, 1, -1.5, 2.0**-130])


@pytest.mark.slow
def test_small_updates_are_not_lost() -> None:
    """1000 steps of +1e-5 on 1.0 in bfloat16: to nearest nothing, stochastically 0.01 on average; equal when repeated."""
    loss = lambda p, b, _: (-1e-5 * sum(x.astype(jnp.float32).sum() for x in p.values()), {"weight": 1.0})
    params = {"w": jnp.ones(512, jnp.bfloat16), "v": jnp.ones(512, jnp.bfloat16), "f": jnp.ones(2)}

    def run(**options):
        step = train.update(train.grads(loss), optax.sgd(1.0), **options)
        state = train.init_state(params, optax.sgd(1.0))
        return jax.jit(lambda s: jax.lax.fori_loop(0, 1000, lambda i, s: step(s, None)[0], s))(state).params

    assert (run()["w"] == 1).all()
    first, again, other = (run(apply=train.precision.add_stochastic(seed)) for seed in (0, 0, 1))
    for name in "wv":
        assert first[name].dtype == jnp.bfloat16
        np.testing.assert_allclose(first[name].astype(jnp.float32).mean(), 1.01, atol=2e-3)
    np.testing.assert_allclose(first["f"], 1.01, rtol=1e-4)
    assert (first["w"] == again["w"]).all() and (first["w"] != other["w"]).any() and (first["w"] != first["v"]).any()


# ---- loss scaling --------------------------------------------------------------------------------------------------


def test_scale_follows_gradscaler() -> None:
    """A sequence of overflows and good steps: skipped steps and scales as torch.amp.GradScaler's, step by step."""
    torch = pytest.importorskip("torch", reason="needs the torch extra")
    loss = lambda p, b, _: ((p * b).sum(), {"weight": 1.0})
    optimizer = optax.sgd(0.1)
    g = train.normalize(train.grads(train.precision.scaled(loss)))
    step = jax.jit(
        train.precision.rescale(train.update(g, optimizer, reads=("loss_scale",), skip_nonfinite=True), every=3)
    )
    state = train.init_state(jnp.ones(2), optimizer, loss_scale=train.precision.loss_scale(8.0))

    weight = torch.nn.Parameter(torch.ones(2))
    sgd = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    for bad in map(int, "0000110100000010"):
        batch = np.array([0.5, np.inf if bad else 1.0], np.float32)
        before = float(state.params[0]), scaler.get_scale()
        state, metrics = step(state, jnp.asarray(batch))
        sgd.zero_grad()
        scaler.scale((weight * torch.tensor(batch)).sum()).backward()
        scaler.step(sgd)
        scaler.update()
        assert metrics["loss_scale"] == before[1] and state.extra["loss_scale"]["scale"] == scaler.get_scale()
        assert metrics["skipped"] == bad == (state.params[0] == before[0])
        np.testing.assert_allclose(state.params, weight.detach().numpy(), rtol=1e-6)


@pytest.mark.slow
def test_scale_stays_finite() -> None:
    optimizer = optax.sgd(0.1)
    loss = lambda p, b, _: (p * 0.0 * b, {"weight": 1.0})
    g = train.grads(train.precision.scaled(loss))
    step = train.precision.rescale(train.update(g, optimizer, reads=("loss_scale",), skip_nonfinite=True), every=1)
    state = train.init_state(jnp.float32(1), optimizer, loss_scale=train.precision.loss_scale(2.0**127))
    state, _ = step(state, 1.0)
    assert state.extra["loss_scale"]["scale"] == 2.0**127
    with pytest.raises(ValueError, match=r"build it by update\(..., skip_nonfinite=True\)"):
        train.precision.rescale(train.update(g, optimizer, reads=("loss_scale",)))(state, 1.0)


def small(p, b, given):
    """A loss whose float16 gradients vanish: 1e-4 squared is below 2^-25."""
    h = jnp.tanh(b["x"].astype(p["w"].dtype) @ p["w"])
    return ((h.astype(jnp.float32) @ p["v"].astype(jnp.float32)) * 1e-8).sum(), {"weight": jnp.float32(len(h))}


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 4])
def test_scaled_gradients(n: int) -> None:
    """Float16 gradients that vanish are those of float32 within 1e-2 under a scale, also when added up; metrics stay."""
    r = np.random.default_rng(2)
    p = {"w": jnp.asarray(r.normal(size=(6, 5)), jnp.float32), "v": jnp.asarray(r.normal(size=5), jnp.float32)}
    batch = {"x": jnp.asarray(r.normal(size=(8, 6)), jnp.float32)}
    want, want_sums = train.grads(small)(p, batch)
    half = train.precision.compute(small, jnp.float16)
    lost, _ = train.accumulate(train.grads(half), n)(p, batch)
    assert (lost["w"] == 0).mean() > 0.5
    got, sums = train.accumulate(train.grads(train.precision.scaled(half)), n)(
        p, batch, {"loss_scale": train.precision.loss_scale()}
    )
    for name in p:
        assert got[name].dtype == jnp.float32
        np.testing.assert_allclose(got[name], want[name], atol=1e-2 * np.abs(want[name]).max(), rtol=0)
    np.testing.assert_allclose(sums["loss"], want_sums["loss"], rtol=1e-2)
    assert sums["weight"] == 8


@pytest.mark.slow
def test_scaled_outputs() -> None:
    """`gradcache` takes a scaled `outputs`: the same gradients, and the objective sees what it saw."""
    r = np.random.default_rng(3)
    p = {"w": jnp.asarray(r.normal(size=(6, 5)), jnp.float32)}
    batch = {"x": jnp.asarray(r.normal(size=(8, 6)), jnp.float32)}
    half = lambda p, b, _: {
        "h": jnp.tanh(b["x"].astype(p["w"].dtype) @ p["w"]).astype(jnp.float32),
        "id": b["x"][:, 0] > 0,
    }
    outputs = train.precision.compute(half, jnp.float16)
    wide = lambda p, b, _: {"h": jnp.tanh(b["x"] @ p["w"]), "id": b["x"][:, 0] > 0}
    objective = lambda out, b, _: (1e-8 * jnp.sort(out["h"], 0).std(), {"weight": out["id"].sum()})
    want, sums = train.gradcache(outputs, objective, 1)(p, batch)
    big = {"loss_scale": train.precision.loss_scale(2.0**20)}
    for n in (1, 4):
        got, scaled_sums = train.gradcache(train.precision.scaled(outputs), objective, n)(p, batch, big)
        exact, _ = train.gradcache(wide, objective, 1)(p, batch)
        np.testing.assert_allclose(got["w"], exact["w"], atol=1e-2 * np.abs(exact["w"]).max(), rtol=0)
        assert scaled_sums == sums
    assert (want["w"] == 0).mean() > 0.5


def test_scaled_wants_float32() -> None:
    with pytest.raises(ValueError, match="parameters are float16; keep them in float32"):
        train.precision.scaled(small)({"w": jnp.ones(2, jnp.float16)}, {}, {"loss_scale": train.precision.loss_scale()})


# ---- compute dtype -------------------------------------------------------------------------------------------------


def test_compute() -> None:
    """The loss sees bfloat16, the gradient is that of the casts in float32, and integers stay."""
    seen = []

    def loss(p, b, given):
        seen.append(jax.tree.map(lambda x: str(x.dtype), p))
        return (p["w"] * b).sum().astype(jnp.float32), {"weight": 1.0}

    g = jax.value_and_grad(lambda w: train.precision.compute(loss, jnp.bfloat16)({"w": w, "i": jnp.arange(2)}, 1.01)[0])
    value, grad = g(jnp.array([1.001, 2.0]))
    assert seen.pop() == {"w": "bfloat16", "i": "int32"} and grad.dtype == jnp.float32
    np.testing.assert_allclose(grad, jnp.bfloat16(1.01).astype(jnp.float32))
    spec = {"w": Param("embed", (2,), ones), "i": Param("embed", (2,), ones, dtype="float32")}
    train.precision.compute(loss, jnp.bfloat16, spec)({"w": jnp.ones(2), "i": jnp.ones(2)}, 1.0)
    assert seen.pop() == {"w": "bfloat16", "i": "float32"}
