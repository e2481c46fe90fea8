"""Cached generation against transformers, against the naive generator, and against itself in other company."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel import params, serve, text
from fdel.models import llama
from fdel.serve.engine import step
from fdel.serve.output_text import find_stop
from tests.serve.small import CFG, CONTEXT, EOS, VOCAB, scores

rng = np.random.default_rng(0)
PROMPTS = [rng.integers(8, VOCAB, n).tolist() for n in (3, 1, 12, 40, 64, 9)]


# ---- greedy --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", pytest.param("gemma3_text", marks=pytest.mark.slow)])
def test_equals_naive(pair, name) -> None:
    """Mixed lengths: the naive tokens, log-probabilities within 1e-5. For the other families see the engine's tests."""
    model = pair(name)[1]
    prompts = [np.random.default_rng(n).integers(3, 128, n).tolist() for n in (5, 50, 12)]
    for prompt, got in zip(prompts, serve.generate(model, prompts, max_tokens=8, eos=()), strict=True):
        want = serve.naive_generate(model, prompt, 8)
        assert got.tokens == want.tokens and got.finish_reason == want.finish_reason == "length"
        np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-5)


@pytest.mark.slow
def test_greedy_equals_transformers(pair) -> None:
    import torch

    oracle, model = pair("llama")
    for n in (1, 30):
        prompt = np.random.default_rng(n).integers(3, 128, (1, n))
        for options in (dict(), dict(repetition_penalty=1.5)):
            want = oracle.generate(
                torch.tensor(prompt), max_new_tokens=20, do_sample=False, eos_token_id=[3], **options
            )
            (got,) = serve.generate(model, prompt.tolist(), max_tokens=20, eos=[3], **options)
            assert got.tokens == want[0, n:].tolist()


# ---- sampled -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_results_do_not_depend_on_company(model) -> None:
    """Greedy, sampled and penalised requests of mixed lengths: one at a time they give what they give in a batch of 6."""
    requests = [
        serve.SamplingParams(max_tokens=12, temperature=1.0, seed=1),
        serve.SamplingParams(max_tokens=20),
        serve.SamplingParams(max_tokens=5, temperature=0.7, top_p=0.9, top_k=50, seed=2, logprobs=2),
        serve.SamplingParams(max_tokens=12, repetition_penalty=1.4, frequency_penalty=0.5),
        serve.SamplingParams(max_tokens=12, temperature=1.4, min_p=0.01, presence_penalty=1.0, seed=1),
        serve.SamplingParams(max_tokens=12, temperature=1.0, seed=1),
    ]
    together = serve.generate(model, PROMPTS, requests)
    some = (0, 4, 5)
    one_by_one = serve.generate(model, [PROMPTS[i] for i in some], [requests[i] for i in some], batch_size=1)
    alone = dict(zip(some, one_by_one, strict=True))
    for i, g in alone.items():
        assert g.tokens == together[i].tokens
        np.testing.assert_allclose(g.logprobs, together[i].logprobs, atol=1e-5)
    assert len({tuple(g.tokens[:5]) for g in together}) == 6


@pytest.mark.slow
def test_logprobs_equal_a_full_forward(model) -> None:
    requests = dict(
        max_tokens=15, temperature=1.2, top_k=100, seed=5, logprobs=4, presence_penalty=0.3, ignore_eos=True
    )
    for prompt, got in zip(PROMPTS, serve.generate(model, PROMPTS, **requests), strict=True):
        assert len(got.tokens) == 15
        np.testing.assert_allclose(got.logprobs, scores(model, prompt, got.tokens), atol=1e-5)
        assert all(len(top) == 4 and list(top.values()) == sorted(top.values())[::-1] for top in got.top_logprobs)
        for token, logprob, top in zip(got.tokens, got.logprobs, got.top_logprobs, strict=True):
            assert token not in top or abs(top[token] - logprob) < 1e-6
            assert max(top.values()) >= logprob - 1e-6


@pytest.mark.slow
def test_seeds(model) -> None:
    """The same seed repeats; other seeds and no seeds differ."""
    draw = lambda **k: (
        serve.generate(model, PROMPTS[:1], max_tokens=16, temperature=2.0, ignore_eos=True, **k)[0].tokens
    )
    assert draw(seed=1) == draw(seed=1)
    assert len({tuple(t) for t in (draw(seed=1), draw(seed=2), draw(), draw())}) == 4


# ---- where an output ends ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_stop_ids_and_min_tokens(model) -> None:
    free = serve.generate(model, PROMPTS, max_tokens=12, eos=())
    for i, g in enumerate(free):
        end = g.tokens[4]
        first = g.tokens.index(end)
        for options in (dict(eos=[end]), dict(eos=(), stop_token_ids=[end])):
            got = serve.generate(model, PROMPTS, max_tokens=12, **options)[i]
            assert (got.tokens, got.finish_reason) == (g.tokens[: first + 1], "stop")
        assert serve.generate(model, PROMPTS, max_tokens=12, eos=[end], ignore_eos=True)[i].tokens == g.tokens
        later = serve.generate(model, PROMPTS, max_tokens=12, eos=[end], min_tokens=8)[i].tokens
        assert end not in later[:8] and later[:first] == g.tokens[:first]


