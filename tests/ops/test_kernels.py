"""Kernels of jax for TPUs, interpreted on CPU: values and gradients are those of the reference."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu import splash_attention

from fdel import ops
from fdel.kernels import decode_gpu
from fdel.ops.batch import Packed, Paged, Pages
from fdel.ops.paged import paged_attention
from fdel.ops.platform import tracing_for
from fdel.ops.weights import PACKED, Quantized
from tests.ops.codes import BYTES, CODES
from tests.ops.test_attention import f32

T = 256
MASKS = [{}, {"window": 40}, {"softcap": 2.0}, {"causal": False}, {"causal": False, "window": 30}]


def compared(f, args, argnums, impl):
    """The largest difference of values and gradients from the reference, relative to the largest element."""
    with tracing_for("tpu"), ops.use(**impl):
        got = jax.jit(jax.grad(f, argnums, has_aux=True))(*args)
    want = jax.jit(jax.grad(f, argnums, has_aux=True))(*args)
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return max(float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("spec", MASKS, ids=str)
def test_splash_attention_equals_the_reference(spec, with_sinks, monkeypatch):
    """Two segments and padding in a row, grouped heads; 2e-5 (seen: 1.5e-5). The older interpreter takes the batch axis.

    The last key of a segment is huge: neither the next segment nor a query before it may see it.
    """
    interpreted = functools.partial(splash_attention.make_splash_mha_single_device, interpret=True)
    monkeypatch.setattr(splash_attention, "make_splash_mha_single_device", interpreted)
    r = np.random.default_rng(0)
    q, k, v, weight = (f32(r.normal(size=(2, T, n, 64))) for n in (4, 2, 2, 4))
    k = k.at[0, 99].multiply(100)
    segments = np.stack([np.repeat([0, 1, -1], [100, 120, 36]), np.zeros(T)]).astype(np.int32)
    batch, mask = Packed(jnp.zeros((2, T), int), jnp.asarray(segments)), ops.Mask(0.125, **spec)

    def f(q, k, v, sinks):
        out = ops.attend(batch, None, 0, q, k, v, mask=mask, sinks=sinks)[0]
        return (out * weight).sum(), out

    args = q, k, v, f32(r.normal(size=4)) if with_sinks else None
    assert compared(f, args, (0, 1, 2, 3) if with_sinks else (0, 1, 2), {"attend": "splash"}) < 2e-5


REASONS = [
    ({"dtype": jnp.float32}, {}, "bfloat16 and float16"),
    ({"dim": 192}, {}, "heads of 192"),
    ({"single": False}, {}, "several sequences"),
    ({}, {"softcap": 2.0}, "softcap"),
    ({}, {"causal": False, "window": 4}, "window that is not causal"),
    ({"sinks": True}, {}, "sinks"),
    ({"platform": "tpu"}, {}, "NVIDIA"),
    ({}, {"window": 4}, None),
    ({}, {"causal": False}, None),
]


@pytest.mark.parametrize(("call", "spec", "reason"), REASONS, ids=str)
def test_cudnn_says_what_it_cannot_serve(call, spec, reason):
    dim, dtype = call.get("dim", 64), call.get("dtype", jnp.bfloat16)
    q, k = (jax.ShapeDtypeStruct((2, T, n, dim), dtype) for n in (4, 2))
    tokens = jnp.zeros((2, T), int)
    batch = ops.packed(tokens) if call.get("single", True) else Packed(tokens, tokens)
    sinks = jnp.zeros(4) if "sinks" in call else None
    with tracing_for(call.get("platform", "gpu")), ops.use(attend="cudnn"):
        run = lambda: ops.explain(ops.attend, batch, None, 0, q, k, k, mask=ops.Mask(0.1, **spec), sinks=sinks)
        if reason is None:
            assert "cudnn: chosen" in run()
        else:
            with pytest.raises(ValueError, match=reason):
                run()


def test_the_lengths_that_cudnn_is_given_hide_padding(monkeypatch):
    """jax's own attention in place of cuDNN's, which needs a GPU: the wrapper's arguments mean what the reference does."""
    own = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *a, implementation, **k: own(*a, **k))
    r = np.random.default_rng(0)
    q, k, v = (f32(r.normal(size=(2, 32, n, 16))).astype(jnp.bfloat16) for n in (4, 2, 2))
    batch = ops.packed(jnp.zeros((2, 32), int), jnp.asarray([32, 20]))
    for spec in ({}, {"window": 5}, {"causal": False}):
        run = lambda impl, spec=spec: ops.attend(batch, None, 0, q, k, v, mask=ops.Mask(0.25, **spec), impl=impl)[0]
        with tracing_for("gpu"):
            got = run("cudnn")
        for i, length in enumerate((32, 20)):
            np.testing.assert_allclose(*(np.float32(x[i, :length]) for x in (got, run("dense"))), atol=2e-2)


