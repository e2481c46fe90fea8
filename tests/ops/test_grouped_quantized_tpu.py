"""The TPU kernel for groups of rows with quantized matrices, interpreted, against float64."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from fdel import ops
from fdel.kernels import grouped_matmul_tpu
from fdel.kernels import grouped_quantized_tpu as kernel
from fdel.ops.platform import tracing_for
from fdel.ops.weights import LowRank, Quantized, dequantize
from tests.ops.test_quantized_tpu import Drawn, floating, weight

E = 5
DECODE = [2, 0, 3, 0, 1]  # rows of each group; two more are of none
MANY = [30, 0, 3, 0, 40]  # several tiles of a group
GPTQ = Drawn("uint4", "int", 128, 256, 40, 0)
MXFP4 = ("e2m1", 32, "exponent", 288, 40, 0)  # rows of 144 bytes
CASES = [
    (GPTQ, DECODE, jnp.bfloat16),
    (MXFP4, DECODE, jnp.bfloat16),
    (("fp8", 200, "float", 200, 40, 0), DECODE, jnp.bfloat16),
    (("e2m1", 64, "exponent", 64, 140, 0), MANY, jnp.float32),
]
MORE = [
    (GPTQ, MANY, jnp.float32),
    (MXFP4, MANY, jnp.bfloat16),
    (Drawn("int8", None, 256, 256, 300, 0), DECODE, jnp.bfloat16),
    (Drawn("int8", None, 256, 256, 40, 0), MANY, jnp.bfloat16),
    (Drawn("int4", None, 64, 256, 40, 0), DECODE, jnp.float32),
    (Drawn("uint8", "int", 256, 512, 40, 0), MANY, jnp.bfloat16),
    (("fp8", 128, "float", 256, 600, 0), MANY, jnp.bfloat16),
    (("e5m2", 256, "float", 256, 8, 0), MANY, jnp.float32),
    (("nf4", 64, "uint8", 512, 40, 0), DECODE, jnp.bfloat16),
    (("nf4", 64, "uint8", 512, 40, 0), MANY, jnp.float32),
    (("e2m1", 16, "fp8", 256, 40, 0), DECODE, jnp.bfloat16),
    (("e2m1", 16, "fp8", 256, 140, 0), MANY, jnp.float32),
    (("e2m1", 512, "float", 512, 40, 0), MANY, jnp.float32),
]

EXPANDED = [
    (GPTQ, jnp.bfloat16),
    (MXFP4, jnp.bfloat16),
    (("e2m1", 32, "exponent", 64, 40, 0), jnp.float32),
    (Drawn("int8", None, 256, 256, 300, 0), jnp.bfloat16),
    (Drawn("int4", None, 64, 256, 40, 0), jnp.float32),
    (Drawn("int4", None, 200, 200, 140, 0), jnp.float32),
    (Drawn("uint8", "int", 256, 512, 40, 0), jnp.bfloat16),
    (Drawn("int4", "int", 1280, 2560, 40, 0), jnp.float32),  # groups of several chunks
    (("fp8", 128, "float", 256, 600, 0), jnp.float32),
    (("nf4", 64, "uint8", 512, 40, 0), jnp.float32),
    (("e2m1", 16, "fp8", 256, 140, 0), jnp.float32),
    (("e2m1", 512, "float", 1024, 40, 0), jnp.float32),
]


def stacked(c) -> tuple[Quantized, np.ndarray]:
    """A matrix for each of `E` groups, and what they stand for."""
    r = np.random.default_rng(0)
    if isinstance(c, Drawn):
        w, full = weight(c._replace(outputs=E * c.outputs), r)
    else:
        w, full = floating(*c[:4], E * c[4], 0, r)
    return jax.tree.map(lambda a: a.reshape(E, -1, a.shape[-1]), w), full.reshape(E, -1, full.shape[-1])


def errors(c, sizes, dtype) -> tuple[float, float]:
    """The largest difference of values and of the gradient in rows, relative to magnitudes of rows and matrices."""
    (w, full), r = stacked(c), np.random.default_rng(1)
    many, inputs, outputs = sum(sizes) + 2, full.shape[2], full.shape[1]
    x, dy = (np.asarray(jnp.asarray(r.normal(size=(many, n)), dtype), np.float64) for n in (inputs, outputs))
    group = np.repeat(np.arange(E + 1), [*sizes, 2])
    every = np.concatenate([full, np.zeros_like(full[:1])])[group]
    size = lambda x, axis: np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(every, axis=axis) + 1e-30
    x[sum(sizes) :] = dy[sum(sizes) :] = np.nan

    def both(x, w, sizes, dy):
        y, back = jax.vjp(lambda x: ops.grouped_matmul(x, w, sizes), x)
        return y, back(dy)[0]

    with tracing_for("tpu"), ops.use(grouped_matmul="mosaic"):
        got = jax.jit(both)(jnp.asarray(x, dtype), w, jnp.asarray(sizes), jnp.asarray(dy, dtype))
    x, dy = np.nan_to_num(x), np.nan_to_num(dy)
    want = np.einsum("mk,mnk->mn", x, every), np.einsum("mn,mnk->mk", dy, every)
    assert not any(np.asarray(a[sum(sizes) :]).any() for a in got)
    scale = size(x, 2), size(dy, 1)
    return tuple(
        float((np.abs(np.asarray(a, np.float64) - b) / s).max()) for a, b, s in zip(got, want, scale, strict=True)
    )


@pytest.fixture
def interpreted():
    """Without the detector of races, in a third of the time; tiles of 16 rows where there are many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pl, "pallas_call", functools.partial(pl.pallas_call, interpret=True))
        patch.setattr(kernel, "TILES", {4: 8, 2**31: 80})
        patch.setattr(kernel, "FEW", 2**31)
        yield


