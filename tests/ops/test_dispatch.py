"""Tables of implementations: naming one, explaining, and dividing what XLA cannot partition between devices."""

import re
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fdel import ops, params, plan
from fdel.models import builders
from fdel.ops import attention, dispatch, flash, ring
from fdel.ops.batch import Packed
from fdel.ops.paged import paged_attention, write_pages
from fdel.ops.platform import tracing_for
from fdel.params.mesh import make_mesh
from fdel.serve.engine.step import quantized
from tests.ops.test_attention import case, f32

MESH = {"dp": 2, "tp": 2, "sp": 2}


@pytest.fixture
def opaque(monkeypatch):
    """An implementation that stands for a kernel: it must see one device's part, and tells the shapes that it saw."""
    shapes = []

    def forward(mask, q, k, v, *rest):
        shapes.append((q.shape, k.shape))
        return LOOPS.forward(mask, q, k, v, *rest)

    LOOPS = flash.passes(flash.Schedule(8))

    def call(q, k, v, where, *, mask, bias, **kwargs):
        shapes.append((q.shape, k.shape))
        return flash.flash_attention(q, k, v, where, mask=mask, **kwargs)

    way = dispatch.Implementation(call, local=True)
    part = dispatch.Implementation(forward, local=True, backward=LOOPS.backward)
    for table, new in ((attention.ATTEND, way), (ring.PARTS, part)):
        monkeypatch.setitem(table.implementations, "opaque", new)
    return shapes


def value_and_gradients(mesh, **named):
    mask, qkv, segments, sinks, alibi, want = case("everything", 32)
    weight = f32(np.random.default_rng(1).normal(size=want.shape))
    batch = Packed(jnp.zeros(segments.shape, int), jnp.asarray(segments))

    @ops.use(**named)
    def value(q, k, v, sinks):
        out = ops.attend(batch, None, 0, q, k, v, mask=mask, sinks=sinks, alibi=f32(alibi))[0]
        return (out * weight).sum(), out

    run = jax.jit(jax.grad(value, (0, 1, 2, 3), has_aux=True))
    args = (*map(f32, qkv), f32(sinks))
    if mesh is None:
        return run(*args)
    with jax.set_mesh(make_mesh(mesh)) as _:
        return run(*args)


@pytest.mark.parametrize("named", [{"attend": "opaque"}, {"attend": "ring", "attend_part": "opaque"}], ids=str)
def test_a_local_implementation_gets_each_devices_part(opaque, named):
    """Values and gradients (of the sinks, too) are those of the formula on one device: 2e-5."""
    got = value_and_gradients(MESH, **named)
    length = 32 // (2 if "ring" in named.values() else 1)
    assert set(opaque) == {((1, length, 2, 8), (1, length, 1, 8))}
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(value_and_gradients(None, attend="dense")), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_a_local_implementation_gathers_none_of_its_inputs(opaque):
    mesh = make_mesh({"dp": 4, "tp": 2})
    q = jax.ShapeDtypeStruct((8, 64, 4, 8), jnp.float32, sharding=NamedSharding(mesh, P("dp", None, "tp")))
    batch = ops.packed(jnp.zeros((8, 64), int))
    f = lambda q, k, v: ops.attend(batch, None, 0, q, k, v, mask=ops.Mask(1.0), impl="opaque")[0].sum()
    with jax.set_mesh(mesh):
        text = jax.jit(jax.grad(f, (0, 1, 2))).lower(q, q, q).compile().as_text()
    assert not re.search(r"all-gather|all-to-all|collective-permute", text)
    assert set(opaque) == {((2, 64, 2, 8), (2, 64, 2, 8))}


