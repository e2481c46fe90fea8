"""The pool of cache pages: who owns which, which full pages later prompts may share, and what is evicted first.

A page holds the keys and values of `size` consecutive tokens. A full one is published under a digest of all tokens up to
its end, so that another sequence that begins with the same tokens shares it instead of computing it again. Only full
pages are shared and nobody writes to those, so sharing copies nothing.
"""

import secrets
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b


@dataclass
class Pool:
    """Pages 0 to `total` - 1. Each is free, owned by one or more sequences, or idle: without owner, but still cached.

    Digests are keyed with a secret of this pool and chained: page i's covers `salt` and the tokens of pages 0 to i. Who
    has another salt never finds the page, so that nobody learns from its speed what others asked.
    """

    total: int
    size: int
    cache: bool = True
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    owners: list[int] = field(init=False)
    free: list[int] = field(init=False)
    idle: OrderedDict[int, None] = field(default_factory=OrderedDict)  # the least recently used first
    cached: dict[bytes, tuple[int, bytes]] = field(default_factory=dict)  # digest -> (page, its tokens)
    digests: dict[int, bytes] = field(default_factory=dict)  # of cached pages

    def __post_init__(self) -> None:
        self.owners = [0] * self.total
        self.free = list(range(self.total))[::-1]

    @property
    def available(self) -> int:
        """Pages that `take` can give."""
        return len(self.free) + len(self.idle)

    def needed(self, tokens: int) -> int:
        """Count the pages that hold `tokens` tokens."""
        return -(-tokens // self.size)

    def match(
        self, tokens: Sequence[int], salt: bytes, mark: Callable[[int, int], bytes] = lambda start, stop: b""
    ) -> tuple[list[int], list[bytes]]:
        """Find and own the longest cached beginning of `tokens`: (pages, their digests).

        At least the last token is left out: its logits are wanted. Tokens are compared, not only their digest. `mark` says
        of tokens start to stop what else they depend on: the pictures that stand there.
        """
        pages: list[int] = []
        digests: list[bytes] = []
        for start in range(0, (len(tokens) - 1) // self.size * self.size if self.cache else 0, self.size):
            stop = start + self.size
            data = _bytes(tokens[start:stop]) + mark(start, stop)
            digest = self.digest(digests[-1] if digests else salt, data, first=not digests)
            page, stored = self.cached.get(digest, (-1, b""))
            if page < 0 or stored != data:
                break
            pages.append(page)
            digests.append(digest)
        for page in pages:
            self.owners[page] += 1
            self.idle.pop(page, None)
        return pages, digests

    def take(self, n: int) -> list[int]:
        """Own n pages that nobody else has; cached ones that nobody uses are evicted, the longest unused first.

        Raises ValueError if fewer are `available`; then nothing changes.
        """
        if n > self.available:
            raise ValueError(f"{n} pages wanted, {self.available} of {self.total} available; check `available` before")
        pages = []
        for _ in range(n):
            if self.free:
                page = self.free.pop()
            else:
                page, _ = self.idle.popitem(last=False)
                del self.cached[self.digests.pop(page)]
            self.owners[page] = 1
            pages.append(page)
        return pages

    def release(self, pages: Iterable[int]) -> None:
        """Give up ownership, in the order of the sequence: its last pages will be evicted first."""
        for page in reversed(list(pages)):
            self.owners[page] -= 1
            if self.owners[page] == 0:
                if page in self.digests:
                    self.idle[page] = None
                else:
                    self.free.append(page)

    def publish(self, page: int, tokens: Sequence[int], before: bytes, *, first: bool, mark: bytes = b"") -> bytes:
        """Let others share a full page; `before` is the digest of the page before it, or the salt of the `first`.

        `mark` is what else it depends on, see `match`.

        If the same tokens are cached already, that page stays the shared one. Returns the digest.
        """
        data = _bytes(tokens) + mark
        digest = self.digest(before, data, first=first)
        if self.cache and digest not in self.cached and page not in self.digests:
            self.cached[digest], self.digests[page] = (page, data), digest
        return digest

    def digest(self, before: bytes, data: bytes, *, first: bool) -> bytes:
        """Hash a page's tokens and all before them, with the pool's secret."""
        return blake2b(before + data, digest_size=16, key=self.secret, person=b"first" if first else b"next").digest()

    def forget(self) -> None:
        """Share nothing that was computed so far: weights have changed, or what the pages hold is lost."""
        self.free.extend(self.idle)
        self.idle.clear()
        self.cached.clear()
        self.digests.clear()


def bucket(n: int) -> int:
    """Round up to three significant bits (..., 8, 10, 12, 14, 16, 20, ...), so that few sizes are compiled."""
    step = 1 << max(0, n.bit_length() - 3)
    return -(-n // step) * step


def _bytes(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()
