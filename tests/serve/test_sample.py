"""Sampling against transformers' logits processors, OpenAI's formula, counted frequencies and changing company."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr
from scipy import stats

from fdel.ops import cpu
from fdel.serve.engine.request import BIASES, STOPS, SamplingParams, stop_ids
from fdel.serve.engine.sampling import GROUP, process, sample, sampling_rows, truncate

V, EOS, ROOM = 97, (2, 5), 30
rng = np.random.default_rng(0)
LOGITS = (3 * rng.standard_normal((6, V))).astype(np.float32)
HISTORY = rng.integers(0, V, (6, 20)).astype(np.int32)
PROMPT, LENGTH = np.array([3, 9, 1, 7, 12, 5]), np.array([9, 20, 1, 8, 15, 5], np.int32)


def arrays(requests, prompts=None, vocab=V, **kwargs):
    """The device arrays of requests."""
    prompts = [1] * len(requests) if prompts is None else prompts
    ends = [stop_ids(r, EOS) for r in requests]
    return sampling_rows(requests, prompts, ends, [ROOM] * len(requests), vocab=vocab, **kwargs)


def run(function, requests, logits=LOGITS, history=HISTORY, length=LENGTH, prompts=PROMPT):
    """Apply `sample` or `process` to some rows."""
    n = len(requests)
    s = arrays(requests, list(prompts[:n]))
    return jax.jit(function)(logits[:n], s, history, length[:n], np.arange(n))


def log_softmax(x):
    x = np.asarray(x, np.float64)
    with np.errstate(divide="ignore"):
        return x - x.max(-1, keepdims=True) - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True))


# ---- the distribution ----------------------------------------------------------------------------------------------

CHAINS = [
    dict(temperature=0.7),
    dict(temperature=1.0, top_k=5),
    dict(temperature=1.0, top_k=10_000),
    dict(temperature=1.0, top_p=0.6),
    dict(temperature=1.0, min_p=0.05),
    dict(temperature=0.9, repetition_penalty=1.7),
    dict(temperature=1.3, top_k=20, top_p=0.8, min_p=0.02, repetition_penalty=0.6),
    dict(temperature=1.0, min_tokens=7),
]


@pytest.mark.parametrize("options", CHAINS, ids=lambda o: "-".join(f"{k}={v}" for k, v in o.items()))
def test_distribution_equals_transformers(options: dict) -> None:
    """The same tokens are kept, with log-probabilities equal to 1e-5; processors in transformers' own order."""
    torch = pytest.importorskip("torch", reason="needs the torch extra")
    from transformers.generation import logits_process as hf

    got = run(process, [SamplingParams(**options)] * 6)
    for i in range(6):
        chain = [
            hf.RepetitionPenaltyLogitsProcessor(options.get("repetition_penalty", 1.0)),
            hf.MinNewTokensLengthLogitsProcessor(int(PROMPT[i]), options.get("min_tokens", 0), list(EOS)),
            hf.TemperatureLogitsWarper(options["temperature"]),
            hf.TopKLogitsWarper(options.get("top_k", V)),
            hf.TopPLogitsWarper(options.get("top_p", 1.0)),
            hf.MinPLogitsWarper(options.get("min_p", 0.0)),
        ]
        ids, scores = torch.tensor(HISTORY[i : i + 1, : LENGTH[i]]).long(), torch.tensor(LOGITS[i : i + 1])
        for processor in chain:
            scores = processor(ids, scores)
        want, have = log_softmax(scores[0].numpy()), log_softmax(got[i])
        np.testing.assert_array_equal(np.isfinite(have), np.isfinite(want))
        kept = np.isfinite(want)
        np.testing.assert_allclose(have[kept], want[kept], atol=1e-5)


