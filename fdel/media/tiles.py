"""Images cut into tiles of one size, as Llama 4 takes them: on the canvas of tiles that fits best, and whole besides."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fdel.media import image
from fdel.media.clip import pair, refuse
from fdel.media.image import Picture

DEFAULTS = {
    "size": {"height": 336, "width": 336}, "max_patches": 16, "resize_to_max_canvas": False, "resample": 2,
    "image_mean": (0.5,) * 3, "image_std": (0.5,) * 3, "do_resize": True, "do_rescale": True, "do_normalize": True,
    "rescale_factor": 1 / 255,
}  # fmt: skip
TOKENS = ("image_start", "tile_x_separator", "tile_y_separator", "image", "image_end")


@dataclass(frozen=True)
class Settings:
    """What is done to an image. `tile` is a tile's side in pixels, `most` how many a canvas may have."""

    token: int  # of an entry
    start: int
    column: int  # between tiles of a row
    row: int  # behind a row
    placeholder: int  # before the whole image
    end: int
    tile: int
    patch: int  # pixels along a side
    side: int  # patches along the side of the square that becomes one entry
    most: int = 16
    largest: bool = False  # fill the largest canvas
    resample: int = 2
    factor: float | None = 1 / 255
    mean: tuple[float, ...] | None = (0.5,) * 3
    std: tuple[float, ...] = (0.5,) * 3

    merge = property(lambda self: self.side**2)


def read(config: Mapping[str, Any], processor: Mapping[str, Any], token: int) -> Settings:
    """Read the settings from config.json and preprocessor_config.json; ValueError for what is not understood.

    The tokens around tiles are the tokenizer's <|image_start|>, <|tile_x_separator|>, <|tile_y_separator|>, <|image|> and
    <|image_end|>.
    """
    p: dict[str, Any] = DEFAULTS | {k: v for k, v in processor.items() if v is not None}
    refuse(p, {*DEFAULTS})
    if not p["do_resize"]:
        raise ValueError("image processor: found do_resize false; images must be resized to fit a canvas of tiles")
    vision, tokens = config["vision_config"], config["tokens"]
    side, size = int(vision.get("image_size", 448)), pair(p["size"], "size")
    if size != (side, side):
        raise ValueError(f"the image processor gives tiles of {size}, the tower takes {side} x {side}")
    ids = [tokens.get(f"<|{name}|>") for name in TOKENS]
    if None in ids:
        lacking = ", ".join(f"<|{name}|>" for name, i in zip(TOKENS, ids, strict=True) if i is None)
        raise ValueError(f"tokenizer.json has no {lacking} among its added tokens, which stand around tiles of images")
    start, column, row, placeholder, end = ids
    return Settings(
        token, start, column, row, placeholder, end, side, int(vision.get("patch_size", 14)),
        round(1 / vision.get("pixel_shuffle_ratio", 0.5)),
        int(p["max_patches"]), bool(p["resize_to_max_canvas"]), int(p["resample"]),
        float(p["rescale_factor"]) if p["do_rescale"] else None, tuple(p["image_mean"]) if p["do_normalize"] else None,
        tuple(p["image_std"]),
    )  # fmt: skip


def canvases(most: int) -> list[tuple[int, int]]:
    """Give the rows and columns of all canvases of at most so many tiles, those of one shape together, larger first."""
    shapes = dict[float, list[tuple[int, int]]]()
    for n in range(most, 0, -1):
        for rows in (r for r in range(1, n + 1) if n % r == 0):
            shapes.setdefault(rows / (n // rows), []).append((rows, n // rows))
    return [canvas for same in shapes.values() for canvas in same]


def canvas(s: Settings, height: int, width: int) -> tuple[int, int]:
    """Choose the rows and columns of tiles for an image.

    The one on which it grows least, or shrinks least where it must; of several the one with the fewest tiles. With
    `largest` the one on which it grows most. Scales are compared in float32, as the reference does.
    """
    every = canvases(s.most)
    sizes = np.array(every, np.float32) * np.float32(s.tile)
    scales = np.minimum(sizes[:, 0] / np.float32(height), sizes[:, 1] / np.float32(width))
    grow = scales[scales >= 1]
    scale = scales.max() if not grow.size or s.largest else grow.min()
    return min((every[i] for i in np.flatnonzero(scales == scale)), key=math.prod)


def fitted(s: Settings, height: int, width: int, rows: int, columns: int) -> tuple[int, int]:
    """Give the height and width of an image on its canvas; below a tile's side it grows to that, not further."""
    whole = rows * s.tile, columns * s.tile
    # What a canvas bounds has its scale in float32 in the reference, what a tile or the image itself bounds in float64.
    limits, scales = [], []
    for most, n in zip(whole, (height, width), strict=True):
        limit = most if s.largest else min(max(n, s.tile), most)
        exact = not s.largest and limit == max(n, s.tile)
        limits.append(limit)
        scales.append(limit / n if exact else np.float32(limit) / np.float32(n))
    down, right = scales
    if right < down:
        return max(min(math.floor(height * right), limits[0]), 1), max(limits[1], 1)
    return max(limits[0], 1), max(min(math.floor(width * down), limits[1]), 1)


def pixels(s: Settings, rgb: np.ndarray) -> tuple[np.ndarray, tuple[int, int]]:
    """Compute what transformers calls pixel_values of uint8[H W 3], float32[tiles H W 3], and rows and columns of tiles.

    The tiles of the canvas, row by row, then the whole image as one, if there are several.
    """
    height, width = rgb.shape[:2]
    rows, columns = canvas(s, height, width)
    height, width = fitted(s, height, width, rows, columns)
    placed = image.resize(rgb, height, width, s.resample)
    board = np.zeros((rows * s.tile, columns * s.tile, 3), np.uint8)
    board[:height, :width] = placed
    cut = board.reshape(rows, s.tile, columns, s.tile, 3).swapaxes(1, 2).reshape(-1, s.tile, s.tile, 3)
    if rows * columns > 1:
        cut = np.concatenate([cut, image.resize(rgb, s.tile, s.tile, s.resample)[None]])
    return normalize(s, cut), (rows, columns)


def bfloat16(x: np.ndarray) -> np.ndarray:
    """Round float32 to the nearest number that bfloat16 has, ties to even."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32)


def normalize(s: Settings, x: np.ndarray) -> np.ndarray:
    """Rescale and normalise, each step rounded to bfloat16 where both are done, as the model was trained."""
    if s.factor is None or s.mean is None:
        x = image.rescale(x, s.factor) if s.factor else x.astype(np.float32)
        return image.normalize(x, s.mean, s.std) if s.mean else x
    mean, std = (bfloat16(np.array(v, np.float32)) for v in (s.mean, s.std))
    x = bfloat16(x.astype(np.float32) * np.float32(s.factor))
    return bfloat16(bfloat16(x - mean) / std)


def prepare(s: Settings, rgb: np.ndarray) -> Picture:
    """Prepare an image uint8[H W 3] for the tower: the frame of a patch is its tile."""
    x, (rows, columns) = pixels(s, rgb)
    patches, places = zip(*(image.patches(tile, s.patch, s.side) for tile in x), strict=True)
    for i, at in enumerate(places):
        at[:, 0] = i
    tile = (s.token,) * (len(patches[0]) // s.merge)
    line = (*tile, s.column) * columns
    run = (*line[:-1], s.row) * rows if rows * columns > 1 else ()
    return Picture(np.concatenate(patches), np.concatenate(places), (s.start, *run, s.placeholder, *tile, s.end))
