"""einsum and embed over every kind of weight, against numpy in float64 over the weight spelled out densely."""

import dataclasses
from statistics import NormalDist

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel.ops.einsum import einsum
from fdel.ops.embed import embed
from fdel.ops.weights import NF4, LowRank, Quantized, dense, dequantize, is_weight

RNG = np.random.default_rng(0)

# subscripts, shape of x, shape of the weight, number of its batch and leading axes, whether its inputs come last
CASES = {
    "q": ("...d,dnh->...nh", (2, 3, 24), (24, 4, 6), 0, 1, False),
    "o": ("...nh,nhd->...d", (5, 4, 6), (4, 6, 10), 0, 2, False),
    "one row": ("...nh,nhd->...d", (1, 4, 6), (4, 6, 10), 0, 2, False),
    "no row axis": ("d,df->f", (24,), (24, 10), 0, 1, False),
    "long": ("td,df->tf", (3, 1536), (1536, 10), 0, 1, False),
    "long, awkward": ("...d,df->...f", (3, 1186), (1186, 10), 0, 1, False),
    "tied head": ("...d,vd->...v", (2, 3, 24), (11, 24), 0, 1, True),
    "tied head, long": ("...d,vd->...v", (1, 1024), (11, 1024), 0, 1, True),
    "experts": ("ecd,edf->ecf", (3, 5, 24), (3, 24, 10), 1, 1, False),
    "experts, rows first": ("ted,edf->tef", (5, 3, 24), (3, 24, 10), 1, 1, False),
    "all experts": ("td,edf->tef", (5, 24), (3, 24, 10), 1, 1, False),
    "latent": ("...l,lnh->...nh", (5, 24), (24, 4, 6), 0, 1, False),
    "absorbed": ("...nh,lnh->...nl", (5, 4, 6), (24, 4, 6), 0, 1, False),
    "permuted": ("dbt,dnh->hbnt", (24, 2, 3), (24, 4, 6), 0, 1, False),
    "split inputs": ("ntd,nhd->nth", (4, 3, 8), (4, 6, 8), 0, 2, False),
}  # fmt: skip


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape)


def sides(case: tuple) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    _, _, shape, batch, leading, _ = case
    return shape[:batch], shape[batch : batch + leading], shape[batch + leading :]


