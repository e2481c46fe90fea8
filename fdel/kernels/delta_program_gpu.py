"""The program of the gated delta rule on Hopper, for `gated_delta_rule_gpu`.

Algorithm: the chunked WY form (arXiv 2406.06484, with decays as in 2412.06464). With D_ij the decay from token j to
token i, D_i that from the chunk's start, b = beta, and S the state [keys values] before a chunk of 64 tokens,
  w = T (v - D_i k S),  T = (I + A)^-1 b,  A_ij = b_i D_ij k_i^T k_j for j < i
  o_i = D_i q_i S + sum_{j<=i} D_ij q_i^T k_j w_j;  S <- D S + sum_j D_Cj k_j w_j^T
A program serves a head of a row. Its third group of warps prepares T and D_ij q_i^T k_j of a chunk while the other two walk
the chunk before with half of the values each: the state stays in their registers in float32, and goes to shared memory in
bfloat16 to be multiplied. q, k and v are copied for two chunks.

I + A is inverted by doubling: neighbours X and Y with L below X become X, Y and -Y L X below X, for blocks of 1, 2, ... 32
tokens, all blocks of a size in two products of 64 x 64 x 64. Powers of A are not taken: they grow and cancel. Operands in
bfloat16 leave 1.5% where keys are nearly equal, so a step of Newton's follows, X + X (I - (I + A) X), with A in two parts:
1e-4 are left, less than T loses where it is rounded for its product.

Bytes: q, k, v and o once, 64 KiB for a chunk and head, in 4,500 cycles of a multiprocessor's part of an H100's bandwidth;
where gradients are wanted 40 KiB more, of states and T. FLOPs: 2 * 64 * 128 * (4 * 64 + 3 * 128) of pairs, solution,
outputs and states, and 13 products of 64 x 64 x 64 for the inverse: 17 million, which tensor cores do in 4,100 cycles.
"""

import functools
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

CHUNK, WIDTH, HALF = 64, 128, 64  # tokens of a chunk, channels of a key and of a value, values of a group of warps
WALKERS, DEPTH = 2, 2  # groups of warps that walk, chunks on their way
SINCE, LAST, BETA, PLACE, VALID = range(5)  # numbers of each token, see `run`
ALL: tuple = () if jax.version.__version_info__ >= (0, 12) else ((),)  # the index of all, which older ones ask for


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
    own = {"a_s": (CHUNK, CHUNK), "work_s": (2, CHUNK, CHUNK), "new_s": (WALKERS, 2, CHUNK, HALF)}
    call = launch(_program, shapes[: 3 if keep else 1], q.dtype, (b, heads), ("q_s", "k_s", "v_s"), own, copies=4)
    return call(q, k, v, numbers, whole)


def launch(
    program: Callable, results: tuple[tuple[int, ...], ...], dtype: Any, grid: tuple[int, int], wide: tuple[str, ...],
    own: Mapping[str, tuple[int, ...]], copies: int,
) -> Callable:  # fmt: skip
    """Make a kernel of rows and heads: one group of warps prepares, `WALKERS` walk. `copies` fill a chunk's part of memory.

    Its memory: `wide` inputs and the numbers of chunks on their way, what is prepared of them, a state, and its `own`.
    """
    from jax.experimental.pallas import mosaic_gpu as gpu

    half: Any = functools.partial(
        gpu.SMEM, dtype=dtype, transforms=(gpu.TilingTransform((8, 64)), gpu.SwizzleTransform(128))
    )
    shapes: dict[str, tuple[int, ...]] = {
        **dict.fromkeys(wide, (DEPTH, CHUNK, WIDTH)), "solve_s": (DEPTH, CHUNK, CHUNK), "pairs_s": (DEPTH, CHUNK, CHUNK),
        "state_s": (WALKERS, WIDTH, HALF), **own,
    }  # fmt: skip
    return gpu.kernel(
        program,
        out_type=tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in results),
        scratch_types={
            **{name: half(shape) for name, shape in shapes.items()},
            "numbers_s": gpu.SMEM((DEPTH, VALID, CHUNK), jnp.float32),
            "full": gpu.Barrier(num_arrivals=copies, num_barriers=DEPTH), "ready": gpu.Barrier(num_barriers=DEPTH),
            "free": gpu.Barrier(num_arrivals=WALKERS, num_barriers=DEPTH),
        },
        grid=grid,
        grid_names=("row", "head"),
        num_threads=WALKERS + 1,
        thread_name="warps",
        compiler_params=gpu.CompilerParams(
            lowering_semantics=gpu.LoweringSemantics.Lane, reduction_scratch_bytes=1024  # of memory that is needed here
        ),
    )  # fmt: skip


