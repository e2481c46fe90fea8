"""Tiles of attention on Hopper, for both passes, and the mask inside of one; `flash_tiles` says which tiles meet."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from fdel.kernels import transfer_gpu
from fdel.kernels.flash_tiles import HIGH, LOW, SECOND, SEGMENT, Tests, Tiles

# Of heads by their channels of keys and of values: what shared memory and registers hold. Multiples of 64, which is what
# one product of a group of warps takes. In the forward pass two groups of warps have half of the queries each.
FORWARD = {
    (64, 64): Tiles(128, 128),
    (128, 128): Tiles(128, 128),
    (192, 128): Tiles(128, 128),
    (256, 256): Tiles(128, 64),
}
BACKWARD = {(64, 64): Tiles(64, 128), (128, 128): Tiles(64, 128), (192, 128): Tiles(64, 64), (256, 256): Tiles(64, 64)}


def seen(
    asked: Tests, numbers: Any, k_segments: Any, first: Any, shape: tuple[int, int], queries_axis: int = 0
) -> Bool[Array, "rows columns"]:
    """Tell, in registers, which queries and keys of a tile see each other.

    `numbers` [4 queries] and `k_segments` [keys] are references to shared memory, or to arguments; `first` is the index of
    the first key. Queries are the rows of the tile, or with `queries_axis` 1 its columns. Numbers are read whenever they
    are asked for: held, they would take registers.
    """
    from jax.experimental.pallas import mosaic_gpu as gpu

    def spread(ref: Any, axis: int) -> Array:
        x = transfer_gpu.load(ref, layout=gpu.Layout.WGMMA.reduce(1 - axis), optimized=False)
        return jax.lax.broadcast_in_dim(x, shape, [axis])

    of_queries = lambda which: spread(numbers.at[which], queries_axis)
    ks = spread(k_segments, 1 - queries_axis)
    found = of_queries(SEGMENT) == ks
    if asked.two:
        found |= of_queries(SECOND) == ks
    if asked.low or asked.high:
        ki, less = gpu.broadcasted_iota(jnp.int32, shape, 1 - queries_axis, layout=gpu.Layout.WGMMA), 0
        if queries_axis == 0:  # a thread's columns are 8 n + lane and the next: without it constants, no registers
            lane = jnp.bitwise_and(ki, 6)
            ki, less = ki - lane, first + lane
        else:
            ki += first
        if asked.low:
            found &= ki >= of_queries(LOW) - less
        if asked.high:
            found &= ki <= of_queries(HIGH) - less
    return found
