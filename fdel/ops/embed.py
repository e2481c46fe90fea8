"""Look up token embeddings in a table of any kind."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from fdel.ops.batch import Media
from fdel.ops.cpu import collective
from fdel.ops.platform import context
from fdel.ops.shard import divided, names, partition, row_lookup, shard
from fdel.ops.weights import Adapters, LowRank, Observed, Quantized, Weight, dense

TP, FSDP = "tp", "fsdp"  # mesh axes that divide a table's V and D, see `params.TRAIN`


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
    vocab, columns = _parts(table, tokens)
    if not columns:  # looked up as it is, a table divided along D is fetched whole, and the batch with it
        table = shard(table, "vocab embed")
    if not vocab and not columns:
        return shard(take(table), "rows tokens embed")

    # XLA's own division of this lookup fails inside `divided`.
    def part(table: jax.Array, tokens: jax.Array) -> jax.Array:
        """Look in this device's part of the vocabulary, for its part of D: for the tokens of all that have the others."""
        if columns:
            tokens = jax.lax.all_gather(tokens, FSDP, tiled=True)
        mine = tokens - jax.lax.axis_index(TP) * table.shape[0] if vocab else tokens
        x = table.at[mine].get(mode="fill", fill_value=0, wrap_negative_indices=False)
        x = collective(lambda x: jax.lax.psum(x, TP), x) if vocab else x
        return jax.lax.all_to_all(x, FSDP, 0, x.ndim - 1, tiled=True) if columns else x

    spec = partition(tokens, "rows tokens") if columns else P()
    axes = {TP} | {*names(*spec)} if vocab else {*names(*spec)}
    known = (tokens >= 0) & (tokens < table.shape[0])
    found = divided(part, axes, (P(TP if vocab else None, FSDP if columns else None), spec), spec)(table, tokens)
    return shard(jnp.where(known[..., None], found, jnp.nan), "rows tokens embed")


def _parts(table: jax.Array, tokens: jax.Array) -> tuple[bool, bool]:
    """Tell whether devices have parts of V of a table [V D], and of D, where their rows of tokens [B T] are parts, too."""
    sizes = context(TP, FSDP)
    rows = partition(tokens, "rows tokens")[0] if tokens.ndim == 2 else None
    fits = lambda axis, size: axis in sizes and size % sizes[axis] == 0
    return fits(TP, table.shape[0]), fits(FSDP, table.shape[1]) and FSDP in names(rows)


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
