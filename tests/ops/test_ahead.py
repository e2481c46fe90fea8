"""Tokens of an image see each other under a causal mask (`ahead`); the oracle is the formula in float64 numpy.

As transformers masks Gemma 3: causal or of the same image, and within the window, which bounds what is before.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel import ops
from fdel.kernels import attend_gpu, attend_tpu, paged_attention_gpu, paged_attention_tpu
from fdel.ops import platform
from fdel.ops.attention import dense_attention
from fdel.ops.flash import Schedule, flash_attention
from fdel.ops.mask import Where

T, SCALE = 48, 0.4
IMAGES = np.full((2, T), -1)  # of each token
for row, image, start, stop in ((0, 0, 3, 14), (0, 1, 15, 22), (0, 2, 22, 30), (1, 3, 0, 9), (1, 4, 40, 48)):
    IMAGES[row, start:stop] = image
SEGMENTS = np.array([[0] * 22 + [1] * 20 + [-1] * 6, [0] * T])  # images 1 and 2 are neighbours of two segments
MASKS = [ops.Mask(SCALE), ops.Mask(SCALE, window=5, softcap=3.0)]


def arrays():
    rng = np.random.default_rng(0)
    return [rng.normal(size=(2, T, n, 8)).astype(np.float32) for n in (4, 2, 2, 4)]


def batch() -> ops.Packed:
    positions = np.broadcast_to(np.arange(T), (2, T))
    out = ops.Packed(positions, jnp.asarray(SEGMENTS), media=ops.Media(jnp.asarray(np.where(IMAGES < 0, -1, 7))))
    return replace(out, ahead=ops.look_ahead(out))


def seen(mask):
    i = np.arange(T)
    same = (IMAGES[:, :, None] == IMAGES[:, None]) & (IMAGES[:, :, None] >= 0)
    out = (i <= i[:, None]) | same
    if mask.window:
        out &= i > i[:, None] - mask.window
    return out & (SEGMENTS[:, :, None] == SEGMENTS[:, None])


def formula(mask, q, k, v, xp=np):
    k, v = (xp.repeat(x, 2, 2) for x in (k, v))
    s = xp.einsum("bqnh,bknh->bnqk", q, k) * SCALE
    s = mask.softcap * xp.tanh(s / mask.softcap) if mask.softcap else s
    s = xp.where(seen(mask)[:, None], s, -1e30)
    p = xp.exp(s - s.max(-1, keepdims=True))
    return xp.einsum("bnqk,bknh->bqnh", p / p.sum(-1, keepdims=True), v)


WAYS = {
    "dense": lambda *a, **k: dense_attention(*a, alibi=None, sinks=None, bias=None, **k)[0],
    "loops": lambda *a, **k: flash_attention(*a, schedule=Schedule(16), **k)[0],
    "blocks": lambda *a, **k: flash_attention(*a, schedule=Schedule(16, loop=False), **k)[0],
}


@pytest.mark.parametrize("mask", MASKS, ids=["full", "window"])
@pytest.mark.parametrize("way", WAYS)
def test_packed_rows_and_their_gradients(way, mask):
    """1e-5 and, of gradients, 1e-4 of the largest; against jax's derivative of the formula."""
    q, k, v, weight = arrays()
    where = batch().where

    @partial(jax.jit, static_argnums=0)
    def both(f, *x):
        out, back = jax.vjp(f, *x)
        return out, back(jnp.asarray(weight))

    got, gradients = both(lambda *x: WAYS[way](*x, where, mask=mask), q, k, v)
    np.testing.assert_allclose(got, formula(mask, *(x.astype(np.float64) for x in (q, k, v))), atol=1e-5)
    _, wanted = both(lambda *x: formula(mask, *x, xp=jnp), q, k, v)
    for g, w in zip(gradients, wanted, strict=True):
        np.testing.assert_allclose(g, w, atol=1e-4 * np.abs(w).max())


@pytest.mark.parametrize("mask,chunks", [(MASKS[0], [12, 1, 27, 8]), (MASKS[1], [7, 33, 8])], ids=["full", "window"])
def test_pages_filled_chunk_by_chunk(mask, chunks):
    """Chunks end at an image's edge, or hold all that is left of one; the cache begins full of NaN."""
    q, k, v, _ = arrays()
    want = formula(mask, *(x.astype(np.float64) for x in (q, k, v)))[1]
    table = np.array([[5, 0, 3, 1, 4, 2], [9, 8, 7, 6, 11, 10]])
    pages = jax.tree.map(
        lambda p: jnp.full(p.shape, jnp.nan), ops.Pages(*[jax.ShapeDtypeStruct((1, 12, 2, 8, 8), "f4")] * 2)
    )
    carry, start, got = ops.Carry(ops.State(pages)), 0, []
    attend = jax.jit(lambda new, carry, *x: ops.attend(new, carry, 0, *x, mask=mask))
    for n in chunks:
        b = 1 if n == 1 else 8
        parts = [(row, start, list(range(n))) for row in (1, 0)]
        count = -(-n // b) * b
        _, new = ops.paged(parts, table, block=b, size=2 * count + b)
        at = np.where(new.positions < 0, 0, new.positions)
        rows = np.minimum(np.repeat(new.rows, b), 1)
        new = replace(new, media=ops.Media(np.where(new.positions < 0, -1, IMAGES[rows, at])))
        new = replace(new, ahead=ops.look_ahead(new))
        out, carry = attend(new, carry, q[rows, at], k[rows, at], v[rows, at])
        got.append(out[:n])
        start += n
    got = np.concatenate(got)
    whole = slice(0, None) if chunks[0] != 7 else slice(7, None)  # tokens 0 to 7 were not shown the rest of their image
    np.testing.assert_allclose(got[whole], want[whole], atol=1e-5)


def test_kernels_that_know_causal_masks_alone_say_so():
    q, k, v, _ = (jnp.zeros((1, 128, 2, 64), jnp.bfloat16) for _ in range(4))
    where = Where(jnp.zeros((1, 128), int), ahead=jnp.zeros((1, 128), int), single=True)
    kwargs = dict(mask=ops.Mask(1.0), sinks=None, alibi=None, bias=None)
    for name, kernel in ("gpu", attend_gpu), ("tpu", attend_tpu):
        with platform.tracing_for(name):
            assert "see later ones" in kernel.unsupported(q, k, v, where, **kwargs)
            assert kernel.unsupported(q, k, v, replace(where, ahead=None), **kwargs) is None
    pages = jnp.zeros((1, 8, 2, 64, 128), jnp.bfloat16)
    new = ops.Paged(jnp.zeros(64, int), jnp.zeros((1, 2), int), jnp.zeros(1, int), 64, ahead=jnp.zeros(64, int))
    for name, kernel in ("gpu", paged_attention_gpu), ("tpu", paged_attention_tpu):
        with platform.tracing_for(name):
            why = kernel.unsupported(
                new, ops.Pages(pages, pages), 0, jnp.zeros((64, 4, 128), jnp.bfloat16), mask=ops.Mask(1.0)
            )
            assert "see later ones" in why


def test_chunks_of_positions_and_images_are_refused():
    q, k, v, _ = arrays()
    with pytest.raises(ValueError, match=r"Packed.ahead with Mask.chunk"):
        ops.attend(batch(), None, 0, q, k, v, mask=ops.Mask(SCALE, chunk=8))
