"""What a server holds, and one call to it: who asks, what is left of their rate, where the work runs."""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web

from fdel.serve import auth, grammar, keyfile, limits
from fdel.serve.metrics import Metrics
from fdel.serve.openai import APIError
from fdel.serve.openai.body import Usage, dump
from fdel.serve.request import SamplingParams
from fdel.serve.runs import Run
from fdel.serve.served import Served

T = TypeVar("T")


@dataclass
class Server:
    """Models by name, keys by hash (None: no key is asked for), and what is going on."""

    models: Mapping[str, Served]
    metrics: Metrics
    keys: dict[str, auth.Key] | None = None
    key_file: keyfile.Watch | None = None  # where `keys` are from
    hosts: Collection[str] | None = ()  # without keys: names under which this machine is asked; None: any
    adapter_root: Path | None = None  # below which adapters may be loaded
    rates: auth.Rates = field(default_factory=auth.Rates)
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(4, "fdel-serve"))
    timeout: float = 600.0  # seconds for a whole answer
    draining: bool = False
    active: int = 0  # calls under way
    bodies: limits.Places = field(default_factory=lambda: limits.Places(limits.Share(256)))  # that are on their way
    calls: limits.Share = field(default_factory=lambda: limits.Share(1024))  # that ask for work
    outputs: dict[str, limits.Share] = field(default_factory=dict)  # in the queue of each engine, and in its rows
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)  # of `models`

    def reload(self, now: float | None = None) -> None:
        """Go by the file of keys, if it has changed; see `keyfile.Watch`."""
        if self.keys is None or self.key_file is None:
            return
        if (found := self.key_file.changed(now)) is not None:
            self.keys = found

    def engines(self) -> dict[str, Served]:
        """One name for each engine."""
        return {name: s for name, s in self.models.items() if s.parent is None}


@dataclass
class Call:
    """One request that was let in; `body` is its JSON."""

    server: Server
    request: web.Request
    id: str
    key: auth.Key | None
    body: dict[str, Any] = field(default_factory=dict)
    clock: Any = None  # the asyncio.Timeout of the whole call
    on_end: list[Callable[[], None]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)  # for the audit log

    @property
    def holder(self) -> str:
        """Whose share this call takes of: a key's, or an address's where no keys are asked for."""
        return limits.address(self.request.remote) if self.key is None else self.key.id

    def served(self, optional: bool = False) -> Served:
        """Find the model that is asked for; with `optional`, the first one if none is named."""
        name = self.body.get("model")
        if name is None:
            if not optional:
                raise APIError("model: missing", param="model", code="missing_required_parameter")
            return next(iter(self.server.models.values()))
        found = self.server.models.get(name) if isinstance(name, str) else None
        if found is None:
            raise APIError(
                f"the model {str(name)[:64]!r} does not exist here", param="model", code="model_not_found", status=404
            )
        self.facts["model"] = found.name
        return found

    async def aside(self, work: Callable[[], T]) -> T:
        """Do work that takes a while, so that other calls go on."""
        return await asyncio.get_running_loop().run_in_executor(self.server.pool, work)

    def take(self, share: limits.Share, count: int = 1) -> None:
        """Take places of a share until the call ends; an APIError if its holder has as many as others find free."""
        if not share.take(self.holder, count):
            said = (
                f"{share.held[self.holder]} of at most {share.total} places are yours, and others need some; try again"
            )
            raise APIError(
                said, status=429, type="rate_limit_error", code="too_many_requests", headers={"Retry-After": "1"}
            )
        self.on_end.append(lambda: share.give(self.holder, count))

    def admit(self, tokens: int) -> None:
        """Count a request and its tokens against the key's rate; an APIError if that is used up."""
        if self.key is not None:
            self.server.rates.admit(self.key, tokens, time.monotonic())

    def run(
        self,
        served: Served,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        matcher: grammar.Matcher | None,
        salt: str,
    ) -> Run:
        """Queue a request's outputs."""
        if matcher is not None and sampling.allowed_tokens is not None:  # together they may leave no token at all
            said = (
                "allowed_token_ids cannot be combined with a structure of the output, nor with calls that must be made"
            )
            raise APIError(said, param="allowed_token_ids")
        run = Run(served, prompts, sampling, self.key.id if self.key else "", self.server.metrics, matcher, salt)
        most = sum(len(p) + run.each * run.room(p) for p in prompts)
        engine, count = served.parent or served.name, len(prompts) * run.each
        share = self.server.outputs.setdefault(engine, limits.Share(served.engine.settings.queue))
        self.take(share, count)
        self.admit(most)
        try:
            run.submit()
        except APIError:
            self._settle(most, Usage(0))
            raise
        self.on_end += [run.abort, lambda: self._settle(most, run.usage())]
        return run

    def idle(self, served: Served, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> Run:
        """Take a request that needs no output."""
        self.admit(sum(map(len, prompts)))
        return Run(served, prompts, replace(sampling, n=1, best_of=None), "", self.server.metrics)

    def _settle(self, admitted: int, used: Usage) -> None:
        self.facts |= {"prompt_tokens": used.prompt, "completion_tokens": used.completion}
        if self.key is not None:
            self.server.rates.settle(self.key, admitted, used.prompt + used.completion, time.monotonic())

    def finish(self) -> None:
        """End what is left, and count what was used; once."""
        todo, self.on_end = self.on_end, []
        for end in todo:
            end()

    def json(self, value: Mapping[str, Any], status: int = 200) -> web.Response:
        """Answer with JSON."""
        return web.Response(body=dump(value), status=status, content_type="application/json", charset="utf-8")
