"""Beam search over the same steps as `generate`, one prompt at a time; every beam is a row."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from fdel import ops
from fdel import params as P
from fdel.models import Model
from fdel.serve.generate import bucket
from fdel.serve.request import check_prompt, default_eos, length_limit
from fdel.serve.step import PAGE, compute_dtype, mesh_of, programs

PREFILL, BLOCK = 2048, 32  # tokens of one prefill call, and of one of its blocks
NEVER = np.float32(-1e9)  # the score of what must not be chosen


class Beam(NamedTuple):
    """One finished sequence: its output tokens, and the sum of their log-probabilities / length ** length_penalty."""

    tokens: list[int]
    score: float


@dataclass(frozen=True)
class Finished:
    """The best complete sequences so far, best first; `scores` is NEVER where there is none yet."""

    tokens: list[list[int]]
    scores: np.ndarray

    def add(self, tokens: list[list[int]], scores: np.ndarray) -> "Finished":
        """Keep the best of both; of equals the earlier."""
        every, n = np.concatenate([self.scores, scores]), len(self.scores)
        order = np.argsort(-every, kind="stable")[:n]
        return Finished([(self.tokens + tokens)[i] for i in order], every[order])

    @property
    def worst(self) -> np.float32:
        """What a new sequence must beat."""
        return self.scores[-1]


def beam_search(
    model: Model,
    prompt: Sequence[int],
    num_beams: int,
    *,
    max_tokens: int = 256,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    eos: Sequence[int] | None = None,
) -> list[Beam]:
    """Find the likeliest outputs of one prompt: up to `num_beams`, best first, as transformers' beam search does.

    Scores are divided by length ** length_penalty. early_stopping True ends with `num_beams` finished sequences;
    False when the best running beam, at its present length, is worse than the worst finished one; "never" judges it
    at max_tokens if length_penalty > 0. `eos` defaults to config.json's.
    """
    if num_beams < 1 or max_tokens < 1:
        raise ValueError(f"num_beams={num_beams}, max_tokens={max_tokens}; expected at least 1 each")
    if early_stopping not in (True, False, "never"):
        raise ValueError(f"early_stopping={early_stopping!r}; expected True, False or 'never'")
    limit = length_limit(model, None)
    check_prompt(prompt, model.cfg.vocab, limit, "the prompt")
    most = int(min(max_tokens, limit - len(prompt)))
    eos = default_eos(model) if eos is None else tuple(eos)
    tokens: list[list[int]] = [[] for _ in range(num_beams)]
    scores = np.array([0] + [NEVER] * (num_beams - 1), np.float32)
    done = Finished([[]] * num_beams, np.full(num_beams, NEVER, np.float32))
    search = _Search(model, prompt, num_beams, max(2, 1 + len(eos)) * num_beams, most)
    values, parents, ids = search.begin(scores)
    for length in range(1, most + 1):
        grown = [tokens[p] + [t] for p, t in zip(parents, ids, strict=True)]
        ends = np.array([length == most or t in eos for t in ids])
        closing = np.where(ends & (np.arange(len(ids)) < num_beams), values / np.float32(length**length_penalty), NEVER)
        done = done.add(grown, closing.astype(np.float32))
        keep = np.argsort(-np.where(ends, values + NEVER, values), kind="stable")[:num_beams]
        tokens, scores = [grown[i] for i in keep], values[keep]
        full = done.worst > NEVER
        judged = most if early_stopping == "never" and length_penalty > 0 else length
        hopeless = full and scores[0] / np.float32(judged**length_penalty) <= done.worst
        if length == most or hopeless or (full and early_stopping is True):
            break
        values, parents, ids = search.grow(parents[keep], ids[keep], scores)
    return [Beam(t, float(s)) for t, s in zip(done.tokens, done.scores, strict=True) if s > NEVER]


class _Search:
    """The device side: the state of all beams, and the best continuations of each step."""

    def __init__(self, model: Model, prompt: Sequence[int], beams: int, keep: int, room: int):
        self.model = model._replace(params=P.unstack(model.params))
        self.table = cache_table(beams, len(prompt) + room)
        self.first, self.next = _programs(model.family, model.cfg, min(keep, beams * model.cfg.vocab))
        self.prompt, self.position = prompt, len(prompt)

    def begin(self, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Run the prompt in row 0; the best first tokens."""
        params, table, n = self.model.params, self.table, len(self.table)
        begin = programs(self.model.family, self.model.cfg, mesh_of(params)).begin
        (self.state,), _ = begin(rows=n, length=1, pages=table.size, dtypes=(compute_dtype(params),))
        for tokens, batch, last in prefill_batches(self.prompt, table):
            self.state, *best = self.first(params, self.state, tokens, batch, np.full(n, last, np.int32), scores)
        return self._read(best)

    def grow(self, parents: np.ndarray, ids: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, ...]:
        """Continue beams `parents` with tokens `ids`; the best next tokens."""
        positions = np.full(len(ids), self.position, np.int32)
        self.state, *best = self.next(
            self.model.params, self.state, parents.astype(np.int32), ids, positions, self.table, scores
        )
        self.position += 1
        return self._read(best)

    def _read(self, best: list[jax.Array]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        values, indices = jax.device_get(best)
        if np.isnan(values).any():
            raise ValueError(f"logits are not finite at token {self.position}; check weights and dtype")
        return values, indices // self.model.cfg.vocab, indices % self.model.cfg.vocab


@functools.lru_cache(maxsize=16)
def _programs(family: ModuleType, cfg: Any, keep: int) -> tuple[Callable, Callable]:
    """Jit the two steps; cached for the reason that `step.programs` gives."""

    def best(logits: Array, scores: Array) -> tuple[Float[Array, " keep"], Int[Array, " keep"]]:
        values, indices = jax.lax.top_k((jax.nn.log_softmax(logits) + scores[:, None]).reshape(-1), keep)
        return values, indices

    def first(params, state, tokens: Array, batch: ops.Paged, last: Array, scores: Array) -> tuple:
        logits, state = prefill_logits(family, cfg, params, state, tokens, batch, last)
        return state, *best(logits, scores)

    def following(params, state, parents: Array, tokens: Array, positions: Array, table: Array, scores: Array) -> tuple:
        state = reorder(state, parents)
        logits, state = decode_logits(family, cfg, params, state, tokens, positions, table)
        return state, *best(logits, scores)

    return jax.jit(first, donate_argnums=1), jax.jit(following, donate_argnums=1)


def cache_table(rows: int, length: int) -> np.ndarray:
    """Give each of `rows` rows pages of its own for `length` tokens (or a few more): int32[rows pages]."""
    return np.arange(rows * bucket(-(-length // PAGE)), dtype=np.int32).reshape(rows, -1)


def prefill_batches(prompt: Sequence[int], table: np.ndarray) -> Iterator[tuple[np.ndarray, ops.Paged, int]]:
    """Cut the prompt of row 0 into calls of at most PREFILL tokens: (tokens, batch, the place of the last one)."""
    for start in range(0, len(prompt), PREFILL):
        new = list(prompt[start : start + PREFILL])
        size = max(BLOCK, 1 << (len(new) - 1).bit_length())
        yield *ops.paged([(0, start, new)], table, block=BLOCK, size=size), len(new) - 1


def prefill_logits(
    family: ModuleType, cfg: Any, params: Any, state: ops.State, tokens: Array, batch: ops.Paged, last: Int[Array, " B"]
) -> tuple[Float[Array, "B V"], ops.State]:
    """Run prompt tokens; only those at indices `last` go through the head (the last one for indices out of range)."""
    x, state = family.hidden(params, tokens, cfg, batch, state)
    return ops.logits(x.at[last].get(mode="clip"), family.head(params, cfg)), state


def decode_logits(
    family: ModuleType, cfg: Any, params: Any, state: ops.State, tokens: Array, positions: Array, table: Array
) -> tuple[Float[Array, "B V"], ops.State]:
    """Run one token per row."""
    batch = ops.Paged(positions, table, jnp.arange(table.shape[0]), 1)
    x, state = family.hidden(params, tokens, cfg, batch, state)
    return ops.logits(x, family.head(params, cfg)), state


def reorder(state: ops.State, parents: Int[Array, " B"]) -> ops.State:
    """Let row i continue row parents[i]: copies its slots and its pages, of which every row has equally many."""

    def pages(x: Array) -> Array:
        return x.reshape(x.shape[0], len(parents), -1, *x.shape[2:])[:, parents].reshape(x.shape)

    def one(x: Any) -> Any:
        return jax.tree.map(pages, x) if isinstance(x, ops.Pages) else jax.tree.map(lambda s: s[:, parents], x)

    return jax.tree.map(one, state, is_leaf=lambda x: isinstance(x, ops.Pages | ops.Slots))
