"""Products of groups of rows with a quantized matrix each, on TPUs: the kernel of `quantized_matmul_tpu` for experts.

A tile has rows of one group alone: rows are copied to tiles, the last of a group filled with zeros, and results back.
The kernel reads the matrices of groups with rows as they are stored, once for each tile, so tiles have about twice as
many rows as a group has on average. Two cores share the tiles. What a step does with a block, few rows or many, and how
bits are decoded, are that kernel's programs. With many rows the copies and the tiles of a group, each of which decodes its
matrix, take longer than to expand all matrices once: `grouped_matmul_tpu` then does that.

Bytes read: matrices of groups with rows and their scales, once for each tile. FLOPs: 2 * rows of tiles * inputs * outputs.
Interpreted on CPU and compiled for v5p and v6e; it has not run on a TPU yet.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fdel.kernels import quantized_matmul_tpu as kernel
from fdel.kernels.device import no_tpu
from fdel.ops.weights import Quantized

# Up to so many rows of a group on average: rows of a tile.
TILES = {4: 8, 8: 16, 16: 32, 32: 64, 64: 128}
FEW = 64  # rows of a group on average, above which matrices are better expanded
# Of few rows: outputs of a block at most, its bytes, and numbers of a product. A step costs some 130 cycles beside.
OUTPUTS, BLOCK, SUMS = 1024, 5 * 2**18, 48 * 2**10


def unsupported(x: Array, w: Quantized, sizes: Array) -> str | None:
    """Say why the kernel cannot serve this call, or None."""
    if why := no_tpu():
        return why
    if w.order is not None:
        return "a weight whose inputs have an order of their own"
    if w.ndim != 3 or len(w.inputs) != 1 or x.ndim != 2 or (*sizes.shape, x.shape[1]) != w.shape[::2]:
        return f"x {x.shape}, w {w.shape}, sizes {sizes.shape}; expected [M K], [E N K], [E]"
    return kernel.unreadable(x, w)


def product(x: Float[Array, "M K"], w: Quantized, sizes: Int[Array, " E"], cores: int) -> Float[Array, "M N"]:
    """Multiply as `ops.grouped_matmul`, on a device of so many cores; sums are float32."""
    w = kernel.stored(w)
    t = tiling(len(x), w, x.dtype)
    visits, source, place = tiles(sizes, len(x), t.rows, cores)
    x = jnp.pad(kernel.laid(x, t, w), ((0, 1), (0, 0)))  # a row of zeros
    y = kernel.product(t, x.at[source].get(mode="promise_in_bounds"), w, visits, cores)
    return y.at[place].get(mode="fill", fill_value=0)


def tiling(many: int, w: Quantized, dtype: Any) -> kernel.Tiling:
    """Cut a call with so many rows into blocks; `w` is as of `quantized_matmul_tpu.stored`."""
    rows = next((n for most, n in TILES.items() if many <= most * w.shape[0]), max(TILES.values()))
    t = kernel.tiling(jax.ShapeDtypeStruct((rows, w.shape[2]), dtype), w, dtype)
    if not t.few:
        return t
    count, lanes = w.values.shape[1:]
    most = min(OUTPUTS, BLOCK // lanes, SUMS // (t.rows * t.digits * t.beside))
    blocks = -(-count // max(t.outputs, most))
    return t._replace(outputs=-(-count // (blocks * kernel.LANES)) * kernel.LANES)


def tiles(sizes: Int[Array, " E"], many: int, rows: int, cores: int) -> tuple[kernel.Visits, Array, Array]:
    """List tiles of so many rows; which row each of theirs is (or `many`), and where each row of x is in them.

    There is a tile more than groups and rows can need, for the core that has one less; rows of no group are nowhere.
    """
    count, ends, last = min(len(sizes), many) + many // rows, jnp.cumsum(sizes), jnp.cumsum(-(-sizes // rows))
    moved = ends - sizes - (last + sizes // -rows) * rows  # less than rows of tiles, of each group
    which = lambda bounds, at: jnp.searchsorted(bounds, at, side="right", method="compare_all")
    tile, row = jnp.arange(count + 1, dtype=jnp.int32), jnp.arange(many)
    group = jnp.minimum(which(last, jnp.minimum(tile, last[-1] - 1)), len(sizes) - 1)
    source = (moved[group] + tile * rows)[:, None] + jnp.arange(rows)
    source = jnp.where(source < jnp.where(tile < last[-1], ends[group], 0)[:, None], source, many)
    mine = which(ends, row)
    place = jnp.where(mine < len(sizes), row - moved[mine], len(tile) * rows)
    each = -(-jnp.maximum(last[-1:], 1) // cores)
    return kernel.Visits(group.astype(jnp.int32), each.astype(jnp.int32)), source.reshape(-1), place
