"""Images for the towers of Qwen-VL: of nearly their own size and shape, in patches that lie together as they are merged."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fdel.media import image
from fdel.media.clip import CLIP_MEAN, CLIP_STD, refuse
from fdel.media.image import Picture

DEFAULTS = {
    "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}, "patch_size": 14, "merge_size": 2,
    "temporal_patch_size": 2, "image_mean": CLIP_MEAN, "image_std": CLIP_STD, "do_resize": True, "do_rescale": True,
    "do_normalize": True, "rescale_factor": 1 / 255, "resample": 3,
}  # fmt: skip
LONGEST = 200  # times as long as wide


@dataclass(frozen=True)
class Settings:
    """What is done to an image; None leaves a step out."""

    token: int  # of an entry
    patch: int  # pixels along a side
    side: int  # patches along the side of an entry
    frames: int  # of a patch; an image is there so often
    pixels: tuple[int, int] | None  # at least and at most
    resample: int = 3
    factor: float | None = 1 / 255
    mean: tuple[float, ...] | None = CLIP_MEAN
    std: tuple[float, ...] = CLIP_STD

    merge = property(lambda self: self.side**2)  # patches of an entry


def read(config: Mapping[str, Any], processor: Mapping[str, Any], token: int) -> Settings:
    """Read the settings for a tower of config.json's vision_config from a preprocessor_config.json.

    `token` is the id of an entry's token. ValueError for what is not understood or does not fit the tower.
    """
    p: dict[str, Any] = DEFAULTS | {k: v for k, v in processor.items() if v is not None}
    refuse(p, {*DEFAULTS, "min_pixels", "max_pixels"})
    size = dict(p["size"])
    size = {"shortest_edge": size.pop("min_pixels", None), "longest_edge": size.pop("max_pixels", None)} | size
    size |= {
        k: p[older] for k, older in (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels")) if older in p
    }
    least, most = size["shortest_edge"], size["longest_edge"]
    whole = all(isinstance(n, int) and n > 0 for n in (least, most))
    if len(size) > 2 or not whole or least > most:
        raise ValueError(f"'size': found {size}, expected shortest_edge and longest_edge, the least and most pixels")
    vision = config["vision_config"]
    sizes = {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2} | dict(vision)
    for ours, theirs in (("patch_size",) * 2, ("merge_size", "spatial_merge_size"), ("temporal_patch_size",) * 2):
        if p[ours] != sizes[theirs]:
            raise ValueError(f"{ours!r}: found {p[ours]} in the image processor's file, {sizes[theirs]} in the tower's")
    return Settings(
        token, p["patch_size"], p["merge_size"], p["temporal_patch_size"], (least, most) if p["do_resize"] else None,
        int(p["resample"]), float(p["rescale_factor"]) if p["do_rescale"] else None,
        tuple(p["image_mean"]) if p["do_normalize"] else None, tuple(p["image_std"]),
    )  # fmt: skip


def sized(height: int, width: int, factor: int, least: int, most: int) -> tuple[int, int]:
    """Give the height and width, multiples of `factor`, that an image is resized to: from `least` to `most` pixels.

    ValueError for an image more than 200 times as long as wide.
    >>> sized(500, 333, 28, 3136, 1003520)
    (504, 336)
    """
    if max(height, width) > LONGEST * min(height, width):
        found = f"an image of {height} x {width} pixels"
        raise ValueError(f"{found}: expected one side at most {LONGEST} times as long as the other; cut it")
    near = tuple(round(n / factor) * factor for n in (height, width))
    if math.prod(near) > most:
        scale = math.sqrt(height * width / most)
        rows, columns = (max(factor, math.floor(n / scale / factor) * factor) for n in (height, width))
    elif math.prod(near) < least:
        scale = math.sqrt(least / (height * width))
        rows, columns = (math.ceil(n * scale / factor) * factor for n in (height, width))
    else:
        rows, columns = near
    return rows, columns


def places(frames: int, rows: int, columns: int, side: int) -> np.ndarray:
    """Give frame, row and column of each patch, int32[P 3]: the patches of an entry lie together, entries row by row."""
    grid = np.moveaxis(np.indices((frames, rows, columns), np.int32), 0, -1)
    cut = grid.reshape(frames, rows // side, side, columns // side, side, 3)
    return cut.transpose(0, 1, 3, 2, 4, 5).reshape(-1, 3)


def turns(frames: int, rows: int, columns: int) -> np.ndarray:
    """Give time, row and column by which the token of each entry turns, int32[frames * rows * columns, 3]."""
    return np.moveaxis(np.indices((frames, rows, columns), np.int32), 0, -1).reshape(-1, 3)


def patches(x: np.ndarray, s: Settings) -> np.ndarray:
    """Cut float32[H W 3] into patches [P 3 * frames * patch * patch], the image in each frame, in the order of `places`."""
    height, width, _ = x.shape
    cell = s.patch * s.side
    if height % cell or width % cell:
        raise ValueError(f"an image of {height} x {width} pixels does not divide into squares of {cell} x {cell}")
    cut = x.reshape(height // cell, s.side, s.patch, width // cell, s.side, s.patch, 3)
    cut = cut.transpose(0, 3, 1, 4, 6, 2, 5)[..., None, :, :]
    return np.repeat(cut, s.frames, -3).reshape(-1, 3 * s.frames * s.patch**2)


def values(s: Settings, rgb: np.ndarray) -> np.ndarray:
    """Rescale and normalise uint8[H W 3]: float32[H W 3]."""
    x = image.rescale(rgb, s.factor) if s.factor else rgb
    return image.normalize(x, s.mean, s.std) if s.mean else x.astype(np.float32)


def prepare(s: Settings, rgb: np.ndarray) -> Picture:
    """Prepare an image uint8[H W 3] for the tower."""
    height, width, _ = rgb.shape
    if s.pixels:
        rgb = image.resize(rgb, *sized(height, width, s.patch * s.side, *s.pixels), s.resample)
    return finish(s, rgb)


def finish(s: Settings, rgb: np.ndarray) -> Picture:
    """Prepare an image that has its size: sides that are multiples of those of an entry."""
    x = values(s, rgb)
    cut = patches(x, s)
    rows, columns = x.shape[0] // s.patch, x.shape[1] // s.patch
    of_entries = turns(1, rows // s.side, columns // s.side)
    return Picture(cut, places(1, rows, columns, s.side), (s.token,) * len(of_entries), of_entries)
