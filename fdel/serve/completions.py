"""Completions, embeddings, scores, tokens: from a parsed body to an answer."""

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
from aiohttp import web

from fdel import text
from fdel.serve import openai
from fdel.serve.frames import PING, Frames, stream
from fdel.serve.openai import APIError, body
from fdel.serve.reply import Delta, Score
from fdel.serve.request import check_prompt
from fdel.serve.runs import Run
from fdel.serve.served import Served
from fdel.serve.state import Call

# ---- completions ---------------------------------------------------------------------------------------------------


async def completions(call: Call) -> web.StreamResponse:
    """POST /v1/completions."""
    served = call.served()
    asked = await call.parse(openai.parse_completion, served)
    prompts = await call.encode(served, asked.prompts, asked.special)
    matcher = await call.matcher(served, asked.grammar)
    meta = body.meta("cmpl", time.time(), asked.model, asked.usage)
    if asked.scored:
        _check_lengths(served, prompts)
        run = call.idle(served, prompts, asked.sampling)
    else:
        prompts, sampling = served.fit(prompts, asked.sampling)
        run = call.run(served, prompts, sampling, matcher, asked.salt)
    try:
        scores = await _echoed(call, served, prompts, asked)
    except BaseException:
        run.abort()
        raise
    writer = _Written(served, asked, prompts, scores)
    if asked.stream:
        return await stream(call, _completion_frames(run, writer, meta))
    said, reasons = [""] * len(run.jobs), [""] * len(run.jobs)
    async for item in run.deltas():
        if item is not None:
            i, delta = item
            said[i] += delta.text
            reasons[i] = delta.finish_reason or reasons[i]
    if asked.scored:
        choices = [writer.prompt(i, "length") for i in range(len(prompts))]
    else:
        choices = [
            writer.choice(index, i // run.each, said[i], run.jobs[i].reply, reasons[i])
            for index, i in enumerate(run.best())
        ]
    return call.json(body.completion(meta, choices, run.usage()))


async def _echoed(
    call: Call, served: Served, prompts: Sequence[Sequence[int]], asked: openai.Completion
) -> list[Score] | None:
    """Score the prompts, if the answer repeats them with log-probabilities."""
    if not asked.echo or asked.logprobs is None:
        return None
    engine, most = served.engine, asked.logprobs
    one = lambda p: lambda: engine.score(p, most, adapter=served.adapter)
    return [await call.aside(one(p)) for p in prompts]


class _Written:
    """Writes the choices of a completion."""

    def __init__(
        self, served: Served, asked: openai.Completion, prompts: Sequence[Sequence[int]], scores: list[Score] | None
    ):
        self.served, self.asked, self.prompts, self.scores = served, asked, prompts, scores
        self.said = [p if isinstance(p, str) else text.decode(served.tokenizer, p) for p in asked.prompts]

    def _logprobs(self, ids: Sequence[int], logprobs: Sequence, top: Sequence[dict], offset: int = 0) -> Any:
        if self.asked.logprobs is None:
            return None
        return body.completion_logprobs(self.served.tokenizer, ids, logprobs, top, self.asked.logprobs, offset)

    def choice(self, index: int, prompt: int, said: str, reply: Any, reason: str) -> dict[str, Any]:
        """A whole output, with its prompt if that is echoed."""
        ids, logprobs, top = list(reply.tokens), list(reply.logprobs), list(reply.top)
        if self.asked.echo:
            said = self.said[prompt] + said
        if self.scores is not None:
            score = self.scores[prompt]
            ids, logprobs = [*self.prompts[prompt], *ids], [*score.logprobs, *logprobs]
            top = [*score.top_logprobs, *(top or [{}] * len(reply.tokens))]
        return body.completion_choice(index, said, reason, self._logprobs(ids, logprobs, top))

    def prompt(self, i: int, reason: str | None, index: int | None = None) -> dict[str, Any]:
        """The prompt alone."""
        logprobs = None
        if self.scores is not None:
            logprobs = self._logprobs(self.prompts[i], self.scores[i].logprobs, self.scores[i].top_logprobs)
        return body.completion_choice(i if index is None else index, self.said[i], reason, logprobs)

    def piece(self, index: int, delta: Delta, offset: int) -> dict[str, Any]:
        """What a step added; its text begins at `offset`."""
        logprobs = self._logprobs(delta.tokens, delta.logprobs, delta.top_logprobs, offset) if delta.tokens else None
        return body.completion_choice(index, delta.text, delta.finish_reason, logprobs)


async def _completion_frames(run: Run, writer: _Written, meta: body.Meta) -> Frames:
    asked = writer.asked
    count = len(run.jobs) or len(writer.prompts)
    offsets = [len(writer.said[i // run.each]) if asked.echo else 0 for i in range(count)]
    if asked.echo:
        for i in range(count):
            reason = "length" if asked.scored else None
            yield body.sse(body.completion(meta, [writer.prompt(i // run.each, reason, i)], None))
    async for item in run.deltas(PING):
        if item is None:
            yield body.PING
            continue
        i, delta = item
        yield body.sse(body.completion(meta, [writer.piece(i, delta, offsets[i])], None))
        offsets[i] += len(delta.text)
    used = body.sse(body.usage_chunk(meta, run.usage(), "text_completion")) if meta.usage else b""
    yield used + body.DONE


# ---- the others ----------------------------------------------------------------------------------------------------


async def embeddings(call: Call) -> web.Response:
    """POST /v1/embeddings: the last token's final hidden state, of unit length."""
    served = call.served()
    asked = await call.parse(openai.parse_embeddings, served)
    width = served.engine.model.cfg.embed
    if asked.dimensions not in (None, width):
        raise APIError(f"dimensions: found {asked.dimensions}, this model has {width}", param="dimensions")
    ids = await call.encode(served, asked.inputs)
    vectors = await _embed(call, served, ids)
    return call.json(body.embeddings(asked.model, vectors, asked.base64, sum(map(len, ids))))


def _check_lengths(served: Served, prompts: Sequence[Sequence[int]]) -> None:
    """Refuse texts that are longer than the context, or have ids that the model lacks."""
    for x in prompts:
        openai.fit(openai.request.SamplingParams(max_tokens=1), len(x) - 1, served.engine.limit)
        try:
            check_prompt(x, served.engine.model.cfg.vocab, served.engine.limit + 1, "the prompt")
        except ValueError as e:
            raise APIError(str(e), param="prompt") from e


async def _embed(call: Call, served: Served, ids: Sequence[Sequence[int]]) -> list[np.ndarray]:
    _check_lengths(served, ids)
    call.admit(sum(map(len, ids)))
    unit = lambda v: v / max(float(np.linalg.norm(v)), 1e-12)
    one = lambda x: lambda: unit(served.engine.embed(x, adapter=served.adapter))
    return [await call.aside(one(x)) for x in ids]  # others take their turns between, and a client may leave


def ranker(parse: Callable, write: Callable) -> Callable[[Call], Awaitable[web.Response]]:
    """Make the route of scores or of a ranking: the cosine of the two texts' embeddings."""

    async def rank(call: Call) -> web.Response:
        served = call.served()
        asked = await call.parse(parse, served)
        texts = list(dict.fromkeys(t for pair in asked.pairs for t in pair))
        ids = await call.encode(served, texts)
        vectors = dict(zip(texts, await _embed(call, served, ids), strict=True))
        values = [float(vectors[a] @ vectors[b]) for a, b in asked.pairs]
        meta = body.meta("score", time.time(), asked.model)
        return call.json(write(meta, asked, values, sum(map(len, ids))))

    return rank


score = ranker(openai.parse_score, lambda meta, asked, values, used: body.scores(meta, values, used))
rerank = ranker(
    openai.parse_rerank,
    lambda meta, asked, values, used: body.ranking(
        meta, values, [d for _, d in asked.pairs] if asked.documents else None, asked.top, used
    ),
)


async def tokenize(call: Call) -> web.Response:
    """POST /tokenize. Special tokens in a text stay text, but a text that is one of them alone is asked for its id."""
    served = call.served(optional=True)
    asked = await call.parse(openai.parse_tokenize, served)
    if isinstance(asked, openai.Chat):
        _, ids = await call.children.chat(call.holder, served.base, asked, call.large)
    else:
        said, special = asked
        ids = (await call.children.encode(call.holder, served.base, [said], special, seen=True))[0]
    return call.json(body.tokens(ids, served.engine.limit))


async def detokenize(call: Call) -> web.Response:
    """POST /detokenize."""
    served = call.served(optional=True)
    ids = openai.parse_detokenize(call.body, served.limits)
    return call.json(body.detokenized(await call.aside(lambda: text.decode(served.tokenizer, ids))))
