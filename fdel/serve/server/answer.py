"""The outputs of one request in an engine, and the one way to their answer, whole or as events, in any protocol."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from aiohttp import web

from fdel.serve.engine.pictures import PromptMedia
from fdel.serve.engine.reply import NOTHING, Delta, DeltaQueue, Job
from fdel.serve.engine.request import SamplingParams
from fdel.serve.engine.schedule import QueueFull
from fdel.serve.server import grammar
from fdel.serve.server.call import Call
from fdel.serve.server.limits import Quota
from fdel.serve.server.openai import APIError, body, failure
from fdel.serve.server.served import Prompts, ServedModel

log = logging.getLogger(__name__)
Events = Sequence[Mapping[str, Any]]

PING = 15.0  # seconds of silence before a comment is sent
ROOM = 2**14  # bytes that a connection takes without waiting; asyncio waits from 64 KiB until 16 KiB are left
LATE = APIError("this request took too long", status=408, code="timeout")


@dataclass
class Run:
    """The outputs of prompts: output j of prompt i has index i * n + j. Leaving `deltas` aborts what has not ended."""

    call: Call
    served: ServedModel
    prompts: Prompts
    sampling: SamplingParams  # n outputs, or best_of
    matcher: grammar.Matcher | None = None
    salt: str = ""  # cached pages are shared by requests of the same key and salt
    media: Sequence[PromptMedia | None] | None = None  # the pictures of each prompt
    began: float = field(default_factory=time.monotonic)
    jobs: list[Job] = field(default_factory=list)
    queue: DeltaQueue = field(default_factory=DeltaQueue)
    counted: set[int] = field(default_factory=set)  # outputs whose end the metrics know

    def __post_init__(self) -> None:
        self.metrics = self.call.server.metrics

    @property
    def each(self) -> int:
        """Outputs of each prompt that are computed."""
        return self.sampling.outputs

    @property
    def label(self) -> str:
        """The model's name in metrics: its base's once the adapter is unloaded."""
        return self.served.name if self.metrics.declares("model", self.served.name) else self.served.base

    def submit(self) -> "Run":
        """Queue everything, or nothing. APIError if the engine, or the share or the rate of its key, cannot take it."""
        if self.matcher is not None and self.sampling.allowed_tokens is not None:  # together they may leave no token
            both = "a structure of the output, nor with calls that must be made"
            raise APIError(f"allowed_token_ids cannot be combined with {both}", param="allowed_token_ids")
        call, served, engine = self.call, self.served, self.served.engine
        rooms = [min(self.sampling.max_tokens, engine.limit - len(p)) for p in self.prompts]  # tokens of one output
        most = sum(len(p) + self.each * room for p, room in zip(self.prompts, rooms, strict=True))
        quota = call.server.outputs.setdefault(served.base, Quota(engine.settings.queue))
        call.take(quota, len(self.prompts) * self.each)
        call.admit(most)
        try:
            self.jobs = engine.submit_all(
                self.prompts, replace(self.sampling, prompt_logprobs=None), key=call.key.id if call.key else "",
                salt=self.salt, adapter=served.adapter, queue=self.queue, media=self.media,
                mask=None if self.matcher is None else self.matcher.copy,
            )  # fmt: skip
        except (QueueFull, ValueError, RuntimeError) as e:
            call.settle(most, body.Usage(0))
            if isinstance(e, QueueFull):
                raise APIError("the server is busy; try again", status=503, code="overloaded", retry=1) from e
            if isinstance(e, ValueError):
                raise APIError(str(e)) from e
            raise APIError("the server is shutting down", status=503, code="unavailable", retry=1) from e
        call.on_end += [self.abort, lambda: call.settle(most, self.usage())]
        self.metrics.add("fdel_prompt_tokens_total", sum(map(len, self.prompts)), model=self.label)
        self.metrics.observe("fdel_request_params_n", self.sampling.n)
        for prompt, room in zip(self.prompts, rooms, strict=True):
            self.metrics.observe("fdel_request_prompt_tokens", len(prompt))
            self.metrics.observe("fdel_request_params_max_tokens", room)
        return self

    def abort(self) -> None:
        """End what has not ended."""
        for i, job in enumerate(self.jobs):
            if i not in self.counted:
                self._end(i, "abort")
                self.served.engine.abort(job)

    def _end(self, i: int, reason: str) -> None:
        self.counted.add(i)
        self.metrics.add("fdel_requests_total", model=self.label, finished_reason=reason)

    async def deltas(self, every: float | None = None) -> AsyncIterator[tuple[int, Delta] | None]:
        """Yield (index, what it added); None after `every` seconds without anything. APIError if an output failed."""
        read = [0.0 for _ in self.jobs]
        try:
            while len(self.counted) < len(self.jobs):
                deltas = await self.queue.get(every)
                if not deltas:
                    yield None
                for i, delta in deltas:
                    mask = self.jobs[i].mask
                    if delta.finish_reason == "stop" and isinstance(mask, grammar.Matcher) and mask.error:
                        delta = replace(delta, finish_reason="length")  # a limit or a dead end: it is not whole
                    self._measure(i, delta, read)
                    if (reason := delta.finish_reason) in ("error", "abort"):
                        log.warning("%s: an output ended with %s: %s", self.served.name, reason, delta.error)
                        raise failed(delta)
                    yield i, delta
        finally:
            self.abort()

    def _measure(self, i: int, delta: Delta, read: list[float]) -> None:
        """Put times in the metrics: the engine's, but for the reader's between tokens. `read`: when each was, or 0."""
        now, m, reply = time.monotonic(), self.metrics, self.jobs[i].reply
        first, ended = reply.first or reply.ended or now, reply.ended or now
        if not any(read):
            times = [job.reply.first for job in self.jobs if job.reply.first]
            m.observe("fdel_time_to_first_token_seconds", min(times, default=now) - self.began)
        elif delta.tokens and read[i]:
            m.observe("fdel_inter_token_latency_seconds", (now - read[i]) / len(delta.tokens))
        read[i] = now
        m.add("fdel_generation_tokens_total", len(delta.tokens), model=self.label)
        if delta.finish_reason:
            started, count = reply.begun or ended, len(reply.tokens)
            m.observe("fdel_e2e_request_latency_seconds", ended - self.began)
            m.observe("fdel_request_queue_time_seconds", started - self.began)
            m.observe("fdel_request_prefill_time_seconds", first - started)
            m.observe("fdel_request_inference_time_seconds", ended - started)
            m.observe("fdel_request_generation_tokens", count)
            m.observe("fdel_request_decode_time_seconds", ended - first)
            if count > 1:
                m.observe("fdel_request_time_per_output_token_seconds", (ended - first) / (count - 1))
            self._end(i, delta.finish_reason)

    def usage(self) -> body.Usage:
        """Count tokens: each prompt once, all outputs."""
        cached = sum(job.request.cached or 0 for job in self.jobs[:: self.each])
        completion = sum(len(job.reply.tokens) for job in self.jobs)
        return body.Usage(sum(map(len, self.prompts)), completion, cached)


def failed(delta: Delta) -> APIError:
    """Say that an output failed, and not why: what an error holds is for the log."""
    if delta.finish_reason == "abort":
        return APIError("the server ended this request", status=503, code="aborted", retry=1)
    if (delta.error or "").startswith(NOTHING):
        structure = "the output's structure, allowed_token_ids, logit_bias and min_tokens together allow none"
        return APIError(f"{NOTHING}: {structure}", code="nothing_to_draw")
    return failure("this request failed in the engine", "engine")


class Writer:
    """How a protocol writes the outputs of one `Run`; `last` is what a stream ends with."""

    last = body.DONE
    chunk = "chat.completion.chunk"  # what the usage at the end of a stream is called
    start: Callable[[], Events]  # begin a stream
    push: Callable[[int, Delta], Events]  # take what a step added to output i, and write it for a stream
    whole: Callable[[], Mapping[str, Any]]  # the body of a whole answer, after all was pushed

    def __init__(self, run: Run, meta: body.Meta):
        self.run, self.meta = run, meta

    def usage(self) -> body.Usage:
        """Count tokens."""
        return self.run.usage()

    def finish(self) -> Events:
        """End a stream: with the usage, if the client asked for that."""
        return [body.usage_chunk(self.meta, self.usage(), self.chunk)] if self.meta.usage else []

    def fail(self, e: APIError) -> Events:
        """End a stream that failed."""
        return [body.error(e)]


async def answer(call: Call, writer: Writer, streamed: bool) -> web.StreamResponse:
    """Send what a run makes. APIError if a whole answer fails; a stream tells it in its last event."""
    if streamed:
        return await stream(call, _frames(writer), writer.fail)
    async for item in writer.run.deltas():
        if item is not None:
            writer.push(*item)
    return call.json(writer.whole())


async def _frames(writer: Writer) -> AsyncGenerator[bytes, None]:
    if events := writer.start():
        yield body.frame(events)
    async for item in writer.run.deltas(PING):
        if item is None:
            yield body.PING
        elif events := writer.push(*item):
            yield body.frame(events)  # one write: each costs as much as all else that a token takes here
    yield body.frame(writer.finish()) + writer.last


async def stream(
    call: Call, frames: AsyncGenerator[bytes, None], fail: Callable[[APIError], Events] = lambda e: [body.error(e)]
) -> web.StreamResponse:
    """Send frames as they come. What fails from here on ends the stream with the events that `fail` makes of it."""
    response = web.StreamResponse(headers=body.EVENT_STREAM)
    try:
        await response.prepare(call.request)
        call.clock.reschedule(None)  # from here on a second answer, such as its 408, would land inside of this one
        try:
            async with asyncio.timeout(call.server.timeout):
                async for frame in frames:
                    await response.write(frame)  # a reader that takes nothing is ended with its connection
        except APIError as e:
            await response.write(body.frame(fail(e)))
        except TimeoutError:
            transport = call.request.transport
            if transport is None or transport.get_write_buffer_size() < ROOM:
                await response.write(body.frame(fail(LATE)))
            else:  # a polite end would wait for the reader for ever
                log.info("%s: the reader is too slow", call.id)
                transport.abort()
        except ConnectionError:
            raise
        except Exception:
            log.exception("%s: a stream failed", call.id)
            await response.write(body.frame(fail(failure())))
    except ConnectionError:  # of any write, the headers' too
        log.info("%s: the reader is gone", call.id)
    finally:
        await frames.aclose()
        call.finish()
    return response
