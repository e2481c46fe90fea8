"""Images of Qwen-VL and GLM against transformers' image processors, bit for bit, and turns against its get_rope_index."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("PIL", reason="pillow resizes")
from fdel.media import glm, qwen, sight

RNG = np.random.default_rng(0)
VISION = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
CONFIG = {"model_type": "qwen2_vl", "vision_config": VISION, "image_token_id": 9}
FILE = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 200, "max_pixels": 900}
SIZES = (16, 24), (5, 7), (4, 31), (40, 33), (200, 90), (300, 2), (12, 20)
OTHER = {"size": {"shortest_edge": 64, "longest_edge": 4096}, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.3, 0.2],
         "resample": 2, "rescale_factor": 0.01}  # fmt: skip


@pytest.mark.parametrize("more", [{}, OTHER, {"do_normalize": False}, {"do_rescale": False}], ids=str)
@pytest.mark.parametrize("media", [qwen, glm], ids=lambda m: m.__name__)
def test_patches_are_those_of_transformers(media, more):
    pytest.importorskip("torch", reason="the oracle is transformers on torch")
    from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    file = FILE | more if "size" not in more else {k: v for k, v in FILE.items() if "pixels" not in k} | more
    oracle = Qwen2VLImageProcessorPil
    if media is glm:  # which has but this name for the bounds
        oracle = Glm4vImageProcessorPil
        file = {"size": {"shortest_edge": 400, "longest_edge": 1800}} | {
            k: v for k, v in file.items() if "pixels" not in k
        }
    oracle, s = oracle(**file), media.read(CONFIG, file, 9)
    for height, width in SIZES:
        rgb = RNG.integers(0, 256, (height, width, 3), np.uint8)
        want = oracle(rgb, return_tensors="np", input_data_format="channels_last")
        picture = media.prepare(s, rgb)
        np.testing.assert_array_equal(picture.patches, want["pixel_values"])
        assert picture.patches.dtype == np.float32
        (frames, rows, columns), entries = want["image_grid_thw"][0].tolist(), len(picture.patches) // 4
        assert (picture.places.max(0) + 1).tolist() == [frames, rows, columns]
        assert picture.run == (9,) * entries and len(picture.turns) == entries


def test_places_name_where_a_patch_was():
    """A picture whose pixels say where they are: each patch has the pixels of its place."""
    rows, columns = 6, 8
    x = np.zeros((rows * 4, columns * 4, 3), np.float32)
    x[..., 0], x[..., 1] = np.arange(rows * 4)[:, None] // 4, np.arange(columns * 4) // 4
    s = qwen.read(CONFIG, FILE, 9)
    cut, at = qwen.patches(x, s).reshape(-1, 3, 2, 4, 4), qwen.places(1, rows, columns, 2)
    for channel in 0, 1:
        np.testing.assert_array_equal(
            cut[:, channel], np.broadcast_to(at[:, channel + 1, None, None, None], (48, 2, 4, 4))
        )
    assert (at[:4, 1:] == [[0, 0], [0, 1], [1, 0], [1, 1]]).all()  # of the first entry
    assert (qwen.places(2, 2, 4, 2)[8:, 0] == 1).all()


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v"])
def test_turns_are_those_of_get_rope_index(family):
    torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")
    import importlib

    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    models = {
        "qwen2_vl": "Qwen2VL",
        "qwen2_5_vl": "Qwen2_5_VL",
        "qwen3_vl": "Qwen3VL",
        "qwen3_5": "Qwen3_5",
        "glm4v": "Glm4v",
    }
    theirs = getattr(module, models[family] + "Model")
    config = SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2, tokens_per_second=2))
    model = SimpleNamespace(config=config)
    model.get_vision_position_ids = lambda *a, **k: theirs.get_vision_position_ids(model, *a, **k)
    seen = sight.Sight(family, family, 9, (9,), sight.KINDS[family].read(CONFIG, FILE, 9), 4)
    pictures = [sight.prepare(seen, RNG.integers(0, 256, (*size, 3), np.uint8)) for size in ((16, 32), (60, 8), (8, 8))]
    grids = torch.tensor([(p.places.max(0) + 1).tolist() for p in pictures])
    got = sight.expand(seen, [1, 2, 9, 3, 9, 4, 4, 9, 5, 6, 7], pictures)
    tokens = torch.tensor([got.tokens])
    kinds, mask = (tokens == 9).int(), torch.ones_like(tokens)
    want, delta = theirs.get_rope_index(model, tokens, kinds, grids, None, attention_mask=mask)
    np.testing.assert_array_equal(got.rotary, want[:, 0].T)
    assert np.max(got.rotary) + 1 - len(got.tokens) == delta
    assert [i for i in got.index if i >= 0] == list(range(sum(len(p.run) for p in pictures)))
    assert [t == 9 for t in got.tokens] == [i >= 0 for i in got.index]


@pytest.mark.parametrize("name", ["preprocessor_config.json", "processor_config.json"])
def test_a_directory_says_how_its_model_sees(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert sight.read(tmp_path) is None
    (tmp_path / name).write_text(json.dumps({"image_processor": FILE} if name.startswith("processor") else FILE))
    found = sight.read(tmp_path)
    assert (found.kind, found.placeholder, found.entries, found.count(24)) == ("qwen2_vl", 9, (9,), 6)
    assert found.settings == qwen.read(CONFIG, FILE, 9) and hash(found)


WRONG = [
    ({"patch_size": 14}, "'patch_size': found 14 in the image processor's file, 4 in the tower's"),
    ({"merge_size": 1}, "'merge_size': found 1"),
    ({"min_pixels": 1000}, "expected shortest_edge and longest_edge"),
    ({"size": {"height": 4, "width": 4}}, "expected shortest_edge and longest_edge"),
    ({"do_pad": True}, "found {'do_pad': True}, which is not understood"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_files_that_are_not_understood(change, message):
    with pytest.raises(ValueError, match=message):
        qwen.read(CONFIG, FILE | change, 9)


def test_images_that_do_not_fit():
    s = qwen.read(CONFIG, FILE, 9)
    for media in qwen, glm:
        with pytest.raises(ValueError, match="at most 200 times as long"):
            media.prepare(s, np.zeros((1, 201, 3), np.uint8))
    with pytest.raises(ValueError, match="10 x 16 pixels does not divide into squares of 8 x 8"):
        qwen.prepare(qwen.read(CONFIG, FILE | {"do_resize": False}, 9), np.zeros((10, 16, 3), np.uint8))