def test_presence_and_frequency_count_the_output_only() -> None:
    """OpenAI: logit[j] - c[j] * frequency - (c[j] > 0) * presence, c over generated tokens."""
    got = run(process, [SamplingParams(presence_penalty=0.7, frequency_penalty=-1.3)] * 6)
    for i in range(6):
        count = np.bincount(HISTORY[i, PROMPT[i] : LENGTH[i]], minlength=V)
        np.testing.assert_allclose(got[i], LOGITS[i] + 1.3 * count - 0.7 * (count > 0), atol=1e-5)


def test_bias_allowed_and_order() -> None:
    """A bias comes after penalties and before the temperature; banned tokens have probability zero."""
    bias = {0: 5.0, 3: -100.0, 96: 2.5}
    r = SamplingParams(logit_bias=bias, allowed_tokens=[0, 3, 31, 32, 63, 96], frequency_penalty=1.0, temperature=0.5)
    got = log_softmax(run(process, [r, SamplingParams()])[0])
    want = LOGITS[0] - np.bincount(HISTORY[0, PROMPT[0] : LENGTH[0]], minlength=V)
    want[list(bias)] += list(bias.values())
    banned = np.ones(V, bool)
    banned[[0, 3, 31, 32, 63, 96]] = False
    np.testing.assert_allclose(got[~banned], log_softmax(np.where(banned, -np.inf, want / 0.5))[~banned], atol=1e-4)
    assert np.isneginf(got[banned]).all()
    np.testing.assert_array_equal(run(process, [r, SamplingParams()])[1], LOGITS[1])


def test_bad_words_equal_transformers() -> None:
    """Single tokens are banned always, the last token of a longer word after the others; whole words are compared."""
    torch = pytest.importorskip("torch", reason="needs the torch extra")
    from transformers.generation import logits_process as hf

    for i in range(6):
        newest = HISTORY[i, : LENGTH[i]].tolist()
        words = [
            [7],
            [*newest[-2:], 11],
            [*newest[-1:], 12],
            [newest[-1] + 1, 13],
            [*newest[-7:], 14],
            [1, *newest[-3:], 15],
        ]
        got = run(process, [SamplingParams(bad_words=words)] * 6)[i]
        chain = hf.NoBadWordsLogitsProcessor(words, eos_token_id=None)
        want = chain(torch.tensor([newest]), torch.tensor(LOGITS[i : i + 1]))[0].numpy()
        np.testing.assert_array_equal(got, want)
        assert np.isneginf(want).sum() >= 3


@pytest.mark.slow
def test_truncate_at_the_edges() -> None:
    """Ties with the last token kept stay; top_p 1 keeps all, however small; a tiny top_p keeps the best."""
    x = jnp.log(jnp.array([[0.4, 0.2, 0.2, 0.2], [0.5, 0.3, 0.2, 0.0], [1 - 3e-9, 1e-9, 1e-9, 1e-9]]))
    kept = lambda k, p, m: np.isfinite(truncate(x - x.max(-1, keepdims=True), jnp.array(k), jnp.array(p), jnp.array(m)))
    ones, zeros = [1.0] * 3, [0.0] * 3
    assert kept([2, 2, 1], ones, zeros).tolist() == [[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]]
    assert kept([0, 0, 0], [0.4, 0.79, 1.0], zeros).tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]]
    assert kept([0, 0, 0], [1e-6, 1e-45, 1e-45], zeros).tolist() == [[1, 0, 0, 0]] * 3
    assert kept([0, 2, 0], [0.5, 0.625, 0.5], zeros).tolist() == [[1, 1, 1, 1], [1, 0, 0, 0], [1, 0, 0, 0]]
    assert kept([0, 0, 0], ones, [0.51, 0.59, 1.0]).tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 0, 0]]