def _program(*refs: Any, **memory: Any) -> None:
    """Walk the chunks of a head; `refs` are the arguments and the results of `run`'s kernel."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    q, k, v, numbers, whole, out, *kept = refs
    row, head, mine = (jax.lax.axis_index(name) for name in ("row", "head", "warps"))
    s, count = SimpleNamespace(**memory), whole.shape[1]

    def fetch(c: Any) -> None:
        slot, tokens, channels = jax.lax.rem(c, jnp.int32(DEPTH)), pl.ds(c * CHUNK, CHUNK), pl.ds(head * WIDTH, WIDTH)
        for x, to in ((q, s.q_s), (k, s.k_s), (v, s.v_s)):
            gpu.copy_gmem_to_smem(x.at[row, tokens, channels], to.at[slot], s.full.at[slot])
        gpu.copy_gmem_to_smem(numbers.at[row, head, pl.ds(0, VALID), tokens], s.numbers_s.at[slot], s.full.at[slot])

    @pl.when(mine == WALKERS)
    def prepare() -> None:
        def step(c: Any, _: None) -> None:
            slot, real = jax.lax.rem(c, jnp.int32(DEPTH)), numbers.at[row, head, VALID, pl.ds(c * CHUNK, CHUNK)]
            gpu.barrier_wait(s.full.at[slot])
            pl.when(whole[row, c] == 0)(lambda: clear([x.at[slot] for x in (s.q_s, s.k_s, s.v_s)], real))
            if kept:
                gpu.wait_smem_to_gmem(1, wait_read_only=True)  # T of two chunks before
            _prepare(s, slot)
            gpu.barrier_arrive(s.ready.at[slot])
            if kept:
                gpu.copy_smem_to_gmem(s.solve_s.at[slot], kept[1].at[row, head, pl.ds(c * CHUNK, CHUNK)])

        jax.lax.fori_loop(0, count, step, None)
        gpu.wait_smem_to_gmem(0)

    def walk(mine: int) -> None:
        for c in range(0 if mine else min(DEPTH, count)):
            fetch(jnp.int32(c))
        own, nothing = begin(s, mine)

        def step(c: Any, state: list[Array]) -> list[Array]:
            slot = jax.lax.rem(c, jnp.int32(DEPTH))

            def fetch_next() -> None:
                gpu.barrier_wait(s.free.at[slot])
                fetch(c + DEPTH)

            gpu.barrier_wait(s.full.at[slot])
            gpu.barrier_wait(s.ready.at[slot])
            if kept:
                gpu.copy_smem_to_gmem(own.state, kept[0].at[row, head, c, :, own.columns])
            state = _walk(s, own, slot, state, lambda: gpu.barrier_arrive(s.free.at[slot]))
            if mine == 0:
                pl.when(c + DEPTH < count)(fetch_next)
            to = out.at[row, pl.ds(c * CHUNK, CHUNK), pl.ds(head * WIDTH + mine * HALF, HALF)]
            gpu.copy_smem_to_gmem(own.new.at[0], to)

            return state

        jax.lax.fori_loop(0, count, step, nothing)
        gpu.wait_smem_to_gmem(0)

    for walker in range(WALKERS):  # a program for each: of addresses that depend on a number some would be spilled
        pl.when(mine == walker)(functools.partial(walk, walker))


def begin(s: Any, mine: int) -> tuple[Any, list[Array]]:
    """Give a group of warps that walks its parts of the memory, and a state of zeros."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    own = SimpleNamespace(state=s.state_s.at[mine], new=s.new_s.at[mine], columns=pl.ds(mine * HALF, HALF))
    nothing = gpu.layout_cast(jnp.zeros((CHUNK, HALF), jnp.float32), gpu.Layout.WGMMA)
    give_state(own, [nothing] * 2)
    return own, [nothing] * 2


