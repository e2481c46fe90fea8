"""New weights for an engine that runs: what is refused, what they cost in memory, and that a trainer may donate its own."""

import gc
import logging
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel import params, train
from fdel.models import Model, llama
from fdel.ops.weights import Adapters
from fdel.params.spec import path_name
from fdel.serve.engine import views, weights
from fdel.serve.engine.engine import Engine, Settings
from tests.serve.small import CFG, make_model
from tests.serve.test_adapters import PROMPTS, SAMPLING, SHAPE, SPEC, adapter

STACKED = llama.spec(CFG)


def tokens(e: Engine, names=("", "", "", "")) -> list:
    """What the engine answers, with the bits of its log-probabilities."""
    jobs = [e.submit(p, SAMPLING, adapter=n) for p, n in zip(PROMPTS, names, strict=True)]
    e.wait(lambda: all(j.reply.finish_reason for j in jobs))
    return [(j.reply.finish_reason, j.reply.tokens, j.reply.logprobs) for j in jobs]


@pytest.fixture(scope="module")
def engine(model) -> Engine:
    return Engine(model, Settings(**SHAPE))


def of(**sizes) -> dict:
    cfg = replace(CFG, **sizes)
    return params.init(llama.spec(cfg), jax.random.key(1))


def changed(tree, path: str, f) -> dict:
    """A copy of a tree with one array changed."""
    return jax.tree_util.tree_map_with_path(lambda p, x: f(x) if path_name(p) == path else x, tree)


HALF = jnp.bfloat16
WRONG = {
    "ffn": (lambda: of(ffn=64), r"layers.0.down has shape \(32, 64\); expected \(32, 48\)"),
    "layers": (lambda: of(layers=3), r"layers.2.attn_norm has no place .* \(9 such arrays\)"),
    "heads": (lambda: of(heads=2), r"layers.0.o has shape \(32, 2, 8\); expected \(32, 4, 8\)"),
    "vocab": (lambda: of(vocab=150), r"embed has shape \(150, 32\); expected \(300, 32\)"),
    "missing": (lambda: {k: v for k, v in of().items() if k != "norm"}, "norm is missing"),
    "half": (lambda: jax.tree.map(lambda x: x.astype(HALF), of()), "embed is bfloat16; expected float32; or .* cast=True"),
    "integers": (lambda: changed(of(), "norm", lambda x: x.astype(int)), "norm is int32; expected float32"),
    "host": (lambda: jax.tree.map(np.asarray, of()), "embed is laid out as an array of the host; .* reshard=True"),
    "quantised": (lambda: params.quantize(of(), "int8", spec=STACKED), "layers.0.down is missing"),
    "nothing": (dict, "embed is missing"),
    "no arrays": (lambda: {"embed": "a"}, "must be a tree of arrays"),
    "no layers": (lambda: of() | {"layers": {}}, "neither a list nor stacked"),
    "nan": (lambda: changed(of(), "layers.q", lambda x: x.at[1, 0].set(jnp.nan)), "layers.1.q has values that are not fin"),
    "inf": (lambda: changed(of(), "embed", lambda x: x.at[-1, -1].set(jnp.inf)), "embed has values that are not finite"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("listed", [False, True])
def test_what_does_not_fit_is_refused(engine, name: str, listed: bool) -> None:
    """By the first path, with what was found and expected; and what is served does not change."""
    make, said = WRONG[name]
    tree, before = make(), engine._core.device.weights.together
    if listed and name not in ("nothing", "no arrays", "no layers"):
        tree = params.unstack(tree)
    with pytest.raises(ValueError, match=said):
        engine.update_params(tree)
    assert engine._core.device.weights.together is before


@pytest.mark.slow
def test_casting_and_moving_are_done_on_request(model) -> None:
    """Nothing compiles; the values are those that were given."""
    e, other = Engine(model, Settings(**SHAPE)), make_model(5)
    tokens(e)
    traces = e._core.device.programs.traces.copy()
    half = jax.tree.map(lambda x: np.asarray(x.astype(HALF)), other.params)
    want = tokens(Engine(model._replace(params=jax.tree.map(lambda x: x.astype(jnp.float32), half)), Settings(**SHAPE)))
    e.update_params(half, cast=True, reshard=True)
    assert tokens(e) == want and e._core.device.programs.traces == traces
    with pytest.raises(ValueError, match="int32; expected float32$"):
        e.update_params(jax.tree.map(lambda x: x.astype(jnp.int32), other.params), cast=True)


@pytest.mark.slow
def test_an_update_compiles_nothing(model, caplog) -> None:
    """Stacked, listed, and of a jitted step."""
    e = Engine(model, Settings(**SHAPE))
    stacked = params.restack(make_model(5).params, STACKED)
    made = jax.jit(lambda t: jax.tree.map(lambda x: x * 1, t))(stacked)
    trees = (stacked, make_model(5).params, made, jax.device_put(stacked, jax.devices()[0]))
    first = tokens(e)
    e.update_params(stacked)
    second = tokens(e)
    assert first != second
    for tree in trees:
        e.update_params(tree)
        with jax.log_compiles(), caplog.at_level(logging.WARNING):
            assert tokens(e) == second
        assert not [r.getMessage() for r in caplog.records if "ompil" in r.getMessage()]


@pytest.mark.slow
def test_from_mesh_to_mesh(model) -> None:
    """A trainer's layout (fsdp) is refused, and laid out as the engine's (tp) on request, without a new program."""
    train_mesh, serve_mesh = params.make_mesh({"fsdp": 8}), params.make_mesh({"tp": 2, "dp": 4})
    at = params.shardings(SPEC, serve_mesh, params.SERVE)
    e = Engine(model._replace(params=jax.device_put(model.params, at)), Settings(**SHAPE))
    tokens(e)
    traces = e._core.device.programs.traces.copy()
    stacked = params.restack(make_model(5).params, STACKED)
    trained = jax.device_put(stacked, params.shardings(STACKED, train_mesh, params.TRAIN))
    with pytest.raises(
        ValueError, match=r"embed is laid out as NamedSharding.*fsdp.*; expected .*tp.*; or give reshard=True"
    ):
        e.update_params(trained)
    e.update_params(trained, reshard=True)
    got = tokens(e)
    assert e._core.device.programs.traces == traces
    assert jax.tree.all(jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), e.model.params, at))
    want = tokens(Engine(make_model(5), Settings(**SHAPE)))
    assert [t for _, t, _ in got] == [t for _, t, _ in want]