@pytest.mark.parametrize("options", [{}, dict(top_k=3), dict(top_p=0.7, min_p=0.1), dict(temperature=2.5)])
def test_frequencies(options: dict) -> None:
    """Draws follow softmax(process(...)): chi-square over 10,000 seeds, p > 1e-3."""
    n, vocab = 10_000, 12
    r = SamplingParams(**dict(temperature=1.0) | options)
    logits = np.broadcast_to(LOGITS[0, :vocab] / 2, (n, vocab))
    s = arrays([dataclasses.replace(r, seed=7)], vocab=vocab)
    s = jax.tree.map(lambda x: np.repeat(x, n, 0), s)
    s.seed[:, 1] = np.arange(n)
    call = (logits, s, np.zeros((1, 4), np.int32), np.full(n, 4), np.zeros(n, np.int32))
    p = np.exp(log_softmax(jax.jit(process)(*call)[0]))
    count = np.bincount(jax.jit(sample)(*call).tokens, minlength=vocab)
    assert (count[p == 0] == 0).all() and (p > 0).sum() == {3: 3}.get(r.top_k, (p > 0).sum())
    assert stats.chisquare(count[p > 0], n * p[p > 0]).pvalue > 1e-3


def test_positions_of_one_seed_are_independent() -> None:
    """Tokens at consecutive positions of one seed: the table of pairs passes a chi-square test of independence."""
    n = 5_000
    s = jax.tree.map(lambda x: np.repeat(x, n, 0), arrays([SamplingParams(temperature=1.0, seed=3)], vocab=32))
    logits = np.broadcast_to(np.where(np.arange(32) < 4, 0, -np.inf).astype(np.float32), (n, 32))
    call = (logits, s, np.zeros((1, 4), np.int32), np.arange(n), np.zeros(n, np.int32))
    tokens = np.asarray(jax.jit(sample)(*call).tokens)
    pairs = np.histogram2d(tokens[:-1], tokens[1:], bins=4, range=[[0, 4]] * 2)[0]
    assert stats.chi2_contingency(pairs).pvalue > 1e-3
    assert stats.chisquare(np.bincount(tokens)).pvalue > 1e-3


# ---- company -------------------------------------------------------------------------------------------------------

MIXED = [
    SamplingParams(temperature=0.8, seed=11),
    SamplingParams(),
    SamplingParams(temperature=1.5, top_p=0.9, seed=2**64 - 1, logprobs=3),
    SamplingParams(temperature=1.0, top_k=7, repetition_penalty=1.3, seed=11),
    SamplingParams(presence_penalty=1.0, logit_bias={4: 30.0}),
    SamplingParams(temperature=0.3, min_p=0.2, allowed_tokens=range(9), seed=0),
]


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2, 8])
def test_a_row_does_not_depend_on_its_company(rows: int) -> None:
    """Each request alone, among empty rows, gives bitwise the token it gives among all others."""
    together = run(sample, MIXED)
    for i, request in enumerate(MIXED):
        s = arrays([request], [PROMPT[i]], rows=rows)
        logits = np.concatenate([LOGITS[i : i + 1], np.tile(LOGITS, (2, 1))[: rows - 1]])
        length = np.array([LENGTH[i]] + [1] * (rows - 1), np.int32)
        alone = jax.jit(sample)(logits, s, HISTORY, length, np.array([i] + [0] * (rows - 1)))
        assert alone.tokens[0] == together.tokens[i]
        np.testing.assert_allclose(alone.logprobs[0], together.logprobs[i], atol=1e-6)


def test_greedy_rows_stay_greedy_among_sampled_ones() -> None:
    requests = [SamplingParams() if i % 2 else SamplingParams(temperature=9.0, seed=i) for i in range(6)]
    tokens = run(sample, requests).tokens
    np.testing.assert_array_equal(tokens[1::2], LOGITS[1::2].argmax(-1))


def test_seeds_and_positions_matter() -> None:
    """The same row with other seeds, or at other positions, draws other tokens; unseeded rows differ too."""
    flat, n = np.zeros((64, V), np.float32), np.arange(64)
    call = lambda s, length: np.asarray(jax.jit(sample)(flat, s, HISTORY, length, 0 * n).tokens)
    seeded = lambda f: arrays([SamplingParams(temperature=1.0, seed=f(i)) for i in range(64)])
    same = np.full(64, 4, np.int32)
    assert len(set(call(seeded(lambda i: 1), same))) == 1
    for s, length in ((seeded(lambda i: i), same), (seeded(lambda i: i << 32), same), (seeded(lambda i: 1), n)):
        assert len(set(call(s, length))) > 25
    assert len(set(call(arrays([SamplingParams(temperature=1.0)] * 64), same))) > 25


