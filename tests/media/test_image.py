"""Images for towers: equal to transformers' image processors on pillow, and files that are no images."""

import io
import json
import zlib

import numpy as np
import pytest

PIL = pytest.importorskip("PIL.Image", reason="extra `media`")

from fdel.media import clip, image, pixtral, sight  # noqa: E402

SIZES = ((37, 53), (53, 31), (16, 16), (9, 12), (64, 7))
CROP = dict(crop_size=dict(height=16, width=16))
CLIPS = (
    dict(size=dict(shortest_edge=16)),
    dict(size=dict(shortest_edge=16), do_pad=True),
    dict(size=dict(height=16, width=16), do_center_crop=False),
    dict(size=dict(shortest_edge=11), resample=2),
    dict(size=dict(shortest_edge=21), image_mean=[0.5] * 3, do_rescale=False),
)
CONFIG = dict(model_type="llava", image_token_index=7, vision_config=dict(model_type="clip_vision_model", image_size=16,
              patch_size=4))  # fmt: skip
SEES = dict(model_type="mistral3", image_token_index=7, spatial_merge_size=2,
            vision_config=dict(model_type="pixtral", patch_size=4))  # fmt: skip
ENDS = dict(added_tokens=[dict(content="[IMG_BREAK]", id=8), dict(content="[IMG_END]", id=9)])


def rgb(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8)


