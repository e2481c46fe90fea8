"""Images for Pixtral's tower: of their own shape, no larger than a size, their sides filled up to whole patches."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fdel.media import clip, image
from fdel.media.image import Picture


@dataclass(frozen=True)
class Settings:
    """What is done to an image; `most` is the height and width that it may have, in pixels."""

    token: int  # of an entry
    row: int  # of the end of a row of entries
    end: int  # of the end of the last one
    most: tuple[int, int]
    patch: int  # pixels along a side
    side: int = 1  # patches along the side of the square that becomes one entry
    resample: int = 3
    factor: float | None = 1 / 255
    mean: tuple[float, ...] | None = clip.CLIP_MEAN
    std: tuple[float, ...] = clip.CLIP_STD

    merge = property(lambda self: self.side**2)


def read(config: Mapping[str, Any], processor: Mapping[str, Any], token: int) -> Settings:
    """Read the settings from config.json and preprocessor_config.json; ValueError for what is not understood.

    The tokens that end rows and images are the tokenizer's [IMG_BREAK] and [IMG_END], or what processor_config.json names.
    """
    p: dict[str, Any] = {
        "do_resize": True, "do_rescale": True, "do_normalize": True, "rescale_factor": 1 / 255, "resample": 3,
        "size": {"longest_edge": 1024}, "image_mean": clip.CLIP_MEAN, "image_std": clip.CLIP_STD,
    }  # fmt: skip
    p |= {k: v for k, v in processor.items() if v is not None}
    clip.refuse(p, {*clip.CLIP, "do_resize", "do_rescale", "do_normalize", "rescale_factor", "resample", "do_pad",
                    "patch_size"})  # fmt: skip
    if not p["do_resize"] or p.get("do_center_crop"):
        raise ValueError("image processor: found do_resize false or do_center_crop true, which no Pixtral has")
    tokens, size = config["tokens"], p["size"]
    row, end = (tokens.get(f"image_{name.lower()}_token", tokens.get(f"[IMG_{name}]")) for name in ("BREAK", "END"))
    if None in (row, end):
        raise ValueError(
            "tokenizer.json has no [IMG_BREAK] and [IMG_END] among its added tokens, which end rows of images"
        )
    edge = size.get("longest_edge") if isinstance(size, Mapping) else size
    return Settings(
        token, row, end, clip.pair(size if edge is None else edge, "size"),
        int(config["vision_config"].get("patch_size", 16)), int(config.get("spatial_merge_size", 1)), int(p["resample"]),
        float(p["rescale_factor"]) if p["do_rescale"] else None, tuple(p["image_mean"]) if p["do_normalize"] else None,
        tuple(p["image_std"]),
    )  # fmt: skip


def size(s: Settings, height: int, width: int) -> tuple[int, int]:
    """Compute the size that an image is brought to, in pixels: shrunk to fit, then up to whole squares of patches."""
    ratio, unit = max(height / s.most[0], width / s.most[1]), s.patch * s.side
    if ratio > 1:
        height, width = int(height / ratio), int(width / ratio)
    up = lambda n: ((n - 1) // unit + 1) * unit
    return up(height), up(width)


def pixels(s: Settings, rgb: np.ndarray) -> np.ndarray:
    """Compute what transformers calls pixel_values of uint8[H W 3], without its padding: float32[H W 3]."""
    x = image.resize(rgb, *size(s, rgb.shape[0], rgb.shape[1]), s.resample)
    x = image.rescale(x, s.factor) if s.factor else x
    return image.normalize(x, s.mean, s.std) if s.mean else x.astype(np.float32)


def prepare(s: Settings, rgb: np.ndarray) -> Picture:
    """Prepare an image uint8[H W 3] for the tower: a row of tokens for a row of squares, each row with its end."""
    x = pixels(s, rgb)
    patches, places = image.patches(x, s.patch, s.side)
    unit = s.patch * s.side
    line = (s.token,) * (x.shape[1] // unit)
    run = ((*line, s.row) * (x.shape[0] // unit))[:-1]
    return Picture(patches, places, (*run, s.end))
