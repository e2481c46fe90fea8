"""The programs of `grouped_matmul_gpu`: what the warps of a multiprocessor do with tiles of the result.

The last tiles of outputs, and the last step of inputs, may lie past the end: TMA reads zeros there and leaves out what
is stored. It knows ends of columns in pieces, which lie together in shared memory, so a piece divides them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from fdel.kernels import transfer_gpu

PROGRAMS = 132  # multiprocessors of an H100 or H200
GROUPS, ROWS, STEP = 2, 64, 64  # groups of warps that multiply, rows and inputs of a product
BAND, DEPTH = 8, 4  # tiles of rows side by side; steps on their way
PIECES = 64, 32, 16  # columns that lie together: as many as a row of swizzled shared memory has
COPYING, MULTIPLYING = 40, 232  # registers of a thread, of 168 each


@dataclass(frozen=True)
class Tiling:
    """Tiles of few rows: two groups of warps side by side; of many: one above the other. `interpreted`: no registers."""

    few: bool
    width: int  # outputs of a group of warps
    turned: bool  # matrices are [outputs inputs], as they are stored; else [inputs outputs]
    piece: int = PIECES[0]  # columns of both operands that lie together
    matrices: int = 1  # that rows are multiplied with, side by side
    interpreted: bool = False

    parts = property(lambda self: (1, GROUPS) if self.few else (GROUPS, 1))  # of rows, and of outputs
    rows = property(lambda self: self.parts[0] * ROWS)
    outputs = property(lambda self: self.parts[1] * self.width)


def run(program: Callable, out: Any, scratch: dict, *args: Array) -> Array:
    """Run a program of this file on every multiprocessor, in a group of warps for copies and `GROUPS` for products."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    run = gpu.kernel(
        program,
        kernel_name="grouped_matmul",
        out_type=out,
        scratch_types=scratch,
        grid=(PROGRAMS,),
        grid_names=("program",),
        num_threads=GROUPS + 1,
        thread_name="warps",
        compiler_params=gpu.CompilerParams(lowering_semantics=gpu.LoweringSemantics.Lane),
    )
    return run(*args)


def _walk(steps: Callable, total: Any, copy: Callable, multiply: Callable, interpreted: bool) -> None:
    """Share tiles between programs, and a tile's work between the warps that copy and those that multiply.

    `steps(i)` are those of tile i, which both count on, so that copies for the next tile begin while this one is stored.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    program, mine = jax.lax.axis_index("program"), jax.lax.axis_index("warps")
    count = jax.lax.div(total - program + (PROGRAMS - 1), jnp.int32(PROGRAMS))

    def each(work: Callable) -> None:
        def one(n: Any, done: Any) -> Any:
            i = program + n * PROGRAMS
            work(i, done)
            return done + steps(i)

        jax.lax.fori_loop(0, count, one, jnp.int32(0))

    def registers(count: int, action: Any) -> None:
        if not interpreted:
            gpu.set_max_registers(count, action=action)

    @pl.when(mine == GROUPS)
    def _() -> None:
        registers(COPYING, "decrease")
        each(copy)

    @pl.when(mine < GROUPS)
    def _() -> None:
        registers(MULTIPLYING, "increase")
        each(multiply)


def _copies(s: Any, count: Any, done: Any, copy: Callable) -> None:
    """Copy what `count` steps need: copy(step, slot), once what was there has been multiplied."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    def step(j: Any, _: None) -> None:
        slot = jax.lax.rem(done + j, jnp.int32(DEPTH))
        pl.when(done + j >= DEPTH)(lambda: gpu.barrier_wait(s.free.at[slot]))
        copy(j, slot)

    jax.lax.fori_loop(0, count, step, None)


def _products(s: Any, shape: tuple[int, int], count: Any, done: Any, multiply: Callable, sums: int = 1) -> list[Array]:
    """Add the products of `count` steps: multiply(*sums, step, slot). A slot is free when the next are under way."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    slot = lambda j: jax.lax.rem(done + j, jnp.int32(DEPTH))

    def every(*accs: Any) -> list[Array]:
        def step(j: Any, _: None) -> None:
            gpu.barrier_wait(s.full.at[slot(j)])
            multiply(*accs, j, slot(j))
            gpu.wgmma_wait(sums)
            pl.when(j > 0)(lambda: gpu.barrier_arrive(s.free.at[slot(j - 1)]))

        jax.lax.fori_loop(0, count, step, None)
        return [acc[...] for acc in accs]

    total = pl.run_scoped(every, *[gpu.ACC(shape, jnp.float32)] * sums)
    pl.when(count > 0)(lambda: gpu.barrier_arrive(s.free.at[slot(count - 1)]))
    return total


def _store(total: Array, memory: Any, send: Callable[[int], None]) -> None:
    """Write sums to shared memory, as many columns at a time as it has, and send each from there."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    columns = memory.shape[1]
    for c in range(0, total.shape[1], columns):
        gpu.wait_smem_to_gmem(0, wait_read_only=True)
        transfer_gpu.store(memory, total[:, c : c + columns].astype(memory.dtype))
        gpu.commit_smem()
        send(c)


