"""How chunks with a decay of each key channel are walked on Hopper, from what `delta_channels_gpu.prepare` gives.

A chunk's o and the state after it, with the names of `Prepared`: w = solve (v - seen S), o = reads S + pairs w,
S <- D S + wrote^T w. Back from the gradients of o to those of v and of S, with the same.
Interpreted on CPU and compiled for H100; it has not run on a GPU.
"""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fdel.kernels import transfer_gpu
from fdel.kernels.delta_channels_gpu import Prepared
from fdel.kernels.delta_walk_gpu import (
    CHUNK,
    HALF,
    REGISTERS,
    WALKERS,
    WIDTH,
    across,
    clear,
    give,
    give_state,
    launch,
    number,
    parts,
    pipeline,
    products,
    zero,
)

WIDE, OWN = ("reads_s", "seen_s", "wrote_s", "x_s"), {"new_s": (WALKERS, 2, CHUNK, HALF)}  # of a walk, see `launch`


def walk(
    prepared: Prepared, x: Float[Array, "B T NH"], valid: Float[Array, "B T"], whole: Int[Array, "B chunks"], *,
    keep: bool, back: bool = False, interpreted: bool = False,
) -> tuple[Array, ...]:  # fmt: skip
    """Walk heads' chunks: from v to o, or `back` from the gradient of o to that of v.

    With `keep` also the states before each chunk [B N chunks keys values], or the gradients of those after it.
    """
    (b, t, _), heads = x.shape, prepared.solve.shape[1]
    results = (x.shape, (b, heads, t // CHUNK, WIDTH, WIDTH))[: 2 if keep else 1]
    program = functools.partial(_program, back=back, interpreted=interpreted)
    call = launch(program, results, x.dtype, (b, heads), WIDE, OWN, (WIDTH,), copies=7)
    return call(*prepared[:6], x, valid, whole)


def _program(*refs: Any, back: bool, interpreted: bool, **memory: Any) -> None:
    """Walk the chunks of a head; `refs` are the arguments and the results of `walk`'s kernel."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    *given, x, valid, whole, out = refs[:10]
    kept: Any = refs[10:]
    p: Any = Prepared(*given)
    row, head = (jax.lax.axis_index(name) for name in ("row", "head"))
    s, count = SimpleNamespace(**memory), whole.shape[1]
    chunk = lambda i: count - 1 - i if back else i
    tokens = lambda i: pl.ds(chunk(i) * CHUNK, CHUNK)

    def fetch(i: Any, slot: Any) -> None:
        for y, to in ((p.reads, s.reads_s), (p.seen, s.seen_s), (p.wrote, s.wrote_s), (x, s.x_s)):
            gpu.copy_gmem_to_smem(y.at[row, tokens(i), pl.ds(head * WIDTH, WIDTH)], to.at[slot], s.full.at[slot])
        for y, to in ((p.solve, s.solve_s), (p.pairs, s.pairs_s)):
            gpu.copy_gmem_to_smem(y.at[row, head, tokens(i)], to.at[slot], s.full.at[slot])
        decays = p.decays.at[row, head, pl.ds(chunk(i) * WIDTH, WIDTH)]
        gpu.copy_gmem_to_smem(decays, s.numbers_s.at[slot], s.full.at[slot])

    def prepare(i: Any, slot: Any) -> None:
        pl.when(whole[row, chunk(i)] == 0)(lambda: clear([s.x_s.at[slot]], valid.at[row, tokens(i)]))
        gpu.barrier_arrive(s.ready.at[slot])

    def step(i: Any, slot: Any, own: Any, state: list[Array]) -> list[Array]:
        if kept:
            gpu.copy_smem_to_gmem(own.state, kept[0].at[row, head, chunk(i), :, own.columns])
        to = out.at[row, tokens(i), pl.ds(head * WIDTH + own.mine * HALF, HALF)]
        return walk_chunk(s, own, slot, to, state, _back if back else ahead)

    pipeline(s, count, fetch, prepare, step, None if interpreted else REGISTERS)


def walk_chunk(s: Any, own: Any, slot: Any, to: Any, state: list[Array], way: Callable) -> list[Array]:
    """Send outputs of a chunk `to` memory, or dv, if the way is not `ahead` but `_back`; give the state after it."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    decays = [across(number(s.numbers_s.at[slot, pl.ds(n, HALF)]), HALF) for n in range(0, WIDTH, HALF)]
    more = way(s, own, slot, to)
    state = [decay * old + x for decay, old, x in zip(decays, state, more, strict=True)]
    gpu.barrier_arrive(s.free.at[slot])
    gpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the state, which is written over, too
    give_state(own, state)
    return state


def ahead(s: Any, own: Any, slot: Any, to: Any) -> list[Array]:
    """Send outputs of a chunk `to` memory, and return what it adds to the state."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    read = own.read(zero(s.numbers_s[slot, 0]))
    seen = products([(s.seen_s.at[slot], read.state)])[0]
    v = transfer_gpu.load(s.x_s.at[slot, :, own.columns], layout=gpu.Layout.WGMMA).astype(jnp.float32)
    give(own.new.at[0], v - seen)
    give(own.new.at[1], products([(s.solve_s.at[slot], read.new.at[0])])[0])
    out = products([(s.reads_s.at[slot], read.state), (s.pairs_s.at[slot], read.new.at[1])])[0]
    give(own.new.at[0], out)
    gpu.copy_smem_to_gmem(own.new.at[0], to)
    return products(*([(part.transpose((1, 0)), read.new.at[1])] for part in parts(s.wrote_s.at[slot], 1)))


def _back(s: Any, own: Any, slot: Any, to: Any) -> list[Array]:
    """Send dv of a chunk `to` memory, and return what it adds to the gradient of the state."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    dy, turned = s.x_s.at[slot, :, own.columns], lambda ref: ref.transpose((1, 0))
    given = products([(turned(s.pairs_s.at[slot]), dy), (s.wrote_s.at[slot], own.state)])[0]
    give(own.new.at[0], given)
    dv = products([(turned(s.solve_s.at[slot]), own.new.at[0])])[0]
    give(own.new.at[1], dv)
    give(own.new.at[0], -dv)
    gpu.copy_smem_to_gmem(own.new.at[1], to)
    both = zip(parts(s.reads_s.at[slot], 1), parts(s.seen_s.at[slot], 1), strict=True)
    return products(*([(turned(a), dy), (turned(b), own.new.at[0])] for a, b in both))