def live() -> int:
    return sum(x.nbytes for x in jax.live_arrays() if not x.is_deleted())


@pytest.mark.slow
def test_memory(model, monkeypatch) -> None:
    """In weights: the engine holds one, whatever was given; and an update takes the place of what it replaces."""
    cfg = replace(CFG, vocab=3000, embed=128, ffn=512, layers=3)
    make = lambda i: params.init(llama.spec(cfg), jax.random.key(i))
    gc.collect()
    start, size = live(), params.nbytes(llama.spec(cfg))
    held = lambda: (live() - start - cache) / size
    e = Engine(Model(llama, cfg, make(0)), Settings(rows=1, max_length=64, pages=1), eos=[])
    device = e._core.device
    cache = sum(x.nbytes for x in jax.tree.leaves((device.state, device.sequences, device.unmasked)))
    assert held() == pytest.approx(1, abs=0.02)
    given, most = make(1), []
    assert held() == pytest.approx(2, abs=0.02)
    copies = weights.copies

    def watched(*args):
        most.append(held() + 1)
        out = copies(*args)
        most.append(held())
        return out

    monkeypatch.setattr(weights, "copies", watched)
    for i in range(1, 5):
        e.update_params(given)
        assert held() == pytest.approx(2, abs=0.02), i
    assert max(most) == pytest.approx(2, abs=0.02) and len(most) == 4 * 2
    e.update_params(params.unstack(given))
    del given
    assert held() == pytest.approx(1, abs=0.02)


@pytest.mark.slow
def test_a_trainer_donates_its_own(model) -> None:
    """Between a step, which donates what the engine was given, and the update the old weights answer."""
    base = params.restack(make_model(5).params, STACKED)
    optimizer = train.optim.adamw(1e-2)
    state = jax.jit(lambda p: train.init_state(p, optimizer))(base)
    step = jax.jit(
        train.update(train.normalize(train.grads(train.losses.sft(llama, CFG))), optimizer), donate_argnums=0
    )
    e = Engine(model._replace(params=state.params), Settings(**SHAPE))
    batch, answers = {"tokens": jnp.asarray(PROMPTS[0])[None]}, [tokens(e)]
    for _ in range(2):
        before = state.params
        state, _ = step(state, batch)
        assert all(x.is_deleted() for x in jax.tree.leaves(before))
        assert tokens(e) == answers[-1]
        e.update_params(state.params)
        answers.append(tokens(e))
        want = tokens(Engine(model._replace(params=params.unstack(state.params)), Settings(**SHAPE)))
        assert answers[-1] == want
    assert answers[0] != answers[1] != answers[2]
    e.score(PROMPTS[0])


