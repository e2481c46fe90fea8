"""The program of `flash_attention_gpu`: attention from 128 queries of a head to the keys that any of them may see.

Algorithm: online softmax (arXiv 1805.02867) in the tiles of FlashAttention (arXiv 2205.14135). As in FlashAttention-3
(arXiv 2407.08608) one group of warps copies tiles of keys and values, `DEPTH` of them on their way, and two have 64 queries
each; these multiply queries with the keys of a tile and the probabilities of the tile before with its values, take turns
at that, and compute exponentials while values are still multiplied. Sums stay in registers in float32, and probabilities
too.

Bytes read: keys and values of a key head once for each 128 queries of each of its heads, most of them from the second-level
cache, since programs of heads that share keys stand beside each other. FLOPs: 2 * 128 * tile * (keys' + values' channels)
of a tile, and 128 * tile exponentials, two and a square root for each with a softcap.
"""

import functools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fdel.kernels import transfer_gpu
from fdel.kernels.flash_tiles import BOUNDS, END, FIRST, NUMBERS, WHOLE_FROM, WHOLE_TO, Tests, Tiles
from fdel.kernels.flash_tiles_gpu import seen
from fdel.ops.mask import NEG

ROWS, WALKERS, DEPTH = 64, 2, 2  # queries of a group of warps, such groups, tiles on their way
SEGMENTS = 2 * DEPTH  # tiles of keys whose segments are held: they are read when the keys' place is free already
COPYING, MULTIPLYING = 40, 232  # registers of a thread, of 168 each
LOG2E = math.log2(math.e)


class Call(NamedTuple):
    """What is static. `interpreted`: no operand stays in registers, and no sum was begun elsewhere."""

    scale: float
    softcap: float | None
    asked: Tests
    tiles: Tiles
    interpreted: bool = False


