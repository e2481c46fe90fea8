"""Videos for the towers of Qwen-VL and GLM: which frames are taken, their patches, and their tokens in a prompt.

`frames.decode` reads a file. A video is a `Picture` of several frames of patches; the tower sees each apart.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from fdel.media import glm, image, qwen
from fdel.media.clip import refuse
from fdel.media.frames import Clip, VideoError, decode
from fdel.media.image import Picture

__all__ = ["Clip", "Manner", "Settings", "VideoError", "decode", "prepare", "read", "sample"]
FPS = 2.0  # of what is shown of a video, where a file says nothing: what Qwen-VL's authors take
COMMON = {"min_frames": 4, "max_frames": 768, "fps": None, "num_frames": None, "do_sample_frames": None}
CAPPED = {"cap_pixels_per_frame": None, "max_video_tokens": 128_000}
QWEN2 = qwen.DEFAULTS | COMMON | CAPPED | {"size": {"shortest_edge": 128 * 28**2, "longest_edge": 768 * 28**2}}
HALF = {"image_mean": (0.5,) * 3, "image_std": (0.5,) * 3}
SQUARE: dict[str, Any] = {"size": {"shortest_edge": 128 * 32**2, "longest_edge": 768 * 32**2}, "patch_size": 16}
QWEN3 = QWEN2 | HALF | SQUARE | {"max_video_tokens": 768, "fps": 2.0}
GLM = qwen.DEFAULTS | {"size": {"shortest_edge": 112**2, "longest_edge": 60_000 * 28**2}}
GLM |= {"fps": 2.0, "max_duration": 300}
GLM |= dict.fromkeys(("num_frames", "max_image_size", "do_sample_frames"))  # what its processor does not heed
OTHER = {"video_processor_type", "return_metadata"}
SHARE = 0.9  # of the tokens of a context that may be a video's


class Manner(NamedTuple):
    """How a family takes videos: what its files need not say, and what its code does.

    `marks`: times stand beside frames, between these tokens of config.json, and the bounds on pixels are of all frames.
    `speed` names the part of config.json ("": itself), the key and its default that say how far a second turns tokens.
    `bounds` on pixels overrule a file's. `glm` names one of GLM's kinds (`glm.sample`).
    """

    defaults: Mapping[str, Any] = MappingProxyType(QWEN2)
    marks: tuple[str, ...] = ()
    speed: tuple[str, str, float] | None = None
    steady: bool = False
    bounds: Mapping[str, int] | None = None
    glm: str = ""


PLAIN = Manner()
TIMED = Manner(MappingProxyType(QWEN3), ("vision_start_token_id", "vision_end_token_id"))
GLM4V = Manner(MappingProxyType(GLM), ("image_start_token_id", "image_end_token_id"), glm=glm.FIXED)
GLM46V = GLM4V._replace(glm=glm.PACED)
SPACED = Manner(speed=("vision_config", "tokens_per_second", 4))
HEARD = Manner(speed=("", "position_id_per_seconds", 25), steady=True, bounds=MappingProxyType(SQUARE["size"]))


@dataclass(frozen=True)
class Settings:
    """What is done to a video. `frame` is what is done to each frame, its `token` that of a video's entry; a chat template
    writes `placeholder` once.

    `count` frames are taken, or, if that is None, `fps` a second, `least` to `most` of them. `whole`: the bounds on pixels
    are those of all frames together. `budget`, in pixels, bounds each frame further by what the number of frames leaves.
    Where there are `marks`, each `frame.frames` frames have their time before them as text, and these two tokens around
    them; else `speed` says how far a second turns their tokens, None: by one for each `frame.frames` frames. `steady`:
    1 / fps seconds are between frames that were taken so, whatever the video's own rate made of it. Of a kind of `glm`,
    times stand behind frames, which are taken as its files say, `longest` seconds of them.
    """

    frame: qwen.Settings
    fps: float = FPS
    count: int | None = None
    least: int = 4
    most: int = 768
    whole: bool = False
    budget: int | None = None
    speed: float | None = None
    steady: bool = False
    marks: tuple[int, ...] = ()
    placeholder: int = -1
    glm: str = ""
    longest: float = 300.0

    token = property(lambda self: self.frame.token)
    sign = property(lambda self: self.marks[0] if self.glm else self.frame.token)  # what no run of an image has


def read(config: Mapping[str, Any], processor: Mapping[str, Any], manner: Manner = PLAIN) -> Settings | None:
    """Read the settings for the tower of a config.json from a video_preprocessor_config.json; None for no videos.

    Of files that leave it to their caller how many frames are taken, FPS a second are. ValueError for what is not
    understood or does not fit the tower.
    """
    placeholder = config.get("video_token_id")
    if not isinstance(placeholder, int):
        return None
    token = config.get("image_token_id") if manner.glm else placeholder
    if not isinstance(token, int):
        raise ValueError(f"image_token_id: found {token}, expected a token id")
    p: dict[str, Any] = {**manner.defaults, **{k: v for k, v in processor.items() if v is not None}}
    if manner.bounds:
        p = {k: v for k, v in p.items() if k not in ("min_pixels", "max_pixels")} | {"size": dict(manner.bounds)}
    refuse(p, {*manner.defaults, *OTHER, "min_pixels", "max_pixels"})
    own = {*manner.defaults, *OTHER} - {*qwen.DEFAULTS}
    frame = qwen.read(config, {k: v for k, v in p.items() if k not in own}, token)
    found = tuple(config.get(name) for name in manner.marks)
    marks = tuple(mark for mark in found if isinstance(mark, int))
    if len(marks) < len(found):
        raise ValueError(f"found {' and '.join(manner.marks)} {found}, expected token ids")
    fps = FPS if p["fps"] is None else float(p["fps"])
    if manner.glm:
        return Settings(
            frame,
            fps,
            whole=True,
            marks=marks,
            placeholder=placeholder,
            glm=manner.glm,
            longest=float(p["max_duration"]),
        )
    if processor.get("fps") is not None and p["num_frames"] is not None:
        raise ValueError(f"found both fps ({p['fps']}) and num_frames ({p['num_frames']}); leave one out")
    budget, speed = None, None
    if p["cap_pixels_per_frame"]:
        tokens = p["max_video_tokens"] * (1 if marks else SHARE)
        budget = int(tokens * (frame.patch * frame.side) ** 2)
    if manner.speed:
        part, key, default = manner.speed
        speed = float((config[part] if part else config).get(key, default))
    return Settings(
        frame, fps, p["num_frames"], int(p["min_frames"]), int(p["max_frames"]), bool(marks), budget,
        speed, manner.steady, marks, placeholder,
    )  # fmt: skip


def sample(s: Settings, total: int, fps: float) -> np.ndarray:
    """Give the numbers of the frames to take of a video of `total` frames, `fps` a second: int[T], rising.

    As the family's video processor in transformers. ValueError for a video of fewer frames than are to be taken.
    >>> sample(Settings(frame, fps=2.0), 100, 25.0)  # doctest: +SKIP
    array([ 0, 12, 25, 37, 50, 62, 75, 87])
    """
    if total < 1 or not (math.isfinite(fps) and fps > 0):
        raise VideoError(f"found {total} frames, {fps} a second; expected at least one, more than 0 a second")
    if s.glm:
        return np.array(glm.sample(s.glm, total, fps, s.fps, s.longest, s.frame.frames), int)
    if s.whole:
        count = min(max(int(total / fps * s.fps), s.least), s.most, total) if s.count is None else s.count
        return np.linspace(0, total - 1, count).round().astype(int)
    step = s.frame.frames
    if s.count is None:
        most = min(s.most, total) // step * step
        count = math.floor(min(max(total / fps * s.fps, s.least), most) / step) * step
    else:
        count = round(s.count / step) * step
    if not 0 < count <= total:
        expected = f"at least {max(count, step)}, the frames to take; show it as images, or take fewer"
        raise VideoError(f"found a video of {total} frames, expected {expected}")
    return np.arange(0, total, total / count, dtype=np.float32).astype(int)


def sized(s: Settings, frames: int, height: int, width: int) -> tuple[int, int]:
    """Give the height and width that frames are resized to, as the family's video processor in transformers."""
    if s.frame.pixels is None:
        return height, width
    cell, (least, most) = s.frame.patch * s.frame.side, s.frame.pixels
    floor = int(least * 1.05)
    if not s.whole:
        if s.budget is not None:
            most = max(min(most, s.budget * s.frame.frames // frames), floor)
        return qwen.sized(height, width, cell, least, most)
    if s.budget is not None:
        most = max(min(s.budget, most // frames), floor) * frames
    if not s.glm and min(height, width) < cell:
        raise VideoError(f"found frames of {height} x {width} pixels, expected at least {cell} x {cell}")
    return glm.sized(height, width, cell, frames, least, most, s.frame.frames)


def patches(x: np.ndarray, s: qwen.Settings) -> np.ndarray:
    """Cut frames float32[T H W 3] into patches [P 3 * s.frames * patch * patch], in the order of `qwen.places`.

    The last frame is repeated until s.frames divide their number.
    """
    frames, height, width, _ = x.shape
    cell = s.patch * s.side
    if height % cell or width % cell:
        raise ValueError(f"frames of {height} x {width} pixels do not divide into squares of {cell} x {cell}")
    x = np.concatenate([x, np.repeat(x[-1:], -frames % s.frames, 0)])
    cut = x.reshape(-1, s.frames, height // cell, s.side, s.patch, width // cell, s.side, s.patch, 3)
    return cut.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(-1, 3 * s.frames * s.patch**2)


def prepare(s: Settings, clip: Clip, tokenize: Callable[[str], Sequence[int]] | None = None) -> Picture:
    """Prepare a video for the tower: its patches, and the run that replaces one token of a video in a prompt.

    `tokenize` gives the tokens of a text, without special ones: families with `marks` write times. transformers resizes
    frames by torch, here pillow does as for images: pixels differ by 1 of 255 (by more in noise that grows along one
    side and shrinks along the other), and by rounding in float32 where frames keep their size.
    """
    frames, height, width = clip.frames.shape[:3]
    if not frames or frames != len(clip.indices):
        raise ValueError(f"found {frames} frames with {len(clip.indices)} numbers, expected as many, and at least one")
    f = s.frame
    size = sized(s, frames, height, width)
    x = np.stack([qwen.values(f, image.resize(frame, *size, f.resample)) for frame in clip.frames])
    grid = -(-frames // f.frames), size[0] // f.patch, size[1] // f.patch
    out = Picture(patches(x, f), qwen.places(*grid, f.side), ())
    return replace(out, **run(s, grid, clip, tokenize))


def run(
    s: Settings, grid: tuple[int, int, int], clip: Clip, tokenize: Callable[[str], Sequence[int]] | None
) -> dict[str, Any]:
    """Give the tokens of a video of this grid of patches, and their turns, as fields of a `Picture`."""
    count, rows, columns = grid[0], grid[1] // s.frame.side, grid[2] // s.frame.side
    if not s.marks:
        turns = qwen.turns(count, rows, columns)
        if s.speed is not None:  # in float32, as transformers has it
            rate = s.fps if s.steady and s.count is None else clip.rate
            step = np.float32(s.speed * (s.frame.frames / rate))
            turns[:, 0] = (turns[:, 0].astype(np.float32) * step).astype(np.int32)
        return {"run": (s.token,) * len(turns), "turns": turns}
    if tokenize is None:
        raise ValueError(
            "tokenize: found None, expected what gives the tokens of a text: frames stand behind their times"
        )
    tokens, parts, at = list[int](), list[np.ndarray](), 0
    straight = lambda n: np.repeat(np.arange(n, dtype=np.int32)[:, None], 3, 1)
    first, last = s.marks
    begun = [i / clip.fps for i in clip.indices[:: s.frame.frames]]
    for second in begun if s.glm else clip.times(s.frame.frames):
        said = tokenize(glm.stamp(s.glm, second) if s.glm else f"<{second:.1f} seconds>")
        before, after = ([first], [last, *said]) if s.glm else ([*said, first], [last])
        tokens += [*before, *[s.token] * (rows * columns), *after]
        for part in (straight(len(before)), qwen.turns(1, rows, columns), straight(len(after))):
            parts.append(part + at)
            at += int(part.max()) + 1
    return {"run": tuple(tokens), "turns": np.concatenate(parts)}
