"""What a server holds, and one call to it: whose it is, what is left of their rate, where the work runs."""

import asyncio
import gc
import json
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web

from fdel.serve.server import auth, grammar, keyfile, openai
from fdel.serve.server.limits import EvictingQuota, FairSemaphore, Quota, address
from fdel.serve.server.metrics import Metrics
from fdel.serve.server.openai import APIError
from fdel.serve.server.openai.body import Usage, dump
from fdel.serve.server.served import ServedModel
from fdel.serve.server.worker_pool import LARGE, WorkerPool

T = TypeVar("T")


def picture_quota(size: int) -> Quota:
    """Bound the images, videos and sounds that a server holds, prepared for its models, by their bytes."""
    return Quota(size, "bytes of prepared media")


@dataclass
class Server:
    """Models by name, keys by hash (None: no key is asked for), and what is going on."""

    models: Mapping[str, ServedModel]
    metrics: Metrics
    keys: dict[str, auth.Key] | None = None
    key_file: keyfile.Watch | None = None  # where `keys` are from
    hosts: Collection[str] | None = ()  # without keys: names under which this machine is asked; None: any
    adapter_root: Path | None = None  # below which adapters may be loaded
    rates: auth.Rates = field(default_factory=auth.Rates)
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(4, "fdel-serve"))
    slots: FairSemaphore = field(default_factory=lambda: FairSemaphore(4, 2))  # of the threads
    workers: WorkerPool | None = None  # between start and end of the application
    timeout: float = 600.0  # seconds for a whole answer
    draining: bool = False
    active: int = 0  # calls under way
    heard: Mapping[str, Any] = field(default_factory=dict)  # models that write down sounds: `audio.HeardModel`
    dual: Mapping[str, Any] = field(default_factory=dict)  # models that score images and texts: `dual.DualModel`
    labels: Mapping[str, Any] = field(default_factory=dict)  # models that name classes of sounds: `labels.LabelModel`
    audio_seconds: float = 1500.0  # the most of one file
    audio_bytes: int = 25 * 2**20
    image_bytes: int = 10 * 2**20  # the most of one file
    image_pixels: int = 2**24
    video_bytes: int = 50 * 2**20
    video_pixels: int = 2**25  # of all frames that are taken
    video_cpu: float = 10.0  # seconds of processor time that a child has for one video of a chat
    media_hosts: Collection[str] = ()  # from which files are fetched
    pictures: Quota = field(default_factory=lambda: picture_quota(2**31))  # of all calls, until their end
    bodies: EvictingQuota = field(default_factory=lambda: EvictingQuota(Quota(256)))  # on their way
    uploads: Quota = field(default_factory=lambda: Quota(16))  # files, from their first byte to the answer's end
    calls: Quota = field(default_factory=lambda: Quota(1024))  # that ask for work
    outputs: dict[str, Quota] = field(default_factory=dict)  # in the queue of each engine, and in its rows
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)  # of `models`

    def reload(self, now: float | None = None) -> None:
        """Go by the file of keys, if it has changed; see `keyfile.Watch`."""
        if self.keys is not None and self.key_file is not None and (keys := self.key_file.changed(now)) is not None:
            self.keys = keys

    async def with_workers(self, app: web.Application) -> AsyncIterator[None]:
        """Have child processes while an application runs."""
        before = self.workers
        every = {**self.engines(), **self.heard, **self.dual}
        self.workers = pool = WorkerPool({name: s.encoder.facts() for name, s in every.items()})
        yield
        pool.close()
        await pool.ended()
        self.workers = before

    def engines(self) -> dict[str, ServedModel]:
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
    files: dict[str, bytes] = field(default_factory=dict)  # of a form
    shown: int = 0  # bytes of what it shows, as the model takes it
    large: bool = False  # whether the body is more than the event loop may work on
    clock: Any = None  # the asyncio.Timeout of the whole call
    on_end: list[Callable[[], None]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)  # for the audit log

    @property
    def holder(self) -> str:
        """Whose quota this call takes of: a key's, or an address's where no keys are asked for."""
        return address(self.request.remote) if self.key is None else self.key.id

    def served(self, optional: bool = False) -> ServedModel:
        """Find the model that is asked for; with `optional`, the first one if none is named."""
        name = self.body.get("model")
        if name is None:
            if not optional:
                raise APIError("model: missing", param="model", code="missing_required_parameter")
            name = next(iter(self.server.models), None)
        served = self.server.models.get(name) if isinstance(name, str) else None
        if served is None:
            message = f"the model {str(name)[:64]!r} {self._elsewhere(name)}"
            raise APIError(message, param="model", code="model_not_found", status=404)
        self.facts["model"] = served.name
        return served

    def _elsewhere(self, name: Any) -> str:
        if isinstance(name, str) and name in self.server.heard:
            return "hears: ask /v1/audio/transcriptions"
        if isinstance(name, str) and name in self.server.dual:
            return "scores images and texts: ask /v1/embeddings, or /v1/classify with candidate_labels"
        if isinstance(name, str) and name in self.server.labels:
            return "names the classes of sounds: ask /v1/classify"
        return "does not exist here"

    def dual(self) -> Any:
        """Find the `dual.DualModel` that is asked for; None if another is."""
        return self._of(self.server.dual)

    def labels(self) -> Any:
        """Find the `labels.LabelModel` that is asked for; None if another is."""
        return self._of(self.server.labels)

    def _of(self, models: Mapping[str, Any]) -> Any:
        name = self.body.get("model")
        found = models.get(name) if isinstance(name, str) else None
        if found is not None:
            self.facts["model"] = found.name
        return found

    def heard(self) -> Any:
        """Find the `audio.HeardModel` that is asked for."""
        name = self.body["model"]
        if (found := self.server.heard.get(name)) is None:
            known = ", ".join(self.server.heard) or "none"
            message = f"the model {name[:64]!r} does not hear, or does not exist here; those that do: {known}"
            raise APIError(message, param="model", code="model_not_found", status=404)
        self.facts["model"] = found.name
        return found

    @property
    def workers(self) -> WorkerPool:
        """The child processes, for what a text can make expensive."""
        if self.server.workers is None:
            raise RuntimeError("the application has not been started")
        return self.server.workers

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Do work that takes a while in a thread, so that other calls go on; nothing ends it, so cut it small."""
        async with self.server.slots.slot(self.holder):
            return await asyncio.get_running_loop().run_in_executor(self.server.threads, work)

    async def load(self, raw: bytes) -> dict[str, Any]:
        """Parse the body. APIError for what JSON or this server does not allow."""
        if len(raw) <= LARGE:
            return openai.load(raw)
        self.large = True  # a child says that it is strict JSON of few values: then plain parsing takes milliseconds
        await self.workers.ask(self.holder, "check", data=raw, large=True)
        return await self.in_thread(lambda: _parse(raw))

    async def parse(self, parse: Callable[[Mapping[str, Any], openai.Limits], T], served: Any) -> T:
        """Check the body for a model, by its `limits`. APIError with the parameter that is wrong."""
        work = lambda: parse(self.body, served.limits)
        return await self.in_thread(work) if self.large else work()

    async def encode(
        self, served: Any, prompts: Sequence[str | Sequence[int]], special: bool = True
    ) -> list[list[int]]:
        """Tokenize those prompts that are texts, by the tokenizer of the model `base`."""
        texts = [p for p in prompts if isinstance(p, str)]
        ids = iter(await self.workers.encode(self.holder, served.base, texts, special) if texts else ())
        return [next(ids) if isinstance(p, str) else list(p) for p in prompts]

    async def matcher(self, served: ServedModel, spec: grammar.Spec | None) -> grammar.Matcher | None:
        """Compile a grammar, if a child process has survived it. APIError with what is wrong."""
        if spec is None:
            return None
        work = lambda: grammar.compile(served.vocabulary, spec, served.grammars)
        try:
            if served.grammars.get(served.vocabulary, spec) is not None:
                return work()
            await self.workers.ask(self.holder, "compile", served.base, large=True, kind=spec.kind, body=spec.body)
            return await self.in_thread(work)
        except (APIError, ValueError) as e:
            if isinstance(e, APIError) and e.status != 400:
                raise
            raise APIError(str(e), param="response_format") from e

    def take(self, quota: Quota, count: int = 1) -> None:
        """Take slots of a quota until the call ends; an APIError if its holder has as many as others find free."""
        if not quota.acquire(self.holder, count):
            held = quota.held[self.holder]
            message = f"{held} of at most {quota.total} {quota.unit} are yours, and others need some; try again"
            raise APIError(message, status=429, code="too_many_requests", retry=1)
        self.on_end.append(lambda: quota.release(self.holder, count))

    def admit(self, tokens: int) -> None:
        """Count a request and its tokens against the key's rate; an APIError if that is used up."""
        if self.key is not None:
            self.server.rates.admit(self.key, tokens, time.monotonic())

    def settle(self, admitted: int, used: Usage) -> None:
        """Note what was used, and give the rest of what was admitted back."""
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
