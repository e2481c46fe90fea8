"""Containers of pictures and sounds (MP4, Matroska, AVI), opened by PyAV (extra `video`).

A file is read as the container that its first bytes name, never as a playlist of other files, and nothing that it names
is opened.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fdel.media import image

ALONE = {"protocol_whitelist": "none"}  # a file may name others; FFmpeg opens none of them


def kind(data: bytes) -> str | None:
    """Name the container of a file by its first bytes, as FFmpeg does; None for others than are read."""
    if data[4:8] == b"ftyp":
        return "mp4"
    if data[:4] == b"\x1aE\xdf\xa3":
        return "matroska"
    return "avi" if data[:4] == b"RIFF" and data[8:12] == b"AVI " else None


@contextmanager
def opened(data: bytes, what: str, refusal: type[ValueError]) -> Iterator[Any]:
    """Open a file as its `kind`. A bad one is a `refusal`, an error which says that it is no `what`."""
    av, name = pyav(), kind(data)
    if name is None:
        found = f"found {data[:12]!r} at the beginning of the file" if data else "found nothing"
        raise refusal(f"{found}, no {what} in a known container; expected MP4, MOV, WebM, Matroska or AVI")
    try:
        with av.open(io.BytesIO(data), format=name, options=ALONE) as file:
            yield file
    except refusal:
        raise
    except (av.error.FFmpegError, *image.BROKEN) as e:  # whose texts are of their own code, not of the file
        raise refusal(f"the file is damaged or not a {what} that can be read; it may be cut off") from e


def pyav() -> Any:
    """Import PyAV; ImportError says which extra brings it."""
    try:
        import av
    except ImportError as e:
        raise ImportError("MP4, WebM and AVI need PyAV, of the extra 'video': pip install 'fdel[video]'") from e
    return av