def single(x):
    return x if isinstance(x, Quantized) else jnp.asarray(x, jnp.float32)


def bounds(dtype) -> float:
    return 2e-6 if dtype == jnp.float32 else 5e-3


@pytest.mark.parametrize("c", CASES, ids=str)
def test_products_and_gradients_of_rows_equal_float64(interpreted, c):
    """Empty groups, rows of none that hold NaN, ragged outputs: 2e-6 of magnitudes in float32, 5e-3 in bfloat16."""
    found = errors(*c)
    print(found)
    assert max(found) < bounds(c[2])


@pytest.mark.parametrize("c", EXPANDED, ids=str)
def test_many_rows_are_multiplied_with_blocks_that_are_expanded_once(interpreted, monkeypatch, c):
    """Several tiles of a group and several groups in a tile, as above."""
    monkeypatch.setattr(kernel, "FEW", 1)
    monkeypatch.setattr(grouped_matmul_tpu, "TILES", [(2**31, 32, 16)])
    found = errors(c[0], MANY, c[1])
    print(found)
    assert max(found) < bounds(c[1])


@pytest.mark.parametrize("kind", [jnp.float16, jnp.bfloat16, "dynamic"], ids=str)
def test_scales_are_read_as_files_have_them(interpreted, kind):
    """Of GPTQ and AWQ in float16, of compressed-tensors in bfloat16, of bitsandbytes in 8 bits of a tree: 2e-6."""
    (w, _), r = stacked(GPTQ), np.random.default_rng(1)
    scale: Any = w.scale
    if kind == "dynamic":
        tree, of_tree = r.integers(128, 256, scale.shape), np.full((*scale.shape[:2], 1), 2, np.float32)
        scale = Quantized(jnp.asarray(tree, jnp.uint8), of_tree, None, kind, scale.shape[2:], np.dtype(np.float32))
    else:
        scale = scale.astype(kind)
    w = replace(w, scale=scale)
    full, x = np.float64(dequantize(w, jnp.float32)), r.normal(size=(6, 256)).astype(np.float32)
    with tracing_for("tpu"), ops.use(grouped_matmul="mosaic"):
        got = jax.jit(ops.grouped_matmul)(x, w, jnp.asarray(DECODE))
    every = full[np.repeat(np.arange(E), DECODE)]
    size = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(every, axis=2)
    assert np.abs(np.float64(got) - np.einsum("mk,mnk->mn", x, every)).max() < 2e-6 * size.max()


@pytest.mark.matrix
@pytest.mark.parametrize("c", MORE, ids=str)
def test_every_format_equals_float64(interpreted, c):
    found = errors(*c)
    print(found)
    assert max(found) < bounds(c[2])


