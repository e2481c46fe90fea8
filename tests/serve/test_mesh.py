"""Serving on a mesh: what was laid out for training is laid out anew, and each device has the key-value heads it needs."""

from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from fdel import models, params, plan
from fdel.models import llama
from fdel.ops import platform
from fdel.serve import Engine, SamplingParams, Settings
from fdel.serve.engine import weights
from fdel.serve.engine.naive import naive_generate
from fdel.serve.server import launch
from tests.serve.small import CFG

SPEC = llama.spec(CFG)
PROMPTS = [[5, 6, 7, 8], [9, 10], list(range(20, 60))]
SHAPE = dict(rows=4, pages=9, budget=64, batches=(4,))


def tokens(model: models.Model, **settings) -> list[list[int]]:
    engine = Engine(model, Settings(**SHAPE, **settings))
    return [g.tokens for g in engine.generate(PROMPTS, SamplingParams(max_tokens=8, ignore_eos=True))]


def sent(model: models.Model) -> Counter[tuple[str, str, int]]:
    """Count what devices send each other in a decode step: (kind, shape, devices)."""
    device = Engine(model, Settings(**SHAPE))._core.device
    text = device._compilers("decode", 4)[0]().as_text()
    return Counter((c.kind, s, c.devices) for c in plan.collectives(text) for s in c.shapes)


def gathered(model: models.Model) -> list[str]:
    """List the arrays that a decode step gathers, but for logits and what is no larger than the states of its four rows."""
    shapes = [s for kind, s, _ in sent(model) if kind == "all-gather"]
    return [s for s in shapes if str(CFG.vocab) not in s and plan.shape_bytes(s) > CFG.embed * 16]


@pytest.fixture(scope="module")
def on_disk(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("mesh")
    models.save(model._replace(params=params.restack(model.params, SPEC)), path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    "quantize", ["int8", *(pytest.param(form, marks=pytest.mark.matrix) for form in (None, "nf4"))]
)
def test_what_was_trained_is_served_as_if_it_were_loaded(tokenizer, on_disk, quantize) -> None:
    """fsdp=4, tp=2: the same places as of a fresh load, no gathering of weights in a step, the same tokens."""
    mesh = params.make_mesh({"fsdp": 4, "tp": 2})
    fresh = weights.load(on_disk, mesh=mesh, quantize=quantize)
    trained = models.load(on_disk, mesh=mesh)
    if quantize:
        trained = trained._replace(params=params.quantize(trained.params, quantize, spec=SPEC))
    (found,) = launch.served(trained, tokenizer, "m", launch.ServerOptions(settings=Settings(**SHAPE)))
    served = found.engine.model
    want, got = (jax.tree.map(lambda x: x.sharding, m.params) for m in (fresh, served))
    assert jax.tree.structure(want) == jax.tree.structure(got)
    assert all(a.is_equivalent_to(b, x.ndim) for a, b, x in zip(
        jax.tree.leaves(want), jax.tree.leaves(got), jax.tree.leaves(fresh.params), strict=True
    ))  # fmt: skip
    q = served.params["layers"][0]["q"]
    assert (q.values if quantize else q).sharding.spec[0] == "tp"
    assert gathered(served) == [] and sent(served) == sent(fresh)
    assert tokens(served) == tokens(weights.load(on_disk, quantize=quantize))
    if quantize is None:  # what was wrong: every product of a step was added up over fsdp
        left = models.load(on_disk, mesh=mesh, stacked=False)
        assert (sent(left) - sent(served)).total() >= 7 * CFG.layers


def test_what_lies_in_its_place_is_not_moved(model) -> None:
    mesh = params.make_mesh({"tp": 2, "dp": 4})
    once = params.reshard(model.params, SPEC, mesh, params.SERVE)
    again = params.reshard(once, SPEC, mesh, params.SERVE)
    same = lambda a, b: (
        a.addressable_shards[0].data.unsafe_buffer_pointer() == (b.addressable_shards[0].data.unsafe_buffer_pointer())
    )
    assert all(jax.tree.leaves(jax.tree.map(same, once, again)))


@pytest.mark.slow
def test_adapters_are_moved_with_their_base(model) -> None:
    mesh = params.make_mesh({"fsdp": 4, "tp": 2})
    adapted = params.lora.add(model.params, 4, 8.0, key=jax.random.key(0), spec=params.unstack(SPEC))
    moved = params.reshard(adapted, SPEC, mesh, params.SERVE)
    q = moved["layers"][0]["q"]
    assert q.base.sharding.spec[0] == "tp" and q.a.sharding.is_fully_replicated
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), moved, adapted))