def _store_rows(sums: Array, s: Any, mine: Any, out: Any, corner: tuple, some: tuple) -> None:
    """Store rows some[0] to some[1] of sums, whose first number is at `corner` of the result: in powers of two."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    (top, left), (low, high), columns = corner, some, s.out_s.shape[-1]

    def whole(c: int) -> None:
        gpu.copy_smem_to_gmem(s.out_s.at[mine], out.at[pl.ds(top, ROWS), pl.ds(left + c, columns)])

    def part(c: int) -> None:
        size, at = ROWS, low
        while size := size // 2:

            @pl.when((high - low) & size != 0)
            def _(size: int = size, at: Any = at) -> None:
                rows = out.at[pl.ds(top + at, size), pl.ds(left + c, columns)]
                gpu.copy_smem_to_gmem(s.part_s.at[mine, pl.ds(at, size)], rows)

            at = at + ((high - low) & size)

    pl.when(high - low == ROWS)(lambda: _store(sums, s.out_s.at[mine], whole))
    pl.when((high > low) & (high - low < ROWS))(lambda: _store(sums, s.part_s.at[mine], part))


def of_rows(*refs: Any, t: Tiling, join: tuple[Callable, ...], **memory: Any) -> None:
    """Walk tiles of rows; `refs` are the arguments and the results of `rows_times`."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    x, (table, items), outs = refs[0], refs[1 + t.matrices : 3 + t.matrices], refs[3 + t.matrices :]
    matrices = refs[1 : 1 + t.matrices]
    s, mine = SimpleNamespace(**memory), jax.lax.axis_index("warps")
    across, inner = -(-outs[0].shape[1] // t.outputs), -(-x.shape[1] // STEP)
    groups = matrices[0].shape[0]
    total = items[0]

    def tile(i: Any) -> tuple[Any, Any]:
        """Give the item in the table, and the tile of outputs: bands of `BAND` items times all outputs."""
        band, at = jax.lax.div(i, jnp.int32(BAND * across)), jax.lax.rem(i, jnp.int32(BAND * across))
        high = jnp.minimum(total - band * BAND, BAND)
        return band * BAND + jax.lax.rem(at, high), jax.lax.div(at, high)

    steps = lambda i: jnp.where(table[tile(i)[0], 0] < groups, inner, 0)
    begin = lambda item: jnp.minimum(table[item, 1], x.shape[0] - t.rows)  # no row past the last is read

    def copy(i: Any, done: Any) -> None:
        item, column = tile(i)
        group, first = table[item, 0], begin(item)

        def one(j: Any, slot: Any) -> None:
            inputs = pl.ds(j * STEP, STEP)
            for p in range(t.parts[0]):
                gpu.copy_gmem_to_smem(x.at[pl.ds(first + p * ROWS, ROWS), inputs], s.left.at[slot, p], s.full.at[slot])
            for i in range(t.matrices * t.parts[1]):
                w, p = matrices[i // t.parts[1]], i % t.parts[1]
                some = pl.ds(column * t.outputs + p * t.width, t.width)
                part = w.at[group, some, inputs] if t.turned else w.at[group, inputs, some]
                gpu.copy_gmem_to_smem(part, s.right.at[slot, i], s.full.at[slot])

        _copies(s, steps(i), done, one)

    def multiply(i: Any, done: Any) -> None:
        above, beside = (0, mine) if t.few else (mine, 0)

        def one(*given: Any) -> None:
            *accs, _, slot = given
            for i, acc in enumerate(accs):
                matrix = s.right.at[slot, i * t.parts[1] + beside]
                gpu.wgmma(acc, s.left.at[slot, above], matrix.transpose((1, 0)) if t.turned else matrix)

        sums = _products(s, (ROWS, t.width), steps(i), done, one, t.matrices)
        item, column = tile(i)
        to, left = begin(item) + above * ROWS, column * t.outputs + beside * t.width
        low = jnp.clip(table[item, 2] - to, 0, ROWS)  # rows of this part that are the group's: low to high
        high = jnp.clip(table[item, 3] - to, low, ROWS)

        for out, give in zip(outs, join, strict=True):
            _store_rows(give(*sums), s, mine, out, (to, left), (low, high))

    _walk(steps, total * across, copy, multiply, t.interpreted)
    pl.when(mine < GROUPS)(lambda: gpu.wait_smem_to_gmem(0))


def _clear(ref: Any, low: Any, high: Any) -> None:
    """Set rows of a chunk to zero but for those from low to high."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    value = transfer_gpu.load(ref, layout=gpu.Layout.WGMMA)
    row = gpu.broadcasted_iota(jnp.int32, value.shape, 0, layout=gpu.Layout.WGMMA)
    ref[...] = jnp.where((row >= low) & (row < high), value, jnp.zeros_like(value))


def _clear_together(ref: Any, mine: Any, low: Any, high: Any) -> None:
    """Do as `_clear`; each group of warps takes some of the columns, a multiple of 64."""
    from jax.experimental import pallas as pl

    half = ref.shape[-1] // GROUPS
    part = PIECES[0] if half % PIECES[0] else half
    whole, rest = divmod(ref.shape[-1] // part, GROUPS)
    clear = lambda n: _clear(ref.at[:, pl.ds(n * part, part)], low, high)
    for n in range(0, whole * GROUPS, GROUPS):
        clear(mine + n)
    if rest:
        pl.when(mine == 0)(lambda: clear(whole * GROUPS))


def of_matrices(*refs: Any, width: int, interpreted: bool, **memory: Any) -> None:
    """Walk tiles of matrices; `refs` are the arguments and the result of `_matrices`."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    x, dy, bounds, out = refs
    s, mine = SimpleNamespace(**memory), jax.lax.axis_index("warps")
    height, columns = GROUPS * ROWS, s.out_s.shape[-1]
    down, across = -(-out.shape[1] // height), -(-out.shape[2] // width)

    def tile(i: Any) -> tuple[Any, Any, Any]:
        group, at = jax.lax.div(i, jnp.int32(down * across)), jax.lax.rem(i, jnp.int32(down * across))
        return group, jax.lax.div(at, jnp.int32(across)) * height, jax.lax.rem(at, jnp.int32(across)) * width

    def steps(i: Any) -> Any:
        group = tile(i)[0]
        return jax.lax.div(bounds[group, 2] - bounds[group, 0] + (STEP - 1), jnp.int32(STEP))

    def copy(i: Any, done: Any) -> None:
        group, top, left = tile(i)

        def one(j: Any, slot: Any) -> None:
            rows = pl.ds(jnp.minimum(bounds[group, 0] + j * STEP, x.shape[0] - STEP), STEP)
            for p in range(GROUPS):
                gpu.copy_gmem_to_smem(dy.at[rows, pl.ds(top + p * ROWS, ROWS)], s.left.at[slot, p], s.full.at[slot])
            gpu.copy_gmem_to_smem(x.at[rows, pl.ds(left, width)], s.right.at[slot, 0], s.full.at[slot])

        _copies(s, steps(i), done, one)

    def multiply(i: Any, done: Any) -> None:
        group, top, left = tile(i)

        def one(acc: Any, j: Any, slot: Any) -> None:
            at = bounds[group, 0] + j * STEP
            first = jnp.minimum(at, x.shape[0] - STEP)
            low, high = jnp.maximum(at, bounds[group, 1]) - first, bounds[group, 2] - first

            @pl.when((low > 0) | (high < STEP))  # rows of others, or of none: NaN, perhaps
            def _() -> None:
                _clear(s.left.at[slot, mine], low, high)
                _clear_together(s.right.at[slot, 0], mine, low, high)
                gpu.commit_smem()
                gpu.barrier_arrive(s.both)
                gpu.barrier_wait(s.both)

            gpu.wgmma(acc, s.left.at[slot, mine].transpose((1, 0)), s.right.at[slot, 0])

        sums = _products(s, (ROWS, width), steps(i), done, one)[0]
        rows = pl.ds(top + mine * ROWS, ROWS)
        send = lambda c: gpu.copy_smem_to_gmem(s.out_s.at[mine], out.at[group, rows, pl.ds(left + c, columns)])
        _store(sums, s.out_s.at[mine], send)

    _walk(steps, jnp.int32(out.shape[0] * down * across), copy, multiply, interpreted)
    pl.when(mine < GROUPS)(lambda: gpu.wait_smem_to_gmem(0))
