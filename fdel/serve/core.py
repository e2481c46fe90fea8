"""One engine's steps, as a plain synchronous loop: plan, launch, read what was launched before, hand it out.

With overlap, step N + 1 is launched before N is read: the tokens of N feed it on the device. Without, each step is read
before the next is planned; that is the oracle. What a request's own step raises fails that request alone.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np

from fdel.serve.job import Job, accept, allowed, say
from fdel.serve.reply import Delta, join
from fdel.serve.schedule import Chunk, Plan, Request, Schedule

Told = list[tuple[Job, Delta]]  # what to tell whom
# A token, its log-probability for the model and in the distribution that it was drawn from, and the most likely ones.
Drawn = tuple[int, float, float, Sequence[tuple[int, float]]]


@dataclass(frozen=True)
class Flight:
    """A call under way: its requests with their place in what it draws (None: nothing) and where their chunk ends."""

    out: Any
    places: Sequence[tuple[Request, int | None, int | None]]
    waits: bool  # the next plan needs to know what it draws


class Core:
    """A device, a schedule, and the requests on their way through both."""

    def __init__(self, device: Any, schedule: Schedule, *, overlap: bool = True):
        self.device, self.schedule, self.overlap = device, schedule, overlap
        self.jobs: dict[int, Job] = {}
        self.flights: list[Flight] = []
        self.counts: Counter = Counter()

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.jobs and not self.flights

    def add(self, job: Job) -> None:
        """Queue a request; see `Schedule.add`."""
        self.schedule.add(job.request)
        self.jobs[job.request.id] = job
        if self.device.drafts:
            job.see(0)

    def end(self, id: int, reason: str, error: str | None = None) -> Told:
        """End a request now, if it has not ended: what to tell."""
        job = self.jobs.pop(id, None)
        if job is None:
            return []
        self.schedule.finish(job.request)
        self.counts[reason] += 1
        return [(job, job.reply.end(reason, error))]

    def step(self) -> Told:
        """Do one step; returns what to tell."""
        told: Told = []
        if not self.overlap or self.schedule.suspects or any(f.waits for f in self.flights):
            told += self.settle()
        plan = self.schedule.plan()
        before, self.flights = self.flights, []
        fault = self._launch(plan, told)
        landed = self._land(before, told)
        if fault and landed:  # the call that raised may have got what an earlier one spoilt: read that first
            flights, self.flights = self.flights, []
            if self._land(flights, told):
                self._recover(*fault, told)
        self.counts["steps"] += 1
        return told if self.overlap else told + self.settle()

    def settle(self) -> Told:
        """Read all that is under way."""
        told: Told = []
        flights, self.flights = self.flights, []
        self._land(flights, told)
        return told

    def replace_weights(self, adapter: str, weights: Any) -> Told:
        """Change weights between steps; what was computed with the old ones is computed again."""
        told = self.settle()
        self.device.weights[adapter] = weights
        self.schedule.pool.forget()
        self.schedule.recall([job.request for job in self.jobs.values()])
        return told

    def drop_adapter(self, adapter: str) -> Told:
        """Forget an adapter; requests that still use it fail at their next step."""
        told = self.settle()
        self.device.weights.pop(adapter, None)
        return told

    # ---- launching ----

    def _launch(self, plan: Plan, told: Told) -> tuple[Exception, list[Request]] | None:
        """Start a plan's calls; if one raises: (the error, whom it was for)."""
        masks = self._masks([*(c.request for c in plan.chunks if c.last), *plan.decodes], told)
        for r in [*(c.request for c in plan.chunks), *plan.decodes]:
            if r.adapter not in self.device.weights:
                told += self.end(r.id, "error", f"adapter {r.adapter!r} is not loaded any more")
        calls: list[tuple[list[Request], Callable[[], None]]] = []
        for r in plan.admitted:
            if not r.done:
                reply = self.jobs[r.id].reply
                reply.begun = reply.begun or time.monotonic()
                calls.append(([r], partial(self.device.admit, r, self.jobs[r.id].sampling)))
        where = lambda of: lambda item: self.device.group(of(item).adapter)
        by_adapter = lambda items, of: groupby(sorted(items, key=where(of)), where(of))
        for _, group in by_adapter((c for c in plan.chunks if not c.request.done), lambda c: c.request):
            chunks = list(group)
            calls.append(([c.request for c in chunks], partial(self._extend, chunks, masks)))
        for _, group in by_adapter((r for r in plan.decodes if not r.done), lambda r: r):
            requests = list(group)
            calls.append((requests, partial(self._decode, requests, masks)))
        for requests, call in calls:
            try:
                call()
            except Exception as e:
                return e, requests
        return None

    def _masks(self, requests: Iterable[Request], told: Told) -> dict[int, np.ndarray]:
        """Ask each request with structured output what it allows; one that allows nothing is at its end."""
        masks = {}
        for r in requests:
            job = self.jobs[r.id]
            if job.mask is None:
                continue
            try:
                mask = allowed(job.mask, self.device.words)
            except Exception as e:
                told += self.end(r.id, "error", say(e))
                continue
            if mask.any():
                masks[r.id] = mask
            else:
                told += self.end(r.id, "stop")
        return masks

    def _extend(self, chunks: Sequence[Chunk], masks: dict[int, np.ndarray]) -> None:
        out, at = self.device.extend(chunks, masks)
        self.counts["prompt tokens"] += sum(c.count for c in chunks)
        places = [(c.request, i if c.last else None, c.start + c.count) for c, i in zip(chunks, at, strict=True)]
        self.flights.append(Flight(out, places, bool(masks)))

    def _decode(self, requests: Sequence[Request], masks: dict[int, np.ndarray]) -> None:
        draft = bool(self.device.drafts) and any(self.jobs[r.id].repeats for r in requests)
        many = self.schedule.width > 1 and not (self.device.drafts or masks or self.schedule.prompts_wait)
        out, at = self.device.decode(requests, masks, draft, many)
        self.counts["drafting steps"] += draft
        self.flights.append(Flight(out, [(r, i, None) for r, i in zip(requests, at, strict=True)], bool(masks)))

    # ---- reading ----

    def _land(self, flights: Sequence[Flight], told: Told) -> bool:
        """Read calls and hand out their tokens; False if that failed, and all was recalled."""
        for flight in flights:
            try:
                drawn = self._read(flight)
            except Exception as e:
                self._recover(e, [r for r, _, _ in flight.places], told)
                return False
            for r, at, end in flight.places:
                most = 0 if at is None else self.schedule.width if end is None else 1
                if at is None or r.done:
                    self.schedule.land(r, [], end or 0, most)
                else:
                    self._take(r, drawn[at], end, most, told)
        return True

    def _read(self, flight: Flight) -> list[list[Drawn]]:
        """Wait for a call; the most likely tokens only if somebody wants them: each array costs time."""
        wanted = any(
            at is not None and not r.done and self.jobs[r.id].reply.request.logprobs for r, at, _ in flight.places
        )
        drawn = np.asarray(flight.out[0])
        k = drawn.shape[1] // 3
        likely: list[Sequence[tuple[int, float]]] = [()] * (len(drawn) * k)
        if wanted:
            tops = (np.asarray(x).tolist() for x in flight.out[1:])
            likely = [list(zip(ids, values, strict=True)) for ids, values in zip(*tops, strict=True)]
        rows = zip(drawn[:, : 1 + k].tolist(), drawn[:, 1 + k :].view(np.float32).tolist(), strict=True)
        return [
            list(zip(row[1 : 1 + row[0]], logprobs[:k], logprobs[k:], likely[i * k : i * k + k], strict=False))
            for i, (row, logprobs) in enumerate(rows)
        ]

    def _take(self, r: Request, drawn: Sequence[Drawn], end: int | None, most: int, told: Told) -> None:
        """Hand a request its tokens, up to where it ends."""
        job, known = self.jobs[r.id], len(r.tokens)
        reply, deltas = job.reply, []
        for one in drawn:
            try:
                deltas.append(accept(job, *one))
            except Exception as e:
                deltas.append(reply.end("error", say(e)))
            if reply.finish_reason:
                break
        if reply.finish_reason == "error":
            self.schedule.finish(r)  # before landing, so that its pages are not shared
        tokens = [t for d in deltas for t in d.tokens]
        self.schedule.land(r, tokens, known + len(tokens) - 1 if end is None else end, most)
        self.counts["generated tokens"] += len(tokens)
        if reply.finish_reason:
            self.schedule.finish(r)
            self.counts[reply.finish_reason] += 1
            del self.jobs[r.id]
        elif self.device.drafts:
            job.see(known)
        if deltas:
            told.append((job, join(deltas) if len(deltas) > 1 else deltas[0]))

    # ---- faults ----

    def _recover(self, error: Exception, requests: list[Request], told: Told) -> None:
        """Begin with an empty cache, but find out on whose account the step raised, and end that request.

        A failed call has taken what was donated to it, or written nobody knows what: nothing on the device is kept.
        """
        self.flights = []
        self.counts["faults"] += 1
        self.device.reset()
        self.schedule.pool.forget()
        self.schedule.recall([job.request for job in self.jobs.values()])
        guilty = self.schedule.accuse(requests)
        if guilty is not None:
            told += self.end(guilty.id, "error", say(error))
