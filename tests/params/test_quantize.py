"""Quantised matrices against the formats' definitions in numpy, ml_dtypes and bitsandbytes."""

import dataclasses
import functools
import importlib
import math
import re

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fdel import ops
from fdel.ops.weights import NF4, LowRank, Quantized, dense
from fdel.params.hf_layout import Matrix, hf_names, layout, matrix
from fdel.params.quantize import MATRICES as LANGUAGE
from fdel.params.quantize import dequantize, quantize, straight_through, targets
from fdel.params.spec import Param, named_leaves, normal, stack, unstack
from tests.models import tiny

RNG = np.random.default_rng(0)


def param(axes: str, file: str, *shape: int, part: tuple[int, int] | None = None, dtype: str | None = None) -> Param:
    return Param(axes, shape, normal(1.0), "name.{layers}.weight", file, part, dtype)


LAYER = {
    "attn_norm": param("embed", "", 80),
    "q": param("heads head_dim embed", "(heads head_dim) embed", 4, 20, 80),
    "q_bias": param("heads head_dim", "(heads head_dim)", 4, 20),
    "o": param("embed heads head_dim", "embed (heads head_dim)", 80, 4, 20),
    "router": param("experts embed", "", 3, 80),
    "experts": {"up": param("experts ffn embed", "", 3, 6, 80)},
    "decay": param("embed state", "", 80, 4, dtype="float32"),
}
SPEC = {
    "embed": param("vocab embed", "", 7, 80),
    "layers": stack(LAYER, "layers", range(2)),
    "norm": param("embed", "", 80),
}
# path: how many of the last axes are inputs
MATRICES = {"embed": 1, "layers.q": 1, "layers.o": 2, "layers.router": 1, "layers.experts.up": 1}


def make_params(spec: dict, dtype: str = "float32") -> dict:
    """Random arrays whose magnitude differs between rows and columns; a few whole groups are zero."""

    def one(p: Param) -> jax.Array:
        x = RNG.standard_normal(p.shape)
        for axis, n in enumerate(p.shape):
            x *= np.exp(RNG.standard_normal(n)).reshape(-1, *[1] * (x.ndim - axis - 1))
        return jnp.array(np.where(np.arange(p.shape[-1]) == 3, 0, x), dtype)

    return jax.tree.map(one, spec)


PARAMS = make_params(SPEC)


def at(tree: dict, path: str) -> object:
    for key in path.split("."):
        tree = tree[key]
    return tree


@functools.cache
def quantized(format: str, group: int | None = None, double: bool = False) -> dict:
    """All matrices, with the arrays that they stand for."""
    q = lambda p: quantize(p, format, "", spec=SPEC, group=group, double=double)
    return jax.jit(lambda p: (q(p), dequantize(q(p))))(PARAMS)


def groups(path: str, w: np.ndarray, size: int | None) -> tuple[np.ndarray, callable]:
    """One row per group of inputs (padded with zeros), and the function that puts rows back into w's shape."""
    n = math.prod(w.shape[-MATRICES[path] :])
    rows = w.reshape(-1, n)
    size = min(size or n, n)
    padded = np.pad(rows, ((0, 0), (0, -n % size)))
    return padded.reshape(-1, size), lambda x: x.reshape(padded.shape)[:, :n].reshape(w.shape)


@pytest.mark.parametrize("group", [None, 32])
@pytest.mark.parametrize("path", MATRICES)
def test_int8_is_within_half_a_scale(path: str, group: int | None) -> None:
    """|error| <= scale / 2, where a scale is the greatest magnitude of the group over 127."""
    w = np.asarray(at(PARAMS, path), np.float64)
    rows, back = groups(path, w, group)
    scale = back(np.broadcast_to(np.abs(rows).max(1, keepdims=True) / 127, rows.shape))
    q, got = (at(tree, path) for tree in quantized("int8", group))
    assert q.values.dtype == np.int8 and q.shape == w.shape
    error = np.abs(np.asarray(got, np.float64) - w)
    assert (error <= scale / 2 * (1 + 1e-4)).all()  # the division is rounded: 127 * 2^-23 of a scale
    assert (error > scale * 0.4).any()


