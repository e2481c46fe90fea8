"""How likely given continuations are, many at a time: what multiple choice and perplexity ask of a model."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from fdel.serve.engine.engine import Engine
from fdel.serve.engine.request import check_prompt

TOKENS = 16384  # most tokens of a batch, which bounds its memory
TARGETS = 128  # their number is filled up to a multiple of this
SHORTEST = 16  # tokens of a row that programs are compiled for

Pair = tuple[Sequence[int], Sequence[int]]  # a context, and what may follow it


class Likelihood(NamedTuple):
    """The natural logarithm of a continuation's probability, and whether each of its tokens is the likeliest."""

    logprob: float
    greedy: bool


class Batch(NamedTuple):
    """Rows to run through a model, and the places in them whose next token is scored."""

    tokens: Int[np.ndarray, "B T"]
    lengths: Int[np.ndarray, " B"]
    targets: Int[np.ndarray, "3 N"]  # row, place and next token
    spans: list[tuple[int, int, int]]  # of each pair in it: which one, and where its tokens stand in `targets`


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
    limit, vocab = engine.limit, engine.model.cfg.vocab
    rows: list[tuple[list[int], list[int]]] = []  # what the model reads, and what should follow its last tokens
    for i, (context, continuation) in enumerate(pairs):
        check_prompt(context, vocab, len(context) + 1, f"context {i}")
        check_prompt(continuation, vocab, limit + 1, f"continuation {i}")
        rows.append(([*context, *continuation][-(limit + 1) : -1], list(continuation)))
    scores = [Likelihood(0.0, True)] * len(pairs)

    def read(filled: Batch, out: Any) -> None:
        logprobs, greedy = np.asarray(out[0]), np.asarray(out[1])[:, 0] == filled.targets[2]
        for i, first, end in filled.spans:
            total = logprobs[first:end].sum(dtype=np.float64)
            scores[i] = Likelihood(float(total), bool(greedy[first:end].all()))
        progress(len(filled.spans))

    waiting: list[tuple[Batch, Any]] = []  # the batch that the device computes while the next one is made
    for filled in _batches(rows, batch, limit):
        waiting.append((filled, engine.score_rows(filled[:2], filled.targets, filled.spans[-1][2], adapter=adapter)))
        if len(waiting) > 1:
            read(*waiting.pop(0))
    for last in waiting:
        read(*last)
    return scores


def _batches(rows: Sequence[tuple[list[int], list[int]]], most: int, limit: int) -> Iterator[Batch]:
    """Divide rows among batches, the longest first, so that rows of like lengths are padded together."""
    order = sorted(range(len(rows)), key=lambda i: (-len(rows[i][0]), rows[i][0]))
    while order:
        longest = len(rows[order[0]][0])
        step = 1 << max(0, (longest - 1).bit_length() - 2)  # 16, 24, 32, 48, 64, 96, ...: few sizes are compiled
        width = min(max(SHORTEST, -(-longest // step) * step), limit)
        height = max(1, min(most, TOKENS // width))
        slots = -(-height * width // TARGETS) * TARGETS
        inputs: list[list[int]] = []
        targets: list[tuple[int, int, int]] = []
        spans: list[tuple[int, int, int]] = []
        for i in order:
            tokens, wanted = rows[i]
            new = not inputs or tokens != inputs[-1]
            if len(inputs) + new > height or len(targets) + len(wanted) > slots:
                break
            inputs += [tokens] if new else []
            first = len(tokens) - len(wanted)
            spans.append((i, len(targets), len(targets) + len(wanted)))
            targets += [(len(inputs) - 1, first + k, t) for k, t in enumerate(wanted)]
        height = min(height, 1 << (len(inputs) - 1).bit_length())
        zeros = lambda *shape: np.zeros(shape, np.int32)
        out = Batch(zeros(height, width), zeros(height), zeros(3, slots), spans)
        for row, tokens in enumerate(inputs):
            out.tokens[row, : len(tokens)], out.lengths[row] = tokens, len(tokens)
        out.targets[:, : len(targets)] = np.transpose(targets)
        yield out
        order = order[len(spans) :]
