"""Products of groups of rows with a matrix each, on TPUs: Pallas Mosaic TPU kernels forward and backward.

A step of the grid takes a tile of rows and a block of outputs of one group's matrix, with all of its inputs, so that sums
are complete. Steps follow the rows: a group's block stays in fast memory for all of its tiles, and is read once. A tile
that several groups share meets each, and multiplies those parts of it (64 or 128 rows) that have rows of that group; rows
of others are kept. A group without rows has no step and its matrix is not read; tiles of no group's rows become 0. The
gradient of a matrix is a product over its group's rows, summed in fast memory from tile to tile; what a tile has of others
is set to zero. Steps from sizes: as in megablocks (arXiv 2211.15841), and in jax's megablox.

Bytes: each matrix with rows once, rows once for each block of outputs; for gradients of matrices dy and x once for each
block of inputs or outputs. FLOPs: 2 * rows * inputs * outputs for each pass. jax's megablox cuts inputs too, so that it
reads a matrix again for every tile; it multiplies whole tiles for every group in them, has a pass before (rows of no group
become 0) and one after, and it has one size of tiles for all three products. Interpreted on CPU and compiled for v5p and
v6e; it has not run on a TPU yet.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fdel.kernels import grouped_quantized_tpu
from fdel.kernels.device import no_tpu
from fdel.kernels.grouped_program_tpu import Tiling, matrices_of, rows_times
from fdel.ops.platform import device_kind
from fdel.ops.weights import LowRank, Quantized, Weight, is_weight

LANES = 128
MIB = 2**20


class Device(NamedTuple):
    """What tiles depend on."""

    memory: int  # bytes of fast memory for blocks
    cores: int  # that share the blocks of outputs
    outputs: int  # of a block of a matrix's gradient
    depth: int  # numbers that the multiplier sums at once: of such a gradient, rows


# By a part of the device's name; of v5p, and where the device is not known.
DEVICES = {"v5 lite": Device(96 * MIB, 1, 1024, 128), "v6": Device(96 * MIB, 1, 2048, 256)}
LEAST = Device(44 * MIB, 2, 1024, 128)
SPARE = 12 * MIB  # that a program may use beside its blocks
# Up to so many rows of a group: rows of a tile, and of a part.
TILES = [(64, 128, 64), (1024, 512, 64), (2**31, 512, 128)]
OUTPUTS, INPUTS = 1024, 2048  # most of a block, the latter of a matrix's gradient


def unsupported(x: Array, w: Any, sizes: Array) -> str | None:
    """Say why the kernel cannot serve this call, or None."""
    if why := no_tpu():
        return why
    if isinstance(w, Quantized):
        return grouped_quantized_tpu.unsupported(x, w, sizes) or too_wide(x, w, 1)
    if isinstance(w, LowRank):
        if w.ndim != 3 or (w.a.ndim, w.b.ndim) != (3, 3):
            return f"low-rank factors {w.a.shape} and {w.b.shape}; expected [E R K] and [E N R]"
        return unsupported(x, w.base, sizes) or too_wide(x, w.a, 1) or too_wide(x, w.b, 1)
    if is_weight(w):
        return f"weights are arrays; found {type(w).__name__}"
    if x.dtype != w.dtype or x.dtype not in (jnp.bfloat16, jnp.float32):
        return f"it multiplies bfloat16 or float32; found {x.dtype} and {w.dtype}"
    if w.ndim != 3 or x.ndim != 2 or (*sizes.shape, x.shape[1]) != w.shape[::2]:
        return f"x {x.shape}, w {w.shape}, sizes {sizes.shape}; expected [M K], [E N K], [E]"
    return too_wide(x, w, 1)


def too_wide(x: Array, w: Array | Quantized, count: int) -> str | None:
    """Say why blocks of `count` matrices [E N K] do not fit, or None."""
    need = max(_bytes(TILES[0][1], LANES, n, count, count, 3, x.dtype.itemsize) for n in w.shape[1:])
    if need > device().memory:
        return f"matrices {w.shape[1:]}; the smallest blocks take {need} bytes, expected at most {device().memory}"
    return None


def call(x: Float[Array, "M K"], w: Weight, sizes: Int[Array, " E"]) -> Float[Array, "M N"]:
    """Multiply as `ops.grouped_matmul`; sums are float32."""
    if isinstance(w, Quantized):
        return _frozen(x, jax.tree.map(jax.lax.stop_gradient, w), sizes.astype(jnp.int32))
    if isinstance(w, LowRank):
        scale = jax.lax.stop_gradient(w.scale).astype(w.b.dtype)[:, None, None]
        low = call(x, w.a.astype(x.dtype), sizes)
        return call(x, w.base, sizes) + call(low, (w.b * scale).astype(x.dtype), sizes)
    return _product(x, w, sizes.astype(jnp.int32))


@jax.custom_vjp
def _product(x: Array, w: Array, sizes: Array) -> Array:
    return rows_times(tiling(x, w), (x,), (w,), (), sizes, lambda y: [y])[0]


def _of_rows(dy: Array, w: Array, sizes: Array) -> Array:
    """Give the gradient of rows."""
    return rows_times(tiling(dy, w, turned=False), (dy,), (w,), (), sizes, lambda y: [y])[0]


def _backward(saved: tuple, dy: Array) -> tuple[Array, Array, None]:
    x, w, sizes = saved
    return _of_rows(dy, w, sizes), matrices_of(tiling_of_matrices(dy, x, len(w)), dy, x, sizes), None


_product.defvjp(lambda *args: (_product(*args), args), _backward)


@jax.custom_vjp
def _frozen(x: Array, w: Quantized, sizes: Array) -> Array:
    """Multiply with quantized matrices as they are stored."""
    if len(x) > grouped_quantized_tpu.FEW * len(sizes):
        return grouped_quantized_tpu.product_of_many(x, w, sizes, tiling(x, w, matrices=2))
    return grouped_quantized_tpu.product(x, w, sizes, device().cores)


def _frozen_backward(saved: tuple[Quantized, Array], dy: Array) -> tuple[Array, None, None]:
    w, sizes = saved  # expanded anew: as much memory as the matrices of one layer
    rows = jax.ShapeDtypeStruct((len(dy), w.shape[2]), dy.dtype)
    full, unit = grouped_quantized_tpu.expanded(w, tiling(rows, w, matrices=2), dy.dtype)
    return rows_times(tiling(dy, full), (dy,), (full,), (), sizes, lambda y: [y * unit])[0], None, None


_frozen.defvjp(lambda x, w, sizes: (_frozen(x, w, sizes), (w, sizes)), _frozen_backward)


def device() -> Device:
    """Give what is known of the devices of the mesh that is set."""
    name = device_kind() or ""
    return next((d for part, d in DEVICES.items() if part in name), LEAST)


def tiling(x: Any, w: Any, *, xs: int = 1, matrices: int = 1, outs: int = 1, turned: bool = True) -> Tiling:
    """Choose the tiles for arrays of rows [M inputs] and of matrices [E N K], that give so many of [M outputs]."""
    (many, inputs), outputs, about = x.shape, w.shape[1 if turned else 2], device()
    rows, part = _rows(many, w.shape[0], about)
    need = lambda rows, width: _bytes(rows, width, inputs, xs, matrices, outs, x.dtype.itemsize)
    while rows > part and 3 * need(rows, 0) > about.memory:
        rows //= 2
    width = next(n for n in range(OUTPUTS, 0, -LANES) if n == LANES or need(rows, n) <= about.memory)
    return Tiling(rows, part, _even(outputs, width, about.cores), inputs, about.memory + SPARE, turned)


def tiling_of_matrices(dy: Any, x: Any, groups: int) -> Tiling:
    """Choose the tiles for gradients of matrices from dy [M N] and x [M K]."""
    about = device()
    rows, _ = _rows(len(x), groups, about)
    widths = _even(dy.shape[1], about.outputs, about.cores), _even(x.shape[1], INPUTS, 1)
    return Tiling(rows, min(rows, about.depth), *widths, about.memory + SPARE, True)


def _rows(many: int, groups: int, about: Device) -> tuple[int, int]:
    """Give the rows of a tile and of a part. A deep multiplier is loaded as long as it multiplies 256 rows."""
    rows, part = next(tile for most, *tile in TILES if many <= most * groups)
    return rows, part if rows < 2 * about.depth or about.depth <= LANES else about.depth


def _bytes(rows: int, width: int, inputs: int, xs: int, matrices: int, outs: int, each: int) -> int:
    """Count those of a program's blocks, of which two are in memory, and of its sums."""
    return 2 * each * (xs * rows * inputs + width * (matrices * inputs + outs * rows)) + 8 * matrices * LANES * width


def _even(size: int, most: int, cores: int) -> int:
    """Cut an axis evenly in blocks, as many as cores if there are several, of multiples of `LANES`."""
    blocks = -(-size // (most * cores)) * cores
    return min(-(-size // blocks // LANES) * LANES, -(-size // LANES) * LANES)