@pytest.mark.parametrize("group", [None, 32])
@pytest.mark.parametrize("path", MATRICES)
def test_fp8_rounds_like_ml_dtypes(path: str, group: int | None) -> None:
    """The same fp8 numbers, subnormal ones included, times scales that are quotients by 448 (which XLA may round)."""
    rows, back = groups(path, np.asarray(at(PARAMS, path)), group)
    scale = np.asarray(at(quantized("fp8", group)[0], path).scale).reshape(-1, 1)
    np.testing.assert_allclose(scale, np.abs(rows).max(1, keepdims=True) / np.float32(448), rtol=2e-7)
    e4m3 = (rows / np.where(scale == 0, 1, scale)).astype(ml_dtypes.float8_e4m3fn)
    assert (np.abs(e4m3.astype(np.float32)) < 2**-6).any() and (np.abs(e4m3.astype(np.float32)) == 448).any()
    q, got = (at(tree, path) for tree in quantized("fp8", group))
    assert q.values.dtype == np.uint8
    np.testing.assert_allclose(got, back(e4m3.astype(np.float32) * scale), rtol=3e-7)


def test_fp8_rounds_once() -> None:
    """Values just beside the midpoint of two fp8 numbers go to the nearer one: no rounding to float16 on the way."""
    numbers = np.arange(0, 127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    middle = (numbers[1:] + numbers[:-1]) / 2
    x = np.concatenate([numbers, middle, np.nextafter(middle, 500), np.nextafter(middle, -500)])
    x = np.concatenate([x, -x]).reshape(1, -1)
    spec = {"w": param("a b", "", 1, x.size)}
    got = dense(quantize({"w": jnp.array(x)}, "fp8", "w", spec=spec)["w"])
    np.testing.assert_array_equal(got, x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32))


@pytest.mark.parametrize("group", [None, 32])
@pytest.mark.parametrize("path", MATRICES)
def test_nf4_is_the_nearest_code(path: str, group: int | None) -> None:
    """The nearest of the 16 codes times the greatest magnitude of its group of 64 inputs (QLoRA, section 3)."""
    w = np.asarray(at(PARAMS, path), np.float64)
    rows, back = groups(path, w, group or 64)
    absmax = np.abs(rows).max(1, keepdims=True)
    code = np.abs((rows / np.where(absmax == 0, 1, absmax))[..., None] - np.array(NF4)).argmin(-1)
    q, got = (at(tree, path) for tree in quantized("nf4", group))
    assert q.values.dtype == np.uint8
    np.testing.assert_allclose(got, back(np.array(NF4)[code] * absmax), rtol=1e-6)


@pytest.mark.slow
def test_mxfp4_rounds_like_ml_dtypes() -> None:
    """Bit for bit in float64, with ties, saturation and a group of zeros."""
    r = np.random.default_rng(0)
    w = (r.standard_normal((64, 96)) * np.exp(3 * r.standard_normal((64, 1)))).astype(np.float32)
    w[3, :32], w[4, :32] = 0, np.resize([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, 7, -0.25, -0.75, -5, -7], 32)
    spec = {"w": Param("a b", w.shape, normal(1.0), "w.weight", "")}
    made = quantize({"w": jnp.array(w)}, "mxfp4", "w", spec=spec)
    groups = w.reshape(64, 3, 32)
    most = np.abs(groups).max(-1).astype(np.float64)
    scale = np.exp2(np.where(most > 0, np.floor(np.log2(np.where(most > 0, most, 1))) - 2, -126))[..., None]
    nearest = np.clip(groups / scale, -6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float64)
    np.testing.assert_array_equal(dequantize(made)["w"], (nearest * scale).reshape(w.shape))


