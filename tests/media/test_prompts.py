"""Pixels and whole prompts are those of transformers' processors, where these change the text or cut images."""

import json

import numpy as np
import pytest

PIL = pytest.importorskip("PIL.Image", reason="extra `media`")
transformers = pytest.importorskip("transformers", reason="the oracle (extra `test`)")
tokenizers = pytest.importorskip("tokenizers", reason="extra `test`")

from fdel.media import clip, sight  # noqa: E402

SIZES = ((37, 53), (24, 24), (64, 7))
NAMES = ("<start_of_image>", "<end_of_image>", "<image_soft_token>")
TILES = (
    "<|START_OF_IMG|>",
    "<|END_OF_IMG|>",
    "<|IMG_PATCH|>",
    "<image>",
    "TILE_GLOBAL",
    *(f"TILE_{i}" for i in range(1, 7)),
)
CONFIG = dict(model_type="gemma3", mm_tokens_per_image=9, boi_token_index=261, eoi_token_index=262, image_token_index=263,
              vision_config=dict(model_type="siglip_vision_model", image_size=24, patch_size=4))  # fmt: skip


def rgb(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8)


@pytest.fixture(scope="module")
def tokenizer():
    """Of bytes, where newlines side by side are one token, as in Gemma's."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tok = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tok.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.add_tokens([tokenizers.AddedToken("\n" * n, special=False, normalized=False) for n in range(1, 6)])
    tok.add_special_tokens([*NAMES, *TILES])
    names = dict(zip(("boi_token", "eoi_token", "image_token"), NAMES, strict=True))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tok, extra_special_tokens=names, pad_token="!")


def write(directory, tokenizer, config, processor):
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    (directory / "tokenizer.json").write_text(tokenizer.backend_tokenizer.to_str())
    return sight.read(directory)


def test_pixels_and_prompts_are_those_of_transformers_for_gemma_3(tokenizer, tmp_path):
    """Bit for bit, newlines that melt with those of the text among them; entries stand for squares of four patches."""
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

    oracle = Gemma3ImageProcessorPil(size=dict(height=24, width=24))
    oracle.save_pretrained(tmp_path)
    see = write(tmp_path, tokenizer, CONFIG, json.loads((tmp_path / "preprocessor_config.json").read_text()))
    images, text = [rgb(*size) for size in SIZES], "a\n<start_of_image><start_of_image>\n\nb<start_of_image>"
    want = Gemma3Processor(oracle, tokenizer, image_seq_length=9)(images=[[*map(PIL.fromarray, images)]], text=[text])
    pictures = [sight.prepare(see, x) for x in images]
    got = sight.expand(see, tokenizer(sight.written(see, text))["input_ids"], pictures)
    assert got.tokens == want["input_ids"][0] and 259 in got.tokens  # four newlines
    assert [int(i >= 0) for i in got.index] == want["token_type_ids"][0]
    for x, picture, pixels in zip(images, pictures, want["pixel_values"], strict=True):
        np.testing.assert_array_equal(clip.pixels(see.settings.pixels, x).transpose(2, 0, 1), pixels)
        for values, (_, row, column) in zip(picture.patches, picture.places, strict=True):
            cut = pixels[:, row * 4 : row * 4 + 4, column * 4 : column * 4 + 4]
            np.testing.assert_array_equal(values.reshape(3, 4, 4), cut)
        squares = picture.places.reshape(9, 4, 3)[..., 1:]
        assert (squares // 2 == squares[:, :1] // 2).all() and see.count(36) == 9


def test_pixels_and_runs_are_those_of_transformers_for_gemma_4(tokenizer, tmp_path):
    """Bit for bit, of images of any shape; its whole processor does not load without torchvision."""
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    oracle = Gemma4ImageProcessorPil(patch_size=4, pooling_kernel_size=2, max_soft_tokens=70)
    oracle.save_pretrained(tmp_path)
    vision = dict(model_type="gemma4_vision", patch_size=4, pooling_kernel_size=2)
    config = dict(model_type="gemma4", image_token_id=263, boi_token_id=261, eoi_token_id=262, vision_config=vision)
    see = write(tmp_path, tokenizer, config, json.loads((tmp_path / "preprocessor_config.json").read_text()))
    for size in (*SIZES, (5, 200), (900, 11), (4, 300)):
        want = oracle(PIL.fromarray(rgb(*size)), return_tensors="np")
        picture, n = sight.prepare(see, rgb(*size)), int(want["num_soft_tokens_per_image"][0])
        assert picture.run == (261, *[263] * n, 262) and see.count(len(picture.patches)) == n
        theirs = {
            tuple(at): values for at, values in zip(want["image_position_ids"][0], want["pixel_values"][0], strict=True)
        }
        assert len(picture.patches) == 4 * n == len(theirs) - ((-1, -1) in theirs)
        for values, (_, row, column) in zip(picture.patches, picture.places, strict=True):
            np.testing.assert_array_equal(values, theirs[column, row])
        squares = picture.places.reshape(n, 4, 3)[..., 1:]
        assert (squares // 2 == squares[:, :1] // 2).all()
    with pytest.raises(ValueError, match="found patch_size 16, pooling_kernel_size 2, do_resize True; expected"):
        write(tmp_path, tokenizer, config, dict(patch_size=16, pooling_kernel_size=2))


@pytest.mark.parametrize("tiles", [dict(max_patches=1), dict(max_patches=6, min_patches=2)])
def test_pixels_and_prompts_are_those_of_transformers_for_aya(tokenizer, tmp_path, tiles):
    """Bit for bit, tile by tile, of images of seven shapes; as many are cut otherwise if the shape's rule is another."""
    from transformers.models.aya_vision.processing_aya_vision import AyaVisionProcessor
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    oracle = GotOcr2ImageProcessorPil(size=dict(height=24, width=24), **tiles)
    oracle.save_pretrained(tmp_path)
    ids = tokenizer.convert_tokens_to_ids([*TILES])
    config = CONFIG | dict(model_type="aya_vision", image_token_index=ids[2])
    see = write(tmp_path, tokenizer, config, json.loads((tmp_path / "preprocessor_config.json").read_text()))
    images = [rgb(*size) for size in (*SIZES, (48, 48), (20, 45), (10, 30), (100, 60))]
    text = "a<image>" * len(images)
    whole = AyaVisionProcessor(oracle, tokenizer, patch_size=4, img_size=24, downsample_factor=2)
    want = whole(images=[*map(PIL.fromarray, images)], text=[text])
    pictures = [sight.prepare(see, x) for x in images]
    got = sight.expand(see, tokenizer(sight.written(see, text))["input_ids"], pictures)
    assert got.tokens == want["input_ids"][0]
    found = np.concatenate([p.patches for p in pictures]).reshape(-1, 36, 3, 4, 4)
    places = np.concatenate([p.places for p in pictures]).reshape(-1, 36, 3)
    assert len(found) == len(want["pixel_values"])
    for values, at, pixels in zip(found, places, want["pixel_values"], strict=True):
        for one, (_, row, column) in zip(values, at, strict=True):
            np.testing.assert_array_equal(one, pixels[:, row * 4 : row * 4 + 4, column * 4 : column * 4 + 4])
    with pytest.raises(ValueError, match="tokenizer.json has no TILE_7, TILE_8 among its added tokens"):
        write(tmp_path, tokenizer, config, dict(size=dict(height=24, width=24), max_patches=8))


def test_crops_are_refused(tokenizer, tmp_path):
    size = dict(size=dict(height=24, width=24), pan_and_scan_min_crop_size=256)
    assert write(tmp_path, tokenizer, CONFIG, size | {"do_pan_and_scan": False}) is not None
    with pytest.raises(ValueError, match="found .*.do_pan_and_scan.: True.*not understood"):
        write(tmp_path, tokenizer, CONFIG, size | {"do_pan_and_scan": True})
    with pytest.raises(ValueError, match=r"no added token 5, which begins an image \(boi_token_index\)"):
        write(tmp_path, tokenizer, CONFIG | {"boi_token_index": 5}, size)
