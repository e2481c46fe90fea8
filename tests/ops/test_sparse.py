"""Chosen keys against their formula in float64, one query after the other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel import ops
from fdel.ops import sparse
from fdel.ops.paged import row_width
from fdel.ops.platform import tracing_for

N, C, R, HN, HV, D, COUNT = 3, 8, 8, 12, 10, 6, 5


def draw(t: int, seed: int = 0) -> dict:
    rng = np.random.default_rng(seed)
    shapes = {"q": (t, N, HN + R), "kv": (t, C + R), "w_k": (N, HN, C), "w_v": (N, HV, C), "iq": (t, 2, D), "ik": (t, D),
              "weights": (t, 2)}  # fmt: skip
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def definition(q, kv, w_k, w_v, iq, ik, weights, begin, end, count=COUNT) -> np.ndarray:
    """Of query t, over keys begin[t] to t, of which its best `count` are kept."""
    out = np.zeros((len(q), N, HV))
    q, kv, w_k, w_v = (x.astype(np.float64) for x in (q, kv, w_k, w_v))
    for t in range(end):
        score = weights[t].astype(np.float64) @ np.maximum(iq[t].astype(np.float64) @ ik[begin[t] : t + 1].T, 0)
        keys = begin[t] + np.argsort(-score, kind="stable")[:count]
        k = np.concatenate([np.einsum("sc,nhc->snh", kv[keys, :C], w_k), np.repeat(kv[keys, None, C:], N, 1)], -1)
        s = np.einsum("nh,snh->ns", q[t], k) * 0.3
        p = np.exp(s - s.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        out[t] = np.einsum("ns,sc,nhc->nh", p, kv[keys, :C], w_v)
    return out


def run(batch, carry, p, count=COUNT):
    chosen, carry = ops.choose_keys(batch, carry, 1, 0, p["iq"], p["ik"], p["weights"], count=count)
    return ops.sparse_mla(batch, carry, 0, 0, p["q"], p["kv"], p["w_k"], p["w_v"], chosen, scale=0.3)


def rows(p: dict) -> dict:
    return {k: x if k in ("w_k", "w_v") else x[None] for k, x in p.items()}


@pytest.mark.parametrize("t", [23, 150])
def test_segments_choose_among_their_own(t, monkeypatch):
    """Two sequences in a row, in parts of 64 queries where it is longer, padding at the end: 1e-5."""
    p, cut = draw(t), 9
    segments = np.where(np.arange(t) < cut, 0, np.where(np.arange(t) < t - 2, 1, -1))
    batch = ops.Packed(jnp.arange(t)[None], jnp.asarray(segments)[None])
    got = jax.jit(lambda p: run(batch, ops.Carry(), p)[0])(rows(p))[0]
    want = definition(**p, begin=np.where(np.arange(t) < cut, 0, cut), end=t - 2)
    np.testing.assert_allclose(got[: t - 2], want[: t - 2], atol=1e-5)


def test_more_than_there_are_is_latent_attention():
    p = rows(draw(12))
    batch = ops.packed(jnp.zeros((1, 12), jnp.int32))
    want, _ = ops.mla(batch, None, 0, p["q"], p["kv"], p["w_k"], p["w_v"], mask=ops.Mask(0.3))
    np.testing.assert_allclose(run(batch, ops.Carry(), p, count=40)[0], want, atol=1e-5)


def test_gradients_pass_chosen_keys_alone():
    """Equal with and without parts; the indexer has none."""
    p = rows(draw(70))
    batch = ops.packed(jnp.zeros((1, 70), jnp.int32))
    loss = lambda p: (run(batch, ops.Carry(), p)[0] ** 2).sum()
    g = jax.jit(jax.grad(loss))(p)
    assert all(float(jnp.abs(g[k]).max()) == 0 for k in ("iq", "ik", "weights"))
    with pytest.MonkeyPatch.context() as m:
        m.setattr(sparse, "QUERIES", 70)
        whole = jax.jit(jax.grad(lambda p: loss(p)))(p)
    for k in ("q", "kv", "w_k", "w_v"):
        np.testing.assert_allclose(g[k], whole[k], atol=1e-4)
    bump = np.zeros_like(p["kv"])
    bump[0, 3, 2] = 1e-2
    slope = (loss(p | {"kv": p["kv"] + bump}) - loss(p | {"kv": p["kv"] - bump})) / 2e-2
    np.testing.assert_allclose(g["kv"][0, 3, 2], slope, rtol=2e-2)


@pytest.mark.parametrize(("block", "platform"), [(4, "cpu"), (1, "cpu"), (4, "tpu")])
def test_pages_give_the_same_and_their_tails_do_nothing(block, platform):
    """A sequence in chunks, after another one, pages full of NaN, of a TPU's rows too: 1e-5 of the formula."""
    t, page = 11, 4
    with tracing_for(platform):
        rows = {c: row_width(c) for c in (C + R, D)}
    p, nan = draw(t), lambda c: jnp.full((1, 6, 1, page, rows[c]), jnp.nan)
    carry = ops.Carry(ops.State((ops.Pages(nan(C + R), None), ops.Pages(nan(D), None))))
    table, out, per = np.array([[4, 1, 3]]), [], 1 if block == 1 else 7
    for start in range(0, t, per):
        new = list(range(start, min(start + per, t)))
        _, batch = ops.paged([(0, start, [0] * len(new))], table, block=block)
        padded = lambda x, new=new, batch=batch: np.resize(x[new], (len(batch.positions), *x.shape[1:]))
        part = {k: x if k in ("w_k", "w_v") else padded(x) for k, x in p.items()}
        got, carry = run(batch, carry, part)
        out.append(got[: len(new)])
    want = definition(**p, begin=np.zeros(t, int), end=t)
    np.testing.assert_allclose(np.concatenate(out), want, atol=1e-5)
