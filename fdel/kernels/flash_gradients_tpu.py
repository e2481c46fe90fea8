"""The backward programs of attention on TPUs, for `flash_attention_tpu`.

One gives dq: a program has a tile of queries and walks tiles of keys; one gives dk and dv: a program has a tile of keys and
walks tiles of queries, of all query heads of its key head. What a program keeps are the rows of its products, so that sums
stay in place. Work is in two stages (`stages_tpu`): probabilities and gradients of scores of some rows, beside the products
of those before. Operands of products have the dtype of q, sums are float32.
"""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fdel.kernels import flash_walk_tpu as walks
from fdel.kernels import stages_tpu as stages
from fdel.kernels.flash_walk_tpu import LOG2E, Call, Walk, column, seen
from fdel.ops.paged import LANES

ROWS = 256  # of an item of the stages
COLUMNS = 256  # of a product, as wide as a v6e's multipliers
BLOCK = 64  # rows whose numbers stay in registers
LSE, DELTA = 0, 1  # in the statistics of a query


class Arrays(NamedTuple):
    """What the kernels read, filled up to whole tiles: `stats` are log-sum-exps, to the base 2, and deltas."""

    q: Float[Array, "B N T H"]
    k: Float[Array, "B K S H"]
    v: Float[Array, "B K S Hv"]
    dout: Float[Array, "B N T Hv"]
    stats: Float[Array, "B N 2 T"]
    numbers: Int[Array, "B 8 T"]
    segments: Int[Array, "B 1 S"]


class Item(NamedTuple):
    """Rows of what a program keeps, times all of a tile of the other side.

    `rows` and `columns` are the operands of scores, and of dout . v; after(which, rows, columns) gives statistics and
    found(rows, columns) who sees whom, or None: all.
    """

    at: slice
    rows: tuple[Any, Any]
    columns: tuple[Any, Any]
    after: Callable
    found: Callable | None


def _blocks(how: Call, a: Arrays) -> dict[str, tuple[Any, tuple, str]]:
    (queries, keys), n, (width, values) = how.tiles, how.heads, (a.k.shape[3], a.v.shape[3])
    blocks = {
        "q": ((None, n, queries, width), "row head q 0"), "k": ((None, None, keys, width), "row kv k 0"),
        "v": ((None, None, keys, values), "row kv k 0"), "dout": ((None, n, queries, values), "row head q 0"),
        "stats": ((None, n, 2, queries), "row head 0 q"), "numbers": ((None, 8, queries), "row 0 q"),
        "segments": ((None, 1, keys), "row 0 k"),
    }  # fmt: skip
    return {name: (getattr(a, name), *block) for name, block in blocks.items()}


def _rows(tokens: int) -> int:
    return ROWS if tokens % ROWS == 0 else LANES


def of_queries(how: Call, walk: Walk, a: Arrays) -> Float[Array, "B N T H"]:
    """Give dq."""
    from jax.experimental.pallas import tpu as pltpu

    (queries, keys), n, blocks = how.tiles, how.heads, _blocks(how, a)
    single = lambda width: pltpu.VMEM((n, queries, width), jnp.float32)
    out = {"out": (jax.ShapeDtypeStruct(a.q.shape, a.q.dtype), *blocks["q"][1:])}
    memory = {
        "sums": single(a.q.shape[3]), "after": single(LANES), "columns": pltpu.VMEM((queries, LANES), jnp.int32),
        "scores": pltpu.VMEM((2, _rows(queries), keys), a.q.dtype),
    }  # fmt: skip
    program = functools.partial(_queries, how=how)
    return walks.run(program, how, walk, a.q.shape[1], blocks, out, memory, "flash_backward_queries")[0]


def of_keys(how: Call, walk: Walk, a: Arrays) -> list[Array]:
    """Give dk [B K S H] and dv [B K S Hv]."""
    from jax.experimental.pallas import tpu as pltpu

    (queries, keys), blocks = how.tiles, _blocks(how, a)
    result = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    single = lambda x: pltpu.VMEM((keys, x.shape[3]), jnp.float32)
    out = {"dk": (result(a.k), *blocks["k"][1:]), "dv": (result(a.v), *blocks["v"][1:])}
    half = pltpu.VMEM((2, _rows(keys), queries), a.q.dtype)
    memory = {
        "keys": single(a.k), "values": single(a.v), "columns": pltpu.VMEM((keys, LANES), jnp.int32), "scores": half,
        "probs": half,
    }  # fmt: skip
    program = functools.partial(_keys, how=how, tiles=walk.tiles)
    return walks.run(program, how, walk, a.q.shape[1], blocks, out, memory, "flash_backward_keys")