def served(heads: int, kv_heads: int, tp: int, kv: str | None = None) -> tuple[models.Model, Engine, list, list]:
    """Serve a model on devices along tp: (the model, its engine, the tokens, those of one device)."""
    values = dict(num_attention_heads=heads, head_dim=4, num_key_value_heads=kv_heads)
    cfg = llama.Config.from_hf(CFG.to_hf() | values)
    make = jax.jit(lambda key: params.unstack(params.init(llama.spec(cfg), key)))
    one = models.Model(llama, cfg, jax.tree.map(lambda x: x * 10 if x.ndim > 1 else x, make(jax.random.key(0))))
    mesh = params.make_mesh({"tp": tp}, jax.devices()[:tp])
    many = one._replace(params=params.reshard(one.params, llama.spec(cfg), mesh, params.SERVE))
    engine = Engine(many, Settings(**SHAPE, kv_cache_dtype=kv))
    got = [g.tokens for g in engine.generate(PROMPTS, SamplingParams(max_tokens=8, ignore_eos=True))]
    return many, engine, got, tokens(one, kv_cache_dtype=kv)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp", "own"),
    [
        (40, 10, 8, 2),
        *(pytest.param(*s, marks=pytest.mark.matrix) for s in ((40, 10, 4, 3), (24, 6, 4, 2), (12, 3, 4, 2))),
    ],
)
@pytest.mark.parametrize("kv", ["int8", pytest.param(None, marks=pytest.mark.matrix)])
def test_query_heads_of_a_device_that_share_key_heads_with_another_device(heads, kv_heads, tp, own, kv) -> None:
    """Each device keeps the keys that its query heads need: no cache is gathered. The tokens are one device's."""
    many, engine, got, want = served(heads, kv_heads, tp, kv)
    assert got == want
    pages = engine._core.device.state[0].pages
    assert {s.data.shape[2] for s in pages.k.addressable_shards} == {own}
    assert [s for s in gathered(many) if s.count(",") > 2] == []  # new keys alone, [T K H]


def test_what_generates_without_a_cache_is_traced_on_the_mesh_of_its_parameters(model, monkeypatch) -> None:
    """Else no kernel is divided between devices, and XLA cannot partition one."""
    mesh, seen, forward = params.make_mesh({"tp": 2}, jax.devices()[:2]), [], llama.forward
    monkeypatch.setattr(llama, "forward", lambda *args: (seen.append(platform.context("tp")), forward(*args))[1])
    many = model._replace(params=params.reshard(model.params, SPEC, mesh, params.SERVE))
    assert naive_generate(many, [5, 6, 7], max_tokens=2).tokens == naive_generate(model, [5, 6, 7], max_tokens=2).tokens
    assert seen == [{"tp": 2}, {}]


def test_every_program_of_an_engine_is_traced_on_the_mesh_of_its_parameters(model, monkeypatch) -> None:
    """Whatever the thread has set that compiles or calls it."""
    mesh, seen, hidden = params.make_mesh({"tp": 2}, jax.devices()[:2]), [], llama.hidden
    monkeypatch.setattr(llama, "hidden", lambda *args: (seen.append(platform.context("tp")), hidden(*args))[1])
    many = model._replace(params=params.reshard(model.params, SPEC, mesh, params.SERVE))
    device = Engine(many, Settings(**SHAPE | dict(pages=11)))._core.device  # a size that no other test has traced
    for name, n in {"decode": 4, "extend": device.blocks[-1], "score": 64, "embed": 64}.items():
        seen.clear()
        for trace in device._compilers(name, n, traced=True):
            trace()
        assert seen and all(x == {"tp": 2} for x in seen), (name, seen)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kv_heads", "tp", "copies"),
    [(2, 4, 2), *(pytest.param(*s, marks=pytest.mark.matrix) for s in ((1, 2, 2), (2, 8, 4), (1, 8, 8)))],
)
@pytest.mark.parametrize("kv", ["int8", pytest.param(None, marks=pytest.mark.matrix)])
def test_more_devices_than_key_value_heads(kv_heads, tp, copies, kv) -> None:
    """Each device keeps the keys and values that its query heads read, and no others; the tokens are one device's."""
    many, engine, got, want = served(8, kv_heads, tp, kv)
    assert got == want
    pages = engine._core.device.state[0].pages
    assert pages.k.addressable_shards[0].data.shape[2] == max(1, kv_heads * copies // tp) == 1
    assert many.params["layers"][0]["k"].addressable_shards[0].data.shape[0] == 1
    assert gathered(many) == []
    assert jnp.issubdtype(pages.k.dtype, jnp.integer) == (kv is not None)