def run(
    how: Call, q: Float[Array, "B T N H"], k: Float[Array, "B S K H"], v: Float[Array, "B S K Hv"],
    numbers: Int[Array, "B 4 T"], k_segments: Int[Array, "B S"], spans: Int[Array, "B tiles 4"],
    sinks: Float[Array, " N"] | None,
) -> tuple[Array, Array]:  # fmt: skip
    """Attend in whole tiles: (output [B T N Hv], log-sum-exps [B N T] in float32). Every span has a tile at least.

    `numbers` and `k_segments` are those of `flash_tiles.sight`, `spans` of its `ranges`.
    """
    from jax.experimental.pallas import mosaic_gpu as gpu

    (rows, length, heads, width), values, (queries, keys) = q.shape, v.shape[3], how.tiles
    tiled = (gpu.TilingTransform((8, 64)), gpu.SwizzleTransform(128))
    half: Any = functools.partial(gpu.SMEM, dtype=q.dtype, transforms=tiled)
    ring: Any = functools.partial(gpu.Barrier, num_barriers=DEPTH)
    scratch: dict[str, Any] = {
        "q_s": half((queries, width)), "k_s": half((DEPTH, keys, width)), "v_s": half((DEPTH, keys, values)),
        "numbers_s": gpu.SMEM((NUMBERS, queries), jnp.int32), "segments_s": gpu.SMEM((SEGMENTS, keys), jnp.int32),
        "q_bar": gpu.Barrier(num_arrivals=2), "k_full": ring(num_arrivals=2), "v_full": ring(),
        "k_free": ring(num_arrivals=WALKERS), "v_free": ring(num_arrivals=WALKERS),
        "turn": gpu.Barrier(num_barriers=WALKERS),
    }  # fmt: skip
    if how.interpreted:
        scratch["p_s"] = half((queries, keys))
    call = gpu.kernel(
        functools.partial(_program, how=how),
        kernel_name="flash_forward",
        out_type=(
            jax.ShapeDtypeStruct((rows, length, heads, values), q.dtype),
            jax.ShapeDtypeStruct((rows, heads, length), jnp.float32),
        ),
        scratch_types=scratch,
        grid=(length // queries, rows, heads),
        grid_names=("tile", "row", "head"),
        num_threads=WALKERS + 1,
        thread_name="warps",
        compiler_params=gpu.CompilerParams(lowering_semantics=gpu.LoweringSemantics.Lane, approx_math=True),
    )
    return call(q, k, v, numbers, k_segments, spans, *([] if sinks is None else [sinks]))


def _program(*refs: Any, how: Call, **memory: Any) -> None:
    """Attend from one tile of queries; `refs` are the arguments and results of `run`'s kernel."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    q, k, v, numbers, segments, spans, *sinks, out, lse = refs
    at, row, head, mine = (jax.lax.axis_index(name) for name in ("tile", "row", "head", "warps"))
    s, (queries, keys) = SimpleNamespace(**memory), how.tiles
    tile = spans.shape[1] - 1 - at  # the last queries see most: they come first
    span, first = [spans[row, tile, i] for i in range(BOUNDS)], tile * queries
    shared = jax.lax.div(head, jnp.int32(q.shape[2] // k.shape[2]))

    def registers(count: int, action: Any) -> None:
        if not how.interpreted:
            gpu.set_max_registers(count, action=action)

    def fetch(j: Any, _: None) -> None:
        some, at = pl.ds(j * keys, keys), j - span[FIRST]
        slot, label = (jax.lax.rem(at, jnp.int32(n)) for n in (DEPTH, SEGMENTS))
        pl.when(at >= DEPTH)(lambda: gpu.barrier_wait(s.k_free.at[slot]))
        gpu.copy_gmem_to_smem(k.at[row, some, shared], s.k_s.at[slot], s.k_full.at[slot])
        gpu.copy_gmem_to_smem(segments.at[row, some], s.segments_s.at[label], s.k_full.at[slot])
        pl.when(at >= DEPTH)(lambda: gpu.barrier_wait(s.v_free.at[slot]))
        gpu.copy_gmem_to_smem(v.at[row, some, shared], s.v_s.at[slot], s.v_full.at[slot])

    @pl.when(mine == WALKERS)
    def copy() -> None:
        registers(COPYING, "decrease")
        rows = pl.ds(first, queries)
        gpu.copy_gmem_to_smem(q.at[row, rows, head], s.q_s, s.q_bar)
        gpu.copy_gmem_to_smem(numbers.at[row, :, rows], s.numbers_s, s.q_bar)
        jax.lax.fori_loop(span[FIRST], span[END], fetch, None)

    @pl.when(mine < WALKERS)
    def attend() -> None:
        registers(MULTIPLYING, "increase")
        o, sums = _walk(s, how, mine, span, sinks[0][head] if sinks else None)
        own, rows = pl.ds(mine * ROWS, ROWS), pl.ds(first + mine * ROWS, ROWS)
        lse.at[row, head, rows][...] = sums
        to = out.at[row, rows, head]
        if o.shape[1] != s.q_s.shape[1]:  # a part of the queries' channels is no place that can be copied from
            transfer_gpu.store(to, o.astype(out.dtype))
            return
        s.q_s.at[own][...] = o.astype(out.dtype)  # all products with these queries are done
        gpu.commit_smem()
        gpu.copy_smem_to_gmem(s.q_s.at[own], to)
        gpu.wait_smem_to_gmem(0)


def _walk(s: Any, how: Call, mine: Any, span: list[Any], sink: Any) -> tuple[Array, Array]:
    """Attend from 64 queries to the tiles of a span: their output and log-sum-exps."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    own, row, width = pl.ds(mine * ROWS, ROWS), gpu.Layout.WGMMA.reduce(1), s.v_s.shape[2]
    slot = lambda j: jax.lax.rem(j - span[FIRST], jnp.int32(DEPTH))
    pl.when(mine == 1)(lambda: gpu.barrier_arrive(s.turn.at[0]))  # the first group multiplies first

    def weigh(x: Array, j: Any, top: Array, total: Array) -> tuple[Array, ...]:
        """Give what follows from products of tile j: maximum, sum, what sums fade by, and probabilities in float32."""
        new, decay, p = _softmax(how, _hidden(s, how, span, own, j, _capped(how, x)), top)
        return new, total * decay + p.sum(axis=1), decay, p

    def step(j: Any, carry: tuple) -> tuple:
        *before, p, o = carry
        gpu.barrier_wait(s.k_full.at[slot(j)])
        gpu.barrier_wait(s.turn.at[mine])
        hand_over = lambda: gpu.barrier_arrive(s.turn.at[1 - mine])

        def meanwhile(x: Array) -> tuple[Array, ...]:
            """The compiler moves no wait for products in front of the wait for a barrier, a loop: hence it stands last."""
            found = jax.lax.optimization_barrier(weigh(x, j, *before))
            gpu.barrier_wait(s.v_full.at[slot(j)])
            return found

        slots = slot(j), slot(j - 1)
        top, total, decay, p, o = _products(s, how, own, slots, p, o, meanwhile, hand_over)
        return top, total, p.astype(s.v_s.dtype), o * _across(decay, width)

    whole = lambda shape, value, layout: gpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)
    top = whole((ROWS,), NEG if sink is None else sink * LOG2E, row)
    total = whole((ROWS,), 0.0 if sink is None else 1.0, row)
    gpu.barrier_wait(s.q_bar)
    gpu.barrier_wait(s.k_full.at[0])
    x = _scores(s, how, own, jnp.int32(0))
    gpu.barrier_arrive(s.k_free.at[0])
    top, total, _, p = weigh(x, span[FIRST], top, total)
    gpu.barrier_wait(s.v_full.at[0])
    carry = top, total, p.astype(s.v_s.dtype), whole((ROWS, width), 0, gpu.Layout.WGMMA)
    top, total, p, o = jax.lax.fori_loop(span[FIRST] + 1, span[END], step, carry)
    o = _values(s, how, own, slot(span[END] - 1), p, o)
    total = jnp.maximum(total, 1e-30)  # of a query that sees nothing: 0
    lse = jnp.where(top <= NEG / 2, NEG, (top + jnp.log2(total)) * (1 / LOG2E))
    return o * _across(1 / total, width), lse


