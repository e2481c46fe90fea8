"""Rollouts: samples are functions of seeds and weights, their log-probabilities are the trainer's, a run resumes."""

import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel import models, ops, params, train
from fdel.models import llama, mixtral
from fdel.serve import Engine, SamplingParams, Settings
from fdel.train import data, losses
from fdel.train.rollout import Adapter, Said, Source, Task, advantages, collate, rollout
from fdel.train.rollout.source import decode, encode
from tests.train import small_policy as small

ANY = SamplingParams(max_tokens=6, temperature=1.0)


@pytest.fixture(scope="module")
def weights():
    return small.weights()


@pytest.fixture(scope="module")
def engine(weights):
    return small.engine(weights)


@pytest.fixture(scope="module")
def logps():
    """The trainer's log-probabilities of learnt tokens, at a temperature, [B T]."""
    return lambda params, batch, temperature: jax.jit(losses.token_logps(llama, small.CFG, temperature=temperature))(
        params, batch
    )


def key(s):
    return s.task.number, s.index, s.tokens.tolist(), s.finish


# ---- what is drawn -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_samples_do_not_depend_on_their_company(engine):
    every = small.tasks(6)
    together = rollout(engine, every, ANY, samples=4, seed=3)
    assert [s.task.number for s in together] == [i for i in range(6) for _ in range(4)]
    assert [s.index for s in together] == [0, 1, 2, 3] * 6
    alone = [s for task in reversed(every) for s in rollout(engine, [task], ANY, samples=4, seed=3)]
    assert sorted(map(key, alone)) == sorted(map(key, together))
    assert len({s.tokens.tobytes() for s in together if s.task.number == 0}) > 1
    assert list(map(key, rollout(engine, every, ANY, samples=4, seed=4))) != list(map(key, together))


def test_tokens_and_masks(engine):
    for s in rollout(engine, small.tasks(3), ANY, samples=4):
        n = len(s.prompt)
        assert s.tokens[:n].tolist() == list(s.prompt) and not s.drawn[:n].any() and s.drawn[n:].all()
        assert (s.logps[:n] == 0).all() and (s.logps[n:] < 0).all() and (s.versions[:n] == -1).all()
        assert s.length == len(s.completion) <= 6
        assert (s.finish == "stop") == (s.completion[-1] == small.EOS)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("how", [{"temperature": 1.0}, {"temperature": 0.7}, {"temperature": 1.0, "top_p": 0.8}])
def test_log_probabilities_are_the_trainers(engine, weights, logps, packed, how):
    """In float32 to 1e-5: of what was drawn from, and with the kept mass of the whole distribution."""
    samples = rollout(engine, small.tasks(8), SamplingParams(max_tokens=6, **how), samples=4)
    batch = collate(samples, np.ones(32), length=64, packed=packed)
    found = np.asarray(logps(weights, batch, how["temperature"]))
    assert batch["mask"].sum() == sum(s.length for s in samples) > 60
    np.testing.assert_allclose(found[batch["mask"]], (batch["logps"] + batch["kept"])[batch["mask"]], atol=1e-5)
    assert (np.abs(batch["kept"]).max() > 0.1) == ("top_p" in how)


def test_a_deadline_cuts_what_goes_on(engine):
    endless = SamplingParams(max_tokens=40, temperature=1.0, ignore_eos=True)
    told = []
    full = rollout(engine, small.tasks(2), endless, samples=2, each=told.append)
    assert [[s.index for s in group] for group in told] == [[0, 1], [0, 1]]
    cut = rollout(engine, small.tasks(2), endless, samples=2, deadline=0.0)
    assert {s.finish for s in full} == {"length"} and {s.finish for s in cut} == {"deadline"}
    slow = rollout(engine, small.tasks(2), endless, samples=2, deadline=0.3, turn=None)
    for a, b in zip(slow, full, strict=True):
        assert a.tokens.tolist() == b.tokens[: len(a.tokens)].tolist()
    assert rollout(engine, small.tasks(2), endless, samples=2)[0].tokens.tolist() == full[0].tokens.tolist()


def test_what_cannot_be_asked(engine):
    with pytest.raises(ValueError, match="samples=0"):
        rollout(engine, small.tasks(1), ANY, samples=0)
    with pytest.raises(ValueError, match="seed=3"):
        rollout(engine, small.tasks(1), replace(ANY, seed=3))
    with pytest.raises(ValueError, match="64"):
        rollout(engine, [Task(0, (1,) * 70)], ANY)


