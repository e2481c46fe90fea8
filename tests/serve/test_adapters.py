"""Several adapters in one call: each answers as its own weights do, alone or merged, and loading one compiles nothing."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel import params, serve
from fdel.models import llama
from fdel.serve.engine import step, weights
from fdel.serve.engine.engine import Engine, Settings
from fdel.serve.engine.pages import Pool
from tests.serve.small import CFG, VOCAB

SHAPE = dict(rows=4, pages=9, budget=64, batches=(4,))
PROMPTS = [np.random.default_rng(3).integers(8, VOCAB, n).tolist() for n in (70, 63, 12, 9)]
SAMPLING = serve.SamplingParams(max_tokens=8, ignore_eos=True)
SPEC = params.unstack(llama.spec(CFG))


def adapter(base, seed: int, rank: int, where: str = r"\blayers\b", spec=SPEC):
    """An adapter with random factors."""
    tree = params.lora.add(base, rank, 2.0 * rank, where, key=jax.random.key(seed), spec=spec)
    keys = iter(jax.random.split(jax.random.key(seed + 100), 1000))
    low = lambda w: isinstance(w, params.lora.LowRank)
    filled = lambda w: params.lora.replace(w, b=0.1 * jax.random.normal(next(keys), w.b.shape)) if low(w) else w
    return jax.tree.map(filled, tree, is_leaf=low)


@pytest.fixture(scope="module")
def adapters(model) -> dict:
    """Ranks differ, and so do the matrices that are adapted."""
    return {
        "a": adapter(model.params, 0, 4),
        "b": adapter(model.params, 1, 2, r"\.(q|down)$"),
        "c": adapter(model.params, 2, 7, "layers.1"),
    }


@pytest.fixture(scope="module")
def alone(model, adapters) -> dict:
    """What each adapter answers when it is merged into a model that is served alone."""
    trees = {"": model.params, **{n: params.lora.merge(t) for n, t in adapters.items()}}
    return {
        n: Engine(model._replace(params=t), Settings(**SHAPE)).generate(PROMPTS, SAMPLING) for n, t in trees.items()
    }


def check(e: Engine, alone: dict, names: list[str], most: float = 2e-3) -> None:
    jobs = [e.submit(p, SAMPLING, adapter=n) for p, n in zip(PROMPTS, names, strict=True)]
    e.wait(lambda: all(j.reply.finish_reason for j in jobs))
    for i, (job, name) in enumerate(zip(jobs, names, strict=True)):
        assert job.reply.tokens == alone[name][i].tokens
        np.testing.assert_allclose(job.reply.logprobs, alone[name][i].logprobs, atol=most)


def calls(e: Engine) -> list:
    """Note the requests of every call to the device."""
    seen, device = [], e._core.device
    run = device._run

    def noted(program, requests, *args, **kwargs):
        seen.append(sorted({r.adapter for r in requests}))
        return run(program, requests, *args, **kwargs)

    device._run = noted
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("options", [dict(), dict(total=3), dict(drafts=3, budget=7)], ids=str)
def test_a_mixed_batch_answers_as_each_alone(model, adapters, alone, options: dict) -> None:
    """Under preemption, chunks and drafts too; base and three adapters decode in one call."""
    total = options.get("total", 9)
    settings = Settings(**SHAPE | {k: v for k, v in options.items() if k != "total"})
    e = Engine(model, settings, adapters=adapters)
    e._core.schedule.pool = Pool(total, step.PAGE)
    seen = calls(e)
    for names in (["", "a", "b", "c"], ["c", "", "a", "a"]):
        check(e, alone, names)
    assert any(len(s) > 1 for s in seen) and (options or ["", "a", "b", "c"] in seen)
    assert e.stats()["preempted"] >= (total == 3)
    own = np.asarray(e._core.device.weights["a"]["layers"][0]["q"].b)
    np.testing.assert_array_equal(own, adapters["a"]["layers"][0]["q"].b)
    prompt = PROMPTS[1] + alone["b"][1].tokens
    scored = e.score(prompt, adapter="b").logprobs[len(PROMPTS[1]) :]
    np.testing.assert_allclose(scored, alone["b"][1].logprobs, atol=2e-3)


@pytest.mark.slow
def test_adapters_come_and_go_without_compiling(model, adapters, alone, caplog) -> None:
    """With room for two of rank 8; the third, which the room does not hold, still answers."""
    e = Engine(model, Settings(**SHAPE, max_loras=2, max_lora_rank=8))
    e._core.device.warm_up()
    programs = e._core.device.programs.traces.copy()
    check(e, alone, [""] * 4)
    e.update_params(adapters["a"], "a")
    check(e, alone, ["", "a", "a", ""])
    e.update_params(adapters["b"], "b")
    check(e, alone, ["b", "a", "b", ""])
    e.remove_adapter("a")
    e.update_params(adapters["c"], "c")  # in the slot of "a"
    check(e, alone, ["b", "c", "b", ""])
    e.update_params(adapters["a"], "b")  # other weights under a name
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        check(e, alone | {"b": alone["a"]}, ["b", "c", "c", ""])
    assert not [r.getMessage() for r in caplog.records if "ompil" in r.getMessage()]
    assert e._core.device.programs.traces == programs
    e.update_params(adapters["b"], "d")
    check(e, alone | {"b": alone["a"], "d": alone["b"]}, ["b", "c", "d", ""])
    assert e._core.device.weights.size == 4


@pytest.mark.slow
def test_the_base_stays_what_it_is(model, adapters, alone) -> None:
    """Rows of the base in a mixed batch draw from logits that no adapter has touched: equal bits."""
    e = Engine(model, Settings(**SHAPE), adapters=adapters)
    base = Engine(model, Settings(**SHAPE, max_loras=4, max_lora_rank=8))
    jobs = [e.submit(p, SAMPLING, adapter=n) for p, n in zip(PROMPTS, ["", "a", "c", ""], strict=True)]
    only = [base.submit(p, SAMPLING) for p in PROMPTS]
    for made, wait in ((e, jobs), (base, only)):
        made.wait(lambda wait=wait: all(j.reply.finish_reason for j in wait))
    for i in (0, 3):
        assert jobs[i].reply.tokens == only[i].reply.tokens and jobs[i].reply.logprobs == only[i].reply.logprobs


@pytest.mark.slow
def test_a_new_base_leaves_adapters_their_old_one(model, adapters, alone) -> None:
    """They then have calls of their own, and those made for the new base share its calls."""
    e = Engine(model, Settings(**SHAPE), adapters={"a": adapters["a"]})
    assert e._core.device.group("a") == "" == e._core.device.group("")
    new = jax.tree.map(lambda x: x * 1.1 if x.ndim > 1 else x, model.params)
    e.update_params(new)
    want = Engine(model._replace(params=new), Settings(**SHAPE)).generate(PROMPTS, SAMPLING)
    assert e._core.device.group("a") == "a"
    check(e, alone | {"": want}, ["", "a", "a", ""])
    e.update_params(adapter(new, 0, 4), "n")
    assert e._core.device.group("n") == ""


@pytest.mark.slow
def test_what_shares_no_base_has_its_own_calls(model, adapters) -> None:
    """Copies of the base's arrays, and an adapted embedding; stacked parameters of a base share it all the same."""
    copy = jax.tree.map(jnp.copy, adapters["a"])
    table = adapter(model.params, 5, 2, "^embed")
    w = weights.Weights(model, {"a": adapters["a"], "copy": copy, "table": table}, 0, 0)
    assert (w.slot("a"), w.slot("copy"), w.slot("table"), w.slot("")) == (0, -1, -1, -1)
    assert w.call("a") is w.call("") is not w.call("copy") and len(w.calls()) == 3
    whole = params.restack(model.params, llama.spec(CFG))
    stacked = adapter(whole, 0, 4, spec=llama.spec(CFG))
    w = weights.Weights(model._replace(params=whole), {"a": stacked}, 0, 0)
    assert w.slot("a") == 0 and w["a"]["layers"][1]["q"].base is w[""]["layers"][1]["q"]


