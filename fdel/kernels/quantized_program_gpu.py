"""The program of `quantized_matmul_gpu` and `grouped_quantized_gpu`: outputs by rows, from weights as they are stored.

One group of warps copies chunks of weight and x, `GROUPS` others decode (`decode_gpu`) 64 outputs each and multiply. Groups
of inputs of 64 bytes or more have chunks of their own, whose float32 sums are scaled; those of 32 bytes are two pieces of
one. *Narrow* groups lie several in a piece: there decoded numbers are multiplied with scales in bfloat16, exact for the
scales of MXFP4 and NVFP4, powers of two and e4m3, whose products with e2m1 have six bits.
"""

import functools
import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fdel.kernels import transfer_gpu
from fdel.kernels.decode_gpu import FORMATS, codes_of, decoded, scale_of, scales_of, spread, zeros_of
from fdel.kernels.quantized_arrays_gpu import EACH, GROUPS, Stored, Tiling, columns

COPYING, MULTIPLYING = 40, 232  # registers of a thread, of 168 each, where there are many rows


def run(x: Float[Array, "M K"], w: Stored, dtype: Any, t: Tiling, table: tuple[Array, ...] = ()) -> Array:
    """Run the program: [M N] of inputs in one part or a `table` of tiles and their number, else float32 [parts N M]."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    outputs = t.outputs or len(w.values)
    turned = bool(table) or t.splits == 1 and dtype == jnp.bfloat16  # rows by outputs already
    tiled = lambda bits, n: (gpu.TilingTransform((8, n)), gpu.SwizzleTransform(n * bits // 8))
    half, tile = tiled(16, min(64, t.halves * t.piece // t.parts)), math.gcd(t.piece, w.values.shape[1])
    beside = columns(w, t)
    scratch: dict[str, Any] = {
        "w_s": gpu.SMEM((t.depth, GROUPS, EACH, t.chunk), w.values.dtype, transforms=tiled(8, tile)),
        "x_s": gpu.SMEM((t.depth, t.parts, t.rows, t.halves * t.chunk // t.parts), jnp.bfloat16, transforms=half),
        "full": gpu.Barrier(num_arrivals=GROUPS + t.parts + (1 if beside else 0), num_barriers=t.depth),
        "free": gpu.Barrier(num_arrivals=GROUPS, num_barriers=t.depth),
    }
    scratch |= {f"{name}_s": gpu.SMEM((t.depth, GROUPS * EACH, c.count), c.dtype) for name, c in beside.items()}
    if turned:
        how = () if table else tiled(16, 64)  # of a table's tiles some rows are copied out
        scratch["o_s"] = gpu.SMEM((GROUPS, t.rows, EACH), dtype, transforms=how)
        out = jax.ShapeDtypeStruct((len(x), outputs), dtype)
    else:
        scratch["o_s"] = gpu.SMEM((GROUPS, EACH, t.rows), jnp.float32, transforms=tiled(32, min(32, t.rows)))
        out = jax.ShapeDtypeStruct((t.splits, outputs, len(x)), jnp.float32)
    if t.in_memory:
        scratch["a_s"] = gpu.SMEM((GROUPS, EACH, t.halves * t.piece), jnp.bfloat16, transforms=half)
    given = {"x": x, "values": w.values, "scale": w.scale, "zero": w.zero, "outer": w.outer}
    given["codes"] = None if (codes := codes_of(t.format)) is None else jnp.asarray(codes)
    given |= dict(zip(("table", "items"), table, strict=False))
    given = {name: a for name, a in given.items() if a is not None}
    program = functools.partial(_program, t=t, kind=w.kind, turned=turned, names=(*given, "out"))
    tiles = len(table[0]) if table else len(x) // t.rows
    return gpu.kernel(
        program,
        kernel_name="quantized_matmul",
        out_type=out,
        scratch_types=scratch,
        grid=(tiles, -(-outputs // (GROUPS * EACH)), t.splits),
        grid_names=("row", "output", "split"),
        num_threads=GROUPS + 1,
        thread_name="warps",
        compiler_params=gpu.CompilerParams(lowering_semantics=gpu.LoweringSemantics.Lane),
    )(*given.values())


def _place(r: Any, t: Tiling) -> SimpleNamespace:
    """Say which outputs, rows and inputs are the program's."""
    row, output, split = (jax.lax.axis_index(name) for name in ("row", "output", "split"))
    every, lanes = r.values.shape
    chunks, here = -(-lanes // t.chunk), t.outputs or every
    each = -(-chunks // t.splits)
    p = SimpleNamespace(split=split, begin=split * each, first=output * (GROUPS * EACH), here=here, every=every)
    p.lanes = lanes
    p.count, p.top, p.some, p.there, p.matrix = jnp.clip(chunks - p.begin, 0, each), row * t.rows, None, True, 0
    if hasattr(r, "table"):
        group, p.top, first, end = (r.table[row, i] for i in range(4))
        p.some = first - p.top, end - first
        p.there = row < r.items[0]
        p.count = jnp.where(group < every // here, p.count, 0)  # rows of no group become 0
        p.matrix = jnp.minimum(group, every // here - 1) * here
    p.top_scale = jnp.minimum(p.matrix + p.first, max(0, every - GROUPS * EACH))  # of the 128 whose scales a slot has
    return p


def _program(*refs: Any, t: Tiling, kind: str, turned: bool, names: tuple[str, ...], **memory: Any) -> None:
    """Compute outputs by rows from a part of the inputs; `refs` are the arguments and the result of `run`'s kernel."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    r = SimpleNamespace(**dict(zip(names, refs, strict=True)), **memory)
    p, mine = _place(r, t), jax.lax.axis_index("warps")
    inner, last = t.inner, p.every - EACH  # the last tile may have half as many outputs
    part = lambda i: pl.ds(jnp.minimum(p.matrix + p.first + i * EACH, last), EACH)

    def registers(count: int, action: Any) -> None:
        if not t.few and not t.in_memory:  # the interpreter has none
            gpu.set_max_registers(count, action=action)

    def fetch(j: Any, _: None) -> None:
        slot, at = jax.lax.rem(j, jnp.int32(t.depth)), p.begin + j
        for i in range(GROUPS):
            some = r.values.at[part(i), pl.ds(at * t.chunk, t.chunk)]
            gpu.copy_gmem_to_smem(some, r.w_s.at[slot, i], r.full.at[slot])
        group = jax.lax.div(at, jnp.int32(inner))
        column = (group * inner * t.halves + jax.lax.rem(at, jnp.int32(inner))) * t.chunk
        for i in range(t.parts):
            some = r.x.at[pl.ds(p.top, t.rows), pl.ds(column + i * inner * t.chunk, r.x_s.shape[3])]
            gpu.copy_gmem_to_smem(some, r.x_s.at[slot, i], r.full.at[slot])

    def fill(j: Any, known: list[list[Array]]) -> list[list[Array]]:
        slot = jax.lax.rem(j, jnp.int32(t.depth))

        @pl.when(j >= t.depth)
        def _() -> None:
            gpu.barrier_wait(r.free.at[slot])
            fetch(j, None)

        _keep(r, t, kind, slot, known)
        return _numbers(r, t, p, p.begin + j + 1)  # here, as they take the same registers: else their moves wait

    @pl.when((mine == GROUPS) & p.there)
    def copy() -> None:
        registers(COPYING, "decrease")
        known = _numbers(r, t, p, p.begin)
        jax.lax.fori_loop(0, jnp.minimum(p.count, t.depth), fetch, None)  # none of these waits for scales
        jax.lax.fori_loop(0 if known else t.depth, p.count, fill, known)

    @pl.when((mine < GROUPS) & p.there)
    def multiply() -> None:
        registers(MULTIPLYING, "increase")
        total = _sum(r, t, kind, mine, part(mine), p)
        if (factor := FORMATS[t.format].factor) != 1:
            total = total * factor
        _store(total, r, t, mine, p, turned)


def _store(total: Array, r: Any, t: Tiling, mine: Any, p: Any, turned: bool) -> None:
    """Store sums through shared memory; rows of a table's tile in powers of two."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    if turned:
        total = gpu.layout_cast(total.astype(r.o_s.dtype), gpu.Layout.WGMMA_TRANSPOSED)
        transfer_gpu.store(r.o_s.at[mine].transpose((1, 0)), total)
    else:
        transfer_gpu.store(r.o_s.at[mine], total)
    gpu.commit_smem()
    rows, outputs = pl.ds(p.top, t.rows), pl.ds(p.first + mine * EACH, EACH)

    @pl.when(p.first + mine * EACH < p.here)
    def _() -> None:
        if p.some is None:
            gpu.copy_smem_to_gmem(r.o_s.at[mine], r.out.at[(rows, outputs) if turned else (p.split, outputs, rows)])
            return
        at, many = p.some
        for size in (t.rows >> i for i in range(t.rows.bit_length())):

            @pl.when(many & size != 0)
            def _(size: int = size, at: Any = at) -> None:
                to = r.out.at[pl.ds(p.top + at, size), outputs]
                gpu.copy_smem_to_gmem(r.o_s.at[mine, pl.ds(at, size)], to)

            at = at + (many & size)

    gpu.wait_smem_to_gmem(0)


def _numbers(r: Any, t: Tiling, p: Any, at: Any) -> list[list[Array]]:
    """Read scales, and zero points if there are any, of a chunk's groups, one output in each thread, as they are stored.

    Those of an output that lie side by side in all chunks are read at once. After the last chunk its own are read again.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    found, rows = [], GROUPS * EACH
    for name in ("scale", "zero"):
        if not hasattr(r, f"{name}_s"):
            continue
        ref, each = getattr(r, name), getattr(r, f"{name}_s").shape[2]
        count = ref.shape[1]
        column = at * each if t.groups > 1 else jax.lax.div(at, jnp.int32(t.inner))
        size = each if count % each == 0 else 1
        layout = gpu.Layout.WG_STRIDED((rows, size), vec_size=size)
        some = lambda i, ref=ref, column=column, size=size, count=count: ref.at[
            pl.ds(p.top_scale, rows), pl.ds(jnp.minimum(column + i, count - size), size)
        ]
        found.append([transfer_gpu.load(some(i), layout=layout) for i in range(0, each, size)])
    return found


def _keep(r: Any, t: Tiling, kind: str, slot: Any, known: list[list[Array]]) -> None:
    """Store what `_numbers` read to a chunk's slot: scales of narrow groups in bfloat16 or words, others in float32."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    if not known:
        return
    scale = lambda x: scale_of(x, kind) if not t.narrow else x.astype(r.scale_s.dtype)
    become = scale, lambda x: zeros_of(x, t.format)
    for name, numbers, how in zip(("scale", "zero"), known, become, strict=False):
        for i, x in enumerate(numbers):
            to = getattr(r, f"{name}_s").at[slot, :, pl.ds(i * x.shape[1], x.shape[1])]
            transfer_gpu.store(to, how(x))
    gpu.barrier_arrive(r.full.at[slot])


def _multiply(r: Any, t: Tiling, mine: Any, acc: Any, j: Any, begins: range, of_piece: Any) -> Any:
    """Add the products of a chunk's pieces, and give the scale of the last one's group, which is in float32."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    slot, scale = jax.lax.rem(j, jnp.int32(t.depth)), None
    if begins[0] == 0:
        gpu.barrier_wait(r.full.at[slot])
    twice = lambda x: spread(x * t.halves, (EACH, t.halves * t.piece))  # low bits have the groups of high ones
    for begin in begins:
        scale, zeros = of_piece(slot, begin)
        raw = transfer_gpu.load(r.w_s.at[slot, mine, :, begin : begin + t.piece], layout=gpu.Layout.WGMMA_UPCAST_2X)
        zero = twice(zeros) if zeros else None
        numbers = decoded(gpu.layout_cast(raw, gpu.Layout.WGMMA), t.format, zero, r.words, t.in_memory)
        if t.narrow:
            numbers = numbers * twice(scale)
        if begin > begins[0]:  # so that a piece takes the registers of the one before
            gpu.wgmma_wait(0)
        if t.in_memory:
            r.a_s.at[mine][...] = numbers
            gpu.commit_smem()
        size, first = t.halves * t.piece // t.parts, begin * t.halves
        for part in range(t.parts):
            some = slice(part * size, (part + 1) * size)
            operand = r.a_s.at[mine, :, some] if t.in_memory else numbers[:, some]
            gpu.wgmma(acc, operand, r.x_s.at[slot, part, :, first : first + size].transpose((1, 0)))
        if t.in_memory:
            gpu.wgmma_wait(0)
    gpu.wgmma_wait(0)
    if begins[-1] + t.piece == t.chunk:
        gpu.barrier_arrive(r.free.at[slot])
    return scale


def _sum(r: Any, t: Tiling, kind: str, mine: Any, outputs: Any, p: Any) -> Array:
    """Multiply chunks: float32 sums of outputs by rows."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    r.words = [r.codes[i] for i in range(r.codes.shape[0])] if hasattr(r, "codes") else []
    row, shape = gpu.Layout.WGMMA.reduce(1), (EACH, t.rows)
    by_rows = lambda x: jax.lax.broadcast_in_dim(x, shape, [0])
    first = lambda ref: transfer_gpu.load(ref.at[outputs, 0], layout=row, optimized=False)
    pieces, whole = range(0, t.chunk, t.piece), not hasattr(r, "scale_s")  # whole: only the result is scaled
    always = [zeros_of(first(r.zero), t.format)] if whole and hasattr(r, "zero") else []
    mine_of = pl.ds(jnp.minimum(p.matrix + p.first + mine * EACH, p.every - EACH) - p.top_scale, EACH)

    def kept(name: str, slot: Any, begin: int) -> list[Array]:
        """Read a piece's columns of a slot: of a word that several pieces share, the word."""
        if (ref := getattr(r, f"{name}_s", None)) is None:
            return []
        count, at = ref.shape[2], begin * ref.shape[2] // t.chunk
        some = range(at, max(at + 1, (begin + t.piece) * count // t.chunk))
        return [transfer_gpu.load(ref.at[slot, mine_of, i], layout=row, optimized=False) for i in some]

    def of_piece(slot: Any, begin: int) -> tuple[Any, list[Array]]:
        """Give scales of a piece's groups, several if they are narrow, and zero points or none."""
        if whole:
            return None, always
        scales, zeros = kept("scale", slot, begin), kept("zero", slot, begin)
        if not t.narrow:
            return scales[0], zeros
        scales = scales_of(scales, kind, t.in_memory)
        at, count = begin * t.groups // t.chunk, t.groups * t.piece // t.chunk
        at %= t.groups // r.scale_s.shape[2]  # of a word's
        return scales[at : at + count], zeros

    sums = gpu.ACC(shape, jnp.float32)
    if whole or t.narrow:

        def all_chunks(acc: Any) -> Array:
            def step(j: Any, _: None) -> None:
                _multiply(r, t, mine, acc, j, pieces, of_piece)

            jax.lax.fori_loop(0, p.count, step, None)
            return acc[...]

        outer = ([r.scale] if whole else []) + ([r.outer] if hasattr(r, "outer") else [])
        total = pl.run_scoped(all_chunks, sums)
        for ref in outer:
            total = total * by_rows(scale_of(first(ref), kind if whole else "float"))
        return total

    def step(j: Any, total: Array) -> Array:
        for i in range(t.groups):

            def one(acc: Any, some: range = pieces[i : i + 1]) -> tuple[Array, Array]:
                scale = _multiply(r, t, mine, acc, j, some, of_piece)
                return acc[...], scale

            products, scale = pl.run_scoped(one, sums)
            total = total + products * by_rows(scale)
        return total

    return jax.lax.fori_loop(0, p.count, step, gpu.layout_cast(jnp.zeros(shape, jnp.float32), gpu.Layout.WGMMA))
