"""Decide what each step computes: no phases, every request's computed tokens chase its known tokens. Plain Python.

A plan first gives every running sequence its next token, then spends a budget on chunks of prompts. Which prompt is next:
the highest priority, then the key that has been served least (virtual token counters, arXiv:2401.00588), then the oldest.
Who runs out of pages takes those of the lowest priority's youngest, which is computed again later; that changes no output.
"""

import bisect
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from fdel.serve.pages import Pool

FEW = 8  # sequences that decode; beside more of them short chunks cost too much throughput
NO_ROW = -1  # where a request stands that does not run


class QueueFull(RuntimeError):
    """Too many outputs wait."""


@dataclass(eq=False)
class Request:
    """One sequence. A plan runs ahead of what is read: `unread` steps will add 1 token each, `most` tokens at most."""

    id: int
    tokens: list[int]  # prompt and output, as far as they are known here
    prompt: int  # tokens of the prompt
    limit: int  # the most tokens of prompt and output
    priority: int = 0  # the highest first
    key: str = ""  # whose share it uses
    salt: bytes = b""  # who may share its pages
    adapter: str = ""
    after: "Request | None" = None  # the first output of the same prompt: wait until that is cached
    arrival: int = 0
    row: int = NO_ROW  # its row on the device, while it runs
    pages: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)  # of its published pages
    computed: int = 0  # tokens of the prompt, or of what is computed again, that plans have covered
    stored: int = 0  # tokens whose keys and values are certainly in its pages
    cached: int | None = None  # tokens of the prompt that were in the cache when it was admitted first
    flights: int = 0  # plans under way that hold it
    unread: int = 0
    most: int = 0
    decoding: bool = False  # all known tokens are computed or planned
    done: bool = False
    mark: int = 0  # tokens at which it is cleared of suspicion

    @property
    def rank(self) -> tuple[int, int]:
        """Who keeps its pages: the highest priority, then the oldest."""
        return -self.priority, self.arrival


@dataclass(frozen=True)
class Chunk:
    """Known tokens `start` to `start + count` of a request; after the `last` one a token is drawn."""

    request: Request
    start: int
    count: int
    last: bool


@dataclass
class Plan:
    """What one step does: give rows to new requests, compute chunks, and continue sequences by a token."""

    admitted: list[Request] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    decodes: list[Request] = field(default_factory=list)


