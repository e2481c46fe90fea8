"""einsum and embed over every kind of weight, against numpy in float64 over the weight spelled out densely."""

import dataclasses
import re
from statistics import NormalDist

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fdel.ops import cpu
from fdel.ops.contraction import Plan
from fdel.ops.einsum import einsum
from fdel.ops.embed import embed
from fdel.ops.weights import NF4, LowRank, Quantized, dense, dequantize, is_weight
from fdel.params import make_mesh, parse_mesh

RNG = np.random.default_rng(0)

# subscripts, shape of x, shape of the weight, number of its batch and output axes
CASES = {
    "q": ("...d,nhd->...nh", (2, 3, 24), (4, 6, 24), 0, 2),
    "o": ("...nh,dnh->...d", (5, 4, 6), (10, 4, 6), 0, 1),
    "one row": ("...nh,dnh->...d", (1, 4, 6), (10, 4, 6), 0, 1),
    "no row axis": ("d,fd->f", (24,), (10, 24), 0, 1),
    "many rows": ("...d,fd->...f", (2, 35, 24), (10, 24), 0, 1),
    "long": ("td,fd->tf", (3, 1536), (10, 1536), 0, 1),
    "long, awkward": ("...d,fd->...f", (3, 1186), (10, 1186), 0, 1),
    "head, long": ("...d,vd->...v", (1, 1024), (11, 1024), 0, 1),
    "experts": ("ecd,efd->ecf", (3, 5, 24), (3, 10, 24), 1, 1),
    "experts, rows first": ("ted,efd->tef", (5, 3, 24), (3, 10, 24), 1, 1),
    "all experts": ("td,efd->tef", (5, 24), (3, 10, 24), 1, 1),
    "absorbed keys": ("...nh,nhc->...nc", (5, 4, 6), (4, 6, 24), 0, 2),
    "absorbed values": ("...nc,nhc->...nh", (5, 4, 24), (4, 6, 24), 0, 2),
    "permuted": ("dbt,nhd->hbnt", (24, 2, 3), (4, 6, 24), 0, 2),
    "split inputs": ("td,nhd->tnh", (5, 8), (4, 6, 8), 0, 1),
    "from the outputs": ("...v,vd->...d", (2, 3, 11), (11, 24), 0, 1),
}  # fmt: skip
TILED = ("q", "long", "experts, rows first", "all experts", "absorbed values", "permuted")


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape)


def sides(case: tuple) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    _, _, shape, batch, outputs = case
    return shape[:batch], shape[batch : batch + outputs], shape[batch + outputs :]


