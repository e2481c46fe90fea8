"""Products with weights in 4 and 8 bits on TPUs: a Pallas Mosaic TPU kernel that reads them as they are stored.

A step of the grid takes a block of outputs with all of its inputs: pages of packed bytes, whose nibbles are cut apart in
fast memory. *Few rows*, of decoding: integers are multiplied with integers, since loading bfloat16 weights into the
multiplier would take longer than reading them does. Each row of x is written as three digits to the base 256, of whole
steps of 2^-22 of its greatest magnitude: an error as that of sums in float32. The digits are rows of one exact product
per group of inputs, to which the scales are applied (arXiv 2210.17323, section 5, applies them to weights). Where groups
are narrower than 128 stored bytes, several lie in one product: x is there once for each, and zero outside of it. Zero
points are subtracted at the end, times sums of x. Floats are unpacked to bfloat16, which holds all of them but NF4's and
FP4's, and x is multiplied as it is; with x in float32 all is as for many rows. *Many rows*, of prompts: a chunk of a
block is scaled and rounded to x's dtype, as the reference does, and multiplied.

Bytes read: the stored values and scales, once for each `ROWS` rows. FLOPs: 2 * rows * inputs * outputs. Interpreted on CPU
and compiled for v5p and v6e; it has not run on a TPU yet.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from fdel.kernels.device import no_tpu
from fdel.kernels.quantized_formats_tpu import DIGITS, FLOATS, INDICES, INTEGERS, LANES, Tiling
from fdel.kernels.quantized_program_tpu import NARROW, PARTS, program
from fdel.ops.contraction import Plan, inputs_last, ordered
from fdel.ops.platform import context
from fdel.ops.weights import PACKED, TABLES, Quantized, dequantize, scales

FEW, COPIES = 64, {True: 384, False: 512}  # rows of x that are few; of a product of integers, and of floats
FORMATS = (*INTEGERS, *FLOATS, *INDICES)
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
    if groups > 1 and (LANES % each if each < LANES else each % LANES):
        return f"{groups} groups of {each} bytes; expected groups that divide rows of {LANES} bytes, or fill them"
    if w.format == "e5m2" and lanes % LANES:  # what lies beyond may be infinite
        return f"rows of {lanes} bytes of e5m2; expected whole ones of {LANES}"
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
    parts = replace(w, values=flat(w.values), scale=jax.tree.map(flat, _scale(w)), zero=jax.tree.map(flat, zero))
    y = matmul(flat(x), parts, dtype)
    axes = plan.x[:-1] + plan.w[:-1]
    return ordered(y.reshape(*rows, *outputs), axes, plan.out)


def _scale(w: Quantized) -> Array | Quantized:
    """Give scales as they are stored if the kernel reads that: exponents, or 8 bits with numbers for each output."""
    scale = w.scale
    if not isinstance(scale, Quantized):
        return scale if scale.dtype == jnp.uint8 else scale.astype(jnp.float32)
    plain = scale.scale.dtype == jnp.float32 and scale.scale.shape[-1] == 1 and scale.order is None
    known = scale.format == "uint8" or (scale.format == "fp8" and scale.zero is None)
    return scale if plain and known else scales(w)


def _backward(plan: Plan, dtype: jnp.dtype, saved: tuple[Array, Quantized], dy: Array) -> tuple[Array, None]:
    from fdel.ops.dispatch import TABLES

    x, w = saved
    reference = TABLES["quantized_matmul"].implementations["xla"].call
    return jax.vjp(lambda x: reference(plan, x, w, dtype), x)[1](dy)[0], None


_product.defvjp(lambda plan, dtype, x, w: (_product(plan, dtype, x, w), (x, w)), _backward)


def matmul(x: Float[Array, "M K"], w: Any, dtype: jnp.dtype) -> Float[Array, "M N"]:
    """Lay out x as the weight's bytes lie, and run the kernel. `w` is Quantized: matrices, its scales as of `_scale`."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    (many, inputs), (count, lanes), t = x.shape, w.values.shape, tiling(x, w, dtype)
    groups = w.scale.shape[-1]
    held = -(-groups // t.beside) * t.beside  # groups, so many that they fill rows of lanes
    x = jnp.pad(x, ((0, -many % t.rows), (0, lanes * t.halves - inputs)))
    if groups == 1 and t.halves * t.each > x.shape[1]:
        x = jnp.pad(x.reshape(len(x), t.halves, -1), ((0, 0), (0, 0), (0, t.each - lanes))).reshape(len(x), -1)
    x = jnp.pad(x, ((0, 0), (0, held * t.halves * t.each - x.shape[1])))
    inputs, width = x.shape[1], held * t.each
    steps = -(-count // t.outputs)
    total = len(x) // t.rows * steps
    cores = 2 if total % 2 == 0 else 1  # a v5p has two, which share the steps
    row, output = (lambda c, i: (c * (total // cores) + i) // steps), (lambda c, i: (c * (total // cores) + i) % steps)
    specs = {
        "x": (x, pl.BlockSpec((t.rows, inputs), lambda c, i: (row(c, i), 0))),
        "values": (w.values, pl.BlockSpec((t.outputs, width), lambda c, i: (output(c, i), 0))),
        **_of_groups(w, t, held, output),
    }
    tiled, numbers = -(-held // LANES) * LANES, lambda *shape: pltpu.VMEM(shape, jnp.float32)
    narrow = t.beside >= NARROW
    columns = pltpu.VMEM((t.outputs, PARTS * tiled), jnp.bfloat16) if narrow else numbers(t.outputs, tiled)
    if t.few:
        kept = {
            "digits": pltpu.VMEM((t.beside * t.digits * t.rows, inputs), jnp.int8 if t.digits > 1 else x.dtype),
            "unit": numbers(t.rows, LANES), "sums": numbers(t.rows, tiled),
        }  # fmt: skip
    else:
        kept = {"scales": columns, "zeros": columns, "total": numbers(t.rows, t.outputs)}
    if t.scale != "float":
        kept["decoded"] = numbers(held, t.outputs)
    run = pl.pallas_call(
        functools.partial(program, t, (*specs, "out", *kept)),
        out_shape=jax.ShapeDtypeStruct((len(x), count), dtype),
        grid=(cores, total // cores),
        in_specs=[spec for _, spec in specs.values()],
        out_specs=pl.BlockSpec((t.rows, t.outputs), lambda c, i: (row(c, i), output(c, i))),
        scratch_shapes=list(kept.values()),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM, disable_bounds_checks=True
        ),
        name="quantized_matmul",
    )
    return run(*(a for a, _ in specs.values()))[:many]


def _of_groups(w: Any, t: Tiling, held: int, output: Callable) -> dict[str, tuple[Array, Any]]:
    """Name scales, zeros and the table, with the blocks of which the kernel sees each; `held` groups fill whole lanes."""
    from jax.experimental import pallas as pl

    groups, found = w.scale.shape[-1], {}
    scale, step, low = (
        (w.scale.values, w.scale.scale, w.scale.zero) if isinstance(w.scale, Quantized) else (w.scale, None, None)
    )
    # Scales [N groups] lie in memory as [groups N], where groups are fewer than lanes: so they are read without a copy.
    for name, a in {"scale": scale, "step": step, "low": low, "zero": w.zero}.items():
        if name == "scale" and t.across:
            found[name] = a, pl.BlockSpec((t.outputs, groups), lambda c, i: (output(c, i), 0))
        elif a is not None:
            a = jnp.pad(a.T, ((0, held - groups if a.shape[1] == groups else 0), (0, 0)))
            found[name] = a, pl.BlockSpec((len(a), t.outputs), lambda c, i: (0, output(c, i)))
    if t.format in INDICES:
        rows = np.zeros((1, LANES), np.float32)
        rows[0, : len(TABLES[t.format])] = TABLES[t.format]
        found["table"] = jnp.asarray(rows), pl.BlockSpec(rows.shape, lambda c, i: (0, 0))
    return found


def tiling(x: Any, w: Any, dtype: Any) -> Tiling:
    """Cut a call into blocks, from the shapes of x [M K] and of the weight's matrices."""
    (many, inputs), (count, lanes), groups = x.shape, w.values.shape, w.scale.shape[-1]
    each = lanes // groups if groups > 1 else -(-lanes // LANES) * LANES
    beside = max(1, LANES // each)
    digits = DIGITS if w.format in INTEGERS else 1
    few = many <= FEW and many * beside * digits <= COPIES[digits > 1] and (digits > 1 or x.dtype == jnp.bfloat16)
    most = max(64, min(ROWS, X_BLOCK // (inputs * x.dtype.itemsize) // 64 * 64))
    plain = "float" if w.scale.dtype == jnp.float32 else "exponent"
    stored = w.scale.format if isinstance(w.scale, Quantized) else plain
    return Tiling(
        few=few,
        rows=-(-many // 8) * 8 if few else min(most, -(-many // 16) * 16),
        outputs=min(OUTPUTS[few], max(LANES, BLOCK // lanes // LANES * LANES), -(-count // LANES) * LANES),
        each=each,
        beside=beside,
        chunk=LANES if each <= LANES else next(c for c in (4, 3, 2, 1) if each // LANES % c == 0) * LANES,
        halves=2 if w.format in PACKED else 1,
        format=w.format,
        scale=stored,
        across=stored != "float" and groups % LANES == 0,  # so they lie in memory, if they fill lanes
        dtype=dtype,
    )
