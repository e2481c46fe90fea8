"""What the programs of attention on TPUs share: the list of pairs of tiles that they walk, and who sees whom inside."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from fdel.kernels.flash_tiles import HIGH, LOW, SECOND, SEGMENT, Tests, Tiles
from fdel.ops.paged import LANES

LAST, WHOLE, BITS = 2, 4, 3  # flags of a pair beside 1, the first of its tile; and how many they are
VMEM = 64 * 2**20  # bytes that a program may use
LOG2E = math.log2(math.e)


class Call(NamedTuple):
    """What is static. `heads` are the query heads of a program, `parts` the programs of a key head's."""

    scale: float
    softcap: float | None
    asked: Tests
    heads: int
    parts: int
    tiles: Tiles

    def capped(self, x: Array) -> Array:
        """Give scores times log2(e), of products that were multiplied with `factor`."""
        return x if self.softcap is None else jnp.tanh(x) * (self.softcap * LOG2E)

    @property
    def factor(self) -> float:
        """What products are multiplied with."""
        return self.scale * LOG2E if self.softcap is None else self.scale / self.softcap


class Walk(NamedTuple):
    """Pairs of tiles, each one's after the other's: those of queries with the keys they meet, or `of_keys` the reverse.

    owner: the tile, counted through all rows of so many `tiles`; partner: the one of the other side times 8, and flags.
    """

    owner: Int[Array, " pairs"]
    partner: Int[Array, " pairs"]
    total: Int[Array, ""]
    tiles: int
    of_keys: bool


def pairs(spans: Int[Array, "B tiles 4"], most: int, of_keys: bool) -> Walk:
    """List what `flash_tiles.ranges` says, `most` pairs at most; each tile has one at least."""
    begin, whole_from, whole_to, end = jnp.moveaxis(spans.reshape(-1, 4), 1, 0)
    count = jnp.maximum(end - begin, 1)
    last = jnp.cumsum(count)
    i = jnp.arange(most, dtype=jnp.int32)
    before = last[:-1] <= i[:, None]  # tiles whose pairs all come before: values of a tile are differences, added up
    of_tile = lambda x: x[0] + jnp.where(before, jnp.diff(x), 0).sum(1, dtype=jnp.int32)
    at = i - of_tile(last - count)
    other = of_tile(begin) + at
    whole = (other >= of_tile(whole_from)) & (other < of_tile(whole_to))
    flags = (at == 0) + LAST * (at == of_tile(count) - 1) + WHOLE * whole
    owner = of_tile(jnp.arange(len(count), dtype=jnp.int32))
    return Walk(owner, (other << BITS) + flags, last[-1].astype(jnp.int32), spans.shape[1], of_keys)


def run(
    program: Callable, how: Call, walk: Walk, heads: int, arrays: dict[str, tuple[Any, tuple, str]],
    results: dict[str, tuple[Any, tuple, str]], memory: dict[str, Any], name: str,
) -> list[Array]:  # fmt: skip
    """Run program(refs by name) for each pair, of every head of keys, or part of its query heads.

    Arguments and results (an array, or its shape) have the shape of a block and the indices of one: "row", "head" of
    queries, "kv" head, the tile of "q"ueries and of "k"eys, or 0.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    def spec(entry: tuple[Any, tuple, str]) -> Any:
        def index(h: Any, i: Any, p: Any, owner: Any, partner: Any) -> tuple:
            here, there = owner[i] % walk.tiles, tile(partner, i)
            head, kv = (h * how.parts + p, h) if walk.of_keys else (h, h // how.parts)
            q, k = (there, here) if walk.of_keys else (here, there)
            at = {"row": owner[i] // walk.tiles, "head": head, "kv": kv, "q": q, "k": k, "0": 0}
            return tuple(at[name] for name in entry[2].split())

        return pl.BlockSpec(entry[1], index)

    names = ["owner", "partner", *arrays, *results, *memory]
    programs = heads // how.heads
    call = pl.pallas_call(
        lambda *refs: program(dict(zip(names, refs, strict=True))),
        out_shape=[shape for shape, *_ in results.values()],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(programs // how.parts, walk.total, how.parts) if walk.of_keys else (programs, walk.total, 1),
            in_specs=[spec(entry) for entry in arrays.values()],
            out_specs=[spec(entry) for entry in results.values()],
            scratch_shapes=[*memory.values()],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=VMEM
        ),
        name=name,
    )
    return call(walk.owner, walk.partner, *[x for x, *_ in arrays.values()])


def tile(partner: Any, i: Any) -> Any:
    """Give the other side's tile of pair i."""
    return jax.lax.shift_right_logical(partner[i], jnp.int32(BITS))


def flagged(partner: Any, i: Any) -> tuple[Any, Any, Any]:
    """Tell whether pair i is the first of its tile, the last, and one that is seen wholly."""
    flags = partner[i]
    return flags & 1 != 0, flags & LAST != 0, flags & WHOLE != 0


def seen(asked: Tests, of: Any, segments: Any, index: Any) -> Bool[Array, "rows columns"]:
    """Tell which queries and keys see each other: of(i) are the queries' numbers, `index` the keys', from the first on.

    One side has shape [n 1], the other [1 n]; segments and index are alike.
    """
    found = of(SEGMENT) == segments
    if asked.two:
        found |= of(SECOND) == segments
    if asked.low:
        found &= index >= of(LOW)
    return found & (index <= of(HIGH)) if asked.high else found


def column(rows: Any) -> Array:
    """Turn rows [n T] of 32 bits into columns [T 128], of which the first n are theirs; n divides 128."""
    return jnp.concatenate([rows] * (LANES // rows.shape[0]), 0).T