# ---- environments --------------------------------------------------------------------------------------------------


def test_an_environment_answers(engine, weights, logps):
    """It hears each generation, its tokens are appended and not learnt, and what follows is drawn after them."""

    def turn(s):
        turns = int(s.info["turns"])
        if turns == 3:
            return Said(done=True, reward=float(len(s.completion)), info={"calls": 1})
        return Said((6, s.completion[0]), info={"calls": 1})

    ask = SamplingParams(max_tokens=30, temperature=1.0)
    samples = rollout(engine, small.tasks(8), ask, samples=4, turn=turn)
    several = [s for s in samples if s.finish == "stop"]
    assert len(several) > 4
    for s in several:
        said = np.flatnonzero(~s.drawn[len(s.prompt) :]) + len(s.prompt)
        assert len(said) == 4 and (s.tokens[said[::2]] == 6).all() and (s.tokens[said[1::2]] == s.completion[0]).all()
        assert (s.tokens[said[::2] - 1] == small.EOS).all()
        assert s.reward == len(s.completion) and s.info["calls"] == 3
    batch = collate(samples, np.ones(32), length=64)
    found = np.asarray(logps(weights, batch, 1.0))
    np.testing.assert_allclose(found[batch["mask"]], batch["logps"][batch["mask"]], atol=1e-5)
    assert list(map(key, rollout(engine, small.tasks(8), ask, samples=4, turn=turn))) == list(map(key, samples))


def test_an_environment_that_waits_or_raises(engine):
    async def turn(s):
        if s.index:
            raise KeyError("lost")
        return Said(done=True, reward=1.0)

    short = SamplingParams(max_tokens=40, temperature=1.0)
    first, second = rollout(engine, small.tasks(1), short, samples=2, turn=turn)
    assert (first.finish, first.reward) == ("stop", 1.0)
    assert second.finish == "error" and "KeyError" in second.error
    hangs = rollout(engine, small.tasks(1), short, samples=2, turn=lambda s: time.sleep(30), deadline=0.5)
    assert {s.finish for s in hangs} == {"deadline"} and all(s.length for s in hangs)


@pytest.mark.parametrize("order", [1, -1])
def test_how_fast_an_environment_answers_changes_nothing(engine, order):
    """Not a bit of a log-probability: all trajectories take their next turn together."""

    def turn(s):
        time.sleep(0.02 * (s.index if order > 0 else 3 - s.index))
        return Said((6,), done=s.info["turns"] >= 3)

    ask = SamplingParams(max_tokens=30, temperature=1.0)
    first, again = (rollout(engine, small.tasks(4), ask, samples=4, turn=t)
                    for t in (turn, lambda s: Said((6,), done=s.info["turns"] >= 3)))  # fmt: skip
    assert list(map(key, first)) == list(map(key, again)) and max(s.info["turns"] for s in first) == 3
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a.logps, b.logps)


# ---- batches -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_packed_rows_learn_the_same(engine, weights):
    """The loss and its gradient, to rounding; samples that are not learnt and those with an error count for nothing."""
    every = [Task(i, (2 + i, *t.prompt * 2)) for i, t in enumerate(small.tasks(6))]
    samples = rollout(engine, every, ANY, samples=4)
    samples[3] = replace(samples[3], finish="error")
    a, learn = np.random.default_rng(0).normal(size=24), np.arange(24) % 5 > 0
    g = jax.jit(train.grads(losses.policy_gradient(llama, small.CFG, losses.Policy(beta=0.0))))
    plain, *other = (
        collate(samples, a, length=64, rows=2, learn=learn, packed=p, shared=s)
        for p, s in ((False, False), (True, False), (True, True))
    )
    used = [int((x["packed"].segment_ids >= 0).sum()) for x in other]
    assert [len(x["tokens"]) for x in (plain, *other)] == [24, 16, 8] and used[1] < 0.6 * used[0]
    assert plain["mask"].sum() == sum(s.length for i, s in enumerate(samples) if i % 5 and i != 3)
    ga, sa = g(weights, plain, {})
    for batch in other:
        gb, sb = g(weights, batch, {})
        np.testing.assert_allclose(sa["loss"], sb["loss"], rtol=1e-5)
        assert sa["weight"] == sb["weight"] == plain["mask"].sum()
        for x, y in zip(jax.tree.leaves(ga), jax.tree.leaves(gb), strict=True):
            np.testing.assert_allclose(x, y, atol=1e-4 * float(jnp.abs(x).max()))


