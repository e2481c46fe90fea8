"""What learning from own samples needs: what each token was drawn from, and by which weights; sleep; groups of samples."""

import dataclasses
import gc
import threading

import jax
import numpy as np
import pytest

from fdel import ops, params, serve
from fdel.models import Model, llama
from fdel.serve.engine import packing, step
from fdel.serve.engine.engine import Engine, Settings
from tests.serve import fake
from tests.serve.small import CFG, CONTEXT, VOCAB, full_forward, make_model, scores

SHAPE = dict(rows=4, pages=9, budget=64, batches=(4,))
PROMPTS = [[9, 10, 11, 12] * 4, *(np.random.default_rng(n).integers(8, VOCAB, n).tolist() for n in (3, 60, 12))]
N = 24
ASKED = [  # the first prompt repeats, so that there are drafts
    serve.SamplingParams(max_tokens=N, temperature=0.7, top_p=0.8, repetition_penalty=1.3, seed=1, ignore_eos=True),
    serve.SamplingParams(max_tokens=N, temperature=1.4, top_k=9, min_p=0.05, top_p=0.9, seed=2, ignore_eos=True),
    serve.SamplingParams(max_tokens=N, temperature=0.7, repetition_penalty=1.3, seed=3, ignore_eos=True),
    serve.SamplingParams(max_tokens=N, repetition_penalty=1.3, ignore_eos=True),
]


def logits_of(model, prompt: list[int], output: list[int]) -> np.ndarray:
    """Logits of a full forward before each token of the output, float64."""
    padded = np.zeros((1, CONTEXT), np.int32)
    padded[0, : len(prompt + output)] = prompt + output
    logits = np.asarray(full_forward(model.family, model.cfg)(model.params, padded)[0], np.float64)
    return logits[np.arange(len(output)) + len(prompt) - 1]


def untruncated(z: np.ndarray, s: serve.SamplingParams, before: list[int]) -> np.ndarray:
    """Probabilities after penalty and temperature, by the formulas in SamplingParams."""
    seen = list({*before})
    z = z.copy()
    z[seen] = np.where(z[seen] > 0, z[seen] / s.repetition_penalty, z[seen] * s.repetition_penalty)
    p = np.exp((z - z.max()) / s.temperature)
    return p / p.sum()


def left(p: np.ndarray, s: serve.SamplingParams) -> float:
    """The probability that top-k, then top-p of the rest, then min-p of the likeliest leave, by sorting."""
    p = -np.sort(-p)
    n = min(s.top_k or len(p), len(p))
    if s.top_p < 1:
        n = 1 + int((np.cumsum(p[:n]) / p[:n].sum() < s.top_p).sum())
    return p[:n][p[:n] >= s.min_p * p[0]].sum()


@pytest.mark.parametrize("options", [dict(), dict(drafts=3), dict(decode_steps=8)], ids=str)
def test_kept_is_the_mass_that_truncation_left(options: dict) -> None:
    """In every way to decode, to 1e-5 in log-probability: exp(sampled_logprobs + kept) is a token's before truncation."""
    model = make_model()
    e = Engine(model, Settings(**SHAPE, **options))
    jobs = [e.submit(prompt, s) for prompt, s in zip(PROMPTS, ASKED, strict=True)]
    deltas = []
    while not all(job.reply.finish_reason for job in jobs):
        deltas += e.step()
    for prompt, s, job in zip(PROMPTS, ASKED, jobs, strict=True):
        g = job.reply.generation()
        assert g.versions == [0] * N and len(g.kept) == N and g.finish_reason == "length"
        mine = [d for j, d in deltas if j is job]
        assert [sum((getattr(d, name) for d in mine), []) for name in ("kept", "versions")] == [g.kept, g.versions]
        if s.temperature == 0:
            assert g.kept == g.sampled_logprobs == [0.0] * N
            continue
        before = [prompt + g.tokens[:i] for i in range(N)]
        logits = logits_of(model, prompt, g.tokens)
        p = [untruncated(z, s, known) for z, known in zip(logits, before, strict=True)]
        np.testing.assert_allclose(g.kept, np.log([left(x, s) for x in p]), atol=1e-5)
        drawn = np.log([x[t] for x, t in zip(p, g.tokens, strict=True)])
        np.testing.assert_allclose(np.add(g.sampled_logprobs, g.kept), drawn, atol=1e-5)
        truncates = s.top_p < 1 or s.top_k > 0
        assert max(g.kept) <= 0 and (min(g.kept) < -0.1 if truncates else g.kept == [0.0] * N)