def test_heads_that_a_mesh_does_not_divide_stay_whole(opaque):
    """Three key heads: dividing the six query heads alone would pair them with other keys."""
    q, k = (jax.random.normal(jax.random.key(n), (4, 8, n, 8)) for n in (6, 3))
    batch = ops.packed(jnp.zeros((4, 8), int))
    run = lambda impl: ops.attend(batch, None, 0, q, k, k, mask=ops.Mask(1.0), impl=impl)[0]
    with jax.set_mesh(make_mesh({"dp": 4, "tp": 2})):
        got = jax.jit(run, static_argnums=0)("opaque")
    assert set(opaque) == {((1, 8, 6, 8), (1, 8, 3, 8))}
    np.testing.assert_allclose(got, run("dense"), atol=2e-6)


def test_reasons_are_asked_of_a_devices_part(opaque, monkeypatch):
    """As it will be called: of whole rows a kernel may say that it serves them, and fail on, or pass over, a part."""
    asked = []
    ask = lambda q, k, *_, **__: asked.append((q.shape, k.shape))
    monkeypatch.setitem(dispatch.TABLES, "attend", attention.ATTEND)  # the one that is made next goes there too
    way = replace(attention.ATTEND.implementations["opaque"], unsupported=ask, passed_over=ask)
    table = replace(attention.ATTEND, implementations={"opaque": way, "dense": dispatch.Implementation(None)})
    q, k = (jax.random.normal(jax.random.key(n), (4, 8, n, 8)) for n in (8, 2))
    where = ops.packed(jnp.zeros((4, 8), int)).where
    given = dict(mask=ops.Mask(1.0), sinks=None, alibi=None, bias=None)
    with jax.set_mesh(make_mesh({"dp": 2, "tp": 4})):
        dispatch.run(table, None, q, k, k, where, **given)
    assert asked == [((2, 8, 2, 8), (2, 8, 1, 8))] * 2 and {*opaque} == {*asked}


