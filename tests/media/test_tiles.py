"""Tiles of images against transformers' Llama 4 processor. It needs torchvision, which CI lacks: what it said of sizes is
written down here (transformers 5.23, torchvision 0.29), and its values are computed with torch as it does.
"""

import json

import numpy as np
import pytest

pytest.importorskip("PIL", reason="extra `media`")

from fdel.media import sight, tiles  # noqa: E402

# Of an image (height, width, max_patches, resize_to_max_canvas): aspect_ratios, and the size on the canvas.
FROZEN = [
    ((336, 336, 16, False), (1, 1), (336, 336)), ((20, 30, 16, False), (1, 1), (224, 336)),
    ((400, 300, 16, False), (2, 1), (400, 300)), ((1000, 1500, 16, False), (3, 5), (1000, 1500)),
    ((500, 333, 16, False), (2, 1), (500, 333)), ((700, 700, 5, False), (2, 2), (672, 672)),
    ((3000, 200, 16, False), (9, 1), (3000, 200)), ((337, 1009, 4, False), (1, 3), (336, 1006)),
    ((480, 640, 16, True), (3, 4), (1008, 1344)), ((100, 90, 6, True), (3, 2), (746, 672)),
    ((2000, 2000, 16, True), (4, 4), (1344, 1344)), ((333, 500, 1, False), (1, 1), (223, 336)),
]  # fmt: skip
VISION = dict(model_type="llama4_vision_model", image_size=16, patch_size=4)
CONFIG = dict(model_type="llama4", image_token_index=7, vision_config=VISION)
PROCESSOR = dict(size=dict(height=16, width=16), max_patches=4, image_processor_type="Llama4ImageProcessorFast")
NAMES = {f"<|{name}|>": 20 + i for i, name in enumerate(tiles.TOKENS)}


def see(directory, processor=PROCESSOR, names=NAMES, config=CONFIG):
    added = [dict(content=text, id=i) for text, i in names.items()]
    for file, d in (("config", config), ("preprocessor_config", processor), ("tokenizer", dict(added_tokens=added))):
        (directory / f"{file}.json").write_text(json.dumps(d))
    return sight.read(directory)


def rgb(height, width):
    return np.random.default_rng(height).integers(0, 256, (height, width, 3)).astype(np.uint8)


@pytest.mark.parametrize(("case", "ratio", "size"), FROZEN)
def test_canvases_are_those_of_transformers(case, ratio, size):
    height, width, most, largest = case
    s = tiles.Settings(7, *range(20, 25), 336, 14, 2, most, largest)
    assert tiles.canvas(s, height, width) == ratio and tiles.fitted(s, height, width, *ratio) == size


@pytest.mark.parametrize("size", [(16, 16), (13, 29), (33, 17), (70, 40)])
def test_tiles_are_those_of_torch(tmp_path, size):
    """Padded, cut, with the whole image behind, in bfloat16: where nothing is resized bit for bit, else to 2 of 255 levels,
    by which pillow's bilinear filter differs from torch's. Tokens as transformers writes them.
    """
    torch = pytest.importorskip("torch", reason="extra `test`")
    s, x = see(tmp_path), rgb(*size)
    (rows, columns), t = tiles.canvas(s.settings, *size), torch.tensor(x).permute(2, 0, 1)[None]
    resize = lambda *to: torch.nn.functional.interpolate(t, size=to, mode="bilinear", antialias=True)
    fitted = tiles.fitted(s.settings, *size, rows, columns)
    board = torch.zeros(1, 3, 16 * rows, 16 * columns, dtype=torch.uint8)
    board[..., : fitted[0], : fitted[1]] = resize(*fitted)
    want = board.reshape(3, rows, 16, columns, 16).permute(1, 3, 0, 2, 4).reshape(-1, 3, 16, 16)
    want = torch.cat([want, resize(16, 16)]) if rows * columns > 1 else want
    half = torch.full((3, 1, 1), 0.5, dtype=torch.bfloat16)
    want = ((want.to(torch.bfloat16) * (1 / 255)).sub_(half).div_(half)).float().numpy()
    got, ratio = tiles.pixels(s.settings, x)
    assert ratio == (rows, columns) and got.shape[0] == len(want)
    np.testing.assert_allclose(got.transpose(0, 3, 1, 2), want, atol=2 / 127)
    if fitted == size:
        np.testing.assert_array_equal(got.transpose(0, 3, 1, 2)[: rows * columns], want[: rows * columns])
    picture = sight.prepare(s, x)
    for patch, (tile, row, column) in zip(picture.patches, picture.places, strict=True):
        cut = got[tile, row * 4 : row * 4 + 4, column * 4 : column * 4 + 4].transpose(2, 0, 1)
        np.testing.assert_array_equal(patch.reshape(3, 4, 4), cut)
    processor = pytest.importorskip("transformers.models.llama4.processing_llama4").Llama4Processor
    text = processor._prompt_split_image(None, ratio, 4)
    for name, i in (NAMES | {"<|patch|>": 7}).items():
        text = text.replace(name, f"{i} ")
    assert picture.run == tuple(map(int, text.split()))
    assert picture.run.count(7) == s.count(len(picture.patches)) == 4 * len(got)


def test_a_placeholder_becomes_the_run_of_tiles(tmp_path):
    s = see(tmp_path)
    one, two = sight.prepare(s, rgb(16, 16)), sight.prepare(s, rgb(32, 16))
    got = sight.expand(s, [1, 23, 2, 23], [one, two])
    assert got.tokens == [1, 20, 23, *[7] * 4, 24, 2, 20, *([7] * 4 + [22]) * 2, 23, *[7] * 4, 24]
    assert [i for i in got.index if i >= 0] == list(range(16)) and got.rotary is None
    assert (two.places[:, 0] == np.repeat(np.arange(3), 16)).all()
    squares = two.places.reshape(-1, 4, 3)[..., 1:]
    assert (squares - squares[:, :1] == [[0, 0], [0, 1], [1, 0], [1, 1]]).all()


def test_what_is_refused(tmp_path):
    for change, message in [
        (dict(do_resize=False), "found do_resize false"), (dict(size=dict(height=14, width=14)), "the tower takes 16 x 16"),
        (dict(mystery=3), "found {'mystery': 3}, which is not understood"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=message):
            see(tmp_path, PROCESSOR | change)
    with pytest.raises(ValueError, match=r"tokenizer.json has no <\|image_end\|> among its added tokens"):
        see(tmp_path, names={k: v for k, v in NAMES.items() if k != "<|image_end|>"})
