"""Products with weights of 4 and 8 bit integers on TPUs: a Pallas Mosaic TPU kernel that reads them as they are stored.

A step of the grid takes a block of outputs with all of its inputs: pages of packed bytes, whose nibbles are cut apart in
fast memory. *Few rows*, of decoding: integers are multiplied with integers, since loading bfloat16 weights into the
multiplier would take longer than reading them does. Each row of x is written as three digits to the base 256, of whole
steps of 2^-22 of its greatest magnitude: an error as that of sums in float32. The digits are rows of one exact product
per group of inputs, to which the scales are applied (arXiv 2210.17323, section 5, applies them to weights). Where groups
are narrower than 128 stored bytes, several lie in one product: x is there once for each, and zero outside of it. Zero
points are subtracted at the end, times sums of x. *Many rows*, of prompts: a chunk of a block is scaled and rounded to x's
dtype, as the reference does, and multiplied.

Bytes read: the stored values and scales, once for each `ROWS` rows. FLOPs: 2 * rows * inputs * outputs. Interpreted on CPU
and compiled for v5p and v6e; it has not run on a TPU yet.
"""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fdel.kernels.device import no_tpu
from fdel.kernels.quantized_program_tpu import DIGITS, FORMATS, LANES, Tiling, program
from fdel.ops.contraction import Plan, inputs_last, ordered
from fdel.ops.platform import context
from fdel.ops.weights import PACKED, Quantized, dequantize, scales

FEW, COPIES = 64, 128  # rows that are multiplied as integers, and as often as groups lie in a product
ROWS = 512  # of x in a block
OUTPUTS = {True: 256, False: 512}  # in a block, of few rows and of many
BLOCK, X_BLOCK = 10 * 2**20, 15 * 2**20  # bytes at most of a block of the weight, and of x; two of each are in memory
VMEM = 56 * 2**20  # bytes that a program may use: of 64 MiB on v5p, 128 on v6e


def unsupported(plan: Plan, x: Array, w: Quantized, dtype: Any) -> str | None:
    """Say why the kernel cannot serve this call, or None."""
    if why := no_tpu():
        return why
    if axes := context("tp", "fsdp", "ep"):
        return f"a mesh {axes}, where a weight may be divided along its inputs; each device would fetch all of it"
    if w.activations:
        return "activations in few bits: XLA multiplies integers itself"
    if w.format not in FORMATS:
        return f"weights in {w.format}; expected one of {', '.join(FORMATS)}"
    if plan.batch or plan.w[-len(w.inputs) :] != plan.contracted:
        return "a weight with batch axes, or one that is multiplied from its outputs' side"
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        return f"x is bfloat16 or float32; found {x.dtype}"
    lanes, groups = w.values.shape[-1], w.scale.shape[-1]
    each = lanes // groups
    if lanes % LANES or (LANES % each if each < LANES else each % LANES):
        return f"{groups} groups of {each} bytes; expected whole rows of {LANES}, that groups divide or fill"
    if (need := OUTPUTS[True] * lanes) > BLOCK:
        return f"rows of {lanes} bytes; a block takes {need} bytes, expected at most {BLOCK}"
    return None


def call(plan: Plan, x: Float[Array, "..."], w: Quantized, dtype: Any) -> Float[Array, "..."]:
    """Multiply as the operation `quantized_matmul` of `ops.einsum`; see `unsupported` for what it can serve."""
    return _product(plan, jnp.dtype(dtype), x, w)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(plan: Plan, dtype: jnp.dtype, x: Array, w: Quantized) -> Array:
    plan, x = inputs_last(plan, x)
    rows, outputs = x.shape[:-1], w.values.shape[:-1]
    flat = lambda a: a.reshape(-1, a.shape[-1])
    zero = dequantize(w.zero, jnp.float32) if isinstance(w.zero, Quantized) else w.zero
    parts = replace(
        w, values=flat(w.values), scale=flat(scales(w).astype(jnp.float32)), zero=None if zero is None else flat(zero)
    )
    padding = w.values.shape[-1] * (2 if w.format in PACKED else 1) - x.shape[-1]
    y = matmul(jnp.pad(flat(x), ((0, 0), (0, padding))), parts, dtype)
    axes = plan.x[:-1] + plan.w[:-1]
    return ordered(y.reshape(*rows, *outputs), axes, plan.out)


