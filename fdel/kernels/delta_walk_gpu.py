"""What programs of delta rules on Hopper share: how chunks of a head are walked, and products of 64 x 64.

A walk's program serves a head of a row. Chunks of 64 tokens are copied to shared memory, `DEPTH` at once; a third group of
warps prepares a chunk while `WALKERS` others walk the one before it, each with half of the values: their state stays in
registers in float32, and goes to shared memory in bfloat16 to be multiplied.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fdel.kernels import transfer_gpu

CHUNK, WIDTH, HALF = 64, 128, 64  # tokens of a chunk, channels of a key and of a value, values of a group of warps
WALKERS, DEPTH = 2, 2  # groups of warps that walk, chunks on their way
REGISTERS = 104, 200  # of a thread that prepares and of one that walks, where both would not do with 168


def launch(
    program: Callable, results: Iterable[tuple[int, ...]], dtype: Any, grid: tuple[int, int], wide: tuple[str, ...],
    own: Mapping[str, tuple[int, ...]], numbers: tuple[int, ...], copies: int,
) -> Callable:  # fmt: skip
    """Make a kernel of rows and heads: one group of warps prepares, `WALKERS` walk. `copies` fill a chunk's part of memory.

    Its memory: `wide` inputs and the `numbers` of chunks on their way, what is prepared of them, a state, and its `own`.
    """
    from jax.experimental.pallas import mosaic_gpu as gpu

    return gpu.kernel(
        program,
        kernel_name="delta_walk",
        out_type=tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in results),
        scratch_types=memory(dtype, wide, own, numbers, copies),
        grid=grid,
        grid_names=("row", "head"),
        num_threads=WALKERS + 1,
        thread_name="warps",
        compiler_params=parameters(),
    )


def parameters() -> Any:
    """Give the compiler's; sums take less memory than it would give them, which is needed here."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    return gpu.CompilerParams(lowering_semantics=gpu.LoweringSemantics.Lane, reduction_scratch_bytes=1024)


def memory(
    dtype: Any, wide: tuple[str, ...], own: Mapping[str, tuple[int, ...]], numbers: tuple[int, ...], copies: int
) -> dict[str, Any]:
    """Give what a walk needs of shared memory, as `launch` has it."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    shapes: dict[str, tuple[int, ...]] = {
        **dict.fromkeys(wide, (DEPTH, CHUNK, WIDTH)), "solve_s": (DEPTH, CHUNK, CHUNK), "pairs_s": (DEPTH, CHUNK, CHUNK),
        "state_s": (WALKERS, WIDTH, HALF), **own,
    }  # fmt: skip
    return {
        **operands(shapes, dtype),
        "numbers_s": gpu.SMEM((DEPTH, *numbers), jnp.float32),
        "full": gpu.Barrier(num_arrivals=copies, num_barriers=DEPTH), "ready": gpu.Barrier(num_barriers=DEPTH),
        "free": gpu.Barrier(num_arrivals=WALKERS, num_barriers=DEPTH),
    }  # fmt: skip


def operands(shapes: Mapping[str, tuple[int, ...]], dtype: Any) -> dict[str, Any]:
    """Lay shared memory out for operands of products."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    half: Any = functools.partial(
        gpu.SMEM, dtype=dtype, transforms=(gpu.TilingTransform((8, 64)), gpu.SwizzleTransform(128))
    )
    return {name: half(shape) for name, shape in shapes.items()}


