"""Penalties on tokens that stand before a place already, so that a loss sees the distribution that a sampler drew from.

The sampler's are in `serve.engine.sampling`. Repetition is of all that a sequence has, presence and frequency of what the
sampler drew since it was last asked: a sample of several turns is counted anew in each, as by any server of a chat.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from fdel.ops.batch import Packed
from fdel.ops.shard import row_lookup
from fdel.train.losses.stats import check_range

Change = tuple[Callable[..., Array], tuple[Any, ...], tuple[Any, ...]]


@dataclass(frozen=True)
class Penalties:
    """What a sampler was asked for, by the names and with the limits that `SamplingParams` has; false if it is nothing."""

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def __post_init__(self) -> None:
        check_range(above=True, repetition_penalty=self.repetition_penalty)
        check_range(-2, 2, presence_penalty=self.presence_penalty, frequency_penalty=self.frequency_penalty)

    def __bool__(self) -> bool:
        return self != Penalties()

    @property
    def repeats(self) -> bool:
        """Whether it matters that a token stands in the sequence."""
        return self.repetition_penalty != 1

    @property
    def counts(self) -> bool:
        """Whether it matters how often a token was drawn."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0


def change(
    asked: Penalties, temperature: float, tokens: Int[Array, "R T"], packed: Packed, since: Int[Array, "R T"],
    places: Int[Array, "R K"], vocab: int,
) -> Change:  # fmt: skip
    """Give the `change`, `data` and `beside` of `token_stats` that penalise what stands up to each place.

    Repetition is of what a place's sequence has: prompt and output alike (`penalised`). A sample that shares its prompt's
    segment (`Packed.prefix_ids`) has it before its own tokens. Counts are of the tokens from `since` on, see `turns_since`.
    Repetition in rows of one sequence needs int32 [R V]; each other kind a mask, or int32 counts, of a chunk's logits, made
    of R * chunk * T writes.
    """
    at = jnp.minimum(places, tokens.shape[1] - 1)
    take = lambda x: row_lookup(lambda x, at: jnp.take_along_axis(x, at, 1), x, at)
    data, beside = {"at": at}, {"tokens": tokens}
    if asked.counts:
        data["since"] = take(since)
    if asked.repeats and packed.single:
        beside["first"] = row_lookup(partial(_first, vocab), tokens)
    elif asked.repeats:
        prefixes = jnp.full_like(packed.segment_ids, -2) if packed.prefix_ids is None else packed.prefix_ids
        data |= {"segment": take(packed.segment_ids), "prefix": take(prefixes)}
        beside["segments"] = packed.segment_ids
    return partial(_changed, asked, temperature), (data,), (beside,)


def turns_since(labels: Int[Array, "R T"], turns: Int[Array, "R T"] | None = None) -> Int[Array, "R T"]:
    """Find for each place, which predicts the next token, where in its row the turn begins that draws this one.

    `turns` says so at the tokens themselves; None: learnt tokens that stand side by side are one turn.
    >>> turns_since(jnp.array([[-1, 5, 6, -1, 7, -1]]))[0]
    Array([0, 2, 2, 2, 5, 5], dtype=int32)
    """
    if turns is not None:
        return jnp.pad(turns[:, 1:], ((0, 0), (0, 1)))
    learnt = labels >= 0
    begins = learnt & ~jnp.pad(learnt[:, :-1], ((0, 0), (1, 0)))
    return jax.lax.cummax(jnp.where(begins, jnp.arange(1, labels.shape[1] + 1, dtype=jnp.int32), 0), axis=1)


def penalised(
    z: Float[Array, "... V"],
    asked: Penalties,
    seen: Bool[Array, "... V"] | None = None,
    count: Int[Array, "... V"] | None = None,
    *,
    temperature: float = 1.0,
) -> Float[Array, "... V"]:
    """Divide positive logits of tokens that were seen, multiply others; then take off what is asked for counted ones.

    The first is arXiv:1909.05858, as transformers and vLLM; it commutes with the head's division by a temperature. What is
    taken off, presence + frequency * count where the count is not 0 (OpenAI), is of logits before that division.
    >>> asked = Penalties(repetition_penalty=2.0, frequency_penalty=0.5)
    >>> penalised(jnp.array([2.0, -2.0, 1.0]), asked, jnp.array([True, True, False]), jnp.array([2, 0, 0]))
    Array([ 0., -4.,  1.], dtype=float32)
    """
    if seen is not None:
        r = asked.repetition_penalty
        z = jnp.where(seen, jnp.where(z > 0, z / r, z * r), z)
    if count is not None:
        z = z - (asked.frequency_penalty * count + asked.presence_penalty * (count > 0)) / temperature
    return z


def _first(vocab: int, tokens: Array) -> Int[Array, "R V"]:
    """Find where each token stands first in a row; T where it does not."""
    r, t = tokens.shape
    return jnp.full((r, vocab), t, jnp.int32).at[jnp.arange(r)[:, None], tokens].min(jnp.arange(t), mode="drop")


def _changed(asked: Penalties, temperature: float, z: Array, data: dict[str, Array], beside: dict[str, Array]) -> Array:
    """Penalise a chunk's logits [R K V]; `data` are of its places, `beside` of its rows.

    No `row_lookup` here: within rows that are divided by hand already, with another axis after sp, jax 0.12's XLA ends the
    process at a second division ("Manual axes must be sorted"); it divides these writes by itself.
    """
    vocab, at = z.shape[-1], data["at"]
    seen = count = None
    if "first" in beside:
        seen = beside["first"][:, None] <= at[..., None]
    elif "segment" in data:
        where = (at, data["segment"], data["prefix"], beside["tokens"], beside["segments"])
        seen = _seen(vocab, *where)
    if "since" in data:
        count = _count(vocab, at, data["since"], beside["tokens"])
    return penalised(z, asked, seen, count, temperature=temperature)


def _seen(vocab: int, at: Array, segment: Array, prefix: Array, tokens: Array, segments: Array) -> Bool[Array, "R K V"]:
    here = segments[:, None]
    mine = (jnp.arange(tokens.shape[1]) <= at[..., None]) & ((here == segment[..., None]) | (here == prefix[..., None]))
    return _blank(bool, vocab, at).at[_ids(vocab, mine, tokens)].set(True, mode="drop")


def _count(vocab: int, at: Array, since: Array, tokens: Array) -> Int[Array, "R K V"]:
    t = jnp.arange(tokens.shape[1])
    mine = (t <= at[..., None]) & (t >= since[..., None])
    return _blank(jnp.int32, vocab, at).at[_ids(vocab, mine, tokens)].add(1, mode="drop")


def _blank(dtype: Any, vocab: int, at: Array) -> Array:
    return jnp.zeros((*at.shape, vocab), dtype)


def _ids(vocab: int, mine: Bool[Array, "R K T"], tokens: Array) -> tuple[Array, Array, Array]:
    """Index [R K V] by the tokens that are a place's own; others are out of range."""
    r, k, _ = mine.shape
    return jnp.arange(r)[:, None, None], jnp.arange(k)[:, None], jnp.where(mine, tokens[:, None], vocab)
