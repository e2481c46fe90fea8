"""The engine against the naive generator and the trainer, under chunks, cache hits, preemption, drafts and company."""

import asyncio
import dataclasses
import logging
import re
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from fdel import models, ops, params, serve, train
from fdel.models import llama
from fdel.ops import attention, cpu
from fdel.ops.dispatch import Implementation
from fdel.serve.engine import compiling, device, packing, step
from fdel.serve.engine.engine import Engine, Settings, unsupported
from fdel.serve.engine.pages import Pool
from fdel.serve.engine.request import end_ids, fit
from fdel.serve.engine.rows import Rows, propose
from fdel.serve.engine.schedule import QueueFull
from fdel.serve.server import grammar
from tests.models import tiny
from tests.serve import small
from tests.serve.small import CFG, CONTEXT, EOS, VOCAB, scores

ROOT = Path(__file__).parents[2]
rng = np.random.default_rng(0)
PROMPTS = [rng.integers(8, VOCAB, n).tolist() for n in (70, 3, 60, 12, 130)]
# One set of shapes for most tests, so that they share programs.
SHAPE = dict(rows=4, pages=9, budget=64, batches=(4,))
MIXED = [
    serve.SamplingParams(max_tokens=12, temperature=1.0, seed=1),
    serve.SamplingParams(max_tokens=20),
    serve.SamplingParams(max_tokens=15, temperature=0.7, top_p=0.9, top_k=50, seed=2, logprobs=2, ignore_eos=True),
    serve.SamplingParams(max_tokens=12, repetition_penalty=1.4, frequency_penalty=0.5),
    serve.SamplingParams(max_tokens=12, temperature=1.4, min_p=0.01, presence_penalty=1.0, seed=1),
]


def engine(model: models.Model, total: int = SHAPE["pages"], **changes) -> Engine:
    """An engine that may use `total` of its pages."""
    e = Engine(model, Settings(**SHAPE | changes))
    e._core.schedule.pool = Pool(total, step.PAGE, e._core.schedule.pool.cache)
    return e


def tokens(generations: list) -> list[list[int]]:
    return [g.tokens for g in generations]


@pytest.fixture(scope="module")
def solo(model) -> list[serve.Generation]:
    """MIXED, each alone."""
    return [engine(model).generate([p], [s])[0] for p, s in zip(PROMPTS, MIXED, strict=True)]


def test_more_sequences_begin_in_a_step_than_get_their_rows_in_one_call(model, monkeypatch) -> None:
    """Four in a step, of which two get their rows in a call; each as if it were alone."""
    monkeypatch.setattr(device, "ADMITTED", 2)
    e, prompts, calls = engine(model, budget=128), [[9 + i, 8, 7 + i] for i in range(4)], list[int]()
    execute = e._core.device.execute
    e._core.device.execute = lambda call: (call.name == "admit" and calls.append(len(call.arrays[0]))) or execute(call)
    wishes = [serve.SamplingParams(max_tokens=5, ignore_eos=True, temperature=0.5 * i, seed=i) for i in range(4)]
    jobs = [e.submit(p, s) for p, s in zip(prompts, wishes, strict=True)]
    assert e.wait(lambda: all(job.reply.finish_reason for job in jobs), 60) and calls == [2, 2]
    got = [job.reply.tokens for job in jobs]
    assert got == [tokens(engine(model).generate([p], [s]))[0] for p, s in zip(prompts, wishes, strict=True)]


# ---- answers -------------------------------------------------------------------------------------------------------

FAST = ("llama", "mamba2")
FAMILIES = [
    n if n in FAST else pytest.param(n, marks=pytest.mark.slow if tiny.TINY[n].wiring else pytest.mark.matrix)
    for n in tiny.TINY
    if ":" not in n and tiny.TINY[n].causal
]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_equals_naive(pair, name: str) -> None:
    """Chunks of 1, 7 and 64 tokens; too few pages, so that one request is preempted; and pages found in the cache."""
    model = pair(name)[1]
    lengths = (40, 30, 12) if name == "gpt2" else (70, 63, 12)
    prompts = [np.random.default_rng(n).integers(3, 128, n).tolist() for n in lengths]
    want = [serve.naive_generate(model, p, 8) for p in prompts]
    recurrent = model.family.state_spec(model.cfg, pages=1, rows=1).slots is not None
    shared = 0 if recurrent or name == "gpt2" else 64  # gpt2's context is one page
    for budget, total in ((1, 3), (7, 3), (64, 3), (64, 8)):
        e = engine(model, total, rows=2, pages=8, budget=budget, batches=(2,))
        for again in range(1 + (total == 8)):
            got = e.generate(prompts, serve.SamplingParams(max_tokens=8, ignore_eos=True))
            assert tokens(got) == tokens(want)
            for g, w in zip(got, want, strict=True):
                np.testing.assert_allclose(g.logprobs, w.logprobs, atol=2e-5)
            assert got[0].cached == again * shared and e.stats()["free pages"] == total
        assert e.stats()["preempted"] == ((budget, total) == (64, 3) and name != "gpt2")


OTHERWISE = [
    dict(),
    dict(overlap=False),
    dict(budget=7),
    dict(total=4),
    dict(cache=False, budget=33),
    dict(drafts=3),
    dict(drafts=3, total=4, overlap=False),
    dict(decode_steps=4),
    dict(decode_steps=3, total=4, overlap=False),
]


@pytest.mark.slow
@pytest.mark.parametrize("options", OTHERWISE, ids=lambda o: "-".join(f"{k}={v}" for k, v in o.items()) or "plain")
def test_answers_do_not_depend_on_company(model, solo, options: dict) -> None:
    """Greedy, sampled and penalised requests: in one batch, in any order, they answer what each answers alone."""
    e = engine(model, **options)
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1]):
        got = e.generate([PROMPTS[i] for i in order], [MIXED[i] for i in order])
        for i, g in zip(order, got, strict=True):
            assert g.tokens == solo[i].tokens and g.finish_reason == solo[i].finish_reason
            np.testing.assert_allclose(g.logprobs, solo[i].logprobs, atol=1e-5)
            assert [list(t) for t in g.top_logprobs or ()] == [list(t) for t in solo[i].top_logprobs or ()]
    assert e.stats()["preempted"] >= (options.get("total") == 4)
    assert e.stats()["found"] == (128 + 64 if options in ({}, dict(overlap=False)) else e.stats()["found"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", pytest.param("mamba2", marks=pytest.mark.slow)])
def test_decode_steps_save_calls_and_change_nothing(pair, name: str) -> None:
    """Several tokens a call while no prompt waits: as many as they end with, whatever ends them, and far fewer calls."""
    model = pair(name)[1]
    prompts = [np.random.default_rng(n).integers(3, 128, n).tolist() for n in (5, 9, 12)]
    asked = [
        serve.SamplingParams(max_tokens=9, temperature=1.0, seed=3, ignore_eos=True, logprobs=2),
        serve.SamplingParams(max_tokens=14, ignore_eos=True),
        serve.SamplingParams(max_tokens=40, temperature=0.8, seed=7, stop_token_ids=tuple(range(0, 64, 2))),
    ]
    plain, many = engine(model), engine(model, decode_steps=4)
    want, got = plain.generate(prompts, asked), many.generate(prompts, asked)
    exact = lambda g: dataclasses.replace(g, logprobs=[], sampled_logprobs=[], kept=[], top_logprobs=None)
    assert list(map(exact, got)) == list(map(exact, want))
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g.logprobs, w.logprobs, atol=1e-5)
        np.testing.assert_allclose(g.sampled_logprobs, w.sampled_logprobs, atol=2e-5)
    assert many.stats()["steps"] < 0.6 * plain.stats()["steps"]


@pytest.mark.slow
def test_drafts_save_steps_and_change_nothing(model) -> None:
    """On repetitive text most drafts are right; a repeating prompt's sampled continuation is the same, too."""
    loop = [9, 10, 11, 12, 13] * 8
    bias = {9: 30.0, 10: 30.0, 11: 30.0}
    for s in (
        serve.SamplingParams(max_tokens=40, ignore_eos=True, logit_bias=bias),
        serve.SamplingParams(max_tokens=40, ignore_eos=True, logit_bias=bias, temperature=3.0, seed=4, logprobs=3),
        serve.SamplingParams(max_tokens=40, ignore_eos=True, logit_bias=bias, presence_penalty=2.0),
    ):
        e, plain = engine(model, drafts=3), engine(model)
        got, want = e.generate([loop], s)[0], plain.generate([loop], s)[0]
        assert got.tokens == want.tokens and len(got.tokens) == 40
        np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-5)
        assert e.stats()["drafting steps"] > 0
        if s.temperature == 0 and not s.presence_penalty:
            assert e.stats()["steps"] < 0.7 * plain.stats()["steps"]