def _queries(refs: dict[str, Any], *, how: Call) -> None:
    """Add what one tile of keys gives to dq of a tile of queries."""
    from jax.experimental import pallas as pl

    r, i, (queries, keys) = SimpleNamespace(**refs), pl.program_id(1), how.tiles
    first, last, whole = walks.flagged(r.partner, i)

    @pl.when(first)
    def _() -> None:
        r.sums[...] = jnp.zeros_like(r.sums)
        r.columns[...] = column(r.numbers[...])
        for g in range(how.heads):
            r.after[g] = column(r.stats[g])

    def found(rows: slice, columns: slice) -> Array:
        index = jax.lax.broadcasted_iota(jnp.int32, (1, columns.stop - columns.start), 1)
        index += walks.tile(r.partner, i) * keys + columns.start
        return seen(how.asked, lambda which: r.columns[rows, which : which + 1], r.segments[:, columns], index)

    size = _rows(queries)
    items = [(g, slice(at, at + size)) for g in range(how.heads) for at in range(0, queries, size)]

    def scores(masked: bool, n: int, to: int) -> None:
        g, rows = items[n]
        after = lambda which, some, _: r.after[g, some, which : which + 1]
        item = Item(rows, (r.q.at[g], r.dout.at[g]), (r.k, r.v), after, found if masked else None)
        _scores(how, item, keys, None, r.scores.at[to])

    def products(n: int, to: int) -> None:
        g, rows = items[n]
        r.sums[g, rows] += jnp.dot(r.scores[to], r.k[...], preferred_element_type=jnp.float32)

    _walk(len(items), whole, scores, products)

    @pl.when(last)
    def _() -> None:
        r.out[...] = (r.sums[...] * how.scale).astype(r.out.dtype)


def _keys(refs: dict[str, Any], *, how: Call, tiles: int) -> None:
    """Add what one tile of queries, of some query heads, gives to dk and dv of a tile of keys."""
    from jax.experimental import pallas as pl

    r, i, p, (queries, keys) = SimpleNamespace(**refs), pl.program_id(1), pl.program_id(2), how.tiles
    first, last, whole = walks.flagged(r.partner, i)

    @pl.when(first & (p == 0))
    def _() -> None:
        r.keys[...], r.values[...] = jnp.zeros_like(r.keys), jnp.zeros_like(r.values)
        r.columns[...] = column(r.segments[...])

    def found(rows: slice, columns: slice) -> Array:
        index = jax.lax.broadcasted_iota(jnp.int32, (rows.stop - rows.start, 1), 0)
        index += r.owner[i] % tiles * keys + rows.start
        return seen(how.asked, lambda which: r.numbers[which : which + 1, columns], r.columns[rows, :1], index)

    size = _rows(keys)
    items = [(g, slice(at, at + size)) for g in range(how.heads) for at in range(0, keys, size)]

    def scores(masked: bool, n: int, to: int) -> None:
        g, rows = items[n]
        after = lambda which, _, some: r.stats[g, which : which + 1, some]
        item = Item(rows, (r.k, r.v), (r.q.at[g], r.dout.at[g]), after, found if masked else None)
        _scores(how, item, queries, r.probs.at[to], r.scores.at[to])

    def products(n: int, to: int) -> None:
        g, rows = items[n]
        r.keys[rows] += jnp.dot(r.scores[to], r.q[g], preferred_element_type=jnp.float32)
        r.values[rows] += jnp.dot(r.probs[to], r.dout[g], preferred_element_type=jnp.float32)

    _walk(len(items), whole, scores, products)

    @pl.when(last & (p == how.parts - 1))
    def _() -> None:
        r.dk[...] = (r.keys[...] * how.scale).astype(r.dk.dtype)
        r.dv[...] = r.values[...].astype(r.dv.dtype)


def _walk(items: int, whole: Any, scores: Callable, products: Callable) -> None:
    """Take all items through both stages, without a mask where the tiles see each other wholly."""
    from jax.experimental import pallas as pl

    run = lambda masked: stages.run(items, (functools.partial(scores, masked), products), items + 1)
    pl.when(whole)(lambda: run(False))
    pl.when(~whole)(lambda: run(True))


def _scores(how: Call, item: Item, many: int, probs: Any, to: Any) -> None:
    """Write the gradients of scores of an item with `many` columns, and the probabilities where they are wanted."""
    wide = COLUMNS if many % COLUMNS == 0 else LANES
    contract = (((1,), (1,)), ((), ()))
    product = lambda a, b: jax.lax.dot_general(a, b, contract, preferred_element_type=jnp.float32)
    for at in range(0, many, wide):
        columns = slice(at, at + wide)
        x, dp = (product(a[item.at], b[columns]) for a, b in zip(item.rows, item.columns, strict=True))
        for low in range(0, x.shape[0], BLOCK):
            some, rows = slice(low, low + BLOCK), slice(item.at.start + low, item.at.start + low + BLOCK)
            y = x[some] * how.factor
            if how.softcap is not None:
                y = jnp.tanh(y)
                slope, y = 1 - y * y, y * (how.softcap * LOG2E)
            p = jnp.exp2(y - item.after(LSE, rows, columns))
            p = p if item.found is None else jnp.where(item.found(rows, columns), p, 0)
            ds = p * (dp[some] - item.after(DELTA, rows, columns))
            to[some, columns] = (ds if how.softcap is None else ds * slope).astype(to.dtype)
            if probs is not None:
                probs[some, columns] = p.astype(probs.dtype)
