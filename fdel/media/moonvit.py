"""Images for Kimi-VL's tower: of their own size, shrunk to a number of patches, filled up with black to whole squares."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fdel.media import image
from fdel.media.clip import refuse
from fdel.media.image import Picture

DEFAULTS = {"patch_size": 14, "pad_input": False, "in_token_limit": 4096, "image_mean": (0.5,) * 3, "image_std": (0.5,) * 3,
            "merge_kernel_size": (2, 2)}  # fmt: skip
LONGEST = 512  # patches along a side that the tower's positions reach


@dataclass(frozen=True)
class Settings:
    """What is done to an image."""

    token: int  # of an entry
    patch: int  # pixels along a side
    side: int  # patches along the side of the square that becomes one entry
    most: int  # patches
    mean: tuple[float, ...] = (0.5,) * 3
    std: tuple[float, ...] = (0.5,) * 3

    merge = property(lambda self: self.side**2)


def read(config: Mapping[str, Any], processor: Mapping[str, Any], token: int) -> Settings:
    """Read the settings from config.json and preprocessor_config.json; ValueError for what is not understood."""
    p: dict[str, Any] = DEFAULTS | {k: v for k, v in processor.items() if v is not None}
    refuse(p, {*DEFAULTS, "num_pooled_tokens", "auto_map"})
    if not p["pad_input"]:
        raise ValueError(
            "image processor: found pad_input false, which may leave squares of patches cut; expected true"
        )
    sizes = {"patch_size": 14, "merge_kernel_size": (2, 2)} | dict(config["vision_config"])
    for key in ("patch_size", "merge_kernel_size"):
        ours, theirs = (tuple(x) if isinstance(x, list) else x for x in (p[key], sizes[key]))
        if ours != theirs:
            raise ValueError(f"{key!r}: found {ours} in the image processor's file, {theirs} in the tower's")
    side = p["merge_kernel_size"][0]
    means = tuple(p["image_mean"]), tuple(p["image_std"])
    return Settings(token, int(p["patch_size"]), int(side), int(p["in_token_limit"]), *means)


def sized(s: Settings, height: int, width: int) -> tuple[int, int]:
    """Give the height and width, in pixels, that an image is shrunk to: at most about `most` patches."""
    patches = max(height // s.patch, 1) * max(width // s.patch, 1)
    scale = math.sqrt(s.most / patches) if patches > s.most else 1.0
    return max(int(height * scale), 1), max(int(width * scale), 1)


def pixels(s: Settings, rgb: np.ndarray) -> np.ndarray:
    """Compute the normalised image of uint8[H W 3]: float32[H W 3], H and W whole squares of patches."""
    x, unit = image.resize(rgb, *sized(s, *rgb.shape[:2])), s.patch * s.side
    board = np.zeros((*(-(-n // unit) * unit for n in x.shape[:2]), 3), np.uint8)
    if max(board.shape) >= LONGEST * s.patch:
        found = f"an image of {board.shape[0]} x {board.shape[1]} pixels"
        raise ValueError(f"{found}: expected sides of less than {LONGEST * s.patch}; cut it")
    board[: x.shape[0], : x.shape[1]] = x
    return image.normalize(board.astype(np.float32) / np.float32(255), s.mean, s.std)


def prepare(s: Settings, rgb: np.ndarray) -> Picture:
    """Prepare an image uint8[H W 3] for the tower."""
    patches, places = image.patches(pixels(s, rgb), s.patch, s.side)
    return Picture(patches, places, (s.token,) * (len(patches) // s.merge))
