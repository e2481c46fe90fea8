"""Images and videos for the towers of GLM-4.1V and later: patches as Qwen-VL's, of sizes and frames found otherwise."""

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
FIXED, PACED = "fixed", "paced"  # how frames are taken, and times written
PACE = (30, 3.0), (300, 1.0), (2400, 0.5)  # of GLM-4.6V: patches a second of videos of at most so many seconds
MOST = 640  # frames of GLM-4.6V


def read(config: Mapping[str, Any], processor: Mapping[str, Any], token: int) -> Settings:
    """Read the settings for a tower of config.json's vision_config from a preprocessor_config.json; see `qwen.read`."""
    given = {k: v for k, v in processor.items() if v is not None}
    return qwen.read(config, {"size": SIZE} | given, token)


def sized(height: int, width: int, factor: int, frames: int, least: int, most: int, step: int = 1) -> tuple[int, int]:
    """Give the height and width, multiples of `factor`, that an image is resized to: in `frames`, `least` to `most` pixels.

    A multiple of `step` frames is held to them. ValueError for an image more than 200 times as long as wide.
    >>> sized(500, 333, 28, 2, 12544, 11760000)
    (504, 336)
    """
    if min(height, width) < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    if max(height, width) > LONGEST * min(height, width):
        found = f"found {height} x {width} pixels"
        raise ValueError(f"{found}, expected one side at most {LONGEST} times as long as the other; cut it")
    rows, columns = (round(n / factor) * factor for n in (height, width))
    count = round(frames / step) * step
    if count * rows * columns > most:
        scale = math.sqrt(frames * height * width / most)
        rows, columns = (max(factor, math.floor(n / scale / factor) * factor) for n in (height, width))
    elif count * rows * columns < least:
        scale = math.sqrt(least / (frames * height * width))
        rows, columns = (math.ceil(n * scale / factor) * factor for n in (height, width))
    return rows, columns


def prepare(s: Settings, rgb: np.ndarray) -> Picture:
    """Prepare an image uint8[H W 3] for the tower."""
    if s.pixels:
        height, width, _ = rgb.shape
        rgb = image.resize(rgb, *sized(height, width, s.patch * s.side, s.frames, *s.pixels), s.resample)
    return qwen.finish(s, rgb)


def sample(kind: str, total: int, rate: float, fps: float, longest: float, step: int) -> list[int]:
    """Give the numbers of the frames to take of a video of `total` frames, `rate` a second: rising, an even number.

    As transformers' video processors. FIXED, of GLM-4.1V and 4.5V, takes `fps` a second of what is no longer than `longest`
    seconds, and as many of longer videos; PACED, of GLM-4.6V, what `PACE` says, of patches of `step` frames.
    """
    seconds = total / rate
    if kind == PACED:
        found = _paced(total, rate, step)
    elif seconds <= longest:
        found = [min(total - 1, math.ceil(i * rate / fps)) for i in range(max(1, math.floor(seconds * fps)))]
    elif (count := int(longest * fps)) >= total:
        found = list(range(total))
    else:
        found = [min(total - 1, math.ceil(t * rate)) for t in np.linspace(0, seconds, count).tolist()]
    out = list(dict.fromkeys(found))
    return out + out[-1:] * (len(out) % 2)


def _paced(total: int, rate: float, step: int) -> list[int]:
    """Give GLM-4.6V's frames, some of them twice."""
    seconds = total / rate
    within = min(seconds, PACE[-1][0])
    fps = next(fps for most, fps in PACE if within <= most)
    count = min(int(within * fps * step), MOST)
    spread = lambda first, last: np.linspace(first, last, count, dtype=int).tolist()
    if total < count:
        return spread(0, total - 1)
    found, at = list[int](), 0.0
    for i in range(total):
        if i * (1 / rate) >= at:
            at += 1 / (step * fps)
            found.append(i)
            if at >= int(seconds):
                break
    if len(found) < count:
        return spread(found[0], found[-1])
    return spread(0, total - 1) if len(found) > count else found


def stamp(kind: str, seconds: float) -> str:
    """Write the time that stands behind a frame."""
    return f"{seconds:.1f} seconds" if kind == PACED else str(int(seconds))