@pytest.mark.slow
def test_a_trainer_donates_its_adapter(model, engine) -> None:
    made = adapter(model.params, 0, 4)
    e = Engine(model, Settings(**SHAPE, max_loras=1), adapters={"a": made})
    e.update_params(adapter(model.params, 1, 4), "b")
    before = tokens(e, ["", "a", "b", "a"]), e.score(PROMPTS[0], adapter="a")
    [x.delete() for x in jax.tree.leaves(params.lora.split(made)[0])]
    e.remove_adapter("b")
    e.update_params(adapter(model.params, 1, 4), "b")
    assert (tokens(e, ["", "a", "b", "a"]), e.score(PROMPTS[0], adapter="a")) == before


@pytest.mark.slow
def test_an_update_that_fails_half_way_is_said(model, monkeypatch) -> None:
    """Requests are told, and the next update makes it good."""
    e, other = Engine(model, Settings(**SHAPE)), make_model(5).params

    def full(*args):
        raise RuntimeError("RESOURCE_EXHAUSTED")

    queued = e.submit(PROMPTS[0], SAMPLING)
    with monkeypatch.context() as m:
        m.setattr(weights, "copies", full)
        with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
            e.update_params(other)
    e.wait(lambda: bool(queued.reply.finish_reason))
    lost = "there are no weights: .* an update failed half-way; call update_params"
    assert queued.reply.finish_reason == "error" and re.search(lost, queued.reply.error)
    for ask in (lambda: e.score([1, 2]), lambda: e.generate(PROMPTS, SAMPLING)):
        with pytest.raises(RuntimeError, match=lost):
            ask()
    e.update_params(other)
    assert e.generate(PROMPTS, SAMPLING)[0].tokens == tokens(e)[0][1]


# ---- adapters --------------------------------------------------------------------------------------------------------


def spoiled(tree, part: str, value: float):
    """An adapter with one value of one factor changed."""
    low = lambda w: isinstance(w, params.lora.LowRank)
    q = tree["layers"][1]["q"]
    x = jnp.asarray(getattr(q, part))
    layers = [*tree["layers"]]
    layers[1] = layers[1] | {"q": replace(q, **{part: x.at[(0,) * x.ndim].set(value)})}
    assert low(q)
    return tree | {"layers": layers}


@pytest.mark.slow
@pytest.mark.parametrize("value", [jnp.nan, jnp.inf, 3e38])
@pytest.mark.parametrize("part", ["a", "b", "scale"])
def test_an_adapter_that_is_not_finite_is_refused(model, part: str, value: float) -> None:
    """At the start and later; base and other adapters answer bit by bit as before, beside the finite ones' overflow."""
    good, bad = adapter(model.params, 0, 4), spoiled(adapter(model.params, 1, 4), part, value)
    e = Engine(model, Settings(**SHAPE, max_loras=2, max_lora_rank=4), adapters={"a": good})
    before = tokens(e, ["", "a", "", "a"])
    if part != "b" and value == 3e38:  # which is finite: it harms itself alone
        e.update_params(bad, "b")
        after = tokens(e, ["", "a", "b", "a"])
        assert [after[i] for i in (0, 1, 3)] == [before[i] for i in (0, 1, 3)] and after[2][0] == "error"
        e.remove_adapter("b")
        assert not any(np.asarray(w.b[..., 1, :]).any() for w in adapted(e))
    else:
        where = "a" if part == "a" else "b"  # the scale is in b
        with pytest.raises(ValueError, match=f"layers.1.q.{where} has values that are not finite in float32"):
            e.update_params(bad, "b")
        with pytest.raises(ValueError, match=f"layers.1.q.{where} has values"):
            Engine(model, Settings(**SHAPE), adapters={"b": bad})
        assert "b" not in e._core.device.weights
    assert tokens(e, ["", "a", "", "a"]) == before


def adapted(e: Engine) -> list:
    leaves = jax.tree.leaves(e._core.device.weights.together, is_leaf=params.lora.is_weight)
    return [w for w in leaves if isinstance(w, Adapters)]