def interpret(module: str, *arguments: str) -> subprocess.CompletedProcess:
    if jax.version.__version_info__ < (0, 11):
        pytest.skip(f"jax {jax.__version__} interprets no layouts of Mosaic GPU; 0.11 does")
    command = [sys.executable, "-m", f"tests.ops.interpreted_{module}", *arguments]
    root = Path(__file__).parents[2]
    return subprocess.run(command, cwd=root, env=os.environ, capture_output=True, text=True, timeout=300, check=False)


LATENTS = pytest.param(("latents",), marks=pytest.mark.matrix)
PAGES = [pytest.param((kind,), marks=pytest.mark.matrix) for kind in ("half", "int8", "fp8", "wide", "wide8", "alibi")]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [(), LATENTS, *PAGES])
def test_attention_over_pages_on_hopper_equals_a_formula(kind):
    """Ragged rows, windows, softcap, sinks, parts of the keys, NaN in unused pages: 0.02 in bfloat16 (seen: 0.013)."""
    done = interpret("pages", *kind)
    assert done.returncode == 0, done.stderr
    errors = [float(x) for x in done.stdout.split()[-2:]]
    assert all(x < 0.02 for x in errors) and "RACE" not in done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", [(), LATENTS, pytest.param(("int8",), marks=pytest.mark.matrix)])
def test_a_planted_race_is_found(kind):
    """So that no race above means something: the wait for the pages is left out, of latents that for probabilities."""
    done = interpret("pages", "race", *kind)
    assert "RACE DETECTED" in done.stdout + done.stderr


PRODUCTS = [  # of what; with how many cases, all if none are named; the most that a result may be off
    (("quantized", "2"), [2e-6, 4e-3]),
    pytest.param(("quantized",), [2e-6, 4e-3, 2e-6, 2e-6, 4e-3], marks=pytest.mark.matrix),
    pytest.param(("floats",), [2e-6, 2e-6, 1e-3], marks=pytest.mark.matrix),
    pytest.param(("narrow",), [2e-6, 4e-3, 2e-3], marks=pytest.mark.matrix),
    (("grouped", "1"), [5e-3]),
    pytest.param(("grouped",), [5e-3] * 6, marks=pytest.mark.matrix),
    pytest.param(("glu",), [2e-2] * 6, marks=pytest.mark.matrix),
    pytest.param(("experts",), [4e-3] * 6, marks=pytest.mark.matrix),
]


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "tolerances"), PRODUCTS, ids=str)
def test_products_on_hopper_equal_float64(arguments, tolerances):
    """No race; 2e-6 of a row's magnitude in float32. Grouped: empty groups, ragged tiles, NaN in rows of none, gradients,
    outputs and inputs that end inside of a tile.

    In bfloat16 4e-3 of a row's magnitude, 5e-3 of the largest number (seen: 8e-4 and 3e-3); nf4 1e-3 (seen: 4e-4), narrow
    groups, whose scales become bfloat16, 2e-3 (seen: 4e-4) but for MXFP4, which is exact (seen: 2e-8).
    """
    done = interpret("products", *arguments)
    assert done.returncode == 0, done.stderr
    errors = [float(x) for x in done.stdout.split()[-len(tolerances) :]]
    assert all(a < b for a, b in zip(errors, tolerances, strict=True)), errors
    assert "RACE" not in done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", [(), pytest.param(("experts",), marks=pytest.mark.matrix)])
