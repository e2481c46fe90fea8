"""The program of `flash_backward_gpu` that gives dq, and what it shares with that for dk and dv, `flash_keys_gpu`."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from fdel.kernels import transfer_gpu
from fdel.kernels.flash_tiles import END, FIRST, NUMBERS, WHOLE_FROM, WHOLE_TO, Tests, Tiles
from fdel.kernels.flash_tiles_gpu import seen

ROWS = 64  # of one product of a group of warps
COPYING, MULTIPLYING = 24, 240  # registers of a thread, of 168 each
LOG2E = math.log2(math.e)
FAR = -1e15  # in place of the tanh of what is not seen: its probability is 0, its square is finite


class About(NamedTuple):
    """What is static of a call. `group`: query heads of a key head; `width` and `values`: channels of keys and of values.

    Operands stay in registers on a GPU; the interpreter, which is meant by `interpreted`, knows them in shared memory only.
    """

    scale: float
    softcap: float | None
    asked: Tests
    group: int
    width: int
    values: int
    tiles: Tiles
    interpreted: bool


class Tile(NamedTuple):
    """Where queries and keys of a tile stand: `numbers` and `segments` as `seen` reads them, the index of the first key.

    `axis` is that of the queries; `whole` tells that all see each other.
    """

    numbers: Any
    segments: Any
    first: Any
    axis: int
    whole: Bool[Array, ""]


def of_queries(*refs: Any, about: About, **memory: Any) -> None:
    """Give dq of a tile of queries of a head; `refs` are the arguments and the result of the kernel."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    q, k, v, dout, _, _, _, segments, bounds, _ = refs
    at, row, n, mine = (jax.lax.axis_index(name) for name in ("tile", "row", "head", "warps"))
    s, size, tile = SimpleNamespace(**memory), about.tiles, bounds.shape[1] - 1 - at  # the last tiles see most
    begin, end = bounds[row, tile, FIRST], bounds[row, tile, END]
    head = jax.lax.div(n, jnp.int32(about.group))
    of_query, of_dout = pl.ds(n * about.width, about.width), pl.ds(n * about.values, about.values)

    def fetch(i: Any, _: None) -> None:
        some, of_k, of_v = pl.ds((begin + i) * size.keys, size.keys), _slot(i, s.k_s), _slot(i, s.v_s)
        pl.when(i >= s.k_s.shape[0])(lambda: gpu.barrier_wait(s.k_free.at[of_k]))
        keys = k.at[row, some, pl.ds(head * about.width, about.width)]
        gpu.copy_gmem_to_smem(keys, s.k_s.at[of_k], s.k_full.at[of_k])
        gpu.copy_gmem_to_smem(segments.at[row, some], s.segments_s.at[of_k], s.k_full.at[of_k])
        pl.when(i >= s.v_s.shape[0])(lambda: gpu.barrier_wait(s.v_free.at[of_v]))
        values = v.at[row, some, pl.ds(head * about.values, about.values)]
        gpu.copy_gmem_to_smem(values, s.v_s.at[of_v], s.v_full.at[of_v])

    @pl.when(mine == 2)
    def copy() -> None:
        registers(about, COPYING, "decrease")
        for group in range(2):
            rows = pl.ds(tile * size.queries + group * ROWS, ROWS)
            for ref, to in ((q.at[row, rows, of_query], s.q_s), (dout.at[row, rows, of_dout], s.dout_s)):
                gpu.copy_gmem_to_smem(ref, to.at[group], s.shared.at[group])
        jax.lax.fori_loop(0, end - begin, fetch, None)

    pl.when(mine < 2)(lambda: _of_rows(refs, about, s, (tile, row, n, mine)))


