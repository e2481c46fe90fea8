"""Fair shares of what a server has little of: connections, bodies on their way, calls, an engine's queue."""

import asyncio
import contextlib
import ipaddress
from collections import Counter
from collections.abc import AsyncIterator, Callable, Hashable
from dataclasses import dataclass, field


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
