"""Who may do what, how often, and what is written down about it: keys, scopes, rates, the audit log.

A key is 256 random bits, so its plain SHA-256 is safe to keep and to look up by: nothing can be learned by timing the
search for a hash. The secret is shown once, when it is made, and stands nowhere else.
"""

import hashlib
import ipaddress
import json
import math
import re
import secrets
import urllib.parse
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from fdel.serve.server.openai.checks import APIError

SCOPES = ("models", "infer", "metrics", "admin")
ROLES: Mapping[str, frozenset[str]] = {
    "admin": frozenset(SCOPES),
    "service": frozenset({"models", "infer", "metrics"}),
    "user": frozenset({"models", "infer"}),
    "readonly": frozenset({"models", "metrics"}),
}
SECRET = re.compile(r"fdel-[A-Za-z0-9_-]{43}")
FACTS = ("time", "request", "key", "role", "remote", "route", "status", "model", "prompt_tokens", "completion_tokens",
         "finish", "code")  # fmt: skip
LONGEST = 200  # characters of one fact in the audit log


@dataclass(frozen=True)
class Key:
    """What is kept of a key. Rates of None are not limited."""

    id: str
    name: str
    role: str
    hash: str  # SHA-256 of the secret, in hexadecimal
    created: float  # seconds since 1970
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.id, str) and re.fullmatch(r"[\w.-]{1,64}", self.id, re.ASCII)):
            raise ValueError(f"key {self.id!r}: expected 1 to 64 letters, digits, _, . and - as id")
        if not isinstance(self.name, str) or type(self.created) not in (int, float):
            raise ValueError(f"key {self.id!r}: expected a text as name, and seconds since 1970 as created")
        if self.role not in ROLES:
            raise ValueError(f"key {self.id!r} has the role {self.role!r}; expected one of {', '.join(ROLES)}")
        if not (isinstance(self.hash, str) and re.fullmatch("[0-9a-f]{64}", self.hash)):
            raise ValueError(f"key {self.id!r}: expected a SHA-256 in hexadecimal as hash")
        for name in ("requests_per_minute", "tokens_per_minute"):
            rate = getattr(self, name)
            if rate is not None and not (type(rate) in (int, float) and 0 < rate < 1e12):
                raise ValueError(f"key {self.id!r}: {name}={rate!r}; expected a number above 0, or null for no limit")


def create(name: str, role: str, now: float, **rates: float | None) -> tuple[Key, str]:
    """Make a key: what is kept, and the secret, which is shown to its owner once."""
    secret = f"fdel-{secrets.token_urlsafe(32)}"
    return Key(secrets.token_hex(6), name, role, _hash(secret), now, **rates), secret


def authenticate(keys: Mapping[str, Key], authorization: str | None) -> Key:
    """Find the key of an Authorization header ("Bearer ..."); a 401 that does not say what was wrong with it."""
    scheme, _, secret = (authorization or "").partition(" ")
    key = keys.get(_hash(secret)) if scheme.lower() == "bearer" and len(secret) <= 256 else None
    if key is None:
        raise APIError(
            "incorrect API key; pass the header Authorization: Bearer KEY", code="invalid_api_key", status=401,
            headers={"WWW-Authenticate": "Bearer"},
        )  # fmt: skip
    return key


def authorize(key: Key, scope: str) -> None:
    """Raise a 403 if the key's role does not have the scope; an unknown scope is nobody's."""
    if scope not in ROLES[key.role]:
        raise APIError(f"a key of the role {key.role} cannot do this", code="insufficient_scope", status=403)


def check_site(headers: Mapping[str, str], hosts: Collection[str] | None, *, link: bool = False) -> None:
    """Raise a 403 for what a browser sends because a page of another site says so; for servers without keys.

    `hosts` are names of this server beside those of its machine (None: any, beyond this machine): a page of another
    name, which leads here by rebinding, would be one of this site. `link`: one may lead here from another site.
    """
    host, origin = headers.get("Host"), headers.get("Origin")
    own = host is None or hosts is None or _is_local(host, hosts)
    leads = link and headers.get("Sec-Fetch-Mode") == "navigate"
    same = leads or headers.get("Sec-Fetch-Site", "none") in ("none", "same-origin")
    if not own or not same or (origin is not None and origin.partition("://")[2].lower() != (host or "").lower()):
        raise APIError(
            "without API keys this server answers no pages of other sites, and only to its own names; start it with "
            "--api-key-file, or with --insecure for other names", code="foreign_site", status=403,
        )  # fmt: skip


def _is_local(host: str, hosts: Collection[str]) -> bool:
    try:
        name = urllib.parse.urlsplit(f"//{host}").hostname or ""
        return "@" not in host and (name in ("localhost", *hosts) or ipaddress.ip_address(name).is_loopback)
    except ValueError:
        return False


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


@dataclass
class Rates:
    """Token buckets of all keys. One holds a minute's worth, and may owe: (what was left, when).

    The clock is an argument: any that never goes back, in seconds.
    """

    buckets: dict[tuple[str, str], tuple[float, float]] = field(default_factory=dict)

    def admit(self, key: Key, tokens: int, now: float) -> None:
        """Take one request and its tokens (prompt and most output), or nothing: a 429 that says when to come back.

        What is more than a minute's worth needs a full bucket.
        """
        taken, wait = {}, 0.0
        for name, rate, cost in _limits(key, 1, tokens):
            level, at = self._refilled(key, name, rate, now)
            wait = max(wait, (min(cost, rate) - level) * 60 / rate)
            taken[key.id, name] = level - cost, at
        if wait > 0:
            seconds = max(1, math.ceil(wait))
            message = f"the rate of this key is used up; try again in {seconds} s"
            raise APIError(message, code="rate_limit_exceeded", status=429, retry=seconds)
        self.buckets |= taken

    def settle(self, key: Key, admitted: int, used: int, now: float) -> None:
        """Give back the tokens that were admitted but not used."""
        for name, rate, cost in _limits(key, 0, used - admitted):
            level, at = self._refilled(key, name, rate, now)
            self.buckets[key.id, name] = min(rate, level - cost), at

    def _refilled(self, key: Key, name: str, rate: float, now: float) -> tuple[float, float]:
        """Return a bucket as it is now; a new one is full. A clock that goes back gives nothing."""
        level, at = self.buckets.get((key.id, name), (rate, now))
        return min(rate, level + max(0.0, now - at) * rate / 60), max(now, at)


def _limits(key: Key, requests: float, tokens: float) -> list[tuple[str, float, float]]:
    both = (("requests", key.requests_per_minute, requests), ("tokens", key.tokens_per_minute, tokens))
    return [(name, rate, cost) for name, rate, cost in both if rate is not None]


def audit(facts: Mapping[str, Any]) -> str:
    """Write one line of JSON: what happened, never what was said. ValueError for a fact that is not in FACTS."""
    unknown = sorted(set(facts) - set(FACTS))
    if unknown:
        raise ValueError(f"the audit log takes {', '.join(FACTS)}; found {', '.join(unknown)}")
    short = {k: redact(v)[:LONGEST] if isinstance(v, str) else v for k, v in facts.items() if v is not None}
    return json.dumps(short, separators=(",", ":"))


def redact(said: str) -> str:
    """Blot out keys in a text that will be logged."""
    return SECRET.sub("fdel-[redacted]", said)
