"""Products of groups of rows with a quantized matrix each, on NVIDIA Hopper: `quantized_matmul_gpu`'s program for experts.

A tile gives rows of one group alone, from a multiple of 8 on (`grouped_matmul_gpu` lists them), and has as many as hold
most groups: 8 to 128. Matrices of groups with rows are read as they are stored, once for each tile; no other is read, and
none is written to memory in bfloat16. Some rows of a tile are stored in powers of two.

Bytes: matrices of groups with rows and their scales, once for each tile. FLOPs: 2 * rows of tiles * inputs * outputs.
Interpreted and compiled for H100; MXFP4 and fp8 ran on one.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from fdel.kernels import quantized_arrays_gpu as arrays
from fdel.kernels import quantized_matmul_gpu
from fdel.kernels import quantized_program_gpu as program
from fdel.kernels.quantized_arrays_gpu import ROWS, Tiling
from fdel.kernels.transfer_gpu import COPIED
from fdel.ops.weights import Quantized


def unsupported(x: Array, w: Quantized, sizes: Array) -> str | None:
    """Say why the kernel cannot serve this call, or None."""
    if w.order is not None:
        return "a weight whose inputs have an order of their own"
    if w.ndim != 3 or len(w.inputs) != 1 or x.ndim != 2 or (*sizes.shape, x.shape[1]) != w.shape[::2]:
        return f"x {x.shape}, w {w.shape}, sizes {sizes.shape}; expected [M K], [E N K], [E]"
    return quantized_matmul_gpu.unreadable(x, w, w.shape[1])


def unproven(x: Array, w: Quantized) -> str | None:
    """Say why the kernel is taken only where it is named, or None."""
    many = not tiling(x, w).few
    return quantized_matmul_gpu.slower(w, f"{len(x)} rows of {len(w.values)} groups; expected fewer" if many else None)


def product(
    x: Float[Array, "M K"], w: Quantized, t: Tiling, tiles: Callable[[int, int], tuple[Array, Array]]
) -> Float[Array, "M N"]:
    """Multiply as `ops.grouped_matmul`; sums are float32. tiles(M, rows of one) lists tiles; those of no group give 0."""
    many = len(x)
    more = max(t.rows - many, -many % COPIED)
    x = jnp.pad(arrays.laid(x, w, t), ((0, more), (0, 0)))
    return program.run(x, arrays.stored(w, t), x.dtype, t, tiles(len(x), t.rows))[:many]


def tiling(x: Any, w: Quantized) -> Tiling:
    """Choose the tiles for rows [M K] and matrices [E N K]."""
    mean = len(x) / len(w.values)
    most = mean + 1.5 * mean**0.5 + (COPIED - 1) / 2  # rows of most groups, and those before them in a tile
    rows = next((n for n in ROWS if most <= n), ROWS[-1])
    return replace(quantized_matmul_gpu.cut(rows, w), outputs=w.values.shape[1])
