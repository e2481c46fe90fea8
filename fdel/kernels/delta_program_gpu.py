"""The program of the gated delta rule on Hopper, for `gated_delta_rule_gpu`.

Algorithm: the chunked WY form (arXiv 2406.06484, with decays as in 2412.06464). With D_ij the decay from token j to
token i, D_i that from the chunk's start, b = beta, and S the state [keys values] before a chunk of 64 tokens,
  w = T (v - D_i k S),  T = (I + A)^-1 b,  A_ij = b_i D_ij k_i^T k_j for j < i
  o_i = D_i q_i S + sum_{j<=i} D_ij q_i^T k_j w_j;  S <- D S + sum_j D_Cj k_j w_j^T
A program serves a head of a row. Its third group of warps prepares T and D_ij q_i^T k_j of a chunk while the other two walk
the chunk before with half of the values each: the state stays in their registers in float32, and goes to shared memory in
bfloat16 to be multiplied. q, k and v are copied for two chunks. `delta_walk_gpu.invert` inverts I + A.

Bytes: q, k, v and o once, 64 KiB for a chunk and head, in 4,500 cycles of a multiprocessor's part of an H100's bandwidth;
where gradients are wanted 40 KiB more, of states and T. FLOPs: 2 * 64 * 128 * (4 * 64 + 3 * 128) of pairs, solution,
outputs and states, and 13 products of 64 x 64 x 64 for the inverse: 17 million, which tensor cores do in 4,100 cycles.
"""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fdel.kernels import transfer_gpu
from fdel.kernels.delta_walk_gpu import (
    CHUNK,
    HALF,
    WALKERS,
    WIDTH,
    across,
    clear,
    down,
    give,
    give_state,
    invert,
    launch,
    number,
    of_slot,
    parts,
    pipeline,
    place_of,
    places,
    products,
    rows_of,
    zero,
)

SINCE, LAST, BETA, PLACE, VALID = range(5)  # numbers of each token, see `run`
WIDE = "q_s", "k_s", "v_s"  # what is copied of chunks, and what else is needed of shared memory
OWN = {"work_s": (3, CHUNK, CHUNK), "new_s": (WALKERS, 2, CHUNK, HALF)}


