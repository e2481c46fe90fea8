"""Look up token embeddings in a table of any kind."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from fdel.ops.batch import Media
from fdel.ops.cpu import collective
from fdel.ops.platform import context
from fdel.ops.shard import divided, row_lookup, shard
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


def place(x: Float[Array, "... T D"], media: Media | None) -> Float[Array, "... T D"]:
    """Put encoded media into the embeddings x of tokens, in their dtype: media.values[media.index] where that is not -1.

    Of entries with several parts the first. An index past the entries gives NaN, as a token that is no word's does.
    >>> ops.place(jnp.zeros((3, 1)), ops.Media(jnp.array([-1, 1, -1]), jnp.array([[5.0], [6.0]])))[:, 0]
    Array([0., 6., 0.], dtype=float32)
    """
    if media is None:
        return x
    here = media.index[..., None] >= 0
    return jnp.where(here, entries(media, 0).astype(x.dtype), x)


def entries(media: Media, part: int) -> Float[Array, "... T D"]:
    """Give one part of the entry of each token; of a token without one, some entry's or NaN.
    >>> values = jnp.array([[[5.0], [7.0]], [[6.0], [8.0]]])  # two entries of two parts
    >>> ops.entries(ops.Media(jnp.array([1, 0]), values), 1)[:, 0]
    Array([8., 7.], dtype=float32)
    """
    if media.values is None:
        raise ValueError("media.values: found None, expected what `encode` gives of media.inputs")
    values = media.values[..., part, :] if media.values.ndim == media.index.ndim + 2 else media.values
    take = lambda values, index: values.at[jnp.maximum(index, 0)].get(mode="fill", fill_value=jnp.nan)
    if media.index.ndim == 1:
        return take(values, media.index)
    return row_lookup(jax.vmap(take), values, media.index)