def test_tokens_name_the_weights_that_drew_them() -> None:
    """An update in mid-flight: tokens before it have the old number and log-probabilities, those after it the new ones."""
    models = [make_model(), make_model(5)]
    e = Engine(models[0], Settings(**SHAPE))
    jobs = [e.submit(p, s) for p, s in zip(PROMPTS, ASKED, strict=True)]
    for _ in range(9):
        e.step()
    assert e.version == 0 and e._core.in_flight  # what a step drew is not read yet
    assert e.update_params(models[1].params) == 1 == e.version
    while not all(job.reply.finish_reason for job in jobs):
        e.step()
    for prompt, s, job in zip(PROMPTS, ASKED, jobs, strict=True):
        g = job.reply.generation()
        assert g.versions == sorted(g.versions) and {*g.versions} == {0, 1}
        want = np.choose(g.versions, [scores(m, prompt, g.tokens) for m in models])
        np.testing.assert_allclose(g.logprobs, want, atol=1e-5)
        if s.temperature:
            z = np.stack([logits_of(m, prompt, g.tokens) for m in models])[g.versions, np.arange(N)]
            p = [untruncated(z[i], s, prompt + g.tokens[:i])[t] for i, t in enumerate(g.tokens)]
            np.testing.assert_allclose(np.add(g.sampled_logprobs, g.kept), np.log(p), atol=1e-5)
    with pytest.raises(ValueError, match="norm is missing"):
        e.update_params({k: v for k, v in models[0].params.items() if k != "norm"})
    assert e.version == 1 and e.update_params(models[0].params) == 2
    first = dataclasses.replace(ASKED[0], max_tokens=2)
    assert e.generate(PROMPTS[:1], first)[0].versions == [2, 2]


@pytest.mark.parametrize("overlap", [True, False])
def test_every_adapter_has_numbers_of_its_own(overlap: bool) -> None:
    core = fake.make_core(overlap=overlap)
    core.device.weights["a"] = None
    jobs = [fake.make_job(i, [9, 3, i], adapter=name) for i, name in enumerate(("", "a", "a"))]
    for job in jobs:
        core.add(job)
    for _ in range(2):
        core.step()
    known = [len(job.reply.tokens) for job in jobs]
    in_flight = bool(core.in_flight)
    core.replace_weights("a", None)
    read = [len(job.reply.tokens) for job in jobs]
    assert in_flight == overlap == (read != known)
    fake.run(core)
    for job, n in zip(jobs, read, strict=True):
        adapted = job.request.adapter == "a"
        assert len(job.reply.tokens) > n and job.reply.versions == [0] * n + [int(adapted)] * (
            len(job.reply.tokens) - n
        )
    assert core.versions == {"a": 1}


# ---- sleep ---------------------------------------------------------------------------------------------------------


def live() -> int:
    """Bytes of all arrays of this process."""
    gc.collect()
    return sum(x.nbytes for x in jax.live_arrays() if not x.is_deleted())


def size(*trees) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(trees))


def test_sleep_frees_cache_and_rows(model) -> None:
    """To the byte. What was under way goes on, what comes meanwhile is answered; nothing compiles, nothing changes."""
    e = Engine(model, Settings(**SHAPE))
    want = e.generate(PROMPTS, ASKED)
    scored = e.score(PROMPTS[0])
    e.pause()  # reads what is in flight
    e.resume()
    compiled, awake, held = e.stats()["compiled"], live(), size(e._device.state, e._device.sequences)
    e.sleep()
    assert live() == awake - held and held > size(model.params)
    e.sleep()
    with pytest.raises(RuntimeError, match="the engine sleeps; call wake"):
        e.resume()
    with pytest.raises(RuntimeError, match="the engine sleeps; call wake"):
        e.start()
    with pytest.raises(RuntimeError, match="paused"):  # no thread would ever answer
        e.generate(PROMPTS, ASKED)
    assert [d.finish_reason for _, d in e.step()] == ["abort"] * len(PROMPTS)
    jobs = [e.submit(PROMPTS[0], ASKED[0])]
    assert e.step() == [] and e.score(PROMPTS[0]) == scored
    e.wake()
    e.wake()
    assert live() == awake
    while not jobs[0].reply.tokens:
        e.step()
    jobs += [e.submit(p, s) for p, s in zip(PROMPTS[1:], ASKED[1:], strict=True)]
    for _ in range(6):
        e.step()
    e.sleep()
    assert not any(job.reply.finish_reason for job in jobs) and all(job.reply.tokens for job in jobs)
    e.wake()
    while not all(job.reply.finish_reason for job in jobs):
        e.step()
    for job, w in zip(jobs, want, strict=True):
        assert job.reply.tokens == w.tokens
        np.testing.assert_allclose(job.reply.logprobs, w.logprobs, atol=1e-5)
    e.sleep()
    e.wake()
    again = e.generate(PROMPTS, ASKED)
    assert again == want and e.stats()["compiled"] == compiled