@pytest.mark.of_cpu("with --target the references are named")
def test_a_recurrence_takes_a_kernel_only_where_a_devices_heads_fill_its_tiles():
    """24 heads of 64, as of the smallest Mamba-2: three on each of eight TPUs are no tiles of 128 channels."""
    batch, put = ops.packed(jnp.zeros((2, 128), int)), lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    args = put(2, 128, 24, 64), put(2, 128, 24), put(24), put(2, 128, 1, 128), put(2, 128, 1, 128)
    run = lambda *inputs: ops.ssd(batch, None, 0, *inputs)[0]
    for tp, expected in ((4, "mosaic: chosen"), (8, "3 heads of 64 channels")):
        with jax.set_mesh(make_mesh({"dp": 8 // tp, "tp": tp})), tracing_for("tpu"):
            assert expected in ops.explain(run, *args)
            assert jax.eval_shape(run, *args).shape == args[0].shape


@pytest.mark.parametrize(
    ("mesh", "shape", "named"),
    [({"dp": 2, "tp": 4}, (1, 8), {"attend": "opaque"}), ({"sp": 2, "tp": 4}, (2, 2), {"attend_part": "opaque"})],
    ids=str,
)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_key_heads_that_are_fewer_than_devices_are_on_several(opaque, mesh, shape, named, kv_heads):
    """One or two key heads on four devices: each has one, and two of the eight query heads. In a ring, too."""
    q, *kv = (jax.random.normal(jax.random.key(i), (2, 8, n, 8)) for i, n in enumerate((8, kv_heads, kv_heads)))
    batch, weight = ops.packed(jnp.zeros((2, 8), int)), jnp.cos(jnp.arange(8.0))
    value = lambda q, k, v: (ops.attend(batch, None, 0, q, k, v, mask=ops.Mask(1.0))[0] * weight).sum()
    run = lambda **named: jax.jit(ops.use(**named)(jax.value_and_grad(value, (0, 1, 2))))(q, *kv)
    with jax.set_mesh(make_mesh(mesh)):
        got = run(**named)
    assert set(opaque) == {((*shape, 2, 8), (*shape, 1, 8))}
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(run(attend="dense")), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "kv"), [(2, 128, None), (2, 128, "int8"), (4, 64, None), (8, 64, None)]
)
def test_a_cache_of_fewer_rows_than_devices_is_not_gathered(monkeypatch, kv_heads, head_dim, kv):
    """Its axis lies in two on the devices, as `params.shardings` puts it; so do a call's parts and its results.

    As on TPUs: two heads of 64 are a row. Eight such heads are rows enough.
    """
    table, seen = dispatch.TABLES["paged_attention"], []
    write = dispatch.TABLES["write_pages"].implementations

    def call(*args, **named):
        seen.append((args[1].k.shape[2], args[3].shape[1]))
        return table.implementations["xla"].call(*args, **named)

    monkeypatch.setitem(table.implementations, "opaque", dispatch.Implementation(call, local=True))
    monkeypatch.setitem(write, "opaque", dispatch.Implementation(write["xla"].call, local=True))
    mesh, rng = make_mesh({"dp": 2, "tp": 4}), np.random.default_rng(0)
    q, k, v = (rng.normal(size=(24, n, head_dim)).astype(np.float32) for n in (16, kv_heads, kv_heads))
    _, batch = ops.paged([(0, 0, [0] * 13), (1, 0, [0] * 8)], np.array([[5, 0, 2], [1, 3, 4]]), block=8)

    def run(state, q, k, v):
        state = write_pages(batch, state.pages, 0, k, v)
        return paged_attention(batch, state, 0, q, mask=ops.Mask(0.3)), state

    with tracing_for("tpu"):
        spec = quantized(ops.State(builders.kv_pages(1, kv_heads, head_dim, pages=60, page=8)), kv)
        state, at = params.init(spec, jax.random.key(0)), params.shardings(spec, mesh, params.SERVE)
        heads = NamedSharding(mesh, P(None, "tp"))
        with jax.set_mesh(mesh), ops.use(paged_attention="opaque", write_pages="xla"):
            new = (k, v) if kv_heads < 4 else jax.device_put((k, v), heads)
            given = jax.device_put(state, at), jax.device_put(q, heads), *new
            program = jax.jit(run, out_shardings=(heads, at.pages)).lower(*given).compile()
            got = program(*given)
            rows = state.pages.k.shape[2]
            if rows < 4:
                with ops.use(write_pages="opaque"), pytest.raises(ValueError, match="2 devices have the same kv_heads"):
                    jax.eval_shape(run, *given)
        with ops.use(paged_attention="xla", write_pages="xla"):
            want = jax.jit(run)(state, q, k, v)
    assert set(seen) == {(1, 4)}
    sent, tokens, pages = plan.collectives(program.as_text()), k.nbytes, 60 * 8 * 128  # bytes; of a row in 8 bits
    assert all(x.nbytes <= tokens < pages for x in sent)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_groups_that_are_fewer_than_devices_are_on_several(monkeypatch):
    """Two groups of eight heads on four devices: each has two heads and their group; gradients are those of one device."""
    table, seen = dispatch.TABLES["ssd"], []

    def call(*args, **named):
        seen.append((args[3].shape[2], args[6].shape[2]))
        return table.implementations["xla"].call(*args, **named)

    monkeypatch.setitem(table.implementations, "opaque", dispatch.Implementation(call, local=True))
    rng, batch = np.random.default_rng(0), ops.packed(jnp.zeros((2, 16), int))
    x, b, c = (f32(rng.normal(size=(2, 16, n, 4))) for n in (8, 2, 2))
    dt, a = f32(rng.uniform(0, 1, (2, 16, 8))), -f32(rng.uniform(0, 1, 8))
    value = lambda x, b, c: jnp.sin(ops.ssd(batch, None, 0, x, dt, a, b, c, chunk=8)[0]).sum()
    run = jax.value_and_grad(value, (0, 1, 2))
    with jax.set_mesh(make_mesh({"dp": 2, "tp": 4})), ops.use(ssd="opaque"):
        got = jax.jit(run)(x, b, c)
    assert set(seen) == {(2, 1)}
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(jax.jit(run)(x, b, c)), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


def test_a_name_holds_inside_and_is_known_to_jaxs_caches():
    q = jnp.ones((1, 8, 2, 8))
    batch = ops.packed(jnp.zeros((1, 8), int))
    traced = []

    @jax.jit
    def run(q):
        traced.append(ops.explain(ops.attend, batch, None, 0, q, q, q, mask=ops.Mask(1.0)))
        return ops.attend(batch, None, 0, q, q, q, mask=ops.Mask(1.0))[0]

    with ops.use(attend="dense"):
        run(q), run(q)
    run(q)
    assert ["dense: chosen" in t for t in traced] == [True, False]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"attention": "flash"}, "no operation 'attention' has implementations; known are .*attend"),
        (
            {"attend": "fast"},
            "attend: impl='fast' is unknown; .*ring, cudnn, hopper, hopper_ordered, splash, mosaic, short, flash, dense",
        ),
        ({"attend": "auto"}, "attend: impl='auto' is another project's: without a name the first that can is taken"),
        (
            {"attend": "page_attention"},
            "another project's: pages are attended to by another operation",
        ),
        *(
            ({"paged_attention": name}, f"impl='{name}' is another project's: it attends within rows")
            for name in ("vanilla", "flash_attn2", "sdpa", "blocksparse")  # values of decode_attn_mechanism
        ),
        ({"paged_attention": "auto"}, "another project's: without a name the first that can is taken"),
    ],
)
def test_names_that_no_table_has_are_refused(names, message):
    with pytest.raises(ValueError, match=message), ops.use(**names):
        pass


