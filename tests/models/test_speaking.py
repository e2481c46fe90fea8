"""What speaks in Qwen3-Omni against transformers, every weight random, float32: talker, code predictor, vocoder."""

import json
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel import models, ops, params, serve
from fdel.models import code2wav, qwen3_omni_talker
from tests.models.tiny import speaking as tiny

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """transformers' model and its checkpoint."""
    pytest.importorskip("torch", reason="the oracle is transformers on torch (extra `test`)")
    directory = tmp_path_factory.mktemp("speaking")
    return SimpleNamespace(oracle=tiny.make(directory), directory=directory)


@pytest.fixture(scope="module")
def vocoder(whole):
    return models.load(whole.directory, family=code2wav)


def codes(frames, rows=2):
    return np.random.default_rng(frames).integers(0, 64, (rows, frames, 4))


def test_samples_of_frames(whole, vocoder):
    """In one piece, and in pieces of 10 frames with 3 before them; 1e-5, of samples of which less than 5 % are cut off."""
    import torch

    found = codes(23)
    with torch.no_grad():
        given = torch.tensor(found).swapaxes(1, 2)
        want = whole.oracle.code2wav(given)[:, 0].numpy()
        pieces = whole.oracle.code2wav.chunked_decode(given, chunk_size=10, left_context_size=3)[:, 0].numpy()
    assert want.std() > 0.1 and (np.abs(want) == 1).mean() < 0.05
    _, cfg, weights = vocoder
    got = jax.jit(code2wav.decode, static_argnames="cfg")(weights, found, cfg)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, atol=1e-5)
    np.testing.assert_allclose(code2wav.waveform(weights, found, cfg, chunk=10, context=3), pieces, atol=1e-5)
    np.testing.assert_allclose(code2wav.waveform(weights, found, cfg), want, atol=1e-5)


def test_no_sample_hears_what_comes_later(vocoder):
    """Whatever stands behind a frame, the samples before it stay as they are to 1e-6."""
    _, cfg, weights = vocoder
    run = jax.jit(code2wav.decode, static_argnames="cfg")
    one, other = (run(weights, np.concatenate([codes(12), codes(n)[:, :8]], 1), cfg) for n in (8, 9))
    # The stages of two kernels' places cut off one step at their begin, so a sample comes up to 15 samples early.
    kept = 12 * cfg.samples - 15
    np.testing.assert_allclose(one[:, :kept], other[:, :kept], atol=1e-6)
    assert np.abs(one - other)[:, kept + 15 :].max() > 1e-3


@pytest.mark.matrix
def test_every_gradient_of_the_vocoder_is_that_of_torch(whole, vocoder, tmp_path):
    """Of a weighted sum of the samples, to 1e-4 of the largest."""
    import torch

    found = codes(9)
    _, cfg, weights = vocoder
    shape = jax.eval_shape(lambda p: code2wav.decode(p, found, cfg), weights).shape
    weight = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    whole.oracle.zero_grad()
    (whole.oracle.code2wav(torch.tensor(found).swapaxes(1, 2))[:, 0] * torch.tensor(weight)).sum().backward()
    want = {f"code2wav.{n}": p.grad.numpy() for n, p in whole.oracle.code2wav.named_parameters()}
    grads = jax.jit(jax.grad(lambda p: (code2wav.decode(p, found, cfg) * weight).sum()))(weights)
    same(grads, want, code2wav.spec(cfg), tmp_path)


@pytest.fixture(scope="module")
def talker(whole):
    return models.load(whole.directory, family=qwen3_omni_talker)


def embeddings(*shape):
    return np.random.default_rng(shape).standard_normal((*shape, 48)).astype(np.float32)