def test_few_shapes():
    samples = [small_sample(n) for n in (3, 9, 20)]
    assert collate(samples, np.zeros(3), length=64)["tokens"].shape == (3, 32)
    assert collate(samples, np.zeros(3), length=24, rows=2)["tokens"].shape == (4, 24)
    assert collate(samples, np.zeros(3), length=24, rows=2, packed=True)["tokens"].shape == (2, 24)
    assert collate(samples, np.zeros(3), length=10)["mask"].sum() == 1 + 7 + 8
    with pytest.raises(ValueError, match="advantages"):
        collate(samples, np.zeros(2), length=64)


def small_sample(n):
    """A sample of n tokens, all but two of them drawn."""
    from fdel.train.rollout import Sample

    drawn = np.arange(n) >= 2
    zeros = np.zeros(n, np.float32)
    return Sample(Task(0, (1, 2)), 0, np.arange(n, dtype=np.int32), drawn, zeros, zeros, drawn - 1, "stop")


# ---- several steps on one batch ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_minibatches_are_steps_one_after_the_other(engine, weights):
    samples = rollout(engine, small.tasks(4), ANY, samples=4)
    batch = collate(samples, np.random.default_rng(1).normal(size=16), length=64)
    optimizer = train.optim.adamw(1e-2)
    loss = losses.policy_gradient(llama, small.CFG, losses.Policy())
    inner = train.update(train.normalize(train.grads(loss)), optimizer)
    old = lambda params, batch, given: {"old": losses.token_logps(llama, small.CFG)(params, batch)}
    state, metrics = jax.jit(train.minibatches(inner, 2, times=2, first=old, chunks=4))(
        train.init_state(weights, optimizer), batch
    )
    one, by_hand, seen = jax.jit(inner), train.init_state(weights, optimizer), []
    batch = batch | jax.jit(old)(weights, batch, {})
    for i in (0, 1, 0, 1):
        by_hand, m = one(by_hand, jax.tree.map(lambda x, i=i: x[i::2], batch))
        seen.append(m)
    assert int(state.step) == int(by_hand.step) == 4
    for x, y in zip(jax.tree.leaves(state.params), jax.tree.leaves(by_hand.params), strict=True):
        np.testing.assert_allclose(x, y, atol=3e-4)  # of updates of 1e-2
    assert metrics["clip_ratio/region_mean"] > 0  # the third and fourth step are off the policy that drew
    for name in metrics:
        np.testing.assert_allclose(metrics[name], np.mean([m[name] for m in seen]), rtol=1e-3, atol=1e-5)


# ---- in the loop ---------------------------------------------------------------------------------------------------


def learning(engine, ahead=0, trail=None):
    """What `fit` draws from: GRPO on small tasks, 8 prompts of 4 samples."""

    def sample(tasks):
        samples = rollout(engine, tasks, ANY, samples=4)
        r = np.array(list(map(small.reward, samples)))
        if trail is not None:
            trail.append((tasks[0].number, sorted({int(v) for s in samples for v in s.versions[s.drawn]})))
        return collate(samples, advantages.grouped(r, 4), length=16), {"reward": float(r.mean())}

    publish = lambda state: engine.update_params(state.params)
    rows = tuple(task for i in range(6) for task in small.tasks(8, 8 * i))
    every = data.Tasks(rows, data.Settings(batch=8, shuffle=False), data.Report())
    return Source(every, publish, sample, ahead=ahead)


