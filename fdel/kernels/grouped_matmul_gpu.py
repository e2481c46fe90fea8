"""Products of groups of rows with a matrix each, on NVIDIA Hopper: Pallas Mosaic GPU kernels forward and backward.

A persistent grid, one program for each multiprocessor, walks tiles of the result; one group of warps copies what the next
steps need while two others multiply on tensor cores. A tile gives rows of one group alone, from the last multiple of 8 on
before the group's first row, as TMA copies 8 rows together (a list of tiles is made from the sizes; megablocks, arXiv
2211.15841, pads groups instead), so a group without rows is not read. Some rows of a tile are stored in powers of two.
Tiles of 8 times all outputs follow each other, so that the second-level cache serves rows and matrices again. *Many rows*
for a group: tiles of 128 rows and up to 256 outputs. *Few rows*, of decoding: tiles of 64 rows, where matrices alone
matter. The gradient of a matrix is a product over its group's rows: what a chunk of 64 has of other groups is set to zero
in shared memory.

Bytes: each group's matrix for every 1,024 of its rows, and these for every 16 tiles of outputs. FLOPs: 2 * rows * inputs *
outputs, for each pass. Of jax's own, `ragged_dot_mgpu` reads matrices of empty groups and cuts rows at multiples of a tile,
`transposed_ragged_dot_mgpu` asks a device for its size. Interpreted, and measured on an H100 (docs/kernels_hopper.md).
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fdel.kernels import grouped_quantized_gpu
from fdel.kernels.device import no_hopper, unknown
from fdel.kernels.grouped_program_gpu import DEPTH, GROUPS, PIECES, ROWS, STEP, Tiling, of_matrices, of_rows, run
from fdel.kernels.transfer_gpu import COPIED
from fdel.ops.dispatch import TABLES
from fdel.ops.weights import LowRank, Quantized, Weight, dequantize, is_weight

WIDTHS = {1: (256, 192, 128, 96), 2: (128, 96)}  # outputs that a tile may have, of one matrix and of two
FEW = 96  # rows of a group on average, from which on tiles have 128


def unsupported(x: Array, w: Any, sizes: Array) -> str | None:
    """Say why the kernel cannot serve this call, or None."""
    if why := no_hopper():
        return why
    if isinstance(w, Quantized):
        return grouped_quantized_gpu.unsupported(x, w, sizes)
    if isinstance(w, LowRank):
        if w.ndim != 3 or (w.a.ndim, w.b.ndim) != (3, 3):
            return f"low-rank factors {w.a.shape} and {w.b.shape}; expected [E R K] and [E N R]"
        return unsupported(x, w.base, sizes)
    if is_weight(w):
        return f"weights are arrays; found {type(w).__name__}"
    if x.dtype != w.dtype or x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it multiplies bfloat16 or float16; found {x.dtype} and {w.dtype}"
    if w.ndim != 3 or x.ndim != 2 or (*sizes.shape, x.shape[1]) != w.shape[::2]:
        return f"x {x.shape}, w {w.shape}, sizes {sizes.shape}; expected [M K], [E N K], [E]"
    if w.shape[1] % PIECES[-1] or w.shape[2] % PIECES[-1]:
        return f"matrices of {w.shape[1]} outputs and {w.shape[2]} inputs; expected multiples of {PIECES[-1]}"
    return None


def unproven(x: Array, w: Any, sizes: Array) -> str | None:
    """Say why the kernel is taken only where it is named, or None: matrices in bfloat16 were measured on an H100."""
    if isinstance(w, Quantized):
        return grouped_quantized_gpu.unproven(x, w)
    if why := unknown():
        return why
    found = type(w).__name__ if is_weight(w) else str(w.dtype)
    return None if found == "bfloat16" else f"it has been measured with matrices in bfloat16; found {found}"


def call(x: Float[Array, "M K"], w: Weight, sizes: Int[Array, " E"]) -> Float[Array, "M N"]:
    """Multiply as `ops.grouped_matmul`; sums are float32. Low-rank factors, which are narrow, are the reference's."""
    if isinstance(w, Quantized):
        return frozen(False, x, jax.tree.map(jax.lax.stop_gradient, w), sizes.astype(jnp.int32))
    if isinstance(w, LowRank):
        scale = jax.lax.stop_gradient(w.scale).astype(w.b.dtype)[:, None, None]
        low = _reference(x, w.a.astype(x.dtype), sizes)
        return call(x, w.base, sizes) + _reference(low, (w.b * scale).astype(x.dtype), sizes)
    return product(False, x, w, sizes.astype(jnp.int32))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(interpreted: bool, x: Array, w: Array, sizes: Array) -> Array:
    """Multiply rows with the matrices of their groups; see `call`. `interpreted`: leave out what the interpreter lacks."""
    return rows_times(x, (w,), sizes, tiling(x, w, True, interpreted))[0]


