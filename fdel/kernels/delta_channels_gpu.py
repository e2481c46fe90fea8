"""The programs of the gated delta rule on Hopper with a decay of each key channel (KDA), for `gated_delta_rule_gpu`.

Algorithm: that of `delta_program_gpu`, with D_ij and D_i diagonal matrices, one number for each channel, and D'_j the decay
from token j to the chunk's end:
  w = T (v - (D_i k_i)^T S),  T = (I + A)^-1 b,  A_ij = b_i k_i^T D_ij k_j for j < i
  o_i = (D_i q_i)^T S + sum_{j<=i} q_i^T D_ij k_j w_j;  S <- D S + sum_j (D'_j k_j) w_j^T
As exp(G_i) times exp(-G_j) the second factor of D_ij would overflow. So a chunk is cut in halves again and again (arXiv
2510.26692 cuts it in blocks): from a token of the first half to one of the second the decay is a product of two factors
<= 1, up to the border and from there, and a level of halves is one product of matrices. A factor is exp2 of a sum of log
decays over a few neighbouring tokens, which is a product, too: of a matrix of ones and zeros with the log decays, in two
parts of bfloat16 each, 16 bits. No sum is a difference of others, so none loses digits to what came before.

`prepare` is a kernel of all chunks at once, two programs on a multiprocessor: it gives D_i q_i, D_i k_i, D'_j k_j, T, q_i^T
D_ij k_j and D. `walk`, in `delta_channels_walk_gpu`, has no decay left to compute but D: it walks the chunks as
`delta_program_gpu` does, and back for the gradient, for which `prepare` runs again: it reads what is cheaper to compute
than to keep.

Bytes of a chunk and head: `prepare` reads q, k and g, 64 KiB, and writes 64; `walk` reads these and v, and writes o, 96.
FLOPs: 31 million of `prepare`'s decays and pairs, 7 of its inverse, 8 of `walk`.
Interpreted on CPU and compiled for H100; it has not run on a GPU.
"""

import functools
import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fdel.kernels import transfer_gpu
from fdel.kernels.delta_walk_gpu import (
    CHUNK,
    HALF,
    WIDTH,
    across,
    clear,
    down,
    give,
    invert,
    number,
    operands,
    parts,
    places,
    products,
)

NEVER, LOG2E = -160.0, math.log2(math.e)  # a log2 decay of nothing; from log decays
START, BETA, PLACE, VALID = range(4)  # numbers of each token, see `prepare`


class Prepared(NamedTuple):
    """What `prepare` gives, by the names of the formula; heads are beside each other in what has 128 channels."""

    reads: Float[Array, "B T NH"]  # D_i q_i
    seen: Float[Array, "B T NH"]  # D_i k_i
    wrote: Float[Array, "B T NH"]  # D'_j k_j
    solve: Float[Array, "B N T 64"]  # T
    pairs: Float[Array, "B N T 64"]  # q_i^T D_ij k_j
    decays: Float[Array, "B N chunks*H"]  # D, float32
    keys: Float[Array, "B N T 64"] | None = None  # k_i^T D_ij k_j, j < i, where asked for


