"""Run the outputs of one request in an engine, from asyncio: all prompts times n, as they come."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

from fdel.serve import grammar
from fdel.serve.job import NOTHING, Job
from fdel.serve.loop import Mailbox
from fdel.serve.metrics import Metrics
from fdel.serve.openai import APIError, body
from fdel.serve.reply import Delta, join
from fdel.serve.request import SamplingParams
from fdel.serve.schedule import QueueFull
from fdel.serve.served import Served

log = logging.getLogger(__name__)
BUSY = {"Retry-After": "1"}


@dataclass
class Run:
    """The outputs of prompts, n of each in order: output j of prompt i has index i * n + j.

    Leaving `deltas` aborts what has not ended.
    """

    served: Served
    prompts: Sequence[Sequence[int]]
    sampling: SamplingParams  # n outputs, or best_of
    key: str  # whose fair share these use
    metrics: Metrics
    matcher: grammar.Matcher | None = None
    salt: str = ""  # who has the same key and salt shares cached pages
    began: float = field(default_factory=time.monotonic)
    jobs: list[Job] = field(default_factory=list)
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    first: list[float] = field(default_factory=list)  # when each output's first token came; 0: not yet
    counted: set[int] = field(default_factory=set)  # outputs whose end the metrics know

    @property
    def each(self) -> int:
        """Outputs of each prompt that are computed."""
        return self.sampling.best_of or self.sampling.n

    def room(self, prompt: Sequence[int]) -> int:
        """The most tokens that one output of a prompt may have."""
        return min(self.sampling.max_tokens, self.served.engine.limit - len(prompt))

    def submit(self) -> None:
        """Queue everything, or nothing. APIError if the engine cannot take it."""
        loop = asyncio.get_running_loop()
        try:
            self.jobs = self.served.engine.submit_all(
                self.prompts, replace(self.sampling, prompt_logprobs=None), key=self.key, salt=self.salt,
                adapter=self.served.adapter, mask=None if self.matcher is None else self.matcher.copy,
                box=lambda: Mailbox(loop, self.ready),
            )  # fmt: skip
        except QueueFull as e:
            raise APIError(
                "the server is busy; try again", status=503, type="server_error", code="overloaded", headers=BUSY
            ) from e
        except ValueError as e:
            raise APIError(str(e)) from e
        except RuntimeError as e:  # the engine is closed
            raise APIError(
                "the server is shutting down", status=503, type="server_error", code="unavailable", headers=BUSY
            ) from e
        self.metrics.add("fdel_prompt_tokens_total", sum(map(len, self.prompts)), model=self.served.name)
        self.metrics.observe("fdel_request_params_n", self.sampling.n)
        for prompt in self.prompts:
            self.metrics.observe("fdel_request_prompt_tokens", len(prompt))
            self.metrics.observe("fdel_request_params_max_tokens", self.room(prompt))

    def abort(self) -> None:
        """End what has not ended."""
        for i, job in enumerate(self.jobs):
            if i not in self.counted:
                self._end(i, "abort")
                self.served.engine.abort(job)

    def _end(self, i: int, reason: str) -> None:
        self.counted.add(i)
        self.metrics.add("fdel_requests_total", model=self.served.name, finished_reason=reason)

    async def deltas(self, every: float | None = None) -> AsyncIterator[tuple[int, Delta] | None]:
        """Yield (index, what it added); None after `every` seconds without anything. APIError if an output failed."""
        live, before = set(range(len(self.jobs))), [self.began] * len(self.jobs)
        self.first = [0.0] * len(self.jobs)
        first = True
        try:
            while live:
                try:
                    async with asyncio.timeout(every):  # `wait_for` may swallow a cancellation before Python 3.12
                        await self.ready.wait()
                except TimeoutError:
                    yield None
                    continue
                self.ready.clear()
                for i in sorted(live):
                    box = self.jobs[i].box
                    if not box.deltas:
                        continue
                    deltas, box.deltas = box.deltas, []
                    delta = join(deltas)
                    self._measure(delta, before, i, first)
                    first = False
                    if delta.finish_reason:
                        live.discard(i)
                    if delta.finish_reason in ("error", "abort"):
                        log.warning(
                            "%s: an output ended with %s: %s", self.served.name, delta.finish_reason, delta.error
                        )
                        raise failed(delta)
                    yield i, delta
        finally:
            self.abort()

    def _measure(self, delta: Delta, before: list[float], i: int, first: bool) -> None:
        now, m = time.monotonic(), self.metrics
        if first:
            m.observe("fdel_time_to_first_token_seconds", now - self.began)
        elif delta.tokens and before[i] > self.began:
            m.observe("fdel_inter_token_latency_seconds", (now - before[i]) / len(delta.tokens))
        if delta.tokens and not self.first[i]:
            self.first[i] = now
        before[i] = now
        m.add("fdel_generation_tokens_total", len(delta.tokens), model=self.served.name)
        if delta.finish_reason:
            m.observe("fdel_e2e_request_latency_seconds", now - self.began)
            told, begun = self.first[i] or now, self.jobs[i].reply.begun or now
            said, decode = len(self.jobs[i].reply.tokens), now - told
            m.observe("fdel_request_queue_time_seconds", begun - self.began)
            m.observe("fdel_request_prefill_time_seconds", max(0.0, told - begun))
            m.observe("fdel_request_inference_time_seconds", now - begun)
            m.observe("fdel_request_generation_tokens", said)
            m.observe("fdel_request_decode_time_seconds", decode)
            if said > 1:
                m.observe("fdel_request_time_per_output_token_seconds", decode / (said - 1))
            self._end(i, delta.finish_reason)

    def usage(self) -> body.Usage:
        """Count tokens: each prompt once, all outputs."""
        cached = sum(job.request.cached or 0 for job in self.jobs[:: self.each])
        said = sum(len(job.reply.tokens) for job in self.jobs)
        return body.Usage(sum(map(len, self.prompts)), said, cached)

    def best(self) -> list[int]:
        """Choose the outputs to return: of best_of those n of each prompt with the highest sum of log-probabilities."""
        out: list[int] = []
        for first in range(0, len(self.jobs), self.each):
            group = range(first, first + self.each)
            ranked = sorted(group, key=lambda i: -sum(self.jobs[i].reply.logprobs))
            out += ranked[: self.sampling.n] if self.sampling.best_of else group
        return out


def failed(delta: Delta) -> APIError:
    """Say that an output failed, and not why: what an error holds is for the log."""
    if delta.finish_reason == "abort":
        return APIError("the server ended this request", status=503, type="server_error", code="aborted", headers=BUSY)
    never = {"x-should-retry": "false"}
    if (delta.error or "").startswith(NOTHING):
        said = f"{NOTHING}: the output's structure, allowed_token_ids, logit_bias and min_tokens together allow none"
        return APIError(said, code="nothing_to_draw")
    return APIError("this request failed in the engine", status=500, type="server_error", code="engine", headers=never)
