"""Beam search over the same steps as `generate`, one prompt at a time; every beam is a row."""

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from fdel import ops
from fdel import params as P
from fdel.models import Model
from fdel.serve.engine.pages import bucket
from fdel.serve.engine.request import check_prompt, end_ids, length_limit
from fdel.serve.engine.step import PAGE, compute_dtype, mesh_of, on_mesh, programs

PREFILL, BLOCK = 2048, 32  # tokens of one prefill call, and of one of its blocks
NEVER = np.float32(-1e9)  # the score of what must not be chosen


class Beam(NamedTuple):
    """One finished sequence: its output tokens, and the sum of their log-probabilities / length ** length_penalty."""

    tokens: list[int]
    score: float


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
    most, eos = int(min(max_tokens, limit - len(prompt))), end_ids(model, eos)
    tokens: list[list[int]] = [[]] * num_beams
    scores = np.array([0] + [NEVER] * (num_beams - 1), np.float32)
    ended, finals = tokens, np.full(num_beams, NEVER, np.float32)  # the best complete ones so far, best first
    begin, grow = _steps(model, num_beams, max(2, 1 + len(eos)) * num_beams, len(prompt) + most)
    values, parents, ids = begin(prompt, scores)
    for length in range(1, most + 1):
        grown = [tokens[p] + [t] for p, t in zip(parents, ids, strict=True)]
        ends = np.array([length == most or t in eos for t in ids])
        closing = np.where(ends & (np.arange(len(ids)) < num_beams), values / np.float32(length**length_penalty), NEVER)
        finals = np.concatenate([finals, closing.astype(np.float32)])
        order = np.argsort(-finals, kind="stable")[:num_beams]  # of equals the earlier
        ended, finals = [[*ended, *grown][i] for i in order], finals[order]
        keep = np.argsort(-np.where(ends, values + NEVER, values), kind="stable")[:num_beams]
        tokens, scores = [grown[i] for i in keep], values[keep]
        full = finals[-1] > NEVER
        judged = most if early_stopping == "never" and length_penalty > 0 else length
        hopeless = full and scores[0] / np.float32(judged**length_penalty) <= finals[-1]
        if length == most or hopeless or (full and early_stopping is True):
            break
        values, parents, ids = grow(len(prompt) + length - 1, parents[keep], ids[keep], scores)
    return [Beam(t, float(s)) for t, s in zip(ended, finals, strict=True) if s > NEVER]


def _steps(model: Model, beams: int, keep: int, length: int) -> tuple[Callable, Callable]:
    """The device side, with the state of all beams: (run the prompt in row 0, continue beams `parents` with tokens).

    Both give the `keep` best next tokens: their scores, beams and ids.
    """
    params, vocab = P.unstack(model.params), model.cfg.vocab
    pages = beams * bucket(-(-length // PAGE))
    table: Any = np.arange(pages, dtype=np.int32).reshape(beams, -1)
    every: Any = np.arange(beams, dtype=np.int32)
    mesh = mesh_of(params)
    program = _program(model.family, model.cfg, min(keep, beams * vocab), mesh)
    make = programs(model.family, model.cfg, mesh).begin
    (state,), _ = make(rows=beams, length=1, pages=pages, dtypes=(compute_dtype(params),))

    def begin(prompt: Sequence[int], scores: np.ndarray) -> tuple[np.ndarray, ...]:
        nonlocal state
        for start in range(0, len(prompt), PREFILL):
            new = list(prompt[start : start + PREFILL])
            size = max(BLOCK, 1 << (len(new) - 1).bit_length())
            tokens, batch = ops.paged([(0, start, new)], table, block=BLOCK, size=size)
            state, *best = program(params, state, None, tokens, batch, 0 * every + len(new) - 1, scores)
        return read(best, len(prompt))

    def grow(position: int, parents: np.ndarray, ids: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, ...]:
        nonlocal state
        batch = ops.Paged(0 * every + position, table, every, 1)
        state, *best = program(params, state, parents.astype(np.int32), ids, batch, every, scores)
        return read(best, position + 1)

    def read(best: list[jax.Array], known: int) -> tuple[np.ndarray, ...]:
        values, indices = jax.device_get(best)
        if np.isnan(values).any():
            raise ValueError(f"logits are not finite at token {known}; check weights and dtype")
        return values, *divmod(indices, vocab)

    return begin, grow


@functools.lru_cache(maxsize=16)
def _program(family: ModuleType, cfg: Any, keep: int, mesh: Any) -> Callable:
    """Jit a step of all beams; cached for the reason that `step.programs` gives.

    Row i continues row parents[i], whose slots and pages (every row has equally many) are copied; None copies nothing.
    Only tokens at indices `last` go through the head, one for each beam.
    """

    def step(params, state, parents, tokens: Array, batch: ops.Paged, last: Array, scores: Array) -> tuple:
        if parents is not None:
            pages = lambda x: x.reshape(len(x), len(parents), -1, *x.shape[2:])[:, parents].reshape(x.shape)
            slots = jax.tree.map(lambda x: x[:, parents], state.slots)
            state = ops.State(jax.tree.map(pages, state.pages), slots)
        x, state, _ = family.hidden(params, tokens, cfg, batch, state)
        logits = ops.logits(x[last], family.head(params, cfg))
        return state, *jax.lax.top_k((jax.nn.log_softmax(logits) + scores[:, None]).reshape(-1), keep)

    return jax.jit(ops.tracing_once()(on_mesh(mesh, step)), donate_argnums=1)
