"""Cached keys and values in 8 bits, "int8" or "fp8": every token is written once, with scales of its own.

So pages never need other scales later, and what a page holds depends on its tokens alone: not on chunks, not on company.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Integer

from fdel.ops.weights import from_e4m3, split

# format -> (dtype of the pages, the greatest value). fp8 is e4m3, kept as its bits, which XLA:CPU reads faster.
FORMATS = {"int8": ("int8", 127.0), "fp8": ("uint8", 448.0)}
WIDE, GROUP = 256, 64  # longer vectors (MLA: latents beside rotary keys) have a scale for every 64 channels


def scales(size: int) -> int:
    """How many scales a vector of `size` channels has."""
    return size // GROUP if size > WIDE and size % GROUP == 0 else 1


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
