"""The spec tree: layouts against index formulas, stacking, and initialisation by path."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fdel.params import hf_names, layout
from fdel.params import spec as S
from fdel.params.spec import Param, normal, ones, parts

W = normal(0.02)

# Each case: our axes and sizes, the layout in the file, part; then the file's shape and where our element stands in it.
# The formulas are those of the torch modules (view, chunk, transpose) written out by hand.
LAYOUTS = {
    "same": ("vocab embed", (5, 3), "", None, (5, 3), lambda v, d: (v, d)),
    "vector": ("embed", (7,), "", None, (7,), lambda d: (d,)),
    "scalar": ("", (), "", None, (), lambda: ()),
    "linear": ("embed ffn", (3, 5), "ffn embed", None, (5, 3), lambda d, f: (f, d)),
    "heads out": (
        "embed heads head_dim", (6, 4, 3), "(heads head_dim) embed", None,
        (12, 6), lambda d, n, h: (n * 3 + h, d),
    ),
    "heads in": (
        "heads head_dim embed", (4, 3, 6), "embed (heads head_dim)", None,
        (6, 12), lambda n, h, d: (d, n * 3 + h),
    ),
    "head bias": ("heads head_dim", (4, 3), "(heads head_dim)", None, (12,), lambda n, h: (n * 3 + h,)),
    "minor first": (
        "embed heads head_dim", (6, 4, 3), "(head_dim heads) embed", None,
        (12, 6), lambda d, n, h: (h * 4 + n, d),
    ),
    "conv": ("kernel channels", (4, 6), "channels 1 kernel", None, (6, 1, 4), lambda k, c: (c, 0, k)),
    "leading one": ("embed", (6,), "1 1 embed", None, (1, 1, 6), lambda d: (0, 0, d)),
    "of size one": ("embed heads", (1, 4), "heads embed", None, (4, 1), lambda d, n: (n, d)),
    "fused rows, first": (
        "embed heads head_dim", (6, 4, 3), "[heads head_dim] embed", (0, 24),
        (24, 6), lambda d, n, h: (n * 3 + h, d),
    ),
    "fused rows, last": (
        "embed kv_heads head_dim", (6, 2, 3), "[kv_heads head_dim] embed", (18, 24),
        (24, 6), lambda d, k, h: (18 + k * 3 + h, d),
    ),
    "fused rows, uneven": ("embed ffn", (3, 5), "[ffn] embed", (7, 13), (13, 3), lambda d, f: (7 + f, d)),
    "fused columns": (
        "embed heads head_dim", (6, 2, 3), "embed [heads head_dim]", (6, 18),
        (6, 18), lambda d, n, h: (d, 6 + n * 3 + h),
    ),
    "fused bias": ("heads head_dim", (2, 3), "[heads head_dim]", (6, 18), (18,), lambda n, h: (6 + n * 3 + h,)),
    "per group": (
        "embed kv_heads rep head_dim", (6, 2, 3, 4), "(kv_heads [rep head_dim]) embed", (0, 20),
        (40, 6), lambda d, k, r, h: (k * 20 + r * 4 + h, d),
    ),
    "per group, one": (
        "embed kv_heads head_dim", (6, 2, 4), "(kv_heads [head_dim]) embed", (16, 20),
        (40, 6), lambda d, k, h: (k * 20 + 16 + h, d),
    ),
    "an axis of two, and a part": (
        "heads head_dim embed", (6, 4, 3), "(heads//3 [heads%3 head_dim]) embed", (0, 20),
        (40, 3), lambda n, h, d: (n // 3 * 20 + n % 3 * 4 + h, d),
    ),
    "an axis of two": ("embed heads head_dim", (3, 4, 2), "(heads%2 heads//2 head_dim) embed", None, (8, 3),
                       lambda d, n, h: (n % 2 * 4 + n // 2 * 2 + h, d)),
    "interleaved": ("embed ffn", (3, 5), "(ffn [1]) embed", (1, 2), (10, 3), lambda d, f: (2 * f + 1, d)),
    "experts": (
        "experts embed ffn", (2, 3, 5), "experts [ffn] embed", (5, 10),
        (2, 10, 3), lambda e, d, f: (e, 5 + f, d),
    ),
}  # fmt: skip


def param(case: str) -> Param:
    """The Param of one case of LAYOUTS."""
    axes, shape, hf_axes, part, _, _ = LAYOUTS[case]
    return Param(axes, shape, W, "x", hf_axes, part)


@pytest.mark.parametrize("case", LAYOUTS)
def test_layout(case: str) -> None:
    *_, file_shape, formula = LAYOUTS[case]
    p, found = param(case), layout(param(case))
    assert found.file_shape == file_shape
    tensor = np.random.default_rng(0).permutation(max(1, int(np.prod(file_shape)))).reshape(file_shape)
    expected = np.array([tensor[formula(*i)] for i in np.ndindex(p.shape)]).reshape(p.shape)
    np.testing.assert_array_equal(found.read(tensor), expected)

    blank = np.full_like(tensor, -1)
    found.write(blank, expected)
    ours = {formula(*i) for i in np.ndindex(p.shape)}
    outside = np.array([i not in ours for i in np.ndindex(file_shape)]).reshape(file_shape)
    np.testing.assert_array_equal(blank, np.where(outside, -1, tensor))


def test_parts_tile_the_fused_dimension() -> None:
    assert parts(q=8, k=4, v=3) == {"q": (0, 15), "k": (8, 15), "v": (12, 15)}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Param("a b", (3,), W, "x.w"), r"x\.w.*2 axis names \(a b\) for shape \(3,\)"),
        (lambda: Param("a a", (3, 3), W, "x.w"), r"x\.w.*occurs twice"),
        (lambda: layout(Param("a b", (3, 2), W, "x.w", "a c")), r"x\.w: axis 'c' of layout 'a c'"),
        (lambda: layout(Param("a b", (3, 2), W, "x.w", "a")), r"x\.w: layout 'a' .* does not name each"),
        (lambda: layout(Param("a b", (3, 2), W, "x.w", "a a b")), r"does not name each"),
        (lambda: layout(Param("a b", (3, 2), W, "x.w", "a [b]")), r"part None"),
        (lambda: layout(Param("a b", (3, 2), W, "x.w", "a b", (0, 4))), r"part \(0, 4\)"),
    ],
)
def test_wrong_declarations(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# ---- stacked and listed --------------------------------------------------------------------------------------------


def layer(kind: object) -> dict:
    """A layer spec whose second array depends on the kind; one array holds experts."""
    experts = S.stack(
        {"up": Param("embed ffn", (3, 5), W, "l.{layers}.e.{experts}.up", "ffn embed")}, "experts", range(2)
    )
    return {
        "q": Param("embed", (3,), W, "l.{layers}.q"),
        f"kind{kind}": {"w": Param("ffn", (5,), W, f"l.{{layers}}.{kind}")},
    } | experts


def test_stack_names_one_tensor_per_index() -> None:
    spec = S.stack(layer(0), "layers", range(1, 7, 2))
    up = spec["up"]
    assert (up.axes, up.shape) == ("layers experts embed ffn", (3, 2, 3, 5))
    assert hf_names(up) == [f"l.{i}.e.{j}.up" for i in (1, 3, 5) for j in (0, 1)]
    assert layout(up).file_shape == (5, 3)  # without the stacked axes
    assert hf_names(Param("embed", (3,), W, "norm")) == ["norm"]


KINDS = [(0,) * 4, (0,), (0, 0, 0, 0, 0, 1), (0, 0, 0, 1) * 2, (1, 0, 0, 0, 0), (0, 0, 1, 0, 0, 1, 0, 0), (0, 1, 2, 3)]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=14), st.integers(1, 5))
def test_runs_repeat_the_kinds(kinds: list[int], longest: int) -> None:
    runs = S.runs(tuple(kinds), longest)
    rebuilt = [k for start, period, count in runs for k in kinds[start : start + period] * count]
    assert rebuilt == kinds and all(period <= longest for _, period, _ in runs)
    assert [start for start, _, _ in runs] == [sum(p * c for _, p, c in runs[:i]) for i in range(len(runs))]


def test_runs_find_the_period() -> None:
    assert S.runs((0, 0, 0, 1) * 3) == [(0, 4, 3)]
    assert S.runs((0,) * 4) == [(0, 1, 4)]  # the shortest
    assert S.runs((9, *(0, 0, 1) * 2, 0)) == [(0, 1, 1), (1, 3, 2), (7, 1, 1)]


@pytest.mark.parametrize("kinds", KINDS)
def test_unstack_gives_each_layer_in_order(kinds: tuple) -> None:
    spec = {"embed": Param("vocab embed", (7, 3), W, "embed"), "layers": S.layers(layer, kinds)}
    listed = S.unstack(spec)
    assert isinstance(listed["layers"], list) and listed["embed"] is spec["embed"]
    assert S.unstack(listed) == listed
    for i, (kind, found) in enumerate(zip(kinds, listed["layers"], strict=True)):
        want = jax.tree.map(lambda p, i=i: dataclasses.replace(p, hf=p.hf.replace("{layers}", str(i))), layer(kind))
        assert found == want

    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda p: rng.normal(size=p.shape), spec)
    items = S.unstack(params)
    assert jax.tree.map(jnp.shape, items) == jax.tree.map(lambda p: p.shape, listed)
    # A layer's values are those that its checkpoint names say: compare through names.
    by_name = dict(values(spec, params))
    for name, value in values(listed, items):
        np.testing.assert_array_equal(value, by_name.pop(name))
    assert not by_name
    with jax.enable_x64(True):
        again = S.restack(items, spec)
    chex.assert_trees_all_equal(again, params)


def test_trees_are_printed_for_reading():
    """Arrays as dtype and shape, whatever holds them; declarations with what differs from their defaults."""
    p = S.Param("vocab embed", (3, 2), S.ones, "emb")
    tree = {"table": jnp.ones((3, 2)), "shape": jax.ShapeDtypeStruct((4,), jnp.bfloat16), "host": np.zeros(2, np.int8)}
    assert S.pformat(tree) == "{'table': f32[3,2], 'shape': bf16[4], 'host': i8[2](numpy)}"
    shown = S.pformat({"embed": p})
    assert "axes='vocab embed', shape=(3, 2)" in shown and "hf='emb'" in shown and "hf_axes" not in shown


def values(spec: dict, params: dict) -> list[tuple[str, np.ndarray]]:
    """(checkpoint name, our array without stacked axes) of every tensor."""
    out = []
    for (_, p), x in zip(S.named_leaves(spec), jax.tree.leaves(params), strict=True):
        n = len(p.stacked)
        out += zip(hf_names(p), np.asarray(x).reshape(-1, *p.shape[n:]), strict=True)
    return out


# ---- readings ------------------------------------------------------------------------------------------------------


def small_spec() -> dict:
    """A few arrays, one of a fixed dtype."""
    return {
        "embed": Param("vocab embed", (7, 4), W, "embed"),
        "layers": S.layers(
            lambda kind: {"q": Param("embed ffn", (4, 6), W), "bias": Param("ffn", (6,), W, dtype="float32")}, (0,) * 3
        ),
        "norm": Param("embed", (4,), ones, "norm"),
    }


def test_init_depends_on_the_path_alone() -> None:
    spec = small_spec()
    before = S.init(spec, jax.random.key(3))
    more = spec | {"a_first": Param("embed", (4,), W), "layers": spec["layers"] | {"k": Param("embed", (4,), W)}}
    after = S.init(more, jax.random.key(3))
    for path, x in S.named_leaves(before):
        np.testing.assert_array_equal(dict(S.named_leaves(after))[path], x)
    same_shape = S.init({"a": Param("embed", (64,), W), "b": Param("embed", (64,), W)}, jax.random.key(3))
    assert not np.array_equal(same_shape["a"], same_shape["b"])
    assert not np.array_equal(before["embed"], S.init(spec, jax.random.key(4))["embed"])


def test_init_draws_what_it_says() -> None:
    x = S.init({"w": Param("a b", (200, 200), normal(0.5))}, jax.random.key(0))["w"]
    assert abs(float(x.mean())) < 0.01 and abs(float(x.std()) - 0.5) < 0.01  # 40,000 samples: four standard errors
    assert np.all(S.init({"w": Param("a", (3,), S.constant(2.5))}, jax.random.key(0))["w"] == 2.5)


def test_abstract_count_and_nbytes_agree_with_arrays() -> None:
    spec = small_spec()
    params = S.init(spec, jax.random.key(0), jnp.bfloat16)
    assert params["layers"]["bias"].dtype == jnp.float32 and params["embed"].dtype == jnp.bfloat16
    shapes = jax.eval_shape(lambda: S.init(spec, jax.random.key(0), jnp.bfloat16))
    assert S.abstract(spec, jnp.bfloat16) == shapes
    assert S.count(spec) == S.count(params) == 7 * 4 + 3 * (24 + 6) + 4
    assert S.nbytes(spec, jnp.bfloat16) == S.nbytes(params) == sum(x.nbytes for x in jax.tree.leaves(params))


def test_abstract_carries_shardings() -> None:
    spec = small_spec()
    place = jax.tree.map(lambda p: jax.sharding.SingleDeviceSharding(jax.devices()[1]), spec)
    assert all(
        x.sharding == jax.sharding.SingleDeviceSharding(jax.devices()[1])
        for x in jax.tree.leaves(S.abstract(spec, shardings=place))
    )
