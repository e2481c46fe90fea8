"""Images for Aya Vision: cut into tiles of one size, the whole image as the last one, tokens between them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fdel.media import clip, image
from fdel.media.image import Picture

# Keys of processor_config.json, and the tokens that they name by default.
NAMES = {"start_of_img_token": "<|START_OF_IMG|>", "end_of_img_token": "<|END_OF_IMG|>",
         "tile_global_token": "TILE_GLOBAL", "image_token": "<image>"}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """What is done to a tile, how many tiles an image has, and the tokens around the entries of each."""

    pixels: clip.Settings
    placeholder: int
    start: int
    end: int
    whole: int
    tiles: tuple[int, ...]  # the tokens of tiles but the whole image's
    side: int  # patches along the side of the square that becomes one entry
    least: int = 1
    most: int = 1

    merge = property(lambda self: self.side**2)
    entries = property(lambda self: (self.pixels.token,))


def read(config: Mapping[str, Any], processor: Mapping[str, Any], token: int) -> Settings:
    """Read the settings from config.json and preprocessor_config.json; ValueError for what is not understood.

    Whatever the file says, images are cut into tiles: transformers' AyaVisionProcessor has its image processor do so. The
    tokens around entries are the tokenizer's; those of tiles are called TILE_1, TILE_2 and so on.
    """
    own = ("crop_to_patches", "min_patches", "max_patches")
    mean, std = clip.CLIP_MEAN, clip.CLIP_STD
    bare = {k: v for k, v in processor.items() if k not in own and v is not None}
    size = {"height": 384, "width": 384}
    pixels = clip.read(config, {"image_mean": mean, "image_std": std, "size": size} | bare, token)
    least, most = (processor.get(k, n) for k, n in (("min_patches", 1), ("max_patches", 12)))
    ids = config["tokens"]
    found = {name: ids.get(key, ids.get(name)) for key, name in NAMES.items()}
    tiles = [f"TILE_{i + 1}" for i in range(most if most > 1 else 0)]
    lacks = [name for name, i in [*found.items(), *((t, ids.get(t)) for t in tiles)] if i is None]
    if lacks:
        raise ValueError(
            f"tokenizer.json has no {', '.join(lacks[:3])} among its added tokens, which stand around tiles"
        )
    start, end, whole, placeholder = found.values()
    side = int(config.get("downsample_factor", 2))
    return Settings(pixels, placeholder, start, end, whole, tuple(ids[t] for t in tiles), side, least, most)


def grid(s: Settings, height: int, width: int) -> tuple[int, int]:
    """Choose how many rows and columns of tiles an image gets: of those whose shape is nearest to its own.

    Of several that are as near the later is taken, in the order of their number and width, as long as the image has more
    than half of their pixels.
    """
    best, nearest, (high, wide) = (1, 1), float("inf"), s.pixels.size or (1, 1)
    numbers = range(1, s.most + 1)
    for w, h in sorted(
        ((w, h) for w in numbers for h in numbers if s.least <= w * h <= s.most), key=lambda g: g[0] * g[1]
    ):
        far = abs(width / height - w / h)
        if far < nearest or (far == nearest and height * width > 0.5 * high * wide * w * h):
            best, nearest = (h, w), far
    return best


def tiles(s: Settings, rgb: np.ndarray) -> list[np.ndarray]:
    """Cut an image into tiles, the whole image the last of several: uint8[height width 3] each."""
    rows, columns = grid(s, *rgb.shape[:2]) if s.most > 1 else (1, 1)
    height, width = s.pixels.size or rgb.shape[:2]
    large = image.resize(rgb, rows * height, columns * width, s.pixels.resample)
    found = [part for row in np.split(large, rows) for part in np.split(row, columns, 1)]
    return found if len(found) == 1 else [*found, rgb]


def prepare(s: Settings, rgb: np.ndarray) -> Picture:
    """Prepare an image uint8[H W 3] for the tower: the patches of an entry stand one after the other, tile by tile."""
    cut = [image.patches(clip.pixels(s.pixels, t), s.pixels.patch, s.side) for t in tiles(s, rgb)]
    places = [at + np.array([i, 0, 0], at.dtype) for i, (_, at) in enumerate(cut)]
    each = s.entries * (len(cut[0][0]) // s.merge)
    run = [t for tile in [*s.tiles[: len(cut) - 1], s.whole] for t in (tile, *each)]
    return Picture(np.concatenate([x for x, _ in cut]), np.concatenate(places), (s.start, *run, s.end))
