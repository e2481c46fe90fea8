"""Guess the next tokens, by a smaller model or from what was said, so that one step of the model can check several."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from fdel import ops
from fdel.serve.sample import sample

if TYPE_CHECKING:
    from fdel.serve.step import Rows

NGRAM = 3  # tokens that must have been there before for their continuation to be a draft


def guess(
    net: tuple[ModuleType, Any],
    params: Any,
    state: ops.State,
    rows: Rows,
    row: Array,
    places: Int[Array, "B k1"],
    table: Array,
) -> tuple[Int[Array, "B k"], ops.State]:
    """Draft with a smaller model from the newest token (at places[:, 0]) on; it draws with the same keys.

    The noise that the model itself will draw with makes both choose the same token wherever their distributions agree.
    The last draft is computed too, so that its keys and values are there if all are kept.
    """
    family, cfg = net
    s = jax.tree.map(lambda x: x.at[row].get(mode="clip"), rows.sampling)
    s, here = replace(s, top=jnp.zeros_like(s.top)), jnp.minimum(row, len(rows.tokens) - 1)

    def one(carry: tuple, place: Int[Array, " B"]) -> tuple[tuple, Array]:
        known, state = carry
        newest = known.at[here, place].get(mode="clip")
        x, state = family.hidden(params, newest, cfg, ops.Paged(place, table, row, 1), state)
        drawn = sample(ops.logits(x, family.head(params, cfg)), s, known, place + 1, here).tokens
        known = known.at[jnp.where(place < 0, len(known), row), place + 1].set(drawn, mode="drop")
        return (known, state), drawn

    (_, state), drawn = jax.lax.scan(one, (rows.tokens, state), places.T)
    return drawn[:-1].T, state


def propose(
    tokens: Int[Array, "B L"], length: Int[Array, " B"], k: int
) -> tuple[Int[Array, "B k"], Bool[Array, "B k"]]:
    """Draft what followed the last time that a row had its newest NGRAM tokens: (drafts, which of them there are).

    The idea is prompt lookup decoding (github.com/apoorvumang/prompt-lookup-decoding).
    """
    at = jnp.arange(tokens.shape[1])
    same = (at >= NGRAM - 1) & (at < length[:, None] - 1)
    for i in range(NGRAM):
        newest = jnp.take_along_axis(tokens, length[:, None] - 1 - i, 1, mode="clip")
        same &= jnp.roll(tokens, i, 1) == newest
    last = jnp.where(same, at, -1).max(1, keepdims=True)
    places = last + 1 + jnp.arange(k)
    return jnp.take_along_axis(tokens, places, 1, mode="clip"), (last >= 0) & (places < length[:, None])