def prepare(
    q: Float[Array, "B T NH"], k: Float[Array, "B T NH"], g: Float[Array, "B T NH"],
    numbers: Float[Array, "B N 4 T"], whole: Int[Array, "B chunks"], *, keys: bool,
    blocks: Int[Array, "chunks parts"] | None = None,
) -> Prepared:  # fmt: skip
    """Prepare whole chunks of heads of 128 channels; g are log decays in float32.

    `numbers` of each token and head: 1 where a sequence begins, beta, its place in the chunk, and 1 where the token is one.
    `whole` tells which chunks have no padding. Chunks of q and k may be parts that lie anywhere, `blocks` of so many tokens
    each; where `whole` is then -1, nothing is prepared.
    """
    from jax.experimental.pallas import mosaic_gpu as gpu

    (b, heads, _, t), parts = numbers.shape, 1 if blocks is None else blocks.shape[1]
    wide, square = [jax.ShapeDtypeStruct(shape, q.dtype) for shape in ((b, t, q.shape[2]), (b, heads, t, CHUNK))]
    decays = jax.ShapeDtypeStruct((b, heads, t // CHUNK * WIDTH), jnp.float32)
    shapes: dict[str, tuple[int, ...]] = {
        **dict.fromkeys(("q_s", "k_s", "near_q_s", "near_k_s"), (CHUNK, WIDTH)),
        **dict.fromkeys(("high_s", "low_s"), (2, CHUNK, HALF)), "which_s": (CHUNK, CHUNK),
    }  # fmt: skip
    call = gpu.kernel(
        functools.partial(_prepare, parts=parts, anywhere=blocks is not None),
        kernel_name="delta_channels_prepare",
        out_type=(wide, wide, wide, square, square, decays, *[square] * keys),
        scratch_types={
            **operands(shapes, q.dtype),
            "numbers_s": gpu.SMEM((4, CHUNK), jnp.float32), "decays_s": gpu.SMEM((WIDTH,), jnp.float32),
            "full": gpu.Barrier(num_arrivals=1 + 2 * parts),
        },
        grid=(b, heads, t // CHUNK),
        grid_names=("row", "head", "chunk"),
        compiler_params=gpu.CompilerParams(  # exp2 gives 0 for less than 2^-126, which saves a sixth of the instructions
            lowering_semantics=gpu.LoweringSemantics.Lane, approx_math=True
        ),
    )  # fmt: skip
    return Prepared(*call(q, k, g, numbers, whole, *([] if blocks is None else [blocks])))


def _prepare(*refs: Any, parts: int, anywhere: bool, **memory: Any) -> None:
    """Prepare a chunk of a head; `refs` are the arguments and the results of `prepare`'s kernel."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    q, k, g, numbers, whole, *results = refs
    blocks, size = results.pop(0) if anywhere else None, CHUNK // parts
    to: Any = Prepared(*results)  # references to what it gives
    s = SimpleNamespace(**memory)
    row, head, c = (jax.lax.axis_index(name) for name in ("row", "head", "chunk"))
    tokens, channels = pl.ds(c * CHUNK, CHUNK), lambda n, size: pl.ds(head * WIDTH + n * size, size)

    def chunk() -> None:
        for i in range(parts):
            here = pl.ds(blocks[c, i] * size, size) if blocks is not None else tokens
            for x, copy in ((q, s.q_s), (k, s.k_s)):
                copy = copy if parts == 1 else copy.at[pl.ds(i * size, size)]
                gpu.copy_gmem_to_smem(x.at[row, here, channels(0, WIDTH)], copy, s.full)
        gpu.copy_gmem_to_smem(numbers.at[row, head, :, tokens], s.numbers_s, s.full)
        halves = [g.at[row, tokens, channels(n, HALF)] for n in range(2)]
        logs = [transfer_gpu.load(x, layout=gpu.Layout.WGMMA, optimized=False) for x in halves]
        gpu.barrier_wait(s.full)
        pl.when(whole[row, c] == 0)(lambda: clear([s.q_s, s.k_s], numbers.at[row, head, VALID, tokens]))
        _give_decays(s, logs)
        _give_others(s, to, row, head, c)

    pl.when(whole[row, c] >= 0 if anywhere else True)(chunk)


def _give_others(s: Any, to: Any, row: Any, head: Any, c: Any) -> None:
    """Send `to` memory what is prepared of a chunk, whose decays are there."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    tokens = pl.ds(c * CHUNK, CHUNK)
    kk, qk = _pairs(s)
    where = functools.partial(places, s.numbers_s.at[PLACE])
    i, j = where()
    begin = _decays(s, j <= i)
    _scale(s.q_s, begin, s.near_q_s)
    _scale(s.k_s, begin, s.near_k_s)
    i, j = where()
    end = _decays(s, j > i)
    _scale(s.k_s, end, s.k_s)
    gpu.commit_smem()
    sent = (s.near_q_s, to.reads), (s.near_k_s, to.seen), (s.k_s, to.wrote)
    for x, out in sent:
        gpu.copy_smem_to_gmem(x, out.at[row, tokens, pl.ds(head * WIDTH, WIDTH)])
    gpu.copy_smem_to_gmem(s.decays_s, to.decays.at[row, head, pl.ds(c * WIDTH, WIDTH)])
    high, low, *turns = [*_halves(s.high_s), *_halves(s.low_s), s.which_s]  # the log decays' place is free
    inverse = invert(kk * across(number(s.numbers_s.at[BETA]), CHUNK), high, low, turns, where)[0]
    turns[2][...] = (inverse * down(number(s.numbers_s.at[BETA], axis=0))).astype(turns[2].dtype)
    high[...] = qk.astype(high.dtype)
    low[...] = kk.astype(low.dtype)
    gpu.commit_smem()
    for x, out in ((turns[2], to.solve), (high, to.pairs), *([(low, to.keys)] if to.keys is not None else [])):
        gpu.copy_smem_to_gmem(x, out.at[row, head, tokens])
    gpu.wait_smem_to_gmem(0)


def _give_decays(s: Any, logs: list[Array]) -> None:
    """Give log2 decays in two parts, which `commit_smem` has to follow, and the decay of the chunk."""
    from jax.experimental import pallas as pl

    real, start = (across(number(s.numbers_s.at[which]), HALF) > 0 for which in (VALID, START))
    for n, (x, high, low) in enumerate(zip(logs, _halves(s.high_s), _halves(s.low_s), strict=True)):
        x = jnp.where(real, jnp.maximum(x * LOG2E, NEVER), 0.0)
        x = jnp.where(start, NEVER, x)
        s.decays_s[pl.ds(n * HALF, HALF)] = jnp.exp2(jnp.sum(x, 0))
        near = x.astype(high.dtype)
        high[...] = near
        low[...] = (x - near.astype(jnp.float32)).astype(low.dtype)


def _halves(ref: Any) -> list[Any]:
    """Give what is laid as halves of channels, each of which can be copied by itself."""
    return [ref.at[n] for n in range(2)]


def _decays(s: Any, which: Array) -> list[Array]:
    """Give each token the decay of all tokens j for which `which` [i j], channels in two halves."""
    give(s.which_s, jnp.where(which, 1.0, 0.0))
    both = zip(_halves(s.high_s), _halves(s.low_s), strict=True)
    return [jnp.exp2(x) for x in products(*([(s.which_s, x) for x in pair] for pair in both))]


def _scale(x: Any, factors: list[Array], to: Any) -> None:
    """Write x times factors as an operand, which `commit_smem` has to follow."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    for part, factor, out in zip(parts(x, 1), factors, parts(to, 1), strict=True):
        found = transfer_gpu.load(part, layout=gpu.Layout.WGMMA).astype(jnp.float32)
        out[...] = (found * factor).astype(out.dtype)


def _pairs(s: Any) -> tuple[Array, Array]:
    """Give k_i^T D_ij k_j for j < i and q_i^T D_ij k_j for j <= i; others are 0."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    place = lambda axis: number(s.numbers_s.at[PLACE], axis).astype(jnp.int32)
    turned = lambda ref: ref.transpose((1, 0))

    def level(n: Any, found: tuple[Array, Array]) -> tuple[Array, Array]:
        size = jax.lax.shift_left(jnp.int32(1), n)
        rows, columns = place(1), down(place(0))
        begin, second = jax.lax.bitwise_and(rows, -size), jax.lax.bitwise_and(rows, size) != 0  # of blocks of `size`
        first, last = jnp.where(second, begin, rows + 1), jnp.where(second, rows, begin + size - 1)
        factors = _decays(s, (columns >= across(first, CHUNK)) & (columns <= across(last, CHUNK)))
        _scale(s.q_s, factors, s.near_q_s)
        _scale(s.k_s, factors, s.near_k_s)
        gpu.commit_smem()
        more = products([(s.near_k_s, turned(s.near_k_s))], [(s.near_q_s, turned(s.near_k_s))])
        rows, columns = place(1), place(0)
        before = jnp.where(jax.lax.bitwise_and(rows, size) != 0, jax.lax.bitwise_and(rows, -size) - size, -1)
        here = down(jax.lax.bitwise_and(columns, -size)) == across(before, CHUNK)
        kk, qk = (jnp.where(here, x, old) for x, old in zip(more, found, strict=True))
        return kk, qk

    gpu.commit_smem()
    qk = products([(s.q_s, turned(s.k_s))])[0]
    i, j = places(s.numbers_s.at[PLACE])
    same = jnp.where(i == j, qk, jnp.zeros_like(qk))
    return jax.lax.fori_loop(0, CHUNK.bit_length() - 1, level, (0 * same, same))
