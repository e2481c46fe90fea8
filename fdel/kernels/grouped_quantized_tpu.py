"""Products of groups of rows with a quantized matrix each, on TPUs: the kernel of `quantized_matmul_tpu` for experts.

*Few rows* for a group, of decoding: a tile has rows of one group alone; rows are copied to tiles, the last of a group
filled with zeros, and results back. The kernel reads the matrices of groups with rows as they are stored, once for each
tile, so tiles have about twice as many rows as a group has on average. Two cores share the tiles. What a step does with a
block and how bits are decoded are that kernel's programs.

*Many rows*: `grouped_matmul_tpu`'s tiles and steps. The first step of a group expands a block of its matrix in fast memory,
scaled and rounded to x's dtype, and all of the group's rows are multiplied with that. For the gradient of rows, a product
with all outputs, matrices are expanded in memory.

Bytes read: matrices of groups with rows and their scales, of few rows once for each tile, of many once. FLOPs: 2 * rows of
tiles * inputs * outputs. Interpreted on CPU and compiled for v5p and v6e; it has not run on a TPU yet.
"""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fdel.kernels import quantized_matmul_tpu as kernel
from fdel.kernels.device import no_tpu
from fdel.kernels.grouped_program_tpu import Tiling, of_rows, parameters, visits
from fdel.kernels.quantized_program_tpu import expand
from fdel.ops.weights import Quantized, dequantize

# Up to so many rows of a group on average: rows of a tile.
TILES = {4: 8, 8: 16}
FEW = 8  # rows of a group on average, above which tiles have rows of several groups, and none is copied
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
    visited, source, place = tiles(sizes, len(x), t.rows, cores)
    x = jnp.pad(kernel.laid(x, t, w), ((0, 1), (0, 0)))  # a row of zeros
    y = kernel.product(t, x.at[source].get(mode="promise_in_bounds"), w, visited, cores)
    return y.at[place].get(mode="fill", fill_value=0)


def product_of_many(x: Float[Array, "M K"], w: Quantized, sizes: Int[Array, " E"], t: Tiling) -> Float[Array, "M N"]:
    """Multiply as `product`, in the tiles of `grouped_matmul_tpu`: a block of a matrix is expanded for all of its rows."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    w = kernel.stored(w)
    block = lambda shape, at: pl.BlockSpec((None, *shape), lambda n, v, tile, group, *_: (group[v], *at(n)))
    about, given, kept = _expanding(w, t.outputs, x.dtype, block)
    x = kernel.laid(x, about, w) if _apart(w, about) else x
    count, width, (visited, steps) = w.values.shape[1], x.shape[1], visits(sizes, len(x), t.rows, matrices=False)

    def program(tile: Any, group: Any, low: Any, high: Any, *refs: Any) -> None:
        r = SimpleNamespace(**dict(zip(("x", *given, "out", "expanded", *kept), refs, strict=True)))
        v = pl.program_id(1)
        pl.when((v == 0) | (group[v] != group[jnp.maximum(v - 1, 0)]))(lambda: expand(about, r))
        multiply = functools.partial(of_rows, t._replace(turned=False), (1, 1, 0), lambda y: [y * about.unit])
        multiply(tile, group, low, high, r.x, r.expanded.at[:, pl.ds(0, width)], r.out)

    run = pl.pallas_call(
        program,
        out_shape=jax.ShapeDtypeStruct((len(x), count), x.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(visited),
            grid=(-(-count // t.outputs), steps),
            in_specs=[
                pl.BlockSpec((t.rows, width), lambda n, v, tile, *_: (tile[v], 0)),
                *(spec for _, spec in given.values()),
            ],
            out_specs=pl.BlockSpec((t.rows, t.outputs), lambda n, v, tile, *_: (tile[v], n)),
            scratch_shapes=[pltpu.VMEM((1, about.lanes * about.halves, t.outputs), x.dtype), *kept.values()],
        ),
        compiler_params=parameters(t, "parallel", "arbitrary"),
        name="grouped_quantized",
    )
    return run(*visited, x, *(a for a, _ in given.values()))


def expanded(w: Quantized, t: Tiling, dtype: Any) -> tuple[Float[Array, "E K N"], float]:
    """Expand all matrices, in blocks of `t.outputs`: what they are multiples of is the second."""
    from jax.experimental import pallas as pl

    block = lambda shape, at: pl.BlockSpec((None, *shape), lambda e, n: (e, *at(n)))
    about, given, kept = _expanding(kernel.stored(w), t.outputs, dtype, block)
    if _apart(w, about):
        return dequantize(w, dtype).mT, 1.0
    groups, outputs, width = w.shape

    def program(*refs: Any) -> None:
        expand(about, SimpleNamespace(**dict(zip((*given, "expanded", *kept), refs, strict=True))))

    run = pl.pallas_call(
        program,
        out_shape=jax.ShapeDtypeStruct((groups, width, outputs), dtype),
        grid=(groups, -(-outputs // t.outputs)),
        in_specs=[spec for _, spec in given.values()],
        out_specs=pl.BlockSpec((1, about.lanes * about.halves, t.outputs), lambda e, n: (e, 0, n)),
        scratch_shapes=list(kept.values()),
        compiler_params=parameters(t, "parallel", "parallel"),
        name="grouped_expanded",
    )
    return run(*(a for a, _ in given.values())), about.unit


def _expanding(w: Quantized, outputs: int, dtype: Any, block: Callable) -> tuple[kernel.Tiling, dict, dict]:
    """Cut matrices into blocks to be expanded: how, what is read and its blocks, memory beside."""
    rows = jax.ShapeDtypeStruct((kernel.FEW + 1, w.shape[2]), dtype)
    about = kernel.tiling(rows, w, dtype)._replace(outputs=outputs)
    given = {"values": (w.values, block((outputs, about.lanes), lambda n: (n, 0)))} | kernel.of_groups(w, about, block)
    return about, given, kernel.kept_of_groups(about, w)


def _apart(w: Quantized, about: kernel.Tiling) -> bool:
    """Say whether the inputs of nibbles lie apart, with lanes between that no byte fills."""
    return about.halves > 1 and w.values.shape[2] < about.each


def tiling(many: int, w: Quantized, dtype: Any) -> kernel.Tiling:
    """Cut a call with so many rows into blocks; `w` is as of `quantized_matmul_tpu.stored`."""
    rows = next(n for most, n in TILES.items() if many <= most * w.shape[0])
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