def quantized(case: tuple, format: str, groups: int) -> tuple[Quantized, np.ndarray]:
    """A Quantized weight of random bits, and in float64 the array that it stands for, both written out here."""
    batch, leading, trailing = sides(case)
    inputs, outputs = (trailing, leading) if case[-1] else (leading, trailing)
    n = int(np.prod(inputs))
    group = 2 * -(-n // groups // 2)  # even, and longer than the inputs where they do not divide
    scale = RNG.uniform(0.5, 1.5, (*batch, groups, *outputs)).astype(np.float32)
    if format == "int8":
        stored = RNG.integers(-127, 128, (*batch, groups, group, *outputs)).astype(np.int8)
        value = stored.astype(np.float64)
    elif format == "fp8":
        stored = RNG.integers(0, 127, (*batch, groups, group, *outputs)).astype(np.uint8)  # all but NaN: both signs
        stored |= RNG.integers(0, 2, stored.shape).astype(np.uint8) << 7
        value = stored.view(jnp.float8_e4m3fn).astype(np.float64)
    else:
        index = RNG.integers(0, 16, (*batch, groups, group, *outputs)).astype(np.uint8)
        value = np.array(NF4)[index]
        high, low = np.split(index, 2, axis=len(batch) + 1)
        stored = high << 4 | low
    value = value * np.expand_dims(scale, len(batch) + 1)
    merge = lambda x: x.reshape(*batch, -1, *outputs)
    full = merge(value)[(slice(None),) * len(batch) + (slice(n),)].reshape(*batch, *inputs, *outputs)
    stored, axis = merge(stored), -1 - len(outputs)
    if case[-1]:
        stored, scale, full = stored.T, scale.T, np.moveaxis(full, -1, 0)
        axis = -1
    w = Quantized(jnp.array(stored), jnp.array(scale), None, format, axis, inputs, np.dtype(np.float32))
    return w, full


def low_rank(case: tuple, base: object, full: np.ndarray) -> tuple[LowRank, np.ndarray]:
    batch, leading, trailing = sides(case)
    a, b, scale = normal(*batch, *leading, 3), normal(*batch, 3, *trailing), normal(*batch) if batch else normal()
    update = np.einsum("zir,zro,z->zio", *(x.reshape(s) for x, s in (
        (a, (-1, int(np.prod(leading)), 3)), (b, (-1, 3, int(np.prod(trailing)))), (np.asarray(scale), (-1,))
    )))  # fmt: skip
    f32 = lambda x: jnp.array(x, jnp.float32)
    return LowRank(base, f32(a), f32(b), f32(scale)), full + update.reshape(full.shape)


def weight(case: tuple, kind: str) -> tuple[object, np.ndarray]:
    name, _, base = kind.partition(" of ")
    if name == "lora":
        return low_rank(case, *weight(case, base))
    if name == "array":
        full = normal(*case[2]).astype(np.float32)
        return jnp.array(full), full.astype(np.float64)
    format, _, groups = name.partition("/")
    return quantized(case, format, int(groups or 1))


KINDS = ["array", "int8", "nf4/6", "lora of fp8/3", "int8/3", "fp8", "nf4", "lora of array"]


def spelled(case: tuple) -> tuple[str, str, str]:
    """Axes of x, weight and result without an ellipsis."""
    ins, out = case[0].replace("...", "XY"[: len(case[1]) - len(case[0].split(",")[0].replace("...", ""))]).split("->")
    return (*ins.split(","), out)


@pytest.mark.parametrize("name", CASES)
def test_equals_dense(name: str) -> None:
    """Result, dtype and gradient for x within 1e-5 of the largest value."""
    case = CASES[name]
    weights = {kind: weight(case, kind) for kind in KINDS[: None if name in ("q", "tied head", "experts") else 4]}
    x = normal(*case[1])
    g = normal(*np.einsum(case[0], x, np.zeros(case[2])).shape)

    @jax.jit
    def run(x: jax.Array, g: jax.Array, ws: dict) -> dict:
        one = lambda w: ((f := jax.vjp(lambda x: einsum(case[0], x, w), x))[0], f[1](g)[0])
        return jax.tree.map(one, ws, is_leaf=is_weight)

    got = run(jnp.float32(x), jnp.float32(g), {kind: w for kind, (w, _) in weights.items()})
    xs, ws, out = spelled(case)
    for kind, (_, full) in weights.items():
        want = np.einsum(case[0], x, full), np.einsum(f"{out},{ws}->{xs}", g, full)
        for a, b in zip(got[kind], want, strict=True):
            assert a.dtype == np.float32
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max(), err_msg=kind)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", ["one row", "long", "experts", "tied head"])
def test_half_precision(name: str, dtype: jnp.dtype) -> None:
    """Weight and result are rounded, sums over 1536 inputs are not; `out_dtype` leaves the result unrounded."""
    case = CASES[name]
    weights = {kind: weight(case, kind) for kind in ("array", "int8", "int8/3", "nf4/6", "lora of fp8")}
    x = jnp.array(normal(*case[1]) / 64, dtype)
    one = lambda x, w: (einsum(case[0], x, w), einsum(case[0], x, w, out_dtype=jnp.float32))
    run = jax.jit(lambda x, ws: jax.tree.map(lambda w: one(x, w), ws, is_leaf=is_weight))
    eps = float(jnp.finfo(dtype).eps)
    for kind, (half, wide) in run(x, {kind: w for kind, (w, _) in weights.items()}).items():
        assert half.dtype == dtype and wide.dtype == np.float32
        want = np.einsum(case[0], np.asarray(x, np.float64), weights[kind][1])
        near = eps * np.abs(want).max() * (4 if "lora" in kind else 1)  # x a, and both summands, are rounded once more
        np.testing.assert_allclose(np.asarray(half, np.float64), want, rtol=eps, atol=near, err_msg=kind)
        np.testing.assert_allclose(wide, want, rtol=0, atol=near, err_msg=kind)


def test_float32_sums() -> None:
    """4096 + 4095 ones are lost where a sum is kept in bfloat16, which cannot count past 256."""
    x = jnp.ones((2, 8191), jnp.bfloat16)
    assert (einsum("td,df->tf", x, jnp.ones((8191, 3), jnp.bfloat16), out_dtype=jnp.float32) == 8191).all()
    assert (einsum("d,df->f", x[0], jnp.ones((8191, 3), jnp.bfloat16), out_dtype=jnp.float32) == 8191).all()
    w = Quantized(jnp.ones((8192, 3), jnp.int8), jnp.ones((128, 3)), None, "int8", -2, (8191,), np.dtype("bfloat16"))
    assert (einsum("td,df->tf", x, w, out_dtype=jnp.float32) == 8191).all()
    assert (einsum("td,df->tf", x, w) == 8192).all()


