"""How likely given continuations are, many at a time: what multiple choice and perplexity ask of a model."""

import functools
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from fdel import ops
from fdel.serve.engine import Engine
from fdel.serve.request import check_prompt
from fdel.serve.step import mesh_of

TOKENS = 16384  # most tokens of a batch, which bounds its memory
HEADS = 128  # tokens whose logits are in memory at once
SHORTEST = 16  # tokens of a row that programs are compiled for

Pair = tuple[Sequence[int], Sequence[int]]  # a context, and what may follow it


class Likelihood(NamedTuple):
    """The natural logarithm of a continuation's probability, and whether each of its tokens is the likeliest."""

    logprob: float
    greedy: bool


class Batch(NamedTuple):
    """Rows to run through a model, and the places in them whose next token is asked for."""

    tokens: Int[np.ndarray, "B T"]
    lengths: Int[np.ndarray, " B"]
    asked: Int[np.ndarray, "3 N"]  # row, place and next token
    spans: list[tuple[int, int, int]]  # of each pair in it: which one, and where its tokens stand in `asked`


def likelihoods(
    engine: Engine,
    pairs: Sequence[Pair],
    *,
    batch: int = 32,
    adapter: str = "",
    progress: Callable[[int], Any] = lambda n: None,
) -> list[Likelihood]:
    """Score continuations of contexts, in token ids; what does not fit the engine's limit is cut from the left.

    The model reads at most `engine.limit` tokens, so a context and its continuation may have one more. `batch` rows run
    at a time, fewer where they would exceed `TOKENS`; pairs that differ in their last token alone share a row.
    `progress` is told how many pairs are done. ValueError for an empty context or continuation, for a continuation
    longer than the limit, and for ids outside of the vocabulary.
    """
    if batch < 1:
        raise ValueError(f"batch={batch}; expected at least 1")
    if reason := engine.core.device.fixed:
        raise ValueError(reason)
    rows = [_inputs(engine, i, *pair) for i, pair in enumerate(pairs)]
    score = scorer(engine.model.family, engine.model.cfg, mesh_of(engine.model.params))
    weights, found = engine.weights(adapter), [Likelihood(0.0, True)] * len(pairs)

    def read(made: Batch, out: Any) -> None:
        logprobs, greedy = (np.asarray(x) for x in out)
        for i, first, end in made.spans:
            total = logprobs[first:end].sum(dtype=np.float64)
            found[i] = Likelihood(float(total), bool(greedy[first:end].all()))
        progress(len(made.spans))

    waiting: list[tuple[Batch, Any]] = []  # the batch that the device computes while the next one is made
    for made in _batches(rows, batch, engine.limit):
        waiting.append((made, score(weights, made.tokens, made.lengths, made.asked, np.int32(made.spans[-1][2]))))
        if len(waiting) > 1:
            read(*waiting.pop(0))
    for last in waiting:
        read(*last)
    return found


def _inputs(engine: Engine, i: int, context: Sequence[int], continuation: Sequence[int]) -> tuple[list[int], list[int]]:
    """Give what the model reads and what should follow its last tokens."""
    limit, vocab = engine.limit, engine.model.cfg.vocab
    check_prompt(context, vocab, len(context) + 1, f"context {i}")
    check_prompt(continuation, vocab, limit + 1, f"continuation {i}")
    return [*context, *continuation][-(limit + 1) : -1], list(continuation)


def _batches(rows: Sequence[tuple[list[int], list[int]]], most: int, limit: int) -> Iterator[Batch]:
    """Divide rows among batches, the longest first, so that rows of like lengths are padded together."""
    order = sorted(range(len(rows)), key=lambda i: (-len(rows[i][0]), rows[i][0]))
    while order:
        width = min(_width(len(rows[order[0]][0])), limit)
        height = max(1, min(most, TOKENS // width))
        slots = -(-height * width // HEADS) * HEADS
        inputs: list[list[int]] = []
        asked: list[tuple[int, int, int]] = []
        spans: list[tuple[int, int, int]] = []
        for i in order:
            tokens, wanted = rows[i]
            new = not inputs or tokens != inputs[-1]
            if len(inputs) + new > height or len(asked) + len(wanted) > slots:
                break
            inputs += [tokens] if new else []
            first = len(tokens) - len(wanted)
            spans.append((i, len(asked), len(asked) + len(wanted)))
            asked += [(len(inputs) - 1, first + k, t) for k, t in enumerate(wanted)]
        height = min(height, 1 << (len(inputs) - 1).bit_length())
        out = Batch(
            np.zeros((height, width), np.int32), np.zeros(height, np.int32), np.zeros((3, slots), np.int32), spans
        )
        for row, tokens in enumerate(inputs):
            out.tokens[row, : len(tokens)], out.lengths[row] = tokens, len(tokens)
        out.asked[:, : len(asked)] = np.transpose(asked)
        yield out
        order = order[len(spans) :]


def _width(n: int) -> int:
    """Round up to 16, 24, 32, 48, 64, 96, ...: few sizes are compiled, and sorted rows waste little of them."""
    step = 1 << max(0, (n - 1).bit_length() - 2)
    return max(SHORTEST, -(-n // step) * step)


@functools.lru_cache(maxsize=16)
def scorer(family: ModuleType, cfg: Any, mesh: Mesh | None = None) -> Callable[..., tuple[Array, Array]]:
    """Make the jitted function (params, tokens[B, T], lengths[B], asked[3, N], how many) -> (logprobs[N], likeliest[N]).

    Logits are computed where they are asked for alone, a few at a time. It is cached as `step.programs` is.
    """

    def score(
        params: Any, tokens: Array, lengths: Array, asked: Array, count: Array
    ) -> tuple[Float[Array, " N"], Bool[Array, " N"]]:
        x, head = family.hidden(params, tokens, cfg, ops.packed(tokens, lengths))[0], family.head(params, cfg)

        def some(i: Array, out: tuple[Array, Array]) -> tuple[Array, Array]:
            row, place, following = jax.lax.dynamic_slice_in_dim(asked, i * HEADS, HEADS, 1)
            logits = ops.logits(x[row, place], head)
            picked = jnp.take_along_axis(logits, following[:, None], 1)[:, 0]
            new = picked - jax.nn.logsumexp(logits, -1), logits.argmax(-1) == following
            put = lambda every, part: jax.lax.dynamic_update_slice_in_dim(every, part, i * HEADS, 0)
            return put(out[0], new[0]), put(out[1], new[1])

        size = asked.shape[1]
        return jax.lax.fori_loop(0, -(-count // HEADS), some, (jnp.zeros(size), jnp.zeros(size, bool)))

    return jax.jit(score, out_shardings=mesh and NamedSharding(mesh, PartitionSpec()))