@pytest.mark.slow
def test_sleep_without_weights(model) -> None:
    """Their bytes are free too; others come by `update_params` before `wake`."""
    given = params.init(llama.spec(CFG), jax.random.key(3))
    e = Engine(Model(llama, CFG, given), Settings(**SHAPE))
    e.generate(PROMPTS[:1], ASKED[:1])
    e.pause()
    e.resume()
    awake, held = live(), size(e._device.state, e._device.sequences, e._device.weights.together)
    e.sleep(weights=True)
    assert live() == awake - held
    job = e.submit(PROMPTS[0], ASKED[0])
    for ask in (e.wake, lambda: e.score([1, 2]), lambda: e.model, lambda: e.update_params(given, "a")):
        with pytest.raises(RuntimeError, match="there are no weights: the engine sleeps without them"):
            ask()
    assert e.update_params(model.params) == 1
    e.wake()
    assert live() == awake
    while not job.reply.finish_reason:
        e.step()
    want = Engine(model, Settings(**SHAPE)).generate(PROMPTS[:1], ASKED[:1])[0]
    assert job.reply.tokens == want.tokens and {*job.reply.versions} == {1}
    e.update_params(
        params.lora.add(e.model.params, 2, 4.0, key=jax.random.key(0), spec=params.unstack(llama.spec(CFG))), "a"
    )
    with pytest.raises(ValueError, match=r"adapters \(a\) share the base's arrays; remove them"):
        e.sleep(weights=True)
    assert not (e._core.asleep or e._paused)


def test_requests_wait_for_a_thread_that_sleeps(model) -> None:
    """Those under way and new ones, and they are told the end if the engine is closed asleep."""
    want = Engine(model, Settings(**SHAPE)).generate(PROMPTS, ASKED)
    e = Engine(model, Settings(**SHAPE))
    e._device.warm_up = lambda **_: None  # compiled as it goes
    e.start()
    e.sleep()
    answers: list = []
    asking = threading.Thread(target=lambda: answers.extend(e.generate(PROMPTS, ASKED)), daemon=True)
    asking.start()
    while len(e._live) < len(PROMPTS):
        asking.join(0.01)
    e.update_params(model.params)  # the thread does what was queued, and no step
    assert not answers and e.stats()["steps"] == 0
    e.wake()
    asking.join(60)
    assert [g.tokens for g in answers] == [g.tokens for g in want]
    e.sleep()
    job = e.submit(PROMPTS[0])
    e.close()
    assert job.reply.finish_reason == "abort"


# ---- several outputs of one prompt -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(drafts=3),
        dict(decode_steps=8),
        pytest.param(dict(kv_cache_dtype="int8"), marks=pytest.mark.slow),
        pytest.param(dict(drafts=3, model=True), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_group_computes_its_prompt_once(model, options: dict) -> None:
    """All but the last token, by each output, also of the last page; nothing else changes (log-probabilities: to 1e-5)."""
    options = dict(options)
    more = dict(draft=make_model(5)) if options.pop("model", False) else {}
    e, alone = (Engine(model, Settings(**SHAPE, **options, cache=c), **more) for c in (None, False))
    e._device.warm_up()
    compiled = e.stats()["compiled"]
    group = serve.SamplingParams(max_tokens=12, temperature=1.0, top_p=0.9, seed=3, n=4, ignore_eos=True)
    for n in (1, 2, 40, 64, 65, 100):
        prompt, before = np.random.default_rng(n).integers(8, VOCAB, n).tolist(), e.stats()
        got, want = e.generate([prompt], group), alone.generate([prompt], group)
        assert e.stats()["prompt tokens"] - before["prompt tokens"] == n + 3
        assert [g.cached for g in got] == [0, *3 * [n - 1]] and len({tuple(g.tokens) for g in got}) == 4
        for g, w in zip(got, want, strict=True):
            assert g.tokens == w.tokens
            for name in ("logprobs", "sampled_logprobs", "kept"):
                np.testing.assert_allclose(getattr(g, name), getattr(w, name), atol=1e-5)
    assert e.stats()["compiled"] == compiled
    rest = alone.stats()
    assert rest["found"] == 0 and rest["prompt tokens"] == 4 * (1 + 2 + 40 + 64 + 65 + 100)


def test_pages_are_copied_in_all_pools_and_in_place() -> None:
    """One after the other, of every kind of state; without an array of the cache's size beside it."""
    r = np.random.default_rng(0)
    make = lambda *shape: r.normal(size=shape).astype(np.float32)
    pool = lambda layers, heads: ops.Pages(make(layers, 200, heads, 4, 3), None, make(layers, 200, heads, 1, 4))
    state = ops.State((pool(2, 1), pool(1, 2))), ops.State(ops.Pages(make(1, 200, 1, 4, 2), make(1, 200, 1, 4, 2)))
    copies = [[3, 7], [7, 1], [0, 199]]
    want = [x.copy() for x in jax.tree.leaves(state)]
    for x in want:
        for source, target in copies:
            x[:, target] = x[:, source]
    program = jax.jit(step.copy, donate_argnums=0).lower(state, packing.pack_copies(copies, 5)).compile()
    assert program.memory_analysis().temp_size_in_bytes < size(state) / 20
    for got, x in zip(jax.tree.leaves(program(state, packing.pack_copies(copies, 5))), want, strict=True):
        np.testing.assert_array_equal(got, x)
