"""Qwen3-Omni's thinker against transformers, every weight random: text, images, videos and sounds in one batch, float32."""

import json
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import suite
import tiny

pytest.importorskip("PIL", reason="extra `media`")

from fdel import models, ops, params  # noqa: E402
from fdel.media import frames, hearing, senses, sight, video  # noqa: E402

NAME = "qwen3_omni_moe"
IMAGE, VIDEO, AUDIO, SEE, SEEN, HEAR, HEARD = 120, 121, 122, 118, 119, 116, 117
FILE = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2,
        "size": {"shortest_edge": 256, "longest_edge": 2048}}  # fmt: skip
EXTRACTOR = {"feature_size": 16, "sampling_rate": 16000, "hop_length": 160, "n_fft": 400,
             "feature_extractor_type": "WhisperFeatureExtractor"}  # fmt: skip
ROWS = (("image", "sound", "video"), ("sound", "sound"), ())
SECONDS = (2.5, 1.0, 0.4)


def make(directory) -> SimpleNamespace:
    """A checkpoint, what the host makes of media, and the oracle's logits of it."""
    torch = pytest.importorskip("torch", reason="the oracle is transformers on torch (extra `test`)")
    oracle, rng = tiny.checkpoint(NAME, directory), np.random.default_rng(0)
    (directory / "preprocessor_config.json").write_text(json.dumps(FILE | EXTRACTOR))
    see = sight.read(directory)
    see = replace(see, video=replace(see.video, frame=replace(see.video.frame, token=VIDEO, pixels=(256, 2048))))
    pixels = lambda *shape: rng.integers(0, 256, (*shape, 3), np.uint8)
    items = {
        "image": iter([sight.prepare(see, pixels(16, 24))]),
        "video": iter([video.prepare(see.video, frames.Clip(pixels(4, 24, 16), tuple(range(4)), 2.0, 4))]),
        "sound": iter(
            [hearing.prepare(see.sound, rng.normal(size=int(n * 16000)).astype(np.float32) / 5) for n in SECONDS]
        ),
    }
    shown = [[next(items[kind]) for kind in row] for row in ROWS]
    around = {"image": (SEE, IMAGE, SEEN), "video": (SEE, VIDEO, SEEN), "sound": (HEAR, AUDIO, HEARD)}
    text = lambda n: rng.integers(3, 110, n).tolist()
    prompts = [[*text(2), *(t for kind in row for t in (*around[kind], *text(2)))] for row in ROWS]
    prompts[2] += text(9)
    rows = [sight.expand(see, *x) for x in zip(prompts, shown, strict=True)]
    lengths = np.array([len(r.tokens) for r in rows])
    pad = lambda values, fill: np.array([[*v, *[fill] * (max(lengths) - len(v))] for v in values])
    tokens, real = pad([r.tokens for r in rows], 0), np.arange(max(lengths)) < lengths[:, None]
    rotary = pad([r.rotary or [(i,) * 3 for i in range(len(r.tokens))] for r in rows], (0,) * 3)
    seen, heard, index = senses.gather(see, shown, pad([r.index for r in rows], -1))
    inputs = ops.Patches(*map(jnp.asarray, seen)), ops.Sounds(*map(jnp.asarray, heard))
    media = ops.Media(jnp.asarray(index), inputs=inputs)
    batch = replace(ops.packed(jnp.asarray(tokens), jnp.asarray(lengths)), media=media, rotary=jnp.asarray(rotary))
    theirs = given(shown, tokens, real)
    with torch.no_grad():
        logits = oracle(**theirs).logits.numpy()
    model = models.load(directory, dtype=jnp.float32)
    return SimpleNamespace(oracle=oracle, model=model, directory=directory, tokens=tokens, real=real, batch=batch,
                           theirs=theirs, logits=logits, index=index, rotary=rotary, see=see)  # fmt: skip


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return make(tmp_path_factory.mktemp(NAME))