def clear(refs: list[Any], valid: Any) -> None:
    """Write zeros over padding, which may be NaN."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    real = across(gpu.load(valid, *ALL, layout=gpu.Layout.WGMMA.reduce(1), optimized=False), CHUNK) > 0
    for ref in refs:
        for part in parts(ref, 1):
            x = gpu.load(part, *ALL, layout=gpu.Layout.WGMMA)
            part[...] = jnp.where(real, x, jnp.zeros_like(x))
    gpu.commit_smem()


def _prepare(s: Any, slot: Any) -> None:
    """Give `pairs_s` D_ij q_i^T k_j and `solve_s` T.

    Warps of a group do not wait for each other's products. So no buffer is written before a `commit_smem`, which lets all
    arrive, has followed the last product that read it: three take turns.
    """
    k, high, low = s.k_s.at[slot], s.a_s, s.pairs_s.at[slot]  # two parts of A; the pairs take the second's place
    where = lambda found, x: jnp.where(found, x, jnp.zeros_like(x))
    kk = products([(k, k.transpose((1, 0)))])[0]
    i, j = _places(s, slot)
    a = where(j < i, kk * decay_pairs(s, slot) * across(number(s, slot, BETA), CHUNK))
    low[...] = (a - a.astype(k.dtype).astype(jnp.float32)).astype(k.dtype)
    give(high, a)
    turns = [s.work_s.at[0], s.work_s.at[1], s.solve_s.at[slot]]
    x = jnp.where(i == j, 1.0, 0.0) - where(jax.lax.bitwise_xor(i, j) == 1, a)
    for level in range(1, 6):
        block, below = turns[(2 * level - 2) % 3], turns[(2 * level - 1) % 3]
        give(block, x)
        product = products([(block, high)])[0]
        far = jax.lax.bitwise_xor(*_places(s, slot))  # its highest bit: the size of the blocks that part i from j
        give(below, where((far >= 1 << level) & (far < 2 << level), product))
        x = x - products([(below, block)])[0]
    inverse, error = turns[1], turns[0]
    give(inverse, x)
    product = products([(high, inverse), (low, inverse)])[0]
    x, (i, j) = x.astype(k.dtype).astype(jnp.float32), _places(s, slot)
    give(error, jnp.where(i == j, 1.0, 0.0) - x - product)
    more, qk = products([(inverse, error)], [(s.q_s.at[slot], k.transpose((1, 0)))])
    s.solve_s.at[slot][...] = ((x + more) * down(number(s, slot, BETA, axis=0))).astype(k.dtype)
    give(s.pairs_s.at[slot], qk * decay_pairs(s, slot))


def decay_pairs(s: Any, slot: Any) -> Array:
    """Give the decays from each token to those after it."""
    i, j = _places(s, slot)
    difference = across(number(s, slot, SINCE), CHUNK) - down(number(s, slot, SINCE, axis=0))
    return jnp.where(j <= i, jnp.exp2(difference), 0.0)


def _places(s: Any, slot: Any) -> tuple[Array, Array]:
    """Give the rows and the columns of pairs. They are read, whenever asked for: ptxas spills masks that it can keep."""
    places = [number(s, slot, PLACE, axis).astype(jnp.int32) for axis in (1, 0)]
    return across(places[0], CHUNK), down(places[1])


def _walk(s: Any, own: Any, slot: Any, state: list[Array], release: Callable[[], None]) -> list[Array]:
    """Give `own.new` outputs of a chunk and `own.state` the state after it, which is returned in float32."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    q, k = s.q_s.at[slot], s.k_s.at[slot]
    seen = products([(k, own.state)])[0]
    since, last = (across(number(s, slot, which), HALF) for which in (SINCE, LAST))
    v = gpu.load(s.v_s.at[slot, :, own.columns], *ALL, layout=gpu.Layout.WGMMA).astype(jnp.float32)
    gpu.wait_smem_to_gmem(0, wait_read_only=True)  # outputs of the chunk before
    give(own.new.at[0], v - jnp.exp2(since) * seen)
    new = products([(s.solve_s.at[slot], own.new.at[0])])[0]
    gpu.commit_smem()  # all warps have read what is written over
    own.new.at[1][...] = (new * jnp.exp2(last - since)).astype(k.dtype)
    give(own.new.at[0], new)
    seen, within = products([(q, own.state)], [(s.pairs_s.at[slot], own.new.at[0])])
    gpu.commit_smem()
    give(own.new.at[0], jnp.exp2(since) * seen + within)
    written = products(*([(part.transpose((1, 0)), own.new.at[1])] for part in parts(k, 1)))
    state = [jnp.exp2(last) * old + more for old, more in zip(state, written, strict=True)]
    release()
    give_state(own, state)
    return state


def give_state(own: Any, state: list[Array]) -> None:
    """Write a state, of half of the values, as an operand for products."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    for to, x in zip(parts(own.state, 0), state, strict=True):
        to[...] = x.astype(to.dtype)
    gpu.commit_smem()


def parts(ref: Any, axis: int) -> list[Any]:
    """Cut channels in two halves, of 64: rows of a product."""
    from jax.experimental import pallas as pl

    return [ref.at[(slice(None),) * axis + (pl.ds(i, CHUNK),)] for i in range(0, WIDTH, CHUNK)]


def give(to: Any, x: Array) -> None:
    """Write an operand for products."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    to[...] = x.astype(to.dtype)
    gpu.commit_smem()


def products(*sums: list[tuple[Any, Any]]) -> list[Array]:
    """Multiply operands in shared memory: for each of several results [64 64] the sum of its products."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    def every(*accs: Any) -> list[Array]:
        for acc, pairs in zip(accs, sums, strict=True):
            for a, b in pairs:
                gpu.wgmma(acc, a, b)
        return [acc[...] for acc in accs]

    return pl.run_scoped(every, *[gpu.ACC((CHUNK, CHUNK), jnp.float32)] * len(sums))


def number(s: Any, slot: Any, which: int, axis: int = 1) -> Float[Array, " 64"]:
    """Load a number of each token: of the rows of a matrix, or of its columns."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    return gpu.load(s.numbers_s.at[slot, which], *ALL, layout=gpu.Layout.WGMMA.reduce(axis))


def across(x: Array, n: int) -> Array:
    """Repeat a number of each row in n columns."""
    return jax.lax.broadcast_in_dim(x, (CHUNK, n), [0])


def down(x: Array) -> Array:
    """Repeat a number of each column in all rows."""
    return jax.lax.broadcast_in_dim(x, (CHUNK, CHUNK), [1])
