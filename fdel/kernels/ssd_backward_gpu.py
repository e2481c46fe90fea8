"""The gradient of state-space duality (Mamba-2) on NVIDIA Hopper, for `ssd_gpu`: two kernels.

The first walks chunks from the last to the first, as the forward pass does, and writes the gradient G of the state after
each. Then chunks do not depend on each other: a program of the second takes a chunk, keeps b and c, and goes through 64
channels after another of the heads that use them. With P_ij = D_ij (j <= i) the decays, E_ij = dy_i^T x_j, S the state
before the chunk, and D_i and D'_j the decays from the chunk's begin to token i and from token j to its end, as in
`ssd_backward_tpu`,
  G <- D G + sum_i D_i dy_i c_i^T;  z_j = sum_i P_ij (c_i^T b_j) dy_i + D'_j G b_j;  dx_j = dt_j z_j + d dy_j
  dc_i = sum_j P_ij E_ij dt_j b_j + D_i S dy_i;  db_j = sum_i P_ij E_ij dt_j c_i + dt_j D'_j G x_j
One group of warps copies; one has pairs of tokens with the later one in rows and sums dc, one has them turned, sums db and
gives dx: each keeps its sums in registers, and neither hands anything to the other. A log decay of token k is in all D_ij
with j < k <= i; its gradient is the sum of their parts, by a product with a triangle of ones.

Bytes, for each token and 64 channels: dy twice, x, dx; the states S and G, written once and read once, 4 S bytes each for a
chunk's token. FLOPs: 10 C S + 8 C 64 of pairs, and 12 * 64 S of states.
Interpreted and compiled for H100; it has not run on a GPU yet.
"""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fdel.kernels import ssd_program_gpu as program
from fdel.kernels.ssd_program_gpu import CHUNK, DEPTH, PLACE, STEP, WIDTH, About, across, added, chunk_of, products

PROGRAMS = 132  # multiprocessors of an H100 or H200
FOUND = 6  # numbers of a token, or of a channel, for each chunk and 64 channels
COPYING, MULTIPLYING = 24, 240  # registers of a thread, of 168 each


def run(
    about: About, numbers: Float[Array, "B N chunks 3 C"], skip: Float[Array, " N"],
    kept: Float[Array, "B chunks NH S"], inputs: list[Array],
) -> tuple[Array, Array, Array, Array]:  # fmt: skip
    """Run over x, dy [B T N*H], b and c [B T G*S]: dx, db and dc [B T G*parts*S] in float32, and `FOUND` rows.

    The rows [B columns chunks 6 C] are, of each 64 channels: the gradient of dt beside decays; of log decays what the last
    state gives before it is summed over tokens; dy^T x; what pairs of a chunk's tokens give; what the first state gives,
    of tokens, and of channels.
    """
    x, dy, b, c = inputs
    walk, copied = functools.partial(_walk, about=about), {"dy_s": WIDTH, "c_s": about.states}
    later = program.walked(walk, about, [kept.shape], copied, numbers, skip, dy, c)
    return _gradients(about, numbers, skip, [x, dy, b, c, kept, *later])


