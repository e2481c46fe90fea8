"""The routes that ask a model: from a parsed body to an answer."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from aiohttp import web

from fdel import text
from fdel.serve.engine.reply import Delta, Reply, Score, best
from fdel.serve.server import openai, pictures, reasoning
from fdel.serve.server.answer import Events, Run, Writer, answer
from fdel.serve.server.call import Call
from fdel.serve.server.openai import APIError, body, responses
from fdel.serve.server.served import ServedModel


async def chat(call: Call) -> web.StreamResponse:
    """POST /v1/chat/completions."""
    served = _writer(call)
    asked = await call.parse(openai.parse_chat, served)
    run, inside = await _run(call, served, asked)
    meta = body.meta("chatcmpl", asked.model, asked.usage)
    return await answer(call, ChatWriter(run, meta, asked, inside), asked.stream)


async def respond(call: Call) -> web.StreamResponse:
    """POST /v1/responses."""
    served = _writer(call)
    asked = await call.parse(responses.parse, served)
    run, inside = await _run(call, served, asked)
    response = responses.Response(body.meta("resp", asked.model), asked.echo)
    return await answer(call, ResponseWriter(run, response, asked, inside), asked.stream)


def _writer(call: Call) -> ServedModel:
    """Find the model that is asked for; APIError for one that writes no text."""
    served = call.served()
    if served.engine.silent is not None:
        raise APIError(f"{served.name}: {served.engine.silent}", param="model")
    return served


async def _run(call: Call, served: ServedModel, asked: openai.Chat) -> tuple[Run, bool]:
    """All that can be refused: render, tokenize, compile, queue; and tell whether the prompt ends in the reasoning."""
    seen = await pictures.prompt(call, served, asked)
    inside = reasoning.opened(served.thinking, seen.tail)
    spec = lambda: served.structure(asked, inside)
    matcher = await call.matcher(served, await call.in_thread(spec) if call.large else spec())
    prompts, sampling = served.fit_context([seen.tokens], asked.sampling, seen.media is not None)
    return Run(call, served, prompts, sampling, matcher, asked.salt, media=[seen.media]).submit(), inside


class ChatWriter(Writer):
    """Writes chat completions."""

    def __init__(self, run: Run, meta: body.Meta, asked: openai.Chat, inside: bool):
        super().__init__(run, meta)
        self.asked = asked
        self.readers = [run.served.reader(asked, inside) for _ in run.jobs]
        self.reasons = [""] * len(run.jobs)  # why each output ended

    def usage(self) -> body.Usage:
        """Count tokens, those of the reasoning too."""
        return replace(self.run.usage(), reasoning=sum(r.reasoning for r in self.readers))

    def logprobs(self, ids: Sequence[int], logprobs: Sequence[float], top: Sequence[dict]) -> Any:
        """Write log-probabilities, if the client asked for them."""
        if not self.asked.logprobs:
            return None
        return body.chat_logprobs(self.run.served.tokenizer, ids, logprobs, top, self.asked.sampling.logprobs)

    def start(self) -> Events:
        """Name the role of each output."""
        return [body.chat_chunk(self.meta, i, body.FIRST) for i in range(len(self.run.jobs))]

    def push(self, i: int, delta: Delta) -> Events:
        """Read what is new of an output, and write it for a stream; its log-probabilities stand in the first chunk."""
        added = [body.chat_delta(d) for d in self.readers[i].push(delta)]
        if delta.finish_reason:
            calls = any(d.kind == "call" for d in self.readers[i].found)
            self.reasons[i] = body.finish(delta.finish_reason, calls, self.asked.tool_choice)
        if not self.asked.stream:
            return []
        logprobs = self.logprobs(delta.tokens, delta.logprobs, delta.top_logprobs) if delta.tokens else None
        if logprobs is not None and not added:  # of tokens whose text is held back
            added = [{"content": ""}]
        chunks = [body.chat_chunk(self.meta, i, d, logprobs=None if k else logprobs) for k, d in enumerate(added)]
        return chunks + ([body.chat_chunk(self.meta, i, {}, self.reasons[i])] if delta.finish_reason else [])

    def whole(self) -> dict[str, Any]:
        """Write all outputs that are to be returned."""
        choices = []
        for i in best(self.run.jobs, self.run.sampling):
            reply = self.run.jobs[i].reply
            logprobs = self.logprobs(reply.tokens, reply.logprobs, reply.top_logprobs)
            choices.append((self.readers[i].message(), self.reasons[i], logprobs))
        return body.chat(self.meta, choices, self.usage())


class ResponseWriter(ChatWriter):
    """Writes one response."""

    last = b""

    def __init__(self, run: Run, response: responses.Response, asked: openai.Chat, inside: bool):
        super().__init__(run, response.meta, asked, inside)
        self.response, self.start, self.fail = response, response.start, response.fail  # type: ignore[method-assign]

    def push(self, i: int, delta: Delta) -> Events:
        """Write what is new of the output."""
        logprobs = self.logprobs(delta.tokens, delta.logprobs, delta.top_logprobs) if delta.tokens else None
        self.reasons[i] = delta.finish_reason or self.reasons[i]
        return self.response.push(self.readers[i].push(delta), logprobs["content"] if logprobs else ())

    def finish(self) -> Events:
        """End it, with its usage."""
        return self.response.finish(self.reasons[0], self.usage())

    def whole(self) -> dict[str, Any]:
        """Return what the last event of a stream would tell."""
        return self.finish()[-1]["response"]


# ---- completions ---------------------------------------------------------------------------------------------------


async def completions(call: Call) -> web.StreamResponse:
    """POST /v1/completions."""
    served = _writer(call)
    asked = await call.parse(openai.parse_completion, served)
    prompts = await call.encode(served, asked.prompts, asked.special)
    matcher = await call.matcher(served, asked.grammar)
    if asked.scored:
        served.check_lengths(prompts)
        call.admit(sum(map(len, prompts)))
        run = Run(call, served, prompts, asked.sampling)
    else:
        prompts, sampling = served.fit_context(prompts, asked.sampling)
        run = Run(call, served, prompts, sampling, matcher, asked.salt).submit()
    scores: list[Score] | None = None
    if asked.echo and asked.logprobs is not None:  # one at a time: others take their turns between
        one = lambda p: lambda: served.engine.score(p, asked.logprobs, adapter=served.adapter)
        try:
            scores = [await call.in_thread(one(p)) for p in prompts]
        except BaseException:
            run.abort()
            raise
    meta = body.meta("cmpl", asked.model, asked.usage)
    return await answer(call, CompletionWriter(run, meta, asked, scores), asked.stream)


class CompletionWriter(Writer):
    """Writes completions. `scores` are those of the prompts, if the answer repeats them with log-probabilities."""

    chunk = "text_completion"

    def __init__(self, run: Run, meta: body.Meta, asked: openai.Completion, scores: list[Score] | None):
        super().__init__(run, meta)
        self.asked, self.scores, self.each = asked, scores, 1 if asked.scored else run.each
        count = len(run.prompts) * self.each
        self.reasons: list[str | None] = ["length" if asked.scored else None] * count
        self.texts = [""] * count  # so far, with the prompt if that is echoed
        if asked.echo:
            prompts = [p if isinstance(p, str) else text.decode(run.served.tokenizer, p) for p in asked.prompts]
            self.texts = [prompts[i // self.each] for i in range(count)]

    def start(self) -> Events:
        """Repeat the prompts, if that is asked for."""
        count = len(self.texts) if self.asked.echo else 0
        return [body.completion(self.meta, [self._choice(i, i, None)], None) for i in range(count)]

    def push(self, i: int, delta: Delta) -> Events:
        """Take what is new of an output, and write it for a stream."""
        offset, self.reasons[i] = len(self.texts[i]), delta.finish_reason
        self.texts[i] += delta.text
        if not self.asked.stream:
            return []
        logprobs = self._logprobs(delta.tokens, delta.logprobs, delta.top_logprobs, offset) if delta.tokens else None
        choice = body.completion_choice(i, delta.text, delta.finish_reason, logprobs)
        return [body.completion(self.meta, [choice], None)]

    def whole(self) -> dict[str, Any]:
        """Write all outputs that are to be returned."""
        if self.asked.scored:
            choices = [self._choice(i, i, None) for i in range(len(self.texts))]
        else:
            chosen = enumerate(best(self.run.jobs, self.run.sampling))
            choices = [self._choice(index, i, self.run.jobs[i].reply) for index, i in chosen]
        return body.completion(self.meta, choices, self.run.usage())

    def _choice(self, index: int, i: int, reply: Reply | None) -> dict[str, Any]:
        """Write output i behind its prompt, if that is echoed; without a reply the prompt alone."""
        ids: list[int] = []
        logprobs: list[float | None] = []
        top: list[dict[int, float]] = []
        if self.scores is not None:
            score = self.scores[i // self.each]
            ids, logprobs, top = list(self.run.prompts[i // self.each]), [*score.logprobs], [*score.top_logprobs]
        if reply is not None:
            ids, logprobs = [*ids, *reply.tokens], [*logprobs, *reply.logprobs]
            top += reply.top_logprobs or ([{}] * len(reply.tokens) if top else [])
        shown = None if reply is None and self.scores is None else self._logprobs(ids, logprobs, top)
        return body.completion_choice(index, self.texts[i], self.reasons[i], shown)

    def _logprobs(self, ids: Sequence[int], logprobs: Sequence, top: Sequence[dict], offset: int = 0) -> Any:
        if self.asked.logprobs is None:
            return None
        return body.completion_logprobs(self.run.served.tokenizer, ids, logprobs, top, self.asked.logprobs, offset)


# ---- tokens -------------------------------------------------------------------------------------------------------


async def tokenize(call: Call) -> web.Response:
    """POST /tokenize. Special tokens in a text stay text, but a text that is one of them alone is asked for its id."""
    served = call.served(optional=True)
    asked = await call.parse(openai.parse_tokenize, served)
    if isinstance(asked, openai.Chat):
        ids = (await pictures.prompt(call, served, asked)).tokens
    else:
        prompt, special = asked
        ids = (await call.workers.encode(call.holder, served.base, [prompt], special, seen=True))[0]
    return call.json({"tokens": ids, "count": len(ids), "max_model_len": served.engine.limit})


async def detokenize(call: Call) -> web.Response:
    """POST /detokenize."""
    served = call.served(optional=True)
    ids = openai.parse_detokenize(call.body, served.limits)
    return call.json({"prompt": await call.in_thread(lambda: text.decode(served.tokenizer, ids))})