@pytest.mark.parametrize("turned", [False, True], ids=["positions", "three components"])
def test_logits_of_embeddings(whole, talker, turned):
    """A whole sequence; and two over pages, 5 embeddings at a time, then one by one; 2e-5 of the largest."""
    import torch

    family, cfg, weights = talker
    x, rotary = embeddings(2, 13), np.sort(np.random.default_rng(0).integers(0, 40, (2, 13, 3)), 1)
    where = torch.tensor(rotary).permute(2, 0, 1) if turned else None
    with torch.no_grad():
        want = whole.oracle.talker(inputs_embeds=torch.tensor(x), position_ids=where).logits.numpy()
    given = lambda a, b: jnp.asarray(rotary[:, a:b]) if turned else None
    batch = replace(ops.packed(jnp.zeros((2, 13), int)), rotary=given(0, 13))
    run = jax.jit(lambda p, x, batch, state=None: family.forward(p, x, cfg, batch, state))
    close = lambda got, want: np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max())
    close(run(weights, x, batch)[0], want)
    state = params.init(family.state_spec(cfg, pages=8, page=4), jax.random.key(0))
    for a, b in [(0, 5), (5, 10), (10, 11), (11, 12), (12, 13)]:
        n = b - a
        _, batch = ops.paged([(i, a, [0] * n) for i in range(2)], np.arange(8).reshape(2, 4), block=n)
        batch = replace(batch, rotary=given(a, b).reshape(-1, 3) if turned else None)
        logits, state = run(weights, x[:, a:b].reshape(2 * n, -1), batch, state)
        close(logits.reshape(2, n, -1), want[:, a:b])


def test_codes_of_a_frame(whole, talker):
    """Embeddings of frames to 1e-6; logits of the code predictor to 2e-5; the codes that it draws."""
    import torch

    family, cfg, weights = talker
    states, found, predictor = embeddings(5), codes(5, 1)[0], whole.oracle.talker.code_predictor
    given = torch.tensor(found)
    with torch.no_grad():
        first = whole.oracle.talker.get_input_embeddings()(given[:, 0])
        rest = [table(given[:, i + 1]) for i, table in enumerate(predictor.get_input_embeddings())]
        x = predictor.model(inputs_embeds=torch.stack([torch.tensor(states), first, *rest[:-1]], 1)).last_hidden_state
        logits = torch.stack([head(x[:, i + 1]) for i, head in enumerate(predictor.lm_head)], 1).numpy()
        start = torch.stack([torch.tensor(states), first], 1)
        drawn = predictor.generate(inputs_embeds=start, max_new_tokens=3, do_sample=False).numpy()
    np.testing.assert_allclose(family.frame(weights, found, cfg), (first + sum(rest)).numpy(), atol=1e-6)
    got = jax.jit(lambda p, *x: family.residual_logits(p, *x, cfg))(weights, states, found)
    np.testing.assert_allclose(got, logits, atol=2e-5 * np.abs(logits).max())
    got = jax.jit(lambda p, *x: family.predict_codes(p, *x, cfg))(weights, states, jnp.asarray(found[:, 0], jnp.int32))
    np.testing.assert_array_equal(got, np.concatenate([found[:, :1], drawn], 1))
    assert len(np.unique(drawn)) > 5
    again = jax.jit(lambda p, *x: family.residual_logits(p, *x, cfg))(weights, states, got)
    np.testing.assert_array_equal(again.argmax(-1), drawn)


PROMPT = [100, 105, 5, 7, 101, 9, 100, 106, 9, 20, 33, 101, 9, 100, 107, 9, 41, 17, 101, 9, 100, 106, 9, 60, 44, 101, 9,
          100, 107, 9]  # fmt: skip


def said(whole, prompt, frames, **given):
    """What transformers answers and says, greedily: the answer's tokens, frames of codes, samples."""
    import torch

    kept, run = [], whole.oracle.code2wav.chunked_decode
    whole.oracle.code2wav.chunked_decode = lambda codes, **more: kept.append(codes) or run(codes, **more)
    try:
        tokens, samples = whole.oracle.generate(
            input_ids=torch.tensor([prompt]), thinker_max_new_tokens=7, thinker_do_sample=False, talker_do_sample=False,
            talker_max_new_tokens=frames, thinker_eos_token_id=tiny.END, **given,
        )  # fmt: skip
    finally:
        del whole.oracle.code2wav.chunked_decode
    return tokens[0, len(prompt) :].tolist(), kept[0][0].T.numpy(), samples[0, 0].numpy()


