"""The programs of `grouped_matmul_tpu` and `grouped_glu_tpu`: what a step of the grid does with a tile of rows."""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

ALIGNED = 16  # rows of bfloat16 that lie in one tile of memory


class Tiling(NamedTuple):
    """How a product of rows is cut: `part` rows of a tile are multiplied at once, those of other groups are not."""

    rows: int  # of a tile
    part: int
    outputs: int  # of a tile
    inputs: int
    memory: int  # bytes that a program may use
    turned: bool  # matrices are [outputs inputs], as they are stored; else [inputs outputs]


class Visits(NamedTuple):
    """The steps of a grid: which tile of rows meets which matrix, and from which of its rows up to which."""

    tile: Int[Array, " V"]
    matrix: Int[Array, " V"]
    low: Int[Array, " V"]
    high: Int[Array, " V"]


def visits(sizes: Int[Array, " E"], many: int, rows: int, *, matrices: bool) -> tuple[Visits, Array]:
    """List the steps, in the order of rows, and count them: a tile meets each group that has rows of it.

    Rows of no group are a last one, which meets those tiles that no other does, and the matrix before. With `matrices`
    every group has a step at least, without rows if it has none, and rows of no group have none.
    """
    count, tiles = len(sizes), -(-many // rows)
    ends = jnp.cumsum(sizes.astype(jnp.int32))
    starts, after = ends - sizes, -(-ends // rows)
    steps = jnp.where(sizes > 0, after - starts // rows, int(matrices))
    if not matrices:
        steps = jnp.append(steps, tiles - after[-1])
        starts, ends = jnp.append(starts, after[-1] * rows), jnp.append(ends, 0)
    last = jnp.cumsum(steps)
    v = jnp.arange(tiles + count, dtype=jnp.int32)
    group = jnp.minimum(jnp.searchsorted(last, v, side="right", method="compare_all"), len(steps) - 1)
    tile = jnp.minimum(starts[group] // rows + v - last[group] + steps[group], tiles - 1)
    within = lambda at: jnp.clip(at[group] - tile * rows, 0, rows).astype(jnp.int32)
    busy = jnp.max(jnp.where(sizes > 0, jnp.arange(count), 0))
    matrix = group if matrices else jnp.where(group < count, group, busy)
    return Visits(tile.astype(jnp.int32), matrix.astype(jnp.int32), within(starts), within(ends)), last[-1]


def _dot(a: Array, b: Array, axes: tuple[int, int]) -> Array:
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    numbers = (((axes[0],), (axes[1],)), ((), ()))
    return jax.lax.dot_general(a, b, numbers, precision=precision, preferred_element_type=jnp.float32)


def _parts(v: Any, low: Any, high: Any, rows: int, part: int, do: Callable[[Any, Array], None]) -> None:
    """Do what a step does with the rows of its group in a tile, `part` at once: do(rows, whether each is one).

    The first part begins with the memory tile that has the group's first row.
    """
    from jax.experimental import pallas as pl

    start, end = low[v] // ALIGNED * ALIGNED, high[v]

    def one(i: Any, _: None) -> None:
        begin = start + i * part
        at = jnp.minimum(begin, rows - part)  # within the tile: the last part may have rows of the one before
        row = at + jax.lax.broadcasted_iota(jnp.int32, (part, 1), 0)
        do(pl.ds(pl.multiple_of(at, min(ALIGNED, part)), part), (row >= jnp.maximum(low[v], begin)) & (row < end))

    jax.lax.fori_loop(0, jnp.where(end > low[v], (end - start + part - 1) // part, 0), one, None)


def of_rows(t: Tiling, counts: tuple[int, int, int], product: Callable[..., list[Array]], *refs: Any) -> None:
    """Multiply tiles of rows with blocks of matrices; product(*results, *biases) gives what is stored.

    `counts` are those of x, of matrices and of biases: each matrix has a tile of its own, or all have one.
    """
    from jax.experimental import pallas as pl

    tile, _, low, high = refs[:4]
    first, second, third = (4 + sum(counts[: i + 1]) for i in range(3))
    xs, matrices, biases, outs = refs[4:first], refs[first:second], refs[second:third], refs[third:]
    v = pl.program_id(1)

    @pl.when((v == 0) | (tile[v] != tile[jnp.maximum(v - 1, 0)]))
    def _begin() -> None:
        for out in outs:
            out[...] = jnp.zeros_like(out)

    def part(rows: Any, mine: Array) -> None:
        found = [_dot(xs[i % len(xs)][rows, :], w[0], (1, int(t.turned))) for i, w in enumerate(matrices)]
        for out, y in zip(outs, product(*found, *(b[0].astype(jnp.float32) for b in biases)), strict=True):
            out[rows, :] = jnp.where(mine, y.astype(out.dtype), out[rows, :])

    _parts(v, low, high, t.rows, t.part, part)


def of_matrices(t: Tiling, *refs: Any) -> None:
    """Add a tile of rows to the product of dy and x over a group's rows; a block of it is stored after its last tile."""
    from jax.experimental import pallas as pl

    _, matrix, low, high, dy, x, out, total = refs
    v, last = pl.program_id(2), pl.num_programs(2) - 1

    @pl.when((v == 0) | (matrix[v] != matrix[jnp.maximum(v - 1, 0)]))
    def _begin() -> None:
        total[...] = jnp.zeros_like(total)

    def add(rows: Any, mine: Array) -> None:
        a, b = (jnp.where(mine, ref[rows, :].astype(jnp.float32), 0).astype(ref.dtype) for ref in (dy, x))
        total[...] += _dot(a, b, (0, 0))

    _parts(v, low, high, t.rows, t.part, add)

    @pl.when((v == last) | (matrix[v] != matrix[jnp.minimum(v + 1, last)]))
    def _store() -> None:
        out[0] = total[...].astype(out.dtype)


def rows_times(
    t: Tiling, xs: tuple, matrices: tuple, biases: tuple, sizes: Array, product: Callable, outs: int = 1
) -> list[Array]:
    """Run `of_rows` on rows [M inputs]: `outs` arrays [M outputs]; biases [E outputs] are those of the groups."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    (many, inputs), outputs = xs[0].shape, matrices[0].shape[1 if t.turned else 2]
    about, steps = visits(sizes, many, t.rows, matrices=False)
    if t.turned:
        matrix = pl.BlockSpec((1, t.outputs, inputs), lambda n, v, tile, group, *_: (group[v], n, 0))
    else:
        matrix = pl.BlockSpec((1, inputs, t.outputs), lambda n, v, tile, group, *_: (group[v], 0, n))
    row = pl.BlockSpec((t.rows, inputs), lambda n, v, tile, *_: (tile[v], 0))
    bias = pl.BlockSpec((1, 1, t.outputs), lambda n, v, tile, group, *_: (group[v], 0, n))
    run = pl.pallas_call(
        functools.partial(of_rows, t, (len(xs), len(matrices), len(biases)), product),
        out_shape=[jax.ShapeDtypeStruct((many, outputs), xs[0].dtype)] * outs,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(about),
            grid=(-(-outputs // t.outputs), steps),
            in_specs=[*[row] * len(xs), *[matrix] * len(matrices), *[bias] * len(biases)],
            out_specs=[pl.BlockSpec((t.rows, t.outputs), lambda n, v, tile, *_: (tile[v], n))] * outs,
        ),
        compiler_params=parameters(t, "parallel", "arbitrary"),
        name="grouped_rows",
    )
    return run(*about, *xs, *matrices, *(b[:, None] for b in biases))


def matrices_of(t: Tiling, dy: Array, x: Array, sizes: Array) -> Array:
    """Run `of_matrices` on dy [M N] and x [M K]: [E N K]."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    about, steps = visits(sizes, len(x), t.rows, matrices=True)
    outputs, inputs = dy.shape[1], x.shape[1]
    run = pl.pallas_call(
        functools.partial(of_matrices, t),
        out_shape=jax.ShapeDtypeStruct((len(sizes), outputs, inputs), x.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(about),
            grid=(-(-outputs // t.outputs), -(-inputs // t.inputs), steps),
            in_specs=[
                pl.BlockSpec((t.rows, t.outputs), lambda n, k, v, tile, *_: (tile[v], n)),
                pl.BlockSpec((t.rows, t.inputs), lambda n, k, v, tile, *_: (tile[v], k)),
            ],
            out_specs=pl.BlockSpec((1, t.outputs, t.inputs), lambda n, k, v, tile, group, *_: (group[v], n, k)),
            scratch_shapes=[pltpu.VMEM((t.outputs, t.inputs), jnp.float32)],
        ),
        compiler_params=parameters(t, "parallel", "parallel", "arbitrary"),
        name="grouped_matrices",
    )
    return run(*about, dy, x)


def parameters(t: Tiling, *axes: Literal["parallel", "arbitrary"]) -> Any:
    """Tell the compiler how axes of the grid are walked, and how much memory there is."""
    from jax.experimental.pallas import tpu as pltpu

    return pltpu.CompilerParams(dimension_semantics=axes, vmem_limit_bytes=t.memory, disable_bounds_checks=True)
