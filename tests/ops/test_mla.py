"""Latent attention against its formula in float64, and the absorbed paged form against the expanded one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel import ops, params
from fdel.ops.paged import row_width
from fdel.ops.platform import tracing_for
from fdel.ops.weights import LowRank, dense
from fdel.params import Param

T, N, C, HN, R, HV = 13, 3, 16, 12, 6, 10
SPEC = {
    k: Param("heads head_dim latent", (N, n, C), params.spec.zeros, hf_axes="(heads head_dim) latent")
    for k, n in (("k", HN), ("v", HV))
}
MASKS = {"causal": ops.Mask(0.3), "window": ops.Mask(0.3, window=4)}


def inputs():
    r = np.random.default_rng(0)
    array = lambda *s: jnp.asarray(r.normal(size=s), jnp.float32)
    return array(2, T, N, HN + R), array(2, T, C + R), {"k": array(N, HN, C) / 3, "v": array(N, HV, C) / 3}


def weights(kind):
    _, _, w = inputs()
    if kind == "int8":
        return params.quantize(w, "int8", ".", spec=SPEC)
    if kind == "low_rank":
        r = np.random.default_rng(1)
        factor = lambda *s: jnp.asarray(r.normal(size=s) / 4, jnp.float32)
        return {k: LowRank(a, factor(2, C), factor(*a.shape[:2], 2), jnp.float32(0.7)) for k, a in w.items()}
    return w


def formula(q, kv, w, window=None):
    q, kv, w_k, w_v = (np.asarray(a, np.float64) for a in (q, kv, dense(w["k"]), dense(w["v"])))
    out = np.zeros((*q.shape[:-1], HV))
    for b, t, n in np.ndindex(q.shape[:-1]):
        first = 0 if window is None else max(0, t - window + 1)
        past = kv[b, first : t + 1]
        k = np.concatenate([past[:, :C] @ w_k[n].T, past[:, C:]], -1)
        s = 0.3 * k @ q[b, t, n]
        p = np.exp(s - s.max())
        out[b, t, n] = (p / p.sum()) @ (past[:, :C] @ w_v[n].T)
    return out


def plain(q, kv, w):
    """The formula on whole arrays, which jax differentiates."""
    k = jnp.einsum("btc,nhc->btnh", kv[..., :C], w["k"])
    s = jnp.einsum("btnh,bsnh->bnts", q[..., :HN], k) + jnp.einsum("btnr,bsr->bnts", q[..., HN:], kv[..., C:])
    p = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((T, T), bool)), 0.3 * s, -jnp.inf))
    return jnp.einsum("bnts,bsc,nhc->btnh", p, kv[..., :C], w["v"])


def serve(q, kv, w, mask, chunks, block):
    """Feed two sequences in chunks, interleaved, through pages that hold NaN at first."""
    table = np.array([[1, 3, 5, 7], [0, 2, 4, 6]])
    state = ops.Carry(ops.State(ops.Pages(jnp.full((2, 8, 1, 4, row_width(C + R)), jnp.nan), None)))
    run = jax.jit(lambda batch, state, q, kv: ops.mla(batch, state, 1, q, kv, w["k"], w["v"], mask=mask))
    out, start = [[], []], 0
    for n in chunks:
        _, batch = ops.paged([(i, start, [0] * n) for i in range(2)], table, block=block)
        size = -(-n // block) * block
        new = [np.zeros((2, size, *x.shape[2:]), np.float32) for x in (q, kv)]
        for padded, x in zip(new, (q, kv), strict=True):
            padded[:, :n] = x[:, start : start + n]
        y, state = run(batch, state, *(x.reshape(2 * size, *x.shape[2:]) for x in new))
        for i in range(2):
            out[i].append(np.asarray(y)[i * size : i * size + n])
        start += n
    return np.stack([np.concatenate(o) for o in out])


@pytest.mark.parametrize("kind", ["array", "int8", "low_rank"])
def test_expanded_form_equals_formula(kind):
    (q, kv, _), w = inputs(), weights(kind)
    batch = ops.packed(jnp.zeros((2, T), int))
    run = jax.jit(lambda q, kv, w: ops.mla(batch, None, 0, q, kv, w["k"], w["v"], mask=MASKS["causal"]))
    got, state = run(q, kv, w)
    assert state == ops.Carry() and got.shape == (2, T, N, HV)
    np.testing.assert_allclose(got, formula(q, kv, w), atol=5e-6)


@pytest.mark.parametrize("kind", ["array", "int8", "low_rank"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("chunks,block", [([6, 7], 4), ([1] * T, 1)])
def test_absorbed_form_on_pages_equals_formula(kind, mask, chunks, block):
    (q, kv, _), w = inputs(), weights(kind)
    want = formula(q, kv, w, MASKS[mask].window)
    np.testing.assert_allclose(serve(q, kv, w, MASKS[mask], chunks, block), want, atol=5e-6)


@pytest.mark.parametrize(("chunks", "block"), [([6, 7], 4), ([1] * T, 1)])
def test_rows_of_a_tpu_end_with_zeros(chunks, block):
    (q, kv, _), w = inputs(), weights("array")
    with tracing_for("tpu"), ops.use(paged_attention="xla"):
        assert [row_width(n) for n in (C + R, 576, 128)] == [128, 640, 128]
        got = serve(q, kv, w, MASKS["causal"], chunks, block)
    np.testing.assert_allclose(got, formula(q, kv, w), atol=5e-6)


def test_pages_hold_latents_only():
    q, kv, w = inputs()
    _, batch = ops.paged([(0, 0, [0] * T)], np.array([[2, 0, 1, 3]]), block=T)
    state = ops.Carry(ops.State(ops.Pages(jnp.zeros((1, 4, 1, 4, C + R)), None)))
    run = jax.jit(lambda *a: ops.mla(*a, w["k"], w["v"], mask=MASKS["causal"]))
    _, new = run(batch, state, 0, q[0], kv[0])
    new = new.pages
    assert new.v is None
    np.testing.assert_array_equal(new.k[0, jnp.array([2, 0, 1, 3]), 0].reshape(16, -1)[:T], kv[0])
    with pytest.raises(ValueError, match="a Paged batch needs state"):
        ops.mla(batch, None, 0, q[0], kv[0], w["k"], w["v"], mask=MASKS["causal"])