def test_a_low_rank_update_learns_on_quantized_matrices(interpreted):
    """QLoRA of experts: values and gradients of rows and of both factors, in float32."""
    (w, full), r = stacked(("e2m1", 32, "exponent", 64, 24, 0)), np.random.default_rng(2)
    draw = lambda *shape: r.normal(size=shape)
    a, b, scale, x, dy = draw(E, 4, 64), draw(E, 24, 4), draw(E) ** 2, draw(8, 64), draw(8, 24)
    group = np.repeat(np.arange(E + 1), [*DECODE, 2])[:6]
    every = full + scale[:, None, None] * (b @ a)
    want = [np.zeros((8, 24)), np.zeros((8, 64)), np.zeros(a.shape), np.zeros(b.shape)]
    for i, e in enumerate(group):
        want[0][i], want[1][i] = every[e] @ x[i], dy[i] @ every[e]
        want[2][e] += scale[e] * np.outer(b[e].T @ dy[i], x[i])
        want[3][e] += scale[e] * np.outer(dy[i], a[e] @ x[i])

    def all_of(x, w, a, b, scale, dy):
        f = lambda x, a, b: ops.grouped_matmul(x, LowRank(w, a, b, scale), jnp.asarray(DECODE))
        y, back = jax.vjp(f, x, a, b)
        return y, *back(dy)

    with tracing_for("tpu"), ops.use(grouped_matmul="mosaic"):
        got = jax.jit(all_of)(*(jax.tree.map(jnp.asarray, v) for v in map(single, (x, w, a, b, scale, dy))))
    for g, v in zip(got, want, strict=True):
        np.testing.assert_allclose(np.where(np.isfinite(g), g, np.inf), v, atol=3e-6 * np.abs(v).max())


TOLD = [
    ({"platform": "gpu"}, "written for TPUs"),
    ({"dtype": jnp.float16}, "bfloat16 or float32"),
    ({"format": "dynamic"}, "weights in dynamic"),
    ({"activations": 8}, "activations in few bits"),
    ({"order": True}, "an order of their own"),
    ({"group": 96}, "groups of 48 bytes"),
    ({}, None),
]


@pytest.mark.of_cpu("with --target the references are named")
@pytest.mark.parametrize(("call", "reason"), TOLD, ids=str)
def test_the_kernel_says_what_it_cannot_serve(call, reason):
    """What it serves it gets: of gate and up two products, of down one."""
    shape = lambda dtype, *s: jax.ShapeDtypeStruct(s, dtype)
    order = shape(jnp.int32, 4, 768) if "order" in call else None
    w = Quantized(
        shape(jnp.uint8, 4, 768, 384), shape(jnp.float32, 4, 768, 768 // call.get("group", 128)), None,
        call.get("format", "uint4"), (768,), np.dtype(np.float32), order, call.get("activations", 0),
    )  # fmt: skip
    x, sizes = shape(call.get("dtype", jnp.bfloat16), 8, 768), shape(jnp.int32, 4)
    with tracing_for(call.get("platform", "tpu")):
        if reason is None:
            product = lambda gate, up: jax.nn.silu(gate) * up
            told = ops.explain(
                lambda x, w, n: ops.grouped_matmul(ops.grouped_glu(x, w, w, n, product), w, n), x, w, sizes
            )
            assert "grouped_matmul (3 times)\n  mosaic: chosen" in told
            assert "found Quantized, with which two products" in told
        else:
            with ops.use(grouped_matmul="mosaic"), pytest.raises(ValueError, match=reason):
                ops.explain(ops.grouped_matmul, x, w, sizes)


def test_tiles_have_rows_of_one_group():
    """Groups of 3, 0, 9 and 4 of 20 rows in tiles of 8: four tiles of two cores, and one that is none."""
    visits, source, place = kernel.tiles(jnp.asarray([3, 0, 9, 4]), 20, 8, 2)
    assert visits.matrix.tolist()[:4] == [0, 2, 2, 3] and visits.each.tolist() == [2]
    rows = [[0, 1, 2], range(3, 11), [11], range(12, 16)]
    want = [[*some, *[20] * (8 - len(some))] for some in rows]
    assert np.reshape(source, (-1, 8)).tolist()[:4] == want
    assert all(np.asarray(source)[place[i]] == i for i in range(16))
    assert (np.asarray(place[16:]) >= len(source)).all()
