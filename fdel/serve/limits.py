"""Fair shares of what a server has little of: connections, bodies on their way, calls, an engine's queue."""

import asyncio
import contextlib
import ipaddress
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from fdel.serve.openai import APIError

WAITING = 512  # jobs of one holder that may wait for their turn
LATER: dict[str, Any] = {"status": 503, "type": "server_error", "headers": {"Retry-After": "1"}}


@dataclass
class Share:
    """Places, of which no holder takes more than it leaves free (dynamic thresholds, Choudhury and Hahne, 1998).

    One holder gets half of them, the next half of what is left, and so on: until log2(total) holders have all that they
    may have, whoever holds nothing finds a place.
    """

    total: int
    held: Counter[str] = field(default_factory=Counter)
    taken: int = 0

    def take(self, holder: str, count: int = 1) -> bool:
        """Take places, all or none; False if the holder would have more than one above what is left free."""
        if self.held.get(holder, 0) + 2 * (count - 1) >= self.total - self.taken:
            return False
        self.held[holder] += count
        self.taken += count
        return True

    def give(self, holder: str, count: int = 1) -> None:
        """Give places back."""
        self.taken -= count
        self.held[holder] -= count
        if not self.held[holder]:
            del self.held[holder]


@dataclass
class Places:
    """A share of single places that are taken back: where a holder has all it may have, its own oldest one ends."""

    share: Share
    entries: dict[str, dict[Hashable, Callable[[], bool]]] = field(default_factory=dict)

    def enter(self, holder: str, entry: Hashable, end: Callable[[], bool]) -> bool:
        """Take a place; False if there is none. `end` is asked to end this entry for a newer one: False if it cannot."""
        mine = self.entries.get(holder, {})
        if not self.share.take(holder):
            ended = next((e for e, end_it in mine.items() if end_it()), None)
            if ended is None:
                return False
            del mine[ended]
        self.entries.setdefault(holder, mine)[entry] = end
        return True

    def leave(self, holder: str, entry: Hashable) -> None:
        """Give an entry's place back, if it was not ended."""
        mine = self.entries.get(holder, {})
        if mine.pop(entry, None) is not None:
            self.share.give(holder)
        if not mine:
            self.entries.pop(holder, None)

    @contextlib.asynccontextmanager
    async def timed(self, holder: str, seconds: float) -> AsyncIterator[None]:
        """Hold a place: BlockingIOError if there is none, TimeoutError if it takes too long or a newer one needs it."""
        async with asyncio.timeout(seconds) as clock:

            def end() -> bool:
                if not clock.expired():
                    clock.reschedule(asyncio.get_running_loop().time())
                return True

            if not self.enter(holder, clock, end):
                raise BlockingIOError("no place is free")
            try:
                yield
            finally:
                self.leave(holder, clock)


def address(remote: str | None) -> str:
    """Name who stands behind an address: IPv6 ones by their /64, which one customer has; this machine by one name."""
    try:
        ip = ipaddress.ip_address((remote or "").partition("%")[0])
    except ValueError:
        return remote or ""
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    if ip.is_loopback:
        return "loopback"
    return str(ip) if ip.version == 4 else str(ipaddress.ip_network((ip, 64), strict=False))


class Turns:
    """Places for work, `each` at most for one who asks; waiting is first come first served, and in turns."""

    def __init__(self, places: int, each: int, waiting: int = WAITING):
        self.free, self.each, self.most = places, each, waiting
        self.held: Counter[str] = Counter()
        self.waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @contextlib.asynccontextmanager
    async def turn(self, who: str) -> AsyncIterator[None]:
        """Hold a place. APIError 429 for who has too much waiting, 503 if all together have."""
        if self.free and self.held[who] < self.each:
            self._take(who)
        else:
            await self._wait(who)
        try:
            yield
        finally:
            self._give(who)

    def _take(self, who: str) -> None:
        self.free -= 1
        self.held[who] += 1

    def _give(self, who: str) -> None:
        self.free += 1
        self.held[who] -= 1
        if not self.held[who]:
            del self.held[who]
        for name, queue in self.waiting.items():
            if self.free and self.held[name] < self.each:
                self._take(name)
                queue.popleft().set_result(None)
                self.waiting.move_to_end(name)
                self._forget(name)
                return

    def _forget(self, who: str) -> None:
        if not self.waiting.get(who, True):
            del self.waiting[who]

    async def _wait(self, who: str) -> None:
        every = sum(map(len, self.waiting.values()))
        if len(self.waiting.get(who, ())) >= self.most or every >= 4 * self.most:
            mine = every < 4 * self.most
            said = f"{'you have' if mine else 'the server has'} too many requests waiting; try again"
            kind = LATER | ({"status": 429, "type": "rate_limit_error"} if mine else {})
            raise APIError(said, code="overloaded", **kind)
        turn = asyncio.get_running_loop().create_future()
        self.waiting.setdefault(who, deque()).append(turn)
        try:
            await asyncio.shield(turn)  # a cancellation of ours leaves it as it is until we have taken it out
        except asyncio.CancelledError:
            if turn.done():  # both at once
                self._give(who)
            else:
                self.waiting[who].remove(turn)
                self._forget(who)
            raise
