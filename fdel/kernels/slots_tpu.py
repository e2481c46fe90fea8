"""How kernels for recurrences on TPUs serve Paged batches: blocks are gathered into chunks, states stay in their slots.

A chunk of `CHUNK` tokens has blocks of one sequence alone, the last of them perhaps fewer. Blocks are found by numbers
that the kernel's copies read, so wide inputs are read where they lie, once. Only what is written has the layout of
chunks; there are as many as blocks, since each may be another sequence's, but those without blocks are passed over:
nothing is copied or computed (`slots.plan`). Where a sequence begins in a call, its state is read from its slot, if it is
not new; with its last chunk it is written there, in place.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from fdel.kernels import slots
from fdel.kernels.chunks_tpu import CHUNK, VMEM
from fdel.ops.batch import Batch, Paged
from fdel.ops.carry import Carry

ROWS = 16  # of a tile of bfloat16


class Served(NamedTuple):
    """States in their slots, a step's part of one and its place for a step's heads, and how the kernel holds it.

    `wide` names the inputs that are read where they lie, as [1 T W].
    """

    plan: slots.Plan
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
    held = carry and carry.slots
    if not held or held.ssm is None or held.ssm.shape[2:] != shape:
        return f"it serves Paged batches with slots.ssm of shape (layers, slots, {str(shape)[1:-1]})"
    return None


def tokens(batch: Paged, count: int, layer: Any) -> slots.Plan:
    """Give each token of a decode step a chunk of its own; what is no token is passed over after the one before it."""
    index = jnp.arange(len(batch.positions))
    used = (batch.positions >= 0) & (batch.rows >= 0) & (batch.rows < count)
    last = jax.lax.cummax(jnp.where(used, index, -1))
    at = jnp.where(last < 0, jnp.argmax(used), last)
    kind = slots.kinds(
        slots.LIVE + slots.OPENS + slots.ENDS + jnp.where(batch.positions == 0, slots.FRESH, 0), used, used
    )
    each = [at, kind, jnp.where(used, batch.rows, 0), jnp.asarray(layer)[None]]
    numbers = jnp.concatenate([x.astype(jnp.int32) for x in each])
    return slots.Plan(jnp.zeros((len(index), 0), jnp.int32), used[None], index, numbers)


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

        @pl.when(kind & slots.OPENS > 0)
        def _() -> None:
            state = served.load(r.slot[...].astype(jnp.float32))
            r.state[...] = jnp.where(kind & slots.FRESH > 0, 0.0, state)  # what a slot held before may be NaN

        for name in served.wide:
            for j in range(parts):
                getattr(r, name)[j * size : (j + 1) * size] = getattr(r, f"{name} {j}")[...]
        program(r)

        @pl.when(kind & slots.ENDS > 0)
        def _() -> None:
            r.new[...] = served.store(r.state[...]).astype(r.new.dtype)

    def body(r: SimpleNamespace) -> None:
        r.number = pl.program_id(2)
        kind = r.numbers[chunks + r.number]
        pl.when(kind & slots.LIVE > 0)(lambda: chunk(r))

        @pl.when(kind == slots.KEEPS)
        def _() -> None:
            r.new[...] = r.slot[...]

    scalars = {"numbers": served.plan.numbers} | scalars
    return body, scalars, given | {"slot": (served.states, slot)}, outs | {"new": (states, slot)}, scratch