def test_double_quantised_scales() -> None:
    """8-bit scales lie within 1/510 of their output's range of scales; float32 scales stay where that saves nothing."""
    single, double = (quantized("nf4", 16, double)[0]["layers"] for double in (False, True))
    for name in "q", "o":
        exact, got = np.asarray(single[name].scale, np.float64), np.asarray(dense(double[name].scale), np.float64)
        span = exact.max(-1, keepdims=True) - exact.min(-1, keepdims=True)
        assert exact.shape[-1] == 5 and (np.abs(got - exact) <= span / 510 * (1 + 1e-4) + 1e-12).all()
        assert (got != exact).any()
    assert isinstance(quantized("nf4", None, True)[0]["layers"]["q"].scale, jax.Array)  # two groups per output


@pytest.mark.slow
def test_equals_bitsandbytes() -> None:
    """The same codes and block scales as bitsandbytes, whose blocks are 64 inputs of one output of a torch weight."""
    torch = pytest.importorskip("torch", reason="needs the torch extra")
    functional = pytest.importorskip("bitsandbytes.functional", reason="needs bitsandbytes")
    w = RNG.standard_normal((40, 192)).astype(np.float32)  # [out, in]
    packed, state = functional.quantize_4bit(torch.tensor(w), blocksize=64, quant_type="nf4")
    q = quantize({"w": jnp.array(w)}, "nf4", "w", spec={"w": param("a b", "", 40, 192)}, double=False)["w"]
    np.testing.assert_array_equal(q.scale.reshape(-1), state.absmax.numpy())
    np.testing.assert_allclose(dense(q), functional.dequantize_4bit(packed, state).numpy(), atol=1e-6)
    nested, state = functional.quantize_4bit(torch.tensor(w), blocksize=64, quant_type="nf4", compress_statistics=True)
    theirs = np.abs(functional.dequantize_4bit(nested, state).numpy() - w).mean()
    ours = quantize({"w": jnp.array(w)}, "nf4", "w", spec={"w": param("a b", "", 40, 192)})["w"]
    assert np.abs(dense(ours) - w).mean() < theirs * 1.001


def test_bits_per_parameter() -> None:
    """4096 inputs: 8 bits and a scale; 4 bits, 8 bits per 64 inputs and two float32 per output."""
    spec = {"layers": stack({"w": param("ffn embed", "", 16, 4096)}, "layers", range(2))}
    params = {"layers": {"w": jax.ShapeDtypeStruct((2, 16, 4096), jnp.bfloat16)}}
    bits = {}
    for format in "int8", "fp8", "nf4":
        abstract = jax.eval_shape(lambda p, f=format: quantize(p, f, spec=spec), params)["layers"]["w"]
        bits[format] = sum(8 * x.dtype.itemsize * x.size for x in jax.tree.leaves(abstract)) / (2 * 4096 * 16)
        assert abstract.shape == (2, 16, 4096) and abstract.dtype == jnp.bfloat16
    assert bits == {"int8": 8 + 32 / 4096, "fp8": 8 + 32 / 4096, "nf4": 4 + 8 / 64 + 64 / 4096}


@pytest.mark.slow
@pytest.mark.parametrize("format", ["int8", "nf4"])
def test_tree(format: str) -> None:
    """Takes the matrices of layers, without routers; a listed tree gives the same; the way back keeps the dtype."""
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    got = jax.jit(lambda p: quantize(p, format, spec=SPEC))(params)
    is_quantized = lambda x: isinstance(x, Quantized)
    chosen = jax.tree.map(is_quantized, got, is_leaf=is_quantized)
    layer = dict.fromkeys(LAYER, False) | {"q": True, "o": True, "experts": {"up": True}}
    assert chosen == {"embed": False, "norm": False, "layers": layer}
    for spec in SPEC, unstack(SPEC):
        listed = jax.jit(lambda p, spec=spec: quantize(p, format, spec=spec))(unstack(params))
        chex.assert_trees_all_equal(listed, unstack(got))
    back = dequantize(got)
    assert jax.tree.map(lambda x: x.dtype, back) == jax.tree.map(lambda x: x.dtype, params)
    np.testing.assert_array_equal(back["layers"]["q_bias"], params["layers"]["q_bias"])
    np.testing.assert_array_equal(back["layers"]["o"], dense(got["layers"]["o"]))
    assert dequantize(got, jnp.float32)["layers"]["o"].dtype == jnp.float32


