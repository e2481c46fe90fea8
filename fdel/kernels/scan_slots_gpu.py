"""Prompts of several sequences through `selective_scan` on NVIDIA Hopper: the program of `selective_scan_gpu` over blocks.

A program takes 128 channels and what a call has of one slot: a thread reads the 16 states of its channel from the slot, in
float32, keeps them in registers while its sequence's blocks go by, and writes them back. Blocks of tokens are copied from
and to where they lie, so sequences run side by side and nothing is laid out anew but b and c. A block that begins a
sequence begins with states of 0. More states than a program has are several calls in turn, whose outputs are added.

Bytes: x, dt and y once; states twice for each sequence; of b and c 144 for each token, as in `selective_scan_gpu`.
Interpreted on CPU, and measured on an H100 (docs/kernels_hopper.md).
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fdel.kernels import scan_tokens_gpu as scans
from fdel.kernels import slots, slots_gpu, transfer_gpu
from fdel.kernels.scan_tokens_gpu import CHANNELS, CHUNK, STATES, UNROLL
from fdel.ops.batch import Paged
from fdel.ops.carry import Carry

# Of a block, in the order of slots: how many its slot has, if it is the first of them, else 0, or -1 if it has no slot; the
# slot's place among those of all layers; whether it begins a sequence; and which block it is.
COUNT, PLACE, FRESH, BLOCK = range(4)


def unsupported(batch: Paged, a: Array) -> str | None:
    """Say why blocks of several tokens cannot be served, or None; states are `recurrent_decode_gpu`'s to judge."""
    if batch.block > 1 and batch.block % UNROLL:
        return f"blocks of {batch.block} tokens; expected 1, or a multiple of {UNROLL}"
    if batch.block > 1 and len(a) % CHANNELS:
        return f"prompts of {len(a)} channels; expected a multiple of {CHANNELS}"
    return None


def call(
    batch: Paged, carry: Carry, layer: Any, x: Float[Array, "T C"], dt: Float[Array, "T C"], a: Float[Array, "C S"],
    b: Float[Array, "T S"], c: Float[Array, "T S"], d: Float[Array, " C"],
) -> tuple[Float[Array, "T C"], Carry]:  # fmt: skip
    """Compute as `selective_scan`; see `unsupported` for what it can serve."""
    states, size = carry.slots.ssm, next(n for n in (CHUNK, 2 * UNROLL, UNROLL) if batch.block % n == 0)
    blocks, valid, total = _blocks(batch, states.shape[1], layer, size), batch.positions >= 0, jnp.zeros(())
    for part in range(a.shape[1] // STATES):
        some = slice(part * STATES, (part + 1) * STATES)
        skip = d.astype(jnp.float32) if part == 0 else jnp.zeros(len(d))
        numbers = scans.numbers_of(valid, jnp.zeros_like(valid), b[:, some], c[:, some])
        ins = {"x": x, "dt": dt.astype(jnp.float32), "a": scans.rates(a[:, some]), "numbers": numbers, "d": skip}
        y, states = _run(size, part, ins | {"blocks": blocks}, states)
        total = total + y.astype(jnp.float32) if a.shape[1] > STATES else y
    return total.astype(x.dtype), slots.remembered(carry, states)


def _blocks(batch: Paged, count: int, layer: Any, size: int) -> Int[Array, "numbers blocks"]:
    """Give the numbers of each block of so many tokens, those of a slot side by side; those of no slot come last."""
    positions, rows = batch.positions.reshape(-1, size), jnp.repeat(batch.rows, batch.block // size)
    index = jnp.arange(len(positions))
    used = (positions >= 0).any(1) & (rows >= 0) & (rows < count)
    row, block, first = jax.lax.sort((jnp.where(used, rows, count), index, positions[:, 0]), num_keys=1)
    change = jnp.append(row[1:] != row[:-1], True)
    last = jax.lax.cummin(jnp.where(change, index, len(index)), reverse=True)
    opens = (row < count) & jnp.pad(change[:-1], (1, 0), constant_values=True)
    many = jnp.where(opens, last + 1 - index, jnp.where(row < count, 0, -1))
    numbers = [many, layer * count + row, first == 0, block]
    return jnp.stack([x.astype(jnp.int32) for x in numbers])


def _run(size: int, part: int, ins: dict[str, Array], states: Array) -> tuple[Array, Array]:
    """Run over blocks of so many tokens, with one part of the states."""
    x, scratch = ins["x"], scans.memory(ins["x"].dtype, size)
    grid = {"block": len(x) // size, "column": x.shape[1] // CHANNELS}
    program = partial(_program, part=part)
    return slots_gpu.in_place(program, "selective_scan_prefill", grid, ins, x, states, scratch, scans.parameters())


def _program(r: SimpleNamespace, *, part: int) -> None:
    """Walk the blocks of the slot whose first is this one, if any's is; outputs of a block that has no slot are 0."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    first, column = (jax.lax.axis_index(name) for name in ("block", "column"))
    channels, count, (depth, size) = pl.ds(column * CHANNELS, CHANNELS), r.blocks[COUNT, first], r.x_s.shape[:2]
    place = lambda k: jax.lax.rem(k, jnp.int32(depth))
    tokens = lambda k: pl.ds(r.blocks[BLOCK, first + k] * size, size)

    def fetch(k: Any) -> None:
        slot, here = place(k), tokens(k)
        gpu.copy_gmem_to_smem(r.x.at[here, channels], r.x_s.at[slot], r.full.at[slot])
        gpu.copy_gmem_to_smem(r.dt.at[here, channels], r.dt_s.at[slot], r.full.at[slot])
        gpu.copy_gmem_to_smem(r.numbers.at[here], r.n_s.at[slot], r.full.at[slot])

    @pl.when(count < 0)
    def _() -> None:
        for at in range(size):
            r.y_s.at[0, at][...] = scans.nothing().astype(r.y_s.dtype)
        gpu.commit_smem()
        gpu.copy_smem_to_gmem(r.y_s.at[0], r.out.at[tokens(0), channels])

    @pl.when(count > 0)
    def _() -> None:
        for k in range(depth):
            pl.when(k < count)(partial(fetch, jnp.int32(k)))
        a, d = [r.a[n, channels] for n in range(STATES)], r.d[channels]
        mine = pl.ds(r.blocks[PLACE, first] * r.x.shape[1] + column * CHANNELS, CHANNELS)
        held = [r.states.at[mine, part * STATES + n] for n in range(STATES)]

        def block(k: Any, states: tuple[Array, ...]) -> tuple[Array, ...]:
            slot, fresh = place(k), r.blocks[FRESH, first + k] > 0
            gpu.barrier_wait(r.full.at[slot])
            gpu.wait_smem_to_gmem(depth - 1, wait_read_only=True)
            states = tuple(jnp.where(fresh, 0.0, state) for state in states)  # which may have been NaN
            states = scans.outputs(r, slot, a, d, states)
            gpu.commit_smem()
            gpu.copy_smem_to_gmem(r.y_s.at[slot], r.out.at[tokens(k), channels])
            pl.when(k + depth < count)(lambda: fetch(k + depth))
            return states

        begun = tuple(transfer_gpu.load(ref, optimized=False) for ref in held)
        for ref, state in zip(held, jax.lax.fori_loop(0, count, block, begun), strict=True):
            transfer_gpu.store(ref, state)

    gpu.wait_smem_to_gmem(0)