def run(
    q: Float[Array, "B T NH"], k: Float[Array, "B T NH"], v: Float[Array, "B T NH"],
    numbers: Float[Array, "B N 5 T"], whole: Int[Array, "B chunks"], *, keep: bool,
) -> tuple[Array, ...]:  # fmt: skip
    """Run over heads of 128 channels beside each other, whole chunks of tokens.

    `numbers` of each token and head: log2 decays summed over its chunk's tokens up to it, the last such sum of the chunk,
    beta, its place in the chunk, and 1 where the token is one. `whole` tells which chunks have no padding.
    With `keep` also the states before each chunk [B N chunks keys values] and T [B N T 64], for the backward pass.
    """
    (b, t, _), heads = q.shape, numbers.shape[1]
    shapes = q.shape, (b, heads, t // CHUNK, WIDTH, WIDTH), (b, heads, t, CHUNK)
    results = shapes[: 3 if keep else 1]
    call = launch(_program, results, q.dtype, (b, heads), WIDE, OWN, (VALID, CHUNK), copies=4)
    return call(q, k, v, numbers, whole)


def numbers_of(
    valid: Bool[Array, "B T"], decays: Float[Array, "B T N"], beta: Float[Array, "B T N"]
) -> Float[Array, "B N 5 T"]:
    """Give the numbers of tokens in whole chunks, as `run` wants them, of log2 decays and of beta, where no token is 0."""
    since = jnp.cumsum(decays.reshape(len(decays), -1, CHUNK, decays.shape[2]), 2)
    last = jnp.broadcast_to(since[:, :, -1:], since.shape)
    since, last = (x.reshape(decays.shape) for x in (since, last))
    return rows_of([since, last, beta, place_of(decays.shape[1]), valid[..., None]], decays.shape)


def _program(*refs: Any, **memory: Any) -> None:
    """Walk the chunks of a head; `refs` are the arguments and the results of `run`'s kernel."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    q, k, v, numbers, whole, out, *kept = refs
    row, head = (jax.lax.axis_index(name) for name in ("row", "head"))
    s, tokens = SimpleNamespace(**memory), lambda c: pl.ds(c * CHUNK, CHUNK)

    def fetch(c: Any, slot: Any) -> None:
        for x, to in ((q, s.q_s), (k, s.k_s), (v, s.v_s)):
            gpu.copy_gmem_to_smem(x.at[row, tokens(c), pl.ds(head * WIDTH, WIDTH)], to.at[slot], s.full.at[slot])
        gpu.copy_gmem_to_smem(numbers.at[row, head, pl.ds(0, VALID), tokens(c)], s.numbers_s.at[slot], s.full.at[slot])

    def prepare(c: Any, slot: Any) -> None:
        real = numbers.at[row, head, VALID, tokens(c)]
        pl.when(whole[row, c] == 0)(lambda: clear([x.at[slot] for x in (s.q_s, s.k_s, s.v_s)], real))
        if kept:
            gpu.wait_smem_to_gmem(1, wait_read_only=True)  # T of two chunks before
        prepare_chunk(s, slot)
        gpu.barrier_arrive(s.ready.at[slot])
        if kept:
            gpu.copy_smem_to_gmem(s.solve_s.at[slot], kept[1].at[row, head, tokens(c)])

    def walk(c: Any, slot: Any, own: Any, state: list[Array]) -> list[Array]:
        if kept:
            gpu.copy_smem_to_gmem(own.state, kept[0].at[row, head, c, :, own.columns])
        state = walk_chunk(s, own, slot, state)
        gpu.copy_smem_to_gmem(own.new.at[0], out.at[row, tokens(c), pl.ds(head * WIDTH + own.mine * HALF, HALF)])
        return state

    pipeline(s, whole.shape[1], fetch, prepare, walk)


def prepare_chunk(s: Any, slot: Any) -> None:
    """Give `pairs_s` D_ij q_i^T k_j and `solve_s` T."""
    k, numbers = s.k_s.at[slot], s.numbers_s.at[slot]
    high, low = s.work_s.at[2], s.pairs_s.at[slot]  # two parts of A; the pairs take the second's place
    where = functools.partial(places, numbers.at[PLACE])
    kk = products([(k, k.transpose((1, 0)))])[0]
    i, j = where()
    kk = kk * decay_pairs(numbers) * across(number(numbers.at[BETA]), CHUNK)
    a = jnp.where(j < i, kk, jnp.zeros_like(kk))
    turns = [s.work_s.at[0], s.work_s.at[1], s.solve_s.at[slot]]
    none = zero(s.numbers_s[slot, PLACE, 0])
    reads = [s.work_s.at[2 + none], low, s.work_s.at[none], s.work_s.at[1 + none], turns[2]]
    x, qk = invert(a, high, low, turns, where, [(s.q_s.at[slot], k.transpose((1, 0)))], reads=reads)
    s.solve_s.at[slot][...] = (x * down(number(numbers.at[BETA], axis=0))).astype(k.dtype)
    give(low, qk * decay_pairs(numbers))


def decay_pairs(numbers: Any) -> Array:
    """Give the decays from each token to those after it."""
    i, j = places(numbers.at[PLACE])
    difference = across(number(numbers.at[SINCE]), CHUNK) - down(number(numbers.at[SINCE], axis=0))
    return jnp.where(j <= i, jnp.exp2(difference), 0.0)


def walk_chunk(s: Any, own: Any, slot: Any, state: list[Array]) -> list[Array]:
    """Give `own.new` outputs of a chunk and `own.state` the state after it, which is returned in float32.

    Decays are read where they are needed: held, they would take registers beside sums and state. So the slot is given back
    when the state is written, which tells copies of such reads.
    """
    from jax.experimental.pallas import mosaic_gpu as gpu

    q, k, read = s.q_s.at[slot], s.k_s.at[slot], own.read(zero(s.numbers_s[slot, PLACE, 0]))
    seen = products([(k, read.state)])[0]
    numbers = lambda which: across(number(s.numbers_s.at[slot, which]), HALF)
    v = of_slot(slot, lambda n: transfer_gpu.load(s.v_s.at[n, :, own.columns], layout=gpu.Layout.WGMMA))
    gpu.wait_smem_to_gmem(0, wait_read_only=True)  # outputs of the chunk before
    give(own.new.at[0], v.astype(jnp.float32) - jnp.exp2(numbers(SINCE)) * seen)
    new = products([(s.solve_s.at[slot], read.new.at[0])])[0]
    gpu.commit_smem()  # all warps have read what is written over
    own.new.at[1][...] = (new * jnp.exp2(numbers(LAST) - numbers(SINCE))).astype(k.dtype)
    give(own.new.at[0], new)
    seen, within = products([(q, read.state)], [(s.pairs_s.at[slot], read.new.at[0])])
    gpu.commit_smem()
    give(own.new.at[0], jnp.exp2(numbers(SINCE)) * seen + within)
    written = products(*([(part.transpose((1, 0)), read.new.at[1])] for part in parts(k, 1)))
    last = jnp.exp2(numbers(LAST))
    state = [last * old + more for old, more in zip(state, written, strict=True)]
    give_state(own, state)
    gpu.barrier_arrive(s.free.at[slot])
    return state