def given(shown, tokens, real, **more):
    """Lay out what transformers takes."""
    import torch

    every = {k: [i for row, kinds in zip(shown, ROWS, strict=True) for i, kind in zip(row, kinds, strict=True) if kind == k]
             for k in ("image", "video", "sound")}  # fmt: skip
    grid = lambda items: torch.tensor(np.array([p.places.max(0) + 1 for p in items]))
    values = lambda items: torch.tensor(np.concatenate([p.patches for p in items]))
    whole = [s.features.swapaxes(0, 1).reshape(16, -1)[:, : s.lengths.sum()] for s in every["sound"]]
    most = max(x.shape[1] for x in whole)
    mask = np.array([np.arange(most) < x.shape[1] for x in whole])
    features = np.array([np.pad(x, ((0, 0), (0, most - x.shape[1]))) for x in whole])
    return dict(
        input_ids=torch.tensor(tokens), attention_mask=torch.tensor(real).long(),
        pixel_values=values(every["image"]), image_grid_thw=grid(every["image"]),
        pixel_values_videos=values(every["video"]), video_grid_thw=grid(every["video"]),
        video_second_per_grid=torch.tensor([1.0]), input_features=torch.tensor(features),
        feature_attention_mask=torch.tensor(mask).long(), **more,
    )  # fmt: skip


@cache
def whole(cfg):
    return jax.jit(lambda p, t, b: models.family(NAME).forward(p, t, cfg, b)[0])


@pytest.mark.slow
def test_logits_of_rows_that_show_and_play(case):
    import torch

    m = case.model
    got = np.asarray(whole(m.cfg)(m.params, jnp.asarray(case.tokens), case.batch))
    assert suite.error(got[case.real], case.logits[case.real]) < 2e-5
    positions, _ = case.oracle.thinker.model.get_rope_index(
        case.theirs["input_ids"], case.theirs["image_grid_thw"], case.theirs["video_grid_thw"],
        case.theirs["attention_mask"], False, case.theirs["feature_attention_mask"].sum(1), torch.tensor([1.0]),
    )  # fmt: skip
    np.testing.assert_array_equal(case.rotary[case.real], positions.permute(1, 2, 0).numpy()[case.real])


@pytest.mark.slow
def test_a_file_is_written_as_it_was(case, tmp_path):
    """Every tensor by name and byte, config.json by key; the parts that speak are left out."""
    from safetensors.numpy import load_file, save_file

    models.save(case.model, tmp_path)
    before, after = (load_file(d / "model.safetensors") for d in (case.directory, tmp_path))
    assert {k: v.tobytes() for k, v in before.items()} == {k: v.tobytes() for k, v in after.items()}
    found, kept = (json.loads((d / "config.json").read_bytes()) for d in (tmp_path, case.directory))
    inner = found.pop("thinker_config"), kept.pop("thinker_config")
    assert found == kept
    parts = ("text_config", "vision_config", "audio_config")
    assert all(inner[0][k] == v for k, v in inner[1].items() if k not in parts)
    for part in parts:
        kept = {k: v for k, v in inner[1][part].items() if k != "tie_word_embeddings"}
        assert {k: inner[0][part].get(k) for k in kept} == kept
    spoken = before | {"talker.model.norm.weight": np.ones(3, np.float32), "code2wav.x": np.ones(2, np.float32)}
    save_file(spoken, tmp_path / "model.safetensors")
    again = models.load(tmp_path, dtype=jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, again.params, case.model.params)


