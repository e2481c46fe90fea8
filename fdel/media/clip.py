"""Images for CLIP and SigLIP towers: all resized to one size and normalised, as transformers' processors do it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fdel.media import image
from fdel.media.image import Picture

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
CLIP = {"size": {"shortest_edge": 224}, "crop_size": {"height": 224, "width": 224}, "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD, "do_center_crop": True}  # fmt: skip
SIGLIP = {"size": {"height": 224, "width": 224}, "image_mean": (0.5,) * 3, "image_std": (0.5,) * 3}
# Keys that say nothing here: names of classes, and what every image is made anyway.
NEUTRAL = """image_processor_type feature_extractor_type processor_class do_convert_rgb data_format input_data_format
default_to_square device return_tensors disable_grouping image_seq_length vision_feature_layer _valid_kwargs_names
_processor_class""".split()


@dataclass(frozen=True)
class Settings:
    """What is done to an image, in this order; None or False leaves a step out. Sizes are height and width in pixels."""

    token: int  # of an entry; -1 where no prompt shows images
    patch: int  # pixels along a side
    pad: bool = False  # to a square, with the mean color
    edge: int | None = None  # of the shorter side
    size: tuple[int, int] | None = None
    crop: tuple[int, int] | None = None
    resample: int = 3
    factor: float | None = 1 / 255
    mean: tuple[float, ...] | None = CLIP_MEAN
    std: tuple[float, ...] = CLIP_STD
    extra: int = 0  # entries besides one of each patch


def pair(value: Any, key: str) -> tuple[int, int]:
    """Read a height and width, {"height": 224, "width": 224} or a number for both."""
    if isinstance(value, int):
        return value, value
    if isinstance(value, Mapping) and set(value) == {"height", "width"}:
        return int(value["height"]), int(value["width"])
    raise ValueError(f"{key!r}: found {value}, expected an object of height and width")


def refuse(processor: Mapping[str, Any], known: set[str]) -> None:
    """Refuse keys of an image processor that would change an image and that nothing reads: ValueError."""
    unknown = {k: v for k, v in processor.items() if k not in {*known, *NEUTRAL} and v not in (None, False)}
    if unknown:
        raise ValueError(f"image processor: found {unknown}, which is not understood; remove what changes no image")


def read(config: Mapping[str, Any], processor: Mapping[str, Any], token: int) -> Settings:
    """Read the settings for a tower of config.json's vision_config from a preprocessor_config.json.

    `token` is the id of an entry's token. ValueError for what is not understood or gives images of another size than the
    tower's.
    """
    vision = config["vision_config"]
    clip = vision.get("model_type", "clip_vision_model") == "clip_vision_model"
    p: dict[str, Any] = {
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "rescale_factor": 1 / 255,
        "resample": 3,
    }
    p |= (CLIP if clip else SIGLIP) | {k: v for k, v in processor.items() if v is not None}
    refuse(p, {*CLIP, "do_resize", "do_rescale", "do_normalize", "rescale_factor", "resample", "do_pad"})
    size = p["size"]
    edge = size.get("shortest_edge") if isinstance(size, Mapping) else size if clip else None
    if edge is not None and isinstance(size, Mapping) and len(size) > 1:
        raise ValueError(f"'size': found {size}, expected shortest_edge alone, or height and width")
    crop = pair(p["crop_size"], "crop_size") if p.get("do_center_crop") else None
    # LLaVA's "default" leaves the first state out, of CLIP the class token's.
    first = config.get("vision_feature_select_strategy", "default") == "default"
    out = Settings(
        token, int(vision.get("patch_size", 32 if clip else 16)), bool(p.get("do_pad")), edge if p["do_resize"] else None,
        pair(size, "size") if p["do_resize"] and edge is None else None, crop, int(p["resample"]),
        float(p["rescale_factor"]) if p["do_rescale"] else None, tuple(p["image_mean"]) if p["do_normalize"] else None,
        tuple(p["image_std"]), clip - first,
    )  # fmt: skip
    side = int(vision.get("image_size", 224))
    found = crop or out.size or ((edge, edge) if out.pad and edge else None)
    if found != (side, side):
        raise ValueError(f"the image processor gives images of {found}, the tower takes {side} x {side}")
    return out


def pixels(s: Settings, rgb: np.ndarray) -> np.ndarray:
    """Compute what transformers calls pixel_values of uint8[H W 3]: float32[H W 3]."""
    x = image.square(rgb, [int(255 * m) for m in s.mean or (0, 0, 0)]) if s.pad else rgb
    if s.edge or s.size:
        x = image.resize(x, *(s.size or image.shortest(x.shape[0], x.shape[1], s.edge or 0)), s.resample)
    x = image.center_crop(x, *s.crop) if s.crop else x
    x = image.rescale(x, s.factor) if s.factor else x
    return image.normalize(x, s.mean, s.std) if s.mean else x.astype(np.float32)


def prepare(s: Settings, rgb: np.ndarray) -> Picture:
    """Prepare an image uint8[H W 3] for the tower."""
    patches, places = image.patches(pixels(s, rgb), s.patch)
    return Picture(patches, places, (s.token,) * (len(patches) + s.extra) if s.token >= 0 else ())
