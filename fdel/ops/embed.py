"""Look up token embeddings in a table of any kind."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from fdel.ops.shard import shard
from fdel.ops.weights import LowRank, Quantized, Weight, dense


def embed(table: Weight, tokens: Int[Array, "..."]) -> Float[Array, "... D"]:
    """Give row `table[token]` of a table [V D] for each token id, in the table's dtype.

    A token id outside of 0 to V - 1, negative ones included, gives a row of NaN: a wrong id is seen and not clipped to
    a wrong row. Only the rows that are looked up are dequantised. Tied logits are `einsum("...d,vd->...v", x, table)`.
    """
    take = lambda c: c.at[tokens].get(mode="fill", wrap_negative_indices=False)
    if isinstance(table, LowRank):
        update = jnp.einsum("...r,rd->...d", take(table.b) * table.scale, table.a)
        return (embed(table.base, tokens) + update).astype(table.dtype)
    if isinstance(table, Quantized):
        return dense(jax.tree.map(take, table))
    # A table divided along D, looked up as it is, would be fetched whole by every device, and the batch with it.
    table = shard(table, "vocab embed")
    return shard(take(table), "rows tokens embed")
