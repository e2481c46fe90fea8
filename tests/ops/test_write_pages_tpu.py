"""The TPU kernel that writes pages, interpreted with a detector of races, against the reference: bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from fdel import ops
from fdel.kernels import write_pages_tpu as kernel
from fdel.models import builders
from fdel.ops import quantized_pages
from fdel.ops.paged import write_pages
from fdel.ops.platform import tracing_for
from fdel.serve.engine.step import quantized

# Row, first position, new tokens: runs of several blocks that begin and end anywhere, and a row without tokens.
CHUNKS = [(0, 50, 40), (1, 0, 3), (3, 95, 1), (2, 17, 33)]
TABLE = np.array([[7, 2, 5], [0, 8, 3], [1, 11, 4], [6, 9, 10]])


def written(impl: str, spec: ops.State, batch: ops.Paged, x: tuple, how) -> ops.Pages:
    """Write to layer 1 of pages that hold any bits; the detector of races watches a kernel."""
    draw = np.random.default_rng(1)
    fill = lambda p: jnp.asarray(draw.integers(0, 100, p.shape).astype(p.dtype or jnp.bfloat16))
    state = jax.tree.map(fill, spec.pages)
    with tracing_for("tpu"), ops.use(write_pages=impl), pltpu.force_tpu_interpret_mode(how):
        return write_pages(batch, state, jnp.int32(1), *x)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format", "block", "latent", "heads"),
    [
        ("int8", 8, None, 2),
        pytest.param("int8", 8, None, 3, marks=pytest.mark.matrix),
        pytest.param("fp8", 1, None, 3, marks=pytest.mark.matrix),
        pytest.param(None, 8, None, 2, marks=pytest.mark.matrix),
        pytest.param("int8", 32, 576, 1, marks=pytest.mark.matrix),
        pytest.param("fp8", 1, 576, 1, marks=pytest.mark.matrix),
        pytest.param(None, 32, 320, 1, marks=pytest.mark.matrix),
    ],
)
def test_pages_hold_what_the_reference_writes(format, block, latent, heads, monkeypatch, capsys):
    """Parts that two blocks share, tokens that are padding, a page past all others, and steps of four parts."""
    mixed = heads == 2 and format is not None
    with tracing_for("tpu"):
        sizes = dict(pages=12, page=32)
        plain = builders.latent_pages(2, latent, **sizes) if latent else builders.kv_pages(2, heads, 128, **sizes)
        spec = quantized(ops.State(plain), format)
    chunks = [(row, start, [0] * (n if block > 1 else 1)) for row, start, n in CHUNKS]
    table = TABLE.copy()
    table[3, 2] = 99
    _, batch = ops.paged(chunks, table, block=block)
    if mixed:  # a sequence's blocks come in order, others' between them
        same = (np.asarray(batch.page_table)[:, None] == np.asarray(batch.page_table)).all(-1)
        at = np.argsort(np.tril(same, -1).sum(1), kind="stable")
        positions = batch.positions.reshape(-1, block)[at].reshape(-1)
        batch = ops.Paged(positions, batch.page_table[at], batch.rows[at], block)
    r = np.random.default_rng(0)
    draw = lambda: jnp.asarray(r.normal(size=(len(batch.positions), heads, latent or 128)), jnp.bfloat16)
    x = draw(), None if latent else draw()
    monkeypatch.setattr(kernel, "TOGETHER", 64 if mixed else 4)
    monkeypatch.setattr(kernel, "unsupported", lambda *_: None)  # fewer rows than it is worth
    want, got = (written(impl, spec, batch, x, pltpu.InterpretParams(detect_races=True)) for impl in ("xla", "mosaic"))
    n = quantized_pages.scales(want.k.shape[-1])
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        if a.dtype == jnp.float32:  # scales: what is left of registers may hold anything
            a, b = (quantized_pages.page_scales(x, n, 32) for x in (a, b))
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))
    assert "RACE" not in "".join(capsys.readouterr())


def test_the_kernel_says_what_it_cannot_serve():
    with tracing_for("tpu"):
        spec = builders.kv_pages(2, 2, 128, pages=4, page=64)
        make = lambda spec: jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype or jnp.bfloat16), spec)
        x, y = (jax.ShapeDtypeStruct((n, 2, 128), jnp.bfloat16) for n in (64, 512))
        batch = lambda block: ops.Paged(
            jnp.zeros(64, int), jnp.zeros((64 // block, 1), int), jnp.zeros(64 // block), block
        )
        few = make(quantized(ops.State(spec), "int8").pages)
        assert "fewer bytes" in kernel.unsupported(batch(1), make(spec), 0, x, x)
        assert "128 rows" in kernel.unsupported(batch(32), make(spec), 0, x, x)
        assert kernel.unsupported(batch(32), make(spec), 0, y, y) is None
        assert kernel.unsupported(batch(32), few, 0, x, x) is None
        assert kernel.unsupported(batch(1), few, 0, x, x) is None
        latents = make(quantized(ops.State(builders.latent_pages(2, 576, pages=4, page=64)), "int8").pages)
        assert kernel.unsupported(batch(1), latents, 0, x, None) is None
        odd = make(builders.kv_pages(2, 2, 128, pages=4, page=8))
        assert "pages of 8 tokens" in kernel.unsupported(batch(32), odd, 0, y, y)
    with tracing_for("gpu"):
        assert "written for TPUs" in kernel.unsupported(batch(32), make(spec), 0, x, x)