def _products(
    s: Any, how: Call, own: Any, slots: tuple[Any, Any], p: Array, o: Array, meanwhile: Callable, hand_over: Callable
) -> tuple[Array, ...]:
    """Multiply queries with keys and, meanwhile, probabilities of the tile before with its values.

    Returns what `meanwhile` makes of the scores while values are still multiplied, and the sums. The slots are free then.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    keys, values = slots
    if how.interpreted:
        x, o = _scores(s, how, own, keys), _values(s, how, own, values, p, o)
        hand_over()
        gpu.barrier_arrive(s.k_free.at[keys])
        gpu.barrier_arrive(s.v_free.at[values])
        return *meanwhile(x), o

    def both(scores: Any, sums: Any) -> tuple[Array, ...]:
        sums[...] = o
        gpu.wgmma(scores, s.q_s.at[own], s.k_s.at[keys].transpose((1, 0)))
        gpu.wgmma(sums, p, s.v_s.at[values])
        hand_over()
        x = gpu.wgmma_accumulator_load(scores, wait_n=1)
        gpu.barrier_arrive(s.k_free.at[keys])
        found = meanwhile(x)
        done = sums[...]
        gpu.barrier_arrive(s.v_free.at[values])
        return *found, done

    return pl.run_scoped(both, *(gpu.ACC((ROWS, n), jnp.float32) for n in (how.tiles.keys, o.shape[1])))


def _scores(s: Any, how: Call, own: Any, keys: Any) -> Float[Array, "64 keys"]:
    """Multiply queries with the keys of a slot."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    def product(acc: Any) -> Array:
        gpu.wgmma(acc, s.q_s.at[own], s.k_s.at[keys].transpose((1, 0)))
        return acc[...]

    return pl.run_scoped(product, gpu.ACC((ROWS, how.tiles.keys), jnp.float32))


def _values(s: Any, how: Call, own: Any, values: Any, p: Array, o: Array) -> Float[Array, "64 Hv"]:
    """Add probabilities times the values of a slot to sums."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    if how.interpreted:
        s.p_s.at[own][...] = p
        gpu.commit_smem()

    def product(acc: Any) -> Any:
        gpu.wgmma(acc, s.p_s.at[own] if how.interpreted else p, s.v_s.at[values])
        return acc[...] if how.interpreted else None

    if how.interpreted:
        return o + pl.run_scoped(product, gpu.ACC((ROWS, o.shape[1]), jnp.float32))
    return pl.run_state(product)(gpu.ACC.init(o))


def _capped(how: Call, x: Array) -> Array:
    """Give scores of base 2 with a softcap, as c - 2 c / (1 + exp(2 s / c)), right to 1e-6 of c; without, x as it is."""
    if how.softcap is None:
        return x
    cap = how.softcap * LOG2E
    root = jax.lax.rsqrt(
        1 + jnp.exp2(x * (2 * LOG2E * how.scale / how.softcap))
    )  # squared: one instruction less to divide
    return cap - (2 * cap) * (root * root)


def _hidden(s: Any, how: Call, span: list[Any], own: Any, j: Any, x: Array) -> Array:
    """Hide what queries do not see of tile j."""
    keys = how.tiles.keys
    slot = jax.lax.rem(j - span[FIRST], jnp.int32(SEGMENTS))

    def masked() -> Array:
        found = seen(how.asked, s.numbers_s.at[:, own], s.segments_s.at[slot], j * keys, (ROWS, keys))
        return jnp.where(found, x, -jnp.inf)

    return jax.lax.cond((j >= span[WHOLE_FROM]) & (j < span[WHOLE_TO]), lambda: x, masked)


def _softmax(how: Call, x: Array, top: Array) -> tuple[Array, Array, Array]:
    """Give the new maximum of rows, of base 2, what sums fade by, and probabilities. A maximum is `NEG` at least."""
    scale = how.scale * LOG2E if how.softcap is None else 1.0
    new = jnp.maximum(top, x.max(axis=1) * scale)
    return new, jnp.exp2(top - new), jnp.exp2(x * scale - _across(new, x.shape[1]))


def _across(x: Array, n: int) -> Array:
    """Repeat a number of each row in n columns."""
    return jax.lax.broadcast_in_dim(x, (ROWS, n), [0])