def write(directory, config, processor, tokenizer=None):
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    if tokenizer:
        (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    return sight.read(directory)


@pytest.mark.parametrize("values", CLIPS)
def test_pixels_are_those_of_transformers_for_clip(values, tmp_path):
    """Of LLaVA's processor, bit for bit; its own file says how."""
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

    oracle = LlavaImageProcessorPil(**CROP | values)
    oracle.save_pretrained(tmp_path)
    processor = json.loads((tmp_path / "preprocessor_config.json").read_text())
    s = write(tmp_path, CONFIG, processor).settings
    for size in SIZES:
        want = oracle(PIL.fromarray(rgb(*size)), return_tensors="np")["pixel_values"][0]
        got = clip.pixels(s, rgb(*size)).transpose(2, 0, 1)
        assert got.dtype == want.dtype == np.float32
        np.testing.assert_array_equal(got, want)


def test_pixels_and_runs_are_those_of_transformers_for_pixtral(tmp_path):
    """Bit for bit, and as many tokens as its processor writes, rows and ends among them."""
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    oracle = PixtralImageProcessorPil(size=dict(longest_edge=40), patch_size=dict(height=8, width=8), do_pad=False)
    oracle.save_pretrained(tmp_path)
    processor = json.loads((tmp_path / "preprocessor_config.json").read_text())
    see = write(tmp_path, SEES, processor, ENDS)
    for size in SIZES:
        found = oracle(PIL.fromarray(rgb(*size)), return_tensors="np")
        want = found["pixel_values"][0]
        np.testing.assert_array_equal(pixtral.pixels(see.settings, rgb(*size)).transpose(2, 0, 1), want)
        picture = sight.prepare(see, rgb(*size))
        # What PixtralProcessor.replace_image_token writes; its file does not load without torchvision.
        height, width = (n // 8 for n in found["image_sizes"][0])
        assert list(picture.run) == (([7] * width + [8]) * height)[:-1] + [9]
        for patch, (_, row, column) in zip(picture.patches, picture.places, strict=True):
            cut = want[:, row * 4 : row * 4 + 4, column * 4 : column * 4 + 4]
            np.testing.assert_array_equal(patch.reshape(3, 4, 4), cut)
        squares = picture.places.reshape(-1, 4, 3)[..., 1:]
        assert (squares - squares[:, :1] == [[0, 0], [0, 1], [1, 0], [1, 1]]).all()
        assert len(squares) == picture.run.count(7) == see.count(len(picture.patches))


def test_placeholders_become_runs_and_entries_count_on(tmp_path):
    see = write(tmp_path, SEES, {}, ENDS)
    wide, tall = sight.prepare(see, rgb(8, 24)), sight.prepare(see, rgb(16, 8))
    assert wide.run == (7, 7, 7, 9) and tall.run == (7, 8, 7, 9)
    got = sight.expand(see, [1, 7, 2, 7, 3], [wide, tall])
    assert got.tokens == [1, 7, 7, 7, 9, 2, 7, 8, 7, 9, 3]
    assert got.index == [-1, 0, 1, 2, -1, -1, 3, -1, 4, -1, -1] and got.rotary is None
    with pytest.raises(ValueError, match=r"the prompt has 1 places for images \(token 7\), found 2 images"):
        sight.expand(see, [1, 7], [wide, tall])
    with pytest.raises(ValueError, match=r"found an image float64\[2, 2\], expected uint8\[height, width, 3\]"):
        sight.prepare(see, np.zeros((2, 2)))
    index = np.array([got.index, sight.expand(see, [7] + [4] * 7, [tall]).index])
    values, places, index = sight.gather(see, [[wide, tall], [tall]], index, images=3, patches=16)
    assert values.shape == (2, 3, 16, 48) and places.shape == (2, 3, 16, 3)
    assert index[0].tolist() == [-1, 0, 1, 2, -1, -1, 4, -1, 5, -1, -1] and index[1, :3].tolist() == [0, -1, 1]
    np.testing.assert_array_equal(values[0, 1, :8], tall.patches)
    assert (places[0, 1, 8:] == -1).all() and (places[:, 2] == -1).all() and not values[:, 2].any()
    with pytest.raises(ValueError, match="found rows of 2 images of 12 patches, expected at most 1 of 12"):
        sight.gather(see, [[wide, tall]], index[:1], images=1)


def test_turns_go_on_behind_a_picture(tmp_path):
    """A text after one goes on from one more than the greatest turn before."""
    see = write(tmp_path, SEES, {}, ENDS)
    turns = np.array([[0, 0, 0], [0, 0, 1], [0, 1, 0]], np.int32)
    picture = image.Picture(np.zeros((4, 48), np.float32), np.zeros((4, 3), np.int32), (7, 7, 7), turns)
    got = sight.expand(see, [1, 7, 2, 7, 3], [picture, picture])
    plain = lambda n: (n, n, n)
    assert got.rotary == [
        plain(0),
        (1, 1, 1),
        (1, 1, 2),
        (1, 2, 1),
        plain(3),
        (4, 4, 4),
        (4, 4, 5),
        (4, 5, 4),
        plain(6),
    ]


def test_what_a_file_says_is_understood_or_refused(tmp_path):
    with pytest.raises(ValueError, match=r"gives images of \(8, 8\), the tower takes 16 x 16"):
        write(tmp_path, CONFIG, {"crop_size": 8})
    with pytest.raises(ValueError, match="found {'do_flip': True}, which is not understood"):
        write(tmp_path, CONFIG, CROP | {"do_flip": True})
    with pytest.raises(ValueError, match=r"tokenizer.json has no \[IMG_BREAK\] and \[IMG_END\]"):
        write(tmp_path, SEES, {})
    full = write(tmp_path, CONFIG | {"vision_feature_select_strategy": "full"}, CROP)
    assert len(sight.prepare(full, rgb(9, 9)).run) == 17 and full.count(16) == 17
    (tmp_path / "preprocessor_config.json").rename(tmp_path / "x")
    assert sight.read(tmp_path) is None
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": CROP}))
    assert sight.read(tmp_path) == full
    assert write(tmp_path, {"model_type": "llama"}, CROP) is None


def encoded(form, array, **options):
    out = io.BytesIO()
    PIL.fromarray(array).save(out, form, **options)
    return out.getvalue()


def test_files_of_each_format_are_decoded():
    x = rgb(12, 9)
    for form, options in ("PNG", {}), ("BMP", {}), ("WEBP", {"lossless": True}):
        np.testing.assert_array_equal(image.decode(encoded(form, x, **options), pixels=200), x)
    flat = np.full((12, 9, 3), 77, np.uint8)
    for form in ("JPEG", "GIF"):
        assert np.abs(image.decode(encoded(form, flat), pixels=200).astype(int) - 77).max() <= 1
    clear = np.concatenate([x, np.zeros((12, 9, 1), np.uint8)], -1)
    assert (image.decode(encoded("PNG", clear), pixels=200) == 255).all()
    turned = PIL.Exif()
    turned[0x0112] = 6  # a quarter to the right
    np.testing.assert_array_equal(image.decode(encoded("PNG", x, exif=turned), pixels=200), np.rot90(x, -1))
    frames = [PIL.fromarray(np.full((4, 4, 3), v, np.uint8)) for v in (10, 200)]
    out = io.BytesIO()
    frames[0].save(out, "GIF", save_all=True, append_images=frames[1:])
    assert np.abs(image.decode(out.getvalue(), pixels=99).astype(int) - 10).max() <= 1


def test_thin_images_are_bounded():
    """By the side, and by what they are resized to: a processor makes the shorter side as long as it likes."""
    with pytest.raises(image.ImageError, match="has 1 x 65536 pixels, expected at most 65535 along a side; cut it"):
        image.decode(encoded("PNG", rgb(2**16, 1)), pixels=2**24)
    assert image.decode(encoded("PNG", rgb(2**16 - 1, 1)), pixels=2**24).shape == (2**16 - 1, 1, 3)
    thin = rgb(60_000, 1)
    with pytest.raises(image.ImageError, match="has 1 x 60000 pixels, which .* makes 34 x 2040000, expected at most"):
        image.resize(thin, *image.shortest(60_000, 1, 34))
    assert image.resize(thin, *image.shortest(60_000, 1, 4)).shape == (240_000, 4, 3)


def test_what_is_no_image_says_what_was_found():
    png = encoded("PNG", rgb(40, 40))
    head = b"IHDR" + (100_000).to_bytes(4, "big") * 2 + png[24:29]
    huge = png[:12] + head + zlib.crc32(head).to_bytes(4, "big") + png[33:]
    bad = [
        (b"", "found nothing, no image of a known format"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "found b.<svg xmlns=", ),
        (png[: len(png) // 2], "the file is damaged or not an image that can be read; it may be cut off$"),
        (encoded("JPEG", rgb(40, 40))[:300], "the file is damaged or not an image that can be read; it may be cut off$"),
        (png[:8], "no image of a known format|damaged"),
        (encoded("TIFF", rgb(4, 4)), "no image of a known format; expected PNG"),
        (huge, "the image has far more than 1600 pixels; make it smaller"),
        (encoded("PNG", rgb(41, 40)), "has 40 x 41 pixels, expected at most 1600; make it smaller"),
    ]  # fmt: skip
    for data, message in bad:
        with pytest.raises(image.ImageError, match=message):
            image.decode(data, pixels=1600)
    assert issubclass(image.ImageError, ValueError)