@pytest.mark.slow
def test_a_draft_model_changes_nothing(model, solo) -> None:
    """Neither a poor draft model nor the model itself; that one is right always, greedy or sampled, under preemption."""
    other = small.make_model(seed=1)
    steps = []
    for draft, total in ((other, 9), (model, 9), (model, 4)):
        e = Engine(model, Settings(**SHAPE, drafts=3), draft=draft)
        e._core.schedule.pool = Pool(total, step.PAGE)
        got = e.generate(PROMPTS, MIXED)
        assert tokens(got) == tokens(solo)
        for g, want in zip(got, solo, strict=True):
            np.testing.assert_allclose(g.logprobs, want.logprobs, atol=1e-5)
        assert e.stats()["preempted"] >= (total == 4)
        steps.append(e.stats()["steps"])
        e.generate(PROMPTS[1:2], serve.SamplingParams(max_tokens=40, temperature=1.0, seed=5, ignore_eos=True))
        steps.append(e.stats()["steps"] - steps[-1])
    assert steps[3] <= 40 / 4 + 4 < steps[1]


def test_proposals() -> None:
    """The continuation of the newest three tokens' last earlier occurrence, as far as it is known."""
    rows = jnp.array([[1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 0], [1, 2, 3, 1, 2, 3, 9, 9, 9, 9, 9, 9], [5] * 12])
    drafts, found = propose(rows, jnp.array([11, 6, 2]), 4)
    assert drafts[0].tolist() == [5, 1, 2, 3] and found.tolist() == [[True] * 4, [True] * 3 + [False], [False] * 4]
    assert drafts[1, :3].tolist() == [1, 2, 3]


@pytest.mark.slow
def test_logprobs_equal_the_trainers(model) -> None:
    """One truth: what a rollout reports is what the trainer computes on the same tokens."""
    got = engine(model).generate(
        PROMPTS[:4], serve.SamplingParams(max_tokens=20, temperature=1.0, seed=3, prompt_logprobs=2)
    )
    score = jax.jit(train.losses.forward.token_scores(llama, CFG))
    for prompt, g in zip(PROMPTS, got, strict=False):
        padded, n = np.zeros((1, CONTEXT), np.int32), len(prompt) + len(g.tokens)
        padded[0, :n] = prompt + g.tokens
        stats = score(model.params, {"tokens": padded, "lengths": np.array([n])}).stats
        np.testing.assert_allclose(g.logprobs, stats.logp[0, len(prompt) - 1 : n - 1], atol=1e-5)
        np.testing.assert_allclose(g.prompt.logprobs[1:], stats.logp[0, : len(prompt) - 1], atol=1e-5)
        assert g.prompt.logprobs[0] is None and g.prompt.top_logprobs[0] == {}
        best = [max(t.values()) for t in g.prompt.top_logprobs[1:]]
        right = np.isclose(best, g.prompt.logprobs[1:], atol=1e-6)
        assert right.tolist() == (stats.top1[0, : len(prompt) - 1] == 1).tolist()