def test_a_rank_above_the_limit_is_refused(model) -> None:
    large = adapter(model.params, 0, 9, r"\.q$")
    for limit, most in ((8, 8), (None, 64), (0, 64)):
        e = Engine(model, Settings(**SHAPE, max_lora_rank=limit))
        assert e._core.device.weights.most == most
        if limit == 8:
            with pytest.raises(
                ValueError, match="layers.0.q has an adapter of rank 9; the most is 8 here, give max_lora_rank=9"
            ):
                e.update_params(large, "a")
            with pytest.raises(ValueError, match="rank 9"):
                Engine(model, Settings(**SHAPE, max_lora_rank=8), adapters={"a": large})
        else:
            e.update_params(large, "a")
    q = large["layers"][0]["q"]
    for wrong in (
        replace(q, b=q.b[:, :, :3]),
        replace(q, a=q.a[:, :5]),
        replace(q, scale=jnp.ones(3)),
        replace(q, b=q.b[0]),
    ):
        tree = large | {"layers": [large["layers"][0] | {"q": wrong}, large["layers"][1]]}
        with pytest.raises(ValueError, match="layers.0.q: factors .* are no low-rank update of shape"):
            e.update_params(tree, "b")


@pytest.mark.slow
def test_slots_shrink_without_compiling(model, caplog) -> None:
    """To the smallest tree that has been there, never below the room of the start."""
    e = Engine(model, Settings(**SHAPE, max_loras=1, max_lora_rank=32))
    tokens(e)
    e2 = Engine(model, Settings(**SHAPE))

    def sizes(e: Engine) -> tuple[int, int, int]:
        return e._core.device.weights.size, e._core.device.weights.rank, len(adapted(e))

    base, room = tokens(e2), sizes(e)
    assert room == (1, 32, 14) and sizes(e2) == (0, 0, 0)
    for name, rank in (("a", 2), ("b", 32), ("c", 4)):
        made = adapter(model.params, 1, rank, r"\.q$")
        e.update_params(made, name)
        e2.update_params(made, name)
        tokens(e2, ["", "a", "", name])
    assert sizes(e2) == (4, 32, 2) and sizes(e) == (4, 32, 14)
    tokens(e)
    want = tokens(e2, ["", "a", "", ""])
    for gone in "cb":
        e2.remove_adapter(gone)
        e.remove_adapter(gone)
    assert sizes(e2) == (1, 2, 2) and sizes(e) == room
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        assert [t for _, t, _ in tokens(e2, ["", "a", "", ""])] == [t for _, t, _ in want]
        e2.remove_adapter("a")
        assert tokens(e2) == base and tokens(e) == base
    said = [r.getMessage() for r in caplog.records]
    assert not [s for s in said if "ompiling jit(extend" in s or "ompiling jit(decode" in s]


def test_new_weights_are_written_over_old_copies(model) -> None:
    """Not over those that others have: what was there from the start, what is given, what an adapter shares."""
    weights_of, made = lambda: jax.tree.leaves(held[""]), [make_model(i).params for i in range(4)]
    held = weights.Weights(model, {})
    put = lambda tree, **how: held.put("", held.checked("", tree), **how)
    first = weights_of()
    put(made[1], reuse=True)
    second = weights_of()
    put(made[2])
    third = weights_of()
    assert not any(x.is_deleted() for x in (*first, *second))
    put(made[3], reuse=True)
    assert all(x.is_deleted() for x in third) and not any(x.is_deleted() for x in jax.tree.leaves(made))
    same = lambda a, b: all(bool((x == y).all()) for x, y in zip(a, jax.tree.leaves(b), strict=True))
    fourth = weights_of()
    assert same(fourth, made[3])
    put(made[1] | {"embed": held[""]["embed"]}, reuse=True)
    assert not any(x.is_deleted() for x in fourth) and same(weights_of(), made[1] | {"embed": made[3]["embed"]})
    held["a"] = held.checked("a", params.lora.add(held[""], 2, 1.0, key=jax.random.key(0), spec=SPEC))
    shared = weights_of()
    put(made[2], reuse=True)
    assert not any(x.is_deleted() for x in shared)


@pytest.mark.parametrize("stacked", [False, True])
def test_one_program_writes_all_new_weights_of_a_trainer(stacked: bool, model, caplog) -> None:
    """The first update compiles it, the second nothing; copies of what was stacked are written over."""
    of = lambda seed: params.restack(make_model(seed).params, STACKED)
    trees, compiled = [of(i) for i in range(3)], []
    views.copier.cache_clear()
    held = weights.Weights(model._replace(params=trees[2]) if stacked else model, {})
    first = jax.tree.leaves(held[""])
    for tree in trees[:2]:
        new = held.checked("", tree)
        caplog.clear()
        with jax.log_compiles(), caplog.at_level(logging.WARNING):
            held.put("", new, reuse=True)
        compiled.append([r.getMessage() for r in caplog.records if "ompiling jit(copy" in r.getMessage()])
        assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), held[""], params.unstack(tree)))
    assert [len(x) for x in compiled] == [1, 0] and all(x.is_deleted() == stacked for x in first)
    assert not any(x.is_deleted() for x in jax.tree.leaves(trees))
