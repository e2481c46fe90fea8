"""Ways of rows to their experts on eight devices, against one device: values, gradients, bytes, and the choice."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fdel import ops, params, plan
from fdel.ops import expert_parallel
from fdel.params import Param

ROWS, T, D, F, E, K = 8, 32, 12, 16, 16, 2
SHAPES = {"gate": (E, F, D), "up": (E, F, D), "down": (E, D, F)}
AXES = {"gate": "experts ffn embed", "up": "experts ffn embed", "down": "experts embed ffn"}
SPEC = {n: Param(AXES[n], SHAPES[n], params.spec.zeros) for n in SHAPES}
r = np.random.default_rng(0)
P = {n: jnp.asarray(r.normal(size=s) / s[2] ** 0.5, jnp.float32) for n, s in SHAPES.items()}
P |= {n + "_bias": jnp.asarray(r.normal(size=s[:2]), jnp.float32) for n, s in SHAPES.items()}
X = jnp.asarray(r.normal(size=(ROWS, T, D)), jnp.float32)
WEIGHTS = jnp.asarray(r.uniform(0.1, 1, (ROWS, T, K)), jnp.float32)


def routed(most):
    return jnp.asarray(np.stack([r.permutation(most)[:K] for _ in range(ROWS * T)]).reshape(ROWS, T, K))


# Even; all to the first two devices, in many rounds; all twice to one expert; some choices dropped, one device without any.
ROUTINGS = {"even": routed(E), "crooked": routed(3), "dropped": routed(E - 2).at[:, ::3].set(-1)}
ROUTINGS["one"] = jnp.full((ROWS, T, K), E - 1)


def both(f, x, p, w):
    loss = lambda *args: (jnp.sin(f(*args)) * jnp.arange(D)).sum()
    return jax.jit(lambda *args: (f(*args), jax.grad(loss, (0, 1, 2))(*args)))(x, p, w)


def placed(mesh):
    at = params.shardings(SPEC, mesh)
    return {n: jax.device_put(w, at[n]) if n in at else w for n, w in P.items()}


@functools.cache
def on_one_device(name, scaled):
    return both(lambda x, p, w: ops.moe(x, p, w, ROUTINGS[name], jax.nn.silu, scale_inputs=scaled), X, P, WEIGHTS)


def check(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.abs(b).max()))


@pytest.mark.slow
@pytest.mark.parametrize(
    "way,shape,name,scaled",
    [
        pytest.param("all_to_all", {"ep": 8}, "one", False, marks=pytest.mark.matrix),
        ("all_to_all", {"ep": 8}, "dropped", True),
        ("all_to_all", {"ep": 2, "tp": 2, "fsdp": 2}, "crooked", False),
        pytest.param("all_to_all", {"ep": 4, "sp": 2}, "even", False, marks=pytest.mark.matrix),
        ("ring", {"ep": 8}, "dropped", False),
    ],
)
def test_values_and_gradients_are_those_of_one_device(way, shape, name, scaled):
    """Of inputs, weights, biases and the router's weights: 1e-5 of the largest; 3e-7 was seen."""
    f = lambda x, p, w: ops.moe(x, p, w, ROUTINGS[name], jax.nn.silu, scale_inputs=scaled)
    mesh = params.make_mesh(shape)
    with jax.set_mesh(mesh), ops.use(expert_parallel=way):
        check(both(f, X, placed(mesh), WEIGHTS), on_one_device(name, scaled))


def moved(way, dtype=jnp.float32):
    """Bytes that a device sends forward, by kind of collective; those of later rounds, which run on demand, apart."""
    mesh = params.make_mesh({"ep": 8})
    x, p = X.astype(dtype), jax.tree.map(lambda w: w.astype(dtype), placed(mesh))
    f = lambda x, p, w: ops.moe(x, p, w, ROUTINGS["even"], jax.nn.silu)
    with jax.set_mesh(mesh), ops.use(expert_parallel=way):
        text = jax.jit(f).lower(x, p, WEIGHTS).compile().as_text()
    found = [c for c in plan.collectives(text) if c.nbytes > 64]
    later = [c for c in found if c.count > 1 and way == "all_to_all"]
    kinds = {c.kind: sum(d.moved for d in found if d.kind == c.kind and d not in later) for c in found}
    return kinds, sum(c.moved / c.count for c in later)


@pytest.mark.slow
def test_bytes_that_devices_send():
    """The all-to-all's rows are SLACK k / n of the all-gather's; the ring's are as many, and come home in one more hop."""
    row, r8 = 4 * D, T * ROWS // 8
    gather, _ = moved("all_gather")
    assert gather["all-gather"] == 7 * r8 * (row + 2 * 4 * K) and gather["reduce-scatter"] == 7 * r8 * row
    sent, later = moved("all_to_all")
    size = 10  # ceil(1.25 * 32 * 2 / 8)
    assert sent["all-to-all"] == later == 2 * 7 * size * row
    assert sent["all-gather"] == 7 * 4 * E  # the counts, of each device and expert
    assert sum(sent.values()) < 0.3 * sum(gather.values())
    ring, _ = moved("ring")
    assert ring["collective-permute"] == 8 * r8 * (2 * row + 2 * 4 * K)