# ---- log-probabilities and faults ----------------------------------------------------------------------------------


def test_logprobs_are_of_the_raw_logits() -> None:
    out = run(sample, MIXED)
    want = log_softmax(LOGITS)
    np.testing.assert_allclose(out.logprobs, want[np.arange(6), out.tokens], atol=1e-5)
    np.testing.assert_array_equal(out.top_ids[2], np.argsort(-want[2], kind="stable")[:20])
    np.testing.assert_allclose(out.top_logprobs[2], -np.sort(-want[2])[:20], atol=1e-5)


DRAWS = [
    dict(),
    dict(temperature=0.7),
    dict(temperature=1.3),
    dict(temperature=1.0, top_p=0.8),
    dict(temperature=1.3, top_k=7, min_p=0.05, top_p=0.9),
    dict(temperature=0.7, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.3),
    dict(temperature=1.0, allowed_tokens=range(20), logit_bias={3: 4.0, 5: -100.0}, min_tokens=30),
    dict(temperature=0.0, presence_penalty=2.0, allowed_tokens=[4, 9]),
]


def float64(r: SamplingParams, logits: np.ndarray, history: np.ndarray, prompt: int) -> np.ndarray:
    """The distribution that a row is drawn from, by the formulas in SamplingParams: log-probabilities [V]."""
    z = logits.astype(np.float64)
    seen, count = np.bincount(history, minlength=V) > 0, np.bincount(history[prompt:], minlength=V)
    z[seen] = np.where(z[seen] > 0, z[seen] / r.repetition_penalty, z[seen] * r.repetition_penalty)
    z -= r.frequency_penalty * count + r.presence_penalty * (count > 0)
    for token, bias in r.logit_bias.items():
        z[token] += bias
    banned = np.zeros(V, bool)
    if r.allowed_tokens is not None:
        banned[[t for t in range(V) if t not in r.allowed_tokens]] = True
    if len(history) < prompt + r.min_tokens:
        banned[list(EOS)] = True
    z = np.where(banned, -np.inf, z)
    if r.temperature == 0:
        return np.where(np.arange(V) == z.argmax(), 0, -np.inf)
    z = log_softmax(z / r.temperature)
    order = np.argsort(-z, kind="stable")
    if r.top_k:
        z[order[r.top_k :]] = -np.inf
    p = np.exp(log_softmax(z))[order]
    z[order[1:][np.cumsum(p)[:-1] >= r.top_p]] = -np.inf
    z[z < z.max() + np.log(max(r.min_p, 1e-300))] = -np.inf
    return log_softmax(z)


@pytest.mark.parametrize("options", DRAWS, ids=lambda o: "-".join(map(str, o)) or "greedy")
def test_sampled_logprobs_are_of_what_was_drawn_from(options: dict) -> None:
    """Against float64: temperature, penalties, biases, bans and truncations included; a greedy draw has 0."""
    requests = [SamplingParams(**options, seed=i) for i in range(6)]
    out, got = run(sample, requests), run(process, requests)
    for i, r in enumerate(requests):
        want = float64(r, LOGITS[i], HISTORY[i, : LENGTH[i]], int(PROMPT[i]))
        np.testing.assert_allclose(out.sampled_logprobs[i], want[out.tokens[i]], atol=2e-6)
        if r.temperature:
            np.testing.assert_allclose(log_softmax(got[i])[out.tokens[i]], want[out.tokens[i]], atol=2e-6)
    raw = log_softmax(LOGITS)[np.arange(6), out.tokens]
    np.testing.assert_allclose(out.logprobs, raw, atol=1e-5)
    assert np.abs(raw - out.sampled_logprobs).max() > 0.01  # the two are not one


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_left_to_draw_is_told(temperature: float) -> None:
    """Bans that leave no token give NaN for that row alone, whose log-probability for the model is a number."""
    nothing = SamplingParams(temperature=temperature, allowed_tokens=[2, 5], min_tokens=30, seed=1)
    some = dataclasses.replace(nothing, allowed_tokens=[2, 5, 6])
    words = SamplingParams(temperature=temperature, allowed_tokens=[3], bad_words=[[3]], seed=1)
    out = run(sample, [some, nothing, some, words])
    assert np.isnan(out.sampled_logprobs).tolist() == [False, True, False, True] and np.isfinite(out.logprobs).all()
    assert out.tokens[0] == out.tokens[2] == 6 and out.sampled_logprobs[0] == out.sampled_logprobs[2] == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("request_", [SamplingParams(), SamplingParams(temperature=1.0, top_p=0.5, top_k=3, seed=1)])