def test_a_race_planted_in_a_product_is_found(kind):
    done = interpret("products", "race", *kind)
    assert "RACE DETECTED" in done.stdout + done.stderr


SCANS = [  # forward or gradient, dtype; the most that a result may be off
    (("forward", "float32"), 1e-6),
    pytest.param(("forward", "bfloat16"), 8e-3, marks=pytest.mark.matrix),
    pytest.param(("gradient", "float32"), 5e-6, marks=pytest.mark.matrix),
    pytest.param(("gradient", "bfloat16"), 2e-2, marks=pytest.mark.matrix),
]


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "most"), SCANS, ids=str)
def test_scans_on_hopper_equal_float64(arguments, most):
    """No race; of the largest number (seen: 9e-8, in bfloat16 2e-3, gradients 2e-7 and 3e-3). Sequences that end inside of
    chunks, decays of exp(-3000), NaN in padding."""
    done = interpret("scans", *arguments)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < most and "RACE" not in done.stdout + done.stderr


@pytest.mark.matrix
@pytest.mark.parametrize("what", ["forward", "gradient"])
def test_a_race_planted_in_a_scan_is_found(what):
    done = interpret("scans", "race", what, "float32")
    assert "RACE DETECTED" in done.stdout + done.stderr


SSD = [  # of what; with how many cases; the most that a number may be off
    (("forward", "1"), [8e-3]),
    pytest.param(("forward",), [8e-3] * 3, marks=pytest.mark.matrix),
    pytest.param(("gradient",), [2e-2] * 3, marks=pytest.mark.matrix),
]


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "tolerances"), SSD, ids=str)
def test_ssd_on_hopper_equals_float64(arguments, tolerances):
    """No race; sequences that end inside of chunks, NaN in padding, decays of nothing (seen: 6e-3)."""
    done = interpret("ssd", *arguments)
    assert done.returncode == 0, done.stderr
    errors = [float(x) for x in done.stdout.split()[-len(tolerances) :]]
    assert all(a < b for a, b in zip(errors, tolerances, strict=True)), errors
    assert "RACE" not in done.stdout + done.stderr


@pytest.mark.matrix
def test_a_race_planted_in_ssd_is_found():
    done = interpret("ssd", "race")
    assert "RACE DETECTED" in done.stdout + done.stderr


SSD_REASONS = [
    ({"platform": "tpu"}, "written for NVIDIA GPUs"),
    ({"dtype": jnp.float32}, "multiplies bfloat16; found float32"),
    ({"channels": 96}, "heads of 96 channels"),
    ({"states": 96}, "with 96 states"),
    ({"paged": True}, "slots.ssm of shape"),
    ({"channels": 128, "states": 64}, None),
    ({"states": 256}, None),
    ({}, None),
]


@pytest.mark.of_cpu("with --target the references are named")
@pytest.mark.parametrize(("call", "reason"), SSD_REASONS, ids=str)
def test_the_kernel_for_ssd_on_hopper_says_what_it_cannot_serve(call, reason):
    """It is taken where it is named, and nowhere else."""
    shape = lambda dtype, *sizes: jax.ShapeDtypeStruct((1, 64, *sizes), dtype)
    half, numbers = functools.partial(shape, call.get("dtype", jnp.bfloat16)), jnp.ones(4)
    x, b = half(4, call.get("channels", 64)), half(2, call.get("states", 128))
    packed = ops.packed(jnp.zeros((1, 64), int))
    batch = Paged(jnp.arange(64), jnp.zeros((1, 1), int), jnp.zeros(1, int), 64) if "paged" in call else packed
    args = (batch, None, 0, x, shape(jnp.float32, 4), numbers, b, b)
    with tracing_for(call.get("platform", "gpu")):
        if reason is None:
            assert "xla: chosen" in ops.explain(ops.ssd, *args)
            with ops.use(ssd="hopper"):
                assert "hopper: chosen" in ops.explain(ops.ssd, *args)
        else:
            with ops.use(ssd="hopper"), pytest.raises(ValueError, match=reason):
                ops.explain(ops.ssd, *args)


