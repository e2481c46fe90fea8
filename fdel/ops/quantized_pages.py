"""Cached keys and values in 8 bits, "int8" or "fp8": every token is written once, with scales of its own.

So pages never need other scales later, and what a page holds depends on its tokens alone: not on chunks, not on company.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Integer

from fdel.ops import platform
from fdel.ops.weights import from_e4m3, split

# format -> (dtype of the pages, the greatest value). fp8 is e4m3, kept as its bits, which XLA:CPU reads faster.
FORMATS = {"int8": ("int8", 127.0), "fp8": ("uint8", 448.0)}
WIDE, GROUP = (
    512,
    64,
)  # longer vectors (latents beside rotary keys) have a scale for every 64 channels; no head is longer
LANES, SUBLANES = 128, 8  # of a TPU's registers


def scales(size: int) -> int:
    """How many scales a vector of `size` channels has."""
    return size // GROUP if size > WIDE and size % GROUP == 0 else 1


def scale_rows(n: int, page: int) -> tuple[int, int]:
    """Give rows and row length in which a page keeps `n` scales a token: each scale is a row of the page's tokens.

    On TPUs whole registers, whatever is left over of them unused: else XLA:TPU makes the pages the innermost axis, and each
    step copies all scales. Several scales share a row there as many times as a page fits one: scale i stands in row
    i % rows, from token (i // rows) * page.
    """
    if platform.target() != "tpu":
        return n, page
    lanes = -(-page // LANES) * LANES
    return 1 if n == 1 else -(-n // (lanes // page * SUBLANES)) * SUBLANES, lanes


def scale_places(n: int, page: int, rows: int) -> tuple[Int[Array, " n"], Int[Array, " n"]]:
    """Give the row of each scale and where the page's first token has it there."""
    i = jnp.arange(n)
    return i % rows, i // rows * page


def page_scales(kept: Float[Array, "... rows lanes"], n: int, page: int) -> Float[Array, "... page n"]:
    """Read the scales of a page's tokens, as `scale_rows` has them."""
    rows, lanes = kept.shape[-2:]
    if lanes != page:
        side = lanes // page
        kept = kept[..., : side * page].reshape(*kept.shape[:-1], side, page).swapaxes(-2, -3)
        kept = kept.reshape(*kept.shape[:-3], side * rows, page)[..., :n, :]
    return kept.swapaxes(-1, -2)


def encode(x: Float[Array, "... H"], dtype: np.dtype, n: int) -> tuple[Integer[Array, "... H"], Float[Array, "... n"]]:
    """Give the values in a format's dtype and n float32 scales: the greatest magnitude becomes the greatest value.

    Rounding loses at most half a scale (int8), or 2^-4 of a number and 2^-10 of a scale (fp8). Numbers that are not
    finite make their scale, and so all its numbers, NaN or infinite.
    """
    format = next(name for name, (stored, _) in FORMATS.items() if stored == dtype)
    parts = split(x.astype(jnp.float32), n)
    scale = jnp.max(jnp.abs(parts), -1) / FORMATS[format][1]
    parts = parts / jnp.where(scale == 0, 1, scale)[..., None]
    if format == "int8":
        return jnp.round(parts).astype(jnp.int8).reshape(x.shape), scale
    return lax.bitcast_convert_type(parts.astype(jnp.float8_e4m3fn), jnp.uint8).reshape(x.shape), scale


def decode(values: Integer[Array, "... H"], scale: Float[Array, "... n"], dtype: np.dtype) -> Float[Array, "... H"]:
    """Undo `encode`, up to its rounding; products are in float32."""
    wide = from_e4m3(values, jnp.float32) if values.dtype == jnp.uint8 else values.astype(jnp.float32)
    return (split(wide, scale.shape[-1]) * scale[..., None]).astype(dtype).reshape(values.shape)
