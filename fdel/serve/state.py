"""What a server holds, and one call to it: who asks, what is left of their rate, where the work runs."""

import asyncio
import gc
import json
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web

from fdel.serve import auth, grammar, keyfile, limits, openai
from fdel.serve.aside import LARGE, Aside
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
    threads: limits.Turns = field(default_factory=lambda: limits.Turns(4, 2))  # of the pool
    children: Aside | None = None  # between start and end of the application
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

    async def isolated(self, app: web.Application) -> AsyncIterator[None]:
        """Have child processes while an application runs."""
        before = self.children
        self.children = own = Aside({name: s.texts.facts() for name, s in self.engines().items()})
        yield
        own.close()
        await own.ended()
        self.children = before

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
    large: bool = False  # whether the body is more than the event loop may work on
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

    @property
    def children(self) -> Aside:
        """The child processes, for what a text can make expensive."""
        if self.server.children is None:
            raise RuntimeError("the application has not been started")
        return self.server.children

    async def aside(self, work: Callable[[], T]) -> T:
        """Do work that takes a while in a thread, so that other calls go on; nothing ends it, so cut it small."""
        async with self.server.threads.turn(self.holder):
            return await asyncio.get_running_loop().run_in_executor(self.server.pool, work)

    async def load(self, raw: bytes) -> dict[str, Any]:
        """Parse the body. APIError for what JSON or this server does not allow."""
        if len(raw) <= LARGE:
            return openai.load(raw)
        self.large = True  # a child says that it is strict JSON of few values: then plain parsing takes milliseconds
        await self.children.ask(self.holder, "check", data=raw, large=True)
        return await self.aside(lambda: _parse(raw))

    async def parse(self, parse: Callable[[Mapping[str, Any], openai.Limits], T], served: Served) -> T:
        """Check the body for a model. APIError with the parameter that is wrong."""
        work = lambda: parse(self.body, served.limits)
        return await self.aside(work) if self.large else work()

    async def encode(
        self, served: Served, prompts: Sequence[str | Sequence[int]], special: bool = True
    ) -> list[list[int]]:
        """Tokenize those prompts that are texts."""
        texts = [p for p in prompts if isinstance(p, str)]
        found = iter(await self.children.encode(self.holder, served.base, texts, special) if texts else ())
        return [next(found) if isinstance(p, str) else list(p) for p in prompts]

    async def matcher(self, served: Served, spec: grammar.Spec | None) -> grammar.Matcher | None:
        """Compile a grammar, if a child process has survived it. APIError with what is wrong."""
        if spec is None:
            return None
        work = lambda: grammar.compile(served.vocabulary, spec, served.grammars)
        try:
            if served.grammars.get(served.vocabulary, spec) is not None:
                return work()
            await self.children.ask(self.holder, "compile", served.base, large=True, kind=spec.kind, body=spec.body)
            return await self.aside(work)
        except (APIError, ValueError) as e:
            if isinstance(e, APIError) and e.status != 400:
                raise
            raise APIError(str(e), param="response_format") from e

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


def _parse(raw: bytes) -> Any:
    """Parse what is known to be harmless; collections of garbage meanwhile would take ten times as long."""
    gc.disable()
    try:
        return json.loads(raw)
    finally:
        gc.enable()
