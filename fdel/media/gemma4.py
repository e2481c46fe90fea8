"""Images for Gemma 4's tower: of nearly their own shape, as large as a number of tokens allows; values from 0 to 1."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fdel.media import clip, image
from fdel.media.image import Picture

KEYS = {"do_resize", "do_rescale", "do_normalize", "rescale_factor", "resample", "image_mean", "image_std", "patch_size",
        "max_soft_tokens", "pooling_kernel_size"}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """What is done to an image, and the tokens around its entries."""

    token: int  # of an entry, and the placeholder
    begin: int
    end: int
    patch: int = 16  # pixels along a side
    side: int = 3  # patches along the side of the square that becomes one entry
    most: int = 280  # entries
    resample: int = 3
    factor: float | None = 1 / 255
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] = (1.0, 1.0, 1.0)

    merge = property(lambda self: self.side**2)


def read(config: Mapping[str, Any], processor: Mapping[str, Any], token: int) -> Settings:
    """Read the settings from config.json and preprocessor_config.json; ValueError for what is not understood."""
    p: dict[str, Any] = {
        "do_resize": True, "do_rescale": True, "do_normalize": False, "rescale_factor": 1 / 255, "resample": 3,
        "patch_size": 16, "max_soft_tokens": 280, "pooling_kernel_size": 3, "image_mean": (0.0,) * 3,
        "image_std": (1.0,) * 3,
    }  # fmt: skip
    p |= {k: v for k, v in processor.items() if v is not None}
    clip.refuse(p, {*KEYS, "image_seq_length", "size"})
    vision = config["vision_config"]
    tower = vision.get("patch_size", 16), vision.get("pooling_kernel_size", 3)
    if (p["patch_size"], p["pooling_kernel_size"]) != tower or not p["do_resize"]:
        found = f"found patch_size {p['patch_size']}, pooling_kernel_size {p['pooling_kernel_size']}"
        raise ValueError(
            f"image processor: {found}, do_resize {p['do_resize']}; expected {tower}, as the tower has, True"
        )
    return Settings(
        token, config.get("boi_token_id", 255_999), config.get("eoi_token_id", 258_882), *tower, int(p["max_soft_tokens"]),
        int(p["resample"]), float(p["rescale_factor"]) if p["do_rescale"] else None,
        tuple(p["image_mean"]) if p["do_normalize"] else None, tuple(p["image_std"]),
    )  # fmt: skip


def size(s: Settings, height: int, width: int) -> tuple[int, int]:
    """Compute the size that an image is brought to, in pixels: of whole squares, the largest that `most` of them allow."""
    unit = s.side * s.patch
    factor = math.sqrt(s.most * s.merge * s.patch**2 / (height * width))
    rows, columns = (math.floor(factor * n / unit) for n in (height, width))
    if not rows and not columns:
        raise ValueError(f"an image of {height} x {width} pixels has no size of at most {s.most} squares of {unit}")
    if not rows:
        rows, columns = 1, min(width // height, s.most)
    elif not columns:
        rows, columns = min(height // width, s.most), 1
    if rows * columns > s.most:
        raise ValueError(
            f"an image of {height} x {width} pixels becomes {rows} x {columns} tokens, at most {s.most} do"
        )
    return rows * unit, columns * unit


def pixels(s: Settings, rgb: np.ndarray) -> np.ndarray:
    """Compute the values of uint8[H W 3] as transformers' processor does, before they are cut: float32[H W 3]."""
    x = image.resize(rgb, *size(s, *rgb.shape[:2]), s.resample)
    x = image.rescale(x, s.factor) if s.factor else x
    return image.normalize(x, s.mean, s.std) if s.mean else x.astype(np.float32)


def prepare(s: Settings, rgb: np.ndarray) -> Picture:
    """Prepare an image uint8[H W 3] for the tower: patches channels last, those of an entry one after the other."""
    patches, places = image.patches(pixels(s, rgb), s.patch, s.side)
    last = patches.reshape(-1, 3, s.patch**2).swapaxes(1, 2).reshape(len(patches), -1)
    return Picture(np.ascontiguousarray(last), places, (s.begin, *(s.token,) * (len(patches) // s.merge), s.end))
