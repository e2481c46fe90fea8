"""Products with weights of 4 and 8 bits on NVIDIA Hopper: a Pallas Mosaic GPU kernel that reads them as stored.

Tensor cores take one operand from registers: there the stored bytes become bfloat16 (`decode_gpu`), as CUTLASS's mixed
products do it, and are multiplied with rows of x in shared memory. So a program computes outputs by rows, 64 outputs for
each of `GROUPS` groups of warps, while one more group copies the next chunks of weight and x. Scales multiply float32
sums of what lies in one group of inputs (arXiv 2210.17323, section 5, scales weights), or decoded numbers where groups are
narrow, as those of MXFP4 and NVFP4 are. *Few rows*, of decoding: x has 8 to 64 rows, and inputs are divided between
programs where that fills the device; their float32 sums are added by XLA. *Many rows*, of prompts: 128 rows of x in a
program, which gives the result as it is.

Bytes read: the stored values, once for each 128 rows (then from the second-level cache), scales and zero points alike, and
x once for each 128 outputs. FLOPs: 2 * rows * inputs * outputs. Interpreted, and measured on an H100
(docs/kernels_hopper.md).
"""

import math
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from fdel.kernels import quantized_arrays_gpu as arrays
from fdel.kernels import quantized_gradient
from fdel.kernels import quantized_program_gpu as program
from fdel.kernels.decode_gpu import FORMATS, Whole, codes_of
from fdel.kernels.device import no_hopper, unknown
from fdel.kernels.quantized_arrays_gpu import EACH, GROUPS, NARROW, ROWS, SHARED, Tiling
from fdel.ops.contraction import Plan, inputs_last, ordered
from fdel.ops.weights import PACKED, Quantized

CHUNKS = (128, 64, 32)  # bytes of a weight's row that are copied at once
DEPTH = 8  # chunks on their way, at most
DEVICE, MEMORY = 132, 226 * 2**10  # multiprocessors of an H100 or H200, and bytes of each, of 227 KiB
AT_MOST = 190 * 2**10  # for chunks, beside the result
SPLITS = (1, 2, 4, 8, 16)  # parts of the inputs
# Rows at most, and formats, that were faster than XLA's programs on an H100. It reads int8 as fast.
FEW, FASTER = 64, ("fp8", "uint4", "int4", "e2m1", "nf4")


def unsupported(plan: Plan, x: Array, w: Quantized, dtype: Any) -> str | None:
    """Say why the kernel cannot serve this call, or None."""
    return no_hopper() or unreadable(x, w, math.prod(w.values.shape[:-1]))


def unproven(plan: Plan, x: Array, w: Quantized, dtype: Any) -> str | None:
    """Say why the kernel is taken only where it is named, or None."""
    rows = math.prod(n for c, n in zip(plan.x, x.shape, strict=True) if c not in plan.contracted)
    return slower(w, None if rows <= FEW else f"{rows} rows; expected at most {FEW}")


def slower(w: Quantized, many: str | None) -> str | None:
    """Say why a kernel of this program is taken only where it is named, or None; `many` tells of too many rows."""
    if why := unknown():
        return why
    why = many if w.format in FASTER else f"weights in {w.format}; expected one of {', '.join(FASTER)}"
    return None if why is None else f"it has not been measured, or is slower, with {why}; `use` can name it"


def unreadable(x: Array, w: Quantized, outputs: int) -> str | None:
    """Say why no kernel here can multiply x with a weight that has so many outputs, or None."""
    if w.activations:
        return "activations in few bits: XLA multiplies integers itself"
    if w.format not in FORMATS:
        return f"weights in {w.format}; expected one of {', '.join(FORMATS)}"
    if x.dtype != jnp.bfloat16:
        return f"x is bfloat16; found {x.dtype}"
    if w.zero is not None and not isinstance(FORMATS[w.format], Whole):
        return f"zeros of weights in {w.format}"
    if w.zero is not None and (isinstance(w.zero, Quantized) or not jnp.issubdtype(w.zero.dtype, jnp.integer)):
        return "zeros that are no integers"
    lanes, groups = w.values.shape[-1], w.scale.shape[-1]
    if outputs % EACH:
        return f"{outputs} outputs; expected a multiple of {EACH}"
    if lanes // groups % CHUNKS[-1] and lanes // groups not in NARROW:
        return (
            f"groups of {lanes // groups} bytes; expected {', '.join(map(str, NARROW))} or a multiple of {CHUNKS[-1]}"
        )
    if lanes % CHUNKS[-1]:
        return f"{lanes} bytes of an output; expected a multiple of {CHUNKS[-1]}"
    return None


