"""The TPU kernel for quantized products, interpreted with a detector of races, against float64."""

import functools
import re
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from fdel import ops, params, plan
from fdel.kernels import quantized_matmul_tpu as kernel
from fdel.ops.einsum import _plan
from fdel.ops.platform import tracing_for
from fdel.ops.weights import NF4, Quantized, decode
from fdel.ops.weights import TABLES as CODES

ZEROS = {"int8": (None, "float"), "uint8": ("int", None), "uint4": ("int", "float"), "int4": (None, "int")}


TABLES = {
    "fp8": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e2m1": ml_dtypes.float4_e2m1fn, "nf4": None
}  # fmt: skip
# Format, inputs of a group, how scales are stored, inputs, outputs, rows of x.
FLOATS = [
    ("fp8", 128, "float", 256, 300, 3),  # blocks of DeepSeek-V3, and two blocks of the kernel
    ("fp8", 200, "float", 200, 40, 3),  # rows that fill no lanes
    ("fp8", 512, "float", 512, 8, 70),
    ("e5m2", 256, "float", 256, 8, 3),
    ("nf4", 64, "uint8", 512, 40, 3),
    ("nf4", 64, "uint8", 8192, 40, 70),  # as many groups as lanes
    ("e2m1", 32, "exponent", 288, 40, 3),  # rows of 144 bytes
    ("e2m1", 32, "exponent", 288, 40, 70),
    ("e2m1", 16, "fp8", 256, 40, 3),  # NVFP4
    ("e2m1", 16, "fp8", 4352, 8, 70),
]


class Drawn(NamedTuple):
    """A product: format of the weight, its zeros, inputs of a group, inputs in units of lanes, outputs, rows of x."""

    format: str
    zero: str | None
    group: int
    inputs: int
    outputs: int
    rows: int


@st.composite
def drawn(draw) -> Drawn:
    format = draw(st.sampled_from(sorted(ZEROS)))
    group = draw(st.sampled_from([32, 64, 128, 256, 512]))
    inputs = max(group, 256) * draw(st.sampled_from([1, 2]))
    return Drawn(format, draw(st.sampled_from(ZEROS[format])), group, inputs, *draw(st.sampled_from(SHAPES)))


SHAPES = [(1, 1), (40, 3), (300, 11), (40, 70)]  # outputs and rows


