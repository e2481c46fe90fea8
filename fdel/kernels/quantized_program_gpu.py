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
from fdel.kernels.decode_gpu import FORMATS, codes_of, decoded, scale_of, scales_of, spread
from fdel.kernels.quantized_arrays_gpu import EACH, GROUPS, Stored, Tiling

COPYING, MULTIPLYING = 40, 232  # registers of a thread, of 168 each, where there are many rows


def run(x: Float[Array, "M K"], w: Stored, dtype: Any, t: Tiling, table: tuple[Array, ...] = ()) -> Array:
    """Run the program: [M N] of inputs in one part or a `table` of tiles and their number, else float32 [parts N M]."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    outputs = t.outputs or len(w.values)
    turned = bool(table) or t.splits == 1 and dtype == jnp.bfloat16  # rows by outputs already
    tiled = lambda bits, n: (gpu.TilingTransform((8, n)), gpu.SwizzleTransform(n * bits // 8))
    half, tile = tiled(16, min(64, t.halves * t.piece // t.parts)), math.gcd(t.piece, w.values.shape[1])
    scratch: dict[str, Any] = {
        "w_s": gpu.SMEM((t.depth, GROUPS, EACH, t.chunk), w.values.dtype, transforms=tiled(8, tile)),
        "x_s": gpu.SMEM((t.depth, t.parts, t.rows, t.halves * t.chunk // t.parts), jnp.bfloat16, transforms=half),
        "full": gpu.Barrier(num_arrivals=GROUPS + t.parts, num_barriers=t.depth),
        "free": gpu.Barrier(num_arrivals=GROUPS, num_barriers=t.depth),
    }
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
        pl.when(j >= t.depth)(lambda: gpu.barrier_wait(r.free.at[slot]))
        for i in range(GROUPS):
            some = r.values.at[part(i), pl.ds(at * t.chunk, t.chunk)]
            gpu.copy_gmem_to_smem(some, r.w_s.at[slot, i], r.full.at[slot])
        group = jax.lax.div(at, jnp.int32(inner))
        column = (group * inner * t.halves + jax.lax.rem(at, jnp.int32(inner))) * t.chunk
        for i in range(t.parts):
            some = r.x.at[pl.ds(p.top, t.rows), pl.ds(column + i * inner * t.chunk, r.x_s.shape[3])]
            gpu.copy_gmem_to_smem(some, r.x_s.at[slot, i], r.full.at[slot])

    @pl.when((mine == GROUPS) & p.there)
    def copy() -> None:
        registers(COPYING, "decrease")
        jax.lax.fori_loop(0, p.count, fetch, None)

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


def _multiply(r: Any, t: Tiling, mine: Any, acc: Any, j: Any, known: list[list[Array]], begins: range) -> None:
    """Add the products of a chunk's pieces, of whose groups scales are known, and zero points if there are any."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    slot = jax.lax.rem(j, jnp.int32(t.depth))
    if begins[0] == 0:
        gpu.barrier_wait(r.full.at[slot])
    twice = lambda x: spread(x * t.halves, (EACH, t.halves * t.piece))  # low bits have the groups of high ones
    more = lambda zero, n: (zero.astype(jnp.float32) + n).astype(jnp.bfloat16)
    for begin in begins:
        raw = transfer_gpu.load(r.w_s.at[slot, mine, :, begin : begin + t.piece], layout=gpu.Layout.WGMMA_UPCAST_2X)
        some = slice(*(at * len(known[0]) // t.chunk for at in (begin, begin + t.piece)))
        scale, *zeros = (x[some] for x in known)
        zero = (lambda n, zeros=zeros: twice([more(x, n) for x in zeros[0]])) if zeros else None
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


def _sum(r: Any, t: Tiling, kind: str, mine: Any, outputs: Any, p: Any) -> Array:
    """Multiply chunks: float32 sums of outputs by rows."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    r.words = [r.codes[i] for i in range(r.codes.shape[0])] if hasattr(r, "codes") else []
    row, shape = gpu.Layout.WGMMA.reduce(1), (EACH, t.rows)
    columns = lambda x: jax.lax.broadcast_in_dim(x, shape, [0])
    stored = [r.scale, *([r.zero] if hasattr(r, "zero") else [])]
    of_group = lambda ref, group: transfer_gpu.load(ref.at[outputs, group], layout=row, optimized=False)
    pieces = range(0, t.chunk, t.piece)

    def about(at: Any) -> list[list[Array]]:
        """Read scales, and zero points if there are any, of a chunk's groups; of the last ones after the last chunk."""
        found = []
        for ref in stored:
            count = ref.shape[1]
            each = max(1, t.chunk * count // p.lanes)
            column = at * each if t.groups > 1 else jax.lax.div(at, jnp.int32(t.inner))
            if count % each == 0:  # one address for all
                column = jnp.minimum(column, count - each)
            found.append([of_group(ref, jnp.minimum(column + i, count - 1)) for i in range(each)])
        return found

    sums, whole = gpu.ACC(shape, jnp.float32), t.groups == r.scale.shape[1] == 1  # whole: only the result is scaled
    if whole or t.narrow:

        def all_chunks(acc: Any) -> Array:
            def step(j: Any, queue: Any) -> Any:
                known, *later = queue
                now = [scales_of(known[0], kind, t.in_memory), *known[1:]] if t.narrow else known
                later = queue if whole else [*later, about(p.begin + j + t.ahead)]
                _multiply(r, t, mine, acc, j, now, pieces)
                return later

            jax.lax.fori_loop(0, p.count, step, [about(p.begin + i) for i in range(1 if whole else t.ahead)])
            return acc[...]

        outer = ([r.scale] if whole else []) + ([r.outer] if hasattr(r, "outer") else [])
        total = pl.run_scoped(all_chunks, sums)
        for ref in outer:
            total = total * columns(scale_of(of_group(ref, 0), kind if whole else "float"))
        return total

    def step(j: Any, carry: tuple) -> tuple:
        total, (known, *later) = carry
        later = [*later, about(p.begin + j + t.ahead)]
        for i in range(t.groups):

            def one(acc: Any, some: range = pieces[i : i + 1]) -> Array:
                _multiply(r, t, mine, acc, j, known, some)
                return acc[...]

            scale = scale_of(known[0][i], kind)
            total = total + pl.run_scoped(one, sums) * columns(scale)
        return total, later

    start = gpu.layout_cast(jnp.zeros(shape, jnp.float32), gpu.Layout.WGMMA)
    return jax.lax.fori_loop(0, p.count, step, (start, [about(p.begin + i) for i in range(t.ahead)]))[0]
