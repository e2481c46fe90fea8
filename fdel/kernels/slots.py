"""How blocks of an engine's calls are laid out for kernels of recurrences: in chunks of tokens of one sequence alone.

Only what is written has the layout of chunks; there are as many as blocks, since each may be another sequence's.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fdel.ops.batch import Paged
from fdel.ops.carry import Carry

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


def plan(batch: Paged, slots: int, layer: Any, chunk_size: int) -> Plan:
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
    kind = kinds(kind + LIVE, index <= last, used)
    valid = (positions >= 0)[found] & present[..., None]
    at = jnp.arange(found.size).reshape(found.shape)
    places = jnp.where(present & (found == index[:, None, None]), at, -1).max((1, 2))
    numbers = [jnp.minimum(index, last), kind, slot, *found.T, jnp.asarray(layer)[None]]
    return Plan(found, valid.reshape(1, -1), places, jnp.concatenate([x.astype(jnp.int32) for x in numbers]))


def kinds(
    kind: Int[Array, " chunks"], live: Bool[Array, " chunks"], used: Bool[Array, " any"]
) -> Int[Array, " chunks"]:
    """Give 0 to what is passed over; a call of nothing still has a chunk, which leaves its slot as it is."""
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
