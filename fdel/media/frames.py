"""Frames of video files, by PyAV (extra `video`). What they play, `sound.listen` reads.

What a file says of its sizes is checked before anything of those sizes is made. Frames are as they are stored: a turned
one is not put upright.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from fdel.media import container

CODECS = ("h264", "hevc", "av1", "vp8", "vp9", "mpeg4", "mjpeg", "mpeg2video", "mpeg1video")


class VideoError(ValueError):
    """A file that is no video that can be read, or too long or large."""


class Limits(NamedTuple):
    """What a file is held to: pixels of a frame and of all that are taken, how many are taken, its length and frames.

    `work` bounds the pixels of all its frames, which are decoded up to the last that is taken.
    """

    pixels: int = 2**22
    volume: int = 2**27
    frames: int = 768
    seconds: float = 3600.0
    total: int = 108_000
    work: int = 2**40


LIMITS = Limits()


@dataclass(frozen=True)
class Clip:
    """Frames taken from a video: uint8[T H W 3], their numbers in it, and its own frames: a second, and in all."""

    frames: np.ndarray
    indices: tuple[int, ...]
    fps: float
    total: int

    @property
    def rate(self) -> float:
        """Frames a second that were taken."""
        return len(self.indices) / self.total * self.fps

    def times(self, merged: int) -> list[float]:
        """Give the time of each `merged` frames in seconds, the middle of first and last; the end is repeated."""
        at = [*self.indices, *[self.indices[-1]] * (-len(self.indices) % merged)]
        return [
            (first / self.fps + last / self.fps) / 2
            for first, last in zip(at[::merged], at[merged - 1 :: merged], strict=True)
        ]


def decode(data: bytes, pick: Callable[[int, float], Sequence[int] | np.ndarray], limits: Limits = LIMITS) -> Clip:
    """Decode the frames of a video file that pick(total, fps) names: MP4, MOV, WebM, Matroska and AVI.

    VideoError, a ValueError, says what is wrong with a file or beyond the limits; ImportError, that PyAV is not there.
    >>> clip = decode(file, partial(sample, settings))  # doctest: +SKIP
    """
    reading = partial(container.opened, data, "video", VideoError)
    with reading() as file:
        stream, total, fps = _stream(file, limits.pixels)
        size = stream.width * stream.height
    if total == 0:  # Matroska's header does not say it
        with reading() as file:
            full = (packet for packet in file.demux(video=0) if packet.size)
            total = sum(1 for _ in islice(full, limits.total + 1))
    if not 1 <= total <= limits.total or total / fps > limits.seconds:
        expected = f"expected 1 to {limits.total}, and at most {limits.seconds:g} seconds"
        raise VideoError(f"found {total} frames, {fps:g} a second; {expected}; cut the file")
    if total * size > limits.work:
        expected = f"expected at most {limits.work} pixels of all of them; cut the file, or make them smaller"
        raise VideoError(f"found {total} frames of {stream.width} x {stream.height} pixels, {expected}")
    wanted = [int(i) for i in pick(total, fps)]
    most = min(limits.frames, limits.volume // size)
    if not 1 <= len(wanted) <= most:
        raise VideoError(f"found {len(wanted)} frames to take, expected 1 to {most} of their size; take fewer a second")
    if wanted != sorted(wanted) or wanted[0] < 0 or wanted[-1] >= total:
        raise ValueError(f"pick: found {wanted}, expected rising numbers from 0 to {total - 1}")
    with reading() as file:
        found = _taken(file, wanted, limits.pixels)
    return Clip(np.stack(found), tuple(wanted), fps, total)


def _stream(file: Any, pixels: int) -> tuple[Any, int, float]:
    """Give the first stream of pictures, how many it has (0: it does not say), and how many a second."""
    if not file.streams.video:
        raise VideoError("the file has no pictures, expected a video")
    stream = file.streams.video[0]
    if stream.codec_context is None or stream.codec_context.name.removeprefix("lib") not in {*CODECS, "dav1d"}:
        name = stream.codec_context.name if stream.codec_context else "none"
        raise VideoError(f"found a video of codec {name}, expected one of {', '.join(CODECS)}")
    _bound(stream.width, stream.height, pixels)
    fps = float(stream.average_rate or 0)
    if not 0 < fps < 1000:
        raise VideoError(f"found {fps:g} frames a second, expected more than 0 and fewer than 1000")
    stream.thread_type, stream.codec_context.thread_count = "NONE", 1
    return stream, stream.frames, fps


def _bound(width: int, height: int, pixels: int) -> None:
    if width < 1 or height < 1 or width * height > pixels:
        raise VideoError(f"found frames of {width} x {height} pixels, expected 1 to {pixels}; make them smaller")


def _taken(file: Any, wanted: Sequence[int], pixels: int) -> list[np.ndarray]:
    """Decode the frames of these numbers; the last one stands for those that a file says it has and has not."""
    stream, _, _ = _stream(file, pixels)
    often = Counter(wanted)
    out, last = list[np.ndarray](), None
    for i, frame in enumerate(file.decode(stream)):
        _bound(frame.width, frame.height, pixels)
        if out and (frame.height, frame.width) != out[0].shape[:2]:
            found = f"found frames of {frame.width} x {frame.height} pixels behind others"
            raise VideoError(f"{found}; expected all of one size")
        last = frame
        if i in often:
            out += [frame.to_ndarray(format="rgb24")] * often[i]
        if i >= wanted[-1]:
            break
    if last is None:
        raise VideoError("the file has no frame that can be decoded; it is cut off or broken")
    return out + [last.to_ndarray(format="rgb24")] * (len(wanted) - len(out))