@dataclass
class Schedule:
    """All requests, and who has which row and pages.

    budget: prompt tokens of a step, cut into blocks of `block` tokens of one request each. width: the most tokens that
    one step adds to a sequence. queue: the most waiting outputs. chunk: prompt tokens of a step beside at most `FEW`
    sequences that decode; None: the budget.
    """

    pool: Pool
    rows: int
    budget: int
    block: int
    width: int = 1
    queue: int = 1024
    chunk: int | None = None
    running: list[Request] = field(default_factory=list)  # by rank
    waiting: list[Request] = field(default_factory=list)
    suspects: list[list[Request]] = field(default_factory=list)  # only the first group runs
    served: dict[str, int] = field(default_factory=dict)
    counts: Counter = field(default_factory=Counter)
    free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.free = list(range(self.rows))[::-1]

    # ---- requests ----

    def check(self, request: Request) -> None:
        """Raise ValueError if the request could never run."""
        if self.pool.needed(request.limit) > self.pool.total:
            raise ValueError(
                f"prompt and output may take {request.limit} tokens, the cache holds {self.pool.total * self.pool.size}; "
                "lower max_tokens, or give the engine more pages"
            )

    def add(self, request: Request) -> None:
        """Queue a request, which `check` has passed."""
        active = {r.key for r in (*self.running, *self.waiting)}
        if request.key not in active:  # who was away has saved nothing up
            least = min((self.served.get(k, 0) for k in active), default=0)
            self.served[request.key] = max(self.served.get(request.key, 0), least)
        if not active:
            self.served = {request.key: 0}
        self.counts["arrived"] += 1
        request.arrival = self.counts["arrived"]
        self.waiting.append(request)

    def finish(self, request: Request) -> None:
        """Take a request out, at whatever it is; steps under way that hold it have no more effect on it."""
        if request.done:
            return
        if request.row == NO_ROW:
            self.waiting.remove(request)
        else:
            self._vacate(request)
        request.done = True

    def preempt(self, request: Request) -> None:
        """Take a running request's row and pages; it waits, and all its known tokens are computed again."""
        self._vacate(request)
        self.counts["preempted"] += 1
        self.waiting.append(request)

    def _vacate(self, r: Request) -> None:
        self.running.remove(r)
        self.pool.release(r.pages)
        self.free.append(r.row)
        r.row, r.pages, r.digests, r.computed, r.stored, r.decoding = NO_ROW, [], [], 0, 0, False

    # ---- planning ----

    @property
    def prompts_wait(self) -> bool:
        """Whether there are prompts still to compute, or suspects: then steps are short."""
        return bool(self.waiting or self.suspects) or not all(r.decoding for r in self.running)

    def plan(self) -> Plan:
        """Choose the next step's work and account for it as if it were done; every chunk and decode must `land`."""
        plan = Plan()
        self._clear()
        self._make_room()
        for r in list(self.running):
            if r.row != NO_ROW and r.decoding and len(r.tokens) + r.unread < r.limit:
                # Drafts may be written past the newest token that is certain.
                if self._grow(r, min(len(r.tokens) + r.most + self.width - 1, r.limit)):
                    plan.decodes.append(r)
                    self._launched(r, self.width, 1)
        room = self.budget
        if self.chunk is not None and 0 < len(plan.decodes) <= FEW:
            room = min(room, self.chunk)
        blocks = -(-room // self.block)
        prefilling = [r for r in self.running if not r.decoding]
        while room > 0 and blocks > 0:
            request = prefilling.pop(0) if prefilling else self._admit(plan)
            if request is None:
                break
            count = min(len(request.tokens) - request.computed, room, blocks * self.block)
            last = request.computed + count == len(request.tokens)
            plan.chunks.append(Chunk(request, request.computed, count, last))
            request.computed += count
            request.decoding = last
            room, blocks = room - count, blocks - -(-count // self.block)
            self._launched(request, int(last), count)
        return plan

    def _launched(self, r: Request, most: int, cost: int) -> None:
        r.flights, r.unread, r.most = r.flights + 1, r.unread + (most > 0), r.most + most
        self.served[r.key] = self.served.get(r.key, 0) + cost

    def _may_run(self, r: Request) -> bool:
        return not self.suspects or r in self.suspects[0]

    def _grow(self, r: Request, tokens: int) -> bool:
        """Give r pages for `tokens` tokens; False if r itself had to yield."""
        more = self.pool.needed(tokens) - len(r.pages)
        while more > self.pool.available:
            victim = self.running[-1]
            self.preempt(victim)
            if victim is r:
                return False
        if more > 0:
            r.pages += self.pool.take(more)
        return True

    def _next(self) -> Request | None:
        # A suspect does not wait for one that may itself have to wait until the suspect is cleared.
        free = lambda r: self._may_run(r) and (bool(self.suspects) or _cached(r.after))
        ready = (r for r in self.waiting if r.flights == 0 and free(r))
        return min(ready, key=lambda r: (-r.priority, self.served.get(r.key, 0), r.arrival), default=None)

    def _make_room(self) -> None:
        """Let one running request per step wait again: for a higher priority, or a key that has two rows less."""
        rows, keys = Counter(r.key for r in self.running), {r.key for r in self.waiting}
        if not (rows and keys):
            return
        lowest, most = self.running[-1], max(rows.values())
        if lowest.priority >= max(r.priority for r in self.waiting) and most < 2 + min(rows[k] for k in keys):
            return
        best = self._next()
        if best is None or (self.free and self.pool.available >= self.pool.needed(len(best.tokens) + 1)):
            return
        greedy = {k for k, n in rows.items() if n == most > rows[best.key] + 1 and not self.suspects}
        greedy = {k for k in greedy if self.served[k] > self.served.get(best.key, 0)}  # else it would be next again
        lower = lambda r: r.priority < best.priority or (r.priority == best.priority and r.key in greedy)
        if victim := next((r for r in reversed(self.running) if lower(r)), None):
            self.preempt(victim)

    def _admit(self, plan: Plan) -> Request | None:
        """Start the next waiting request if there are a row and pages for all its known tokens and one more."""
        r = self._next() if self.free else None
        if r is None:
            return None
        pages, digests = self.pool.match(r.tokens, r.salt)
        more = self.pool.needed(min(len(r.tokens) + 1, r.limit)) - len(pages)
        # A page for each running sequence that will grow stays free: else the newcomer would soon be preempted again.
        growing = sum(self.pool.needed(other.limit) > len(other.pages) for other in self.running)
        if more + growing > self.pool.available:
            self.pool.release(pages)
            return None
        self.waiting.remove(r)
        bisect.insort(self.running, r, key=lambda r: r.rank)
        r.row, r.pages, r.digests = self.free.pop(), pages + self.pool.take(more), digests
        r.computed = r.stored = len(pages) * self.pool.size
        if r.cached is None:
            r.cached = r.computed
        self.counts["looked up"] += len(r.tokens)
        self.counts["found"] += r.computed
        plan.admitted.append(r)
        return r

    # ---- results ----

    def land(self, r: Request, tokens: Sequence[int], stored: int, most: int) -> None:
        """Account for a step that was read: new `tokens`, and the keys and values that it certainly stored."""
        r.flights, r.unread, r.most = r.flights - 1, r.unread - (most > 0), r.most - most
        if r.done:
            return
        r.tokens.extend(tokens)
        if r.row == NO_ROW:  # preempted meanwhile; its tokens are right all the same
            return
        r.stored, size = stored, self.pool.size
        for i in range(len(r.digests), stored // size):
            before = r.digests[-1] if i else r.salt
            r.digests.append(self.pool.publish(r.pages[i], r.tokens[i * size : (i + 1) * size], before, first=i == 0))

    # ---- faults ----

    def recall(self, requests: Iterable[Request]) -> None:
        """Forget the steps under way of these requests and compute them again from their known tokens."""
        for r in requests:
            r.mark = max(r.mark, len(r.tokens) + r.unread)
            r.flights = r.unread = r.most = 0
            if r.row != NO_ROW:
                self.preempt(r)

    def accuse(self, requests: Collection[Request]) -> Request | None:
        """Find the guilty one of those whose step raised, by halves: until they pass that point, only suspects run.

        Returns the request that failed alone twice; None while it is not known.
        """
        found = [r for r in requests if not r.done]
        rest = [[r for r in group if r not in found] for group in self.suspects]
        alone = bool(self.suspects) and self.suspects[0] == found and len(found) == 1
        half = (len(found) + 1) // 2
        groups = [] if alone else [found[:half], found[half:]]
        self.suspects = [g for g in (*groups, *rest) if g]
        return found[0] if alone else None

    def _clear(self) -> None:
        """Release from suspicion who is done, or has got further than where the step raised; stop all others."""
        while self.suspects:
            self.suspects[0] = [r for r in self.suspects[0] if not r.done and len(r.tokens) <= r.mark]
            if self.suspects[0]:
                break
            self.suspects.pop(0)
        for r in [r for r in self.running if not self._may_run(r)]:
            self.preempt(r)


def _cached(leader: Request | None) -> bool:
    return leader is None or leader.done or leader.stored >= leader.prompt
