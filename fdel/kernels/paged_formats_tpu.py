"""Cached keys and values in 8 bits, read in the fast memory of a TPU: for `paged_program_tpu`.

Pages arrive as bytes, their scales beside them, as `ops.quantized_pages.scale_rows` lays them out. A byte becomes a number
of the queries' dtype, which holds every int8 and e4m3 exactly. Where a token of a head has one scale, that is a factor of
its scores and of its probabilities, so no key or value is multiplied: `factors` lays a group's scales out as scores have
keys. Latents have a scale for every 64 channels: `decoded` writes a group as numbers, rounded as `decode` does.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from fdel.kernels.quantized_formats_tpu import FLOATS
from fdel.ops.paged import LANES
from fdel.ops.quantized_pages import GROUP

FP8, UNIT = FLOATS["fp8"]


def unit(dtype: Any) -> float:
    """Give what `numbers` of bytes of a dtype are multiples of."""
    return UNIT if dtype == jnp.uint8 else 1.0


def numbers(raw: Array, dtype: Any) -> Array:
    """Read bytes [keys, channels] as numbers of a dtype, less their unit; no bits are NaN."""
    from jax.experimental.pallas import tpu as pltpu

    if raw.dtype == jnp.uint8:  # bits of e4m3; a TPU unpacks those of another bias, which has no -0: it becomes 0
        each = lambda byte: jnp.int32(np.uint32(byte * 0x01010101).view(np.int32))
        words = pltpu.bitcast(raw, jnp.int32)
        raw = pltpu.bitcast(words & ((words & each(0x7F)) + each(0x7F) | each(0x7F)), FP8)
    return raw.astype(dtype)


def factors(kept: Any, out: Any, slot: Any, size: int, times: float, count: Any = None) -> None:
    """Lay out the scales of a group of pages of `size` tokens, kept [2 group K 1 lanes], in out [K keys], times a number.

    Keys from `count` get 0: what they hold may be NaN, and that times a probability of 0 would be, too.
    """
    from jax.experimental.pallas import tpu as pltpu

    _, group, heads, _, width = kept.shape
    side = width // size  # pages in a row of `out`
    page = lambda i: kept[slot, i, :, 0]
    lane = jax.lax.broadcasted_iota(jnp.int32, (heads, width), 1)
    for row in range(out.shape[1] // width):
        x = page(row * side)
        for i in range(1, min(side, group - row * side)):
            x = jnp.where(lane < i * size, x, pltpu.roll(page(row * side + i), i * size, 1))
        x = x * times
        out[:, row * width : (row + 1) * width] = x if count is None else jnp.where(lane + row * width < count, x, 0)


def decoded(stored: Any, kept: Any, out: Any, slot: Any, count: Any) -> None:
    """Write a group of pages of latents [2 group 1 size C] as numbers out [keys C]; keys from `count` as zeros."""
    from jax.experimental import pallas as pl

    _, group, _, size, width = stored.shape
    rows = kept.shape[3]
    lane = jax.lax.broadcasted_iota(jnp.int32, (size, LANES), 1)
    token = jax.lax.broadcasted_iota(jnp.int32, (size, LANES), 0)

    def page(i: Any, _: None) -> None:
        across = kept[slot, i, 0].T  # [lanes rows]: scale j of token t in row j // rows * size + t

        def scale(j: int) -> Array:
            first = j // rows * size
            return across[first : first + size, j % rows : j % rows + 1]

        here = token < count - i * size
        for c in range(0, width, LANES):
            x = numbers(stored[slot, i, 0, :, c : c + LANES], jnp.float32) * unit(stored.dtype)
            both = jnp.where(lane < GROUP, scale(c // GROUP), scale(c // GROUP + 1))
            out[pl.ds(pl.multiple_of(i * size, size), size), c : c + LANES] = jnp.where(here, x * both, 0).astype(
                out.dtype
            )

    jax.lax.fori_loop(0, group, page, None)