@pytest.mark.slow
def test_config_names_eos(model) -> None:
    """eos comes from config.json, else from the tokenizer, else from the argument."""
    bias = dict(max_tokens=3, logit_bias={EOS: 100.0})
    assert serve.generate(model, PROMPTS[:1], **bias)[0].tokens == [EOS]
    assert serve.generate(model, PROMPTS[:1], eos=[EOS + 1], **bias)[0].tokens == [EOS] * 3


@pytest.mark.slow
def test_context_limit(model) -> None:
    """Output ends where the model's context does, or at max_length."""
    long = PROMPTS[4] * 3
    got = serve.generate(model, [PROMPTS[0], long], max_tokens=50, ignore_eos=True)
    assert [len(g.tokens) for g in got] == [50, CONTEXT - 192] and got[1].finish_reason == "length"
    (got,) = serve.generate(model, [PROMPTS[3]], max_tokens=50, max_length=43, ignore_eos=True)
    assert len(got.tokens) == 3 and got.finish_reason == "length"


def test_text_and_stop_strings(model, tokenizer) -> None:
    """Text is what decode gives; a stop string ends tokens where it is complete, and text where it begins."""
    options = dict(max_tokens=40, temperature=1.5, seed=4, tokenizer=tokenizer, eos=[])
    (free,) = serve.generate(model, PROMPTS[:1], **options)
    assert free.text == text.decode(tokenizer, free.tokens)
    for start, n in ((10, 3), (4, 1), (15, 6)):
        stop = free.text[start : start + n]
        (got,) = serve.generate(model, PROMPTS[:1], stop=["never", stop], **options)
        assert got.finish_reason == "stop" and got.text == free.text[: free.text.index(stop)]
        assert stop in text.decode(tokenizer, got.tokens) and got.tokens == free.tokens[: len(got.tokens)]
        assert stop not in text.decode(tokenizer, got.tokens[:-1])


@pytest.mark.parametrize("stop", [(), ("o", "never"), ("  ",)])
def test_stream_equals_generate(model, tokenizer, stop) -> None:
    options = dict(max_tokens=30, temperature=1.0, seed=4, stop=stop, tokenizer=tokenizer)
    (want,) = serve.generate(model, PROMPTS[2:3], **options)
    deltas = list(serve.stream(model, PROMPTS[2], **options))
    assert sum((d.tokens for d in deltas), []) == want.tokens
    assert "".join(d.text for d in deltas) == want.text
    assert [d.finish_reason for d in deltas] == [None] * (len(deltas) - 1) + [want.finish_reason]


def test_a_stream_holds_back_what_may_become_a_stop_string() -> None:
    assert find_stop("abc", ["bcd", "x"]) == (1, False)
    assert find_stop("abc", ["bcd", "x"], final=True) == (3, False)
    assert find_stop("abcd", ["bcd", "abcde"]) == (1, True)
    assert find_stop("aab", ["abab"]) == (1, False)
    assert find_stop("", ["abab"]) == (0, False)
    for stops in (["aba"], ["abc", "bc"], ["aaab", "ba"]):
        for said in map("".join, np.random.default_rng(0).choice(list("abc"), (200, 12))):
            shown = held = ""
            found = False
            for c in said:
                end, found = find_stop(held + c, stops)
                shown, held = shown + (held + c)[:end], (held + c)[end:]
                if found:
                    break
            first = min((said.find(s) + len(s), said.find(s)) for s in stops if s in said) if found else (12, 12)
            assert found == any(s in said for s in stops)
            assert shown == said[: first[1]] if found else said.startswith(shown)


# ---- programs ------------------------------------------------------------------------------------------------------


def compiled(caplog, f) -> list[str]:
    """What jax compiles during f()."""
    caplog.clear()
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        f()
    return [r.getMessage() for r in caplog.records if r.getMessage().startswith("Compiling")]


@pytest.mark.slow
def test_nothing_compiles_after_the_first_call(model, caplog) -> None:
    """Other prompts of the same bucket and every sampling option run the programs that a greedy call has made."""

    def run(seed: int, **options) -> None:
        prompts = [np.random.default_rng(seed).integers(8, VOCAB, n).tolist() for n in (5 + seed, 20 + seed, 11)]
        serve.generate(model, prompts, max_tokens=16 + seed, **options)

    assert compiled(caplog, lambda: run(0, eos=[11]))
    options = dict(temperature=0.9, top_k=9, top_p=0.8, min_p=0.1, repetition_penalty=1.2, presence_penalty=0.1)
    assert not compiled(caplog, lambda: run(1))
    assert not compiled(caplog, lambda: run(2, logprobs=20, logit_bias={3: 1.0}, allowed_tokens=[3, 4, 5], **options))