def test_logits_that_are_not_finite_fail_their_row_only(bad: float, request_: SamplingParams) -> None:
    logits = LOGITS.copy()
    logits[2, 40] = bad
    out, good = run(sample, [request_] * 6, logits=logits), run(sample, [request_] * 6)
    assert np.isnan(out.logprobs).tolist() == [False, False, True, False, False, False]
    np.testing.assert_array_equal(np.delete(out.tokens, 2), np.delete(good.tokens, 2))


@pytest.mark.parametrize("temperature", [1e-38, 1e-3, 100.0])
def test_extreme_temperatures_and_logits(temperature: float) -> None:
    logits = np.full((1, V), -1e30, np.float32)
    logits[0, 17], logits[0, 3] = 1e30, -np.inf
    out = run(sample, [SamplingParams(temperature=temperature, seed=1, top_p=0.9)], logits=logits)
    assert out.tokens[0] == 17 and out.logprobs[0] == 0


def primitives(jaxpr: Jaxpr, inside: bool) -> set[str]:
    """Names of the primitives of a jaxpr; those in branches of `cond` only if `inside`."""
    found = set()
    for eqn in jaxpr.eqns:
        found.add(eqn.primitive.name)
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda v: isinstance(v, ClosedJaxpr | Jaxpr)):
            if isinstance(value, ClosedJaxpr | Jaxpr) and (inside or eqn.primitive.name != "cond"):
                found |= primitives(value.jaxpr if isinstance(value, ClosedJaxpr) else value, inside)
    return found


def test_what_no_row_asks_for_is_behind_a_condition() -> None:
    """Greedy steps draw no random bits, count no history and rank no vocabulary; nothing ever sorts."""
    s = arrays([SamplingParams()] * 6, list(PROMPT))
    jaxpr = jax.make_jaxpr(sample)(LOGITS, s, HISTORY, LENGTH, np.arange(6)).jaxpr
    costly = {"random_bits", "scatter", "scatter-add", "top_k", "while", "scan"}
    assert not primitives(jaxpr, False) & costly
    everything = primitives(jaxpr, True)
    assert "sort" not in everything and {"random_bits", "top_k", "scatter-add"} <= everything


def test_few_arrays_of_the_size_of_the_logits() -> None:
    """Many rows are processed in groups, with the tokens of one group alone; twice the logits is all that it takes."""
    requests, n = [dataclasses.replace(r, seed=3) for r in MIXED], 24 * len(MIXED)
    call = lambda rows: (LOGITS[rows], arrays([requests[i] for i in rows], PROMPT[rows]), HISTORY, LENGTH[rows], rows)
    every, one = np.tile(np.arange(6), 24), np.arange(6)
    together, alone = jax.jit(sample)(*call(every)), jax.jit(sample)(*call(one))
    assert len(every) == n == 9 * GROUP
    np.testing.assert_array_equal(together.tokens, np.tile(alone.tokens, 24))
    np.testing.assert_allclose(together.sampled_logprobs, np.tile(alone.sampled_logprobs, 24), atol=1e-6)
    shape = lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype)
    s, vocab = arrays([SamplingParams()] * 64, vocab=32768), 32768
    known = np.zeros(64, np.int32)
    args = jax.tree.map(shape, (np.zeros((64, vocab), np.float32), s, np.zeros((64, 128), np.int32), known, known))
    assert jax.jit(sample).lower(*args).compile().memory_analysis().temp_size_in_bytes < 2 * 4 * 64 * vocab


