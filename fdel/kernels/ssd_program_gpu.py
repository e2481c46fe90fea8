"""The program of `ssd_gpu`: a group of warps walks a row's chunks for 64 channels of a head, whose states it keeps.

The numbers of a chunk and a head are rows of `CHUNK` float32: the log decays, of base 2, summed up to each token; the step;
and the token's place in the chunk, from 1, which is negative for padding, and larger by WHOLE in a chunk that has none.
Log decays are at least -NOTHING, which leaves nothing of a float32, also where a sequence begins. So sums stay below 2^14
and their differences are right to 2^-10, a quarter of what bfloat16 leaves, after the strongest decays, and to 2^-16 where
they stay below 2^8.
"""

import functools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fdel.kernels import transfer_gpu

CHUNK, WIDTH = 64, 64  # tokens of a chunk, channels of a program: what one product of a group of warps gives
DEPTH = 2  # chunks on their way; two programs of 128 states then share a multiprocessor's memory
LOG, STEP, PLACE, NUMBERS = range(4)  # rows of numbers, and how many there are
NOTHING, WHOLE = 160.0, 1000.0
STATES = (128, 64)  # of a channel in a program; of 256 the registers spill
LOG2E = math.log2(math.e)


class About(NamedTuple):
    """Channels of a head, states of a channel, heads that share b and c; `interpreted`: no operand stays in registers."""

    channels: int
    states: int
    share: int
    interpreted: bool = False

    def head(self, column: Any) -> Any:
        """Give the head of 64 channels."""
        return jax.lax.div(column, jnp.int32(self.channels // WIDTH))

    def group(self, column: Any) -> Any:
        """Give the group of b and c that 64 channels use."""
        return jax.lax.div(column, jnp.int32(self.channels // WIDTH * self.share))


def run(
    about: About, numbers: Float[Array, "B N chunks 3 C"], skip: Float[Array, " N"], inputs: list[Array], *, keep: bool
) -> list[Array]:
    """Run over x [B T N*H], b and c [B T G*S]: y [B T N*H]; with `keep` also the states before chunks [B chunks N*H S]."""
    x = inputs[0]
    shapes = [x.shape, (len(x), numbers.shape[2], x.shape[2], about.states)][: 1 + keep]
    states = {"x_s": WIDTH, "b_s": about.states, "c_s": about.states}
    program = functools.partial(_program, about=about)
    return walked(program, about, shapes, states, numbers, skip, *inputs)


def tiled(dtype: Any, *shape: int) -> Any:
    """Give shared memory for operands of products."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    width = 128 // jnp.dtype(dtype).itemsize
    return gpu.SMEM(shape, dtype, transforms=(gpu.TilingTransform((8, width)), gpu.SwizzleTransform(128)))


def walked(
    program: Callable, about: About, shapes: list[tuple[int, ...]], copied: dict[str, int], *args: Array
) -> list[Array]:
    """Run a program for each row and 64 channels. Of a chunk arrays of so many columns are `copied`, beside its numbers."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    x = args[2]
    scratch = {name: tiled(x.dtype, DEPTH, CHUNK, width) for name, width in copied.items()}
    scratch["state_s"], scratch["hand_s"] = tiled(x.dtype, WIDTH, about.states), tiled(x.dtype, CHUNK, WIDTH)
    if about.interpreted:
        scratch["operand_s"] = tiled(x.dtype, CHUNK, CHUNK)
    call = gpu.kernel(
        program,
        kernel_name="ssd",
        out_type=[jax.ShapeDtypeStruct(shape, x.dtype) for shape in shapes],
        scratch_types={
            **scratch,
            "numbers_s": gpu.SMEM((DEPTH, NUMBERS, CHUNK), jnp.float32),
            "full": gpu.Barrier(num_arrivals=1 + len(copied), num_barriers=DEPTH),
        },
        grid=(len(x), x.shape[2] // WIDTH),
        grid_names=("row", "column"),
        compiler_params=gpu.CompilerParams(lowering_semantics=gpu.LoweringSemantics.Lane, approx_math=True),
    )
    return call(*args)


def columns(about: About, column: Any) -> tuple[Any, Any]:
    """Give where 64 channels lie in x, and their states in b and c."""
    from jax.experimental import pallas as pl

    return pl.ds(column * WIDTH, WIDTH), pl.ds(about.group(column) * about.states, about.states)


def chunk_of(k: Any) -> Any:
    """Give the tokens of a chunk."""
    from jax.experimental import pallas as pl

    return pl.ds(k * CHUNK, CHUNK)


def _program(*refs: Any, about: About, **memory: Any) -> None:
    """Walk from the first chunk to the last; `refs` are the arguments and results of `run`."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    numbers, skips, x, b, c, y, *kept = refs
    row, column = (jax.lax.axis_index(name) for name in ("row", "column"))
    s, head, (here, shared) = SimpleNamespace(**memory), about.head(column), columns(about, column)
    count, skip = numbers.shape[2], skips[head]

    def fetch(k: Any) -> None:
        slot, some = jax.lax.rem(k, jnp.int32(DEPTH)), chunk_of(k)
        given = numbers.at[row, head, k], x.at[row, some, here], b.at[row, some, shared], c.at[row, some, shared]
        for ref, to in zip(given, (s.numbers_s, s.x_s, s.b_s, s.c_s), strict=True):
            gpu.copy_gmem_to_smem(ref, to.at[slot], s.full.at[slot])

    def step(k: Any, state: Array) -> Array:
        slot = jax.lax.rem(k, jnp.int32(DEPTH))
        gpu.barrier_wait(s.full.at[slot])
        keep = (lambda: gpu.copy_smem_to_gmem(s.state_s, kept[0].at[row, k, here])) if kept else None
        state = advance(about, s, slot, skip, state, keep)
        gpu.copy_smem_to_gmem(s.hand_s, y.at[row, chunk_of(k), here])
        pl.when(k + DEPTH < count)(lambda: fetch(k + DEPTH))
        return state

    for k in range(min(DEPTH, count)):
        fetch(jnp.int32(k))
    jax.lax.fori_loop(0, count, step, nothing(WIDTH, about.states))
    gpu.wait_smem_to_gmem(0)


def advance(about: About, s: Any, slot: Any, skip: Any, state: Array, keep: Callable | None = None) -> Array:
    """Give `hand_s` the outputs of a chunk in shared memory; return the state after it. keep() copies that before it."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    n, x_s, b_s, c_s = (ref.at[slot] for ref in (s.numbers_s, s.x_s, s.b_s, s.c_s))
    dtype = s.x_s.dtype
    pl.when(n[PLACE, 0] < WHOLE)(lambda: clear(n, x_s, b_s, c_s))
    if keep:
        gpu.wait_smem_to_gmem(0, wait_read_only=True)
    s.state_s[...] = state.astype(dtype)
    gpu.commit_smem()
    if keep:
        keep()

    def before(scores: Any, begun: Any) -> None:
        gpu.wgmma(scores, c_s, b_s.transpose((1, 0)))
        gpu.wgmma(begun, c_s, s.state_s.transpose((1, 0)))

    scores, begun = products(before, (CHUNK, CHUNK), (CHUNK, WIDTH))
    weights = scores * decays(n) * along(columns_of(n.at[STEP]))
    since, later, end = ends(n)
    token = values(x_s)
    if not keep:
        gpu.wait_smem_to_gmem(0, wait_read_only=True)
    s.hand_s[...] = (token * across(later * rows_of(n.at[STEP]))).astype(dtype)
    weights = operand(weights.astype(dtype), s.operand_s if about.interpreted else None)
    gpu.commit_smem()

    def after(out: Any, state: Any) -> None:
        gpu.wgmma(out, weights, x_s)
        gpu.wgmma(state, s.hand_s.transpose((1, 0)), b_s)

    sums = begun * across(since) + token * skip, state * end
    out, state = added(about, after, *sums)
    s.hand_s[...] = out.astype(dtype)
    gpu.commit_smem()
    return state


def numbers_of(valid: Array, step: Array, log: Array) -> Float[Array, "B N chunks 3 C"]:
    """Give the numbers of chunks and heads, of which tokens [B T] are some, and steps and log decays [B T N]."""
    cut = lambda y: y.reshape(len(y), -1, CHUNK, *y.shape[2:])
    real, place = cut(valid)[..., None], jnp.arange(1.0, CHUNK + 1)[:, None]
    place = jnp.where(real.all(2, keepdims=True), place + WHOLE, jnp.where(real, place, -place))
    rows = [jnp.cumsum(cut(log), 2), cut(step), jnp.broadcast_to(place, cut(log).shape)]
    return jnp.stack(rows, 2).transpose(0, 4, 1, 2, 3)


def zero(numbers: Any) -> Any:
    """Give 0, of the numbers of a chunk, read in a loop: added to the index of an operand, it has addresses computed there.

    The compiler, which does not know how large places are, would compute them before the loop, and spill others for them.
    """
    return (numbers[PLACE, 0] > 2 * WHOLE).astype(jnp.int32)


def products(multiply: Callable, *shapes: Any) -> list[Array]:
    """Give the sums, of these shapes, that multiply(*sums) makes from nothing."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    def of(*sums: Any) -> list[Array]:
        multiply(*sums)
        return [x[...] for x in sums]

    return pl.run_scoped(of, *[gpu.ACC(shape, jnp.float32) for shape in shapes])


def added(about: About, multiply: Callable, *begun: Array) -> list[Array]:
    """Give the sums that multiply(*sums) makes from those that were begun."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    if about.interpreted:  # it knows no sums that were begun elsewhere
        return [x + y for x, y in zip(begun, products(multiply, *[x.shape for x in begun]), strict=True)]
    return [*pl.run_state(lambda sums: multiply(*sums))(tuple(map(gpu.ACC.init, begun)))]


def operand(x: Array, memory: Any) -> Any:
    """Give the left side of a product: registers, or the memory that the interpreter asks for."""
    if memory is None:
        return x
    memory[...] = x
    return memory


def values(ref: Any) -> Float[Array, "C n"]:
    """Load what products read, in float32."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    return transfer_gpu.load(ref, layout=gpu.Layout.WGMMA).astype(jnp.float32)


def rows_of(ref: Any) -> Float[Array, " C"]:
    """Load a number for each row of a product."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    return transfer_gpu.load(ref, layout=gpu.Layout.WGMMA.reduce(1))


def columns_of(ref: Any) -> Float[Array, " C"]:
    """Load a number for each column of a product."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    return transfer_gpu.load(ref, layout=gpu.Layout.WGMMA.reduce(0))


def across(x: Float[Array, " C"], n: int = CHUNK) -> Float[Array, "C n"]:
    """Repeat a number of each row."""
    return jax.lax.broadcast_in_dim(x, (CHUNK, n), [0])


def along(x: Float[Array, " C"]) -> Float[Array, "C C"]:
    """Repeat a number of each column."""
    return jax.lax.broadcast_in_dim(x, (CHUNK, CHUNK), [1])


def nothing(rows: int, width: int) -> Array:
    """Give zeros, as products have them."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    return gpu.layout_cast(jnp.zeros((rows, width), jnp.float32), gpu.Layout.WGMMA)


def causal(n: Any, *, turned: bool = False) -> Array:
    """Tell which pairs have the token of a row no earlier than that of a column; if turned, no later.

    Places are read: the compiler would keep computed ones in registers, which are scarce.
    """
    row, column = (jnp.abs(x) for x in (across(rows_of(n.at[PLACE])), along(columns_of(n.at[PLACE]))))
    return row <= column if turned else column <= row


def decays(n: Any, *, turned: bool = False) -> Float[Array, "C C"]:
    """Give the decays from the token of a column to that of a row, which is no earlier; if turned, the other way."""
    of_row, of_column = across(rows_of(n.at[LOG])), along(columns_of(n.at[LOG]))
    log = of_column - of_row if turned else of_row - of_column
    return jnp.where(causal(n, turned=turned), jnp.exp2(log), 0)


def ends(n: Any) -> tuple[Array, Array, Any]:
    """Give the decays from the chunk's begin to each row's token, from there to the end, and of the whole chunk."""
    log, end = rows_of(n.at[LOG]), n[LOG, CHUNK - 1]
    return jnp.exp2(log), jnp.exp2(end - log), jnp.exp2(end)


def clear(n: Any, *refs: Any) -> None:
    """Write zeros over padding, which may hold NaN, 64 columns at a time."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    real = across(rows_of(n.at[PLACE])) > 0
    for ref in refs:
        for first in range(0, ref.shape[1], CHUNK):
            some = ref.at[:, pl.ds(first, CHUNK)]
            value = transfer_gpu.load(some, layout=gpu.Layout.WGMMA)
            some[...] = jnp.where(real, value, jnp.zeros_like(value))
    gpu.commit_smem()
