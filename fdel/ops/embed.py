"""Look up token embeddings in a table of any kind."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from fdel.ops.cpu import collective
from fdel.ops.platform import context
from fdel.ops.shard import divided, shard
from fdel.ops.weights import Adapters, LowRank, Observed, Quantized, Weight, dense


def embed(table: Weight, tokens: Int[Array, "..."]) -> Float[Array, "... D"]:
    """Give row `table[token]` of a table [V D] for each token id, in the table's dtype.

    A token id outside of 0 to V - 1, negative ones included, gives a row of NaN: a wrong id is seen and not clipped to
    a wrong row. Only the rows that are looked up are dequantised. Tied logits are `einsum("...d,vd->...v", x, table)`.
    >>> ops.embed(jnp.array([[10.0], [11.0]]), jnp.array([1, 2]))[:, 0]
    Array([11., nan], dtype=float32)
    """
    take = lambda c: c.at[tokens].get(mode="fill", wrap_negative_indices=False)
    if isinstance(table, LowRank):
        update = jnp.einsum("...r,rd->...d", take(table.b) * table.scale, table.a)
        return (embed(table.base, tokens) + update).astype(table.dtype)
    if isinstance(table, Quantized):
        return dense(jax.tree.map(take, table))
    table = dense(table) if isinstance(table, Adapters | Observed) else table  # of Adapters a TypeError
    # A table divided along D, looked up as it is, would be fetched whole by every device, and the batch with it.
    table, tp = shard(table, "vocab embed"), context("tp").get("tp")
    if tp is None or table.shape[0] % tp:
        return shard(take(table), "rows tokens embed")

    # Each device looks in its part of the vocabulary. XLA's own division of this lookup fails inside `divided`.
    def part(table: jax.Array, tokens: jax.Array) -> jax.Array:
        mine = tokens - jax.lax.axis_index("tp") * table.shape[0]
        rows = table.at[mine].get(mode="fill", fill_value=0, wrap_negative_indices=False)
        return collective(lambda x: jax.lax.psum(x, "tp"), rows)

    known = (tokens >= 0) & (tokens < table.shape[0])
    found = divided(part, {"tp"}, (P("tp"), P()), P())(table, tokens)
    return shard(jnp.where(known[..., None], found, jnp.nan), "rows tokens embed")