def quantized(case: tuple, format: str, groups: int) -> tuple[Quantized, np.ndarray]:
    """A Quantized weight of random bits, and in float64 the array that it stands for, both written out here."""
    batch, outputs, inputs = sides(case)
    n, rows = int(np.prod(inputs)), (*batch, *outputs)
    group = 2 * -(-n // groups // 2)  # even, and longer than the inputs where they do not divide
    scale = RNG.uniform(0.5, 1.5, (*rows, groups)).astype(np.float32)
    if format == "int8":
        stored = RNG.integers(-127, 128, (*rows, groups, group)).astype(np.int8)
        value = stored.astype(np.float64)
    elif format == "fp8":
        stored = RNG.integers(0, 127, (*rows, groups, group)).astype(np.uint8)  # all but NaN: both signs
        stored |= RNG.integers(0, 2, stored.shape).astype(np.uint8) << 7
        value = stored.view(jnp.float8_e4m3fn).astype(np.float64)
    else:
        index = RNG.integers(0, 16, (*rows, groups, group)).astype(np.uint8)
        value = np.array(NF4)[index]
        high, low = np.split(index, 2, axis=-1)
        stored = high << 4 | low
    full = (value * scale[..., None]).reshape(*rows, -1)[..., :n].reshape(*rows, *inputs)
    stored = jnp.array(stored.reshape(*rows, -1))
    return Quantized(stored, jnp.array(scale), None, format, inputs, np.dtype(np.float32)), full


def low_rank(case: tuple, base: object, full: np.ndarray) -> tuple[LowRank, np.ndarray]:
    batch, outputs, inputs = sides(case)
    a, b, scale = normal(*batch, 3, *inputs), normal(*batch, *outputs, 3), normal(*batch) if batch else normal()
    update = np.einsum("zri,zor,z->zoi", *(x.reshape(s) for x, s in (
        (a, (-1, 3, int(np.prod(inputs)))), (b, (-1, int(np.prod(outputs)), 3)), (np.asarray(scale), (-1,))
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


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tile"), [(name, 1 << 18) for name in CASES] + [(name, 48) for name in TILED])
def test_equals_dense(name: str, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Result, dtype and gradient for x within 1e-5 of the largest value; also where weights are decoded in tiles."""
    monkeypatch.setattr(cpu, "TILE", tile)
    case = CASES[name]
    kinds = KINDS[: None if name in ("q", "o", "experts") else 4] if tile > 48 else KINDS[1:4]
    weights = {kind: weight(case, kind) for kind in kinds}
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
@pytest.mark.parametrize("name", ["one row", "long", "experts", "q"])
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
    assert (einsum("td,fd->tf", x, jnp.ones((3, 8191), jnp.bfloat16), out_dtype=jnp.float32) == 8191).all()
    assert (einsum("d,fd->f", x[0], jnp.ones((3, 8191), jnp.bfloat16), out_dtype=jnp.float32) == 8191).all()
    w = Quantized(jnp.ones((3, 8192), jnp.int8), jnp.ones((3, 128)), None, "int8", (8191,), np.dtype("bfloat16"))
    assert (einsum("td,fd->tf", x, w, out_dtype=jnp.float32) == 8191).all()
    assert (einsum("td,fd->tf", x, w) == 8192).all()


@pytest.mark.of_cpu("XLA:CPU alone needs another form for it")
@pytest.mark.parametrize("rows", [1, 8, 128])
@pytest.mark.parametrize("name", ["q", "o"])
def test_a_weight_is_not_copied(name: str, rows: int) -> None:
    """No buffer of the weight's size (2 MiB): left to itself, XLA:CPU transposes one of three axes at each call."""
    x, w = {"q": ((rows, 512), (16, 64, 512)), "o": ((rows, 16, 64), (512, 16, 64))}[name]
    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in (x, w)]
    memory = jax.jit(lambda x, w: einsum(CASES[name][0], x, w)).lower(*args).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 1 << 20


@pytest.mark.parametrize(("rows", "features", "width"), [((2, 130), 33, 24), ((300,), 24, 24), ((4, 64), 8, 24)])
def test_gradients_of_many_rows(rows: tuple[int, ...], features: int, width: int) -> None:
    """As many rows as a training step has take an order of their own on CPU: first and second gradients against float64."""
    r = np.random.default_rng(0)
    x, dx = r.normal(size=(2, *rows, width))
    w, dw = r.normal(size=(2, features, width))
    dy = r.normal(size=(*rows, features))
    f32 = lambda *arrays: tuple(jnp.asarray(a, jnp.float32) for a in arrays)
    weigh = f32(dy)[0]
    grad = jax.grad(lambda x, w: (weigh * einsum("...d,fd->...f", x, w) ** 2).sum(), (0, 1))
    (got_x, got_w), (got_dx, got_dw) = jax.jit(lambda at, to: jax.jvp(grad, at, to))(f32(x, w), f32(dx, dw))
    y, tangent = x @ w.T, dx @ w.T + x @ dw.T
    turn = lambda a, b: np.tensordot(a, b, (range(len(rows)), range(len(rows))))
    back, moved = 2 * dy * y, 2 * dy * tangent
    wants = (back @ w, turn(back, x), moved @ w + back @ dw, turn(moved, x) + turn(back, dx))
    for got, want in zip((got_x, got_w, got_dx, got_dw), wants, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


@pytest.mark.of_cpu("an order that XLA:CPU alone needs")
def test_gradients_of_many_rows_turn_the_smaller_matrix_round() -> None:
    """The gradient of an activation [rows, F] is not laid out as [F, rows], which took XLA:CPU a tenth of a step."""
    shapes = [(2, 160, 96), (192, 96), (2, 160, 192)]
    x, w, up = (jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)
    loss = lambda x, w, up: (jax.nn.silu(einsum("...d,fd->...f", x, w)) * up).sum()
    program = jax.jit(jax.grad(loss, (0, 1))).lower(x, w, up).compile().as_text()
    assert "f32[320,192]" in program and "f32[192,320]" not in program and "f32[192,2,160]" not in program


def test_a_product_of_many_rows_can_be_saved() -> None:
    """With dots_saveable a backward pass computes no matrix product again."""
    x, w = jnp.ones((320, 96)), jnp.ones((192, 96))
    block = lambda x, w: jnp.sin(einsum("...d,fd->...f", x, w)).sum()
    policy = jax.checkpoint_policies.dots_saveable
    dots = lambda f: str(jax.make_jaxpr(jax.grad(f, (0, 1)))(x, w)).count("dot_general")
    assert dots(jax.checkpoint(block, policy=policy)) == dots(block) == 3 < dots(jax.checkpoint(block))


def test_layers_are_sliced() -> None:
    """A stacked weight can be scanned over, indexed through tree.map and vmapped; static fields stay right."""
    stacked = ("", (), (3, 4, 6, 24), 1, 2)
    x = normal(5, 24)
    apply = lambda w: einsum("td,nhd->tnh", jnp.float32(x), w)

    @jax.jit
    def walk(w: object) -> list:
        layers = [jax.tree.map(lambda a, i=i: a[i], w) for i in range(3)]
        assert layers[0].shape == (4, 6, 24)
        scanned = jax.lax.scan(lambda c, w: (c, apply(w)), None, w)[1]
        return [scanned, jnp.stack([*map(apply, layers)]), jax.vmap(apply)(w)]

    for kind in "array", "int8", "nf4/6", "lora of nf4/6":
        w, full = weight(stacked, kind)
        want = np.einsum("td,lnhd->ltnh", x, full)
        for got in walk(w):
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max(), err_msg=kind)


@pytest.mark.parametrize("name", ["q", "o", "experts", "absorbed keys", "absorbed values", "long"])
def test_adapter_gradients(name: str) -> None:
    """Gradients for a and b are those of scale * a b in the dense weight, also when layers are rematerialised."""
    case = CASES[name]
    batch, outputs, inputs = (axes[: len(s)] for s, axes in zip(sides(case), ("AB", "CD", "EF"), strict=True))
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
        da = np.einsum(f"{batch}{outputs}{inputs},{batch}{outputs}z,{batch}->{batch}z{inputs}", dw, w.b, w.scale)
        db = np.einsum(f"{batch}{outputs}{inputs},{batch}z{inputs},{batch}->{batch}{outputs}z", dw, w.a, w.scale)
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
    case = ("td,fd->tf", (4, 2048), (256, 2048), 0, 1)
    w, full = weight(case, "nf4/32")
    kept = jax.tree.leaves(jax.vjp(lambda x: einsum(case[0], x, w), jnp.zeros(case[1]))[1])
    assert 0 < sum(k.nbytes for k in kept if k.size > 4096) <= w.values.nbytes + w.scale.nbytes + 4 * 2048 * 4
    assert full.size * 4 > 4 * (w.values.nbytes + w.scale.nbytes)


def test_sharded_like_one_device() -> None:
    """Weights split over heads give what one device gives, whatever they are made of."""
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,) * 2)
    put = lambda x, *axes: jax.device_put(x, jax.NamedSharding(mesh, jax.P(*axes)))
    case = ("...d,nhd->...nh", (4, 3, 1024), (4, 6, 1024), 0, 2)
    x = normal(*case[1])
    weights = {kind: weight(case, kind) for kind in ("int8", "nf4/6", "lora of array")}
    on_mesh = {kind: jax.tree.map(lambda c: put(c, "tp"), weights[kind][0]) for kind in ("int8", "nf4/6")}
    w, _ = weights["lora of array"]
    on_mesh["lora of array"] = LowRank(put(w.base, "tp"), put(w.a), put(w.b, "tp"), put(w.scale))
    run = jax.jit(lambda x, ws: jax.tree.map(lambda w: einsum(case[0], x, w), ws, is_leaf=is_weight))
    for kind, got in run(put(jnp.float32(x), "dp"), on_mesh).items():
        want = np.einsum(case[0], x, weights[kind][1])
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max(), err_msg=kind)


@pytest.mark.parametrize(
    ("subscripts", "message"),
    [
        ("...d,fd->...f", "does not fit"),
        ("...d,nhd->...n", "axis 'h' must be"),
        ("tbd,nhd->bnh", "axis 't' must be"),
        ("tdd,nhd->tnh", "axis 'd' must be"),
        ("td...,nhd->tnh...", "axis 'd' of x .* differs in size"),
    ],
)
def test_wrong_axes(subscripts: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        einsum(subscripts, jnp.zeros((2, 3, 24)), jnp.zeros((4, 6, 24)))


@pytest.mark.slow
def test_embed() -> None:
    """Rows of the dense table, which `dense` gives whole; ids outside of it give NaN, never another row."""
    tables = {kind: weight(CASES["head, long"], kind) for kind in KINDS}
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


def test_embed_gradient() -> None:
    full = jnp.array(normal(7, 4), jnp.float32)
    grad = jax.grad(lambda t: (embed(t, jnp.array([1, 1, 6])) * jnp.array([[1.0], [2.0], [5.0]])).sum())(full)
    np.testing.assert_array_equal(grad[:, 0], [0, 3, 0, 0, 0, 0, 5])


@pytest.mark.parametrize("axes", ["fsdp=8", "dp=2,fsdp=2,tp=2", "fsdp=2,ep=2,sp=2", "tp=8"])
def test_embed_on_devices(axes) -> None:
    """Rows and gradients of one device. Where `fsdp` divides D, no device has the whole table, or its gradient."""
    mesh, tokens = make_mesh(parse_mesh(axes)), RNG.integers(0, 32, (8, 6))
    table, ct = normal(32, 16), normal(8, 6, 16)
    want = np.zeros((32, 16))
    np.add.at(want, tokens, ct)
    rows, columns = NamedSharding(mesh, P(("dp", "fsdp", "ep"), "sp")), NamedSharding(mesh, P("tp", "fsdp"))
    args = jax.device_put((np.float32(table), tokens, np.float32(ct)), (columns, rows, rows))
    with jax.set_mesh(mesh):
        program = jax.jit(lambda *a: jax.vjp(lambda t: embed(t, a[1]), a[0])[1](a[2])[0]).lower(*args).compile()
        found = jax.jit(embed)(*args[:2])
        outside = jax.jit(embed)(args[0], args[1].at[3, 2].set(32).at[7, 0].set(-1))
    np.testing.assert_allclose(program(*args), want, rtol=0, atol=1e-6 * np.abs(want).max())
    np.testing.assert_array_equal(found, np.float32(table)[tokens])
    np.testing.assert_array_equal(jnp.isnan(outside).all(-1), np.isin(np.arange(48), (20, 42)).reshape(8, 6))
    text = program.as_text()
    assert "fsdp" not in axes or not re.search(r"f32\[(32|16),16\]", text)


def test_nf4_codebook() -> None:
    """The quantiles of the normal distribution that QLoRA (section 3 and appendix E) takes, with an exact zero."""
    quantile = NormalDist().inv_cdf
    positive = [quantile(p) for p in np.linspace(0.9677083, 0.5, 9)[:-1]]
    negative = [-quantile(p) for p in np.linspace(0.9677083, 0.5, 8)[:-1]]
    np.testing.assert_allclose(NF4, np.sort([*positive, 0, *negative]) / positive[0], atol=2e-7)
    every = jnp.arange(256, dtype=jnp.uint8).reshape(256, 1)
    w = Quantized(every, jnp.full((256, 1), 2.0), None, "nf4", (2,), np.dtype("float32"))
    np.testing.assert_array_equal(dequantize(w)[:, 0], 2 * np.repeat(np.float32(NF4), 16))
    np.testing.assert_array_equal(dequantize(w)[:, 1], 2 * np.tile(np.float32(NF4), 16))


@pytest.mark.parametrize(
    "spec,rows,stored",
    [
        ("td,fd->tf", (4, 320), (70, 320)),
        ("td,fd->tf", (1, 6144), (6, 6144)),  # more terms than one loop has
        ("tnh,dnh->td", (2, 6, 16), (33, 6, 16)),
        ("td,fd->tf", (3, 300), (70, 300)),  # no whole lanes
    ],
)
def test_few_rows_and_int8_lose_nothing(spec: str, rows: tuple[int, ...], stored: tuple[int, ...]) -> None:
    """On CPU they are sums side by side: float64's product to 1e-6 of a row, and its gradient; of integers exactly."""
    r = np.random.default_rng(0)
    x = np.float32(r.normal(size=rows) * np.exp(3 * r.normal(size=rows)))  # over nine orders of magnitude
    x[1:2] = 0
    w, full = weight(("", rows, stored, 0, 1), "int8")
    product = jax.jit(lambda x: einsum(spec, x, w))
    flat, matrix = np.float64(x).reshape(len(x), -1), full.reshape(len(full), -1)
    want, scale = flat @ matrix.T, np.linalg.norm(flat, axis=1, keepdims=True) * np.linalg.norm(matrix, axis=1)
    assert (np.abs(product(x) - want) <= 1e-6 * scale).all()
    grads = jax.jit(jax.grad(lambda x: (product(x) * want).sum()))(x).reshape(flat.shape)
    np.testing.assert_allclose(grads, want @ matrix, rtol=1e-5, atol=1e-6 * np.abs(want @ matrix).max())
    x[-1].flat[5] = np.nan
    got = np.asarray(product(x))
    assert not np.isfinite(got[-1]).any() and np.isfinite(got[:-1]).all()
    integers = [r.integers(-127, 128, s).astype(np.int8) for s in ((1, *rows[1:]), stored)]
    plan = Plan(*re.split(",|->", spec))
    exact = jax.jit(lambda a, b: cpu.dot(plan, a, b, jnp.dtype(jnp.int32)))(*integers)
    np.testing.assert_array_equal(exact, np.einsum(spec, *(i.astype(np.int64) for i in integers)))
