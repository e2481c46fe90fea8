"""Products with weights of 4 and 8 bits on NVIDIA Hopper: a Pallas Mosaic GPU kernel that reads them as stored.

Tensor cores take one operand from registers: there the stored bytes become bfloat16 (`decode_gpu`), as CUTLASS's mixed
products do it, and are multiplied with rows of x in shared memory. So a program computes outputs by rows, 64 outputs for
each of `GROUPS` groups of warps, while one more group copies the next chunks of weight and x. Scales multiply float32
sums of a chunk, which lies in one group of inputs (arXiv 2210.17323, section 5, scales weights). *Few rows*, of decoding:
x has 8 to 64 rows, and inputs are divided between programs where that fills the device; their float32 sums are added by
XLA. *Many rows*, of prompts: 128 rows of x in a program, which gives the result as it is.

Bytes read: the stored values, once for each 128 rows (then from the second-level cache), scales and zero points alike, and
x once for each 128 outputs. FLOPs: 2 * rows * inputs * outputs. Compiled for H100; it has not run on a GPU yet.
"""

import functools
import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fdel.kernels import quantized_gradient
from fdel.kernels.decode_gpu import FORMATS, Whole, decoded
from fdel.kernels.device import no_hopper
from fdel.ops.contraction import Plan, inputs_last, ordered
from fdel.ops.weights import PACKED, Quantized, scales

GROUPS, EACH = 2, 64  # groups of warps that multiply, and outputs of each: what one product takes
ROWS = (8, 16, 32, 64, 128)  # of x in a program; only the last one is not divided along the inputs
CHUNKS = (128, 64, 32)  # bytes of a weight's row that are copied at once
DEPTH = 8  # chunks on their way, at most
DEVICE, MEMORY = 132, 190 * 2**10  # multiprocessors of an H100 or H200, and bytes of each for chunks
SHARED, SPLITS = 16, (1, 2, 4, 8, 16)  # rows up to which two programs share one, and parts of the inputs
COPYING, MULTIPLYING = 40, 232  # registers of a thread, of 168 each, where there are many rows


@dataclass(frozen=True)
class Tiling:
    """How a call is cut: rows of x in a program, bytes of a chunk, chunks on their way, parts of the inputs.

    `in_memory`: decoded weights go through shared memory, which alone the interpreter knows.
    """

    rows: int
    chunk: int
    depth: int
    splits: int
    format: str
    in_memory: bool = False

    few = property(lambda self: self.rows < ROWS[-1])
    halves = property(lambda self: 2 if self.format in PACKED else 1)


def unsupported(plan: Plan, x: Array, w: Quantized, dtype: Any) -> str | None:
    """Say why the kernel cannot serve this call, or None."""
    if why := no_hopper():
        return why
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
    outputs, lanes, groups = math.prod(w.values.shape[:-1]), w.values.shape[-1], w.scale.shape[-1]
    if outputs % (GROUPS * EACH):
        return f"{outputs} outputs; expected a multiple of {GROUPS * EACH}"
    if lanes // groups % CHUNKS[-1]:
        return f"groups of {lanes // groups} bytes; expected a multiple of {CHUNKS[-1]}"
    return None


def call(plan: Plan, x: Float[Array, "..."], w: Quantized, dtype: Any) -> Float[Array, "..."]:
    """Multiply as the operation `quantized_matmul` of `ops.einsum`; see `unsupported` for what it can serve."""
    return _product(plan, jnp.dtype(dtype), x, w)


@quantized_gradient.of_rows
def _product(plan: Plan, dtype: jnp.dtype, x: Array, w: Quantized) -> Array:
    plan, x = inputs_last(plan, x)
    rows, outputs = x.shape[:-1], w.values.shape[:-1]
    flat = lambda a: a.reshape(-1, a.shape[-1])
    zero = None if w.zero is None else flat(w.zero)
    parts = replace(w, values=flat(w.values), scale=flat(scales(w).astype(jnp.float32)), zero=zero)
    padding = w.values.shape[-1] * (2 if w.format in PACKED else 1) - x.shape[-1]
    x = jnp.pad(flat(x), ((0, 0), (0, padding)))
    y = matmul(x, parts, dtype, tiling(x, parts))
    return ordered(y.reshape(*rows, *outputs), plan.x[:-1] + plan.w[:-1], plan.out)