@pytest.mark.slow
@pytest.mark.matrix
def test_every_gradient_is_that_of_torch(case, tmp_path):
    """Into the language model and both towers."""
    import torch
    from safetensors.numpy import load_file

    m = case.model
    weight = np.random.default_rng(5).normal(size=case.logits.shape).astype(np.float32) * case.real[..., None]
    case.oracle.zero_grad()
    (case.oracle(**case.theirs).logits * torch.tensor(weight)).mean().backward()
    loss = lambda p: (m.family.forward(p, jnp.asarray(case.tokens), m.cfg, case.batch)[0] * weight).mean()
    params.save(m.family.spec(m.cfg), jax.jit(jax.grad(loss))(m.params), tmp_path / "ours")
    held = {n: p.data for n, p in case.oracle.named_parameters()}
    for p in case.oracle.parameters():
        p.data = p.grad
    case.oracle.save_pretrained(tmp_path / "theirs")
    for n, p in case.oracle.named_parameters():
        p.data = held[n]
    got, want = (load_file(tmp_path / d / "model.safetensors") for d in ("ours", "theirs"))
    assert set(got) == set(want)
    largest = max(np.abs(g).max() for g in want.values())
    for name, g in want.items():
        np.testing.assert_allclose(got[name], g, atol=2e-5 * largest, err_msg=name)
    assert all(np.abs(g).max() > 0 for n, g in want.items() if "audio_tower" in n)


@pytest.mark.slow
@pytest.mark.matrix
def test_chunks_that_cut_media_and_decode(case):
    """Two rows over pages, 8 tokens at a time, the last ones alone; media are encoded once, before."""
    family, cfg, weights = case.model
    weights = params.unstack(weights)
    values = jax.jit(lambda p, x: family.encode(p, x, cfg))(weights, case.batch.media.inputs)
    length, table = case.tokens.shape[1], np.arange(48).reshape(2, 24)
    state = params.init(family.state_spec(cfg, pages=48, page=4, rows=2), jax.random.key(0))
    run = jax.jit(lambda p, tokens, batch, state: family.forward(p, tokens, cfg, batch, state))
    got, start, rows = np.zeros((2, length, cfg.vocab), np.float32), 0, np.arange(2)
    whole = (length - 2) // 8
    for n in [8] * whole + [1] * (length - 8 * whole):
        new = [(i, start, case.tokens[i, start : start + n].tolist()) for i in rows]
        tokens, batch = ops.paged(new, table, block=n, size=2 * n)
        index = case.index[:2, start : start + n]
        index = np.where(index >= 0, index + rows[:, None] * values.shape[1], -1).reshape(-1)
        media = ops.Media(jnp.asarray(index), values.reshape(-1, *values.shape[2:]))
        rotary = jnp.asarray(case.rotary[:2, start : start + n].reshape(-1, 3))
        logits, state = run(weights, tokens, replace(batch, media=media, rotary=rotary), state)
        got[:, start : start + n] = np.asarray(logits).reshape(2, n, -1)
        start += n
    real = case.real[:2]
    assert start == length and suite.error(got[real], case.logits[:2][real]) < 2e-5


def test_shapes_and_what_is_refused():
    """Of entries: those of images, then those of sounds; of configs and features that do not fit."""
    family = models.family(NAME)
    values = json.loads(json.dumps(tiny.TINY[NAME].values))
    cfg = family.Config.from_hf(values)
    weights = params.abstract(family.spec(cfg))
    seen = ops.Patches(jnp.zeros((2, 1, 24, 96)), jnp.zeros((2, 1, 24, 3), int))
    heard = ops.Sounds(jnp.zeros((2, 3, 2, 16, 100)), jnp.zeros((2, 3, 2), int))
    shape = lambda *x: jax.eval_shape(lambda p, x: family.encode(p, x, cfg), weights, x[0] if len(x) == 1 else x).shape
    assert (shape(seen, heard), shape(heard)) == ((2, 6 + 3 * 26, 3, 64), (2, 78, 3, 64))
    with pytest.raises(ValueError, match="found chunks of 16 bins, 50 frames, expected 16, 100"):
        shape(replace(heard, features=heard.features[..., :50]))
    with pytest.raises(models.ConfigError, match="'thinker_config': found .*, expected an object"):
        family.Config.from_hf({"model_type": NAME})
    values["thinker_config"]["audio_config"]["n_window"] = 20
    with pytest.raises(models.ConfigError, match="n_window 20, .* expected 64, 49 to 52"):
        family.Config.from_hf(values)
