"""Attention within chunks of positions, packed and paged, against float64 numpy written from the formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel import ops, params
from fdel.models import builders
from fdel.ops.mask import Mask
from fdel.ops.platform import tracing_for

N, K, H = 4, 2, 8
MASKS = [Mask(0.3, chunk=5), Mask(0.3, chunk=1), Mask(0.3, chunk=6, window=4), Mask(0.3, chunk=100)]


def oracle(q, k, v, mask):
    """One sequence, [T heads H], query by query: keys of its chunk, none later, none out of its window."""
    out = np.zeros(q.shape)
    for i, n in np.ndindex(q.shape[:2]):
        first = max(i // mask.chunk * mask.chunk, i + 1 - (mask.window or len(q)))
        scores = k[first : i + 1, n // (N // K)].astype(np.float64) @ q[i, n] * mask.scale
        p = np.exp(scores - scores.max())
        out[i, n] = p @ v[first : i + 1, n // (N // K)] / p.sum()
    return out


def drawn(t):
    r = np.random.default_rng(t)
    return [3 * r.normal(size=(t, n, H)).astype(np.float32) for n in (N, K, K)]


@pytest.mark.parametrize("impl", [None, "dense", "flash"])
@pytest.mark.parametrize("mask", MASKS)
def test_packed(mask, impl):
    """Two sequences in a row: chunks are counted from the start of each."""
    _, batch = ops.pack([[1] * 13, [1] * 9], 24)
    parts = drawn(13), drawn(9), drawn(2)
    q, k, v = (jnp.concatenate(side)[None] for side in zip(*parts, strict=True))
    got = jax.jit(lambda *qkv: ops.attend(batch, None, 0, *qkv, mask=mask, impl=impl)[0])(q, k, v)[0]
    want = np.concatenate([oracle(*part, mask) for part in parts[:2]])
    np.testing.assert_allclose(got[:22], want, atol=2e-5)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("mask", MASKS)
def test_paged(mask, platform):
    """Two sequences in shuffled pages full of NaN, in blocks that end within chunks, and one token alone."""
    sides = [drawn(20), drawn(21)]
    got = [[], []]
    with tracing_for(platform):
        spec = ops.State(builders.kv_pages(2, K, H, pages=10, page=4))
        state = params.init(spec, jax.random.key(0), dtype=jnp.float32)
        carry = ops.Carry(jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), state))
        table = np.array([[7, 2, 5, 9, 1], [0, 8, 3, 6, 4]])
        step = jax.jit(lambda b, c, q, k, v: ops.attend(b, c, 1, q, k, v, mask=mask))
        for start, n in ((0, 7), (7, 1), (8, 12)):
            _, batch = ops.paged([(i, start, [0] * n) for i in range(2)], table, block=4)
            live = np.asarray(batch.positions) >= 0
            new = [np.zeros((len(live), *x.shape[1:]), np.float32) for x in sides[0]]
            for x, one, two in zip(new, *sides, strict=True):
                x[live] = np.concatenate([one[start : start + n], two[start : start + n]])
            y, carry = step(batch, carry, *new)
            for out, part in zip(got, np.asarray(y)[live].reshape(2, n, N, H), strict=True):
                out.append(part)
    for out, side in zip(got, sides, strict=True):
        np.testing.assert_allclose(np.concatenate(out), oracle(*(x[:20] for x in side), mask), atol=2e-5)
