"""How kernels for recurrences on TPUs serve Paged batches: blocks are gathered into chunks, states stay in their slots.

A chunk of `CHUNK` tokens has blocks of one sequence alone, the last of them perhaps fewer. Blocks are found by numbers that
the kernel's copies read, so wide inputs are read where they lie, once. Only what is written has the layout of chunks; there
are as many as blocks, since each may be another sequence's, but those without blocks are passed over: nothing is copied or
computed. Where a sequence begins in a call, its state is read from its slot, if it is not new; with its last chunk it is
written there, in place.
"""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fdel.kernels.chunks_tpu import CHUNK, VMEM
from fdel.ops.batch import Batch, Paged
from fdel.ops.carry import Carry

ROWS = 16  # of a tile of bfloat16
# Of a chunk: it has blocks, is a sequence's first, of a new one, its last; there are none, and it leaves a slot as it is.
LIVE, OPENS, FRESH, ENDS, KEEPS = 1, 2, 4, 8, 16


class Plan(NamedTuple):
    """Where blocks lie: of each chunk and part its block, which tokens of chunks are some, each block's place or -1.

    `numbers` go to the kernel: of each chunk itself or the last that has blocks, kind, slot, blocks; the layer.
    """

    blocks: Int[Array, "chunks parts"]
    valid: Bool[Array, "1 T"]
    places: Int[Array, " blocks"]
    numbers: Int[Array, " numbers"]


class Served(NamedTuple):
    """States in their slots, a step's part of one and its place for a step's heads, and how the kernel holds it.

    `wide` names the inputs that are read where they lie, as [1 T W].
    """

    plan: Plan
    wide: tuple[str, ...]
    states: Float[Array, "layers slots ..."]
    shape: tuple[int, ...]
    place: Callable[[Any], tuple[Any, ...]]
    load: Callable[[Array], Array] = lambda x: x
    store: Callable[[Array], Array] = lambda x: x


def unsupported(batch: Batch, carry: Carry | None, shape: tuple[int, ...]) -> str | None:
    """Say why blocks cannot be served with states of this shape, or None; of Packed batches None."""
    if not isinstance(batch, Paged):
        return None
    if batch.block > 1 and (batch.block % ROWS or (CHUNK % batch.block and batch.block % CHUNK)):
        return f"blocks of {batch.block} tokens; expected 1, {ROWS} or more that divide {CHUNK}, or a multiple of it"
    slots = carry and carry.slots
    if not slots or slots.ssm is None or slots.ssm.shape[2:] != shape:
        return f"it serves Paged batches with slots.ssm of shape (layers, slots, {str(shape)[1:-1]})"
    return None


def reference(op: str) -> Callable[..., Any]:
    """Give what serves a device's part of a call where the kernel cannot."""
    from fdel.ops.dispatch import TABLES

    return TABLES[op].implementations["xla"].call


