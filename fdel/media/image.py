"""Images as arrays: decoding, and what image processors do to them as plain functions, equal to transformers' bit for bit.

Pillow decodes and resizes (extra `media`). What a file says of its size is checked before anything of that size is made.
"""

import io
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
BROKEN = (OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, TypeError, ArithmeticError, struct.error)
WHITE = (255, 255, 255, 255)
SIDE = 2**16 - 1  # pixels along a side, as JPEG has them: pillow holds an address for each row
RESIZED = 2**26  # pixels of what an image is resized to, which may be far more than it has if one side is very short


class ImageError(ValueError):
    """A file that is no image that can be read, or too large."""


@dataclass(frozen=True)
class Picture:
    """An image as a family's tower takes it, and the tokens that stand for it in a prompt.

    `places` are frame, row and column of each patch. `run` replaces one placeholder; those of its tokens that are entries
    (see `sight.Sight.entries`) take what the tower gives, in order. `turns` are the time, row and column by which a family
    with rotary embeddings of three components turns each token of the run, counted from where the run begins.
    """

    patches: np.ndarray  # float32[P numbers]
    places: np.ndarray  # int32[P 3]
    run: tuple[int, ...]
    turns: np.ndarray | None = None  # int32[len(run) 3]


def decode(data: bytes, *, pixels: int) -> np.ndarray:
    """Decode an image file of at most `pixels` pixels: uint8[H W 3], the first frame, upright, on white where transparent.

    PNG, JPEG, WebP, GIF and BMP. ImageError, a ValueError, says what is wrong with a file.
    """
    image = _pillow()
    try:
        with image.open(io.BytesIO(data), formats=FORMATS) as file:
            width, height = file.size
            if width * height > pixels:
                raise ImageError(f"the image has {width} x {height} pixels, expected at most {pixels}; make it smaller")
            if max(width, height) > SIDE:
                raise ImageError(
                    f"the image has {width} x {height} pixels, expected at most {SIDE} along a side; cut it"
                )
            file.load()
            return _upright(file)
    except ImageError:
        raise
    except image.UnidentifiedImageError as e:
        found = f"found {data[:12]!r}" if data else "found nothing"
        raise ImageError(f"{found}, no image of a known format; expected {', '.join(FORMATS)}") from e
    except image.DecompressionBombError as e:
        raise ImageError(f"the image has far more than {pixels} pixels; make it smaller") from e
    except BROKEN as e:
        raise ImageError("the file is damaged or not an image that can be read; it may be cut off") from e


def encode(image: Any) -> bytes:
    """Write an image, pillow's or uint8[H W 3], as a PNG file, upright."""
    pillow, out = _pillow(), io.BytesIO()
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            raise ValueError(f"found an image {image.dtype}{list(image.shape)}, expected uint8[height, width, 3]")
        image = pillow.fromarray(image)
    from PIL import ImageOps

    image = ImageOps.exif_transpose(image)
    (image if image.mode in ("RGB", "RGBA", "L", "P") else image.convert("RGBA")).save(out, "PNG")
    return out.getvalue()


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as e:
        raise ImportError("images need pillow, which the extra 'media' brings: pip install 'fdel[media]'") from e
    return Image


def _upright(file: Any) -> np.ndarray:
    from PIL import Image, ImageOps

    file = ImageOps.exif_transpose(file)
    if "A" in file.getbands() or file.info.get("transparency") is not None:
        file = file.convert("RGBA")
        file = Image.alpha_composite(Image.new("RGBA", file.size, WHITE), file)
    return np.array(file.convert("RGB"))


def resize(rgb: np.ndarray, height: int, width: int, resample: int = 3) -> np.ndarray:
    """Resize uint8[H W 3] by pillow, antialiased; `resample` is its number of the filter, 3 the bicubic one.

    ImageError for a result of more than RESIZED pixels.
    """
    if rgb.shape[:2] == (height, width):
        return rgb
    if height * width > RESIZED:
        found = f"the image has {rgb.shape[1]} x {rgb.shape[0]} pixels, which a processor makes {width} x {height}"
        raise ImageError(f"{found}, expected at most {RESIZED}; cut its longer side")
    return np.array(_pillow().fromarray(rgb).resize((width, height), resample=resample))


def shortest(height: int, width: int, edge: int) -> tuple[int, int]:
    """Give (height, width) of the same shape whose shorter side is `edge`."""
    long = int(edge * max(height, width) / min(height, width))
    return (long, edge) if width <= height else (edge, long)


def square(rgb: np.ndarray, color: Sequence[int]) -> np.ndarray:
    """Pad to a square with a color, the image in the middle."""
    height, width, _ = rgb.shape
    side = max(height, width)
    out = np.empty((side, side, 3), rgb.dtype)
    out[:] = color
    top, left = (side - height) // 2, (side - width) // 2
    out[top : top + height, left : left + width] = rgb
    return out


def center_crop(rgb: np.ndarray, height: int, width: int) -> np.ndarray:
    """Cut the middle out; what is smaller is padded with zeros."""
    h, w, _ = rgb.shape
    high, wide = max(height, h), max(width, w)
    whole = np.zeros((high, wide, 3), rgb.dtype)
    top, left = (high - h + 1) // 2, (wide - w + 1) // 2
    whole[top : top + h, left : left + w] = rgb
    top, left = (h - height) // 2 + top, (w - width) // 2 + left
    return whole[top : top + height, left : left + width]


def rescale(rgb: np.ndarray, factor: float) -> np.ndarray:
    """Multiply in float64: float32[H W 3]."""
    return (rgb.astype(np.float64) * factor).astype(np.float32)


def normalize(x: np.ndarray, mean: Sequence[float], std: Sequence[float]) -> np.ndarray:
    """Compute (x - mean) / std of each channel: float32[H W 3]."""
    x = x.astype(np.float32)
    return (x - np.array(mean, x.dtype)) / np.array(std, x.dtype)


def patches(x: np.ndarray, size: int, merge: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Cut [H W 3] into squares, row by row: float32[P 3 * size * size], channels first, and places int32[P 3].

    With `merge` the patches of each square of merge x merge ones stand one after the other. Sizes that do not divide
    height and width are a ValueError.
    """
    height, width, channels = x.shape
    if height % (size * merge) or width % (size * merge):
        raise ValueError(
            f"an image of {height} x {width} pixels does not divide into {merge} x {merge} patches of {size}"
        )
    rows, columns = height // size, width // size
    cut = x.reshape(rows, size, columns, size, channels).transpose(0, 2, 4, 1, 3).reshape(rows, columns, -1)
    places = np.zeros((rows, columns, 3), np.int32)
    places[..., 1], places[..., 2] = np.arange(rows)[:, None], np.arange(columns)
    blocks = lambda a: (
        a.reshape(rows // merge, merge, columns // merge, merge, -1).swapaxes(1, 2).reshape(len(a) * columns, -1)
    )
    return blocks(cut).astype(np.float32), blocks(places)
