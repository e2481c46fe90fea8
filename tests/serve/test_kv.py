"""An engine whose cache has 8 bits: against full forwards that round keys and values, however the work is cut."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel import ops, params, serve
from fdel.models import llama
from fdel.serve.engine.engine import Engine, Settings
from fdel.serve.engine.pages import Pool
from fdel.serve.engine.settings import unsupported
from tests.ops.test_quantized_pages import rounded
from tests.serve.small import CFG, CONTEXT, VOCAB

PROMPTS = [np.random.default_rng(5).integers(8, VOCAB, n).tolist() for n in (70, 63, 12)]
LONG = serve.SamplingParams(max_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module")
def rounding(model):
    """(format, prompt) -> what the model continues with, by whole forwards in which attention rounds keys and values."""
    made = {}

    def forward(format: str):
        def attend(batch, state, layer, q, k, v, **others):
            shape = jax.ShapeDtypeStruct(k.shape, jnp.float32)
            hold = lambda x: jax.pure_callback(lambda x: rounded(np.asarray(x), format)[0].astype(np.float32), shape, x)
            return plain(batch, state, layer, q, hold(k), hold(v), **others)

        plain, ops.attend = ops.attend, attend
        try:
            padded = jnp.zeros((1, CONTEXT), jnp.int32)
            return jax.jit(lambda p, t: llama.forward(p, t, CFG)[0]).lower(model.params, padded).compile()
        finally:
            ops.attend = plain

    def generate(format: str, prompt: list[int]) -> tuple[list[int], list[float]]:
        if format not in made:
            made[format] = forward(format)
        tokens, logprobs = list(prompt), []
        for _ in range(10):
            padded = np.zeros((1, CONTEXT), np.int32)
            padded[0, : len(tokens)] = tokens
            logits = np.asarray(made[format](model.params, padded))[0, len(tokens) - 1].astype(np.float64)
            tokens.append(int(logits.argmax()))
            logprobs.append(logits.max() - np.logaddexp.reduce(logits))
        return tokens[len(prompt) :], logprobs

    return generate


@pytest.mark.slow
@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_answers_are_those_of_rounded_keys_and_values(model, rounding, format: str) -> None:
    """Chunks of 1, 7 and 64 tokens, preemption, and pages from the cache: the same tokens, those of the full forward."""
    want = [rounding(format, p) for p in PROMPTS]
    plain = Engine(model, Settings(rows=2, pages=8, budget=64, batches=(2,))).generate(PROMPTS, LONG)
    assert any(g.logprobs != pytest.approx(w[1], abs=1e-3) for g, w in zip(plain, want, strict=True))
    for budget, total in ((1, 3), (7, 3), (64, 3), (64, 8)):
        e = Engine(model, Settings(rows=2, pages=8, budget=budget, batches=(2,), kv_cache_dtype=format))
        e._core.schedule.pool = Pool(total, 64)
        for again in range(1 + (total == 8)):
            got = e.generate(PROMPTS, LONG)
            assert [g.tokens for g in got] == [w[0] for w in want]
            for g, w in zip(got, want, strict=True):
                np.testing.assert_allclose(g.logprobs, w[1], atol=1e-4)
            assert got[0].cached == 64 * again
        assert e.stats()["preempted"] >= ((budget, total) == (64, 3))


@pytest.mark.slow
def test_drafts_change_nothing(model) -> None:
    settings = dict(rows=2, pages=8, budget=64, batches=(2,), kv_cache_dtype="int8")
    loop = [[9, 10, 11, 12, 13] * 8]
    s = serve.SamplingParams(max_tokens=20, ignore_eos=True, logit_bias={9: 30.0, 10: 30.0})
    plain, drafted = Engine(model, Settings(**settings)), Engine(model, Settings(**settings, drafts=3))
    got, want = drafted.generate(loop, s)[0], plain.generate(loop, s)[0]
    assert got.tokens == want.tokens and drafted.stats()["drafting steps"] > 0
    np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-4)


@pytest.mark.parametrize("format", ["int8", "fp8"])
def test_bytes_of_a_token(model, format: str) -> None:
    """A byte a number, and four for the scale of each head's keys and values; 32 bits a number before."""
    held = lambda kv: sum(
        x.nbytes
        for x in jax.tree.leaves(Engine(model, Settings(rows=2, pages=8, kv_cache_dtype=kv))._core.device.state)
    )
    assert held(format) / (8 * 64) == CFG.layers * CFG.kv_heads * 2 * (CFG.head_dim + 4)
    assert held(None) / (8 * 64) == CFG.layers * CFG.kv_heads * 2 * CFG.head_dim * 4


@pytest.mark.slow
def test_latents(pair) -> None:
    """Close to the unquantised cache, and the same however the prompt is cut."""
    model = pair("deepseek_v3")[1]
    prompts = [np.random.default_rng(n).integers(3, 128, n).tolist() for n in (70, 12)]
    run = lambda kv, budget: Engine(
        model, Settings(rows=2, pages=8, budget=budget, batches=(2,), kv_cache_dtype=kv)
    ).generate(prompts, serve.SamplingParams(max_tokens=6, ignore_eos=True))
    plain, small, whole = run(None, 64), run("int8", 7), run("int8", 64)
    for p, s, w in zip(plain, small, whole, strict=True):
        assert s.tokens == w.tokens
        np.testing.assert_allclose(s.logprobs, w.logprobs, atol=1e-3)
        np.testing.assert_allclose(w.logprobs[0], p.logprobs[0], atol=0.05)


@pytest.mark.slow
def test_on_a_mesh(model) -> None:
    """Scales lie where their heads lie."""
    mesh = params.make_mesh({"tp": 2, "dp": 4})
    spec = params.unstack(llama.spec(CFG))
    sharded = model._replace(params=jax.device_put(model.params, params.shardings(spec, mesh, params.SERVE)))
    settings = Settings(rows=2, pages=8, budget=64, batches=(2,), kv_cache_dtype="int8")
    e = Engine(sharded, settings)
    assert [g.tokens for g in e.generate(PROMPTS, LONG)] == [
        g.tokens for g in Engine(model, settings).generate(PROMPTS, LONG)
    ]
    (state,) = e._core.device.state
    pages = state.pages
    assert pages.k_scale.sharding.spec[2] == pages.k.sharding.spec[2] == "tp" and pages.k.dtype == jnp.int8


def test_formats_that_there_are_not(model) -> None:
    assert "kv_cache_dtype='int4'; expected one of None, 'int8', 'fp8'" in unsupported(
        model, Settings(kv_cache_dtype="int4")
    )
    with pytest.raises(ValueError, match="kv_cache_dtype='fp9'"):
        Engine(model, Settings(kv_cache_dtype="fp9"))


@pytest.mark.slow
def test_a_family_without_keys(pair) -> None:
    reason = unsupported(pair("mamba2")[1], Settings(kv_cache_dtype="int8"))
    assert "mamba2 has no keys and values to keep" in reason