def pipeline(
    s: Any, count: Any, fetch: Callable[[Any, Any], None], prepare: Callable[[Any, Any], None],
    walk: Callable[[Any, Any, Any, list[Array]], list[Array]], registers: tuple[int, int] | None = None,
    start: Callable[[Any], list[Array]] | None = None, end: Callable[[Any, list[Array]], None] = lambda *_: None,
) -> None:  # fmt: skip
    """Take a head's `count` chunks in order: `fetch` each to its slot of memory, `prepare` it, `walk` it with the state.

    fetch(i, slot) starts the copies that `s.full` counts. prepare(i, slot) arrives at `s.ready` itself, and may go on after
    it. walk(i, slot, own, state) gives the state, and arrives at `s.free` as soon as the slot is no more read; own.read(0)
    are its parts of the memory for products, see `zero`. `registers` are those of a thread that prepares and of one that
    walks, if not 168 each; the interpreter has none.

    start(own) gives the state before the first chunk, if not zeros, end(own, state) gets that after the last. `count` may
    also be a number that only the program finds; there is a chunk then.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    mine = jax.lax.axis_index("warps")
    slot_of = lambda i: jax.lax.rem(i, jnp.int32(DEPTH))

    @pl.when(mine == WALKERS)
    def _() -> None:
        def step(i: Any, _: None) -> None:
            gpu.barrier_wait(s.full.at[slot_of(i)])
            prepare(i, slot_of(i))

        if registers:
            gpu.set_max_registers(registers[0], action="decrease")
        jax.lax.fori_loop(0, count, step, None)
        gpu.wait_smem_to_gmem(0)

    def walking(mine: int) -> None:
        if registers:
            gpu.set_max_registers(registers[1], action="increase")
        for i in range(0 if mine else DEPTH):
            pl.when(i < count)(functools.partial(fetch, jnp.int32(i), jnp.int32(i)))
        own, begun = begin(s, mine, start)

        def step(i: Any, state: list[Array]) -> list[Array]:
            slot = slot_of(i)

            def fetch_next() -> None:
                gpu.barrier_wait(s.free.at[slot])
                fetch(i + DEPTH, slot)

            gpu.barrier_wait(s.full.at[slot])
            gpu.barrier_wait(s.ready.at[slot])
            state = walk(i, slot, own, state)
            if mine == 0:
                pl.when(i + DEPTH < count)(fetch_next)
            return state

        end(own, jax.lax.fori_loop(0, count, step, begun))
        gpu.wait_smem_to_gmem(0)

    for walker in range(WALKERS):  # a program for each: of addresses that depend on a number some would be spilled
        pl.when(mine == walker)(functools.partial(walking, walker))


def begin(s: Any, mine: int, start: Callable[[Any], list[Array]] | None) -> tuple[Any, list[Array]]:
    """Give a group of warps that walks its parts of the memory, and a state: zeros, or what start(parts) gives."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    own = SimpleNamespace(**vars(parts_of(s, mine, 0)), read=functools.partial(parts_of, s, mine))
    nothing = [gpu.layout_cast(jnp.zeros((CHUNK, HALF), jnp.float32), gpu.Layout.WGMMA)] * 2
    state = start(own) if start else nothing
    give_state(own, state)
    return own, state


def parts_of(s: Any, mine: int, none: Any) -> SimpleNamespace:
    """Give a group of warps its parts of the memory; `none` is 0."""
    from jax.experimental import pallas as pl

    n = mine + none
    return SimpleNamespace(state=s.state_s.at[n], new=s.new_s.at[n], columns=pl.ds(mine * HALF, HALF), mine=mine)


def zero(x: Any) -> Any:
    """Give 0, of a number that is read in a loop and is never negative, which the compiler cannot know.

    Added to the index of an operand, it has the descriptors of its products computed where they are needed. The compiler
    would compute all of them before the loop, and spill them or what they leave no registers.
    """
    return (x < 0).astype(jnp.int32)


def of_slot(slot: Any, load: Callable[[int], Array]) -> Array:
    """Give load(slot), by a program for each slot: its addresses are those of what is written and a constant, no others."""
    return jax.lax.cond(slot == 0, *(functools.partial(load, n) for n in range(DEPTH)))


