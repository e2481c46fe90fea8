"""The order of axes of served weights on TPUs: chosen by sizes, and kept by an engine's weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout

from fdel import params
from fdel.models import llama
from fdel.params import device_layout, place
from fdel.serve.engine import weights
from fdel.serve.engine.engine import Engine, Settings
from tests.serve.small import CFG, make_model
from tests.serve.test_weights import SHAPE, tokens

ORDERS = {
    (128, 2880, 2880): (0, 1, 2),  # gpt_oss's experts, and in four bits
    (32, 2880, 1440): (0, 1, 2),
    (32, 2880, 90): (0, 2, 1),  # their scales
    (201088, 2880): (0, 1),  # its embedding: rows are looked up
    (2880, 64, 64): None,  # an attention's output: rows of 64 would be half empty
    (128, 768, 2048): None,  # as they are in any case
    (4096, 32): None,
    (2880,): None,
    (): None,
}


def test_rows_that_nearly_fill_lanes_stay_rows() -> None:
    assert {shape: device_layout.order(shape) for shape in ORDERS} == ORDERS


def turned(shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """No layout of a CPU: all axes the other way round."""
    return tuple(reversed(range(len(shape)))) if len(shape) > 1 else None


@pytest.fixture
def on_tpu(monkeypatch) -> None:
    monkeypatch.setattr(device_layout, "on_tpu", lambda sharding: True)
    monkeypatch.setattr(device_layout, "order", turned)


def lie_so(tree) -> bool:
    """Whether every array of a tree lies so."""
    return all(x.format.layout.major_to_minor == (turned(x.shape) or (0,)) for x in jax.tree.leaves(tree))


def same(a, b) -> bool:
    return jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), a, b))


def test_what_a_loader_gives_lies_so(on_tpu, monkeypatch, tmp_path) -> None:
    """Layer by layer, not stacked; and what an array holds is written as it was."""
    model = make_model()
    params.save(llama.spec(CFG), model.params, tmp_path)
    monkeypatch.setattr(place, "on_cpu", lambda sharding: False)
    got = params.load(params.unstack(llama.spec(CFG)), tmp_path)
    assert lie_so(got) and same(got, model.params)
    params.save(llama.spec(CFG), got, tmp_path / "again")
    assert (tmp_path / "model.safetensors").read_bytes() == (tmp_path / "again" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "mesh", [None, pytest.param({"tp": 2, "dp": 4}, marks=pytest.mark.matrix)], ids=["one", "eight"]
)
@pytest.mark.parametrize("reuse", [pytest.param(False, marks=pytest.mark.matrix), True])
def test_weights_of_an_engine_lie_so_whatever_comes(reuse, mesh, on_tpu) -> None:
    """From the start, and when others come: listed, stacked, in half the bits, from elsewhere; over old ones, too."""
    spec, made = llama.spec(CFG), [make_model(i) for i in range(3)]
    at = None if mesh is None else params.shardings(params.unstack(spec), params.make_mesh(mesh), params.SERVE)
    first = made[0] if at is None else made[0]._replace(params=jax.device_put(made[0].params, at))
    held = weights.Weights(first, {})
    assert lie_so(held[""]) and same(held[""], made[0].params)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), made[1].params)
    host = jax.tree.map(np.asarray, made[1].params)
    for new in (made[1].params, params.restack(made[2].params, spec), half, host):
        before = jax.tree.leaves(held[""])
        held.put("", held.checked("", new, reshard=True, cast=True), reuse=reuse)
        assert lie_so(held[""]) and same(held[""], jax.tree.map(jnp.float32, params.unstack(new)))
        pairs = zip(jax.tree.leaves(held[""]), before, strict=True)
        assert all(x.sharding.is_equivalent_to(y.sharding, y.ndim) for x, y in pairs)
    held["a"] = held.checked("a", jax.tree.map(lambda x: x * 2, held[""]))  # an adapter with arrays of its own
    assert lie_so(held["a"])


@pytest.mark.matrix
def test_an_engine_answers_the_same_and_compiles_nothing_when_weights_come(on_tpu, caplog) -> None:
    made = [make_model(i) for i in (0, 5)]
    with pytest.MonkeyPatch.context() as plain:
        plain.setattr(device_layout, "on_tpu", lambda sharding: False)
        want = [tokens(Engine(m, Settings(**SHAPE))) for m in made]
    e = Engine(made[0], Settings(**SHAPE))
    got = [tokens(e)]
    traces = e._core.device.programs.traces.copy()
    e.update_params(params.restack(made[1].params, llama.spec(CFG)))
    got.append(tokens(e))
    assert lie_so(e.model.params) and e._core.device.programs.traces == traces
    for a, b in zip(got, want, strict=True):
        for (_, t, p), (_, u, q) in zip(a, b, strict=True):
            assert t == u and np.allclose(p, q, atol=1e-4)


def test_a_shape_says_where_an_array_is_put(on_tpu) -> None:
    alone = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    x = jax.ShapeDtypeStruct((3, 4), jnp.float32, sharding=alone)
    assert device_layout.placement(x) is alone
    assert device_layout.placement(device_layout.laid(x)) == Format(Layout((1, 0)), alone)
