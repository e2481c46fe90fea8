"""Products with weights in 4 and 8 bits on TPUs: a Pallas Mosaic TPU kernel that reads them as they are stored.

A step of the grid takes a block of outputs with all of its inputs: pages of packed bytes, whose nibbles are cut apart in
fast memory. *Few rows*, of decoding: integers are multiplied with integers, since loading bfloat16 weights into the
multiplier would take longer than reading them does. Each row of x is written as three digits to the base 256, of whole
steps of 2^-22 of its greatest magnitude: an error as that of sums in float32. The digits are rows of one exact product
per group of inputs, to which the scales are applied (arXiv 2210.17323, section 5, applies them to weights). Where groups
are narrower than 128 stored bytes, several lie in one product: x is there once for each, and zero outside of it. Zero
points are subtracted at the end, times sums of x. Floats are unpacked to bfloat16, which holds all of them but NF4's and
FP4's, and x is multiplied as it is; with x in float32 all is as for many rows. *Many rows*, of prompts: a chunk of a
block is turned as bytes, so that a scale is a row of outputs, scaled and rounded to x's dtype, as the reference does, and
multiplied.

Bytes read: the stored values and scales, once for each `ROWS` rows. FLOPs: 2 * rows * inputs * outputs. Interpreted on CPU
and compiled for v5p and v6e; it has not run on a TPU yet.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fdel.kernels import quantized_gradient
from fdel.kernels.device import no_tpu
from fdel.kernels.quantized_formats_tpu import DIGITS, FLOATS, INDICES, INTEGERS, LANES, Tiling
from fdel.kernels.quantized_program_tpu import program
from fdel.ops.contraction import Plan, inputs_last, ordered
from fdel.ops.weights import PACKED, TABLES, Quantized, dequantize, scales

FEW, COPIES = 64, {True: 192, False: 96}  # rows of x that are few; of a product of integers, and of floats
FORMATS = (*INTEGERS, *FLOATS, *INDICES)
ROWS = 512  # of x in a block
CHUNKS = (512, 384, 256, 128)  # bytes of an output that are multiplied together, at most
OUTPUTS = {True: 256, False: 512}  # in a block, of few rows and of many
BLOCK, X_BLOCK = 10 * 2**20, 15 * 2**20  # bytes at most of a block of the weight, and of x; two of each are in memory
VMEM = 56 * 2**20  # bytes that a program may use: of 64 MiB on v5p, 128 on v6e
SPARE = 4 * 2**20  # of them, for what it computes with


def unsupported(plan: Plan, x: Array, w: Quantized, dtype: Any) -> str | None:
    """Say why the kernel cannot serve this call, or None."""
    if why := no_tpu():
        return why
    return unreadable(x, w)


def unreadable(x: Array, w: Quantized) -> str | None:
    """Say why the programs of this kernel cannot read a weight, or multiply rows like x with it; or None."""
    if w.activations:
        return "activations in few bits: XLA multiplies integers itself"
    if w.format not in FORMATS:
        return f"weights in {w.format}; expected one of {', '.join(FORMATS)}"
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        return f"x is bfloat16 or float32; found {x.dtype}"
    lanes, groups = w.values.shape[-1], w.scale.shape[-1]
    each = lanes // groups
    if groups > 1 and (LANES % each if each < LANES else each % LANES):
        return f"{groups} groups of {each} bytes; expected groups that divide rows of {LANES} bytes, or fill them"
    if w.format == "e5m2" and lanes % LANES:  # what lies beyond may be infinite
        return f"rows of {lanes} bytes of e5m2; expected whole ones of {LANES}"
    if (need := LANES * lanes) > BLOCK:
        return f"rows of {lanes} bytes; a block takes {need} bytes, expected at most {BLOCK}"
    return None


def call(plan: Plan, x: Float[Array, "..."], w: Quantized, dtype: Any) -> Float[Array, "..."]:
    """Multiply as the operation `quantized_matmul` of `ops.einsum`; see `unsupported` for what it can serve."""
    return _product(plan, jnp.dtype(dtype), x, w)


@quantized_gradient.of_rows
def _product(plan: Plan, dtype: jnp.dtype, x: Array, w: Quantized) -> Array:
    plan, x = inputs_last(plan, x)
    rows, outputs = x.shape[:-1], w.values.shape[:-1]
    flat = lambda a: a.reshape(-1, a.shape[-1])
    y = matmul(flat(x), jax.tree.map(flat, stored(w)), dtype)
    return ordered(y.reshape(*rows, *outputs), plan.x[:-1] + plan.w[:-1], plan.out)


def stored(w: Quantized) -> Quantized:
    """Give a weight with scales and zeros as the kernel reads them."""
    zero = dequantize(w.zero, jnp.float32) if isinstance(w.zero, Quantized) else w.zero
    return replace(w, scale=_scale(w), zero=zero)


def _scale(w: Quantized) -> Array | Quantized:
    """Give scales as they are stored if the kernel reads that: exponents, or 8 bits with numbers for each output."""
    scale = w.scale
    if not isinstance(scale, Quantized):
        return scale if scale.dtype == jnp.uint8 else scale.astype(jnp.float32)
    plain = scale.scale.dtype == jnp.float32 and scale.scale.shape[-1] == 1 and scale.order is None
    known = scale.format == "uint8" or (scale.format == "fp8" and scale.zero is None)
    return scale if plain and known else scales(w)


class Visits(NamedTuple):
    """Of groups of rows: the matrix that each tile of rows meets, and how many tiles are each core's."""

    matrix: Int[Array, " tiles"]
    each: Int[Array, " 1"]


