"""Generate from prompts of token ids: prefill in blocks, then one token per row and step, read one step late."""

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from fdel import ops, text
from fdel import params as P
from fdel.models import Model
from fdel.serve.reply import Delta, Generation, Reply
from fdel.serve.request import SamplingParams, stop_ids
from fdel.serve.sample import Sampled, sampling_rows
from fdel.serve.step import PAGE, mesh_of, programs

PREFILL = 2048  # most tokens, padding included, of one prefill call
BLOCKS = (16, 64)  # block sizes of prefill: the small one for prompts that are all short


def generate(
    model: Model,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    tokenizer: text.Tokenizer | None = None,
    eos: Sequence[int] | None = None,
    max_length: int | None = None,
    batch_size: int = 32,
    **options: Any,
) -> list[Generation]:
    """Continue each prompt with a cache; greedy unless asked otherwise.

    `sampling` is one `SamplingParams` for all or one per prompt; or give its fields as options (`max_tokens=32`). A
    seed is used as it is for each prompt, so the same prompt twice gives the same output twice; results never depend
    on the other prompts. `eos` defaults to the tokenizer's, else to config.json's. `max_length` caps prompt and
    output together, by default at the model's context. Up to `batch_size` prompts run at a time, with cache for their
    longest possible output. Stacked layers are unstacked at each call, which copies them: for several calls pass
    `params.unstack(params)`. Raises ValueError for empty or too long prompts, wrong ids, and logits that are not
    finite.
    """
    requests = _requests(len(prompts), sampling, options)
    model, replies = _prepare(model, prompts, requests, tokenizer, eos, max_length)
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}; expected at least 1")
    for first in range(0, len(prompts), batch_size):
        group = slice(first, first + batch_size)
        for rows, out in _late(_launch(model, prompts[group], replies[group])):
            for i in rows:
                _push(replies[first + i], out, i, first + i)
            if all(r.finish_reason for r in replies[group]):
                break
    return [r.generation() for r in replies]


def stream(
    model: Model,
    prompt: Sequence[int],
    sampling: SamplingParams | None = None,
    *,
    tokenizer: text.Tokenizer | None = None,
    eos: Sequence[int] | None = None,
    max_length: int | None = None,
    **options: Any,
) -> Iterator[Delta]:
    """Continue one prompt as `generate` does and yield each token, with its text, when it is known."""
    requests = _requests(1, sampling, options)
    model, (reply,) = _prepare(model, [prompt], requests, tokenizer, eos, max_length)

    def deltas() -> Iterator[Delta]:
        for _, out in _late(_launch(model, [prompt], [reply])):
            yield _push(reply, out, 0, 0)
            if reply.finish_reason:
                return

    return deltas()  # apart, so that errors of the arguments are raised by the call and not by the first token


# ---- requests ------------------------------------------------------------------------------------------------------


def _requests(n: int, sampling: Any, options: dict[str, Any]) -> list[SamplingParams]:
    if sampling is not None and options:
        raise ValueError(f"got sampling and {', '.join(options)}; put these into the SamplingParams")
    if sampling is None:
        sampling = SamplingParams(**options)
    requests = [sampling] * n if isinstance(sampling, SamplingParams) else list(sampling)
    if len(requests) != n:
        raise ValueError(f"{len(requests)} SamplingParams for {n} prompts; give one, or one per prompt")
    return requests


def _prepare(
    model: Model,
    prompts: Sequence[Sequence[int]],
    requests: list[SamplingParams],
    tokenizer: text.Tokenizer | None,
    eos: Sequence[int] | None,
    max_length: int | None,
) -> tuple[Model, list[Reply]]:
    """Check everything, before anything runs."""
    if eos is None:
        eos = default_eos(model) if tokenizer is None else tokenizer.eos_ids
    if tokenizer is None and any(r.stops for r in requests):
        raise ValueError("stop strings need a tokenizer; pass tokenizer=text.load(folder), or use stop_token_ids")
    limit = length_limit(model, max_length)
    replies = []
    for i, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
        check_prompt(prompt, model.cfg.vocab, limit, f"prompt {i}")
        room = int(min(request.max_tokens, limit - len(prompt)))
        stream_of = None if tokenizer is None else text.Detokenizer(tokenizer)
        replies.append(Reply(request, stop_ids(request, eos), room, stream_of))
    return model._replace(params=P.unstack(model.params)), replies


def default_eos(model: Model) -> tuple[int, ...]:
    """The ids that config.json names as the end of a text."""
    found = json.loads(model.cfg.source).get("eos_token_id")
    return () if found is None else (found,) if isinstance(found, int) else tuple(found)


def length_limit(model: Model, max_length: int | None) -> float:
    """The most tokens of prompt and output: the model's context, `max_length` if that is less; infinity for neither."""
    context = getattr(model.cfg, "max_positions", None)
    return min(x for x in (max_length, context, math.inf) if x is not None)


def check_prompt(prompt: Sequence[int], vocab: int, limit: float, name: str) -> None:
    """Raise ValueError for a prompt that is empty, leaves no room for a token, or holds ids outside the vocabulary."""
    if not len(prompt):
        raise ValueError(f"{name} is empty; it needs at least one token, such as the tokenizer's bos")
    if len(prompt) >= limit:
        raise ValueError(f"{name} has {len(prompt)} tokens; prompt and output must fit {limit}, so shorten it")
    wrong = [t for t in prompt if not (isinstance(t, int | np.integer) and 0 <= t < vocab)]
    if wrong:
        raise ValueError(f"{name} holds {wrong[:5]}; expected token ids from 0 to {vocab - 1}")