def _backward(plan: Plan, dtype: jnp.dtype, saved: tuple[Array, Quantized], dy: Array) -> tuple[Array, None]:
    from fdel.ops.dispatch import TABLES

    x, w = saved
    reference = TABLES["quantized_matmul"].implementations["xla"].call
    return jax.vjp(lambda x: reference(plan, x, w, dtype), x)[1](dy)[0], None


_product.defvjp(lambda plan, dtype, x, w: (_product(plan, dtype, x, w), (x, w)), _backward)


def matmul(x: Float[Array, "M K"], w: Any, dtype: jnp.dtype) -> Float[Array, "M N"]:
    """Lay out x as the weight's bytes lie, and run the kernel. `w` is Quantized: matrices, its scales in float32."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    (count, lanes), groups, t = w.values.shape, w.scale.shape[1], tiling(x, w, dtype)
    many, inputs = x.shape
    x = jnp.pad(x, ((0, -many % t.rows), (0, 0)))
    steps = -(-count // t.outputs)
    total = len(x) // t.rows * steps
    cores = 2 if total % 2 == 0 else 1  # a v5p has two, which share the steps
    row, output = (lambda c, i: (c * (total // cores) + i) // steps), (lambda c, i: (c * (total // cores) + i) % steps)
    # Scales [N groups] lie in memory as [groups N], where groups are fewer than lanes: so they are read without a copy.
    operands = [x, w.values, w.scale.T]
    of_groups = pl.BlockSpec((groups, t.outputs), lambda c, i: (0, output(c, i)))
    specs = [
        pl.BlockSpec((t.rows, inputs), lambda c, i: (row(c, i), 0)),
        pl.BlockSpec((t.outputs, lanes), lambda c, i: (output(c, i), 0)),
        of_groups,
    ]
    if w.zero is not None:
        operands.append(w.zero.T)
        specs.append(of_groups)
    tiled, numbers = -(-groups // LANES) * LANES, lambda *shape: pltpu.VMEM(shape, jnp.float32)
    digits = pltpu.VMEM((t.beside * DIGITS * t.rows, inputs), jnp.int8)
    scratch = [digits, numbers(t.rows, LANES), numbers(t.rows, tiled)]
    if not t.few:
        scratch = [numbers(t.outputs, tiled), numbers(t.outputs, tiled), numbers(t.rows, t.outputs)]
    run = pl.pallas_call(
        functools.partial(program, t, w.zero is not None),
        out_shape=jax.ShapeDtypeStruct((len(x), count), dtype),
        grid=(cores, total // cores),
        in_specs=specs,
        out_specs=pl.BlockSpec((t.rows, t.outputs), lambda c, i: (row(c, i), output(c, i))),
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM, disable_bounds_checks=True
        ),
        name="quantized_matmul",
    )
    return run(*operands)[:many]


def tiling(x: Any, w: Any, dtype: Any) -> Tiling:
    """Cut a call into blocks, from the shapes of x [M K] and of the weight's matrices."""
    (many, inputs), (count, lanes) = x.shape, w.values.shape
    each = lanes // w.scale.shape[1]
    beside = max(1, LANES // each)
    few = many <= FEW and many * beside <= COPIES
    most = max(64, min(ROWS, X_BLOCK // (inputs * x.dtype.itemsize) // 64 * 64))
    return Tiling(
        few=few,
        rows=-(-many // 8) * 8 if few else min(most, -(-many // 16) * 16),
        outputs=min(OUTPUTS[few], max(LANES, BLOCK // lanes // LANES * LANES), -(-count // LANES) * LANES),
        each=each,
        beside=beside,
        chunk=LANES if each <= LANES else next(c for c in (4, 3, 2, 1) if each // LANES % c == 0) * LANES,
        halves=2 if w.format in PACKED else 1,
        format=w.format,
        dtype=dtype,
    )