@pytest.fixture(scope="module")
def step():
    optimizer = train.optim.adamw(1e-2)
    options = losses.Policy(correction="token_truncate", correction_clip=(None, 2.0))
    g = train.normalize(train.grads(losses.policy_gradient(llama, small.CFG, options)))
    return jax.jit(train.update(g, optimizer), donate_argnums=0), lambda w: train.init_state(w, optimizer)


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_a_run_goes_on_bit_by_bit(engine, step, tmp_path, ahead):
    """Batches sampled ahead are in the checkpoint; each was drawn by the weights of exactly `ahead` steps before."""
    learn, start = step

    def run(directory, steps, trail=None):
        source = learning(engine, ahead, trail)
        state = jax.jit(lambda: start(small.weights()))
        loop = train.Loop(steps=steps, directory=directory, log_every=1, save_every=1, progress_bar=False)
        return train.fit(learn, state, source, loop)

    trail = []
    whole = run(tmp_path / "whole", 5, trail)
    assert [number for number, _ in trail] == [8 * i for i in range(min(6, 5 + ahead))]
    run(tmp_path / "cut", 2)
    again = run(tmp_path / "cut", 5)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), whole, again))
    rows = [train.metrics.read(tmp_path / name) for name in ("whole", "cut")]
    uneven = ("time/", "tokens_per_second")
    even = [[{k: v for k, v in row.items() if not k.startswith(uneven)} for row in r] for r in rows]
    assert even[0] == even[1] and [row["step"] for row in even[0]] == [1, 2, 3, 4, 5]
    assert [row["staleness"] for row in even[0]] == [min(i, ahead) for i in range(5)]


def test_a_batch_as_text(engine):
    samples = rollout(engine, small.tasks(2), ANY, samples=2)
    for how in ({}, {"packed": True}, {"shared": True}):
        batch = collate(samples, np.ones(4), length=32, **how)
        again = decode(encode(batch))
        assert jax.tree.structure(again) == jax.tree.structure(batch)
        assert all(
            (x == y).all() and x.dtype == y.dtype for x, y in zip(*map(jax.tree.leaves, (batch, again)), strict=True)
        )
    with pytest.raises(ValueError, match="damaged"):
        decode(encode(batch)[:40])


# ---- the sampler and the trainer are one model -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        "int8",
        "experts",
        "adapter",
        *(pytest.param(h, marks=pytest.mark.matrix) for h in ("prefix", "chunks", "decode_steps", "bfloat16")),
    ],
)
def test_log_probabilities_agree_however_they_are_computed(how):
    """To 1e-5 in float32: prompts in chunks or found in the cache, int8 weights, experts, adapters; 0.1 in bfloat16."""
    cfg, family = small.CFG, llama
    if how == "experts":
        cfg, family = mixtral.Config(vocab=8, embed=32, ffn=32, layers=2, heads=2, kv_heads=2, head_dim=16, experts=4,
                                     rope=ops.Rope(16, 1e4)), mixtral  # fmt: skip
    spec = family.spec(cfg)
    made = params.init(spec, jax.random.key(1), dtype=jnp.float32)
    made = jax.tree.map(lambda x: x * 3 if x.ndim > 1 else x, made)
    made = params.quantize(made, "int8", spec=spec) if how == "int8" else made
    made = jax.tree.map(lambda x: x.astype(jnp.bfloat16), made) if how == "bfloat16" else made
    learnt, adapters = made, {}
    if how == "adapter":
        learnt = params.lora.add(made, 4, 8.0, key=jax.random.key(2), spec=spec)
        learnt = jax.tree_util.tree_map_with_path(randomised, learnt)
        adapters = {"policy": learnt}
    settings = {"chunks": {"chunk": 32}, "decode_steps": {"decode_steps": 5}}.get(how, {})
    engine = Engine(models.Model(family, cfg, made), Settings(rows=16, max_length=256, **settings), eos=[small.EOS],
                    adapters=adapters)  # fmt: skip
    r, long = np.random.default_rng(3), 150 if how in ("chunks", "prefix") else 9
    some = [Task(i, tuple(map(int, r.integers(0, 8, long)))) for i in range(4)]
    asked = Adapter(engine, "policy") if adapters else engine
    samples = rollout(asked, some, SamplingParams(max_tokens=16, temperature=0.8, min_p=0.02), samples=4)
    if how == "prefix":
        assert engine.stats()["found"] >= 128 * 12  # tokens of the prompt that three of four samples did not compute
    batch = collate(samples, np.ones(16), length=256)
    found = np.asarray(jax.jit(losses.token_logps(family, cfg, temperature=0.8))(learnt, batch))
    off = np.abs(found - batch["logps"] - batch["kept"])[batch["mask"]]
    assert off.max() < (0.1 if how == "bfloat16" else 1e-5) and len(off) > 50


def randomised(path, x):
    """An adapter's second factor begins at 0: give it something to say."""
    last = str(path[-1])
    return jax.random.normal(jax.random.key(len(last)), x.shape, x.dtype) * 0.1 if last.endswith(("a", "b")) else x
