"""Prompts of several sequences through `ssd` on NVIDIA Hopper: the program of `ssd_program_gpu` over an engine's blocks.

A program takes 64 channels of a head and one sequence of the call: the state [64 S] comes from its slot, in float32,
goes through the sequence's chunks of 64 tokens in registers, and back. Blocks are read where they lie; outputs have the
layout of chunks, of which XLA takes those of tokens. More states than a program has are several calls in turn.
Interpreted on CPU, and measured on an H100 (docs/kernels_hopper.md).
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fdel.kernels import slots, transfer_gpu
from fdel.kernels import slots_gpu as walking
from fdel.kernels import ssd_program_gpu as shared
from fdel.kernels.ssd_program_gpu import CHUNK, DEPTH, LOG2E, NOTHING, NUMBERS, STATES, WIDTH, About
from fdel.ops.batch import Paged
from fdel.ops.carry import Carry

BLOCK = 16  # tokens of a block at least


def unsupported(batch: Paged, x: Array, b: Array, c: Array) -> str | None:
    """Say why `call` cannot serve blocks of several tokens, or None; slots are `recurrent_decode_gpu`'s to judge."""
    if batch.block < BLOCK or CHUNK % batch.block and batch.block % CHUNK:
        return f"blocks of {batch.block} tokens; expected 1, or from {BLOCK} on what divides {CHUNK} or is a multiple of it"
    if others := {str(y.dtype) for y in (x, b, c)} - {"bfloat16"}:
        return f"it multiplies bfloat16 in blocks of several tokens; found {', '.join(sorted(others))}"
    if x.shape[-1] % WIDTH or b.shape[-1] % STATES[-1]:
        found = f"heads of {x.shape[-1]} channels with {b.shape[-1]} states, in blocks of several tokens"
        return f"{found}; expected multiples of {WIDTH} and of {STATES[-1]}"
    return None


def call(
    interpreted: bool, batch: Paged, carry: Carry, layer: Any, x: Float[Array, "T N H"], dt: Float[Array, "T N"],
    a: Float[Array, " N"], b: Float[Array, "T G S"], c: Float[Array, "T G S"], d: Float[Array, " N"],
) -> tuple[Float[Array, "T N H"], Carry]:  # fmt: skip
    """Compute as `ssd`; `interpreted`: see `About`."""
    states, flat = carry.slots.ssm, lambda y: y.reshape(len(y), -1)
    plan, chunks = walking.walks(batch, states.shape[1], layer, CHUNK)
    valid = plan.valid
    step = jnp.where(valid[..., None], slots.laid(plan, dt.astype(jnp.float32)), 0)
    log = jnp.maximum(step * (a.astype(jnp.float32) * LOG2E), -NOTHING)
    numbers = shared.numbers_of(valid, step, log)[0]
    size = next(n for n in STATES if b.shape[-1] % n == 0)
    about, total = About(x.shape[2], size, x.shape[1] // b.shape[1], interpreted), jnp.zeros(())
    for i in range(b.shape[-1] // size):
        some, skip = slice(i * size, (i + 1) * size), d.astype(jnp.float32) if i == 0 else jnp.zeros(len(d))
        ins = {"numbers": numbers, "skips": skip, "chunks": chunks, "x": flat(x)}
        ins |= {"b": flat(b[..., some]), "c": flat(c[..., some])}
        y, states = _run(about, min(batch.block, CHUNK), i, ins, states)
        total = total + y.astype(jnp.float32) if b.shape[-1] > size else y
    return slots.taken(plan, total).astype(x.dtype).reshape(x.shape), slots.remembered(carry, states)


def _run(about: About, size: int, part: int, ins: dict[str, Array], states: Array) -> tuple[Array, Array]:
    """Run over blocks of so many tokens, with one part of the states."""
    from jax.experimental.pallas import mosaic_gpu as gpu

    x, count = ins["x"], ins["numbers"].shape[1]
    widths = {"x_s": WIDTH, "b_s": about.states, "c_s": about.states}
    scratch = {name: shared.tiled(x.dtype, DEPTH, CHUNK, width) for name, width in widths.items()}
    scratch |= {"state_s": shared.tiled(x.dtype, WIDTH, about.states), "hand_s": shared.tiled(x.dtype, CHUNK, WIDTH)}
    if about.interpreted:
        scratch["operand_s"] = shared.tiled(x.dtype, CHUNK, CHUNK)
    scratch["numbers_s"] = gpu.SMEM((DEPTH, NUMBERS, CHUNK), jnp.float32)
    scratch["full"] = gpu.Barrier(num_arrivals=1 + 3 * (CHUNK // size), num_barriers=DEPTH)
    program = partial(_program, about=about, size=size, part=part)
    grid = {"chunk": count, "column": x.shape[1] // WIDTH}
    out = jax.ShapeDtypeStruct((1, count * CHUNK, x.shape[1]), x.dtype)
    parameters = gpu.CompilerParams(lowering_semantics=gpu.LoweringSemantics.Lane, approx_math=True)
    return walking.in_place(program, "ssd_prefill", grid, ins, out, states, scratch, parameters)


def _program(r: SimpleNamespace, *, about: About, size: int, part: int) -> None:
    """Walk the chunks of the sequence that begins in this one, if any does."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    first, column = (jax.lax.axis_index(name) for name in ("chunk", "column"))
    head, (here, mine), skip = about.head(column), shared.columns(about, column), r.skips[about.head(column)]
    count, parts = r.chunks[walking.COUNT, first], CHUNK // size

    def fetch(k: Any) -> None:
        slot = jax.lax.rem(k, jnp.int32(DEPTH))
        gpu.copy_gmem_to_smem(r.numbers.at[head, first + k], r.numbers_s.at[slot], r.full.at[slot])
        for i in range(parts):
            block, to = r.chunks[walking.BLOCKS + i, first + k], pl.ds(i * size, size)
            for ref, columns, memory in ((r.x, here, r.x_s), (r.b, mine, r.b_s), (r.c, mine, r.c_s)):
                gpu.copy_gmem_to_smem(ref.at[pl.ds(block * size, size), columns], memory.at[slot, to], r.full.at[slot])

    def states_of(place: Any) -> Any:
        rows = pl.ds(place * r.x.shape[1] + column * WIDTH, WIDTH)
        return r.states.at[rows, pl.ds(part * about.states, about.states)]

    def step(k: Any, state: Array) -> Array:
        slot = jax.lax.rem(k, jnp.int32(DEPTH))
        gpu.barrier_wait(r.full.at[slot])
        state = shared.advance(about, r, slot, skip, state)
        gpu.copy_smem_to_gmem(r.hand_s, r.out.at[0, shared.chunk_of(first + k), here])
        pl.when(k + DEPTH < count)(lambda: fetch(k + DEPTH))
        return state

    @pl.when(count > 0)
    def _() -> None:
        for k in range(DEPTH):
            pl.when(k < count)(partial(fetch, jnp.int32(k)))
        place, to = r.chunks[walking.FROM, first], r.chunks[walking.TO, first]
        begun = transfer_gpu.load(
            states_of(jnp.maximum(place, 0)), layout=gpu.Layout.WGMMA, optimized=False
        )  # fmt: skip
        state = jax.lax.fori_loop(0, count, step, jnp.where(place >= 0, begun, 0.0))

        @pl.when(to >= 0)
        def _() -> None:
            states_of(to)[...] = state

        gpu.wait_smem_to_gmem(0)
