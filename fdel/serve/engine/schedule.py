"""Decide what each step computes: no phases, every request's computed tokens chase its known tokens. Plain Python.

A plan first gives every running sequence its next token, then spends a budget on chunks of prompts. Which prompt is next:
the highest priority, then the key that has been served least (virtual token counters, arXiv:2401.00588), then the oldest.
Who runs out of pages takes those of the lowest priority's youngest, which is computed again later; that changes no output.
"""

from bisect import insort
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from fdel.serve.engine.pages import Pool
from fdel.serve.engine.work import NO_ROW, Chunk, Request, StepPlan

FEW = 8  # sequences of one key that decode; beside more of them short chunks cost too much throughput


class QueueFull(RuntimeError):
    """Too many outputs wait."""


@dataclass
class Schedule:
    """All requests, and who has which row and pages.

    budget: prompt tokens of a step, cut into blocks of `block` tokens of one request each. width: the most tokens that
    one step adds to a sequence. queue: the most waiting outputs. chunk: prompt tokens of a step beside at most `FEW`
    sequences that decode. Where several keys are served it is half of that beside more of them: no key's prompts hold
    up another's tokens for longer. None: the budget.
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
    quarantine: list[list[Request]] = field(default_factory=list)  # while there are groups, only the first one runs
    served: dict[str, int] = field(default_factory=dict)
    counts: Counter = field(default_factory=Counter)
    free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.free = list(range(self.rows))[::-1]

    # ---- requests ----

    def check(self, request: Request) -> None:
        """Raise ValueError if the request could never run."""
        if self.pool.needed(request.limit) > self.pool.total:
            found = f"{request.limit} tokens, the cache holds {self.pool.total * self.pool.size}"
            raise ValueError(f"prompt and output may take {found}; lower max_tokens, or give the engine more pages")
        if request.whole and (longest := request.media.longest) > self.budget:
            found = f"found {longest} tokens of a picture, which see each other, expected at most {self.budget}"
            raise ValueError(f"{found}: all are computed in one step; show a smaller one, or raise the engine's budget")

    def add(self, request: Request) -> None:
        """Queue a request, which `check` has passed."""
        active = {r.key for r in (*self.running, *self.waiting)}
        if request.key not in active:  # a key that was away keeps no credit
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
        """Whether there are prompts still to compute, or requests in quarantine: then steps are short."""
        return bool(self.waiting or self.quarantine) or not all(r.decoding for r in self.running)

    def plan(self, resting: Collection[Request] = ()) -> StepPlan:
        """Choose the next step's work (who rests draws no token) and account for it as if it were done: see `commit`."""
        plan = StepPlan()
        self._release()
        self._make_room()
        for r in list(self.running):
            if r.row != NO_ROW and r.decoding and r not in resting and len(r.tokens) + r.unread < r.limit:
                # Drafts may be written past the newest token that is certain.
                if self._grow(r, min(len(r.tokens) + r.most + self.width - 1, r.limit)):
                    plan.decodes.append(r)
                    self._count(r, self.width, 1)
        prefilling = [r for r in self.running if not r.decoding]
        room = self.budget
        if self.chunk is not None and plan.decodes:
            few, several = len(plan.decodes) <= FEW, len({r.key for r in (*self.running, *self.waiting)}) > 1
            room = min(room, self.chunk if few else self.chunk // 2 if several else room)
        blocks = -(-room // self.block)
        while room > 0 and blocks > 0:
            request = prefilling.pop(0) if prefilling else self._admit(plan)
            if request is None:
                break
            if request.decoding:
                continue
            count = min(len(request.tokens) - request.computed, room, blocks * self.block)
            count = self._whole(request, count, plan)
            if not count:
                continue
            last = request.computed + count == len(request.tokens)
            plan.chunks.append(Chunk(request, request.computed, count, last))
            request.computed += count
            request.decoding = last
            room, blocks = room - count, blocks - -(-count // self.block)
            self._count(request, int(last), count)
        return plan

    def surely(self, requests: Iterable[Request]) -> int:
        """Note that the planned step adds `width` tokens, which is returned, to each of these that does not end on the way.

        Who then has all of its tokens is in no step after it.
        """
        for r in requests:
            r.unread += self.width - 1
        return self.width

    def _whole(self, r: Request, count: int, plan: StepPlan) -> int:
        """Say how many tokens a chunk takes that may take `count`, so that it parts no picture that has to stay whole.

        One picture may take what the step's budget leaves, whoever decodes beside it; 0: it waits until there is more.
        """
        if not r.whole:
            return count
        end = r.media.edge(r.computed, r.computed + count) - r.computed
        blocks = -(-self.budget // self.block) - sum(-(-c.count // self.block) for c in plan.chunks)
        left = min(self.budget - sum(c.count for c in plan.chunks), blocks * self.block)
        return end if end <= max(count, left) else 0

    def _count(self, r: Request, most: int, cost: int) -> None:
        r.in_flight, r.unread, r.most = r.in_flight + 1, r.unread + (most > 0), r.most + most
        self.served[r.key] = self.served.get(r.key, 0) + cost

    def _runnable(self, r: Request) -> bool:
        return not self.quarantine or r in self.quarantine[0]

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

    def _first_pages(self, r: Request) -> int:
        """Count the pages that r needs to begin: for its known tokens, one more, and drafts."""
        return self.pool.needed(min(len(r.tokens) + max(1, self.width - 1), r.limit))

    def _end_of_prompt(self, r: Request, pages: int) -> int | None:
        """Find the page in which r's prompt ends but for its last token, if another output of its request holds it.

        All `pages` before it are shared. Separate requests share these alone: what they draw first stays that of prefill.
        """
        whole, rest = divmod(r.prompt - 1, self.pool.size)
        if r.after is None or not (self.pool.cache and rest and pages == whole and len(r.tokens) == r.prompt):
            return None
        return next((o.pages[pages] for o in self.running if r.after in (o, o.after) and o.stored >= o.prompt), None)

    def _next(self) -> Request | None:
        # One in quarantine does not wait for another that may itself have to wait until the first has left it.
        shared = lambda r: self.pool.cache and r.prompt > 1 and not self.quarantine
        comes = lambda leader: leader is not None and not leader.done and leader.stored < leader.prompt
        free = lambda r: self._runnable(r) and not (shared(r) and comes(r.after))
        ready = (r for r in self.waiting if r.in_flight == 0 and free(r))
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
        if best is None or (self.free and self.pool.available >= self._first_pages(best)):
            return
        greedy = {k for k, n in rows.items() if n == most > rows[best.key] + 1 and not self.quarantine}
        greedy = {k for k in greedy if self.served[k] > self.served.get(best.key, 0)}  # else it would be next again
        lower = lambda r: r.priority < best.priority or (r.priority == best.priority and r.key in greedy)
        if victim := next((r for r in reversed(self.running) if lower(r)), None):
            self.preempt(victim)

    def _admit(self, plan: StepPlan) -> Request | None:
        """Start the next waiting request if there are a row and pages; an output that lacks one token alone decodes."""
        r = self._next() if self.free else None
        if r is None:
            return None
        seen = () if r.media is None else (r.media.mark,)
        pages, digests = self.pool.match(r.tokens, r.salt, *seen)
        end = self._end_of_prompt(r, len(pages))
        more = self._first_pages(r) - len(pages)
        # A page for each running sequence that will grow stays free: else the newcomer would soon be preempted again.
        growing = sum(self.pool.needed(other.limit) > len(other.pages) for other in self.running)
        if more + growing > self.pool.available:
            self.pool.release(pages)
            return None
        self.waiting.remove(r)
        insort(self.running, r, key=lambda r: r.rank)
        r.row, r.pages, r.digests = self.free.pop(), pages + self.pool.take(more), digests
        r.computed = r.stored = len(pages) * self.pool.size
        if end is not None:
            plan.copies.append((r, end, r.pages[len(pages)]))
            r.computed = r.stored = r.prompt - 1
        if r.cached is None:
            r.cached = r.computed
        self.counts["looked up"] += len(r.tokens)
        self.counts["found"] += r.computed
        plan.admitted.append(r)
        if r.after is not None and 0 < r.computed == len(r.tokens) - 1:
            r.computed, r.decoding = len(r.tokens), True
            plan.decodes.append(r)
            self._count(r, self.width, 1)
        return r

    # ---- results ----

    def commit(self, r: Request, tokens: Sequence[int], most: int, end: int, least: int = 1) -> None:
        """Account for a step that was read: new `tokens`, of `least` to `most` expected; with 0, its chunk's `end`."""
        r.in_flight, r.unread, r.most = r.in_flight - 1, r.unread - min(most, least), r.most - most
        if r.done:
            return
        r.tokens.extend(tokens)
        if r.row == NO_ROW:  # preempted meanwhile; its tokens are right all the same
            return
        r.stored, size = len(r.tokens) - 1 if most else end, self.pool.size
        for i in range(len(r.digests), r.stored // size):
            before = r.digests[-1] if i else r.salt
            start, stop = i * size, (i + 1) * size
            mark = b"" if r.media is None else r.media.mark(start, stop)
            r.digests.append(self.pool.publish(r.pages[i], r.tokens[start:stop], before, first=i == 0, mark=mark))

    # ---- faults ----

    def requeue(self, requests: Iterable[Request]) -> None:
        """Forget the steps in flight of these requests, and compute them again from their known tokens."""
        for r in requests:
            r.failed_at = max(r.failed_at, len(r.tokens) + r.unread)
            r.in_flight = r.unread = r.most = 0
            if r.row != NO_ROW:
                self.preempt(r)

    def bisect(self, requests: Collection[Request]) -> Request | None:
        """Quarantine the requests of a step that raised, in halves: until a half gets past that point, it alone runs.

        Returns the request whose steps raised when it ran alone; None while it is not known.
        """
        failed = [r for r in requests if not r.done]
        rest = [[r for r in group if r not in failed] for group in self.quarantine]
        alone = bool(self.quarantine) and self.quarantine[0] == failed and len(failed) == 1
        half = (len(failed) + 1) // 2
        halves = [] if alone else [failed[:half], failed[half:]]
        self.quarantine = [g for g in (*halves, *rest) if g]
        return failed[0] if alone else None

    def _release(self) -> None:
        """Let those out of quarantine that are done, or have got further than where the step raised; stop all others."""
        while self.quarantine:
            self.quarantine[0] = [r for r in self.quarantine[0] if not r.done and len(r.tokens) <= r.failed_at]
            if self.quarantine[0]:
                break
            self.quarantine.pop(0)
        for r in [r for r in self.running if not self._runnable(r)]:
            self.preempt(r)