@pytest.mark.slow
def test_bfloat16_and_stacked_layers(model) -> None:
    """Stacked layers are accepted; keys and values are kept in the activations' dtype."""
    stacked = params.restack(model.params, llama.spec(CFG))
    want = serve.generate(model, PROMPTS, max_tokens=4)
    assert serve.generate(model._replace(params=stacked), PROMPTS, max_tokens=4) == want
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.params)
    assert step.compute_dtype(half) == jnp.bfloat16
    got = serve.generate(model._replace(params=half), PROMPTS[:1], max_tokens=4, eos=())
    for prompt, g in zip(PROMPTS, got, strict=False):
        np.testing.assert_allclose(g.logprobs, scores(model._replace(params=half), prompt, g.tokens), atol=0.1)


# ---- faults --------------------------------------------------------------------------------------------------------

FAULTS = [
    ([[]], {}, "prompt 0 is empty"),
    ([[9], list(range(10, 10 + CONTEXT))], {}, "prompt 1 has 200 tokens; prompt and output must fit 200"),
    ([[9] * 8], dict(max_length=8), "prompt 0 has 8 tokens; prompt and output must fit 8"),
    ([[1, VOCAB]], {}, "prompt 0 holds [300]; expected token ids from 0 to 299"),
    ([[1, -1]], {}, "prompt 0 holds [-1]"),
    ([[1], [2]], dict(sampling=[serve.SamplingParams()]), "1 SamplingParams for 2 prompts"),
    ([[1]], dict(sampling=serve.SamplingParams(), top_k=3), "got sampling and top_k"),
    ([[1]], dict(stop="a"), "stop strings need a tokenizer"),
    ([[1]], dict(temperature=-1), "temperature=-1 is out of range"),
    ([[1]], dict(batch_size=0), "batch_size=0"),
    ([[1]], dict(eos=[VOCAB]), "eos holds [300]"),
]


@pytest.mark.parametrize(("prompts", "options", "message"), FAULTS, ids=[f[2][:30] for f in FAULTS])
def test_faults_are_named_before_anything_runs(model, prompts, options, message) -> None:
    broken = model._replace(params=jax.tree.map(lambda x: x * jnp.nan, model.params))
    with pytest.raises(ValueError) as e:
        serve.generate(broken, prompts, **options)
    assert message in str(e.value)


def test_a_stream_names_faults_when_it_is_called(model) -> None:
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        serve.stream(model, [])


@pytest.mark.slow
def test_logits_that_are_not_finite(model) -> None:
    broken = model._replace(params=model.params | {"norm": model.params["norm"].at[3].set(jnp.nan)})
    with pytest.raises(ValueError, match="prompt 0: logits are not finite at output token 0; check weights and dtype"):
        serve.generate(broken, PROMPTS, max_tokens=2)


def test_no_prompts(model) -> None:
    assert serve.generate(model, []) == []


# ---- beam search ---------------------------------------------------------------------------------------------------

BEAMS = [
    dict(num_beams=3),
    dict(num_beams=4, length_penalty=0.0, early_stopping="never"),
    dict(num_beams=4, length_penalty=2.0, early_stopping="never"),
    dict(num_beams=3, early_stopping=True),
    dict(num_beams=2, length_penalty=-1.0),
    dict(num_beams=5, length_penalty=0.6, early_stopping=True),
]


@pytest.mark.slow
@pytest.mark.parametrize("options", BEAMS, ids=lambda o: "-".join(map(str, o.values())))
@pytest.mark.parametrize("ends", [(3,), range(5, 25)], ids=["rare", "frequent"])
def test_beam_search_equals_transformers(pair, options: dict, ends) -> None:
    """All returned sequences in their order, and their scores within 1e-4 relative."""
    import torch

    oracle, model = pair("llama")
    ends, prompt = list(ends), np.random.default_rng(1).integers(3, 128, (1, 7))
    want = oracle.generate(
        torch.tensor(prompt), attention_mask=torch.ones(1, 7), max_new_tokens=10, do_sample=False, eos_token_id=ends,
        pad_token_id=0, num_return_sequences=options["num_beams"], return_dict_in_generate=True, output_scores=True,
        **options,
    )  # fmt: skip
    got = serve.beam_search(model, prompt[0].tolist(), max_tokens=10, eos=ends, **options)
    cut = lambda s: s[: next((i + 1 for i, t in enumerate(s) if t in ends), len(s))]
    assert [b.tokens for b in got] == [cut(s) for s in want.sequences[:, 7:].tolist()]
    np.testing.assert_allclose([b.score for b in got], want.sequences_scores.numpy(), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3_text", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_beam_scores_equal_a_full_forward(pair, name: str) -> None:
    """Beams keep their own cache, pages and recurrent slots alike, while they are reordered."""
    model = pair(name)[1]
    prompt = np.random.default_rng(2).integers(3, 128, 9).tolist()
    beams = serve.beam_search(model, prompt, 4, max_tokens=9, eos=())
    assert len({tuple(b.tokens) for b in beams}) == 4
    for b in beams:
        np.testing.assert_allclose(b.score, scores(model, prompt, b.tokens).mean(), atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [(dict(num_beams=0), "num_beams=0"), (dict(num_beams=2, early_stopping="soon"), "early_stopping='soon'")],
)
def test_beam_faults(model, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        serve.beam_search(model, PROMPTS[0], **options)