def test_layers_are_sliced() -> None:
    """A stacked weight can be scanned over, indexed through tree.map and vmapped; static fields stay right."""
    stacked = ("", (), (3, 24, 4, 6), 1, 1, False)
    x = normal(5, 24)
    apply = lambda w: einsum("td,dnh->tnh", jnp.float32(x), w)

    @jax.jit
    def walk(w: object) -> list:
        layers = [jax.tree.map(lambda a, i=i: a[i], w) for i in range(3)]
        assert layers[0].shape == (24, 4, 6)
        scanned = jax.lax.scan(lambda c, w: (c, apply(w)), None, w)[1]
        return [scanned, jnp.stack([*map(apply, layers)]), jax.vmap(apply)(w)]

    for kind in "array", "int8", "nf4/6", "lora of nf4/6":
        w, full = weight(stacked, kind)
        want = np.einsum("td,ldnh->ltnh", x, full)
        for got in walk(w):
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max(), err_msg=kind)


@pytest.mark.parametrize("name", ["q", "o", "tied head", "experts", "absorbed", "long"])
def test_adapter_gradients(name: str) -> None:
    """Gradients for a and b are those of scale * a b in the dense weight, also when layers are rematerialised."""
    case = CASES[name]
    batch, leading, trailing = (axes[: len(s)] for s, axes in zip(sides(case), ("AB", "CD", "EF"), strict=True))
    x = normal(*case[1])
    g = normal(*np.einsum(case[0], x, np.zeros(case[2])).shape)
    weights = {kind: weight(case, kind)[0] for kind in ("lora of array", "lora of int8", "lora of nf4/6")}

    @jax.jit
    def run(x: jax.Array, g: jax.Array, ws: dict) -> dict:
        loss = lambda a, b, w: jnp.sum(g * einsum(case[0], x, dataclasses.replace(w, a=a, b=b)))
        grads = lambda w: [jax.grad(f, (0, 1))(w.a, w.b, w) for f in (loss, jax.checkpoint(loss))]
        return jax.tree.map(grads, ws, is_leaf=is_weight)

    xs, ws, out = spelled(case)
    dw = np.einsum(f"{xs},{out}->{ws}", x, g)
    for kind, got in run(jnp.float32(x), jnp.float32(g), weights).items():
        w = weights[kind]
        da = np.einsum(f"{batch}{leading}{trailing},{batch}z{trailing},{batch}->{batch}{leading}z", dw, w.b, w.scale)
        db = np.einsum(f"{batch}{leading}{trailing},{batch}{leading}z,{batch}->{batch}z{trailing}", dw, w.a, w.scale)
        for a, b in got:
            np.testing.assert_allclose(a, da, rtol=0, atol=1e-5 * np.abs(da).max(), err_msg=kind)
            np.testing.assert_allclose(b, db, rtol=0, atol=1e-5 * np.abs(db).max(), err_msg=kind)


def test_scales_get_no_gradient() -> None:
    case = CASES["q"]
    x = jnp.array(normal(*case[1]), jnp.float32)
    for kind in "int8", "nf4/6":
        w, _ = weight(case, kind)
        f = lambda scale, w=w: einsum(case[0], x, dataclasses.replace(w, scale=scale)).sum()
        assert not jax.grad(f)(w.scale).any()
    w, _ = weight(case, "lora of array")
    assert not jax.grad(lambda scale: einsum(case[0], x, dataclasses.replace(w, scale=scale)).sum())(w.scale).any()


def test_backward_keeps_no_decoded_weight() -> None:
    """Between forward and backward lie the packed bits only, not the float32 weight that they decode to."""
    case = ("td,df->tf", (4, 2048), (2048, 256), 0, 1, False)
    w, full = weight(case, "nf4/32")
    kept = jax.tree.leaves(jax.vjp(lambda x: einsum(case[0], x, w), jnp.zeros(case[1]))[1])
    assert 0 < sum(k.nbytes for k in kept if k.size > 4096) <= w.values.nbytes + w.scale.nbytes + 4 * 2048 * 4
    assert full.size * 4 > 4 * (w.values.nbytes + w.scale.nbytes)


