"""The cache as each platform lays it out: the same numbers come out, and short heads lie side by side on TPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel import ops, params
from fdel.models import builders
from fdel.ops.batch import Paged, Pages
from fdel.ops.mask import Mask
from fdel.ops.paged import _first, heads_per_row, paged_attention, write_pages
from fdel.ops.platform import tracing_for
from fdel.ops.weights import device_rows
from fdel.serve.engine.step import quantized

HEADS, KV, DIM, PAGE = 8, 4, 32, 8


def attend(
    platform: str, kind: str | None = None, block: int = 4, heads: int = HEADS, kv: int = KV, dim: int = DIM,
    values: int | None = None, **kwargs,
) -> np.ndarray:  # fmt: skip
    """Write two sequences in shuffled pages full of NaN, chunk by chunk, and attend: [tokens of all chunks, N, Hv]."""
    rng = np.random.default_rng(0)
    with tracing_for(platform), ops.use(paged_attention="xla"):
        spec = quantized(ops.State(builders.kv_pages(2, kv, dim, pages=9, page=PAGE)), kind)
        carry = ops.Carry(params.init(spec, jax.random.key(0), dtype=jnp.float32))
        empty = lambda x: jnp.full_like(x, jnp.nan) if jnp.issubdtype(x.dtype, jnp.floating) else x
        carry, out = jax.tree.map(empty, carry), []
        table = np.array([[7, 2, 5], [0, 8, 3]])
        step = jax.jit(lambda b, c, q, k, v: ops.attend(b, c, 1, q, k, v, **kwargs))
        for start, n in ((0, 7), (7, 1), (8, 12)):
            _, batch = ops.paged([(i, start, [0] * n) for i in range(2)], table, block=block)
            t = len(batch.positions)
            sizes = (heads, dim), (kv, dim), (kv, values or dim)
            q, k, v = (rng.normal(size=(t, *size)).astype(np.float32) for size in sizes)
            got, carry = step(batch, carry, q, k, v)
            out.append(np.asarray(got)[np.asarray(batch.positions) >= 0])
    return np.concatenate(out)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
@pytest.mark.parametrize(
    "kwargs",
    [
        {"mask": Mask(0.2)},
        {"mask": Mask(0.2, window=5, softcap=3.0), "sinks": jnp.linspace(-1, 1, HEADS)},
        {"mask": Mask(0.2), "alibi": jnp.linspace(0.1, 1, HEADS)},
    ],
)
def test_every_platform_gives_the_same(platform, kwargs):
    np.testing.assert_allclose(attend(platform, **kwargs), attend("cpu", **kwargs), atol=1e-5)


@pytest.mark.parametrize(
    ("heads", "kv", "dim", "values"),
    [(6, 3, 64, 64), (4, 1, 64, 64), (4, 2, 96, 96), (4, 2, 80, 80), (6, 6, 32, 32), (4, 2, 64, 32), (4, 2, 96, 64)],
)
def test_heads_that_fill_no_row_of_a_tpu_end_with_zeros(heads, kv, dim, values):
    """As those of Phi-3 mini, Falcon 7B and GPT-2 XL: a row of one key head of 64 may look like one of two."""
    mine = dict(heads=heads, kv=kv, dim=dim, values=values, mask=Mask(0.2, window=9))
    np.testing.assert_allclose(attend("tpu", **mine), attend("cpu", **mine), atol=1e-5)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_heads_that_share_a_row_share_its_scale(kind):
    """So in 8 bits they round a little more: on the whole 1.5 times at the most."""
    whole = attend("cpu", mask=Mask(0.2))
    error = lambda platform: np.sqrt(np.mean((attend(platform, kind, mask=Mask(0.2)) - whole) ** 2))
    assert 0 < error("tpu") < 1.5 * error("cpu")


def test_short_heads_fill_the_rows_of_a_tpu():
    shape = lambda *sizes: builders.kv_pages(2, *sizes, pages=3, page=PAGE).k.shape
    with tracing_for("tpu"):
        sizes = (8, 64), (4, 32), (8, 128), (3, 64), (8, 96), (2, 256), (6, 32)
        assert [heads_per_row(*x) for x in sizes] == [2, 4, 1, 1, 1, 1, 3]
        assert [shape(*x)[-1] for x in sizes] == [128] * 5 + [256, 128]
        assert shape(8, 64) == (2, 3, 4, PAGE, 128)
    with tracing_for("gpu"):
        assert shape(8, 64) == (2, 3, 8, PAGE, 64)


@pytest.mark.parametrize("kind", [None, "int8"])
@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_tokens_whose_page_is_none_are_not_stored(platform, kind):
    """One below 0, or past the last: the cache stays as it was."""
    rng = np.random.default_rng(2)
    k, v = rng.normal(size=(2, 8, KV, DIM)).astype(np.float32)
    with tracing_for(platform), ops.use(write_pages="xla"):
        spec = quantized(ops.State(builders.kv_pages(2, KV, DIM, pages=4, page=PAGE)), kind)
        old = params.init(spec, jax.random.key(0), dtype=jnp.float32).pages
        write = lambda pages: write_pages(
            Paged(jnp.arange(8) % 4, jnp.asarray(pages)[:, None], jnp.arange(2), 4), old, 1, k, v
        )
        alone = write([2, 4])
        for page in (-1, -3, 9):
            jax.tree.map(np.testing.assert_array_equal, write([2, page]), alone)
        assert np.abs(np.asarray(alone.k[1, 2], np.float32)).max() > 0


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("count", [3, 64])  # in one loop; in two, each of half of them
def test_sequences_that_share_a_loop_see_their_own_keys(count, window):
    """Lengths from a key to all of 9 pages of 16, three steps of the loop; against softmax in float64."""
    rng, width, page, dim = np.random.default_rng(1), 9, 16, 8
    length = np.concatenate([[1, width * page, 65], rng.integers(1, width * page, 64)])[:count]
    table = rng.permutation(count * width).reshape(count, width)
    q, k, v = (rng.normal(size=(count, n, *s, dim)) for n, s in ((4, ()), (2, (width * page,)), (2, (width * page,))))
    place = np.arange(width * page)
    used = place < length[:, None]
    seen = used & (place >= length[:, None] - (window or width * page))
    in_pages = lambda x: x.reshape(count, 2, width, page, dim).swapaxes(1, 2)
    pools = [np.full((1, count * width, 2, page, dim), np.nan, np.float32) for _ in "kv"]
    for pool, x in zip(pools, (k, v), strict=True):
        pool[0, table] = in_pages(np.where(used[:, None, :, None], x, np.nan))
    batch = Paged(jnp.asarray(length - 1), jnp.asarray(table), jnp.arange(count), 1)
    state = Pages(*map(jnp.asarray, pools))
    attend = jax.jit(lambda batch, state, q: paged_attention(batch, state, 0, q, mask=Mask(0.5, window=window)))
    got = attend(batch, state, q.astype(np.float32))
    s = np.where(seen[:, None, None], 0.5 * np.einsum("bkgh,bksh->bkgs", q.reshape(count, 2, 2, dim), k), -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    want = np.einsum("bkgs,bksh->bkgh", p / p.sum(-1, keepdims=True), v).reshape(count, 4, dim)
    np.testing.assert_allclose(got, want, atol=2e-6)  # seen: 8e-7


@pytest.mark.parametrize(("rows", "devices"), [(10, 8), (10, 4), (7, 4), (11, 4), (3, 2), (12, 8)])
def test_each_device_has_the_rows_of_its_query_heads_and_no_row_past_the_last(rows, devices):
    """Counted for 12 query heads of each device and row; the last device may need fewer than it has."""
    own, heads = device_rows(rows, devices), np.arange(12 * rows * devices).reshape(devices, -1)
    first = np.asarray(_first(rows, own, devices))[:, None]
    needed = heads // (12 * devices)
    assert (first >= 0).all() and (first + own <= rows).all()
    assert (needed >= first).all() and (needed < first + own).all()
