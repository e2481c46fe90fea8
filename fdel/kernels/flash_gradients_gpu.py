"""The programs of `flash_backward_gpu`, which says what they compute."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from fdel.kernels.flash_tiles_gpu import ALL, NUMBERS, Tests, Tiles, seen

ROWS = 64  # of one product of a group of warps
HANDS = 2  # tiles of probabilities on their way from one group to the other
COPYING, MULTIPLYING = 24, 240  # registers of a thread, of 168 each
LOG2E = math.log2(math.e)


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


def of_keys(*refs: Any, about: About, **memory: Any) -> None:
    """Give dk and dv of a tile of keys; `refs` are the arguments and results of the kernel."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    q, k, v, dout, lse, delta, numbers, segments, bounds, dk, dv = refs
    tile, row, head, mine = (jax.lax.axis_index(name) for name in ("tile", "row", "head", "warps"))
    s, size = SimpleNamespace(**memory), about.tiles
    begin, end = bounds[row, tile, 0], bounds[row, tile, 3]
    count, depth = (end - begin) * about.group, s.q_s.shape[0]
    mine_of = lambda width: pl.ds(head * width, width)

    def fetch(i: Any, _: None) -> None:
        slot, n = jax.lax.rem(i, jnp.int32(depth)), head * about.group + jax.lax.rem(i, jnp.int32(about.group))
        tokens = pl.ds((begin + jax.lax.div(i, jnp.int32(about.group))) * size.queries, size.queries)
        pl.when(i >= depth)(lambda: gpu.barrier_wait(s.free.at[slot]))
        given = (
            (q.at[row, tokens, pl.ds(n * about.width, about.width)], s.q_s),
            (dout.at[row, tokens, pl.ds(n * about.values, about.values)], s.dout_s),
            (lse.at[row, n, tokens], s.lse_s), (delta.at[row, n, tokens], s.delta_s),
            (numbers.at[row, pl.ds(0, NUMBERS), tokens], s.numbers_s),
        )  # fmt: skip
        for ref, to in given:
            gpu.copy_gmem_to_smem(ref, to.at[slot], s.full.at[slot])

    @pl.when(mine == 2)
    def copy() -> None:
        _registers(about, COPYING, "decrease")
        for part in range(size.keys // ROWS):
            here = pl.ds(tile * size.keys + part * ROWS, ROWS)
            gpu.copy_gmem_to_smem(k.at[row, here, mine_of(about.width)], s.k_s.at[part], s.shared.at[0])
            gpu.copy_gmem_to_smem(v.at[row, here, mine_of(about.values)], s.v_s.at[part], s.shared.at[0])
            gpu.copy_gmem_to_smem(segments.at[row, here], s.segments_s.at[part], s.shared.at[0])
        jax.lax.fori_loop(0, count, fetch, None)

    def sums(operand: Callable, operands: tuple[Any, Any, Any], to: Any, factor: float) -> None:
        """Walk the tiles of queries: to sums of each 64 keys add operand(i, slot, part, left right^T) times other.

        All products with the right side begin before the first is waited for; while an operand is computed others go on.
        """
        _registers(about, MULTIPLYING, "increase")
        left, right, other = operands
        width, parts = other.shape[2], size.keys // ROWS

        def each(i: Any, found: list[Array]) -> list[Array]:
            slot, zero = jax.lax.rem(i, jnp.int32(depth)), _zero(bounds[row, tile, 0])

            def multiply(*accs: Any) -> None:
                for part, x in enumerate(accs[parts:]):
                    gpu.wgmma(x, left.at[part + zero], right.at[slot].transpose((1, 0)))
                for part, (acc, x) in enumerate(zip(accs[:parts], accs[parts:], strict=True)):
                    a = operand(i, slot, part, gpu.wgmma_accumulator_load(x, wait_n=parts - 1))
                    gpu.wgmma(acc, a, other.at[slot])

            gpu.barrier_wait(s.full.at[slot])
            found = _added(about, multiply, found, *[(ROWS, size.queries)] * parts)
            gpu.barrier_arrive(s.free.at[slot])
            return found

        gpu.barrier_wait(s.shared.at[0])
        for part, x in enumerate(jax.lax.fori_loop(0, count, each, [_nothing(width)] * parts)):
            rows = pl.ds(tile * size.keys + part * ROWS, ROWS)
            to.at[row, rows, mine_of(width)][...] = (x * factor).astype(to.dtype)

    hand = lambda i, part: jax.lax.rem(i, jnp.int32(HANDS)) * (size.keys // ROWS) + part

    def scores(i: Any, slot: Any, part: int, x: Array) -> Any:
        """Give probabilities of 64 keys, and hand on what their gradients are multiplied with."""
        j, to = begin + jax.lax.div(i, jnp.int32(about.group)), hand(i, part)
        whole = (bounds[row, tile, 1] <= j) & (j < bounds[row, tile, 2])
        first = tile * size.keys + part * ROWS
        at = Tile(s.numbers_s.at[slot], s.segments_s.at[part], first, 1, whole)
        p, weight = _probabilities(about, x, _columns(s.lse_s.at[slot]), at)
        pl.when(i >= HANDS)(lambda: gpu.barrier_wait(s.taken.at[to]))
        s.hand_s.at[to][...] = weight.astype(q.dtype)
        gpu.barrier_arrive(s.given.at[to])
        return _operand(about, p.astype(q.dtype), s, 0, part)

    def weights(i: Any, slot: Any, part: int, x: Array) -> Any:
        """Give gradients of scores of 64 keys, from those of probabilities."""
        of = hand(i, part)
        x -= _spread(_columns(s.delta_s.at[slot]), x.shape, 1)
        gpu.barrier_wait(s.given.at[of])
        x *= gpu.load(s.hand_s.at[of], *ALL, layout=gpu.Layout.WGMMA).astype(jnp.float32)
        gpu.barrier_arrive(s.taken.at[of])
        return _operand(about, x.astype(q.dtype), s, 1, part)

    pl.when(mine == 0)(lambda: sums(scores, (s.k_s, s.q_s, s.dout_s), dv, 1.0))
    pl.when(mine == 1)(lambda: sums(weights, (s.v_s, s.dout_s, s.q_s), dk, about.scale))


def of_queries(*refs: Any, about: About, **memory: Any) -> None:
    """Give dq of a tile of queries of a head; `refs` are the arguments and the result of the kernel."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    q, k, v, dout, lse, delta, numbers, segments, bounds, dq = refs
    at, row, n, mine = (jax.lax.axis_index(name) for name in ("tile", "row", "head", "warps"))
    s, size, tile = SimpleNamespace(**memory), about.tiles, bounds.shape[1] - 1 - at  # the last tiles see most
    begin, end = bounds[row, tile, 0], bounds[row, tile, 3]
    head, slot_of = jax.lax.div(n, jnp.int32(about.group)), lambda i, ref: jax.lax.rem(i, jnp.int32(ref.shape[0]))
    rows_of = lambda group: pl.ds(tile * size.queries + group * ROWS, ROWS)
    of_query, of_dout = pl.ds(n * about.width, about.width), pl.ds(n * about.values, about.values)

    def fetch(i: Any, _: None) -> None:
        some, of_k, of_v = pl.ds((begin + i) * size.keys, size.keys), slot_of(i, s.k_s), slot_of(i, s.v_s)
        pl.when(i >= s.k_s.shape[0])(lambda: gpu.barrier_wait(s.k_free.at[of_k]))
        keys = k.at[row, some, pl.ds(head * about.width, about.width)]
        gpu.copy_gmem_to_smem(keys, s.k_s.at[of_k], s.k_full.at[of_k])
        gpu.copy_gmem_to_smem(segments.at[row, some], s.segments_s.at[of_k], s.k_full.at[of_k])
        pl.when(i >= s.v_s.shape[0])(lambda: gpu.barrier_wait(s.v_free.at[of_v]))
        values = v.at[row, some, pl.ds(head * about.values, about.values)]
        gpu.copy_gmem_to_smem(values, s.v_s.at[of_v], s.v_full.at[of_v])

    @pl.when(mine == 2)
    def copy() -> None:
        _registers(about, COPYING, "decrease")
        for group in range(2):
            rows = rows_of(group)
            for ref, to in ((q.at[row, rows, of_query], s.q_s), (dout.at[row, rows, of_dout], s.dout_s)):
                gpu.copy_gmem_to_smem(ref, to.at[group], s.shared.at[group])
        jax.lax.fori_loop(0, end - begin, fetch, None)

    @pl.when(mine < 2)
    def multiply() -> None:
        _registers(about, MULTIPLYING, "increase")
        of_rows = lambda ref: gpu.load(
            ref.at[row, n, rows_of(mine)], *ALL, layout=gpu.Layout.WGMMA.reduce(1), optimized=False
        )
        top, less, here = of_rows(lse), of_rows(delta), numbers.at[row, pl.ds(0, NUMBERS), rows_of(mine)]
        whole_from, whole_to = bounds[row, tile, 1], bounds[row, tile, 2]

        def step(i: Any, sums: Array) -> Array:
            of_k, of_v, j = slot_of(i, s.k_s), slot_of(i, s.v_s), begin + i
            zero = _zero(bounds[row, tile, 0])
            gpu.barrier_wait(s.k_full.at[of_k])
            gpu.barrier_wait(s.v_full.at[of_v])

            def multiply(acc: Any, x: Any, dp: Any) -> None:
                gpu.wgmma(x, s.q_s.at[mine + zero], s.k_s.at[of_k].transpose((1, 0)))
                gpu.wgmma(dp, s.dout_s.at[mine + zero], s.v_s.at[of_v + zero].transpose((1, 0)))
                at = Tile(here, s.segments_s.at[of_k], j * size.keys, 0, (whole_from <= j) & (j < whole_to))
                _, weight = _probabilities(about, gpu.wgmma_accumulator_load(x, wait_n=1), top, at)
                ds = weight * (dp[...] - _spread(less, weight.shape, 0))
                gpu.barrier_arrive(s.v_free.at[of_v])
                gpu.wgmma(acc, _operand(about, ds.astype(q.dtype), s, mine), s.k_s.at[of_k])

            (sums,) = _added(about, multiply, [sums], *[(ROWS, size.keys)] * 2)
            gpu.barrier_arrive(s.k_free.at[of_k])
            return sums

        gpu.barrier_wait(s.shared.at[mine])
        sums = jax.lax.fori_loop(0, end - begin, step, _nothing(about.width))
        dq.at[row, rows_of(mine), of_query][...] = (sums * about.scale).astype(dq.dtype)


def _probabilities(about: About, x: Array, lse: Array, at: Tile) -> tuple[Array, Array]:
    """Give probabilities of products of queries and keys, and the same times softcap's derivative."""
    slope = None
    if about.softcap is None:
        x = x * (about.scale * LOG2E)
    else:
        root = jax.lax.rsqrt(1 + jnp.exp2(x * (2 * LOG2E * about.scale / about.softcap)))
        part = root * root  # tanh is 1 - 2 part, its derivative 4 part (1 - part)
        x, slope = (1 - 2 * part) * (about.softcap * LOG2E), 4 * part * (1 - part)
    p = jnp.exp2(x - _spread(lse, x.shape, at.axis))

    def masked(p: Array) -> Array:
        found = seen(about.asked, at.numbers, at.segments, at.first, (ROWS, p.shape[1]), at.axis)
        return jnp.where(found, p, jnp.zeros_like(p))

    if at.axis == 0:
        p = p if slope is None else p * slope
        p = jax.lax.cond(at.whole, lambda p: p, masked, p)
        return p, p
    p = jax.lax.cond(at.whole, lambda p: p, masked, p)
    return p, p if slope is None else p * slope


def _zero(begin: Any) -> Any:
    """Give 0, of the first of some tiles, read in a loop: addresses that it is added to are computed there, too.

    The compiler would compute all of them before the loop, and spill those of wide heads.
    """
    return jnp.minimum(begin, 0)


def _registers(about: About, count: int, action: Any) -> None:
    from jax.experimental.pallas import mosaic_gpu as gpu

    if not about.interpreted:
        gpu.set_max_registers(count, action=action)


def _added(about: About, multiply: Callable, begun: list[Array], *shapes: tuple[int, int]) -> list[Array]:
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

    return pl.run_scoped(scope, *[gpu.ACC(shape, jnp.float32) for shape in (*[(ROWS, x.shape[1]) for x in begun], *shapes)])


def _operand(about: About, x: Array, s: Any, *where: Any) -> Any:
    """Give the left side of a product: registers, or the memory that the interpreter asks for."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    if not about.interpreted:
        return x
    s.own_s.at[where][...] = x
    gpu.commit_smem()
    return s.own_s.at[where]


def _columns(ref: Any) -> Float[Array, " n"]:
    """Load a number for each column of a product."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    return gpu.load(ref, *ALL, layout=gpu.Layout.WGMMA.reduce(0))


def _spread(x: Array, shape: tuple[int, ...], axis: int) -> Array:
    """Repeat a number of each row (`axis` 0) or column."""
    return jax.lax.broadcast_in_dim(x, shape, [axis])


def _nothing(width: int) -> Array:
    """Give zeros, as products have them."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    return gpu.layout_cast(jnp.zeros((ROWS, width), jnp.float32), gpu.Layout.WGMMA)