def test_sharded_like_one_device() -> None:
    """Weights split over heads give what one device gives, whatever they are made of."""
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,) * 2)
    put = lambda x, *axes: jax.device_put(x, jax.NamedSharding(mesh, jax.P(*axes)))
    case = ("...d,dnh->...nh", (4, 3, 1024), (1024, 4, 6), 0, 1, False)
    x = normal(*case[1])
    weights = {kind: weight(case, kind) for kind in ("int8", "nf4/6", "lora of array")}
    on_mesh = {kind: jax.tree.map(lambda c: put(c, None, "tp"), weights[kind][0]) for kind in ("int8", "nf4/6")}
    w, _ = weights["lora of array"]
    on_mesh["lora of array"] = LowRank(put(w.base, None, "tp"), put(w.a), put(w.b, None, "tp"), put(w.scale))
    run = jax.jit(lambda x, ws: jax.tree.map(lambda w: einsum(case[0], x, w), ws, is_leaf=is_weight))
    for kind, got in run(put(jnp.float32(x), "dp"), on_mesh).items():
        want = np.einsum(case[0], x, weights[kind][1])
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max(), err_msg=kind)


@pytest.mark.parametrize(
    ("subscripts", "message"),
    [
        ("...d,df->...f", "does not fit"),
        ("...d,dnh->...n", "axis 'h' must be"),
        ("tbd,dnh->bnh", "axis 't' must be"),
        ("tdd,dnh->tnh", "axis 'd' must be"),
        ("td...,dnh->tnh...", "axis 'd' of x .* differs in size"),
    ],
)
def test_wrong_axes(subscripts: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        einsum(subscripts, jnp.zeros((2, 3, 24)), jnp.zeros((24, 4, 6)))


def test_embed() -> None:
    """Rows of the dense table, which `dense` gives whole; ids outside of it give NaN, never another row."""
    tables = {kind: weight(CASES["tied head"], kind) for kind in KINDS}
    tokens = RNG.integers(0, 11, (2, 5))
    run = jax.jit(lambda tables, tokens: jax.tree.map(lambda t: embed(t, tokens), tables, is_leaf=is_weight))
    rows = run({kind: table for kind, (table, _) in tables.items()}, jnp.array(tokens))
    outside = run({kind: table for kind, (table, _) in tables.items()}, jnp.array([-1, 11, 3]))
    for kind, (table, full) in tables.items():
        assert table.shape == full.shape and table.ndim == full.ndim and table.dtype == np.float32
        np.testing.assert_allclose(dense(table), full, rtol=0, atol=1e-5 * np.abs(full).max(), err_msg=kind)
        assert rows[kind].dtype == np.float32
        np.testing.assert_allclose(rows[kind], full[tokens], rtol=0, atol=1e-5 * np.abs(full).max(), err_msg=kind)
        assert jnp.isnan(outside[kind][:2]).all() and not jnp.isnan(outside[kind][2]).any(), kind


def test_embed_gradient_and_errors() -> None:
    full = jnp.array(normal(7, 4), jnp.float32)
    grad = jax.grad(lambda t: (embed(t, jnp.array([1, 1, 6])) * jnp.array([[1.0], [2.0], [5.0]])).sum())(full)
    np.testing.assert_array_equal(grad[:, 0], [0, 3, 0, 0, 0, 0, 5])
    w, _ = weight(("", (), (24, 10), 0, 1, False), "int8")
    with pytest.raises(ValueError, match="quantised along its last axis"):
        embed(w, jnp.array([1]))


def test_nf4_codebook() -> None:
    """The quantiles of the normal distribution that QLoRA (section 3 and appendix E) takes, with an exact zero."""
    quantile = NormalDist().inv_cdf
    positive = [quantile(p) for p in np.linspace(0.9677083, 0.5, 9)[:-1]]
    negative = [-quantile(p) for p in np.linspace(0.9677083, 0.5, 8)[:-1]]
    np.testing.assert_allclose(NF4, np.sort([*positive, 0, *negative]) / positive[0], atol=2e-7)
    every = jnp.arange(256, dtype=jnp.uint8).reshape(1, 256)
    w = Quantized(every, jnp.full((1, 256), 2.0), None, "nf4", -2, (2,), np.dtype("float32"))
    np.testing.assert_array_equal(dequantize(w)[0], 2 * np.repeat(np.float32(NF4), 16))
    np.testing.assert_array_equal(dequantize(w)[1], 2 * np.tile(np.float32(NF4), 16))
