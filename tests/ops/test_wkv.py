"""RWKV-4's token mixing against its definition in float64 numpy; segments, padding, extreme keys, paged state."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel import ops
from fdel.ops.batch import Packed, Slots, State, packed, paged

C = 6
slow = partial(pytest.param, marks=pytest.mark.slow)


def draw(t: int, spread: float = 1.0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(t)
    p = dict(k=spread * rng.normal(size=(t, C)), v=rng.normal(size=(t, C)), decay=-np.exp(rng.normal(size=C)))
    return {k: v.astype(np.float32) for k, v in (p | {"first": rng.normal(size=C)}).items()}


def definition(k, v, decay, first):
    """The sums as they are written, in float64; exponents shifted by the greatest."""
    k, v, decay, first = (np.asarray(x, np.float64) for x in (k, v, decay, first))
    out = []
    for t in range(len(k)):
        e = np.stack([k[i] + (t - 1 - i) * decay for i in range(t)] + [k[t] + first])
        w = np.exp(e - e.max(0))
        out.append((w * v[: t + 1]).sum(0) / w.sum(0))
    return np.stack(out)


@partial(jax.jit, static_argnames="chunk")
def run(p: dict, batch=None, chunk=16):
    batch = packed(np.zeros((1, len(p["k"])), int)) if batch is None else batch
    return ops.wkv(batch, None, 0, p["k"][None], p["v"][None], p["decay"], p["first"], chunk=chunk)[0][0]


@pytest.mark.parametrize("t,chunk,spread", [(40, 16, 1.0), (40, 16, 60.0), slow(37, 8, 1.0), slow(5, 16, 300.0)])
def test_definition(t, chunk, spread):
    p = draw(t, spread)
    np.testing.assert_allclose(run(p, chunk=chunk), definition(**p), atol=2e-5)


def test_keys_far_below_zero_weigh_as_others_do():
    """A sequence that begins with them: the empty state has no weight at all, not e^0."""
    p = draw(20)
    low = p | {"k": p["k"] - 300}
    np.testing.assert_allclose(run(low), definition(**p), atol=5e-5)


def test_segments_and_padding_are_apart():
    p = draw(30)
    ids = np.repeat([0, 1, -1], [11, 14, 5])
    batch = Packed(np.zeros((1, 30), int), jnp.asarray(ids)[None])
    got = run(p | {"k": np.where(ids[:, None] < 0, np.nan, p["k"])}, batch)
    for a, b in ((0, 11), (11, 25)):
        want = definition(p["k"][a:b], p["v"][a:b], p["decay"], p["first"])
        np.testing.assert_allclose(got[a:b], want, atol=2e-5)
    shifted = ops.token_shift(batch, None, 0, p["v"][None])[0][0]
    np.testing.assert_array_equal(shifted[0], 0)
    np.testing.assert_array_equal(shifted[11], 0)
    np.testing.assert_allclose(shifted[1:11], p["v"][:10])


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [[40], [7, 33], [13, 1, 1, 25]])
def test_paged_in_parts_from_a_slot_of_nan(chunks):
    p, start, outs = draw(40), 0, []
    carry = ops.Carry(State(slots=Slots(jnp.full((2, 3, 1, C), jnp.nan), jnp.full((2, 3, C, 3), jnp.nan))))
    mix, shift = jax.jit(ops.wkv), jax.jit(ops.token_shift)
    for n in chunks:
        block = 1 if n == 1 else 4
        new, batch = paged([(2, start, list(range(start, start + n)))], np.zeros((3, 1), int), block=block)
        real, at = np.arange(len(new))[:, None] < n, np.minimum(new, 39)
        k, v = (jnp.asarray(np.where(real, p[i][at], np.nan)) for i in "kv")
        y, carry = mix(batch, carry, 1, k, v, p["decay"], p["first"])
        before, carry = shift(batch, carry, 1, v)
        np.testing.assert_allclose(before[0], p["v"][start - 1] if start else np.zeros(C))
        outs.append(np.asarray(y)[:n])
        start += n
    np.testing.assert_allclose(np.concatenate(outs), definition(**p), atol=2e-5)
    assert np.isnan(np.asarray(carry.slots.ssm)[0]).all()


@pytest.mark.slow
def test_gradients_are_those_of_the_definition():
    """Against central differences of the definition in float64, at three places of each argument: 2e-3."""
    p = draw(12)
    grads = jax.jit(jax.grad(lambda p: jnp.sum(run(p, chunk=4) ** 2)))(p)
    for name, x in p.items():
        for index in [tuple(np.random.default_rng(i).integers(s) for s in x.shape) for i in range(3)]:
            up, down = (x.astype(np.float64).copy() for _ in range(2))
            up[index] += 1e-5
            down[index] -= 1e-5
            high, low = ((definition(**(p | {name: y})) ** 2).sum() for y in (up, down))
            np.testing.assert_allclose(grads[name][index], (high - low) / 2e-5, rtol=2e-3, atol=2e-4)