def call(plan: Plan, x: Float[Array, "..."], w: Quantized, dtype: Any) -> Float[Array, "..."]:
    """Multiply as the operation `quantized_matmul` of `ops.einsum`; see `unsupported` for what it can serve."""
    return _product(plan, jnp.dtype(dtype), x, w)


@quantized_gradient.of_rows
def _product(plan: Plan, dtype: jnp.dtype, x: Array, w: Quantized) -> Array:
    plan, x = inputs_last(plan, x)
    rows, outputs = x.shape[:-1], w.values.shape[:-1]
    x = x.reshape(-1, x.shape[-1])
    y = matmul(x, w, dtype, tiling(x, w, dtype))
    return ordered(y.reshape(*rows, *outputs), plan.x[:-1] + plan.w[:-1], plan.out)


def cut(rows: int, w: Quantized, size: int = 2) -> Tiling:
    """Cut products of a weight with so many rows in a program; a number of the result has `size` bytes."""
    lanes, groups = w.values.shape[-1], w.scale.shape[-1]
    each, halves = lanes // groups, 2 if w.format in PACKED else 1
    several = groups > 1 and each <= CHUNKS[-1]
    shared, numbers = beside(rows) == 2, isinstance(FORMATS[w.format], Whole) and halves == 1
    if several:  # many scales that are no words take registers, which two programs share
        chunk = 32 if shared and each < NARROW[-1] and arrays.kind_of(w) == "float" else 64
    else:
        chunk = next(n for n in CHUNKS if each % n == 0 and n <= (128 if numbers or not shared else 64))
    room = min(AT_MOST, MEMORY - beside(rows) * GROUPS * EACH * rows * size) // beside(rows)
    depth = min(DEPTH, room // (chunk * (GROUPS * EACH + 2 * halves * rows)), -(-lanes // chunk))
    t = Tiling(rows, chunk, depth, 1, w.format, max(1, chunk // each), max(1, each // chunk))
    words = arrays.kind_of(w) != "float" and rows == ROWS[0]  # several scales share one, and sums are few
    more = w.zero is not None or codes_of(w.format) is not None  # in registers, beside 16 rows' sums
    whole = 1 if more and rows == SHARED else 3
    return replace(t, ahead=1 + words if t.narrow else whole)  # two programs have 80 registers for each thread


def beside(rows: int) -> int:
    """Count the programs that share a multiprocessor."""
    return 2 if rows <= SHARED else 1


def tiling(x: Any, w: Quantized, dtype: Any = jnp.bfloat16) -> Tiling:
    """Cut a call into programs, from the shapes of x [M K] and of the weight's arrays, and the dtype of the result."""
    t = cut(next((n for n in ROWS if len(x) <= n), ROWS[-1]), w, jnp.dtype(dtype).itemsize)
    lanes, outputs = w.values.shape[-1], math.prod(w.values.shape[:-1])
    programs = -(-outputs // (GROUPS * EACH))

    def cost(n: int) -> float:
        """Rounds of programs, times the bytes of an output in each: of the weight, and of sums, written and read."""
        return -(-n * programs // (DEVICE * beside(t.rows))) * (lanes / n + 8 * t.rows)

    enough = programs > 0.8 * DEVICE and (w.scale.shape[-1] == 1 or t.groups == t.inner == 1)  # for the memory's speed
    if enough or not t.few:
        return t
    return replace(t, splits=min((n for n in SPLITS if n <= lanes // t.chunk), key=cost, default=1))


def matmul(x: Float[Array, "M K"], w: Quantized, dtype: jnp.dtype, t: Tiling) -> Float[Array, "M N"]:
    """Run the program and add what its parts give."""
    many = len(x)
    x = jnp.pad(arrays.laid(x, w, t), ((0, -many % t.rows), (0, 0)))
    y = program.run(x, arrays.stored(w, t), dtype, t)
    return (y if y.ndim == 2 else y.sum(0).T.astype(dtype))[:many]
