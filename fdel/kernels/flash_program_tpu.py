"""The forward program of attention on TPUs, for `flash_attention_tpu`.

A program has a tile of queries, of some query heads that share a key head, and walks pairs of tiles: while one tile of keys
and values is attended to, Pallas copies the next one. Inside, work is in the stages of `paged_prompt_tpu`. Bytes: keys and
values once for each tile of queries that meets them.
"""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fdel.kernels import flash_walk_tpu as walks
from fdel.kernels import paged_prompt_tpu as prompt
from fdel.kernels.flash_walk_tpu import LOG2E, Call, Walk, column, seen
from fdel.ops.mask import NEG, Mask
from fdel.ops.paged import LANES

ROWS, ITEMS = (512, 256, LANES), 4  # of an item of the stages: the most that leaves so many items, else the least


def rows(how: Call) -> int:
    """Choose the rows of an item."""
    few = lambda n: how.tiles.queries % n or how.heads * how.tiles.queries // n < ITEMS
    return next(n for n in ROWS if n == LANES or not few(n))


def run(
    how: Call, walk: Walk, q: Float[Array, "B N T H"], k: Float[Array, "B K S H"], v: Float[Array, "B K S Hv"],
    numbers: Int[Array, "B 8 T"], segments: Int[Array, "B 1 S"], start: Float[Array, "N 1 128"],
) -> list[Array]:  # fmt: skip
    """Attend in whole tiles: output [B N T Hv], log-sum-exps [B N 1 T]. `start`: sinks times log2(e), or `NEG`."""
    from jax.experimental.pallas import tpu as pltpu

    (queries, keys), n, values, part = how.tiles, how.heads, v.shape[3], rows(how)
    result = lambda dtype, *shape: jax.ShapeDtypeStruct((*q.shape[:2], *shape), dtype)
    single = lambda width: pltpu.VMEM((n, queries, width), jnp.float32)
    return walks.run(
        functools.partial(_program, how=how, part=part), how, walk, q.shape[1],
        {
            "q": (q, (None, n, queries, q.shape[3]), "row head q 0"),
            "k": (k, (None, None, keys, k.shape[3]), "row kv k 0"),
            "v": (v, (None, None, keys, values), "row kv k 0"), "numbers": (numbers, (None, 8, queries), "row 0 q"),
            "segments": (segments, (None, 1, keys), "row 0 k"), "start": (start, (n, 1, LANES), "head 0 0"),
        },
        {
            "out": (result(q.dtype, q.shape[2], values), (None, n, queries, values), "row head q 0"),
            "lse": (result(jnp.float32, 1, q.shape[2]), (None, n, 1, queries), "row head 0 q"),
        },
        {
            "top": single(LANES), "total": single(LANES), "sums": single(values),
            "columns": pltpu.VMEM((queries, LANES), jnp.int32),
            **dict(zip(prompt.NAMES.split(), prompt.memory(part, keys, q.dtype), strict=True)),
        },
        "flash_attention",
    )  # fmt: skip


def _program(refs: dict[str, Any], *, how: Call, part: int) -> None:
    """Attend from a tile of queries to one of keys."""
    from jax.experimental import pallas as pl

    r, i, keys = SimpleNamespace(**refs), pl.program_id(1), how.tiles.keys
    first, last, whole = walks.flagged(r.partner, i)

    @pl.when(first)
    def _() -> None:
        r.top[...] = jnp.broadcast_to(r.start[...], r.top.shape)
        r.total[...] = jnp.full_like(r.total, 1 / LANES)  # of a sink; without one it fades as soon as there is a key
        r.sums[...] = jnp.zeros_like(r.sums)
        r.columns[...] = column(r.numbers[...])

    def found(row: Any, shape: tuple[int, ...], key: int) -> Array:
        of = lambda which: r.columns[pl.ds(row, shape[0]), which : which + 1]
        index = jax.lax.broadcasted_iota(jnp.int32, (1, shape[1]), 1) + (walks.tile(r.partner, i) * keys + key)
        return seen(how.asked, of, r.segments[:, key : key + shape[1]], index)

    read = prompt.Read(lambda _: r.k, lambda _: r.v[...], lambda _: how.factor, lambda _: None)
    what = prompt.Part(how.heads, part, Mask(1.0), how.capped, found)
    pl.when(whole)(lambda: prompt.attend(r, what._replace(seen=None), read))
    pl.when(~whole)(lambda: prompt.attend(r, what, read))

    @pl.when(last)
    def _() -> None:
        for g in range(how.heads):
            total = r.total[g].sum(1, keepdims=True)
            r.out[g] = (r.sums[g] / total).astype(r.out.dtype)
            lse = jnp.where(r.top[g] <= NEG / 2, NEG, (r.top[g] + jnp.log2(total)) * (1 / LOG2E))
            r.lse[g] = lse.T[:1]
