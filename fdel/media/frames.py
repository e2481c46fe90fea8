"""Frames of video files, and what they play, by PyAV (extra `video`).

What a file says of its sizes is checked before anything of those sizes is made. A file is read as the container that its
first bytes name, never as a playlist of other files, and nothing that it names is opened. Frames are as they are stored:
a turned one is not put upright.
"""

import io
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from fdel.media import image, sound

CODECS = ("h264", "hevc", "av1", "vp8", "vp9", "mpeg4", "mjpeg", "mpeg2video", "mpeg1video")

SOUNDS = ("aac", "mp3", "mp3float", "opus", "vorbis", "flac", "alac", "pcm_s16le", "pcm_s16be", "pcm_f32le")
ALONE = {"protocol_whitelist": "none"}  # a file may name others; FFmpeg opens none of them


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
    av = _pyav()
    kind = container(data)
    with _reading(av, data, kind) as file:
        stream, total, fps = _stream(file, limits.pixels)
        size = stream.width * stream.height
    if total == 0:  # Matroska's header does not say it
        with _reading(av, data, kind) as file:
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
    with _reading(av, data, kind) as file:
        found = _taken(file, wanted, limits.pixels)
    return Clip(np.stack(found), tuple(wanted), fps, total)


def listen(data: bytes, *, most: float) -> np.ndarray | None:
    """Decode what a video file plays: float32[samples] at 16 kHz, the mean of its channels; None for a silent film.

    VideoError or SoundError, ValueErrors, for what cannot be read or is longer than `most` seconds.
    """
    av = _pyav()
    found = list[np.ndarray]()
    with _reading(av, data, container(data)) as file:
        if not file.streams.audio:
            return None
        stream = file.streams.audio[0]
        codec = stream.codec_context
        if codec is None or codec.name not in SOUNDS:
            name = "none" if codec is None else codec.name
            raise VideoError(f"found a sound of codec {name} in the video, expected one of {', '.join(SOUNDS)}")
        rate, left = codec.sample_rate, math.ceil(most * codec.sample_rate)
        sound.sane(codec.channels, rate)
        codec.thread_count = 1
        plain = av.AudioResampler("fltp", codec.layout, rate)
        for frame in file.decode(stream):
            left -= frame.samples
            if left < 0:
                raise VideoError(f"found more than {most:g} seconds of sound in the video; cut the file")
            found += [x.to_ndarray().mean(0) for x in plain.resample(frame)]
    return sound.resample(sound.finite(np.concatenate(found)), rate) if found else None


@contextmanager
def _reading(av: Any, data: bytes, kind: str) -> Iterator[Any]:
    """Open a file; what PyAV raises for a bad one is a VideoError."""
    try:
        with av.open(io.BytesIO(data), format=kind, options=ALONE) as file:
            yield file
    except (VideoError, sound.SoundError):
        raise
    except (av.error.FFmpegError, *image.BROKEN) as e:
        raise VideoError(f"the video cannot be read ({type(e).__name__}: {e}); it is cut off or broken") from e


def container(data: bytes) -> str:
    """Name the container of a file by its first bytes; VideoError for others than are read."""
    if data[4:8] == b"ftyp":
        return "mp4"
    if data[:4] == b"\x1aE\xdf\xa3":
        return "matroska"
    if data[:4] == b"RIFF" and data[8:12] == b"AVI ":
        return "avi"
    found = f"found {data[:12]!r} at the beginning of the file" if data else "found nothing"
    raise VideoError(f"{found}, no video of a known container; expected MP4, MOV, WebM, Matroska or AVI")


def _pyav() -> Any:
    try:
        import av
    except ImportError as e:
        raise ImportError("videos need PyAV, which the extra 'video' brings: pip install 'fdel[video]'") from e
    return av


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