def spoken(whole, talker, vocoder, *args, **options):
    thinker = models.load(whole.directory, dtype=jnp.float32)
    return serve.speak(thinker, talker, vocoder, *args, **options)


def test_an_answer_is_said_as_transformers_says_it(whole, talker, vocoder, monkeypatch):
    """The same codes, and samples to 1e-4: up to a limit of frames, and until the talker ends."""
    answer, frames, samples = said(whole, PROMPT, 12)
    got = spoken(whole, talker, vocoder, PROMPT, answer, max_frames=12)
    assert len(frames) == 11 and len(np.unique(frames[:, 0])) > 3
    np.testing.assert_array_equal(got[0], frames)
    np.testing.assert_allclose(got[1], samples, atol=1e-4)
    new = next(i for i in range(4, 11) if frames[i, 0] not in frames[:i, 0])
    end = int(frames[new, 0])
    monkeypatch.setattr(whole.oracle.config.talker_config, "codec_eos_token_id", end)
    _, frames, samples = said(whole, PROMPT, 12)
    ending = talker._replace(cfg=replace(talker.cfg, eos=end))
    got = spoken(whole, ending, vocoder, PROMPT, answer, max_frames=12)
    assert len(frames) == new
    np.testing.assert_array_equal(got[0], frames)
    np.testing.assert_allclose(got[1], samples, atol=1e-4)


@pytest.mark.matrix
def test_an_answer_to_an_image_and_a_sound(whole, talker, vocoder, monkeypatch):
    """With another voice: states of media stand for them, turned by three components, of the users' turns alone.

    transformers' talker looks for audio_config in its own config, which has none; here it gets the thinker's.
    """
    import torch

    pytest.importorskip("PIL", reason="extra `media`")
    from fdel.media import hearing, senses, sight
    from tests.models.test_omni import EXTRACTOR, FILE

    (whole.directory / "preprocessor_config.json").write_text(json.dumps(FILE | EXTRACTOR))
    see, rng = sight.read(whole.directory), np.random.default_rng(0)
    shown = [
        sight.prepare(see, rng.integers(0, 256, (16, 24, 3), np.uint8)),
        hearing.prepare(see.sound, rng.normal(size=20000).astype(np.float32) / 5),
    ]
    around = [tiny.SEE, tiny.IMAGE, tiny.SEEN, 12, tiny.HEAR, tiny.SOUND, tiny.HEARD]
    row = sight.expand(see, [*PROMPT[:10], *around, *PROMPT[10:]], shown)
    features = shown[1].features.swapaxes(0, 1).reshape(16, -1)[:, : shown[1].lengths.sum()]
    given = dict(
        attention_mask=torch.ones(1, len(row.tokens), dtype=torch.long), pixel_values=torch.tensor(shown[0].patches),
        image_grid_thw=torch.tensor(shown[0].places.max(0) + 1)[None], input_features=torch.tensor(features)[None],
        feature_attention_mask=torch.ones(1, features.shape[1], dtype=torch.long),
    )  # fmt: skip
    heard = whole.oracle.config.thinker_config.audio_config
    monkeypatch.setattr(whole.oracle.talker.config, "audio_config", heard, raising=False)
    answer, frames, samples = said(whole, row.tokens, 8, speaker="Chelsie", **given)
    n, rest = len(row.tokens), len(answer)
    seen, heard, index = senses.gather(see, [shown], np.array([[*row.index, *[-1] * rest]]))
    rotary = np.array([*row.rotary, *[[np.max(row.rotary) + 1 + i] * 3 for i in range(rest)]])
    media = ops.Media(
        jnp.asarray(index), inputs=(ops.Patches(*map(jnp.asarray, seen)), ops.Sounds(*map(jnp.asarray, heard)))
    )
    batch = replace(ops.packed(jnp.zeros((1, n + rest), int)), media=media, rotary=jnp.asarray(rotary)[None])
    got = spoken(whole, talker, vocoder, row.tokens, answer, speaker="chelsie", max_frames=8, batch=batch)
    np.testing.assert_array_equal(got[0], frames)
    np.testing.assert_allclose(got[1], samples, atol=1e-4)