def _push(reply: Reply, out: Sampled, i: int, prompt: int) -> Delta:
    """Hand row i of a step's output to its reply; tokens that were drawn after its end are ignored."""
    if reply.finish_reason:
        return Delta([], "", reply.finish_reason)
    if math.isnan(logprob := float(out.logprobs[i])):
        at = len(reply.tokens)
        raise ValueError(f"prompt {prompt}: logits are not finite at output token {at}; check weights and dtype")
    n = reply.request.logprobs
    top = zip(*(np.asarray(x)[i, :n].tolist() for x in out[2:]), strict=True) if n else ()
    return reply.push(int(out.tokens[i]), logprob, top)


# ---- steps ---------------------------------------------------------------------------------------------------------


def bucket(n: int) -> int:
    """Round up to three significant bits (..., 8, 10, 12, 14, 16, 20, ...), so that few sizes are compiled."""
    step = 1 << max(0, n.bit_length() - 3)
    return -(-n // step) * step


def cache_table(rows: int, length: int) -> np.ndarray:
    """Give each of `rows` rows pages of its own for `length` tokens (or a bucket more): int32[rows pages]."""
    width = bucket(-(-length // PAGE))
    return np.arange(rows * width, dtype=np.int32).reshape(rows, width)


def compute_dtype(params: Any) -> np.dtype:
    """The dtype that activations have, and so keys, values and recurrent inputs."""
    return jax.eval_shape(lambda table: ops.embed(table, jnp.zeros(1, jnp.int32)), params["embed"]).dtype


def prefill_batches(
    prompts: Sequence[Sequence[int]], table: np.ndarray
) -> Iterator[tuple[list[int], np.ndarray, ops.Paged, np.ndarray]]:
    """Cut prompts into calls of at most PREFILL tokens: (rows that end there, tokens, batch, their last tokens).

    The size of a call is a power of two; `last` is out of range for rows that do not end in it.
    """
    block = next((b for b in BLOCKS if max(map(len, prompts)) <= 2 * b), BLOCKS[-1])
    todo = [(row, 0, list(prompt)) for row, prompt in enumerate(prompts)]
    while todo:
        chunks, used, ends, last = [], 0, [], {}
        while todo and used < PREFILL:
            row, start, rest = todo.pop(0)
            new, rest = rest[: PREFILL - used], rest[PREFILL - used :]
            chunks.append((row, start, new))
            if rest:
                todo.insert(0, (row, start + len(new), rest))
            else:
                ends.append(row)
                last[row] = used + len(new) - 1
            used += -(-len(new) // block) * block
        size = max(block, 1 << (used - 1).bit_length())
        tokens, batch = ops.paged(chunks, table, block=block, size=size)
        yield ends, tokens, batch, np.array([last.get(row, size) for row in range(len(table))], np.int32)


def _launch(
    model: Model, prompts: Sequence[Sequence[int]], replies: Sequence[Reply]
) -> Iterator[tuple[Sequence[int], Sampled]]:
    """Start one program after the other; yield (rows, output), the output not yet computed."""
    count = 1 << (len(prompts) - 1).bit_length()
    lengths = [len(p) for p in prompts]
    table = cache_table(count, max(n + r.room for n, r in zip(lengths, replies, strict=True)))
    tokens = np.zeros((count, table.shape[1] * PAGE), np.int32)
    for i, prompt in enumerate(prompts):
        tokens[i, : len(prompt)] = prompt
    asked = [r.request for r in replies], lengths, [r.ends for r in replies], [r.room for r in replies]
    mesh = mesh_of(model.params)
    everywhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    sampling = jax.device_put(sampling_rows(*asked, vocab=model.cfg.vocab, rows=count), everywhere)
    program = programs(model.family, model.cfg, mesh)
    length = np.array(lengths + [1] * (count - len(lengths)), np.int32)
    rows = program.begin(tokens, length, pages=table.size, dtype=compute_dtype(model.params))
    for ends, tokens, batch, last in prefill_batches(prompts, table):
        rows, out = program.extend(model.params, rows, sampling, tokens, batch, last)
        if ends:
            yield ends, out
    everyone, table = range(len(prompts)), jax.device_put(table, everywhere)
    for _ in range(max(r.room for r in replies) - 1):
        rows, out = program.decode(model.params, rows, sampling, table)
        yield everyone, out


def _late(launched: Iterator[tuple[Sequence[int], Sampled]]) -> Iterator[tuple[Sequence[int], Sampled]]:
    """Read each output after the next program is started, so that the device does not wait for the host."""
    before = None
    for now in launched:
        if before is not None:
            yield before[0], _read(before[1])
        before = now
    if before is not None:
        yield before[0], _read(before[1])


def _read(out: Sampled) -> Sampled:
    tokens, logprobs = jax.device_get(out[:2])  # the others only if asked for: each array costs 25 us
    return out._replace(tokens=tokens, logprobs=logprobs)
