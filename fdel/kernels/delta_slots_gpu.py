"""Prompts of several sequences through a delta rule on NVIDIA Hopper: the programs of `gated_delta_rule_gpu` over blocks.

A program takes a head and one sequence of the call: two groups of warps walk its chunks of 64 tokens, each with half of the
state, which comes from its slot, in float32, and goes back; the third prepares chunks. Blocks are read where they lie;
outputs have the layout of chunks, of which XLA takes those of tokens. With a decay of each channel a kernel of its own
prepares all chunks before, for which XLA lays log decays out.
Interpreted on CPU and compiled for H100; it has not run on a GPU.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fdel.kernels import delta_channels_walk_gpu as channels
from fdel.kernels import delta_program_gpu as heads
from fdel.kernels import recurrent_decode_gpu, slots, transfer_gpu
from fdel.kernels import slots_gpu as walking
from fdel.kernels.delta_channels_backward_gpu import log2_decays
from fdel.kernels.delta_channels_gpu import prepare
from fdel.kernels.delta_walk_gpu import (
    CHUNK,
    HALF,
    WALKERS,
    WIDTH,
    clear,
    memory,
    parameters,
    pipeline,
    place_of,
    rows_of,
)
from fdel.ops.batch import Paged
from fdel.ops.carry import Carry

BLOCK = 16  # tokens of a block at least


def unsupported(batch: Paged, carry: Carry | None, q: Array, k: Array, v: Array) -> str | None:
    """Say why `call` cannot serve blocks of several tokens, or None."""
    if why := recurrent_decode_gpu.unsupported(batch, carry, (*k.shape[-2:], v.shape[-1]), q, k, v):
        return why
    if batch.block < BLOCK or CHUNK % batch.block and batch.block % CHUNK:
        return f"blocks of {batch.block} tokens; expected 1, or from {BLOCK} on what divides {CHUNK} or is a multiple of it"
    if q.dtype != jnp.bfloat16:
        return f"it multiplies bfloat16 in blocks of several tokens; found {q.dtype}"
    if k.shape[-1] != WIDTH or v.shape[-1] != WIDTH:
        found = f"{k.shape[-1]} channels of keys and {v.shape[-1]} of values"
        return f"{found}, in blocks of several tokens; expected {WIDTH}"
    return None


def call(
    batch: Paged, carry: Carry, layer: Any, q: Float[Array, "T N H"], k: Float[Array, "T N H"],
    v: Float[Array, "T N H"], g: Float[Array, "T N"] | Float[Array, "T N H"], beta: Float[Array, "T N"],
) -> tuple[Float[Array, "T N H"], Carry]:  # fmt: skip
    """Compute as `gated_delta_rule`."""
    states, flat, size = carry.slots.ssm, lambda x: x.reshape(len(x), -1), min(batch.block, CHUNK)
    plan, chunks = walking.walks(batch, states.shape[1], layer, CHUNK)
    q, k, v, shape = flat(q), flat(k), flat(v), v.shape
    if g.ndim == 2:
        program, ins = partial(_heads, size=size), {"q": q, "k": k, "v": v, **_of_heads(plan, g, beta)}
        scratch = memory(v.dtype, heads.WIDE, heads.OWN, (heads.VALID, CHUNK), 1 + 3 * (CHUNK // size))
    else:
        program = partial(_channels, size=size)
        ins = {"v": v, **_of_channels(plan, q, k, g, beta)}
        scratch = memory(v.dtype, channels.WIDE, channels.OWN, (WIDTH,), 6 + CHUNK // size)
    grid = {"chunk": len(plan.blocks), "head": shape[1], "warps": WALKERS + 1}
    out = jax.ShapeDtypeStruct((1, plan.valid.size, v.shape[1]), v.dtype)
    run = partial(walking.in_place, program, "gated_delta_rule_prefill", grid, {**ins, "chunks": chunks}, out)
    y, states = run(states, scratch, parameters())
    return slots.taken(plan, y).reshape(shape), slots.remembered(carry, states)


def _of_heads(plan: slots.Plan, g: Float[Array, "T N"], beta: Float[Array, "T N"]) -> dict[str, Array]:
    """Give the numbers of chunks, and which are whole, where a sequence's first token has no state to decay."""
    valid, laid = plan.valid[..., None], lambda x: slots.laid(plan, x.astype(jnp.float32))
    numbers = heads.numbers_of(plan.valid, log2_decays(laid(g), valid, False), jnp.where(valid, laid(beta), 0))
    return {"numbers": numbers[0], "whole": _whole(plan)}


def _of_channels(
    plan: slots.Plan, q: Float[Array, "T NH"], k: Float[Array, "T NH"], g: Float[Array, "T N H"],
    beta: Float[Array, "T N"],
) -> dict[str, Array]:  # fmt: skip
    """Prepare chunks."""
    valid, logs = plan.valid[..., None], slots.laid(plan, g.astype(jnp.float32).reshape(len(g), -1))
    beta = jnp.where(valid, slots.laid(plan, beta.astype(jnp.float32)), 0)
    numbers = rows_of([jnp.zeros_like(valid), beta, place_of(beta.shape[1]), valid], beta.shape)
    whole = jnp.where(plan.valid.reshape(-1, CHUNK).any(1), _whole(plan), -1)
    prepared = prepare(q[None], k[None], logs, numbers, whole[None], keys=False, blocks=plan.blocks.astype(jnp.int32))
    found = {name: x[0] for name, x in prepared._asdict().items() if x is not None}
    return {**found, "valid": plan.valid[0].astype(jnp.float32), "whole": whole}


