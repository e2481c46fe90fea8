"""Chat completions and responses: from a parsed body to an answer, whole or as a stream of events."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from aiohttp import web

from fdel.serve import openai
from fdel.serve.frames import FAILED, PING, Frames, stream
from fdel.serve.openai import APIError, body, responses
from fdel.serve.runs import Run
from fdel.serve.served import Prompt, Reader, Served
from fdel.serve.state import Call

# ---- chat completions ----------------------------------------------------------------------------------------------


async def chat(call: Call) -> web.StreamResponse:
    """POST /v1/chat/completions."""
    served = call.served()
    asked = await call.parse(openai.parse_chat, served)
    prompt, run = await _chat_run(call, served, asked)
    meta = body.meta("chatcmpl", time.time(), asked.model, asked.usage)
    if asked.stream:
        return await stream(call, _chat_frames(run, prompt, meta))
    readers, reasons = await _whole(run, prompt)
    choices = []
    for i in run.best():
        said, reply = readers[i].message(), run.jobs[i].reply
        logprobs = _chat_logprobs(prompt, reply.tokens, reply.logprobs, reply.top)
        reason = body.finish(reasons[i], bool(said.calls), asked.tool_choice)
        choices.append(body.Choice(said, reason, logprobs))
    return call.json(body.chat(meta, choices, _usage(run, readers)))


async def _chat_run(call: Call, served: Served, asked: openai.Chat) -> tuple[Prompt, Run]:
    """Render, tokenize, compile the grammar and queue: all that can be refused."""
    said, ids = await call.children.chat(call.holder, served.base, asked, call.large)
    prompt = Prompt(served, asked, said, ids)
    matcher = await call.matcher(served, await call.aside(prompt.spec) if call.large else prompt.spec())
    prompts, sampling = served.fit([prompt.ids], asked.sampling)
    return prompt, call.run(served, prompts, sampling, matcher, asked.salt)


async def _whole(run: Run, prompt: Prompt) -> tuple[list[Reader], list[str]]:
    """Read all outputs to their ends."""
    readers, reasons = [prompt.reader() for _ in run.jobs], [""] * len(run.jobs)
    async for item in run.deltas():
        if item is not None:
            i, delta = item
            readers[i].push(delta)
            reasons[i] = delta.finish_reason or reasons[i]
    return readers, reasons


def _usage(run: Run, readers: Sequence[Reader]) -> body.Usage:
    return replace(run.usage(), reasoning=sum(r.reasoning for r in readers))


def _chat_logprobs(prompt: Prompt, ids: Sequence[int], logprobs: Sequence[float], top: Sequence[dict]) -> Any:
    asked = prompt.asked
    if not asked.logprobs:
        return None
    return body.chat_logprobs(prompt.served.tokenizer, ids, logprobs, top, asked.sampling.logprobs)


async def _chat_frames(run: Run, prompt: Prompt, meta: body.Meta) -> Frames:
    asked, readers = prompt.asked, [prompt.reader() for _ in run.jobs]
    yield b"".join(body.sse(body.chat_chunk(meta, i, body.FIRST)) for i in range(len(run.jobs)))
    async for item in run.deltas(PING):
        if item is None:
            yield body.PING
            continue
        i, delta = item
        logprobs = _chat_logprobs(prompt, delta.tokens, delta.logprobs, delta.top_logprobs) if delta.tokens else None
        chunks = []
        for new in readers[i].push(delta):
            chunks.append(body.chat_chunk(meta, i, body.chat_delta(new), logprobs=logprobs))
            logprobs = None
        if logprobs is not None:  # of tokens whose text is held back
            chunks.append(body.chat_chunk(meta, i, {"content": ""}, logprobs=logprobs))
        if delta.finish_reason:
            calls = any(d.kind == "call" for d in readers[i].found)
            reason = body.finish(delta.finish_reason, calls, asked.tool_choice)
            chunks.append(body.chat_chunk(meta, i, {}, reason))
        if chunks:  # one write: each costs as much as all else that a token takes here
            yield b"".join(map(body.sse, chunks))
    used = body.sse(body.usage_chunk(meta, _usage(run, readers))) if meta.usage else b""
    yield used + body.DONE


# ---- responses -----------------------------------------------------------------------------------------------------


async def respond(call: Call) -> web.StreamResponse:
    """POST /v1/responses."""
    served = call.served()
    request = await call.parse(responses.parse, served)
    prompt, run = await _chat_run(call, served, request.chat)
    meta = body.meta("resp", time.time(), request.chat.model)
    if request.chat.stream:
        answer = responses.Answer(meta, request.echo)
        return await stream(call, _response_frames(run, prompt, answer), body.sse(answer.fail(FAILED)[0], "error"))
    readers, reasons = await _whole(run, prompt)
    used = _usage(run, readers)
    return call.json(responses.answer(meta, request.echo, readers[0].message(), reasons[0], used))


async def _response_frames(run: Run, prompt: Prompt, answer: responses.Answer) -> Frames:
    reader, reason = prompt.reader(), "stop"
    frame = lambda events: b"".join(body.sse(e, e["type"]) for e in events)
    yield frame(answer.start())
    try:
        async for item in run.deltas(PING):
            if item is None:
                yield body.PING
                continue
            _, delta = item
            logprobs = (
                _chat_logprobs(prompt, delta.tokens, delta.logprobs, delta.top_logprobs) if delta.tokens else None
            )
            events = answer.push(reader.push(delta), logprobs["content"] if logprobs else ())
            reason = delta.finish_reason or reason
            if events:
                yield frame(events)
    except APIError as e:
        yield frame(answer.fail(e))
        return
    yield frame(answer.finish(reason, _usage(run, [reader])))