def matmul(x: Float[Array, "M K"], w: Any, dtype: jnp.dtype) -> Float[Array, "M N"]:
    """Multiply with one matrix; see `product`."""
    t = tiling(x, w, dtype)
    return product(t, laid(jnp.pad(x, ((0, -len(x) % t.rows), (0, 0))), t, w), w)[: len(x)]


def product(t: Tiling, x: Float[Array, "M K"], w: Any, visits: Visits | None = None, cores: int = 2) -> Array:
    """Run the kernel on rows as of `laid`. `w` is Quantized, as of `stored`.

    With `visits` w has matrices [E N K], and what is given for tiles past those that were counted is undefined.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    count, inputs = w.values.shape[-2], t.lanes * t.halves
    steps = -(-count // t.outputs)
    total = len(x) // t.rows * steps
    given: dict[str, Array] = {} if visits is None else visits._asdict()
    at: Callable[..., Any]
    if visits is None:
        cores = 2 if total % 2 == 0 else 1  # a v5p has two, which share the steps
        at = lambda c, i, *_: divmod(c * (total // cores) + i, steps)
    else:
        at = lambda c, i, *to: (c * to[1][0] + i // steps, i % steps)

    def block(shape: tuple[int, int], index: Callable) -> Any:
        """Show the kernel a block of a weight's array: index(which block of outputs)."""
        if visits is None:
            return pl.BlockSpec(shape, lambda c, i: index(at(c, i)[1]))
        return pl.BlockSpec((None, *shape), lambda c, i, *to: (to[0][at(c, i, *to)[0]], *index(at(c, i, *to)[1])))

    specs = {
        "x": (x, pl.BlockSpec((t.rows, inputs), lambda c, i, *to: (at(c, i, *to)[0], 0))),
        "values": (w.values, block((t.outputs, t.lanes), lambda output: (output, 0))),
        **of_groups(w, t, block),
    }
    kept = _kept(t, w, x.dtype)
    run = pl.pallas_call(
        functools.partial(program, t, (*given, *specs, "out", *kept), 0 if visits is None else steps),
        out_shape=jax.ShapeDtypeStruct((len(x), count), t.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(given),
            grid=(cores, total // cores if visits is None else visits.each[0] * steps),
            in_specs=[spec for _, spec in specs.values()],
            out_specs=pl.BlockSpec((t.rows, t.outputs), at),
            scratch_shapes=list(kept.values()),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM, disable_bounds_checks=True
        ),
        name="quantized_matmul",
    )
    return run(*given.values(), *(a for a, _ in specs.values()))


def laid(x: Float[Array, "M K"], t: Tiling, w: Any) -> Float[Array, "M inputs"]:
    """Lay out x as the weight's bytes lie: zeros where they end before those that are read."""
    lanes = w.values.shape[-1]
    x = jnp.pad(x, ((0, 0), (0, lanes * t.halves - x.shape[1])))
    if lanes < t.each:  # of one group
        x = jnp.pad(x.reshape(len(x), t.halves, -1), ((0, 0), (0, 0), (0, t.each - lanes))).reshape(len(x), -1)
    return jnp.pad(x, ((0, 0), (0, t.lanes * t.halves - x.shape[1])))


def _kept(t: Tiling, w: Any, dtype: Any) -> dict[str, Any]:
    """Name the memory of the program, beside its blocks."""
    from jax.experimental.pallas import tpu as pltpu

    numbers = lambda *shape: pltpu.VMEM(shape, jnp.float32)
    if not t.few:
        return kept_of_groups(t, w) | {"total": numbers(t.rows, t.outputs)}
    kept = {
        "digits": pltpu.VMEM((t.beside * t.digits * t.rows, t.lanes * t.halves), jnp.int8 if t.digits > 1 else dtype),
        "unit": numbers(t.rows, LANES), "sums": numbers(t.rows, -(-t.held // LANES) * LANES),
    }  # fmt: skip
    return kept if t.scale == "float" else kept | {"decoded": numbers(t.held, t.outputs)}


def kept_of_groups(t: Tiling, w: Any) -> dict[str, Any]:
    """Name the memory of numbers that scales and zeros in few bits stand for, which many rows need."""
    from jax.experimental.pallas import tpu as pltpu

    names = [*["decoded"] * (t.scale != "float"), *["zeros"] * (w.zero is not None)]
    return {name: pltpu.VMEM((t.held, t.outputs), jnp.float32) for name in names}


def of_groups(w: Any, t: Tiling, block: Callable) -> dict[str, tuple[Array, Any]]:
    """Name scales, zeros and the table, with the blocks of which the kernel sees each; `t.held` groups fill whole lanes."""
    from jax.experimental import pallas as pl

    groups, found = w.scale.shape[-1], {}
    scale, step, low = (
        (w.scale.values, w.scale.scale, w.scale.zero) if isinstance(w.scale, Quantized) else (w.scale, None, None)
    )
    # Scales [N groups] lie in memory as [groups N], where groups are fewer than lanes: so they are read without a copy.
    for name, a in {"scale": scale, "step": step, "low": low, "zero": w.zero}.items():
        if name == "scale" and t.across:
            found[name] = a, block((t.outputs, groups), lambda output: (output, 0))
        elif a is not None:
            many = t.held if a.shape[-1] == groups else 1
            filled = name == "scale" and t.scale != "float" and t.held % 32 == 0  # by `read_scales`
            a = jnp.pad(a.mT, [*[(0, 0)] * (a.ndim - 2), (0, 0 if filled else many - a.shape[-1]), (0, 0)])
            found[name] = a, block((many, t.outputs), lambda output: (0, output))
    if t.format in INDICES:
        rows = np.zeros((1, LANES), np.float32)
        rows[0, : len(TABLES[t.format])] = TABLES[t.format]
        found["table"] = jnp.asarray(rows), pl.BlockSpec(rows.shape, lambda *_: (0, 0))
    return found


def tiling(x: Any, w: Any, dtype: Any) -> Tiling:
    """Cut a call into blocks, from the shapes of x [M K] and of the weight's matrices."""
    (many, inputs), (count, lanes), groups = x.shape, w.values.shape[-2:], w.scale.shape[-1]
    each = lanes // groups if groups > 1 else -(-lanes // LANES) * LANES
    beside = max(1, LANES // each)
    digits = DIGITS if w.format in INTEGERS else 1
    few = many <= FEW and many * beside * digits <= COPIES[digits > 1] and (digits > 1 or x.dtype == jnp.bfloat16)
    most = max(64, min(ROWS, X_BLOCK // (inputs * x.dtype.itemsize) // 64 * 64))
    plain = "float" if w.scale.dtype == jnp.float32 else "exponent"
    width = -(-groups // beside) * beside * each
    fit = lambda few, c: (each % c == 0 or (not few and c % each == 0)) and width % c == 0
    chunk = lambda few: next((c for c in CHUNKS if fit(few, c)), LANES)
    stored = w.scale.format if isinstance(w.scale, Quantized) else plain
    cut = lambda few: Tiling(
        few=few,
        rows=-(-many // 8) * 8 if few else min(most, -(-many // 16) * 16),
        outputs=min(OUTPUTS[few], max(LANES, BLOCK // lanes // LANES * LANES), -(-count // LANES) * LANES),
        each=each,
        beside=beside,
        chunk=chunk(few),
        groups=groups,
        halves=2 if w.format in PACKED else 1,
        format=w.format,
        scale=stored,
        across=stored != "float" and groups % LANES == 0,  # so they lie in memory, if they fill lanes
        dtype=dtype,
    )
    t, fits = cut(few), lambda t: _bytes(t, x.dtype.itemsize) <= VMEM - SPARE
    if few and not fits(t):  # rows of x are there once for each group of a product
        t = cut(False)
    while not t.few and t.rows > 16 and not fits(t):
        t = t._replace(rows=t.rows - 16)
    return t


def _bytes(t: Tiling, size: int) -> int:
    """Count those of a program's blocks, of which two are in memory, and of what it keeps; a number of x has `size`."""
    inputs, tiled = t.lanes * t.halves, -(-t.held // LANES) * LANES
    scale = (4 if t.scale == "float" else 1) + 4 * (t.format in INTEGERS)  # and zero points
    blocks = t.rows * (inputs * size + t.outputs * jnp.dtype(t.dtype).itemsize) + t.outputs * t.held * (t.each + scale)
    if t.few:
        of_x = t.beside * t.digits * inputs * (1 if t.digits > 1 else size) + 4 * (LANES + tiled)
        return 2 * blocks + t.rows * of_x + (t.scale != "float") * 4 * t.held * t.outputs
    kept = 4 * (t.held + t.rows) + (t.scale != "float") * 4 * t.held
    return 2 * blocks + t.outputs * kept