@pytest.mark.slow
def test_later_rounds_hold_nothing_for_the_backward_pass():
    """No weight and no row stands once for each of the six rounds after the first, as residuals of a scan do."""
    f = lambda x, p, w: ops.moe(x, p, w, ROUTINGS["even"], jax.nn.silu).sum()
    mesh = params.make_mesh({"ep": 8})
    with jax.set_mesh(mesh), ops.use(expert_parallel="all_to_all"):
        text = jax.jit(jax.grad(f, (0, 1, 2))).lower(X, placed(mesh), WEIGHTS).as_text()
    assert "while" in text and not re.search(r"tensor<6x\d+x\d+", text)


def chosen(k=K, tokens=T * 8, ep=8, flat=False, dtype=jnp.float32, **use):
    rows = (8 * tokens,) if flat else (8, tokens)
    x, e = jax.ShapeDtypeStruct((*rows, D), dtype), jnp.zeros((*rows, k), int)
    w = jax.ShapeDtypeStruct(e.shape, jnp.float32)
    with jax.set_mesh(params.make_mesh({"ep": ep, "dp": 8 // ep})), ops.use(**use):
        return ops.explain(lambda x, w: ops.moe(x, P, w, e, jax.nn.silu), x, w)


@pytest.mark.of_cpu("it tells what a CPU takes")
def test_the_choice_is_by_bytes_and_explained():
    assert "all_to_all: chosen" in chosen()
    assert "sends 1.25 of all_gather's bytes" in chosen(k=8) and "all_gather: chosen" in chosen(k=8)
    assert "all_to_all: chosen" in chosen(k=8, dtype=jnp.bfloat16)  # 0.83: its sums are not sent in float32
    assert "sends 1.67 of all_gather's bytes" in chosen(k=8, ep=4, dtype=jnp.bfloat16)
    assert "sends 1.25" in chosen(ep=2) and "a device has 32 tokens, fewer than 128" in chosen(tokens=32)
    assert "ring: chosen" in chosen(expert_parallel="ring_of_experts")
    assert "no ragged all-to-all" in chosen()
    assert "every device along ep has all rows" in chosen(flat=True) and "all_gather: chosen" in chosen(flat=True)


def test_a_named_way_leaves_rows_alone_that_every_device_has():
    """As in a server's steps: nothing is sent but sums."""
    flat = lambda x: x.reshape(-1, x.shape[-1])[:32]
    f = lambda x, p, w: ops.moe(x, p, w, flat(ROUTINGS["even"]), jax.nn.silu)
    args = flat(X), P, flat(WEIGHTS)
    want = f(*args)
    with jax.set_mesh(params.make_mesh({"ep": 8})), ops.use(expert_parallel="ring"):
        check(jax.jit(f)(*args), want)


@pytest.mark.parametrize("name", ["fused_moe", "dense_moe", "standard_moe"])
@pytest.mark.parametrize("routing", ["crooked", "dropped"])
def test_methods_by_easydels_names_are_equal(name, routing):
    f = lambda x, p, w: ops.moe(x, p, w, ROUTINGS[routing], jax.nn.silu)
    with ops.use(moe=name):
        check(both(f, X, P, WEIGHTS), on_one_device(routing, False))


def emulated(operand, output, offsets, sizes, at, received, *, axis_name):
    """What `lax.ragged_all_to_all` is said to do, from all devices' arguments."""
    every = lax.all_gather((operand, offsets, sizes, at), axis_name)
    me, places = lax.axis_index(axis_name), jnp.arange(len(output))
    for rows, o, s, a in (jax.tree.map(lambda c, i=i: c[i], every) for i in range(lax.axis_size(axis_name))):
        i = places - a[me]
        taken = rows.at[jnp.where((i >= 0) & (i < s[me]), i + o[me], len(rows))].get(mode="fill", fill_value=0)
        output = jnp.where(((i >= 0) & (i < s[me]))[:, None], taken, output)
    return output


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dropped"])
def test_the_ragged_exchange_by_an_emulation(name, monkeypatch):
    """Its numbers, where nothing runs it. It has not run on an accelerator."""
    want = on_one_device(name, False)
    monkeypatch.setattr(expert_parallel.lax, "ragged_all_to_all", emulated)
    monkeypatch.setattr(expert_parallel, "target", lambda: "tpu")
    f = lambda x, p, w: ops.moe(x, p, w, ROUTINGS[name], jax.nn.silu)
    mesh = params.make_mesh({"ep": 8})
    with jax.set_mesh(mesh), ops.use(expert_parallel="ragged_all_to_all"):
        check(both(f, X, placed(mesh), WEIGHTS), want)
