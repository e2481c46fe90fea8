"""The sequences that a device has under way, what drawing tokens does to them, and drafts of several tokens.

Drafts guess the next tokens, by a smaller model or from what was said, so that one step of the model can check several.
"""

from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, UInt

from fdel import ops
from fdel.ops.cpu import in_step
from fdel.serve.engine import packing
from fdel.serve.engine.packing import Decode, Drawn, Out, pack_drawn
from fdel.serve.engine.sampling import Sampling, sample, sampling_rows

NGRAM = 3  # tokens that must have been there before for their continuation to be a draft
Net = tuple[ModuleType, Any]  # a family and its Config


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """Sequences under way, donated from step to step. Tokens past `length` mean nothing."""

    tokens: Int[Array, "R L"]  # prompt and output
    length: Int[Array, " R"]  # tokens that are known; all but the last are in the cache
    running: Bool[Array, " R"]  # decode continues it
    sampling: Int[Array, "R C"]  # how each row draws, see `sampling_of`
    adapter: Int[Array, " R"]  # the slot of its adapter in the weights; below zero: none
    shift: Int[Array, " R"] | None = None  # of a model that turns by three components: what is added to positions


def sampling_of(rows: Rows, row: Int[Array, " B"], vocab: int, mesh: Mesh | None) -> Sampling:
    """Tell how rows draw."""
    packed = rows.sampling.at[row].get(mode="clip")
    s = packing.unpack_bits(packed, sampling_rows([], [], [], [], vocab=vocab, rows=1))
    if mesh is None:
        return s
    # Else the compiler divides the columns as it does the vocabulary, and sends parts of each field.
    return jax.lax.with_sharding_constraint(s, NamedSharding(mesh, PartitionSpec()))


class Drafts(NamedTuple):
    """Tokens guessed to follow the newest one of each line; `found` says which of them are guesses at all."""

    tokens: Int[Array, "B k_1"]
    found: Bool[Array, "B k_1"]


def advance(
    rows: Rows,
    row: Int[Array, " B"],
    s: Sampling,
    logits: Float[Array, "Bk V"],
    active: Bool[Array, " B"],
    drafts: Drafts,
    masked: Bool[Array, " B"],
    masks: UInt[Array, "B W"],
) -> tuple[Rows, Out]:
    """Draw the next tokens of active rows, as `s` says, append them, and stop rows at a stop id or their greatest length.

    Where a line is `masked`, its mask limits what is drawn. A draft is kept while it equals what is drawn in its place. So
    every kept token is drawn as it would be without drafts, with the same key: greedy or sampled, drafts change no output.
    """
    k, nowhere = drafts.tokens.shape[1] + 1, rows.tokens.shape[1]
    positions = rows.length.at[row].get(mode="clip")[:, None] + jnp.arange(k)  # of the tokens that are drawn
    if_drafts_hold = jnp.where(drafts.found, positions[:, :-1], nowhere)
    history = rows.tokens.at[row[:, None], if_drafts_hold].set(drafts.tokens, mode="drop")
    both = masks & jnp.where(s.masked[:, None], s.allowed, ~jnp.uint32(0))
    s = replace(s, masked=s.masked | masked, allowed=jnp.where(masked[:, None], both, s.allowed))
    each = lambda x: x if k == 1 else jnp.repeat(x, k, 0)
    here = each(jnp.minimum(row, len(history) - 1))
    sampled = sample(logits, jax.tree.map(each, s), history, positions.reshape(-1), here)
    tokens, *logprobs = (x.reshape(-1, k) for x in sampled[:4])

    ends = (tokens[:, :, None] == s.stop_ids[:, None]).any(-1) | (positions + 1 >= s.max_length[:, None])
    right = drafts.found & (tokens[:, :-1] == drafts.tokens) & ~ends[:, :-1]
    kept = active[:, None] & jnp.concatenate([active[:, None], jnp.cumprod(right, 1) > 0], 1)
    count = kept.sum(1)
    rows = replace(
        rows,
        tokens=rows.tokens.at[row[:, None], jnp.where(kept, positions, nowhere)].set(tokens, mode="drop"),
        length=rows.length.at[row].add(count, mode="drop"),
        running=rows.running.at[jnp.where(active, row, len(history))].set(~(kept & ends).any(1), mode="drop"),
    )
    return rows, Out(pack_drawn(Drawn(count, tokens, *logprobs)), sampled.top_ids, sampled.top_logprobs)


def guess(
    net: Net, params: Any, state: ops.State, rows: Rows, plan: Decode, s: Sampling, positions: Int[Array, "B k1"]
) -> tuple[Drafts, ops.State]:
    """Draft k tokens with a smaller model from the newest token on; it draws with the same keys.

    The noise that the model itself will draw with makes both choose the same token wherever their distributions agree.
    The last draft is computed too, so that its keys and values are there if all are kept. `positions` begin with that of
    the newest token and are -1 where nothing may be written.
    """
    family, cfg = net
    s, here = replace(s, top=jnp.zeros_like(s.top)), jnp.minimum(plan.row, len(rows.tokens) - 1)

    def one(carry: tuple, position: Int[Array, " B"]) -> tuple[tuple, Array]:
        weights, (known, state) = in_step(params, carry)
        newest = known.at[here, position].get(mode="clip")
        batch = ops.Paged(position, plan.pages, plan.row, 1)
        x, state, _ = family.hidden(weights, newest, cfg, batch, state)
        drawn = sample(ops.logits(x, family.head(weights, cfg)), s, known, position + 1, here).tokens
        known = known.at[jnp.where(position < 0, len(known), plan.row), position + 1].set(drawn, mode="drop")
        return (known, state), drawn

    (_, state), drawn = jax.lax.scan(one, (rows.tokens, state), positions.T)
    return Drafts(drawn[:-1].T, jnp.ones(drawn[:-1].T.shape, bool)), state


def propose(tokens: Int[Array, "B L"], length: Int[Array, " B"], k: int) -> Drafts:
    """Draft what followed the last time that a row had its newest NGRAM tokens, as far as it is known.

    The idea is prompt lookup decoding (github.com/apoorvumang/prompt-lookup-decoding).
    """
    if k == 0:
        none = jnp.zeros((len(tokens), 0), jnp.int32)
        return Drafts(none, none > 0)
    at = jnp.arange(tokens.shape[1])
    same = (at >= NGRAM - 1) & (at < length[:, None] - 1)
    for i in range(NGRAM):
        newest = jnp.take_along_axis(tokens, length[:, None] - 1 - i, 1, mode="clip")
        same &= jnp.roll(tokens, i, 1) == newest
    last = jnp.where(same, at, -1).max(1, keepdims=True)
    positions = last + 1 + jnp.arange(k)
    found: Bool[Array, "B k"] = (last >= 0) & (positions < length[:, None])
    return Drafts(jnp.take_along_axis(tokens, positions, 1, mode="clip"), found)
