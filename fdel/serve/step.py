"""The device side of generation: prefill and decode, each forward, head and draw, over rows that stay there."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from fdel import ops
from fdel import params as P
from fdel.serve.sample import Sampled, Sampling, sample

PAGE = 64  # tokens per page


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """Sequences under way, donated from step to step. Row i owns the same pages and the same slot throughout."""

    state: ops.State
    tokens: Int[Array, "B L"]  # prompt and output
    length: Int[Array, " B"]  # tokens of the row that are known; all but the last are in `state`
    running: Bool[Array, " B"]


class Programs(NamedTuple):
    """The jitted functions of one model on one mesh."""

    begin: Callable[..., Rows]  # (tokens[B L], length[B], pages=, dtype=)
    extend: Callable[..., tuple[Rows, Sampled]]  # (params, rows, sampling, tokens[T], Paged, last[B])
    decode: Callable[..., tuple[Rows, Sampled]]  # (params, rows, sampling, table[B W])


def mesh_of(params: Any) -> Mesh | None:
    """The mesh that parameters are spread over; None if they are on one device."""
    sharding = getattr(jax.tree.leaves(params)[0], "sharding", None)
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    return mesh if isinstance(mesh, Mesh) and mesh.size > 1 else None


@functools.lru_cache(maxsize=16)
def programs(family: ModuleType, cfg: Any, mesh: Mesh | None = None) -> Programs:
    """Make the jitted functions of a model.

    They are cached because jax keeps compiled programs with the jitted function: a new one would compile everything
    again at each call of `generate`. The result depends on the arguments alone, so the cache cannot be observed but
    in time.
    """
    rows_sharding, replicated = None, None
    if mesh is not None:  # fixed, so that no step hands the next one another layout, which would compile again
        replicated = NamedSharding(mesh, PartitionSpec())
        state = P.shardings(family.state_spec(cfg, pages=1, page=PAGE, rows=1), mesh, P.SERVE)
        rows_sharding = Rows(state, replicated, replicated, replicated)

    def begin(tokens: Array, length: Array, *, pages: int, dtype: Any) -> Rows:
        spec = family.state_spec(cfg, pages=pages, page=PAGE, rows=tokens.shape[0])
        return Rows(P.init(spec, jax.random.key(0), dtype), tokens, length, jnp.zeros(length.shape, bool))

    def extend(params, rows: Rows, s: Sampling, tokens: Array, batch: ops.Paged, last: Array) -> tuple[Rows, Sampled]:
        logits, state = prefill_logits(family, cfg, params, rows.state, tokens, batch, last)
        return advance(rows, state, logits, s, last < len(tokens))

    def decode(params, rows: Rows, s: Sampling, table: Array) -> tuple[Rows, Sampled]:
        position = rows.length - 1
        newest = jnp.take_along_axis(rows.tokens, position[:, None], 1)[:, 0]
        position = jnp.where(rows.running, position, -1)
        logits, state = decode_logits(family, cfg, params, rows.state, newest, position, table)
        return advance(rows, state, logits, s, rows.running)

    steps = functools.partial(jax.jit, donate_argnums=1, out_shardings=mesh and (rows_sharding, replicated))
    return Programs(
        jax.jit(begin, static_argnames=("pages", "dtype"), out_shardings=rows_sharding), steps(extend), steps(decode)
    )


def prefill_logits(
    family: ModuleType, cfg: Any, params: Any, state: ops.State, tokens: Array, batch: ops.Paged, last: Int[Array, " B"]
) -> tuple[Float[Array, "B V"], ops.State]:
    """Run prompt tokens; only those at indices `last` go through the head (the last one for indices out of range)."""
    x, state = family.hidden(params, tokens, cfg, batch, state)
    return ops.logits(x.at[last].get(mode="clip"), family.head(params, cfg)), state


def decode_logits(
    family: ModuleType, cfg: Any, params: Any, state: ops.State, tokens: Array, positions: Array, table: Array
) -> tuple[Float[Array, "B V"], ops.State]:
    """Run one token per row; rows with position -1 are left alone and their logits mean nothing."""
    batch = ops.Paged(positions, table, jnp.arange(table.shape[0]), 1)
    x, state = family.hidden(params, tokens, cfg, batch, state)
    return ops.logits(x, family.head(params, cfg)), state


def advance(
    rows: Rows, state: ops.State, logits: Array, s: Sampling, active: Bool[Array, " B"]
) -> tuple[Rows, Sampled]:
    """Draw the next token of active rows, append it, and stop rows at a stop id or their greatest length."""
    every = jnp.arange(logits.shape[0])
    out = sample(logits, s, rows.tokens, rows.length, every)
    at = jnp.where(active, rows.length, rows.tokens.shape[1])
    tokens = rows.tokens.at[every, at].set(out.tokens, mode="drop")
    length = rows.length + active
    stopped = (out.tokens[:, None] == s.stop_ids).any(-1) | (length >= s.max_length)
    return Rows(state, tokens, length, jnp.where(active, ~stopped, rows.running)), out