@pytest.mark.matrix
def test_every_gradient_of_the_talker_is_that_of_torch(whole, talker, tmp_path):
    """Of its logits and the code predictor's, for frames that a thinker's states and text are added to; 1e-4."""
    import torch
    from safetensors.numpy import load_file

    family, cfg, weights = talker
    rng, found, o = np.random.default_rng(0), codes(7), whole.oracle.talker
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    text, states, first, residual = normal(2, 7, 64), normal(2, 7, 64), normal(2, 7, 1088), normal(14, 3, 64)

    def loss(p):
        act = ops.ACTIVATIONS[cfg.text.act]
        x = ops.mlp(text, p["from_text"], act) + ops.mlp(states, p["from_states"], act) + family.frame(p, found, cfg)
        h, _ = family.hidden(p, x, cfg)
        logits = ops.logits(h, family.head(p, cfg))
        others = family.residual_logits(p, h.reshape(14, -1), found.reshape(14, 4), cfg)
        return (logits * first).mean() + (others * residual).mean()

    given, tables = torch.tensor(found), o.code_predictor.get_input_embeddings()
    embed = [o.get_input_embeddings()(given[..., 0]), *(t(given[..., i + 1]) for i, t in enumerate(tables))]
    whole.oracle.zero_grad()
    h = o.model(
        inputs_embeds=o.text_projection(torch.tensor(text)) + o.hidden_projection(torch.tensor(states)) + sum(embed)
    ).last_hidden_state
    inputs = torch.stack([h, *embed[:-1]], 2).flatten(0, 1)
    x = o.code_predictor.model(inputs_embeds=inputs).last_hidden_state
    others = torch.stack([head(x[:, i + 1]) for i, head in enumerate(o.code_predictor.lm_head)], 1)
    want = (o.codec_head(h) * torch.tensor(first)).mean() + (others * torch.tensor(residual)).mean()
    want.backward()
    held = {n: p.data for n, p in o.named_parameters()}
    for p in o.parameters():
        p.data = p.grad
    whole.oracle.save_pretrained(tmp_path / "theirs")
    for n, p in o.named_parameters():
        p.data = held[n]
    value, grads = jax.jit(jax.value_and_grad(loss))(weights)
    assert abs(value - want.item()) < 1e-5
    theirs = {k: v for k, v in load_file(tmp_path / "theirs" / "model.safetensors").items() if family.rename(k, cfg)}
    same(grads, theirs, family.spec(cfg), tmp_path / "ours")


def same(grads, want, spec, directory):
    """Compare, by name; experts that no token chose have none, all else has some."""
    from safetensors.numpy import load_file

    params.save(spec, grads, directory)
    got = load_file(directory / "model.safetensors")
    assert set(got) == set(want)
    assert all(np.abs(g).max() > 0 for name, g in want.items() if ".experts." not in name)
    for name, g in want.items():
        np.testing.assert_allclose(got[name], g, atol=1e-4 * np.abs(g).max(), err_msg=name)


@pytest.mark.parametrize("family", [code2wav, qwen3_omni_talker])
def test_a_part_is_written_as_it_was(whole, family, tmp_path):
    """Every tensor of the part by byte, and config.json by key; it loads again."""
    from safetensors.numpy import load_file

    model = models.load(whole.directory, family=family)
    models.save(model, tmp_path)
    before, after = (load_file(d / "model.safetensors") for d in (whole.directory, tmp_path))
    mine = {k: v for k, v in before.items() if family.rename(k, model.cfg)}
    assert {k: v.tobytes() for k, v in mine.items()} == {k: v.tobytes() for k, v in after.items()}
    found, kept = (json.loads((d / "config.json").read_bytes()) for d in (tmp_path, whole.directory))
    assert contains(found, kept)
    again = models.load(tmp_path, family=family)
    assert again.cfg == model.cfg
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)