def test_base_of_an_adapter() -> None:
    q = PARAMS["layers"]["q"]
    adapted = LowRank(q, jnp.ones((2, 1, 80)), jnp.ones((2, 4, 20, 1)), jnp.ones(2))
    params = PARAMS | {"layers": PARAMS["layers"] | {"q": adapted}}
    got = quantize(params, "int8", spec=SPEC)["layers"]["q"]
    assert isinstance(got.base, Quantized) and got.a is adapted.a
    full = dequantize({"layers": {"q": got}})["layers"]["q"].base
    np.testing.assert_array_equal(full, quantized("int8")[1]["layers"]["q"])


def test_errors() -> None:
    with pytest.raises(ValueError, match="'int3' is not one of int8, fp8, nf4"):
        quantize(PARAMS, "int3", spec=SPEC)
    with pytest.raises(ValueError, match="matches no matrix; there are embed, .*layers.q"):
        quantize(PARAMS, "int8", "norm", spec=SPEC)
    with pytest.raises(ValueError, match="the spec has no extra"):
        quantize(PARAMS | {"extra": jnp.ones((2, 2))}, "int8", spec=SPEC)
    with pytest.raises(ValueError, match="layers.o is int8 already"):
        quantize(quantized("int8")[0], "nf4", r"\bo$", spec=SPEC)
    with pytest.raises(ValueError, match="group=15 must be positive, and even"):
        quantize(PARAMS, "nf4", spec=SPEC, group=15)


SEEN = [
    (param("ffn embed", "", 6, 8), Matrix(0, 1)),
    (param("ffn embed", "embed ffn", 6, 8), Matrix(0, 1)),  # Conv1D of GPT-2
    (param("heads head_dim embed", "(heads head_dim) embed", 2, 3, 8), Matrix(0, 2)),
    (param("embed heads head_dim", "embed (heads head_dim)", 8, 2, 3), Matrix(0, 1)),
    (param("embed heads head_dim", "(heads head_dim) embed", 8, 2, 3), Matrix(0, 1)),
    (param("heads head_dim embed", "embed [heads head_dim]", 2, 3, 8, part=(0, 18)), Matrix(0, 2)),
    (param("kv_heads rep chan embed", "(kv_heads [rep chan]) embed", 2, 2, 3, 8, part=(0, 9)), Matrix(0, 3)),
    (param("heads head_dim latent", "(heads [head_dim]) latent", 2, 3, 8, part=(0, 5)), Matrix(0, 2)),
    (param("experts ffn embed", "", 4, 6, 8), Matrix(1, 1)),
    (param("experts ffn embed", "experts [ffn] embed", 4, 6, 8, part=(0, 12)), Matrix(1, 1)),
    (param("experts ffn embed", "(experts ffn) embed", 4, 6, 8), Matrix(1, 1)),
    (param("experts embed", "", 4, 8), Matrix(0, 1)),  # a router
    (param("vocab embed", "", 9, 8), Matrix(0, 1)),
    (stack(stack(param("ffn embed", "", 6, 8), "experts", range(4)), "layers", range(2)), Matrix(2, 1)),
    (Param("experts ffn", (4, 6), normal(1.0), "mlp.experts.up_proj_bias"), None),
    (Param("experts embed", (4, 8), normal(1.0), "mlp.experts.{experts}.down_proj.bias"), None),
    (param("embed", "", 8), None),
    (param("heads head_dim", "(heads head_dim)", 2, 3), None),
    (param("heads head_dim", "[heads head_dim]", 2, 3, part=(0, 18)), None),
    (param("inner kernel", "inner 1 kernel", 8, 4), None),
    (param("embed state", "", 8, 4, dtype="float32"), None),
    (param("embed channels height width", "", 8, 3, 2, 2), None),
    (dataclasses.replace(param("embed channels height width", "", 8, 3, 2, 2), inputs=3), Matrix(0, 1)),  # patches
    (dataclasses.replace(param("experts ffn embed", "", 4, 6, 8), inputs=1), Matrix(1, 1)),
    (dataclasses.replace(param("vocab embed", "", 9, 8), inputs=0), None),
]  # fmt: skip