def _of_rows(refs: tuple, about: About, s: Any, where: tuple[Any, Any, Any, Any]) -> None:
    """Give dq of 64 queries; `where` tells their tile, row, head and group of warps."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    q, *_, lse, delta, numbers, _, bounds, dq = refs
    (tile, row, n, mine), keys = where, about.tiles.keys
    begin, whole_from, whole_to, end = (bounds[row, tile, i] for i in (FIRST, WHOLE_FROM, WHOLE_TO, END))
    rows = pl.ds(tile * about.tiles.queries + mine * ROWS, ROWS)
    load = lambda ref: transfer_gpu.load(ref.at[row, n, rows], layout=gpu.Layout.WGMMA.reduce(1), optimized=False)
    registers(about, MULTIPLYING, "increase")
    top, less, here = load(lse), load(delta), numbers.at[row, pl.ds(0, NUMBERS), rows]

    def step(i: Any, sums: Array) -> Array:
        of_k, of_v, j, none = _slot(i, s.k_s), _slot(i, s.v_s), begin + i, zero(bounds[row, tile, FIRST])
        gpu.barrier_wait(s.k_full.at[of_k])
        gpu.barrier_wait(s.v_full.at[of_v])

        def multiply(acc: Any, x: Any, dp: Any) -> None:
            gpu.wgmma(x, s.q_s.at[mine + none], s.k_s.at[of_k].transpose((1, 0)))
            gpu.wgmma(dp, s.dout_s.at[mine + none], s.v_s.at[of_v + none].transpose((1, 0)))
            at = Tile(here, s.segments_s.at[of_k], j * keys, 0, (whole_from <= j) & (j < whole_to))
            _, weight = probabilities(about, gpu.wgmma_accumulator_load(x, wait_n=1), top, at)
            ds = weight * (dp[...] - spread(less, weight.shape, 0))
            gpu.barrier_arrive(s.v_free.at[of_v])
            gpu.wgmma(acc, operand(about, ds.astype(q.dtype), s, mine), s.k_s.at[of_k])

        (sums,) = added(about, multiply, [sums], *[(ROWS, keys)] * 2)
        gpu.barrier_arrive(s.k_free.at[of_k])
        return sums

    gpu.barrier_wait(s.shared.at[mine])
    sums = jax.lax.fori_loop(0, end - begin, step, nothing(about.width))
    transfer_gpu.store(dq.at[row, rows, pl.ds(n * about.width, about.width)], (sums * about.scale).astype(dq.dtype))


def _slot(i: Any, ring: Any) -> Any:
    return jax.lax.rem(i, jnp.int32(ring.shape[0]))


def probabilities(about: About, x: Array, lse: Array, at: Tile) -> tuple[Array, Array]:
    """Give probabilities of products of queries and keys, and the same times softcap's derivative."""

    def shown(x: Array, other: float) -> Array:
        def masked(x: Array) -> Array:
            found = seen(about.asked, at.numbers, at.segments, at.first, (ROWS, x.shape[1]), at.axis)
            return jnp.where(found, x, jnp.full_like(x, other))

        return jax.lax.cond(at.whole, lambda x: x, masked, x)

    if about.softcap is None:
        p = shown(jnp.exp2(x * (about.scale * LOG2E) - spread(lse, x.shape, at.axis)), 0)
        return p, p
    root = jax.lax.rsqrt(1 + jnp.exp2(x * (2 * LOG2E * about.scale / about.softcap)))
    x = shown(1 - 2 * root * root, FAR)  # tanh, whose derivative is 1 - tanh^2
    p = jnp.exp2(x * (about.softcap * LOG2E) - spread(lse, x.shape, at.axis))
    return p, p * (1 - x * x)


def zero(begin: Any) -> Any:
    """Give 0, of the first of some tiles, read in a loop: addresses that it is added to are computed there, too.

    The compiler would compute all of them before the loop, and spill those of wide heads.
    """
    return jnp.minimum(begin, 0)


def registers(about: About, count: int, action: Any) -> None:
    """Take so many registers for each thread of a group of warps, or leave others."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    if not about.interpreted:
        gpu.set_max_registers(count, action=action)


def added(about: About, multiply: Callable, begun: list[Array], *shapes: tuple[int, int]) -> list[Array]:
    """Give what multiply(*sums, *others) makes of sums that were begun; `shapes` are those of others, which begin at 0."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    def scope(*accs: Any) -> list[Array]:
        sums = accs[: len(begun)]
        for acc, x in zip(sums, begun, strict=True):
            if not about.interpreted:  # the interpreter knows no sums that were begun elsewhere
                acc[...] = x
        multiply(*accs)
        found = [acc[...] for acc in sums]
        return [x + y for x, y in zip(begun, found, strict=True)] if about.interpreted else found

    return pl.run_scoped(
        scope, *[gpu.ACC(shape, jnp.float32) for shape in (*[(ROWS, x.shape[1]) for x in begun], *shapes)]
    )


def operand(about: About, x: Array, s: Any, *where: Any) -> Any:
    """Give the left side of a product: registers, or the memory that the interpreter asks for."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    if not about.interpreted:
        return x
    s.own_s.at[where][...] = x
    gpu.commit_smem()
    return s.own_s.at[where]


def spread(x: Array, shape: tuple[int, ...], axis: int) -> Array:
    """Repeat a number of each row (`axis` 0) or column."""
    return jax.lax.broadcast_in_dim(x, shape, [axis])


def nothing(width: int) -> Array:
    """Give zeros, as products have them."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    return gpu.layout_cast(jnp.zeros((ROWS, width), jnp.float32), gpu.Layout.WGMMA)
