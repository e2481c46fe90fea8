"""Images for Gemma 3's tower: all resized to one size; newlines and two tokens stand around their entries."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any

import numpy as np

from fdel.media import clip, image
from fdel.media.image import Picture

PAN = "pan_and_scan_min_crop_size pan_and_scan_max_num_crops pan_and_scan_min_ratio_to_activate".split()


@dataclass(frozen=True)
class Settings:
    """What is done to an image, the tokens around its entries, and of how many patches along a side an entry is made."""

    pixels: clip.Settings
    placeholder: int  # which begins an image too
    end: int
    side: int
    around: tuple[str, str]

    merge = property(lambda self: self.side**2)
    entries = property(lambda self: (self.pixels.token,))


def read(config: Mapping[str, Any], processor: Mapping[str, Any], token: int) -> Settings:
    """Read the settings from config.json and preprocessor_config.json; ValueError for what is not understood.

    Crops (do_pan_and_scan) are not. The text of the token that begins an image is the tokenizer's.
    """
    bare = {k: v for k, v in processor.items() if k not in PAN or processor.get("do_pan_and_scan")}
    pixels = clip.read(config, {"resample": 2} | bare, token)
    vision, begin = config["vision_config"], config.get("boi_token_index", 255_999)
    texts = [t for t, i in config["tokens"].items() if i == begin]
    if not texts:
        raise ValueError(f"tokenizer.json has no added token {begin}, which begins an image (boi_token_index)")
    side = int(vision.get("image_size", 224)) // pixels.patch // isqrt(config.get("mm_tokens_per_image", 256))
    return Settings(pixels, begin, config.get("eoi_token_index", 256_000), side, (texts[0], f"\n\n{texts[0]}\n\n"))


def prepare(s: Settings, rgb: np.ndarray) -> Picture:
    """Prepare an image uint8[H W 3] for the tower: the patches of an entry stand one after the other."""
    patches, places = image.patches(clip.pixels(s.pixels, rgb), s.pixels.patch, s.side)
    return Picture(patches, places, (s.placeholder, *s.entries * (len(patches) // s.merge), s.end))