@pytest.mark.of_cpu("with --target the references are named")
@pytest.mark.parametrize(
    ("outputs", "product", "biased", "reason"),
    [
        (256, lambda g, u: jax.nn.silu(g) * u, False, None),
        (256, lambda g, u: jax.nn.gelu(g, approximate=True) * u, False, None),
        (256, lambda g, u: jax.nn.relu(g) * u, False, "has custom_jvp_call; known are"),
        (256, lambda g, u: jax.nn.silu(g) * u, True, "it adds no biases"),
        (80, lambda g, u: jax.nn.silu(g) * u, False, None),
        (200, lambda g, u: jax.nn.silu(g) * u, False, "multiples of 16"),
    ],
)
def test_gate_and_up_on_hopper_say_what_they_cannot_serve(outputs, product, biased, reason):
    shape = lambda *s, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(s, dtype)
    w, bias = shape(4, outputs, 128), shape(4, outputs) if biased else None
    f = lambda x, w, n, b: ops.grouped_glu(x, w, w, n, product, b, b)
    with tracing_for("gpu"):
        args = shape(8, 128), w, shape(4, dtype=jnp.int32), bias
        assert "xla: chosen" in ops.explain(f, *args).split("grouped_matmul")[0]  # of what GPU is not known
        with ops.use(grouped_glu="hopper"):
            if reason is None:
                assert "hopper: chosen" in ops.explain(f, *args)
            else:
                with pytest.raises(ValueError, match=reason):
                    ops.explain(f, *args)


@pytest.mark.parametrize("format", sorted(CODES))
def test_a_gpu_s_registers_get_what_each_code_stands_for(format):
    """Exact, but for tables, whose values are rounded to bfloat16."""
    codes = CODES[format]
    want = codes if len(codes) == 256 else np.concatenate([codes[BYTES >> 4], codes[BYTES & 15]], -1)
    got = decode_gpu.decoded(jnp.asarray(BYTES), format, None, decode_gpu.codes_of(format), True)
    assert got.shape == want.shape
    sure = np.isfinite(want)
    got, want = np.asarray(got, np.float64)[sure] * decode_gpu.FORMATS[format].factor, want[sure]
    assert len(got) >= 248 and (np.signbit(got) == np.signbit(want)).all()
    assert (np.abs(got - want) <= {"nf4": 2**-8, "fp4": 1e-7}.get(format, 0) * np.abs(want)).all()


PRODUCT_REASONS = [
    ({"platform": "tpu"}, "written for NVIDIA GPUs", "written for NVIDIA GPUs"),
    ({"dtype": jnp.float32}, "x is bfloat16", "bfloat16 or float16"),
    ({"outputs": 160}, "160 outputs", None),
    ({"outputs": 168}, "168 outputs", "168 outputs"),
    ({"format": "dynamic"}, "weights in dynamic", None),
    ({"format": "nf4"}, None, None),
    ({"format": "e2m1", "zero": jnp.uint8}, "zeros of weights in e2m1", None),
    ({"zero": jnp.float32}, "no integers", None),
    ({"group": 32}, None, None),
    ({"group": 8}, "groups of 4 bytes", None),
    ({"activations": 8}, "activations in few bits", None),
    ({"zero": jnp.uint8}, None, None),
]


