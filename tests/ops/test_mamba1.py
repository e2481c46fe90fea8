"""Mamba's selective scan against its definition in float64 numpy, and transformers' scan and state update."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel.ops.batch import Slots, State, packed, paged
from fdel.ops.carry import Carry
from fdel.ops.ssm import selective_scan

C, S = 12, 8


def draw(t: int, extreme: bool = False) -> dict[str, np.ndarray]:
    """Steps dt from 0.01 to 5; if extreme, some of 1000 (the state is forgotten) and some of 0 (nothing happens)."""
    rng = np.random.default_rng(t)
    dt = np.exp(rng.uniform(np.log(0.01), np.log(5), (t, C)))
    if extreme:
        dt[rng.random(dt.shape) < 0.1] = 1000
        dt[rng.random(dt.shape) < 0.1] = 0
    x = dict(x=rng.normal(size=(t, C)), dt=dt, a=-rng.uniform(0.05, 8, (C, S)))
    x |= dict(b=rng.normal(size=(t, S)), c=rng.normal(size=(t, S)), d=rng.normal(size=C))
    return {k: v.astype(np.float32) for k, v in x.items()}


def recurrence(x, dt, a, b, c, d, xp=np):
    """One token: h <- exp(dt a) h + dt x b^T; y = h c + d x."""

    def step(h, token):
        x, dt, b, c = token
        h = xp.exp(dt[:, None] * a) * h + (dt * x)[:, None] * b
        return h, h @ c + d * x

    tokens, h = (x, dt, b, c), xp.zeros((C, S))
    if xp is jnp:
        return jax.lax.scan(step, h, tokens)[1]
    a, outs = a.astype(np.float64), []
    for token in zip(*(z.astype(np.float64) for z in tokens), strict=True):
        h, y = step(h, token)
        outs.append(y)
    return np.stack(outs)


@partial(jax.jit, static_argnums=1)
def chunked(p, chunk):
    batch = packed(np.zeros((1, len(p["x"])), int))
    x, dt, b, c = (p[k][None] for k in ("x", "dt", "b", "c"))
    return selective_scan(batch, None, 0, x, dt, p["a"], b, c, d=p.get("d"), chunk=chunk)[0][0]


def assert_close(got, want, tolerance):
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * np.abs(want).max())


@pytest.mark.parametrize(("t", "chunk"), [(64, 16), (37, 12)])
def test_definition(t, chunk):
    for p in (draw(t), draw(t, extreme=True)):
        assert_close(chunked(p, chunk), recurrence(**p), 1e-5)
    no_skip = {k: v for k, v in p.items() if k != "d"}
    assert_close(chunked(no_skip, chunk), recurrence(**no_skip, d=np.zeros(C)), 1e-5)


def test_transformers():
    """Outputs and state equal Mamba's scan over 70 tokens, and then its update by one token."""
    torch = pytest.importorskip("torch", reason="needs the torch extra")
    mamba = pytest.importorskip("transformers.models.mamba.modeling_mamba")
    p = draw(71)
    t = {k: torch.tensor(v) for k, v in p.items()}
    x, dt, b, c = (t[k][None, :70].mT for k in ("x", "dt", "b", "c"))
    want, state = mamba.mamba_selective_scan(x, dt, t["a"], b, c, D=t["d"], return_last_state=True)
    state = state.clone()

    table, carry = np.zeros((3, 1), int), Carry(State(slots=Slots(None, jnp.full((2, 3, C, S), jnp.nan))))
    x, dt, b, c = (np.concatenate([p[k][:70], np.zeros_like(p[k][:26])]) for k in ("x", "dt", "b", "c"))
    batch = paged([(2, 0, [0] * 70)], table, block=32)[1]
    run = jax.jit(selective_scan)
    y, carry = run(batch, carry, 1, x, dt, p["a"], b, c, d=p["d"])
    assert_close(y[:70], want[0].mT.numpy(), 1e-5)
    assert_close(carry.slots.ssm[1, 2], state[0].numpy(), 1e-5)

    want = mamba.mamba_selective_state_update(
        state, t["x"][70:], t["dt"][70:], t["a"], t["b"][70:], t["c"][70:], t["d"]
    )
    x, dt, b, c = (p[k][70:] for k in ("x", "dt", "b", "c"))
    y, carry = run(paged([(2, 70, [0])], table)[1], carry, 1, x, dt, p["a"], b, c, d=p["d"])
    assert_close(y, want.numpy(), 1e-5)
    assert_close(carry.slots.ssm[1, 2], state[0].numpy(), 1e-5)