def test_room_must_be_a_number_of_adapters(model) -> None:
    with pytest.raises(ValueError, match="max_loras=-1; expected at least 0"):
        Engine(model, Settings(max_loras=-1))
    assert [weights.grown(0, 0), weights.grown(0, 3), weights.grown(16, 7), weights.grown(2, 5)] == [0, 4, 16, 8]


@pytest.mark.slow
def test_on_a_mesh(model, adapters, alone) -> None:
    """With the base over tp=2: the same answers, and nothing compiles when an adapter comes."""
    mesh = params.make_mesh({"tp": 2, "dp": 4})
    at = params.shardings(SPEC, mesh, params.SERVE)
    sharded = model._replace(params=jax.device_put(model.params, at))
    e = Engine(sharded, Settings(**SHAPE, max_loras=2, max_lora_rank=8))
    e._core.device.warm_up()
    before = e._core.device.programs.traces.copy()
    e.update_params(adapter(sharded.params, 0, 4), "a")
    check(e, alone, ["", "a", "a", ""])
    assert e._core.device.group("a") == "" and e._core.device.programs.traces == before


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_next"])
def test_latents_experts_and_recurrence(pair, name: str) -> None:
    """What is adapted outside of experts shares calls; experts' adapters still answer, in calls of their own."""
    model = pair(name)[1]
    spec = params.unstack(model.family.spec(model.cfg))
    outside = r"\blayers\b(?!.*\b(router|experts)\b)"
    trees = {n: adapter(model.params, i, 3, outside, spec) for i, n in enumerate("ab")}
    trees["e"] = adapter(model.params, 4, 2, "experts", spec)
    e = Engine(model, Settings(rows=4, pages=9, budget=64, batches=(4,)), adapters=trees)
    assert [e._core.device.group(n) for n in ("a", "b", "e")] == ["", "", "e"]
    prompts = [np.random.default_rng(n).integers(3, 128, 9).tolist() for n in range(4)]
    names = ["", "a", "b", "e"]
    jobs = [e.submit(p, SAMPLING, adapter=n) for p, n in zip(prompts, names, strict=True)]
    e.wait(lambda: all(j.reply.finish_reason for j in jobs))
    for job, p, n in zip(jobs, prompts, names, strict=True):
        want = serve.naive_generate(model._replace(params=trees.get(n, model.params)), p, 8)
        assert job.reply.tokens == want.tokens
        np.testing.assert_allclose(job.reply.logprobs, want.logprobs, atol=1e-4)
