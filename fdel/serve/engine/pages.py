"""The pool of cache pages: who owns which, which full pages later prompts may share, and what is evicted first.

A page holds the keys and values of `size` consecutive tokens. A full one is published under a digest of all tokens up to
its end, so that another sequence that begins with the same tokens shares it instead of computing it again. Only full
pages are shared and nobody writes to those, so sharing copies nothing. The page that a prompt ends in is published to be
copied: its owner goes on writing behind the prompt.
"""

import secrets
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
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
    digests: dict[int, list[bytes]] = field(default_factory=dict)  # of a cached page: when full, and as a prompt's end

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

    def match(self, tokens: Sequence[int], salt: bytes) -> tuple[list[int], list[bytes]]:
        """Find and own the longest cached beginning of `tokens`: (pages, their digests).

        At least the last token is left out: its logits are wanted. Tokens are compared, not only their digest.
        """
        pages: list[int] = []
        digests: list[bytes] = []
        for start in range(0, (len(tokens) - 1) // self.size * self.size if self.cache else 0, self.size):
            data = _bytes(tokens[start : start + self.size])
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
                for digest in self.digests.pop(page):
                    del self.cached[digest]
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

    def publish(self, page: int, tokens: Sequence[int], before: bytes, *, first: bool) -> bytes:
        """Let others share a full page; `before` is the digest of the page before it, or the salt of the `first`.

        If the same tokens are cached already, that page stays the shared one. Returns the digest.
        """
        data = _bytes(tokens)
        digest = self.digest(before, data, first=first)
        self._remember(page, digest, data)
        return digest

    def publish_part(self, pages: Sequence[int], tokens: Sequence[int], salt: bytes, digests: Sequence[bytes]) -> None:
        """Let others copy the page that tokens end in, if they do not fill it; `digests` are of the full ones before it."""
        at = len(tokens) // self.size
        if data := _bytes(tokens[at * self.size :]):
            before = digests[at - 1] if at else salt
            self._remember(pages[at], self.digest(before, data, first=at == 0, full=False), data)

    def match_part(self, tokens: Sequence[int], salt: bytes, digests: Sequence[bytes]) -> int | None:
        """Find a page to copy that begins as the one that tokens end in; `digests` are of the pages that `match` found.

        Nobody owns it for this: copy it before anything is written to pages that are taken from now on.
        """
        at = len(tokens) // self.size
        if not (self.cache and len(digests) == at and (data := _bytes(tokens[at * self.size :]))):
            return None
        digest = self.digest(digests[-1] if at else salt, data, first=at == 0, full=False)
        page, stored = self.cached.get(digest, (-1, b""))
        if stored != data:
            return None
        if page in self.idle:
            self.idle.move_to_end(page)
        return page

    def _remember(self, page: int, digest: bytes, data: bytes) -> None:
        if self.cache and digest not in self.cached:
            self.cached[digest] = page, data
            self.digests.setdefault(page, []).append(digest)

    def digest(self, before: bytes, data: bytes, *, first: bool, full: bool = True) -> bytes:
        """Hash a page's tokens and all before them, with the pool's secret."""
        person = (b"first" if first else b"next") + (b"" if full else b" part")
        return blake2b(before + data, digest_size=16, key=self.secret, person=person).digest()

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
