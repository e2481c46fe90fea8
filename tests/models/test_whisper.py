"""Whisper against transformers' WhisperForConditionalGeneration, every weight random; float32, 2e-5."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel import models, ops, params
from fdel.models import whisper
from tests.models.tiny import whisper as tiny


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """transformers' model, ours with its weights, and two sounds' features."""
    torch = pytest.importorskip("torch")
    directory = tmp_path_factory.mktemp("whisper")
    oracle = tiny.make(directory)
    features = np.random.default_rng(0).standard_normal((2, 16, 40)).astype(np.float32)
    model = models.load(directory, family=whisper)
    with torch.no_grad():
        states = oracle.model.encoder(torch.tensor(features)).last_hidden_state
    return SimpleNamespace(oracle=oracle, model=model, features=features, states=states, directory=directory)


def test_states_and_logits_are_those_of_transformers(both):
    """The encoder's states, the decoder's logits of a whole sequence, and the attention of chosen heads to the sound."""
    import torch

    tokens = np.random.default_rng(1).integers(0, 100, (2, 9))
    _, cfg, weights = both.model
    states = jax.jit(lambda p, x: whisper.encode(p, x, cfg))(weights, both.features)
    np.testing.assert_allclose(states, both.states, atol=2e-5)
    both.oracle.set_attn_implementation("eager")
    with torch.no_grad():
        want = both.oracle(torch.tensor(both.features), decoder_input_ids=torch.tensor(tokens), output_attentions=True)
    both.oracle.set_attn_implementation("sdpa")
    watch = [(2, 1), (0, 3), (2, 0)]

    @jax.jit
    def run(p, states, tokens):
        x, _, seen = whisper.hidden(p, tokens, cfg, whisper.remember(p, states), watch=watch)
        return ops.logits(x, whisper.head(p, cfg)), seen

    logits, seen = run(weights, states, jnp.asarray(tokens))
    np.testing.assert_allclose(logits, want.logits, atol=2e-5)
    for (layer, head), found in zip(watch, seen, strict=True):
        np.testing.assert_allclose(found, want.cross_attentions[layer][:, head], atol=1e-5)


def test_positions_begin_as_sinusoids(both):
    """Those of a Whisper that transformers just made; 1e-6."""
    import transformers

    begin = params.init({"positions": whisper.spec(both.model.cfg)["encoder"]["positions"]}, jax.random.key(0))
    fresh = transformers.WhisperModel(both.oracle.config).encoder.embed_positions.weight
    np.testing.assert_allclose(begin["positions"], fresh.detach(), atol=1e-6)


@pytest.mark.matrix
@pytest.mark.slow
def test_cached_decoding_is_transformers_greedy_search(both):
    """Listed layers, tokens one by one over pages; prompts of different lengths in one prefill; equal to `generate`."""
    import torch

    _, cfg, weights = both.model
    weights = params.unstack(weights)
    memory = jax.jit(lambda p, s: whisper.remember(p, s))(weights, jnp.asarray(both.states))
    prompts, table = [[81, 7, 9, 11], [81, 30]], np.arange(4).reshape(2, 2)
    state = params.init(whisper.state_spec(cfg, pages=4, page=16), jax.random.key(0), dtype=jnp.float32)
    step = jax.jit(lambda p, t, b, s: whisper.forward(p, t, cfg, memory, b, s))
    tokens, batch = ops.paged([(i, 0, p) for i, p in enumerate(prompts)], table, block=4)
    logits, state = step(weights, tokens, batch, state)
    logits = logits.reshape(2, 4, -1)[np.arange(2), [3, 1]]
    found = [list(p) for p in prompts]
    for _ in range(8):
        for row, best in zip(found, np.asarray(logits.argmax(-1)), strict=True):
            row.append(int(best))
        tokens, batch = ops.paged([(i, len(r) - 1, r[-1:]) for i, r in enumerate(found)], table)
        logits, state = step(weights, tokens, batch, state)
    for i, prompt in enumerate(prompts):
        want = both.oracle.generate(
            torch.tensor(both.features[i : i + 1]), decoder_input_ids=torch.tensor([prompt]), max_new_tokens=8,
            do_sample=False, suppress_tokens=None, begin_suppress_tokens=None, eos_token_id=None,
        )  # fmt: skip
        assert found[i][len(prompt) :] == want[0].tolist() and len(set(want[0].tolist())) > 2


def test_what_is_saved_is_what_was_loaded(both, tmp_path):
    """transformers' file and ours hold the same tensors; what the encoder or a caller gets wrong is said."""
    from safetensors.numpy import load_file

    models.save(both.model, tmp_path)
    want, found = (load_file(d / "model.safetensors") for d in (both.directory, tmp_path))
    assert want.keys() - {"proj_out.weight"} == found.keys()
    assert all((want[name] == x).all() for name, x in found.items())
    assert models.load(tmp_path, family=whisper).cfg == both.model.cfg
    with pytest.raises(ValueError, match=r"found features of shape \(2, 16, 20\); expected \[16, 40\]"):
        whisper.encode(both.model.params, jnp.asarray(both.features[..., :20]), both.model.cfg)
    with pytest.raises(models.ConfigError, match="found 'whisper', which writes down sounds"):
        models.load(tmp_path)