def plan(batch: Paged, slots: int, layer: Any, chunk_size: int = CHUNK) -> Plan:
    """Give each sequence chunks of its own; blocks of padding, and of slots that are none, have no place."""
    size = min(batch.block, chunk_size)
    positions = batch.positions.reshape(-1, size)
    parts, index = chunk_size // size, jnp.arange(len(positions))
    rows = jnp.repeat(batch.rows, batch.block // size)
    used = (positions >= 0).any(1) & (rows >= 0) & (rows < slots)
    row, block, first = jax.lax.sort((jnp.where(used, rows, slots), index, positions[:, 0]), num_keys=1)
    used = row < slots
    opens = used & ((first == 0) | (row != jnp.pad(row[:-1], (1, 0), constant_values=-1)))
    part = (index - jax.lax.cummax(jnp.where(opens, index, 0))) % parts
    chunk = jnp.cumsum(used & (part == 0)) - 1
    here = used & (chunk == index[:, None, None]) & (part == jnp.arange(parts)[:, None])  # [chunks parts blocks]
    present, head, last = here.any(-1), here[:, 0], jnp.maximum(chunk[-1], 0)
    found, slot = jnp.where(here, block, 0).sum(-1), jnp.where(head, row, 0).sum(-1)
    opens = (head & opens).any(-1)
    kind = jnp.where(opens, OPENS, 0) + jnp.where((head & (first == 0)).any(-1), FRESH, 0)
    kind += jnp.where(jnp.append(opens[1:], False) | (index == last), ENDS, 0)
    kind = _kinds(kind + LIVE, index <= last, used)
    valid = (positions >= 0)[found] & present[..., None]
    at = jnp.arange(found.size).reshape(found.shape)
    places = jnp.where(present & (found == index[:, None, None]), at, -1).max((1, 2))
    numbers = [jnp.minimum(index, last), kind, slot, *found.T, jnp.asarray(layer)[None]]
    return Plan(found, valid.reshape(1, -1), places, jnp.concatenate([x.astype(jnp.int32) for x in numbers]))


def tokens(batch: Paged, slots: int, layer: Any) -> Plan:
    """Give each token of a decode step a chunk of its own; what is no token is passed over after the one before it."""
    index = jnp.arange(len(batch.positions))
    used = (batch.positions >= 0) & (batch.rows >= 0) & (batch.rows < slots)
    last = jax.lax.cummax(jnp.where(used, index, -1))
    at = jnp.where(last < 0, jnp.argmax(used), last)
    kind = _kinds(LIVE + OPENS + ENDS + jnp.where(batch.positions == 0, FRESH, 0), used, used)
    each = [at, kind, jnp.where(used, batch.rows, 0), jnp.asarray(layer)[None]]
    numbers = jnp.concatenate([x.astype(jnp.int32) for x in each])
    return Plan(jnp.zeros((len(index), 0), jnp.int32), used[None], index, numbers)


def _kinds(
    kind: Int[Array, " chunks"], live: Bool[Array, " chunks"], used: Bool[Array, " any"]
) -> Int[Array, " chunks"]:
    return jnp.where(used.any(), jnp.where(live, kind, 0), jnp.where(jnp.arange(len(live)) == 0, KEEPS, 0))


def laid(plan: Plan, x: Float[Array, "T ..."]) -> Float[Array, "1 chunks*C ..."]:
    """Copy what belongs to tokens into chunks; what is no token holds anything."""
    blocks = x.reshape(len(plan.places), -1, *x.shape[1:])
    return blocks[plan.blocks].reshape(1, -1, *x.shape[1:])


def taken(plan: Plan, x: Float[Array, "1 chunks*C W"]) -> Float[Array, "T W"]:
    """Copy tokens out of chunks; those of blocks without a place are 0."""
    blocks = x.reshape(plan.blocks.size, -1, x.shape[-1])
    found = jnp.where((plan.places >= 0)[:, None, None], blocks[plan.places], 0)
    return found.reshape(-1, x.shape[-1])


def remembered(carry: Carry, states: Array) -> Carry:
    """Replace the states."""
    return carry.remember(slots=replace(carry.slots, ssm=states))


def call(
    program: Callable[[SimpleNamespace], None], name: str, grid: tuple[int, int, int], scalars: dict[str, Array],
    ins: dict[str, tuple[Array, Any]], outs: dict[str, tuple[Any, Any]], scratch: dict[str, Any], served: Served | None,
) -> list[Array]:  # fmt: skip
    """Call program(r) for each step (row, heads, chunk), r having its part of every array by its name.

    `ins` and `outs` have their blocks, those of Packed rows; with `served` the one row has all chunks, and the states are
    the last output.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    body, aliases = program, {}
    if served is not None:
        body, scalars, ins, outs, scratch = _served(program, grid[2], scalars, ins, outs, scratch, served)
        aliases = {len(scalars) + len(ins) - 1: len(outs) - 1}
    names = [*scalars, *ins, *outs, *scratch]
    run = pl.pallas_call(
        lambda *refs: body(SimpleNamespace(**dict(zip(names, refs, strict=True)))),
        out_shape=[x for x, _ in outs.values()],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=grid,
            in_specs=[spec for _, spec in ins.values()],
            out_specs=[spec for _, spec in outs.values()],
            scratch_shapes=list(scratch.values()),
        ),
        input_output_aliases=aliases,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM
        ),
        name=name,
    )
    return run(*scalars.values(), *(x for x, _ in ins.values()))


def _served(
    program: Callable, chunks: int, scalars: dict, ins: dict, outs: dict, scratch: dict, served: Served
) -> tuple[Any, ...]:  # fmt: skip
    """Give the body and the arguments of `call` that serve a Paged batch."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    parts = served.plan.blocks.shape[1]
    size = CHUNK // max(1, parts)
    about = lambda numbers, kind, c: numbers[kind * chunks + numbers[c]]  # of the chunk, or of the last that has blocks

    def moved(spec: Any) -> Any:
        return pl.BlockSpec(spec.block_shape, lambda b, n, c, numbers, *_: spec.index_map(b, n, numbers[c]))

    def part(spec: Any, j: int) -> Any:
        place = lambda b, n, c, numbers, *_: (b, about(numbers, 3 + j, c), spec.index_map(b, n, c)[-1])
        return pl.BlockSpec((None, size, spec.block_shape[-1]), place)

    layer = (3 + parts) * chunks
    place = lambda b, n, c, numbers, *_: (numbers[layer], about(numbers, 2, c), *served.place(n))
    slot = pl.BlockSpec((None, None, *served.shape), place)
    given = {name: (x, moved(spec)) for name, (x, spec) in ins.items() if name not in served.wide}
    for name in served.wide:
        x, spec = ins[name]
        given |= {f"{name} {j}": (x, part(spec, j)) for j in range(parts)}
        scratch = scratch | {name: pltpu.VMEM((CHUNK, spec.block_shape[-1]), x.dtype)}
    outs = {name: (x, moved(spec)) for name, (x, spec) in outs.items()}
    states = jax.ShapeDtypeStruct(served.states.shape, served.states.dtype)

    def chunk(r: SimpleNamespace) -> None:
        kind = r.numbers[chunks + r.number]

        @pl.when(kind & OPENS > 0)
        def _() -> None:
            state = served.load(r.slot[...].astype(jnp.float32))
            r.state[...] = jnp.where(kind & FRESH > 0, 0.0, state)  # what a slot held before may be NaN

        for name in served.wide:
            for j in range(parts):
                getattr(r, name)[j * size : (j + 1) * size] = getattr(r, f"{name} {j}")[...]
        program(r)

        @pl.when(kind & ENDS > 0)
        def _() -> None:
            r.new[...] = served.store(r.state[...]).astype(r.new.dtype)

    def body(r: SimpleNamespace) -> None:
        r.number = pl.program_id(2)
        kind = r.numbers[chunks + r.number]
        pl.when(kind & LIVE > 0)(lambda: chunk(r))

        @pl.when(kind == KEEPS)
        def _() -> None:
            r.new[...] = r.slot[...]

    scalars = {"numbers": served.plan.numbers} | scalars
    return body, scalars, given | {"slot": (served.states, slot)}, outs | {"new": (states, slot)}, scratch