def _backward(interpreted: bool, saved: tuple, dy: Array) -> tuple[Array, Array, None]:
    x, w, sizes = saved
    dx = rows_times(dy, (w,), sizes, tiling(dy, w, False, interpreted))[0]
    return dx, gradient_of_matrices(x, dy, sizes, interpreted), None


product.defvjp(lambda interpreted, *args: (product(interpreted, *args), args), _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def frozen(interpreted: bool, x: Array, w: Quantized, sizes: Array) -> Array:
    """Multiply with quantized matrices as they are stored; rows alone have a gradient."""
    how = replace(grouped_quantized_gpu.tiling(x, w), in_memory=interpreted)
    return grouped_quantized_gpu.product(x, w, how, functools.partial(tiles, sizes))


def _frozen_backward(interpreted: bool, saved: tuple[Quantized, Array], dy: Array) -> tuple[Array, None, None]:
    w, sizes = saved  # expanded anew: as much memory as the matrices of one layer
    full = dequantize(w, dy.dtype)
    return rows_times(dy, (full,), sizes, tiling(dy, full, False, interpreted))[0], None, None


frozen.defvjp(lambda interpreted, x, w, sizes: (frozen(interpreted, x, w, sizes), (w, sizes)), _frozen_backward)


def _reference(x: Array, w: Any, sizes: Array) -> Array:
    return TABLES["grouped_matmul"].implementations["xla"].call(x, w, sizes)


def tiling(x: Any, w: Any, turned: bool, interpreted: bool = False, matrices: int = 1) -> Tiling:
    """Choose the tiles for rows [M inputs] and so many matrices [E N K]."""
    outputs, few = w.shape[1 if turned else 2], len(x) < FEW * len(w)
    together, parts = piece(x.shape[1], w.shape[2]), 1 + few
    fit = [n for n in WIDTHS[matrices] if turned or n // parts % together == 0]
    return Tiling(few, _width(outputs, fit) // parts, turned, together, matrices, interpreted)


def _width(outputs: int, widths: Sequence[int]) -> int:
    """Choose how many outputs a tile has: as were measured where these divide all, else so that all tiles cost least.

    What a tile costs beside its outputs, reading rows for one, is taken for as much as 32 more cost.
    """
    measured = (n for n in (256, 128) if n in widths and outputs % n == 0)
    return next(measured, min(widths, key=lambda n: -(-outputs // n) * (n + 32)))


def tiles(sizes: Int[Array, " E"], many: int, rows: int) -> tuple[Int[Array, "tiles 4"], Int[Array, " 1"]]:
    """List tiles of so many rows, each for one group: group, first row, first row of the group, its end; and their number.

    First rows of tiles are multiples of 8. Rows of no group are those of group E.
    """
    sizes = jnp.append(sizes, many - sizes.sum()).astype(jnp.int32)
    top, first, end = bounds(sizes).T
    last = _sums(count := -(-(end - top) // rows))
    some = min(len(sizes), many)  # groups that have rows, at most
    i = jnp.arange((many + (COPIED - 1) * some) // rows + some, dtype=jnp.int32)
    group = jnp.minimum(jnp.searchsorted(last, i, side="right", method="compare_all"), len(sizes) - 1).astype(jnp.int32)
    top = top[group] + (i - last[group] + count[group]) * rows
    return jnp.stack([group, top, *(jnp.clip(x[group], top, top + rows) for x in (first, end))], 1), last[-1:]


def bounds(sizes: Int[Array, " E"]) -> Int[Array, "E 3"]:
    """Give the row from which on each group is copied, a multiple of 8, its first row, and its end."""
    ends = _sums(sizes)
    first = ends - sizes
    return jnp.stack([jnp.where(sizes > 0, first - first % COPIED, ends), first, ends], 1)


def _sums(x: Int[Array, " E"]) -> Int[Array, " E"]:
    """Add up to each, in one program of XLA; its own for sums so far are several."""
    i = jnp.arange(len(x))
    return jnp.where(i <= i[:, None], x, 0).sum(1, dtype=jnp.int32)


def _whole(x: Array, least: int) -> Array:
    """Append rows of no group, up to `least` and to whole tiles of 8 rows, which are what is copied."""
    return jnp.pad(x, ((0, max(least - len(x), -len(x) % COPIED)), (0, 0)))


def piece(*columns: int) -> int:
    """Give the most columns that lie together of arrays with so many, multiples of 16."""
    return next(n for n in PIECES if not any(c % n for c in columns))


def memory(
    dtype: Any, left: tuple[int, ...], right: tuple[int, ...], together: int, width: int, outputs: int
) -> dict[str, Any]:
    """Give the shared memory of a kernel: two operands for each step on its way, and what is on its way out.

    `together`: columns of operands that lie together; `width`: outputs of a group of warps, of so many in all.
    """
    from jax.experimental.pallas import mosaic_gpu as gpu

    stored = math.gcd(width, PIECES[0])  # columns at a time
    tiled = lambda n: (gpu.TilingTransform((8, n)), gpu.SwizzleTransform(n * jnp.dtype(dtype).itemsize))
    return {
        "left": gpu.SMEM((DEPTH, *left), dtype, transforms=tiled(together)),
        "right": gpu.SMEM((DEPTH, *right), dtype, transforms=tiled(together)),
        "out_s": gpu.SMEM((GROUPS, ROWS, stored), dtype, transforms=tiled(piece(stored, outputs))),
        "full": gpu.Barrier(num_arrivals=left[0] + right[0], num_barriers=DEPTH),
        "free": gpu.Barrier(num_arrivals=GROUPS, num_barriers=DEPTH),
    }


def rows_times(x: Array, w: tuple, sizes: Array, t: Tiling, join: tuple[Callable, ...] = (lambda y: y,)) -> tuple:
    """Multiply rows [M inputs] with one matrix or several: [M outputs] for each function of the float32 sums in `join`."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    many = len(x)
    x = _whole(x, t.rows)
    table, count = tiles(sizes, len(x), t.rows)
    matrix = (t.width, STEP) if t.turned else (STEP, t.width)
    out = jax.ShapeDtypeStruct((len(x), w[0].shape[1 if t.turned else 2]), x.dtype)
    scratch = memory(x.dtype, (t.parts[0], ROWS, STEP), (len(w) * t.parts[1], *matrix), t.piece, t.width, out.shape[1])
    scratch["part_s"] = gpu.SMEM(scratch["out_s"].shape, x.dtype)  # rows of it are copied out
    found = run(functools.partial(of_rows, t=t, join=join), (out,) * len(join), scratch, x, *w, table, count)
    return tuple(y[:many] for y in found)


def gradient_of_matrices(x: Array, dy: Array, sizes: Array, interpreted: bool) -> Array:
    """Give the gradients of matrices [E N K]: of each the product of dy [rows N] and x [rows K] over its rows."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    x, dy = _whole(x, STEP), _whole(dy, STEP)
    together = piece(x.shape[1], dy.shape[1])
    width = _width(x.shape[1], WIDTHS[1][:-1])
    scratch = memory(x.dtype, (GROUPS, STEP, ROWS), (1, STEP, width), together, width, x.shape[1])
    scratch["both"] = gpu.Barrier(num_arrivals=GROUPS)
    out = jax.ShapeDtypeStruct((len(sizes), dy.shape[1], x.shape[1]), x.dtype)
    program = functools.partial(of_matrices, width=width, interpreted=interpreted)
    return run(program, out, scratch, x, dy, bounds(sizes))