def clear(refs: list[Any], valid: Any) -> None:
    """Write zeros over padding, which may be NaN."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    real = across(transfer_gpu.load(valid, layout=gpu.Layout.WGMMA.reduce(1), optimized=False), CHUNK) > 0
    for ref in refs:
        for part in parts(ref, 1):
            x = transfer_gpu.load(part, layout=gpu.Layout.WGMMA)
            part[...] = jnp.where(real, x, jnp.zeros_like(x))
    gpu.commit_smem()


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


def invert(
    a: Array, high: Any, low: Any, turns: list[Any], places: Callable[[], tuple[Array, Array]],
    *beside: list[tuple[Any, Any]], reads: list[Any] | None = None,
) -> list[Array]:  # fmt: skip
    """Invert I + a, of a strictly lower triangular [64 64], and give sums of products that are computed `beside` the last.

    By doubling: neighbours X and Y with L below X become X, Y and -Y L X below X, for blocks of 1, 2, ... 32 tokens, all
    blocks of a size in two products of 64 x 64 x 64. Powers of a are not taken: they grow and cancel. Operands in bfloat16
    leave 1.5% where keys are nearly equal, so a step of Newton's follows, X + X (I - (I + a) X), with a in two parts: 1e-4
    are left, less than the inverse loses where it is rounded for its product.

    Warps of a group do not wait for each other's products. So no buffer is written before a `commit_smem`, which lets all
    arrive, has followed the last product that read it: three take `turns`. `places` gives rows and columns when asked.
    `reads` are high, low and turns as products read them, if they do so in another way; see `zero`.
    """
    high_read, low_read, *read = reads or [high, low, *turns]
    where = lambda found, x: jnp.where(found, x, jnp.zeros_like(x))
    low[...] = (a - a.astype(low.dtype).astype(jnp.float32)).astype(low.dtype)
    give(high, a)
    i, j = places()
    x = jnp.where(i == j, 1.0, 0.0) - where(jax.lax.bitwise_xor(i, j) == 1, a)
    for level in range(1, 6):
        block, below = (2 * level - 2) % 3, (2 * level - 1) % 3
        give(turns[block], x)
        product = products([(read[block], high_read)])[0]
        far = jax.lax.bitwise_xor(*places())  # its highest bit: the size of the blocks that part i from j
        give(turns[below], where((far >= 1 << level) & (far < 2 << level), product))
        x = x - products([(read[below], read[block])])[0]
    inverse, error = 1, 0
    give(turns[inverse], x)
    product = products([(high_read, read[inverse]), (low_read, read[inverse])])[0]
    x, (i, j) = x.astype(low.dtype).astype(jnp.float32), places()
    give(turns[error], jnp.where(i == j, 1.0, 0.0) - x - product)
    more, *others = products([(read[inverse], read[error])], *beside)
    return [x + more, *others]


def rows_of(each: Iterable[Array], shape: tuple[int, ...]) -> Float[Array, "B N numbers T"]:
    """Lay numbers of tokens and heads, of this shape [B T N], out as rows."""
    return jnp.stack([jnp.broadcast_to(x.astype(jnp.float32), shape) for x in each]).transpose(1, 3, 0, 2)


def place_of(t: int) -> Int[Array, "T 1"]:
    """Give tokens' places in their chunks."""
    return (jnp.arange(t) % CHUNK)[:, None]


def number(ref: Any, axis: int = 1) -> Float[Array, " 64"]:
    """Load a number of each row of a matrix, or of its columns."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    return transfer_gpu.load(ref, layout=gpu.Layout.WGMMA.reduce(axis))


def places(ref: Any) -> tuple[Array, Array]:
    """Give the rows and the columns of pairs. They are read, whenever asked for: ptxas spills masks that it can keep."""
    row, column = (number(ref, axis).astype(jnp.int32) for axis in (1, 0))
    return across(row, CHUNK), down(column)


def across(x: Array, n: int) -> Array:
    """Repeat a number of each row in n columns."""
    return jax.lax.broadcast_in_dim(x, (CHUNK, n), [0])


def down(x: Array) -> Array:
    """Repeat a number of each column in all rows."""
    return jax.lax.broadcast_in_dim(x, (CHUNK, CHUNK), [1])
