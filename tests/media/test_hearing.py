"""Sounds of Qwen3-Omni: features, tokens and turns; the oracle is transformers' feature extractor, processor and model."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("PIL", reason="pillow resizes")
from fdel.media import frames, hearing, image, qwen, senses, sight, sound, video

RNG = np.random.default_rng(0)
VISION = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
THINKER = {"model_type": "qwen3_omni_moe_thinker", "vision_config": VISION, "audio_config": {"num_mel_bins": 128},
           "image_token_id": 9, "video_token_id": 8, "audio_token_id": 7, "audio_start_token_id": 5,
           "audio_end_token_id": 6, "position_id_per_seconds": 13}  # fmt: skip
FILE = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 64, "max_pixels": 2048,
        "feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 128, "sampling_rate": 16000,
        "hop_length": 160, "n_fft": 400, "chunk_length": 300, "n_samples": 4800000, "nb_max_frames": 30000,
        "padding_side": "right", "padding_value": 0.0, "return_attention_mask": True, "dither": 0.0}  # fmt: skip
SOUND = hearing.Settings(7, marks=(5, 6))


def noise(seconds: float) -> np.ndarray:
    return RNG.normal(size=int(seconds * 16000)).astype(np.float32) / 5


def test_files_say_how_a_model_hears(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_omni_moe", "thinker_config": THINKER}))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(FILE))
    found = sight.read(tmp_path)
    assert found.sound == SOUND and found.entries == (9, 8, 7) and found.placeholder == 9 and hash(found)
    assert (found.video.speed, found.video.steady, found.video.marks) == (13.0, True, ())
    assert found.video.frame.pixels == (128 * 32 * 32, 768 * 32 * 32)  # its processor's, whatever the file says
    with pytest.raises(ValueError, match="'hop_length': found 80 in the feature extractor's file, expected 160"):
        hearing.read(THINKER, {"hop_length": 80})


@pytest.mark.parametrize("seconds", [0.31, 1.0, 2.57])
def test_features_and_counts_are_those_of_transformers(seconds):
    """1e-4: of transformers with torch, which computes in float32 (see `sound.log_mel`)."""
    pytest.importorskip("torch", reason="the oracle is transformers on torch")
    from transformers import WhisperFeatureExtractor
    from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import _get_feat_extract_output_lengths

    x = noise(seconds)
    want = WhisperFeatureExtractor(feature_size=128)(
        x, sampling_rate=16000, padding=True, truncation=False, return_attention_mask=True, return_tensors="np"
    )
    got = hearing.prepare(SOUND, x)
    length = int(want["attention_mask"].sum())
    assert got.lengths.sum() == length and len(got.run) == _get_feat_extract_output_lengths(length)
    mel = got.features.swapaxes(0, 1).reshape(128, -1)
    np.testing.assert_allclose(mel[:, :length], want["input_features"][0][:, :length], atol=1e-4)
    assert not mel[:, length:].any()


def film(count: int, fps: float) -> image.Picture:
    """A video of 16 x 24 pixels, six entries for each two frames."""
    s = video.Settings(qwen.Settings(8, 4, 2, 2, None), fps=fps, speed=13.0, steady=True, placeholder=8)
    pixels = RNG.integers(0, 256, (count, 16, 24, 3), np.uint8)
    return video.prepare(s, frames.Clip(pixels, tuple(range(count)), fps, count))


@pytest.mark.parametrize(("count", "fps", "seconds"), [(6, 2.0, 2.2), (4, 1.0, 5.1), (6, 1.0, 1.0)])
def test_a_video_and_its_sound_stand_in_the_order_of_their_times(count, fps, seconds):
    """Tokens against the processor, turns against get_rope_index."""
    torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")
    from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as modeling
    from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import Qwen3OmniMoeProcessor

    seen, heard = film(count, fps), hearing.prepare(SOUND, noise(seconds))
    both = hearing.together(SOUND, seen, heard)
    grid, step = torch.tensor([(seen.places.max(0) + 1).tolist()]), 2 / fps
    words = SimpleNamespace(audio_bos_token="5", audio_eos_token="6", video_token="8", audio_token="7",
                            video_processor=SimpleNamespace(merge_size=2))  # fmt: skip
    text = Qwen3OmniMoeProcessor.replace_video_with_audio_token(
        words, {"video_grid_thw": grid, "video_second_per_grid": [step]}, 0, {"num_audio_tokens": [len(heard.run)]}, 0,
        position_id_per_seconds=13,
    )  # fmt: skip
    assert both.run == tuple(map(int, text))
    s = video.Settings(qwen.Settings(8, 4, 2, 2, None), placeholder=8)
    see = sight.Sight("", "qwen2_vl", 9, (9, 8, 7), None, 4, video=s, sound=SOUND)
    got = sight.expand(see, [1, 2, 3, 8, 4, 1], [both])
    theirs = modeling.Qwen3OmniMoePreTrainedModelForConditionalGeneration
    ids = {k: v for k, v in THINKER.items() if k.endswith(("_id", "seconds"))}
    audio = SimpleNamespace(n_window=50)
    model = SimpleNamespace(
        spatial_merge_size=2, config=SimpleNamespace(**ids, vision_start_token_id=3, audio_config=audio)
    )
    model.get_llm_pos_ids_for_vision = lambda *a: theirs.get_llm_pos_ids_for_vision(model, *a)
    tokens, length = torch.tensor([got.tokens]), torch.tensor([int(heard.lengths.sum())])
    given = tokens, None, grid, torch.ones_like(tokens), True, length, torch.tensor([step])
    want, _ = theirs.get_rope_index(model, *given)
    np.testing.assert_array_equal(got.rotary, want[:, 0].T)
    (values, _), (features, lengths), index = senses.gather(see, [[both]], np.array([got.index]))
    assert values.shape[1] == count // 2 and features.shape[1] == 1 and lengths.sum() == length
    of = {t: [i for i, token in zip(index[0], got.tokens, strict=True) if token == t] for t in (8, 7)}
    assert of[8] == list(range(len(seen.run)))
    assert of[7] == list(range(len(seen.run), len(seen.run) + len(heard.run)))


def test_what_is_refused():
    with pytest.raises(ValueError, match="found 100 samples, expected at least 400"):
        hearing.prepare(SOUND, np.zeros(100, np.float32))
    with pytest.raises(ValueError, match="expected a model whose sounds stand in videos"):
        hearing.together(hearing.Settings(7), film(2, 1.0), hearing.prepare(SOUND, noise(1)))
    see = sight.Sight("", "qwen2_vl", 9, (9, 7), None, 4, sound=SOUND)
    with pytest.raises(ValueError, match="place 0 of the prompt .* is of another kind"):
        sight.expand(see, [9], [hearing.prepare(SOUND, noise(1))])
    with pytest.raises(ValueError, match="found rows of 1 sounds of 1 chunks, expected at most 0 of 1"):
        senses.gather(see, [[hearing.prepare(SOUND, noise(1))]], np.full((1, 4), -1), sounds=0)


def test_seconds_are_refused_by_their_tokens_before_anything_is_decoded(monkeypatch):
    """The longest sound of so many tokens has no more, and one sample more has: of parts of a chunk, and of several."""
    count = lambda samples: len(hearing.prepare(SOUND, np.zeros(samples, np.float32)).run)
    for tokens in (1, 2, 12, 13, 14, 26, 30):
        samples = round(hearing.longest(SOUND, tokens) * 16000)
        assert count(samples) <= tokens < count(samples + 1)
    assert hearing.longest(SOUND, -5) == hearing.longest(SOUND, 0) < 0.025
    see, data = sight.Sight("", "qwen2_vl", 9, (9, 7), None, 4, sound=SOUND), sound.encode(noise(9), 16000)
    monkeypatch.setattr(sound, "samples", None)  # what reads them
    with pytest.raises(ValueError, match="found 9.00 seconds of sound, expected more than 0 and at most 3.00994"):
        senses.prepare(see, "sounds", data, senses.Most(1, 1, 60.0, tokens=39), list)