# ---- requests ------------------------------------------------------------------------------------------------------

WRONG = [
    (dict(temperature=-0.1), "temperature=-0.1 is out of range; expected 0 <= temperature <= 100"),
    (dict(temperature=float("nan")), "temperature=nan is out of range"),
    (dict(temperature="hot"), "temperature='hot' is a str; expected float"),
    (dict(top_k=-1), "top_k=-1 is out of range"),
    (dict(top_k=2.5), "top_k=2.5 is a float; expected int"),
    (dict(top_k=True), "top_k=True is a bool"),
    (dict(top_p=0), "top_p=0 keeps no token"),
    (dict(top_p=1.01), "top_p=1.01 is out of range"),
    (dict(min_p=2.0), "min_p=2.0 is out of range"),
    (dict(repetition_penalty=0.0), "repetition_penalty=0.0 is out of range"),
    (dict(presence_penalty=3), "presence_penalty=3 is out of range; expected -2 <= presence_penalty <= 2"),
    (dict(frequency_penalty=-3), "frequency_penalty=-3 is out of range"),
    (dict(max_tokens=0), "max_tokens=0 is out of range"),
    (dict(max_tokens=2, min_tokens=3), "min_tokens=3 is more than max_tokens=2"),
    (dict(seed=-1), "seed=-1 is out of range"),
    (dict(seed=2**64), "seed=18446744073709551616 is out of range"),
    (dict(logprobs=21), "logprobs=21 is out of range; expected 0 <= logprobs <= 20"),
    (dict(stop=["a", ""]), "none empty"),
    (dict(logit_bias={1: 101}), "-100 <= bias <= 100"),
    (dict(logit_bias=dict.fromkeys(range(BIASES + 1), 1)), f"logit_bias has {BIASES + 1} entries"),
    (dict(allowed_tokens=[]), "allowed_tokens is empty"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=lambda x: x[:40] if isinstance(x, str) else "")
def test_wrong_requests_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError) as e:
        SamplingParams(**options)
    assert message in str(e.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(logit_bias={V: 1}), rf"logit_bias holds \[{V}\]; expected token ids from 0 to {V - 1}"),
        (dict(logit_bias={-1: 1}), r"logit_bias holds \[-1\]"),
        (dict(allowed_tokens=[0, V]), r"allowed_tokens holds"),
        (dict(stop_token_ids=[V]), r"stop_token_ids holds"),
        (dict(stop_token_ids=range(10, 10 + STOPS)), "are 34 ids together; the most is 32"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        arrays([SamplingParams(**options)])


def test_rows_can_stand_anywhere_in_the_history() -> None:
    """A batch may be any selection of slots: `rows` says where each one's history is."""
    requests = [SamplingParams(repetition_penalty=5.0)] * 6
    want = run(process, requests)
    order = np.array([4, 0, 5])
    s = jax.tree.map(lambda x: x[order], arrays(requests, list(PROMPT)))
    got = jax.jit(partial(process))(LOGITS[order], s, HISTORY, LENGTH[order], order)
    np.testing.assert_array_equal(got, want[order])


def test_the_first_of_the_largest_is_drawn() -> None:
    """As numpy has it, with ties and infinities; of a row with NaN a place that there is."""
    z = np.random.default_rng(0).integers(-2, 3, (32, 300)).astype(np.float32)
    z[3], z[4, 7], z[5, [2, 9]] = -np.inf, np.inf, np.inf
    np.testing.assert_array_equal(jax.jit(cpu.argmax)(z), z.argmax(-1))
    z[:, 250] = np.nan
    assert ((found := np.asarray(jax.jit(cpu.argmax)(z))) < 300).all() and (found >= 0).all()