@pytest.mark.slow
def test_embed(model) -> None:
    e, prompt = engine(model), PROMPTS[0]
    x = llama.hidden(model.params, jnp.array([prompt]), CFG)[0][0]
    np.testing.assert_allclose(e.embed(prompt), x[-1], atol=1e-5)
    np.testing.assert_allclose(e.embed(prompt, "mean"), x.mean(0), atol=1e-5)
    with pytest.raises(ValueError, match=r"pool=\('first'"):
        e.embed(prompt, "first")


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_score_and_embed_reach_the_last_position(model, pair, name: str) -> None:
    """At every length, also where padding would pass a table of positions; and after the start nothing compiles."""
    m = model if name == "llama" else pair(name)[1]
    e, vocab = Engine(m, Settings(rows=2, batches=(2,), budget=64)), m.cfg.vocab
    e.start(wait=True)
    compiled, last = e.stats()["compiled"], np.random.default_rng(0).integers(8, vocab, e.limit).tolist()
    full = jax.nn.log_softmax(small.full_forward(m.family, m.cfg)(m.params, np.array([last], np.int32))[0])
    want = np.asarray(full)[np.arange(e.limit - 1), last[1:]]
    for n in sorted({1, 2, 63, 64, 65, e.limit // 2 + 1, e.limit - 1, e.limit} & {*range(e.limit + 1)}):
        got = e.score(last[:n], 3)
        np.testing.assert_allclose(got.logprobs[1:], want[: n - 1], atol=2e-5)
        assert got.logprobs[0] is None and np.isfinite(e.embed(last[:n], "mean")).all()
    assert e.stats()["compiled"] == compiled
    with pytest.raises(ValueError, match=f"the text has {e.limit + 1} tokens"):
        e.score([*last, 9])
    for call in (e.score, e.embed):
        with pytest.raises(ValueError, match="adapter 'b' is not loaded; loaded are: none"):
            call([1], adapter="b")
        with pytest.raises(ValueError, match=rf"holds \[{vocab}\]; expected token ids from 0 to {vocab - 1}"):
            call([1, vocab])
    with pytest.raises(ValueError, match="top=50; expected 0 to 20"):
        e.score([1, 2], 50)
    e.close()


UNFIT = [
    (dict(rows=4, batches=(1, 2)), "expected rising numbers of rows, the last at least rows=4"),
    (dict(batches=()), "batches=.*; expected rising"),
    (dict(batches=(4, 4)), "batches=.*; expected rising"),
    (dict(batches=(0, 32)), "batches=.*; expected rising"),
    (dict(queue=0), "queue=0; expected at least 1"),
    (dict(budget=-1), "budget=-1; expected at least 1"),
    (dict(rows=2.5), "rows=2.5; expected at least 1"),
    (dict(rows=True), "rows=True; expected at least 1"),
    (
        dict(pages=3),
        "pages=3 hold 192 tokens, but one sequence may have 200; expected at least 4 pages, or max_length=192",
    ),
    (dict(drafts=200), "drafts=200; expected less than the 200 tokens that a sequence may have"),
    (dict(decode_steps=10**6), "decode_steps=1000000; expected less than"),
    (dict(overlap="no"), "overlap='no'; expected one of"),
    (dict(max_length=201), "max_length=201 is longer than the model's context of 200 positions"),
    (dict(max_length=0), "max_length=0; expected at least 1"),
    (dict(kv_cache_dtype=8), "kv_cache_dtype=8; expected one of None"),
    (dict(kernels={"attnd": "flash"}), "kernels: attnd=flash: no operation 'attnd' has"),
]


@pytest.mark.parametrize(("options", "said"), UNFIT, ids=lambda x: str(x)[:40])
def test_settings_that_cannot_work_are_refused(model, options: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Engine(model, Settings(**options))


def test_an_implementation_that_is_named_is_taken(model) -> None:
    named, plain = (Engine(model, Settings(rows=1, kernels=k)).score([1, 2, 3]) for k in ({"attend": "dense"}, {}))
    assert np.allclose(named.logprobs[1:], plain.logprobs[1:], atol=1e-5)
    with pytest.raises(ValueError, match="attend: impl='splash' cannot serve this call"):
        Engine(model, Settings(rows=1, kernels={"attend": "splash"})).score([1, 2, 3])


def test_an_implementation_of_an_operation_that_the_model_lacks_is_told(model, caplog) -> None:
    """A Llama has no state-space layers. What experts do on a mesh counts with experts, which it lacks too."""
    named = {"ssd": "mosaic", "expert_parallel": "ring", "attend": "dense", "paged_attention": "xla"}
    e = Engine(model, Settings(rows=1, kernels=named))
    e.start()
    e.close()
    known = "attend, paged_attention, rms_norm, write_pages"
    said = f"kernels: expert_parallel=ring, ssd=mosaic has no effect: the model's operations are {known}"
    assert [r.getMessage() for r in caplog.records if "kernels" in r.getMessage()] == [said]


def test_an_implementation_that_serves_no_text_is_refused_when_an_engine_starts(model) -> None:
    """Its pages have another one, so that what is generated says nothing of it."""
    e = Engine(model, Settings(rows=1, kernels={"attend": "splash"}))
    with pytest.raises(ValueError, match="attend: impl='splash' cannot serve this call: it is written for TPUs"):
        e.start()


def test_texts_that_are_too_short_for_an_implementation_are_computed_as_longer_ones(model, monkeypatch) -> None:
    short = lambda q, *_, **__: "rows of fewer than 128 tokens" if q.shape[1] < 128 else None
    ways = attention.ATTEND.implementations
    monkeypatch.setitem(ways, "long", Implementation(attention.dense_attention, short))
    plain, e = Engine(model, Settings(rows=1)), Engine(model, Settings(rows=1, kernels={"attend": "long"}))
    e.start()
    assert np.allclose(e.score([1, 2, 3]).logprobs[1:], plain.score([1, 2, 3]).logprobs[1:], atol=1e-5)
    assert np.allclose(e.embed([1, 2, 3]), plain.embed([1, 2, 3]), atol=1e-5)
    assert e._core.device.lengths == [128, CONTEXT]
    e.close()


def test_a_longer_max_length_is_no_silent_cut(model, pair) -> None:
    with pytest.raises(ValueError, match="max_length=8192 is longer than the model's context of 200"):
        serve.generate(model, [[1]], max_length=8192)
    assert Engine(pair("mamba2")[1], Settings(rows=1, max_length=8192, pages=128)).limit == 8192


def test_ends_that_the_model_lacks(model) -> None:
    with pytest.raises(ValueError, match=r"eos holds \[300\]"):
        Engine(model, eos=(7, VOCAB))
    larger = type("T", (), {"eos_ids": (VOCAB, 9)})
    assert end_ids(model, None, larger) == (9,)
    larger.eos_ids = (VOCAB + 5,)
    with pytest.raises(
        ValueError, match=r"ends with one of \(305,\), but the model has 300 ids: is this its tokenizer"
    ):
        end_ids(model, None, larger)


@pytest.mark.slow
def test_seconds_of_an_output(model, monkeypatch) -> None:
    """From the first step to the end, waiting left out; equal outputs are equal however long they took."""
    now = iter(range(10**6))
    monkeypatch.setattr(
        "fdel.serve.engine.reply.time", SimpleNamespace(monotonic=lambda: 9.0 + next(now))
    )  # first, end
    monkeypatch.setattr("fdel.serve.engine.core.time", SimpleNamespace(monotonic=lambda: 5.0))
    (out,) = engine(model).generate([[1, 2, 3]], serve.SamplingParams(max_tokens=20, ignore_eos=True))
    assert out.seconds == 5.0 and out.tokens_per_second == 4.0
    assert out == dataclasses.replace(out, seconds=1.0)


def test_samples_of_one_prompt(model) -> None:
    """n outputs have their own seeds and share the prompt's pages; best_of keeps the likeliest."""
    s = serve.SamplingParams(max_tokens=6, temperature=1.5, seed=10, ignore_eos=True)
    e = engine(model)
    got = e.generate(PROMPTS[:2], dataclasses.replace(s, n=3))
    alone = [e.generate([p], s)[0] for p in PROMPTS[:2]]
    assert tokens(got)[::3] == tokens(alone) and len({tuple(g.tokens) for g in got}) == 6
    # Four rows: the first output of the second prompt has ended, with its page, before the others get theirs.
    assert [g.cached for g in got] == [0, 69, 69, 0, 0, 0]
    best = e.generate(PROMPTS[1:2], dataclasses.replace(s, n=2, best_of=3))
    order = sorted(got[3:], key=lambda g: -sum(g.logprobs))
    assert tokens(best) == tokens(order[:2])


def test_noise_belongs_to_prompt_seed_and_output(model) -> None:
    """Neither two prompts, nor two outputs, nor neighbouring seeds share it: where all tokens are equally likely, draws of
    the same noise would be the same tokens.
    """
    flat = model._replace(params=jax.tree.map(lambda x: x * 0, model.params))
    e, s = engine(flat, rows=4), serve.SamplingParams(max_tokens=8, temperature=1.0, seed=5, ignore_eos=True)
    prompts = [[9, 8, 7], [9, 8, 6]]
    found = {seed: tokens(e.generate(prompts, dataclasses.replace(s, seed=seed, n=3))) for seed in (5, 6, 7)}
    every = [tuple(t) for group in found.values() for t in group]
    assert len(set(every)) == 18 and len({t[0] for t in every}) > 10
    assert tokens(e.generate(prompts[::-1], s)) == [found[5][3], found[5][0]]
    jobs = e.submit_all(prompts, dataclasses.replace(s, n=2))
    e.wait(lambda: all(j.reply.finish_reason for j in jobs))
    assert [j.reply.tokens for j in jobs] == [found[5][i] for i in (0, 1, 3, 4)]


SAMPLED = [
    serve.SamplingParams(max_tokens=24, temperature=0.7, top_p=0.8, seed=1, ignore_eos=True),
    serve.SamplingParams(max_tokens=24, temperature=1.3, frequency_penalty=1.0, seed=2, ignore_eos=True),
    serve.SamplingParams(max_tokens=24, seed=3, ignore_eos=True),
    serve.SamplingParams(max_tokens=24, temperature=1.0, seed=4, allowed_tokens=range(9, 60), ignore_eos=True),
]


@pytest.mark.parametrize(
    "options", [dict(), dict(drafts=3), dict(decode_steps=8), dict(overlap=False, budget=7)], ids=str
)
def test_sampled_logprobs_of_an_output(model, options: dict) -> None:
    """Both kinds, in every way to decode: against a full forward and `process` of its logits, place by place."""
    prompts = [[9, 10, 11, 12] * 4, *PROMPTS[1:4]]  # the first repeats, so that there are drafts
    got = engine(model, **options).generate(prompts, SAMPLED)
    for prompt, s, g in zip(prompts, SAMPLED, got, strict=True):
        padded = np.zeros((1, CONTEXT), np.int32)
        padded[0, : len(prompt + g.tokens)] = prompt + g.tokens
        places = np.arange(len(g.tokens)) + len(prompt)
        logits = np.asarray(small.full_forward(llama, CFG)(model.params, padded)[0])[places - 1]
        rows = serve.sampling_rows([s], [len(prompt)], [[]], [24], vocab=VOCAB)
        rows = jax.tree.map(lambda x: np.repeat(x, 24, 0), rows)
        z = jax.jit(serve.process)(logits, rows, padded, places, np.zeros(len(places), np.int32))
        want = np.asarray(jax.nn.log_softmax(z, -1))[np.arange(len(places)), g.tokens]
        np.testing.assert_allclose(g.sampled_logprobs, want if s.temperature else 0 * want, atol=1e-5)
        np.testing.assert_allclose(g.logprobs, scores(model, prompt, g.tokens), atol=1e-5)
        assert s.temperature == 0 or np.abs(np.subtract(g.logprobs, g.sampled_logprobs)).max() > 0.05


def test_a_request_that_bans_every_token_fails_alone(model) -> None:
    """By allowed tokens and min_tokens, or by a mask; the others answer, and no token 0 is made up."""

    class Stop:
        done = False

        def mask(self) -> np.ndarray:
            return np.packbits(np.arange(320) == EOS, bitorder="little").view("<u4")

        def commit(self, token: int) -> None: ...

    e = Engine(model, Settings(**SHAPE), eos=(EOS,))
    plain = serve.SamplingParams(max_tokens=6)
    want = e.generate(PROMPTS[1:2], plain)[0]
    wrong = dataclasses.replace(plain, min_tokens=3, allowed_tokens=[EOS])
    got = e.generate([PROMPTS[1], PROMPTS[3], PROMPTS[1]], [plain, wrong, plain])
    (masked,) = e.generate(PROMPTS[3:4], dataclasses.replace(plain, min_tokens=3), mask=Stop)
    for g in (got[1], masked):
        assert (g.finish_reason, g.tokens) == ("error", [])
        assert g.error == "no token is left to draw at output token 0: the request bans every token there"
    assert got[0].tokens == got[2].tokens == want.tokens and e.stats()["faults"] == 0


@pytest.mark.parametrize("overlap", [True, False])
def test_grammars(model, solo, tokenizer, overlap: bool) -> None:
    """Rows with a grammar keep to it, sampled or greedy, drafts or not; rows beside them answer as alone."""
    pytest.importorskip("llguidance", reason="needs the serve extra")
    vocabulary = grammar.Vocabulary(tokenizer, VOCAB)
    matchers = [
        grammar.compile(vocabulary, s) for s in (grammar.Spec("regex", "[a-f]{5}x"), grammar.choice(["stop", "st"]))
    ]
    e = Engine(model, Settings(**SHAPE, overlap=overlap, drafts=3), tokenizer=tokenizer, eos=(EOS,))
    hot = serve.SamplingParams(max_tokens=30, temperature=2.0, seed=5)
    jobs = [e.submit(PROMPTS[1], hot, mask=matchers[0].copy()), e.submit(PROMPTS[0], MIXED[0])]
    jobs += [e.submit(PROMPTS[3], hot, mask=matchers[1].copy()), e.submit(PROMPTS[2], hot, mask=matchers[0].copy())]
    e.wait(lambda: all(j.reply.finish_reason for j in jobs))
    found = [j.reply.generation() for j in jobs]
    assert re.fullmatch("[a-f]{5}x", found[0].text) and re.fullmatch("[a-f]{5}x", found[3].text)
    assert found[2].text in ("stop", "st") and {found[i].finish_reason for i in (0, 2, 3)} == {"stop"}
    assert found[1].tokens == solo[0].tokens and found[0].text != found[3].text


def test_truncation() -> None:
    ask = lambda how, n: fit(list(range(10)), serve.SamplingParams(max_tokens=n, truncate=how), 12)
    assert ask(None, 8) == list(range(10)) and ask("left", 2) == list(range(10))
    assert ask("left", 8) == [6, 7, 8, 9] and ask("right", 8) == [0, 1, 2, 3] and ask("middle", 7) == [0, 1, 2, 8, 9]
    with pytest.raises(ValueError, match="max_tokens=12 leaves no room for a prompt in 12 tokens"):
        ask("left", 12)


def test_a_cut_prompt_is_answered(model) -> None:
    e, long = engine(model), PROMPTS[4] * 2
    with pytest.raises(ValueError, match="the prompt has 260 tokens; prompt and output must fit 200"):
        e.generate([long])
    got = e.generate([long], serve.SamplingParams(max_tokens=8, truncate="left"))
    assert tokens(got) == tokens(e.generate([long[-192:]], serve.SamplingParams(max_tokens=8)))


# ---- several models in one ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_adapters(model) -> None:
    """Requests for adapters and for the base run together; each answers as its own weights do."""
    spec = params.unstack(llama.spec(CFG))
    base = model.params
    trees = {n: params.lora.add(base, 4, 8.0, key=jax.random.key(i), spec=spec) for i, n in enumerate("ab")}
    trees = {n: jax.tree.map(lambda x: x + 0.05 if x.ndim and x.shape[-1] == 4 else x, t) for n, t in trees.items()}
    e = Engine(model, Settings(**SHAPE), adapters={"a": trees["a"]}, eos=())
    e.update_params(trees["b"], "b")
    s = serve.SamplingParams(max_tokens=6)
    jobs = [e.submit(PROMPTS[0], s, adapter=name) for name in ("", "a", "b")]
    e.wait(lambda: all(j.reply.finish_reason for j in jobs))
    want = [serve.naive_generate(model._replace(params=t), PROMPTS[0], 6) for t in (base, trees["a"], trees["b"])]
    assert [j.reply.tokens for j in jobs] == tokens(want) and len({tuple(w.tokens) for w in want}) == 3
    assert [j.request.cached for j in jobs] == [0, 0, 0]
    with pytest.raises(ValueError, match="adapter 'c' is not loaded; loaded are: a, b"):
        e.submit(PROMPTS[0], adapter="c")
    job = e.submit(PROMPTS[0], s, adapter="a")
    e.step()
    e.remove_adapter("a")
    e.step()
    assert job.reply.finish_reason == "error" and "not loaded any more" in job.reply.error


def test_new_weights_between_steps(model) -> None:
    """After update_params the cache is forgotten, and running requests continue as the new weights would."""
    other = jax.tree.map(lambda x: x * 1.1 if x.ndim > 1 else x, model.params)
    e, s = engine(model), serve.SamplingParams(max_tokens=10, ignore_eos=True)
    old = e.generate(PROMPTS[:1], s)[0]
    job = e.submit(PROMPTS[0], s)
    while len(job.reply.tokens) < 4:
        e.step()
    e.update_params(other)
    kept = list(job.reply.tokens)
    e.wait(lambda: job.reply.finish_reason is not None)
    rest = serve.naive_generate(model._replace(params=other), PROMPTS[0] + kept, 10 - len(kept)).tokens
    assert kept == old.tokens[: len(kept)] and job.reply.tokens == kept + rest != old.tokens
    assert (
        e.generate(PROMPTS[:1], s)[0].tokens
        == serve.naive_generate(model._replace(params=other), PROMPTS[0], 10).tokens
    )


# ---- faults --------------------------------------------------------------------------------------------------------


def test_logits_that_are_not_finite_fail_their_row_alone(model) -> None:
    broken = model._replace(params=model.params | {"embed": model.params["embed"].at[299].set(jnp.nan)})
    prompts = [PROMPTS[1], [*PROMPTS[3], 299], PROMPTS[3]]
    e = engine(broken)
    for _ in range(2):  # the second time nothing comes from the broken request's pages
        got = e.generate(prompts, serve.SamplingParams(max_tokens=8, logit_bias={299: -100.0}))
        assert [g.finish_reason == "error" for g in got] == [False, True, False]
        assert got[1].error == "logits are not finite at output token 0; check weights and dtype"
        for g, prompt in ((got[0], PROMPTS[1]), (got[2], PROMPTS[3])):
            assert g.tokens == engine(model).generate([prompt], serve.SamplingParams(max_tokens=8))[0].tokens


@pytest.mark.parametrize("lose", [False, True], ids=["kept", "lost"])
def test_a_step_that_raises(model, solo, lose: bool) -> None:
    """The guilty request fails with the reason; the others give their solo answers, also if the cache is gone."""
    e = engine(model)
    run = e._core.device._run

    def failing(program, requests, plan, at, masks, **static):
        if any(r.tokens[:3] == PROMPTS[1][:3] and len(r.tokens) > 5 for r in requests):
            if lose:
                jax.tree.map(lambda x: x.delete(), e._core.device.state)
            raise RuntimeError("RESOURCE_EXHAUSTED: made up")
        return run(program, requests, plan, at, masks, **static)

    e._core.device._run = failing
    got = e.generate(PROMPTS, MIXED)
    assert [g.finish_reason == "error" for g in got] == [False, True, False, False, False]
    assert got[1].error == "RuntimeError: RESOURCE_EXHAUSTED: made up" and got[1].tokens == solo[1].tokens[:4]
    assert [g.tokens for i, g in enumerate(got) if i != 1] == [g.tokens for i, g in enumerate(solo) if i != 1]
    assert e.stats()["free pages"] == 9


def test_slots_are_clean(model) -> None:
    """Who gets a row after somebody else sees nothing of it: penalties, seeds and tokens are its own."""
    e = engine(model)  # a free row is the one that was freed last
    first = e.generate([PROMPTS[1]], serve.SamplingParams(max_tokens=9))[0]
    e.generate(
        [PROMPTS[4]],
        serve.SamplingParams(max_tokens=30, temperature=2.0, bad_words=[first.tokens[:1]], ignore_eos=True),
    )
    assert e.generate([PROMPTS[1]], serve.SamplingParams(max_tokens=9))[0].tokens == first.tokens


def test_limits_are_named(model, pair) -> None:
    e = engine(model, total=2, queue=1)
    with pytest.raises(ValueError, match="may take 150 tokens, the cache holds 128; lower max_tokens"):
        e.submit(PROMPTS[4], serve.SamplingParams(max_tokens=20))
    e.submit([1], MIXED[1])
    with pytest.raises(QueueFull):
        e.submit([1], MIXED[1])
    mamba = pair("mamba2")[1]
    assert unsupported(model, Settings()) is None and unsupported(mamba, Settings()) is None
    assert "cannot be shared" in unsupported(mamba, Settings(cache=True))
    with pytest.raises(ValueError, match="drafts=2, but mamba2 keeps recurrent state"):
        Engine(mamba, Settings(drafts=2))
    with pytest.raises(ValueError, match="a draft model with drafts=0"):
        Engine(model, draft=model)
    with pytest.raises(ValueError, match="the draft model needs attention and the vocabulary of 300 ids; found 128"):
        Engine(model, Settings(drafts=2), draft=mamba)
    with pytest.raises(ValueError, match="rows=0; expected at least 1"):
        Engine(model, Settings(rows=0))


# ---- threads and asyncio ------------------------------------------------------------------------------------------


async def read(e: Engine, prompt: list[int], s: serve.SamplingParams, most: int = 1000) -> tuple[list[int], str | None]:
    """Read a stream to its end, or leave it after `most` deltas."""
    out: list[int] = []
    stream = e.stream(prompt, s)
    try:
        async for delta in stream:
            out += delta.tokens
            most -= 1
            if delta.finish_reason or not most:
                return out, delta.finish_reason
    finally:
        await stream.aclose()
    raise RuntimeError("a stream without an end")


def test_streams(model, solo) -> None:
    """Streams, a caller in another thread and one that leaves, all at once; nothing compiles after the start."""
    e = engine(model)
    e.start(wait=True)
    compiled = e.stats()["compiled"]
    from_thread: list = []
    thread = threading.Thread(target=lambda: from_thread.extend(e.generate(PROMPTS[2:3], MIXED[2:3])))

    async def everybody() -> list:
        thread.start()
        long = serve.SamplingParams(max_tokens=180, ignore_eos=True)
        return await asyncio.gather(read(e, PROMPTS[1], long, 3), *map(read, [e] * 5, PROMPTS, MIXED))

    left, *got = asyncio.run(everybody())
    thread.join()
    assert got == [(g.tokens, g.finish_reason) for g in solo] and tokens(from_thread) == tokens(solo[2:3])
    e.pause()
    waits = e.submit(PROMPTS[1], MIXED[1])
    assert e.stats()["abort"] == 1 and left[1] is None and len(left[0]) < 180
    e.resume()
    assert tokens(e.generate(PROMPTS[3:4], MIXED[3:4])) == tokens(solo[3:4])
    e.wait(lambda: waits.reply.finish_reason is not None)
    assert waits.reply.tokens == solo[1].tokens and e.stats()["free pages"] == 9
    assert e.stats()["compiled"] == compiled and e.stats()["running"] == e.stats()["waiting"] == 0
    e.close()
    with pytest.raises(RuntimeError, match="the engine is closed; make a new one"):
        e.submit([1])


def within(seconds: float, call) -> object:
    """What a call gives or raises in a thread; TimeoutError if it hangs."""
    found: list = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as e:
            found.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not found:
        raise TimeoutError("it hangs")
    return found[0]


@pytest.fixture
def started(model, monkeypatch):
    """An engine with a thread, compiled as it goes."""
    e = engine(model)
    e._core.device.warm_up = lambda **_: None
    e.start()
    yield e
    e.close()


CALLS = {
    "submit": lambda e: e.submit([1, 2]),
    "generate": lambda e: e.generate([[1, 2], [3]], serve.SamplingParams(n=2)),
    "stream": lambda e: asyncio.run(read(e, [1, 2], serve.SamplingParams(max_tokens=4))),
    "update_params": lambda e: e.update_params(e.model.params),
    "remove_adapter": lambda e: e.remove_adapter("a"),
    "pause": lambda e: e.pause(),
    "start": lambda e: e.start(),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("threaded", [True, False], ids=["thread", "no thread"])
def test_close_during_a_call_answers(model, started, name: str, threaded: bool) -> None:
    """`close` runs whole at the worst place: after the call saw that the engine is open, before it is in the inbox."""
    e = started if threaded else engine(model)
    e._core.device.warm_up = lambda **_: None
    closing: list = []

    def closes_after(check) -> None:
        check()
        if not (closing or e._inside or e._gate.locked()):  # where `close` would wait for this call itself
            closing.append(name)
            within(20, e.close)

    for check in ("check_open", "_check_outside"):
        setattr(e, check, partial(closes_after, getattr(e, check)))
    got = within(30, lambda: CALLS[name](e))
    assert str(got) == "the engine is closed; make a new one" and len(closing) == 1
    assert not e._live and not e._actions


def test_a_request_under_way_is_told_when_the_engine_closes(model, started) -> None:
    """Of many threads that submit while it closes, each gets an answer or is refused."""
    barrier, found, lock = threading.Barrier(9), [], threading.Lock()

    def ask() -> None:
        barrier.wait(20)
        for _ in range(20):
            try:
                job = started.submit([1, 2, 3], serve.SamplingParams(max_tokens=100, ignore_eos=True))
            except RuntimeError as e:
                job = e
            with lock:
                found.append(job)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for t in threads:
        t.start()
    barrier.wait(20)
    within(60, started.close)
    for t in threads:
        t.join(20)
    jobs = [j for j in found if not isinstance(j, RuntimeError)]
    assert len(found) == 160 and all(j.reply.finish_reason for j in jobs) and not started._live
    assert all("closed" in str(j) for j in found if isinstance(j, RuntimeError))


@pytest.mark.parametrize("threaded", [True, False], ids=["thread", "no thread"])
@pytest.mark.parametrize("name", sorted({*CALLS} - {"submit"}))  # to queue more is no waiting
def test_a_callback_cannot_wait_for_its_own_engine(model, name: str, threaded: bool) -> None:
    """A MaskSource that calls its engine fails its request; it neither hangs nor runs a step inside of a step."""
    e = engine(model)
    e._core.device.warm_up = lambda **_: None
    if threaded:
        e.start()

    class Calls:
        done = False

        def mask(self):
            return CALLS[name](e) and np.full(-(-VOCAB // 32), 2**32 - 1, np.uint32)

        def commit(self, token: int) -> None: ...

    got = within(60, lambda: e.generate([[1, 2]], serve.SamplingParams(max_tokens=3), mask=Calls))
    assert got[0].finish_reason == "error"
    e._paused = False
    if threaded:
        within(20, e.close)


def test_a_callback_may_close_its_engine(model, started) -> None:
    class Closes:
        done = False

        def mask(self):
            return started.close()

    started.pause()
    jobs = [started.submit([1, 2], mask=Closes()), started.submit([3])]
    started.resume()
    within(60, lambda: started.wait(lambda: all(j.reply.finish_reason for j in jobs)))
    within(20, started._thread.join)
    assert jobs[0].reply.finish_reason == "error" and jobs[1].reply.finish_reason and not started._live


def test_aborts_do_not_fill_the_queue(model) -> None:
    """It counts outputs and no other notes; those of one request enter all or not at all."""
    e, s = engine(model, queue=3), serve.SamplingParams(n=2, temperature=1.0, max_tokens=2)
    jobs = [e.submit([1]), *e.submit_all([[2]], s)]
    for job in jobs * 3:
        e.abort(job)
    with pytest.raises(QueueFull, match="4 outputs would wait, the most is 3; try again later"):
        e.submit([3])
    e.step()
    e.submit([1])
    e.submit([1])
    with pytest.raises(QueueFull, match="4 outputs would wait"):
        e.submit_all([[2]], s)
    assert e.stats()["waiting"] == 2 and len(e._live) == 2
    with pytest.raises(ValueError, match="4 outputs at once, but the queue holds 3"):
        e.submit_all([[1], [2]], s)
    assert len(e.generate([[1]] * 5, s)) == 10


def test_a_salt_is_no_share_of_its_own(model) -> None:
    """Who gives each request another cache salt is served as one key; pages are apart all the same."""
    e, s = engine(model, rows=1, batches=(1,)), serve.SamplingParams(max_tokens=1)
    jobs = [e.submit([1, i], s, key="greedy", salt=str(i)) for i in range(8)]
    other = e.submit([2], s, key="other")
    while not other.reply.finish_reason:
        e.step()
    assert sum(bool(j.reply.finish_reason) for j in jobs) <= 2
    assert len({j.request.salt for j in jobs}) == 8 and {j.request.key for j in jobs} == {"greedy"}
    same = [e.generate([PROMPTS[0]], s, key="k", salt=salt)[0].cached for salt in ("a", "b", "a")]
    assert same == [0, 0, 64]


def test_what_one_output_cannot_have_is_refused(model) -> None:
    e = engine(model)
    for options, said in (
        (dict(n=2), "n=2, best_of=None: this gives one output"),
        (dict(best_of=2), "n=1, best_of=2: this gives one output"),
        (dict(prompt_logprobs=3), "prompt_logprobs=3: use generate, or score the prompt"),
    ):
        s = serve.SamplingParams(max_tokens=2, **options)
        with pytest.raises(ValueError, match=said):
            e.submit([1], s)
        with pytest.raises(ValueError, match=said):
            serve.stream(model, [1], s)
    assert e.stats()["waiting"] == 0 and not e._live


def test_a_thread_that_dies_tells_everybody(model) -> None:
    e = engine(model)
    e._core.device.warm_up = lambda **_: None
    e._core.step = lambda: (_ for _ in ()).throw(KeyboardInterrupt("made up"))
    job = e.submit([1, 2])
    hook, threading.excepthook = threading.excepthook, lambda args: None
    e.start()
    e._thread.join()
    threading.excepthook = hook
    assert job.reply.finish_reason == "error" and "made up" in job.reply.error
    with pytest.raises(RuntimeError, match="closed after KeyboardInterrupt"):
        e.submit([1])


# ---- programs ------------------------------------------------------------------------------------------------------


def test_nothing_compiles_after_warm_up(model, caplog) -> None:
    """Every sampling option, mask, preemption and cache hit runs the programs of the start: jax's own log is empty."""

    class Mask:
        done = False

        def mask(self) -> np.ndarray:
            return np.full(-(-VOCAB // 32), 0xFFFF, np.uint32)

        def commit(self, token: int) -> None:
            self.token = token

    e = engine(model, drafts=3, total=4)
    e._core.device.warm_up()
    everything = dict(temperature=0.9, top_k=9, top_p=0.8, min_p=0.1, repetition_penalty=1.2, presence_penalty=0.1)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        e.generate(PROMPTS, MIXED)
        e.generate(PROMPTS, serve.SamplingParams(max_tokens=9, logprobs=20, logit_bias={3: 1.0}, **everything))
        e.generate(PROMPTS[:2], serve.SamplingParams(max_tokens=9, allowed_tokens=[3, 4], bad_words=[[3, 4]], n=2))
        e.generate(PROMPTS[1:2], serve.SamplingParams(max_tokens=9), mask=Mask)
    here = [r.getMessage() for r in caplog.records if r.thread == threading.get_ident()]  # others finish older engines
    assert not [line for line in here if "ompil" in line]
    assert e.stats()["preempted"] and e.stats()["drafting steps"] and e.stats()["found"]


@pytest.mark.slow
def test_steps_run_before_all_programs_are_there(model, solo, caplog) -> None:
    """With the largest programs alone answers are the same; each smaller one is used once it is compiled; then none is."""
    e, hold, sizes = engine(model, budget=128, batches=(1, 2, 4)), threading.Event(), set()
    device = e._core.device
    complete, execute = device.complete, device.execute
    device.complete = lambda: hold.wait() and complete()
    e.start()
    device.execute = lambda call: (
        sizes.update({(call.name, len(call.arrays[0]))} if call.name != "admit" else ()) or execute(call)
    )
    assert tokens(e.generate(PROMPTS, MIXED)) == tokens(solo) and sizes == {("extend", 4), ("decode", 4)}
    assert e.stats()["to compile"] == 3 + 2 * len(device.lengths)
    hold.set()
    while e.stats()["to compile"]:
        time.sleep(0.01)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        assert tokens(e.generate(PROMPTS, MIXED)) == tokens(solo)
        assert tokens(e.generate(PROMPTS[:1], MIXED[:1])) == tokens(solo[:1])
    assert sizes == {("extend", 2), ("extend", 4), ("decode", 1), ("decode", 2), ("decode", 4)}
    assert not [r.getMessage() for r in caplog.records if "ompil" in r.getMessage()]
    e.close()


def test_a_large_model_has_programs_for_few_blocks_of_padding(model, solo, monkeypatch) -> None:
    """A prompt of 70 tokens, 3 blocks, runs as 3 once that program is there, which is compiled last; until then as 4."""
    monkeypatch.setattr(cpu, "FINE", 1)
    e, sizes = engine(model, budget=128), []
    device = e._core.device
    execute = device.execute
    device.execute = lambda call: (sizes.append(len(call.arrays[0])) if call.name == "extend" else ()) or execute(call)
    assert device.usable["extend"] == [2, 4] and tokens(e.generate(PROMPTS[:1], MIXED[:1])) == tokens(solo[:1])
    device.warm_up(least=True)
    assert [n for name, n, _ in device.uncompiled][-2:] == [1, 3] and device.uncompiled[-1][0] == "extend"
    while device.uncompiled[0][:2] != ("extend", 1):
        device.uncompiled = device.uncompiled[1:]
    device.complete()
    assert device.usable["extend"] == [1, 3, 4] and tokens(e.generate(PROMPTS[:2], MIXED[:2])) == tokens(solo[:2])
    assert sizes[0] == 4 and 3 in sizes[1:]
    assert cpu.sizes_between([2, 4, 8, 16], 10**8) == [1, 3, 5, 6, 7, 10, 12, 14]
    monkeypatch.undo()
    assert cpu.sizes_between([2, 4, 8, 16], 10**6) == []


def test_an_engine_that_is_closed_compiles_no_more(model) -> None:
    device, ran = engine(model)._core.device, []
    device.uncompiled = [("decode", n, [lambda n=n: ran.append(n) or device.close()]) for n in (1, 2)]
    device.complete()
    assert ran == [1] and device.uncompiled == []


def test_a_program_that_is_refused_keeps_no_other_from_being_compiled(model, caplog) -> None:
    device, ran = engine(model)._core.device, []
    refuse = lambda: ops.attend(
        ops.packed(jnp.zeros((1, 2), int)), None, 0, *[jnp.zeros((1, 2, 1, 8))] * 3, mask=ops.Mask(1.0)
    )
    device.uncompiled = [("score", 7, [ops.use(attend="splash")(refuse)]), ("decode", 1, [lambda: ran.append(1)])]
    device.complete()
    assert ran == [1] and device.uncompiled == [] and 1 in device.usable["decode"] and "score" not in device.usable
    assert "score of size 7 is not to be had: attend: impl='splash' cannot serve" in caplog.text


def test_programs_run_over_nothing_before_requests_need_them(model, solo) -> None:
    """Each size once, which changes neither cache nor rows, so that what a prompt left there is found."""
    e, ran = engine(model, budget=128), []
    device = e._core.device
    device.warm_up()
    assert tokens(e.generate(PROMPTS, MIXED)) == tokens(solo)
    before, execute = jax.tree.map(np.asarray, (device.state, device.sequences)), device.execute
    device.execute = lambda call: ran.append((call.name, len(call.arrays[0]))) or execute(call)
    while device.use_next():
        pass
    device.execute = execute
    assert set(ran) == {(name, n) for name in ("extend", "decode") for n in device.usable[name]}
    assert [name for name, _ in ran] == sorted(name for name, _ in ran) and ran[-1] == ("extend", 4)  # 128 tokens
    jax.tree.map(np.testing.assert_array_equal, before, (device.state, device.sequences))
    assert tokens(e.generate(PROMPTS, MIXED)) == tokens(solo) and e.stats()["found"] > 0


def test_programs_that_take_long_are_not_run_over_nothing(model, monkeypatch) -> None:
    monkeypatch.setattr(compiling, "LONGEST", 0.0)
    device = engine(model)._core.device
    device.warm_up()
    assert len(device.unused) > 1 and device.use_next() and not device.unused and not device.use_next()
    device.compiler("extend", device.usable["extend"][-1])()  # later: it is not run either
    assert not device.unused


def test_a_program_that_fails_over_nothing_ends_no_request(model, solo, caplog) -> None:
    e = engine(model)
    device, execute, failed = e._core.device, e._core.device.execute, []

    def once(call: packing.Call) -> object:
        if call.name == "extend" and not failed:
            failed.append(call)
            device.state = device.sequences = None  # they were donated
            raise RuntimeError("no memory")
        return execute(call)

    device.execute = once
    e.start(wait=True)
    while device.unused:
        time.sleep(0.01)
    for i, alone in enumerate(solo):  # none is blamed for it, which one by one they would be
        assert tokens(e.generate(PROMPTS[i : i + 1], MIXED[i : i + 1])) == tokens([alone])
    assert (
        e.stats()["faults"] == 0
        and len(failed) == 1
        and "a program failed over nothing: RuntimeError: no memory" in caplog.text
    )
    e.close()


@pytest.mark.slow
def test_a_process_that_ends_waits_for_one_program_at_most() -> None:
    code = """
import time
from fdel.serve import Engine, Settings
from tests.serve import small
e = Engine(small.make_model(), Settings(rows=4, pages=9, budget=64, batches=(4,)))
e._core.device.warm_up = lambda least: setattr(
    e._core.device, "uncompiled", [("decode", 4, [lambda: (print("one", flush=True), time.sleep(0.5))])] * 200)
e.start()
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90, cwd=ROOT)
    assert run.returncode == 0 and 0 < run.stdout.count("one") < 20, run.stderr


@pytest.mark.slow
def test_steps_update_the_cache_in_place(model) -> None:
    """The state is donated and no program keeps a second copy of even one layer's cache."""
    program = step.programs(llama, CFG)
    shapes = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x)), tree)
    state, rows = jax.eval_shape(
        lambda: program.begin(rows=2, length=512 * step.PAGE, pages=1024, dtypes=(jnp.dtype("float32"),))
    )
    words = jax.ShapeDtypeStruct((2, -(-VOCAB // 32)), jnp.uint32)
    plan = lambda kind: jax.ShapeDtypeStruct(packing.plan_shape(kind, 2, 512), jnp.int32)
    extend = program.extend.lower((shapes(model.params),), state, rows, plan(packing.Extend), words, block=32)
    args = (shapes(model.params),), state, rows, plan(packing.Decode), words
    decode = [program.decode.lower(*args, drafts=0, steps=steps) for steps in (1, 4)]
    cache = sum(np.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state))
    for lowered in (extend, *decode):
        memory = lowered.compile().memory_analysis()
        assert memory.alias_size_in_bytes >= cache
        assert memory.temp_size_in_bytes < cache / CFG.layers


def test_layers_of_one_kind_are_lowered_once() -> None:
    """The program for six layers has as many products as that for two; a Packed call, which towers make, too."""

    def products(layers: int) -> int:
        cfg = dataclasses.replace(CFG, layers=layers)
        weights = params.abstract(params.unstack(llama.spec(cfg)), "float32")
        args = np.zeros((1, 8), np.int32), np.int32(0), ops.packed(np.zeros((1, 8), np.int32))
        return step.programs(llama, cfg).embed.lower(weights, *args).as_text().count("dot_general")

    assert products(2) == products(6) > 0


@pytest.mark.slow
@pytest.mark.parametrize("small", [False, True], ids=["steps", "drafts"])
def test_steps_in_one_call_read_weights_as_they_are_stored(small: bool) -> None:
    """XLA:CPU would write int8 as floats before the loop over steps, or over a draft model's: nine times the time."""
    cfg = dataclasses.replace(CFG, vocab=256, embed=256, ffn=512)
    spec = params.unstack(llama.spec(cfg))
    weights = params.quantize(params.init(spec, jax.random.key(0)), "int8", r"\blayers\b|head", spec=spec)
    program, nets = step.programs(llama, cfg, draft=(llama, cfg) if small else None), 1 + small
    state, rows = program.begin(rows=1, length=step.PAGE, pages=2, dtypes=(jnp.dtype("float32"),) * nets)
    plan, words = np.zeros(packing.plan_shape(packing.Decode, 1, 1), np.int32), np.zeros((1, 8), np.uint32)
    many = {"drafts": 2, "steps": 1} if small else {"drafts": 0, "steps": 4}
    lowered = program.decode.lower((weights,) * nets, state, rows, plan, words, **many)
    assert lowered.compile().memory_analysis().temp_size_in_bytes < params.nbytes(weights)


@pytest.mark.slow
def test_a_stopped_row_stays_as_it_is(model) -> None:
    """On the device: a stop id or the last token ends a row; it then draws, writes and grows no more."""
    program = step.programs(llama, CFG)
    requests = [serve.SamplingParams(logit_bias={EOS: 100.0}), serve.SamplingParams()]
    state, rows = program.begin(rows=4, length=256, pages=9, dtypes=(jnp.dtype("float32"),))
    for i, (prompt, ends, room) in enumerate((([5, 6, 8], [EOS], 9), ([9], [], 3))):
        s = serve.sampling_rows(requests[i : i + 1], [len(prompt)], [ends], [room], vocab=VOCAB)
        padded, one = np.array([prompt + [0] * (256 - len(prompt))], np.int32), np.ones(1, np.int32)
        known = Rows(padded, len(prompt) * one, np.zeros(1, bool), packing.pack_bits(s), -one)
        rows = program.admit(rows, packing.pack_admissions([(i, known)], rows, 2))
    none = np.iinfo(np.int32).max
    plan = np.array([[0, 0, 3, 1, 0, 0] + [none] * 3, [1, 0, 1, 1, 0, 1] + [none] * 3], np.int32)
    masks = jnp.zeros((2, -(-VOCAB // 32)), jnp.uint32)
    state, rows, out = program.extend((model.params,), state, rows, plan, masks, block=32)
    plan, masks = np.concatenate([plan[:, :1], plan[:, 4:]], 1), jnp.zeros((4, masks.shape[1]), jnp.uint32)
    plan = np.concatenate([plan, np.array([[4, 0] + [none] * 4] * 2, np.int32)])
    seen = []
    for _ in range(4):
        pages = np.array(state[0].pages.k[:, :2])
        seen.append((rows.running[:2].tolist(), rows.length[:2].tolist(), out.drawn[:2, 0].tolist(), pages))
        state, rows, out = program.decode((model.params,), state, rows, plan, masks, drafts=0, steps=1)
    assert [x[0] for x in seen] == [[False, True], [False, True], [False, False], [False, False]]
    assert [x[1] for x in seen] == [[4, 2], [4, 3], [4, 4], [4, 4]]
    assert [x[2] for x in seen] == [[1, 1], [0, 1], [0, 1], [0, 0]]
    assert all((x[3][:, 0] == seen[0][3][:, 0]).all() for x in seen) and (seen[0][3][:, 0] != 0).any()
    assert (seen[2][3] == seen[3][3]).all() and rows.tokens[0, :5].tolist() == [5, 6, 8, EOS, 0]


@pytest.mark.slow
def test_on_a_mesh(model, solo) -> None:
    """With weights over tp=2 x dp=4 devices: the same tokens, and a cache that is sharded too."""
    mesh = params.make_mesh({"tp": 2, "dp": 4})
    spec = params.unstack(llama.spec(CFG))
    sharded = model._replace(params=jax.device_put(model.params, params.shardings(spec, mesh, params.SERVE)))
    e = engine(sharded)
    got = e.generate(PROMPTS, MIXED)
    assert tokens(got) == tokens(solo)
    (state,) = e._core.device.state
    assert state.pages.k.sharding.spec[2] == "tp" and state.slots is None
    for prompt, g in zip(PROMPTS, got, strict=True):
        np.testing.assert_allclose(g.logprobs, scores(model, prompt, g.tokens), atol=1e-5)


# ---- hostile values --------------------------------------------------------------------------------------------------

ODD = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=4), st.binary(max_size=3),
    st.sampled_from([np.int64(3), np.float32(0.5), np.bool_(True), np.uint8(255), np.nan, np.zeros((2, 2)), np.arange(3)]),
    st.lists(st.integers(-2, VOCAB + 2) | st.none() | st.floats(), max_size=3), st.just({}), st.just(object()),
    st.dictionaries(st.integers(-2, VOCAB + 2), st.floats(-200, 200), max_size=2), st.integers(0, 20), st.floats(0, 2),
)  # fmt: skip
FIELDS = [f.name for f in dataclasses.fields(serve.SamplingParams)]


@pytest.fixture(scope="module")
def probed(model):
    """An engine, and what it answers before anything was tried on it."""
    e = engine(model)
    return e, e.generate(PROMPTS[1:2], MIXED[0])[0]


@pytest.mark.slow
@hypothesis.settings(max_examples=150, deadline=None, derandomize=True)
@hypothesis.given(data=st.data())
def test_hostile_values_are_answered_or_named(probed, data) -> None:
    """Whatever is given for anything: an answer, or a ValueError or TypeError; and the next request answers bit by bit."""
    e, want = probed
    fields = data.draw(st.dictionaries(st.sampled_from(FIELDS), ODD, max_size=3))
    where = data.draw(st.dictionaries(st.sampled_from(["key", "salt", "priority", "adapter"]), ODD, max_size=1))
    prompt = data.draw(st.just([1, 2]) | ODD)
    call = data.draw(st.sampled_from(["generate", "score", "embed"]))
    try:
        if call == "generate":
            s = serve.SamplingParams(**{"max_tokens": 3} | fields)
            s = dataclasses.replace(s, n=min(s.n, 2), best_of=None, max_tokens=min(s.max_tokens, 3), min_tokens=0)
            for g in e.generate([prompt], s, **where):
                assert g.finish_reason in ("stop", "length") or "no token is left to draw" in g.error
                assert all(0 <= t < VOCAB for t in g.tokens) and not np.isnan(g.sampled_logprobs).any()
        elif call == "score":
            assert np.isfinite(e.score(prompt, *[v for k, v in fields.items()][:1]).logprobs[1:]).all()
        else:
            assert np.isfinite(e.embed(prompt, **{k: v for k, v in where.items() if k == "adapter"})).all()
    except (ValueError, TypeError) as error:
        assert str(error)
    got = e.generate(PROMPTS[1:2], MIXED[0])[0]
    assert (got.tokens, got.logprobs) == (want.tokens, want.logprobs) and not e._live