@pytest.mark.parametrize(
    ("op", "name", "ours"),
    [
        *(("attend", n, o) for n, o in {
            "vanilla": "dense", "flash_attn2": "flash", "blockwise": "flash", "sdpa": "cudnn", "cuda_flash_attn2": "cudnn",
            "cudnn": "cudnn", "blocksparse": "splash", "ring": "ring",
        }.items()),
        *(("paged_attention", n, o) for n, o in {
            "page_attention": "xla", "decode": "xla", "regressive_decode": "xla", "ragged_page_attention_v2": "mosaic",
            "ragged_page_attention_v3": "mosaic",
        }.items()),
    ],
)  # fmt: skip
def test_names_of_easydel_are_ours(op, name, ours, monkeypatch):
    """In `use` and as `impl`."""
    table = dispatch.TABLES[op]
    monkeypatch.setitem(dispatch.TABLES, op, table)  # the one that is made next goes there too
    free = replace(table, implementations={n: dispatch.Implementation(n.title) for n in table.implementations})
    assert dispatch.choose(free, name) is free.implementations[ours]
    with ops.use(**{op: name}):
        assert dispatch.choose(free, None) is free.implementations[ours]


@pytest.mark.of_cpu("it names the target")
def test_a_named_one_that_cannot_serve_says_why():
    q = jnp.ones((1, 8, 2, 8))
    batch = ops.packed(jnp.zeros((1, 8), int))
    with (
        ops.use(attend="splash"),
        pytest.raises(ValueError, match="attend: impl='splash' .* for TPUs; the target is cpu"),
    ):
        ops.attend(batch, None, 0, q, q, q, mask=ops.Mask(1.0))


def test_the_page_of_kernels_runs_and_names_every_table(capsys):
    import fdel.train  # noqa: F401, PLC0415 (its head has a table)

    page = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text()
    try:
        exec("\n".join(re.findall(r"```python\n(.*?)```", page, re.S)), {})  # noqa: S102
    finally:
        dispatch.TABLES.pop("twice", None)
    said = [re.search(r"(\w+): chosen", text)[1] for text in re.split(r"(?m)^(?=\w)", capsys.readouterr().out) if text]
    assert said == re.findall(r"# (\w+): chosen", page)
    rows = page.split("## What is entered")[1]
    assert {t for t in dispatch.TABLES if f"`{t}`" not in rows} == set()