@pytest.mark.parametrize(("call", "quantized", "grouped"), PRODUCT_REASONS, ids=str)
def test_the_kernels_for_products_on_hopper_say_what_they_cannot_serve(call, quantized, grouped):
    """They are taken where they are named, and nowhere else."""
    outputs, group, format = call.get("outputs", 128), call.get("group", 64), call.get("format", "uint4")
    shape = lambda dtype, *sizes: jax.ShapeDtypeStruct(sizes, dtype)
    x, scale = shape(call.get("dtype", jnp.bfloat16), 4, 256), shape(jnp.float32, outputs, 256 // group)
    zero = shape(call["zero"], *scale.shape) if "zero" in call else None
    values, bits = shape(jnp.uint8, outputs, 128 if format in PACKED else 256), call.get("activations", 0)
    w = Quantized(values, scale, zero, format, (256,), np.dtype(np.float32), None, bits)
    product = lambda x, w: ops.einsum("td,fd->tf", x, w)
    of_groups = lambda x, w, sizes: ops.grouped_matmul(x, w, sizes)
    glu = lambda x, w, sizes: ops.grouped_glu(x, w, w, sizes, lambda gate, up: jax.nn.silu(gate) * up)
    several, sizes = shape(x.dtype, 2, outputs, 256), shape(jnp.int32, 2)
    experts = jax.tree.map(lambda a: shape(a.dtype, 2, *a.shape), w)
    calls = [
        ("quantized_matmul", quantized, product, (x, w)),
        ("grouped_matmul", grouped, of_groups, (x, several, sizes)),
    ]
    calls += [
        ("grouped_matmul", quantized, of_groups, (x, experts, sizes)),
        ("grouped_glu", quantized, glu, (x, experts, sizes)),
    ]
    for op, reason, f, args in calls:
        with tracing_for(call.get("platform", "gpu")):
            assert "hopper: chosen" not in ops.explain(f, *args)
            with ops.use(**{op: "hopper"}):
                if reason is None:
                    assert "hopper: chosen" in ops.explain(f, *args)
                else:
                    with pytest.raises(ValueError, match=reason):
                        ops.explain(f, *args)


PAGES_REASONS = [
    ({"platform": "tpu"}, "NVIDIA"),
    ({"dtype": jnp.float32}, "bfloat16 and float16"),
    ({"size": 16}, "pages of 16"),
    ({"dim": 96}, "heads of 96"),
    ({"alibi": jnp.zeros(8)}, None),
    ({"alibi": jnp.zeros(8), "latents": 1, "dim": 576, "v_dim": 512}, "alibi slopes over latents"),
    ({"dim": 256}, None),
    ({"kept": jnp.int8, "dim": 128}, None),
    ({"kept": jnp.uint8, "alibi": jnp.zeros(8), "dim": 256}, None),
    ({"kept": jnp.int8, "dtype": jnp.float16}, "become bfloat16"),
    ({"kept": jnp.int16}, "pages with scales in int16"),
    ({"kept": jnp.int8, "scales": 2}, "2 and 2 scales"),
    ({"kept": jnp.int8, "latents": 1, "dim": 576, "v_dim": 512}, "latents in 8 bits"),
    ({"v_dim": 32}, "values of their own"),
    ({"latents": 1, "dim": 192, "v_dim": 64}, "values in the first 64 of 192"),
    ({"latents": 1, "dim": 640, "v_dim": 512}, "latents of 640 channels take"),
    ({"latents": 1, "dim": 576, "v_dim": 512}, None),
    ({}, None),
]


@pytest.mark.parametrize(("call", "reason"), PAGES_REASONS, ids=str)
def test_the_kernel_for_pages_says_what_it_cannot_serve(call, reason):
    """It is taken where it is named, and nowhere else."""
    dim, dtype = call.get("dim", 64), call.get("dtype", jnp.bfloat16)
    q = jax.ShapeDtypeStruct((2, 8, dim), dtype)
    heads, size = call.get("latents", 2), call.get("size", 64)
    pages = jax.ShapeDtypeStruct((2, 5, heads, size, dim), call.get("kept", dtype))
    scale = jax.ShapeDtypeStruct((2, 5, heads, call.get("scales", 1), size), jnp.float32) if "kept" in call else None
    cache = Pages(pages, None, scale) if "v_dim" in call else Pages(pages, pages, scale, scale)
    batch = Paged(jnp.zeros(2, int), jnp.zeros((2, 2), int), jnp.arange(2), 1)
    given = dict(mask=ops.Mask(0.1), alibi=call.get("alibi"), v_dim=call.get("v_dim", dim))
    run = lambda: ops.explain(paged_attention, batch, cache, 0, q, **given)
    with tracing_for(call.get("platform", "gpu")):
        assert "xla: chosen" in run()
        with ops.use(paged_attention="hopper"):
            if reason is None:
                assert "hopper: chosen" in run()
            else:
                with pytest.raises(ValueError, match=reason):
                    run()
