"""Who may do what: keys known by their hash, roles, rates. Plain data and an explicit clock; no secret is kept."""

import hashlib
import json
import os
import secrets
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

SCOPES: Mapping[str, frozenset[str]] = {
    "admin": frozenset({"infer", "models", "metrics", "admin"}),
    "service": frozenset({"infer", "models", "metrics"}),
    "user": frozenset({"infer", "models"}),
    "readonly": frozenset({"models", "metrics"}),
}
PREFIX = "sk-fdel-"
LONGEST = 512  # characters of an Authorization header that are looked at


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key: its public id, the hash of its secret, its role, and the most requests and tokens per minute."""

    id: str
    sha256: str
    role: str = "user"
    name: str = ""
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    expires: float | None = None  # seconds since 1970

    def __post_init__(self) -> None:
        if self.role not in SCOPES:
            raise ValueError(f"key {self.id}: role {self.role!r}; expected one of {', '.join(SCOPES)}")
        if len(self.sha256) != 64 or not set(self.sha256) <= set("0123456789abcdef"):
            raise ValueError(f"key {self.id}: sha256 is no hash; make keys with `fdel keys add`")
        for name in ("requests_per_minute", "tokens_per_minute"):
            rate = getattr(self, name)
            if rate is not None and not 0 < rate < float("inf"):
                raise ValueError(f"key {self.id}: {name}={rate}; expected a positive number, or null for no limit")

    def may(self, scope: str, now: float) -> bool:
        """Tell whether the key is valid now and its role has a scope."""
        return scope in SCOPES[self.role] and (self.expires is None or now < self.expires)


def hashed(secret: str) -> str:
    """Hash a secret. Secrets are 256 random bits, which nobody can guess from their hash."""
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def new_key(**fields: object) -> tuple[str, Key]:
    """Make a secret, which is shown once, and its key."""
    secret = PREFIX + secrets.token_urlsafe(32)
    return secret, Key(id="key_" + secrets.token_hex(6), sha256=hashed(secret), **fields)  # type: ignore[arg-type]


def load(path: str | Path) -> dict[str, Key]:
    """Read a key file: keys by hash. A file that others can read, or that is no key file, is a ValueError."""
    path = Path(path)
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        raise ValueError(f"{path} has mode {mode:o}, so that others can read it; run chmod 600 on it")
    try:
        keys = [Key(**entry) for entry in json.loads(path.read_text())["keys"]]
    except (ValueError, TypeError, KeyError) as e:
        raise ValueError(f"{path} is not a key file ({type(e).__name__}: {e}); make one with `fdel keys add`") from e
    found = {key.sha256: key for key in keys}
    if len(found) < len(keys) or len({key.id for key in keys}) < len(keys):
        raise ValueError(f"{path} holds a key twice; remove one of the two")
    return found


def save(path: str | Path, keys: Iterable[Key]) -> None:
    """Write a key file that only its owner can read; it is complete or as before."""
    path = Path(path)
    handle, part = tempfile.mkstemp(dir=path.parent, prefix=path.name)  # mkstemp makes files of mode 600
    with os.fdopen(handle, "w") as file:
        json.dump({"keys": [asdict(key) for key in keys]}, file, indent=2)
    os.replace(part, path)


def find(keys: Mapping[str, Key], authorization: str | None) -> Key | None:
    """Look up the key of an Authorization header, "Bearer SECRET"; None if there is none.

    What is looked up is the hash: how long that takes says nothing about a secret.
    """
    scheme, _, secret = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not secret or len(secret) > LONGEST:
        return None
    return keys.get(hashed(secret.strip()))


@dataclass
class Bucket:
    """What a key may still use: `rate` units flow in per second, up to one minute's worth."""

    rate: float
    level: float = field(init=False)
    at: float | None = None

    def __post_init__(self) -> None:
        self.level = 60 * self.rate

    def _fill(self, now: float) -> None:
        since = 0.0 if self.at is None else max(0.0, now - self.at)
        self.level, self.at = min(60 * self.rate, self.level + since * self.rate), now

    def wait(self, amount: float, now: float) -> float:
        """Tell how many seconds until an amount is there; 0 if it is. More than a minute's worth: until full."""
        self._fill(now)
        return max(0.0, (min(amount, 60 * self.rate) - self.level) / self.rate)

    def use(self, amount: float, now: float) -> None:
        """Take an amount out; a debt delays what comes next."""
        self._fill(now)
        self.level -= amount


@dataclass
class Rates:
    """The buckets of all keys."""

    buckets: dict[tuple[str, str], Bucket] = field(default_factory=dict)

    def _of(self, key: Key, kind: str) -> Bucket | None:
        rate = getattr(key, f"{kind}_per_minute")
        return None if rate is None else self.buckets.setdefault((key.id, kind), Bucket(rate / 60))

    def admit(self, key: Key, tokens: int, now: float) -> float:
        """Count a request and its prompt's tokens; or count nothing, and tell how many seconds it is too early."""
        asked = [(b, n) for kind, n in (("requests", 1), ("tokens", tokens)) if (b := self._of(key, kind)) is not None]
        if early := max((b.wait(n, now) for b, n in asked), default=0.0):
            return early
        for b, n in asked:
            b.use(n, now)
        return 0.0

    def charge(self, key: Key, tokens: int, now: float) -> None:
        """Count tokens of an answer."""
        if (b := self._of(key, "tokens")) is not None:
            b.use(tokens, now)