def weight(c: Drawn, r: np.random.Generator) -> tuple[Quantized, np.ndarray]:
    """Random bits, and the array that they stand for."""
    shape = (c.outputs, c.inputs // c.group, c.group)
    low, high = {"int8": (-128, 128), "uint8": (0, 256)}.get(c.format, (0, 16))
    value = r.integers(low, high, shape)
    stored = value
    if high == 16:
        first, second = np.split(value, 2, -1)
        stored = first << 4 | second
    scale = r.uniform(0.5, 1.5, shape[:2]).astype(np.float32)
    zero = {None: None, "int": r.integers(0, high, shape[:2]), "float": r.normal(size=shape[:2])}[c.zero]
    value = value - np.float64(8 if c.format == "int4" and c.zero is None else 0)
    if c.format == "int4" and c.zero == "int":
        value = value - 8
    full = (value - zero[..., None]) * scale[..., None] if c.zero == "int" else value * scale[..., None]
    full = full + zero[..., None] if c.zero == "float" else full
    if zero is not None:
        zero = jnp.asarray(zero, jnp.float32 if c.zero == "float" else jnp.int16 if high == 256 else jnp.uint8)
    values = jnp.asarray(stored.reshape(c.outputs, -1), jnp.int8 if c.format == "int8" else jnp.uint8)
    w = Quantized(values, jnp.asarray(scale), zero, c.format, (c.inputs,), np.dtype(np.float32))
    return w, full.reshape(c.outputs, c.inputs)


def floating(format, group, stored, inputs, outputs, rows, r) -> tuple[Quantized, np.ndarray]:
    """Random bits of floats with scales that are stored in one of several ways, and the array that they stand for."""
    packed, groups = format in ("nf4", "e2m1"), -(-inputs // group)
    code = r.integers(0, 16 if packed else 256, (outputs, groups, group)).astype(np.uint8)
    code[..., :2] = np.uint8([0, 8]) if packed else np.uint8([0x80, 0x01])  # zeros, and the least of all numbers
    if TABLES[format] is None:
        value = np.float64(NF4)[code]
    else:
        bits = np.arange(16 if packed else 256, dtype=np.uint8).view(TABLES[format]).astype(np.float64)
        code = np.where(np.isfinite(bits[code]), code, 0)
        value = bits[code]
    low, high = np.split(code, 2, -1)[::-1] if packed else (0, code)
    number = lambda *shape: r.uniform(0.5, 1.5, shape).astype(np.float32)
    scale, step, zero, kinds = number(outputs, groups), number(outputs, 1), number(outputs, 1), np.dtype(np.float32)
    if stored == "float":
        kept = jnp.asarray(scale)
    elif stored == "exponent":
        raw = r.integers(120, 132, scale.shape).astype(np.uint8)
        kept, scale = jnp.asarray(raw), np.ldexp(1.0, raw.astype(int) - 127)
    else:
        raw, low_ = r.integers(0, 127, scale.shape).astype(np.uint8), zero if stored == "uint8" else None
        scale = raw.astype(np.float64) if stored == "uint8" else raw.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        scale = scale * step + (0 if low_ is None else low_)
        zeros = None if low_ is None else jnp.asarray(low_)
        kept = Quantized(jnp.asarray(raw), jnp.asarray(step), zeros, stored, (groups,), kinds)
    values = jnp.asarray((high << 4 | low if packed else code).reshape(outputs, -1), jnp.uint8)
    full = (value * np.float64(scale)[..., None]).reshape(outputs, -1)[:, :inputs]
    return Quantized(values, kept, None, format, (inputs,), kinds), full


def error(c: Drawn | tuple, dtype) -> float:
    """The largest difference from float64, relative to the magnitudes of a row of x and of the weight."""
    r = np.random.default_rng(0)
    w, full = weight(c, r) if isinstance(c, Drawn) else floating(*c, r)
    x = r.normal(size=(c.rows if isinstance(c, Drawn) else c[-1], full.shape[1]))
    x[0] = 0
    x[-1, -1] = 1e4
    x = jnp.asarray(x, dtype)
    exact = np.asarray(x, np.float64)
    size = np.linalg.norm(exact, axis=1, keepdims=True) * np.linalg.norm(full, axis=1) + 1e-30
    with tracing_for("tpu"), ops.use(quantized_matmul="mosaic"):
        got = jax.jit(lambda x, w: ops.einsum("td,fd->tf", x, w, out_dtype=jnp.float32))(x, w)
    return float((np.abs(np.asarray(got) - exact @ full.T) / size).max())  # NaN if any number is


@pytest.fixture
def interpreted():
    """Without the detector of races, in a third of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pl, "pallas_call", functools.partial(pl.pallas_call, interpret=True))
        yield


@pytest.mark.slow
@settings(max_examples=3, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(Drawn("uint4", "int", 128, 512, 300, 3), jnp.bfloat16)
@example(Drawn("int4", "int", 32, 256, 1, 1), jnp.float32)
@example(Drawn("int4", None, 64, 256, 40, 70), jnp.bfloat16)
@example(Drawn("int8", None, 512, 512, 8, 3), jnp.float32)
@example(Drawn("int4", "int", 1280, 2560, 40, 70), jnp.float32)  # groups of several chunks
@given(drawn(), st.sampled_from([jnp.float32, jnp.bfloat16]))
def test_products_equal_float64(interpreted, c, dtype):
    """Ragged outputs and rows; a row of zeros, and one with an input of 1e4: 2e-6 of a row's magnitude (seen: 6e-7).

    Many rows are multiplied with weights that are rounded to bfloat16: 4e-3.
    """
    assert error(c, dtype) < (4e-3 if dtype == jnp.bfloat16 and c.rows > 20 else 2e-6)


@pytest.mark.parametrize(
    ("form", "inputs", "group", "rows", "dtype"),
    [("uint4", 29568, 32, 600, jnp.bfloat16),  # Qwen2.5 72B
     ("fp8", 53248, 128, 64, jnp.bfloat16), ("fp8", 81920, 128, 600, jnp.float32),  # Llama 405B, and the widest
     ("e2m1", 53248, 32, 64, jnp.bfloat16), ("e2m1", 53248, 16, 600, jnp.float32), ("uint4", 4096, 128, 64, jnp.bfloat16)],
)  # fmt: skip
def test_what_a_program_holds_fits_the_memory(monkeypatch, form, inputs, group, rows, dtype):
    """Blocks, of which two are there, and what it keeps: 56 MiB, of which a compiler takes some for itself."""
    found = []

    def call(program, *, out_shape, grid_spec, **named):
        def run(*args):
            size = lambda shape, dtype: np.prod([n or 1 for n in shape]) * jnp.dtype(dtype).itemsize
            blocks = zip((*grid_spec.in_specs, grid_spec.out_specs), (*args, out_shape), strict=True)
            found.append(2 * sum(size(spec.block_shape, x.dtype) for spec, x in blocks))
            found.append(sum(size(kept.shape, kept.dtype) for kept in grid_spec.scratch_shapes))
            return jnp.zeros(out_shape.shape, out_shape.dtype)

        return run

    monkeypatch.setattr(pl, "pallas_call", call)
    shape = lambda dtype, *sizes: jax.ShapeDtypeStruct(sizes, dtype)
    integers = form == "uint4"
    scale = shape(jnp.uint8 if form == "e2m1" else jnp.float32, 512, inputs // group)
    zero = shape(jnp.uint8, *scale.shape) if integers else None
    w = Quantized(
        shape(jnp.uint8, 512, inputs // (1 if form == "fp8" else 2)), scale, zero, form, (inputs,), np.dtype(np.float32)
    )
    with tracing_for("tpu"), ops.use(quantized_matmul="mosaic"):
        jax.eval_shape(lambda x, w: ops.einsum("td,fd->tf", x, w), shape(dtype, rows, inputs), w)
    assert 0 < sum(found) < 52 * 2**20


@pytest.mark.slow
@pytest.mark.parametrize("c", FLOATS, ids=str)
def test_products_with_floats_equal_float64(interpreted, c):
    """Of every format, way to store scales and size of groups: 1e-6 of a row's magnitude (seen: 2e-7). Weights of nf4,
    and those of many rows that are scaled before they are multiplied, are rounded to bfloat16 for such rows: 4e-3."""
    rounded = c[0] == "nf4" or (c[-1] > 64 and c[1] < c[3])
    assert error(c, jnp.bfloat16) < (4e-3 if rounded else 1e-6)


@pytest.mark.slow
@settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from([("fp8", "float"), ("nf4", "uint8"), ("e2m1", "exponent"), ("e2m1", "fp8")]),
    st.sampled_from([32, 64, 256]), st.integers(1, 5), st.integers(1, 140), st.sampled_from([1, 9, 70]),
)  # fmt: skip
def test_products_with_floats_of_float32_rows_equal_float64(interpreted, kind, group, groups, outputs, rows):
    """Any number of groups and outputs: 1e-6 of a row's magnitude."""
    assert error((kind[0], group, kind[1], group * groups, outputs, rows), jnp.float32) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("c", [Drawn("uint4", "int", 128, 256, 300, 3), ("e2m1", 32, "exponent", 288, 300, 3)], ids=str)
def test_no_race_is_found(c, capsys):
    """The copies are Pallas's own, of one block while the one before is multiplied: two blocks here."""
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
        assert error(c, jnp.bfloat16) < 2e-6
    assert "RACE" not in "".join(capsys.readouterr())


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "floats"), [(2, False), (66, False), (66, True)])
def test_gradients_and_axes_are_those_of_the_reference(rows, floats, interpreted):
    """Heads in front, results in another order; no gradient reaches the weight. 1e-5 of the largest."""
    c, r = Drawn("uint4", "int", 128, 256, 12, rows), np.random.default_rng(0)
    w, _ = floating("e2m1", 16, "fp8", 256, 12, rows, r) if floats else weight(c, r)
    w = replace(jax.tree.map(lambda a: a.reshape(3, 4, -1), w), inputs=(2, 128))
    x, dy = (jnp.asarray(np.random.default_rng(1).normal(size=s), jnp.float32) for s in ((rows, 2, 128), (3, rows, 4)))

    def run(impl):
        def both(x, w, dy):  # the weight is an argument: XLA:CPU of jaxlib 0.10.2 folds bytes of constants wrongly
            y, vjp = jax.vjp(lambda x: ops.einsum("tab,nhab->nth", x, w), x)
            return y, vjp(dy)[0]

        with tracing_for("tpu"), ops.use(quantized_matmul=impl):
            return jax.jit(both)(x, w, dy)

    for got, want in zip(run("mosaic"), run("xla"), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * float(jnp.abs(want).max()))


