"""Images for Kimi-VL against transformers' processor of Kimi-K2.5, whose function for images is the same. It needs
torchvision, which CI lacks: what it said of sizes is written down here (transformers 5.23, torchvision 0.29).
"""

import json

import numpy as np
import pytest

pytest.importorskip("PIL", reason="extra `media`")

from fdel.media import moonvit, sight  # noqa: E402

# Of an image (height, width, patch_size, merge_size, max_patches): the size it is shrunk to.
FROZEN = [
    ((480, 640, 14, 2, 4096), (480, 640)), ((3000, 2000, 14, 2, 4096), (1101, 734)), ((37, 53, 4, 2, 24), (16, 24)),
    ((5, 3000, 14, 2, 4096), (5, 3000)), ((1200, 1700, 14, 2, 4096), (757, 1072)), ((1, 4598, 4, 2, 24), (1, 664)),
]  # fmt: skip
CONFIG = dict(
    model_type="kimi_vl", media_placeholder_token_id=7, vision_config=dict(model_type="moonvit", patch_size=4)
)
PROCESSOR = dict(patch_size=4, pad_input=True, in_token_limit=24, num_pooled_tokens=1024)


def see(directory, **change):
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "preprocessor_config.json").write_text(json.dumps(PROCESSOR | change))
    return sight.read(directory)


@pytest.mark.parametrize(("case", "size"), FROZEN)
def test_sizes_are_those_of_transformers(case, size):
    height, width, patch, side, most = case
    assert moonvit.sized(moonvit.Settings(7, patch, side, most), height, width) == size


def test_an_image_is_padded_with_black_and_cut_into_squares(tmp_path):
    """Values 2 x / 255 - 1 (to 1e-6), and an entry of each square of patches."""
    s, rgb = see(tmp_path), np.random.default_rng(0).integers(0, 256, (13, 21, 3)).astype(np.uint8)
    picture = sight.prepare(s, rgb)
    board = np.zeros((16, 24, 3))
    board[:13, :21] = rgb
    for patch, (frame, row, column) in zip(picture.patches, picture.places, strict=True):
        want = board[row * 4 : row * 4 + 4, column * 4 : column * 4 + 4].transpose(2, 0, 1) / 127.5 - 1
        np.testing.assert_allclose(patch.reshape(3, 4, 4), want, atol=1e-6)
        assert frame == 0
    squares = picture.places.reshape(-1, 4, 3)[..., 1:]
    assert (squares - squares[:, :1] == [[0, 0], [0, 1], [1, 0], [1, 1]]).all()
    assert picture.run == (7,) * 6 and s.count(24) == 6
    assert sight.expand(s, [1, 7, 2], [picture]).tokens == [1, *[7] * 6, 2]


def test_what_is_refused(tmp_path):
    for change, message in [
        (dict(pad_input=False), "found pad_input false"), (dict(mystery=3), "which is not understood"),
        (dict(patch_size=14), "'patch_size': found 14 in the image processor's file, 4 in the tower's"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=message):
            see(tmp_path, **change)
    with pytest.raises(ValueError, match="an image of 8 x 4000 pixels: expected sides of less than 2048"):
        sight.prepare(see(tmp_path, in_token_limit=4096), np.zeros((3, 4000, 3), np.uint8))
