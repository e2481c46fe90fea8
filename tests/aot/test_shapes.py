"""The models that benchmarks measure on one H100 fit in its memory, in training and in serving."""

import importlib
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from aot_programs import note, target

from fdel import aot, ops, params
from fdel.models import llama
from fdel.ops import platform

ROOM = 0.75 * aot.CHIPS["h100"].memory  # what jax takes from a GPU at first


@pytest.fixture
def shapes(monkeypatch):
    if why := aot.missing(target("h100", 1)):
        pytest.skip(why)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("shapes")


@pytest.mark.aot
@pytest.mark.matrix
@pytest.mark.parametrize("shape", ["1b", "8b"])
def test_a_step_of_the_benchmark_fits_in_an_h100(shape, shapes, record_property):
    """Of a billion parameters all are trained; of eight, adapters (seen: 16.4 and 19.5 GiB)."""
    on, cfg, (rows, length) = target("h100", 1), shapes.config(shape), shapes.SIZES[shape]
    mesh = params.make_mesh({}, aot.devices(on))
    at = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    with platform.tracing_for("gpu"), jax.set_mesh(mesh):
        begin, step, _ = shapes.step(shape, cfg)
        weights = params.abstract(llama.spec(cfg), jnp.bfloat16)
        state = jax.eval_shape(lambda weights: begin(weights, jax.random.key(0)), weights)
    args = *state, {"tokens": jax.ShapeDtypeStruct((rows, length), jnp.int32)}
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), args)
    c = aot.compile(on, jax.jit(step, donate_argnums=0), *args, mesh=mesh)
    note(record_property, shape, "train", "h100", 1, c, 0)
    assert c.arguments + c.temporaries + c.output <= ROOM


@pytest.mark.aot
@pytest.mark.matrix
@pytest.mark.parametrize("chosen", [{}, {"paged_attention": "hopper"}], ids=str)
@pytest.mark.parametrize("what", ["decode", "prefill"])
@pytest.mark.parametrize("shape", ["1b", "8b"])
def test_an_engine_of_the_benchmark_fits_in_an_h100(shape, what, chosen, shapes, record_property):
    """With the cache of 64 sequences (seen: 4.9 and 26.3 GiB; with the kernel 4.9 and 25.1)."""
    (batches, prompt, new), on = shapes.SERVED[shape], target("h100", 1)
    with ops.use(**chosen):
        sizes = aot.Serving("fsdp=1", batches[-1], prompt + 2 * new, budget=2048)
        c, cache = aot.serving(on, llama, shapes.config(shape), sizes, what)
    note(record_property, shape, what, "h100", 1, c, cache)
    assert c.arguments + c.temporaries + c.output <= ROOM
