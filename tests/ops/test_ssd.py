"""Mamba-2's recurrence against its definition in float64 numpy, and transformers' chunk scan and state update."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel.ops.batch import Slots, State, packed, paged
from fdel.ops.carry import Carry
from fdel.ops.ssm import ssd

N, H, G, S = 6, 10, 2, 16


def draw(t: int, extreme: bool = False) -> dict[str, np.ndarray]:
    """Steps dt from 0.01 to 5; if extreme, some of 1000 (the state is forgotten) and some of 0 (nothing happens)."""
    rng = np.random.default_rng(t)
    dt = np.exp(rng.uniform(np.log(0.01), np.log(5), (t, N)))
    if extreme:
        dt[rng.random(dt.shape) < 0.1] = 1000
        dt[rng.random(dt.shape) < 0.1] = 0
    x = dict(x=rng.normal(size=(t, N, H)), dt=dt, a=-rng.uniform(0.05, 8, N))
    x |= dict(b=rng.normal(size=(t, G, S)), c=rng.normal(size=(t, G, S)), d=rng.normal(size=N))
    return {k: v.astype(np.float32) for k, v in x.items()}


def recurrence(x, dt, a, b, c, d, xp=np):
    """One token: h <- exp(dt a) h + dt x b^T; y = h c + d x; head n reads group n // (N / G)."""

    def step(h, token):
        x, dt, b, c = token
        b, c = (xp.repeat(z, N // G, 0) for z in (b, c))
        h = xp.exp(dt * a)[:, None, None] * h + (dt[:, None] * x)[:, :, None] * b[:, None, :]
        return h, xp.einsum("nhs,ns->nh", h, c) + d[:, None] * x

    tokens, h = (x, dt, b, c), xp.zeros((N, H, S))
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
    return ssd(batch, None, 0, x, dt, p["a"], b, c, d=p.get("d"), chunk=chunk)[0][0]


def assert_close(got, want, tolerance):
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * np.abs(want).max())


@pytest.mark.parametrize(("t", "chunk"), [(100, 64), (37, 12)])
def test_definition(t, chunk):
    for p in (draw(t), draw(t, extreme=True)):
        assert_close(chunked(p, chunk), recurrence(**p), 1e-5)
    no_skip = {k: v for k, v in p.items() if k != "d"}
    assert_close(chunked(no_skip, chunk), recurrence(**no_skip, d=np.zeros(N)), 1e-5)


def test_transformers():
    """Outputs and state equal Mamba-2's chunk scan over 70 tokens, and then its update by one token."""
    torch = pytest.importorskip("torch", reason="needs the torch extra")
    mamba2 = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    p = draw(71)
    t = {k: torch.tensor(v) for k, v in p.items()}
    x, dt, b, c = (t[k][None, :70] for k in ("x", "dt", "b", "c"))
    want, state = mamba2.mamba2_chunk_scan(x, dt, t["a"], b, c, 32, D=t["d"], return_final_states=True)
    state = state.clone()

    table, carry = np.zeros((3, 1), int), Carry(State(slots=Slots(None, jnp.full((2, 3, N, H, S), jnp.nan))))
    x, dt, b, c = (np.concatenate([p[k][:70], np.zeros_like(p[k][:26])]) for k in ("x", "dt", "b", "c"))
    batch = paged([(2, 0, [0] * 70)], table, block=32)[1]
    run = jax.jit(ssd)
    y, carry = run(batch, carry, 1, x, dt, p["a"], b, c, d=p["d"])
    assert_close(y[:70], want[0].numpy(), 1e-5)
    assert_close(carry.slots.ssm[1, 2], state[0].numpy(), 1e-5)

    last = {k: v[70:] for k, v in t.items() if k in ("x", "dt", "b", "c")}
    a, d = t["a"][:, None, None], t["d"][:, None]
    want = mamba2.mamba2_selective_state_update(state, last["x"], last["dt"][..., None], a, last["b"], last["c"], d)
    x, dt, b, c = (p[k][70:] for k in ("x", "dt", "b", "c"))
    y, carry = run(paged([(2, 70, [0])], table)[1], carry, 1, x, dt, p["a"], b, c, d=p["d"])
    assert_close(y, want.numpy(), 1e-5)
    assert_close(carry.slots.ssm[1, 2], state[0].numpy(), 1e-5)


def test_heads_must_divide_into_groups():
    p = draw(4)
    x, dt, b, c = (p[k][None] for k in ("x", "dt", "b", "c"))
    with pytest.raises(ValueError, match="5 heads do not divide into 2 groups"):
        ssd(packed(np.zeros((1, 4), int)), None, 0, x[:, :, :5], dt[..., :5], p["a"][:5], b, c)
