"""How kernels for recurrences on NVIDIA Hopper serve Paged batches: states stay in their slots, and are written in place.

For prompts a sequence's blocks are gathered into chunks of its own, as `slots.plan` lays them; a program takes one
sequence of a call and some channels, and walks its chunks with the state in registers. So sequences run side by side.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fdel.kernels import slots
from fdel.ops.batch import Paged

# Of a chunk: the chunks of the sequence that it begins in a call, or 0; where its state comes from and goes to among the
# slots of all layers, or -1; then the blocks that it has.
COUNT, FROM, TO, BLOCKS = range(4)


def walks(batch: Paged, count: int, layer: Any, chunk: int) -> tuple[slots.Plan, Int[Array, "numbers chunks"]]:
    """Give where blocks lie in chunks of so many tokens, and the numbers of each chunk."""
    plan = slots.plan(batch, count, layer, chunk)
    n = len(plan.places)
    index, kind, slot = jnp.arange(n), plan.numbers[n : 2 * n], plan.numbers[2 * n : 3 * n]
    opens, ends = kind & slots.OPENS > 0, kind & slots.ENDS > 0
    last = jax.lax.cummin(jnp.where(ends, index, n), reverse=True)
    after = jnp.minimum(last + 1, n - 1)
    again = (last + 1 < n) & opens[after] & (slot[after] == slot)  # another sequence takes the slot in this call
    place = layer * count + slot
    numbers = [
        jnp.where(opens, last + 1 - index, 0),
        jnp.where(kind & slots.FRESH > 0, -1, place),
        jnp.where(again, -1, place),
        *plan.blocks.T,
    ]
    return plan, jnp.stack(numbers).astype(jnp.int32)


def in_place(
    program: Callable[[SimpleNamespace], None], name: str, grid: dict[str, int], ins: dict[str, Array], out: Any,
    states: Float[Array, "layers slots ..."], scratch: dict[str, Any], parameters: Any,
) -> tuple[Array, Array]:  # fmt: skip
    """Call program(r) for all of a grid, r having all arrays by their names: `ins`, "states" as [rows, columns], "out".

    Gives out, of the shape and dtype that are given, and the states as the programs leave them. An axis "warps" of
    the grid is that of the groups of warps of one program.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as gpu

    axes, warps = {name: n for name, n in grid.items() if name != "warps"}, grid.get("warps")
    axis = "warps" if warps else None
    memory = jax.new_ref(states.reshape(-1, states.shape[-1]))

    def body(*refs: Any) -> None:
        arrays = dict(zip([*ins, "states", "out"], refs, strict=True))
        call = lambda **scoped: program(SimpleNamespace(**arrays, **scoped))
        pl.run_scoped(call, collective_axes=(axis,) if axis else (), **scratch)

    y = pl.kernel(
        body,
        jax.ShapeDtypeStruct(out.shape, out.dtype),
        mesh=gpu.Mesh(grid=(*axes.values(),), grid_names=(*axes,), thread_name=axis, num_threads=warps),
        compiler_params=parameters,
        name=name,
    )(*ins.values(), memory)
    return y, jax.freeze(memory).reshape(states.shape)