@pytest.mark.parametrize(("declared", "seen"), SEEN)
def test_matrix(declared: Param, seen: Matrix | None) -> None:
    assert matrix(declared) == seen


@pytest.mark.parametrize("name", tiny.TINY)
def test_the_matrices_of_every_family(name: str) -> None:
    """Those that the file has as a matrix of weights and that are no convolution; their sides multiply to its sides.

    Experts that lie in one tensor, which is named without ".weight", have the sides that they have here.
    """
    module = importlib.import_module(f"fdel.models.{name.partition(':')[0]}")
    declared = dict(named_leaves(module.spec(module.Config.from_hf(tiny.TINY[name].values))))
    seen = {path: m for path, p in declared.items() if (m := matrix(p))}
    flat = {path: layout(p).file_shape for path, p in declared.items()}
    together = lambda p: ".experts." in p.hf and not p.hf.endswith((".weight", "bias"))
    named = ".weight", "_proj_weight", "_projection_weight", "positional_embedding_vlm"
    two = lambda p, shape: p.hf.endswith(named) and len(shape) == 2 and 1 not in shape
    plain = lambda p, shape: two(p, shape) and not p.dtype and p.inputs != 0  # 0: scales of several heads
    weight = lambda p, shape: together(p) or plain(p, shape)
    assert seen.keys() == {path for path, shape in flat.items() if weight(declared[path], shape)}
    for path, m in seen.items():
        p = declared[path]
        outputs, inputs = (math.prod(side) for side in m.cut(p.shape)[1:])
        sides = p.shape[-2:] if together(p) else flat[path]
        assert m.batch == len(p.stacked) + together(p) and (p.part or {outputs, inputs} == {*sides}), path
        assert inputs in sides, path


TOWER = re.compile(r"visual|vision|audio_tower|resampler|merger|projector")  # in names of files


@pytest.mark.parametrize("name", [n for n, e in tiny.TINY.items() if "vision_config" in str(e.values) and ":" not in n])
def test_towers_stay_whole(name: str) -> None:
    """By default, as adapters leave them: all matrices of layers are the language model's or a tower's, by their names in
    files, which others gave."""
    module = importlib.import_module(f"fdel.models.{name}")
    spec = module.spec(module.Config.from_hf(tiny.TINY[name].values))
    names = {path: hf_names(p)[0] for path, p in named_leaves(spec) if p.hf}
    found = {by: {names[path] for path in targets(spec, spec, by)} for by in (LANGUAGE, r"\blayers\b")}
    assert found[LANGUAGE] and not any(map(TOWER.search, found[LANGUAGE]))
    router = lambda n: n.endswith(("mlp.gate.weight", "router.weight", "router.proj.weight"))
    assert all(TOWER.search(n) or router(n) for n in found[r"\blayers\b"] - found[LANGUAGE])
    assert any(map(TOWER.search, found[r"\blayers\b"]))


def rounded(x: np.ndarray, bits: int) -> np.ndarray:
    """Each row to integers, its greatest magnitude to the greatest of them, in float64."""
    step = np.abs(x).max(-1, keepdims=True) / (2 ** (bits - 1) - 1)
    step[step == 0] = 1
    return np.round(x / step) * step


