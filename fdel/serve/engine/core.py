"""One engine's steps, as a plain synchronous loop: plan, dispatch, then commit what was dispatched before.

With overlap, step N + 1 is dispatched before N is read: the tokens of N feed it on the device. Without, each step is
committed before the next is planned; that is the oracle. What a request's own step raises fails that request alone.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

import numpy as np

from fdel.serve.engine.held import Held
from fdel.serve.engine.packing import Call, Token, unpack_out
from fdel.serve.engine.pictures import Size
from fdel.serve.engine.reply import Delta, Job, accept, allowed, describe, join
from fdel.serve.engine.schedule import Schedule
from fdel.serve.engine.work import Chunk, Request, StepPlan

T = TypeVar("T")
Deltas = list[tuple[Job, Delta]]
Masks = dict[int, np.ndarray]  # what requests with structured output allow next, by request id
MASKS = 0.02  # seconds of a step for making masks; who has no turn sits the step out


class Part(NamedTuple):
    """One request's part of a call."""

    request: Request
    line: int  # of what the call draws
    most: int  # tokens that it draws at most; 0 for a chunk that others of its prompt follow
    end: int = 0  # where such a chunk ends
    least: int = 1  # tokens that it draws, if the request does not end on the way


class InFlight(NamedTuple):
    """A call that was dispatched and is not committed."""

    out: Any
    parts: Sequence[Part]
    waits: bool  # the next plan needs to know what it draws


