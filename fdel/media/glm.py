"""Images for the towers of GLM-4.1V and later: patches as Qwen-VL's, of sizes found otherwise."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fdel.media import image, qwen
from fdel.media.image import Picture
from fdel.media.qwen import LONGEST, Settings

SIZE = {
    "shortest_edge": 112 * 112,
    "longest_edge": 28 * 28 * 15000,
}  # pixels of all frames of a patch, at least, at most


def read(config: Mapping[str, Any], processor: Mapping[str, Any], token: int) -> Settings:
    """Read the settings for a tower of config.json's vision_config from a preprocessor_config.json; see `qwen.read`."""
    given = {k: v for k, v in processor.items() if v is not None}
    return qwen.read(config, {"size": SIZE} | given, token)


def sized(height: int, width: int, factor: int, frames: int, least: int, most: int) -> tuple[int, int]:
    """Give the height and width, multiples of `factor`, that an image is resized to: in `frames`, `least` to `most` pixels.

    ValueError for an image more than 200 times as long as wide.
    >>> sized(500, 333, 28, 2, 12544, 11760000)
    (504, 336)
    """
    if min(height, width) < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    if max(height, width) > LONGEST * min(height, width):
        found = f"an image of {height} x {width} pixels"
        raise ValueError(f"{found}: expected one side at most {LONGEST} times as long as the other; cut it")
    rows, columns = (round(n / factor) * factor for n in (height, width))
    if frames * rows * columns > most:
        scale = math.sqrt(frames * height * width / most)
        rows, columns = (max(factor, math.floor(n / scale / factor) * factor) for n in (height, width))
    elif frames * rows * columns < least:
        scale = math.sqrt(least / (frames * height * width))
        rows, columns = (math.ceil(n * scale / factor) * factor for n in (height, width))
    return rows, columns


def prepare(s: Settings, rgb: np.ndarray) -> Picture:
    """Prepare an image uint8[H W 3] for the tower."""
    if s.pixels:
        height, width, _ = rgb.shape
        rgb = image.resize(rgb, *sized(height, width, s.patch * s.side, s.frames, *s.pixels), s.resample)
    return qwen.finish(s, rgb)