def contains(found, kept):
    if isinstance(kept, dict):
        return all(contains(found.get(k), v) for k, v in kept.items())
    return found == kept


def test_the_parts_are_the_whole_file(whole):
    """Each tensor of the checkpoint belongs to the thinker, which loads as before, or to one part that speaks."""
    from safetensors.numpy import load_file

    thinker = models.load(whole.directory, dtype=jnp.float32)
    parts = [thinker, *(models.load(whole.directory, family=f) for f in (qwen3_omni_talker, code2wav))]
    named = [{n for _, p in params.named_leaves(m.family.spec(m.cfg)) for n in params.hf_names(p)} for m in parts]
    every = set(load_file(whole.directory / "model.safetensors"))
    assert set.union(*named) == every and sum(map(len, named)) == len(every)


def family_of(values, **changed):
    return qwen3_omni_talker.Config.from_hf(values | {"talker_config": values["talker_config"] | changed})


def test_what_cannot_be_said():
    """A speaker, a thinker, a prompt and an answer that do not fit."""
    values = json.loads(json.dumps(tiny.VALUES))
    cfg = family_of(values)
    talker = models.Model(qwen3_omni_talker, cfg, None)
    vocoder = models.Model(code2wav, code2wav.Config.from_hf(values), None)
    module = models.family("qwen3_omni_moe")
    thinker = models.Model(module, module.Config.from_hf(values), None)
    say = lambda *args, talker=talker, **options: serve.speak(thinker, talker, vocoder, *args, **options)
    with pytest.raises(ValueError, match="speaker: found 'Nobody', expected one of chelsie, ethan"):
        say(PROMPT, [5, 101], speaker="Nobody")
    with pytest.raises(
        ValueError, match="found states of 64 numbers after 4 layers, expected 64 numbers, after layer 5"
    ):
        say(PROMPT, [5, 101], talker=talker._replace(cfg=replace(cfg, place=5)))
    with pytest.raises(ValueError, match="prompt: found no turn of token 107 behind 100 at its end"):
        say(PROMPT[:10], [5, 101])
    with pytest.raises(ValueError, match="answer: found less than two tokens"):
        say(PROMPT, [101])


def test_what_is_refused():
    """Configs and codes that do not fit, and a part as a family of its own."""
    values = json.loads(json.dumps(tiny.VALUES))
    cfg = code2wav.Config.from_hf(values)
    assert (cfg.samples, cfg.head_dim) == (48, 8)
    weights = params.abstract(code2wav.spec(cfg))
    with pytest.raises(ValueError, match="found 3 in each frame, expected 4"):
        jax.eval_shape(lambda p: code2wav.decode(p, jnp.zeros((1, 5, 3), int), cfg), weights)
    values["code2wav_config"]["upsample_rates"] = [4, 0]
    with pytest.raises(models.ConfigError, match=r"upsample_rates': found \[4, 0\], expected a list of numbers from 1"):
        code2wav.Config.from_hf(values)
    values = json.loads(json.dumps(tiny.VALUES))
    other = values["talker_config"]["code_predictor_config"]
    with pytest.raises(
        models.ConfigError, match=r"talker_config: found hidden sizes and code groups \(48, 4\) and \(48, 5\)"
    ):
        family_of(values, code_predictor_config=other | {"num_code_groups": 5})
    with pytest.raises(models.ConfigError, match=r"talker_config.code_predictor_config: .*layer_types"):
        family_of(values, code_predictor_config=other | {"layer_types": ["sliding_attention", "full_attention"]})
    with pytest.raises(
        models.ConfigError, match=r"speaker_id': found \{'ethan': 'x'\}, expected the token of each name"
    ):
        family_of(values, speaker_id={"ethan": "x"})
    with pytest.raises(models.ConfigError, match=r"talker_config.codec_start"):
        family_of(values, codec_start=3)
    with pytest.raises(models.ConfigError, match="'code2wav', a part that speaks; load it of a whole checkpoint"):
        models.family("code2wav")
    assert "code2wav" not in models.families()