class Core:
    """A device, a schedule, and the requests on their way through both."""

    def __init__(self, device: Any, schedule: Schedule, *, overlap: bool = True):
        self.device, self.schedule, self.overlap = device, schedule, overlap
        self.jobs: dict[int, Job] = {}
        self.held, self.holds = Held(), False  # who waits for programs; whether any does, which takes a thread
        self.in_flight: list[InFlight] = []
        self.asleep = False  # the device holds no cache and no rows
        self.counts: Counter = Counter()
        self.versions: Counter = Counter()  # of each adapter's weights, "" the base's: how often they were replaced

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return self.asleep or not (self.jobs or self.in_flight)

    def add(self, job: Job) -> None:
        """Queue a request, see `Schedule.add`, or hold it until the programs that encode what it shows are compiled."""
        if self.holds and (sizes := self.device.lacking(job.request.media)):
            self.held.jobs[job.request.id] = job, sizes
            return
        self.held.jobs.pop(job.request.id, None)
        self.schedule.add(job.request)
        self.jobs[job.request.id] = job
        if self.device.drafts:
            job.note_ngrams(0)

    def end(self, id: int, reason: str, error: str | None = None) -> Deltas:
        """End a request now, if it has not ended."""
        if id in self.held.jobs:
            job, _ = self.held.jobs.pop(id)
            job.request.done = True
        elif id in self.jobs:
            job = self.jobs.pop(id)
            self.schedule.finish(job.request)
        else:
            return []
        self.counts[reason] += 1
        return [(job, job.reply.end(reason, error))]

    def compiled(self, size: Size, error: str | None) -> Deltas:
        """Queue those that were held for this program, unless they need another; with an error, end them."""
        deltas: Deltas = []
        for job in self.held.done(size):
            if error is None:
                self.add(job)
            else:
                deltas += self.end(job.request.id, "error", error)
        return deltas

    def step(self) -> Deltas:
        """Do one step: what it added to each request."""
        deltas: Deltas = []
        if not self.overlap or self.schedule.quarantine or any(f.waits for f in self.in_flight):
            deltas += self.drain()
        plan = self.schedule.plan(self._resting())
        before = len(self.in_flight)
        fault = self._dispatch(plan, deltas)
        committed = self._commit(before, deltas)
        # The call that raised may have got what an earlier one spoilt: read that first.
        if fault and committed and self._commit(len(self.in_flight), deltas):
            self._recover(*fault, deltas)
        self.counts["steps"] += 1
        return deltas if self.overlap else deltas + self.drain()

    def drain(self) -> Deltas:
        """Commit all that is in flight."""
        deltas: Deltas = []
        self._commit(len(self.in_flight), deltas)
        return deltas

    def replace_weights(self, adapter: str, weights: Any, reuse: bool = False) -> Deltas:
        """Change weights between steps; what was computed with the old ones is computed again."""
        deltas = self.drain()  # first: what is in flight was drawn by the old ones, and gets their number
        self.device.replace(adapter, weights, reuse)
        self.device.forget()
        self.versions[adapter] += 1
        self._requeue_all()
        return deltas

    def drop_adapter(self, adapter: str) -> Deltas:
        """Forget an adapter; requests that still use it fail at their next step."""
        deltas = self.drain()
        self.device.execute(Call("remove", adapter=adapter))
        return deltas

    def sleep(self, weights: bool) -> Deltas:
        """Free cache and rows, and the base's weights if asked; no step may come before `wake`."""
        if weights:
            self.device.weights.check_alone()
        deltas = self.drain()
        self._requeue_all()
        self.device.sleep(weights)
        self.asleep = True
        return deltas

    def wake(self) -> None:
        """Begin with an empty cache and empty rows."""
        self.device.weights.check("")
        self.device.reset()
        self.asleep = False

    # ---- dispatch ----

    def _resting(self) -> set[Request]:
        """Choose who sits out this step, so that its masks take no more than MASKS seconds, as long as each last took.

        Who has waited for the longest, in times of its own mask, comes first: cheap masks are never delayed by dear ones.
        """
        jobs = [job for r in self.schedule.running if (job := self.jobs[r.id]).mask is not None and r.decoding]
        total, now, resting = 0.0, time.monotonic(), set()
        for i, job in enumerate(sorted(jobs, key=lambda job: (job.masked_at - now) / (job.mask_seconds or 1e-9))):
            total += job.mask_seconds
            if i and total > MASKS:
                resting.add(job.request)
        return resting

    def _dispatch(self, plan: StepPlan, deltas: Deltas) -> tuple[Exception, list[Request]] | None:
        """Start a plan's calls; if one raises: (the error, the requests in it)."""
        masks = self._masks([*(c.request for c in plan.chunks if c.last), *plan.decodes], deltas)
        for r in [*(c.request for c in plan.chunks), *plan.decodes]:
            if r.adapter not in self.device.weights:
                deltas += self.end(r.id, "error", f"adapter {r.adapter!r} is not loaded any more")
        calls: list[tuple[list[Request], Callable[[], None]]] = []
        if admitted := [r for r in plan.admitted if not r.done]:
            calls.append((admitted, lambda: self._admit(admitted, {*admitted} & {*plan.decodes})))
        if copies := [c for c in plan.copies if not c[0].done]:
            calls.append(([r for r, *_ in copies], lambda: self.device.copy([pages for _, *pages in copies])))
        for chunks in self._groups([c for c in plan.chunks if not c.request.done], lambda c: c.request):
            for some in self.device.divided(chunks):
                calls.append(([c.request for c in some], partial(self._extend, some, masks)))
        for requests in self._groups([r for r in plan.decodes if not r.done], lambda r: r):
            calls.append((requests, partial(self._decode, requests, masks)))
        for requests, call in calls:
            try:
                call()
            except Exception as e:
                return e, requests
        return None

    def _groups(self, items: Sequence[T], request_of: Callable[[T], Request]) -> list[list[T]]:
        """Divide work among calls, each with the weights of one group of adapters."""
        group = lambda item: self.device.group(request_of(item).adapter)
        return [list(items) for _, items in groupby(sorted(items, key=group), group)]

    def _masks(self, requests: Iterable[Request], deltas: Deltas) -> Masks:
        """Ask each request with structured output what it allows; one that allows nothing is at its end."""
        masks = {}
        for r in requests:
            job = self.jobs[r.id]
            if job.mask is None:
                continue
            begun = time.monotonic()
            try:
                mask = allowed(job.mask, self.device.words)
            except Exception as e:
                deltas += self.end(r.id, "error", describe(e))
                continue
            job.masked_at = time.monotonic()
            job.mask_seconds = job.masked_at - begun
            if mask.any():
                masks[r.id] = mask
            else:
                deltas += self.end(r.id, "stop")
        return masks

    def _admit(self, requests: Sequence[Request], running: Collection[Request]) -> None:
        for r in requests:
            reply = self.jobs[r.id].reply
            reply.begun = reply.begun or time.monotonic()
        self.device.admit([(r, self.jobs[r.id].packed_sampling, r in running) for r in requests])
        self.counts["prompt tokens"] += len(running)  # the newest of each, which no chunk computes

    def _extend(self, chunks: Sequence[Chunk], masks: Masks) -> None:
        out, lines = self.device.extend(chunks, masks)
        self.counts["prompt tokens"] += sum(c.count for c in chunks)
        parts = [Part(c.request, i, int(c.last), c.start + c.count) for c, i in zip(chunks, lines, strict=True)]
        self.in_flight.append(InFlight(out, parts, bool(masks)))

    def _decode(self, requests: Sequence[Request], masks: Masks) -> None:
        draft = bool(self.device.drafts) and any(self.jobs[r.id].repeats for r in requests)
        many = self.schedule.width > 1 and not (self.device.drafts or masks or self.schedule.prompts_wait)
        out, lines = self.device.decode(requests, masks, draft, many)
        self.counts["drafting steps"] += draft
        least = self.schedule.surely(requests) if many else 1
        parts = [Part(r, i, self.schedule.width, least=least) for r, i in zip(requests, lines, strict=True)]
        self.in_flight.append(InFlight(out, parts, bool(masks)))

    # ---- commit ----

    def _commit(self, count: int, deltas: Deltas) -> bool:
        """Read the first calls in flight and hand out their tokens; False if that failed, and all was requeued."""
        calls, self.in_flight = self.in_flight[:count], self.in_flight[count:]
        for call in calls:
            drawing = [p for p in call.parts if p.most and not p.request.done]
            try:
                drawn = unpack_out(call.out, any(self.jobs[p.request.id].reply.sampling.logprobs for p in drawing))
            except Exception as e:
                self._recover(e, [p.request for p in call.parts], deltas)
                return False
            for part in call.parts:
                if part.most and not part.request.done:
                    self._hand_out(part, drawn[part.line], deltas)
                else:
                    self.schedule.commit(part.request, [], part.most, part.end, part.least)
        return True

    def _hand_out(self, part: Part, drawn: Sequence[Token], deltas: Deltas) -> None:
        """Give a request its tokens, up to where it ends."""
        r = part.request
        job, known = self.jobs[r.id], len(r.tokens)
        reply, new = job.reply, list[Delta]()
        for token in drawn:
            try:
                new.append(accept(job, token, self.versions[r.adapter]))
            except Exception as e:
                new.append(reply.end("error", describe(e)))
            if reply.finish_reason:
                break
        if reply.finish_reason == "error":
            self.schedule.finish(r)  # before it is committed, so that its pages are not shared
        tokens = [t for d in new for t in d.tokens]
        self.schedule.commit(r, tokens, part.most, part.end, part.least)
        self.counts["generated tokens"] += len(tokens)
        if reply.finish_reason:
            self.schedule.finish(r)
            self.counts[reply.finish_reason] += 1
            del self.jobs[r.id]
        elif self.device.drafts:
            job.note_ngrams(known)
        if new:
            deltas.append((job, join(new)))

    # ---- faults ----

    def _recover(self, error: Exception, requests: list[Request], deltas: Deltas) -> None:
        """Begin with an empty cache, but find out which request made the step raise, and end that one.

        A failed call has taken what was donated to it, or written nobody knows what: nothing on the device is kept.
        """
        self.in_flight = []
        self.counts["faults"] += 1
        self.device.reset()
        self._requeue_all()
        culprit = self.schedule.bisect(requests)
        if culprit is not None:
            deltas += self.end(culprit.id, "error", describe(error))

    def _requeue_all(self) -> None:
        self.schedule.pool.forget()
        self.schedule.requeue([job.request for job in self.jobs.values()])