def _whole(plan: slots.Plan) -> Int[Array, " chunks"]:
    return plan.valid.reshape(-1, CHUNK).all(1).astype(jnp.int32)


def _heads(r: SimpleNamespace, *, size: int) -> None:
    """Walk the chunks of the sequence that begins in this one, if any does, with decays of heads."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    first, head = (jax.lax.axis_index(name) for name in ("chunk", "head"))
    count, tokens = r.chunks[walking.COUNT, first], lambda c: pl.ds((first + c) * CHUNK, CHUNK)

    def fetch(c: Any, slot: Any) -> None:
        for i in range(CHUNK // size):
            block, to = r.chunks[walking.BLOCKS + i, first + c], pl.ds(i * size, size)
            here = pl.ds(block * size, size), pl.ds(head * WIDTH, WIDTH)
            for x, copy in ((r.q, r.q_s), (r.k, r.k_s), (r.v, r.v_s)):
                gpu.copy_gmem_to_smem(x.at[here], copy.at[slot, to], r.full.at[slot])
        numbers = r.numbers.at[head, pl.ds(0, heads.VALID), tokens(c)]
        gpu.copy_gmem_to_smem(numbers, r.numbers_s.at[slot], r.full.at[slot])

    def prepared(c: Any, slot: Any) -> None:
        real = r.numbers.at[head, heads.VALID, tokens(c)]
        pl.when(r.whole[first + c] == 0)(lambda: clear([x.at[slot] for x in (r.q_s, r.k_s, r.v_s)], real))
        heads.prepare_chunk(r, slot)
        gpu.barrier_arrive(r.ready.at[slot])

    def walk(c: Any, slot: Any, own: Any, state: list[Array]) -> list[Array]:
        state = heads.walk_chunk(r, own, slot, state)
        gpu.copy_smem_to_gmem(own.new.at[0], r.out.at[0, tokens(c), pl.ds(head * WIDTH + own.mine * HALF, HALF)])
        return state

    come, go = partial(_come, r, r.numbers.shape[0], head, first), partial(_go, r, r.numbers.shape[0], head, first)
    pl.when(count > 0)(lambda: pipeline(r, count, fetch, prepared, walk, start=come, end=go))


def _channels(r: SimpleNamespace, *, size: int) -> None:
    """Walk them with decays of channels, from what is prepared."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    first, head = (jax.lax.axis_index(name) for name in ("chunk", "head"))
    count, tokens = r.chunks[walking.COUNT, first], lambda c: pl.ds((first + c) * CHUNK, CHUNK)

    def fetch(c: Any, slot: Any) -> None:
        copy = lambda x, to: gpu.copy_gmem_to_smem(x, to, r.full.at[slot])
        for x, to in ((r.reads, r.reads_s), (r.seen, r.seen_s), (r.wrote, r.wrote_s)):
            copy(x.at[tokens(c), pl.ds(head * WIDTH, WIDTH)], to.at[slot])
        for x, to in ((r.solve, r.solve_s), (r.pairs, r.pairs_s)):
            copy(x.at[head, tokens(c)], to.at[slot])
        copy(r.decays.at[head, pl.ds((first + c) * WIDTH, WIDTH)], r.numbers_s.at[slot])
        for i in range(CHUNK // size):
            here = pl.ds(r.chunks[walking.BLOCKS + i, first + c] * size, size), pl.ds(head * WIDTH, WIDTH)
            copy(r.v.at[here], r.x_s.at[slot, pl.ds(i * size, size)])

    def prepared(c: Any, slot: Any) -> None:
        pl.when(r.whole[first + c] == 0)(lambda: clear([r.x_s.at[slot]], r.valid.at[tokens(c)]))
        gpu.barrier_arrive(r.ready.at[slot])

    def walk(c: Any, slot: Any, own: Any, state: list[Array]) -> list[Array]:
        to = r.out.at[0, tokens(c), pl.ds(head * WIDTH + own.mine * HALF, HALF)]
        return channels.walk_chunk(r, own, slot, to, state, channels.ahead)

    come, go = partial(_come, r, r.solve.shape[0], head, first), partial(_go, r, r.solve.shape[0], head, first)
    pl.when(count > 0)(lambda: pipeline(r, count, fetch, prepared, walk, start=come, end=go))


def _states(r: SimpleNamespace, count: int, head: Any, place: Any, own: Any) -> list[Any]:
    """Give where a group of warps' part of a head's state lies, of so many heads: two halves of the keys."""
    from jax.experimental import pallas as pl

    rows = [pl.ds((place * count + head) * WIDTH + i, CHUNK) for i in range(0, WIDTH, CHUNK)]
    return [r.states.at[some, own.columns] for some in rows]


def _come(r: SimpleNamespace, count: int, head: Any, first: Any, own: Any) -> list[Array]:
    """Read the state of the sequence that begins in a chunk, if it goes on; that of a new one is nothing."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    load = partial(transfer_gpu.load, layout=gpu.Layout.WGMMA, optimized=False)
    place = r.chunks[walking.FROM, first]
    return [jnp.where(place >= 0, load(x), 0.0) for x in _states(r, count, head, jnp.maximum(place, 0), own)]


def _go(r: SimpleNamespace, count: int, head: Any, first: Any, own: Any, state: list[Array]) -> None:
    """Write its state to its slot, unless another sequence takes that in this call."""
    from jax.experimental import pallas as pl

    place = r.chunks[walking.TO, first]

    @pl.when(place >= 0)
    def _() -> None:
        for to, x in zip(_states(r, count, head, place, own), state, strict=True):
            to[...] = x