def parts(chunks: int, columns: int) -> int:
    """Choose into how many parts the columns of a group go, for so many programs of one: those with the shortest rounds.

    To begin a program and to write its sums is taken to cost what one column does.
    """
    fits = [n for n in range(1, columns + 1) if columns % n == 0]
    return min(fits, key=lambda n: (-(-n * chunks // PROGRAMS) * (columns // n + 1), n))


def _walk(*refs: Any, about: About, **memory: Any) -> None:
    """Walk from the last chunk to the first, and write the gradient of the state after each."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    numbers, _, dy, c, later = refs
    row, column = (jax.lax.axis_index(name) for name in ("row", "column"))
    s, head, (here, shared) = SimpleNamespace(**memory), about.head(column), program.columns(about, column)
    count = numbers.shape[2]

    def fetch(k: Any) -> None:
        at, slot = count - 1 - k, jax.lax.rem(k, jnp.int32(DEPTH))
        given = numbers.at[row, head, at], dy.at[row, chunk_of(at), here], c.at[row, chunk_of(at), shared]
        for ref, to in zip(given, (s.numbers_s, s.dy_s, s.c_s), strict=True):
            gpu.copy_gmem_to_smem(ref, to.at[slot], s.full.at[slot])

    def step(k: Any, state: Array) -> Array:
        slot = jax.lax.rem(k, jnp.int32(DEPTH))
        n, dy_s, c_s = (ref.at[slot] for ref in (s.numbers_s, s.dy_s, s.c_s))
        gpu.barrier_wait(s.full.at[slot])
        pl.when(n[PLACE, 0] < program.WHOLE)(lambda: program.clear(n, dy_s, c_s))
        gpu.wait_smem_to_gmem(0, wait_read_only=True)
        since, _, end = program.ends(n)
        s.state_s[...] = state.astype(dy.dtype)
        s.hand_s[...] = (program.values(dy_s) * across(since)).astype(dy.dtype)
        gpu.commit_smem()
        gpu.copy_smem_to_gmem(s.state_s, later.at[row, count - 1 - k, here])
        (state,) = added(about, lambda state: gpu.wgmma(state, s.hand_s.transpose((1, 0)), c_s), state * end)
        pl.when(k + DEPTH < count)(lambda: fetch(k + DEPTH))
        return state

    for k in range(min(DEPTH, count)):
        fetch(jnp.int32(k))
    jax.lax.fori_loop(0, count, step, program.nothing(WIDTH, about.states))
    gpu.wait_smem_to_gmem(0)


def _gradients(
    about: About, numbers: Float[Array, "B N chunks 3 C"], skip: Float[Array, " N"], inputs: list[Array]
) -> tuple[Array, Array, Array, Array]:
    """Run over x, dy, b, c, and the states before chunks and their gradients: see `run`."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    x, b = inputs[0], inputs[2]
    (rows, tokens, width), chunks, groups = x.shape, numbers.shape[2], b.shape[2] // about.states
    columns = width // WIDTH // groups
    n = groups * parts(rows * chunks * groups, columns)
    half = functools.partial(program.tiled, x.dtype)
    of = lambda dtype, *shape: jax.ShapeDtypeStruct((rows, *shape), dtype)
    sums = of(jnp.float32, tokens, n * about.states)
    operands = {"operand_s": half(2, 3, CHUNK, CHUNK)} if about.interpreted else {}
    call = gpu.kernel(
        functools.partial(_program, about=about, count=width // WIDTH // n),
        kernel_name="ssd_backward",
        out_type=(of(x.dtype, tokens, width), sums, sums, of(jnp.float32, width // WIDTH, chunks, FOUND, CHUNK)),
        scratch_types={
            **operands,
            "bc_s": half(2, CHUNK, about.states), "ones_s": half(CHUNK, CHUNK),
            "x_s": half(DEPTH, CHUNK, WIDTH), "dy_s": half(DEPTH, CHUNK, WIDTH), "dx_s": half(CHUNK, WIDTH),
            "scores_s": program.tiled(jnp.float32, 2, CHUNK, CHUNK),
            "first_s": half(DEPTH, WIDTH, about.states), "last_s": half(DEPTH, WIDTH, about.states),
            "numbers_s": gpu.SMEM((DEPTH, program.NUMBERS, CHUNK), jnp.float32),
            "places_s": gpu.SMEM((program.NUMBERS, CHUNK), jnp.float32),
            "shared": gpu.Barrier(num_arrivals=3), "full": gpu.Barrier(num_arrivals=5, num_barriers=DEPTH),
            "free": gpu.Barrier(num_arrivals=2, num_barriers=DEPTH), "both": gpu.Barrier(num_arrivals=2),
        },
        grid=(rows, chunks, n),
        grid_names=("row", "chunk", "part"),
        num_threads=3,
        thread_name="warps",
        compiler_params=gpu.CompilerParams(lowering_semantics=gpu.LoweringSemantics.Lane, approx_math=True),
    )  # fmt: skip
    return call(numbers, skip, *inputs)


def _program(*refs: Any, about: About, count: int, **memory: Any) -> None:
    """Share a chunk's work between three groups of warps; `refs` are the arguments and results of `_gradients`."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    numbers, skips, x, dy, b, c, first, last, dx, db, dc, found = refs
    row, chunk, part, mine = (jax.lax.axis_index(name) for name in ("row", "chunk", "part", "warps"))
    s, some = SimpleNamespace(**memory), chunk_of(chunk)
    begin, mine_of = part * count, pl.ds(part * about.states, about.states)
    shared = program.columns(about, begin)[1]

    def registers(count: int, action: Any) -> None:
        if not about.interpreted:
            gpu.set_max_registers(count, action=action)

    def fetch(k: Any, _: None) -> None:
        slot, here = jax.lax.rem(k, jnp.int32(DEPTH)), pl.ds((begin + k) * WIDTH, WIDTH)
        pl.when(k >= DEPTH)(lambda: gpu.barrier_wait(s.free.at[slot]))
        given = (
            numbers.at[row, about.head(begin + k), chunk], x.at[row, some, here], dy.at[row, some, here],
            first.at[row, chunk, here], last.at[row, chunk, here],
        )  # fmt: skip
        for ref, to in zip(given, (s.numbers_s, s.x_s, s.dy_s, s.first_s, s.last_s), strict=True):
            gpu.copy_gmem_to_smem(ref, to.at[slot], s.full.at[slot])

    @pl.when(mine == 2)
    def copy() -> None:
        registers(COPYING, "decrease")
        gpu.copy_gmem_to_smem(numbers.at[row, about.head(begin), chunk], s.places_s, s.shared)
        gpu.copy_gmem_to_smem(b.at[row, some, shared], s.bc_s.at[0], s.shared)
        gpu.copy_gmem_to_smem(c.at[row, some, shared], s.bc_s.at[1], s.shared)
        jax.lax.fori_loop(0, count, fetch, None)

    def each(work: Any, left: Any, right: Any, *, clears: bool) -> Array:
        registers(MULTIPLYING, "increase")
        return _sums(s, about, (begin, count, mine), work, left, right, clears=clears)

    at = lambda column: found.at[row, column, chunk]

    @pl.when(mine == 0)
    def earlier() -> None:
        i, j = (gpu.broadcasted_iota(jnp.int32, (CHUNK,) * 2, axis, layout=gpu.Layout.WGMMA) for axis in (0, 1))
        s.ones_s[...] = jnp.where(i < j, 1.0, 0.0).astype(x.dtype)
        gpu.commit_smem()
        work = lambda column, n, slot, sums: _queries(s, about, at(column), n, slot, sums)
        dc.at[row, some, mine_of][...] = each(work, s.bc_s.at[1], s.bc_s.at[0], clears=True)

    @pl.when(mine == 1)
    def later() -> None:
        def work(column: Any, n: Any, slot: Any, sums: Array) -> Array:
            out = dx.at[row, some, pl.ds(column * WIDTH, WIDTH)]
            return _keys(s, about, at(column), n, slot, sums, out, skips[about.head(column)])

        db.at[row, some, mine_of][...] = each(work, s.bc_s.at[0], s.bc_s.at[1], clears=False)
        gpu.wait_smem_to_gmem(0)


def _sums(
    s: Any, about: About, where: tuple[Any, int, Any], work: Any, left: Any, right: Any, *, clears: bool
) -> Array:
    """Sum what a group of warps finds for each column: work(column, numbers, slot, sums), with scores left right^T.

    `where` is the first column, how many there are, and the group. One of two `clears` padding, which may hold NaN, for
    both; the other has no registers left for that.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    begin, count, mine = where

    def clear(*refs: Any) -> None:
        @pl.when(s.places_s[PLACE, 0] < program.WHOLE)
        def padded() -> None:
            program.clear(s.places_s, *refs)
            gpu.barrier_arrive(s.both)
            gpu.barrier_wait(s.both)

    def step(k: Any, sums: Array) -> Array:
        slot = jax.lax.rem(k, jnp.int32(DEPTH))
        gpu.barrier_wait(s.full.at[slot])
        clear(*[ref.at[slot] for ref in (s.x_s, s.dy_s) if clears])
        sums = work(begin + k, s.numbers_s.at[slot], slot, sums)
        gpu.barrier_arrive(s.free.at[slot])
        return sums

    gpu.barrier_wait(s.shared)
    clear(*[left, right] * clears)
    (scores,) = products(lambda scores: gpu.wgmma(scores, left, right.transpose((1, 0))), (CHUNK, CHUNK))
    s.scores_s.at[mine][...] = scores
    return jax.lax.fori_loop(0, count, step, program.nothing(CHUNK, about.states))


def _queries(s: Any, about: About, found: Any, n: Any, slot: Any, sums: Array) -> Array:
    """Add to dc, with later tokens in rows; and find what decays get from pairs, and from the first state."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    x_s, dy_s, first_s, last_s = (ref.at[slot] for ref in (s.x_s, s.dy_s, s.first_s, s.last_s))
    b_s, c_s = (s.bc_s.at[i + program.zero(s.places_s)] for i in range(2))

    def before(pairs: Any, read: Any) -> None:
        gpu.wgmma(pairs, dy_s, x_s.transpose((1, 0)))
        gpu.wgmma(read, c_s, first_s.transpose((1, 0)))

    pairs, read = products(before, (CHUNK, CHUNK), (CHUNK, WIDTH))
    since, _, end = program.ends(n)
    begun = program.values(dy_s) * across(since)
    found.at[4][...] = (begun * read).sum(axis=1)
    weights = pairs * program.decays(n) * program.along(program.columns_of(n.at[STEP]))
    given = [x.astype(x_s.dtype) for x in (weights, begun, program.values(s.scores_s.at[0]) * weights)]
    held = lambda i: s.operand_s.at[0, i] if about.interpreted else None
    weights, begun, weighted = (program.operand(x, held(i)) for i, x in enumerate(given))
    if about.interpreted:
        gpu.commit_smem()

    def after(dc: Any, of_pairs: Any) -> None:
        gpu.wgmma(dc, weights, b_s)
        gpu.wgmma(dc, begun, first_s)
        gpu.wgmma(of_pairs, weighted, s.ones_s)

    sums, of_pairs = added(about, after, sums, program.nothing(CHUNK, CHUNK))
    found.at[3][...] = jnp.where(program.causal(n), of_pairs, 0).sum(axis=0)
    total: Any = 0
    for at in range(0, about.states, CHUNK):
        some = pl.ds(at, CHUNK)
        total += (program.values(first_s.at[:, some]) * program.values(last_s.at[:, some])).sum(axis=1)
    found.at[5][...] = total * end
    return sums


def _keys(s: Any, about: About, found: Any, n: Any, slot: Any, sums: Array, out: Any, skip: Any) -> Array:
    """Add to db, with earlier tokens in rows, and give dx; and find what dt, decays from the last state, and d get."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    x_s, dy_s, last_s = (ref.at[slot] for ref in (s.x_s, s.dy_s, s.last_s))
    b_s, c_s = (s.bc_s.at[i + program.zero(s.places_s)] for i in range(2))

    held = lambda i, y: program.operand(y.astype(x_s.dtype), s.operand_s.at[1, i] if about.interpreted else None)
    step = program.rows_of(n.at[STEP])
    (pairs,) = products(lambda pairs: gpu.wgmma(pairs, x_s, dy_s.transpose((1, 0))), (CHUNK, CHUNK))
    decay = program.decays(n, turned=True)
    weights = held(0, pairs * decay * across(step))
    seen = program.values(s.scores_s.at[1]) * decay
    of_step, seen = (seen * pairs).sum(axis=1), held(1, seen)
    (read,) = products(lambda read: gpu.wgmma(read, b_s, last_s.transpose((1, 0))), (CHUNK, WIDTH))
    _, later, _ = program.ends(n)
    z, x = read * across(later), program.values(x_s)
    last, new = (x * z).sum(axis=1), held(2, x * across(later * step))
    found.at[0][...] = of_step + last
    found.at[1][...] = last * step
    if about.interpreted:
        gpu.commit_smem()

    def after(z: Any, db: Any) -> None:
        gpu.wgmma(z, seen, dy_s)
        gpu.wgmma(db, weights, c_s)
        gpu.wgmma(db, new, last_s)

    z, sums = added(about, after, z, sums)
    dy = program.values(dy_s)
    found.at[2][...] = (dy * program.values(x_s)).sum(axis=1)
    gpu.wait_smem_to_gmem(0, wait_read_only=True)
    s.dx_s[...] = (z * across(step) + dy * skip).astype(s.dx_s.dtype)
    gpu.commit_smem()
    gpu.copy_smem_to_gmem(s.dx_s, out)
    return sums