def tiling(x: Any, w: Any) -> Tiling:
    """Cut a call into programs, from the shapes of x [M K] and of the weight's matrices."""
    (many, _), (outputs, lanes) = x.shape, w.values.shape
    rows = next((n for n in ROWS if many <= n), ROWS[-1])
    chunk = next(n for n in CHUNKS if lanes // w.scale.shape[1] % n == 0)
    halves, beside = 2 if w.format in PACKED else 1, 2 if rows <= SHARED else 1
    depth = min(DEPTH, MEMORY // beside // (chunk * (GROUPS * EACH + 2 * halves * rows)), lanes // chunk)
    programs, splits = outputs // (GROUPS * EACH), 1

    def cost(n: int) -> float:
        """Rounds of programs, times the bytes of an output in each: of the weight, and of sums, written and read."""
        return -(-n * programs // (DEVICE * beside)) * (lanes / n + 8 * rows)

    if rows < ROWS[-1]:
        splits = min((n for n in SPLITS if n <= lanes // chunk), key=cost)
    return Tiling(rows, chunk, depth, splits, w.format)


def matmul(x: Float[Array, "M K"], w: Any, dtype: jnp.dtype, t: Tiling) -> Float[Array, "M N"]:
    """Run the kernel and add what its programs give. `w` is Quantized: matrices, its scales in float32."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    many, (outputs, _) = len(x), w.values.shape
    values = jax.lax.bitcast_convert_type(w.values, jnp.int8) if t.format in ("int8", "uint8") else w.values
    x = jnp.pad(x, ((0, -many % t.rows), (0, 0)))
    turned = not t.few and dtype == jnp.bfloat16  # rows by outputs already
    tiled = lambda bits, n: (gpu.TilingTransform((8, n)), gpu.SwizzleTransform(n * bits // 8))
    half = tiled(16, min(64, t.chunk))
    scratch: dict[str, Any] = {
        "w_s": gpu.SMEM((t.depth, GROUPS, EACH, t.chunk), values.dtype, transforms=tiled(8, t.chunk)),
        "x_s": gpu.SMEM((t.depth, t.halves, t.rows, t.chunk), jnp.bfloat16, transforms=half),
        "full": gpu.Barrier(num_arrivals=GROUPS + t.halves, num_barriers=t.depth),
        "free": gpu.Barrier(num_arrivals=GROUPS, num_barriers=t.depth),
    }
    if turned:
        scratch["o_s"] = gpu.SMEM((GROUPS, t.rows, EACH), dtype, transforms=tiled(16, 64))
        out = jax.ShapeDtypeStruct((len(x), outputs), dtype)
    else:
        scratch["o_s"] = gpu.SMEM((GROUPS, EACH, t.rows), jnp.float32, transforms=tiled(32, min(32, t.rows)))
        out = jax.ShapeDtypeStruct((t.splits, outputs, len(x)), jnp.float32)
    if t.in_memory:
        scratch["a_s"] = gpu.SMEM((GROUPS, EACH, t.chunk), jnp.bfloat16, transforms=half)
    of_groups = [w.scale, *([] if w.zero is None else [w.zero])]
    run = gpu.kernel(
        functools.partial(_program, t=t, given=w.zero is not None, turned=turned),
        out_type=out,
        scratch_types=scratch,
        grid=(len(x) // t.rows, outputs // (GROUPS * EACH), t.splits),
        grid_names=("row", "output", "split"),
        num_threads=GROUPS + 1,
        thread_name="warps",
        compiler_params=gpu.CompilerParams(lowering_semantics=gpu.LoweringSemantics.Lane),
    )
    y = run(x, values, *of_groups)
    return (y if turned else y.sum(0).T.astype(dtype))[:many]


def _program(*refs: Any, t: Tiling, given: bool, turned: bool, **memory: Any) -> None:
    """Compute outputs by rows from a part of the inputs; `refs` are the arguments and the result of `matmul`'s kernel."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    names = ["x", "values", "scale", *["zero"] * given, "out"]
    r = SimpleNamespace(**dict(zip(names, refs, strict=True)), **memory)
    row, output, split, mine = (jax.lax.axis_index(name) for name in ("row", "output", "split", "warps"))
    chunks = r.values.shape[1] // t.chunk
    each = -(-chunks // t.splits)
    begin = split * each
    count = jnp.clip(chunks - begin, 0, each)
    inner = r.values.shape[1] // r.scale.shape[1] // t.chunk  # chunks of a group
    rows = pl.ds(row * t.rows, t.rows)
    first = output * (GROUPS * EACH)

    def registers(count: int, action: Any) -> None:
        if not t.few and not t.in_memory:  # the interpreter has none
            gpu.set_max_registers(count, action=action)

    def fetch(j: Any, _: None) -> None:
        slot, at = jax.lax.rem(j, jnp.int32(t.depth)), begin + j
        pl.when(j >= t.depth)(lambda: gpu.barrier_wait(r.free.at[slot]))
        for i in range(GROUPS):
            some = r.values.at[pl.ds(first + i * EACH, EACH), pl.ds(at * t.chunk, t.chunk)]
            gpu.copy_gmem_to_smem(some, r.w_s.at[slot, i], r.full.at[slot])
        group = jax.lax.div(at, jnp.int32(inner))
        column = (group * inner * t.halves + jax.lax.rem(at, jnp.int32(inner))) * t.chunk
        for i in range(t.halves):
            some = r.x.at[rows, pl.ds(column + i * inner * t.chunk, t.chunk)]
            gpu.copy_gmem_to_smem(some, r.x_s.at[slot, i], r.full.at[slot])

    @pl.when(mine == GROUPS)
    def copy() -> None:
        registers(COPYING, "decrease")
        jax.lax.fori_loop(0, count, fetch, None)

    @pl.when(mine < GROUPS)
    def multiply() -> None:
        registers(MULTIPLYING, "increase")
        outputs = pl.ds(first + mine * EACH, EACH)
        total = _sum(r, t, mine, outputs, begin, count, inner)
        if (factor := FORMATS[t.format].factor) != 1:
            total = total * factor
        if turned:
            total = gpu.layout_cast(total.astype(r.o_s.dtype), gpu.Layout.WGMMA_TRANSPOSED)
            r.o_s.at[mine].transpose((1, 0))[...] = total
            to = r.out.at[rows, outputs]
        else:
            r.o_s.at[mine][...] = total
            to = r.out.at[split, outputs, rows]
        gpu.commit_smem()
        gpu.copy_smem_to_gmem(r.o_s.at[mine], to)
        gpu.wait_smem_to_gmem(0)


def _sum(r: Any, t: Tiling, mine: Any, outputs: Any, begin: Any, count: Any, inner: int) -> Array:
    """Multiply `count` chunks from chunk `begin` on: float32 sums of outputs by rows."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    index: tuple = () if jax.version.__version_info__ >= (0, 12) else ((),)  # of all, which older ones ask for
    row, shape = gpu.Layout.WGMMA.reduce(1), (EACH, t.rows)
    columns = lambda x, n: jax.lax.broadcast_in_dim(x, (EACH, n), [0])
    groups = r.scale.shape[1]
    whole = groups == 1  # one scale for an output: the result is scaled

    def of_group(ref: Any, at: Any) -> Array:
        g = jax.lax.div(jnp.minimum(at, r.values.shape[1] // t.chunk - 1), jnp.int32(inner))
        return gpu.load(ref.at[outputs, g], *index, layout=row, optimized=False).astype(jnp.float32)

    def multiply(acc: Any, j: Any, zero: Any) -> None:
        slot = jax.lax.rem(j, jnp.int32(t.depth))
        gpu.barrier_wait(r.full.at[slot])
        raw = gpu.load(r.w_s.at[slot, mine], *index, layout=gpu.Layout.WGMMA_UPCAST_2X)
        for half, operand in enumerate(decoded(gpu.layout_cast(raw, gpu.Layout.WGMMA), t.format, zero)):
            if t.in_memory:
                r.a_s.at[mine][...] = operand
                gpu.commit_smem()
                operand = r.a_s.at[mine]
            gpu.wgmma(acc, operand, r.x_s.at[slot, half].transpose((1, 0)))
            if t.in_memory:
                gpu.wgmma_wait(0)
        gpu.wgmma_wait(0)
        gpu.barrier_arrive(r.free.at[slot])

    numbers = gpu.ACC(shape, jnp.float32)
    zeros = lambda at: of_group(r.zero, at) if hasattr(r, "zero") else None
    if whole:
        zero = zeros(begin)

        def all_chunks(acc: Any) -> Array:
            jax.lax.fori_loop(0, count, lambda j, _: multiply(acc, j, zero), None)
            return acc[...]

        return pl.run_scoped(all_chunks, numbers) * columns(of_group(r.scale, begin), t.rows)

    def step(j: Any, carry: tuple) -> tuple:
        total, scale, zero = carry
        later = of_group(r.scale, begin + j + 1), zeros(begin + j + 1)  # on its way while this chunk is multiplied

        def one(acc: Any) -> Array:
            multiply(acc, j, zero)
            return acc[...]

        return total + pl.run_scoped(one, numbers) * columns(scale, t.rows), *later

    start = gpu.layout_cast(jnp.zeros(shape, jnp.float32), gpu.Layout.WGMMA)
    return jax.lax.fori_loop(0, count, step, (start, of_group(r.scale, begin), zeros(begin)))[0]