NAMED = pytest.mark.of_cpu("with --target the references are named")
REASONS = [
    ({"platform": "gpu"}, "written for TPUs"),
    ({"dtype": jnp.float16}, "bfloat16 or float32"),
    ({"format": "dynamic"}, "weights in dynamic"),
    ({"activations": 8}, "activations in few bits"),
    ({"group": 96, "inputs": 768}, "groups of 48 bytes"),
    ({"format": "e5m2", "inputs": 384, "group": 384}, "rows of 192 bytes of e5m2"),
    ({"inputs": 2**18}, "rows of 131072 bytes"),
    pytest.param({}, None, marks=NAMED),
]


@pytest.mark.parametrize(("call", "reason"), REASONS, ids=str)
def test_the_kernel_says_what_it_cannot_serve(call, reason):
    """What it serves it gets, on TPUs."""
    inputs, group = call.get("inputs", 512), call.get("group", 128)
    shape = lambda dtype, *sizes: jax.ShapeDtypeStruct(sizes, dtype)
    w = Quantized(
        shape(jnp.uint8, 64, inputs // 2), shape(jnp.float32, 64, inputs // group), None, call.get("format", "uint4"),
        (inputs,), np.dtype(np.float32), None, call.get("activations", 0),
    )  # fmt: skip
    x = shape(call.get("dtype", jnp.bfloat16), 8, inputs)
    plan = _plan("td,fd->tf", x, w)
    with tracing_for(call.get("platform", "tpu")):
        if reason is None:
            assert "mosaic: chosen" in ops.explain(lambda x, w: ops.einsum("td,fd->tf", x, w), x, w)
        else:
            assert reason in kernel.unsupported(plan, x, w, x.dtype)


SHARED = [
    Drawn("int8", None, 256, 256, 8, 3),  # a scale for all inputs
    Drawn("uint4", "int", 64, 256, 8, 3),
    ("nf4", 64, "uint8", 512, 8, 3),
]
# Inputs of which devices would get parts of groups: their outputs are shared instead. The bytes of one group of four bits
# hold inputs that are half of all apart.
BY_OUTPUTS = [Drawn("uint4", "int", 256, 256, 8, 3), Drawn("int4", None, 64, 192, 8, 3)]


@pytest.mark.parametrize("c", [*SHARED, *BY_OUTPUTS], ids=str)
@pytest.mark.parametrize("subscripts", ["tf,df->td", "td,fd->tf"])
def test_devices_share_a_weight(subscripts, c, interpreted):
    """Along `tp`, by inputs or outputs: the numbers of one device, 1e-6 of the largest; no part of a weight is sent."""
    r = np.random.default_rng(2)
    w, _ = weight(c, r) if isinstance(c, Drawn) else floating(*c, r)
    x = jnp.asarray(r.normal(size=(3, *w.inputs)), jnp.float32)
    mesh = params.make_mesh({"tp": 2}, jax.devices()[:2])
    by = P(None, "tp") if subscripts == "tf,df->td" else P("tp")
    placed = jax.tree.map(jax.device_put, w, params.mesh.of_parts(w, NamedSharding(mesh, by)))

    def run(*args) -> tuple[Array, str]:
        with tracing_for("tpu"), ops.use(quantized_matmul="mosaic"):
            made = jax.jit(lambda x, w: ops.einsum(subscripts, x, w)).lower(*args).compile()
        return made(*args), made.as_text()

    want, _ = run(x, w)
    with jax.set_mesh(mesh):
        got, text = run(jax.device_put(x, NamedSharding(mesh, P())), placed)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * float(jnp.abs(want).max()))
    sent = [x for x in plan.collectives(text, narrow=False) if x.kind != "all-reduce"]
    assert not re.search(r"= [us]8\[\S* (all-gather|all-to-all|collective-permute)", text)
    assert all(x.nbytes <= 4 * 3 * 512 for x in sent)
    assert len(re.findall(r" all-reduce\(", text)) == (subscripts == "tf,df->td" and c not in BY_OUTPUTS)


@pytest.mark.parametrize("form", ["nf4", "fp4", "e2m1"])
def test_a_tpu_reads_codes_without_a_gather(form):
    """The numbers of the table, -0 too, bit by bit."""
    codes = jnp.arange(16, dtype=jnp.uint8).reshape(2, 8)
    w = Quantized(codes << 4 | codes, jnp.ones((2, 1)), None, form, (16,), np.dtype("float32"))
    with tracing_for("tpu"):
        read = lambda w: decode(w, jnp.bfloat16)
        text, got = str(jax.make_jaxpr(read)(w)), read(w)
    want = np.asarray(CODES[form], jnp.bfloat16).reshape(2, 8)
    assert "gather" not in text and len(got) == 2
    for half in got:
        np.testing.assert_array_equal(np.asarray(half).view(np.uint16), want.view(np.uint16))
