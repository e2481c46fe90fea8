"""Fair quotas of what a server has little of: connections, bodies on their way, calls, an engine's queue, workers."""

import asyncio
import contextlib
import ipaddress
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Hashable
from dataclasses import dataclass, field

from fdel.serve.server.openai import APIError

WAITING = 512  # jobs of one holder that may be queued


@dataclass
class Quota:
    """Slots, of which no holder takes more than it leaves free (dynamic thresholds, Choudhury and Hahne, 1998).

    One holder gets half of them, the next half of what is left, and so on: until log2(total) holders have all that they
    may have, a holder of nothing finds a slot. `unit` says what slots are: bytes may be some too.
    """

    total: int
    unit: str = "places"
    held: Counter[str] = field(default_factory=Counter)
    taken: int = 0

    def acquire(self, holder: str, count: int = 1) -> bool:
        """Take slots, all or none; False if the holder would have more than one above what is left free."""
        if self.held.get(holder, 0) + 2 * (count - 1) >= self.total - self.taken:
            return False
        self.held[holder] += count
        self.taken += count
        return True

    def release(self, holder: str, count: int = 1) -> None:
        """Give slots back."""
        self.taken -= count
        self.held[holder] -= count
        if not self.held[holder]:
            del self.held[holder]


@dataclass
class EvictingQuota:
    """A quota of single slots that are taken back: a holder that has all it may have loses its own oldest entry."""

    quota: Quota
    entries: dict[str, dict[Hashable, Callable[[], bool]]] = field(default_factory=dict)

    def acquire(self, holder: str, entry: Hashable, evict: Callable[[], bool]) -> bool:
        """Take a slot; False if there is none. `evict` ends this entry for a newer one, and is False if it cannot."""
        mine = self.entries.get(holder, {})
        if not self.quota.acquire(holder):
            ended = next((e for e, end in mine.items() if end()), None)
            if ended is None:
                return False
            del mine[ended]
        self.entries.setdefault(holder, mine)[entry] = evict
        return True

    def release(self, holder: str, entry: Hashable) -> None:
        """Give an entry's slot back, if it was not evicted."""
        mine = self.entries.get(holder, {})
        if mine.pop(entry, None) is not None:
            self.quota.release(holder)
        if not mine:
            self.entries.pop(holder, None)

    @contextlib.asynccontextmanager
    async def timed(self, holder: str, seconds: float) -> AsyncIterator[None]:
        """Hold a slot: BlockingIOError if there is none, TimeoutError if it takes too long or is evicted."""
        async with asyncio.timeout(seconds) as clock:

            def evict() -> bool:
                if not clock.expired():
                    clock.reschedule(asyncio.get_running_loop().time())
                return True

            if not self.acquire(holder, clock, evict):
                raise BlockingIOError("no slot is free")
            try:
                yield
            finally:
                self.release(holder, clock)


def address(remote: str | None) -> str:
    """Name the holder behind an address: an IPv6 one by its /64, which one customer has; this machine by one name."""
    try:
        ip = ipaddress.ip_address((remote or "").partition("%")[0])
    except ValueError:
        return remote or ""
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    if ip.is_loopback:
        return "loopback"
    return str(ip) if ip.version == 4 else str(ipaddress.ip_network((ip, 64), strict=False))


class FairSemaphore:
    """Slots for work, at most `each` for one holder; those that wait are served in the order of their holders, in turns."""

    def __init__(self, slots: int, each: int, waiting: int = WAITING):
        self.free, self.each, self.most = slots, each, waiting
        self.held: Counter[str] = Counter()
        self.waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @contextlib.asynccontextmanager
    async def slot(self, holder: str) -> AsyncIterator[None]:
        """Hold a slot. APIError 429 for a holder that has too much waiting, 503 if all together have."""
        if not self._take(holder):
            await self._wait(holder)
        try:
            yield
        finally:
            self._give(holder)

    def _take(self, holder: str) -> bool:
        if not self.free or self.held[holder] >= self.each:
            return False
        self.free -= 1
        self.held[holder] += 1
        return True

    def _give(self, holder: str) -> None:
        self.free += 1
        self.held[holder] -= 1
        if not self.held[holder]:
            del self.held[holder]
        for name, queue in self.waiting.items():
            if self._take(name):
                queue.popleft().set_result(None)
                self.waiting.move_to_end(name)
                self._forget(name)
                return

    def _forget(self, holder: str) -> None:
        if not self.waiting.get(holder, True):
            del self.waiting[holder]

    async def _wait(self, holder: str) -> None:
        if sum(map(len, self.waiting.values())) >= 4 * self.most:
            message = "the server has too many requests waiting; try again"
            raise APIError(message, status=503, code="overloaded", retry=1)
        if len(self.waiting.get(holder, ())) >= self.most:
            raise APIError("you have too many requests waiting; try again", status=429, code="overloaded", retry=1)
        turn = asyncio.get_running_loop().create_future()
        self.waiting.setdefault(holder, deque()).append(turn)
        try:
            await asyncio.shield(turn)  # a cancellation of ours leaves it as it is until we have taken it out
        except asyncio.CancelledError:
            if turn.done():  # both at once
                self._give(holder)
            else:
                self.waiting[holder].remove(turn)
                self._forget(holder)
            raise