@pytest.mark.parametrize(("format", "group"), [("a8bit", None), ("a8q", 32), ("w4a8", None), ("a4q", 48)])
def test_products_of_rounded_activations(format: str, group: int | None) -> None:
    """Rounded x times the weights that are stored, 1e-5; gradients of x and of an adapter as if x were not rounded."""
    w = np.asarray(PARAMS["layers"]["q"][0])
    q = quantize({"w": jnp.array(w)}, format, "w", spec={"w": LAYER["q"]}, group=group)["w"]
    stored, bits = np.asarray(dense(q), np.float64), 4 if format == "a4q" else 8
    x = RNG.normal(size=(3, 5, 80)).astype(np.float32) * np.exp(RNG.normal(size=(3, 5, 1))).astype(np.float32)
    x[1, 2] = 0
    product = lambda x, w: ops.einsum("...d,nhd->...nh", x, w)
    got, pull = jax.vjp(product, jnp.array(x), q)
    want = np.einsum("btd,nhd->btnh", rounded(x.astype(np.float64), bits), stored)
    close = lambda a, b: np.abs(a - b).max() < 1e-5 * np.abs(b).max()
    assert q.activations == bits and close(got, want) and not close(np.einsum("btd,nhd->btnh", x, stored), want)
    assert close(pull(jnp.ones_like(got))[0], np.broadcast_to(stored.sum((0, 1)), x.shape))
    half = product(jnp.array(x, jnp.bfloat16), q)
    assert half.dtype == jnp.bfloat16 and np.abs(half - want).max() < 2e-2 * np.abs(want).max()
    a = jnp.array(RNG.normal(size=(2, 80)), jnp.float32)
    learn = lambda b: product(jnp.array(x), LowRank(q, a, b, jnp.array(1.0))).sum()
    gradient = jax.grad(learn)(jnp.zeros((4, 20, 2)))
    np.testing.assert_allclose(gradient[0, 0], x.reshape(-1, 80).sum(0) @ a.T, rtol=1e-3, atol=1e-3)


def test_experts_round_activations() -> None:
    """Each group of rows with its own expert's integers; 1e-5, and the gradient of the rows."""
    q = quantize({"w": PARAMS["layers"]["experts"]["up"][0]}, "a8q", "w", spec={"w": LAYER["experts"]["up"]})["w"]
    x, sizes = RNG.normal(size=(9, 80)).astype(np.float32), jnp.array([4, 0, 5])
    got, pull = jax.vjp(lambda x: ops.grouped_matmul(x, q, sizes), jnp.array(x))
    stored = np.asarray(dense(q), np.float64)[[0] * 4 + [2] * 5]
    want = np.einsum("mk,mnk->mn", rounded(x.astype(np.float64), 8), stored)
    assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()
    np.testing.assert_allclose(pull(jnp.ones_like(got))[0], stored.sum(1), rtol=1e-4, atol=1e-4)


def test_straight_through() -> None:
    """The values are those of the quantised tree; gradients are those at them, for each weight."""
    spec, w = (
        {"w": LAYER["q"], "b": LAYER["q_bias"]},
        {"w": PARAMS["layers"]["q"][0], "b": PARAMS["layers"]["q_bias"][0]},
    )
    loss = lambda p: (p["w"] ** 2).sum() + (p["b"] ** 2).sum()
    value, got = jax.value_and_grad(lambda p: loss(straight_through(p, "int4", "w", spec=spec)))(w)
    near = dequantize(quantize(w, "int4", "w", spec=spec))
    assert not np.array_equal(near["w"], w["w"])
    np.testing.assert_allclose(value, loss(near), rtol=1e-6)
    np.testing.assert_allclose(got["w"], 2 * near["w"], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got["b"], 2 * w["b"])
