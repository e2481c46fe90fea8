"""The engine: continuous batching over one model, for callers in this thread, in other threads, and in asyncio."""

import itertools
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fdel import text
from fdel.models import Model, heads
from fdel.models.pooling import Pooling
from fdel.ops import cpu
from fdel.serve.engine.core import Core
from fdel.serve.engine.device import BLOCK, Device
from fdel.serve.engine.packing import pack_bits
from fdel.serve.engine.pages import Pool
from fdel.serve.engine.pictures import PromptMedia
from fdel.serve.engine.reading import Reading
from fdel.serve.engine.reply import Delta, DeltaQueue, Generation, Job, MaskSource, Reply, best
from fdel.serve.engine.request import SamplingParams, check_prompt, end_ids, fit, noise, stop_ids, whole
from fdel.serve.engine.sampling import sampling_rows
from fdel.serve.engine.schedule import QueueFull, Schedule
from fdel.serve.engine.settings import Settings, recurrent, unsupported
from fdel.serve.engine.step import PAGE
from fdel.serve.engine.work import Request
from fdel.serve.output_text import OutputText, special_stops

COUNTED = ("steps", "prompt tokens", "generated tokens", "stop", "length", "abort", "error", "faults", "drafting steps")


class Engine(Reading):
    """Serves one model: many requests at a time, whose answers do not depend on their company.

    `generate`, `score` and `embed` can be called from any thread, `stream` in asyncio. A background thread runs the steps
    from `start` (which `stream` calls) to `close`; without it, `generate` runs them itself.

    `adapters` are parameters with LoRA adapters (share the base arrays with `model.params`), by name. `draft` is a
    smaller model that guesses `settings.drafts` tokens ahead; guesses change no output. With a `tokenizer`, outputs have
    text and may end at stop strings (`OutputText`). `make` makes the device, here (`Device`) or for several processes
    (`engine.follow.leading`); `how` goes to it: `sight`, as `media.sight.read(folder)` gives it, of a model that is to see
    pictures. Raises ValueError with the reason of `unsupported`.
    """

    def __init__(
        self,
        model: Model,
        settings: Settings | None = None,
        *,
        tokenizer: text.Tokenizer | None = None,
        eos: Sequence[int] | None = None,
        adapters: Mapping[str, Any] | None = None,
        draft: Model | None = None,
        pooling: Pooling | None = None,
        make: Callable[..., Device] = Device,
        **how: Any,
    ):
        self.settings = s = Settings() if settings is None else settings
        if reason := unsupported(model, s, draft):
            raise ValueError(reason)
        self.tokenizer, self.eos = tokenizer, end_ids(model, eos, tokenizer)
        self.pooling, self.silent = pooling, heads.no_text(model)  # how it embeds; why it writes no text
        if pooling is not None:
            pooling.width(getattr(model.cfg, "width", model.cfg.embed))  # refused now, if its layers have other sizes
            self.silent = (
                self.silent or "this model embeds texts and writes none; ask Engine.embed, /v1/embeddings, /score"
            )
        self._device = device = (make if self.silent is None else partial(make, writes=False))(
            model, s, adapters, draft, **how
        )
        self.sight = how.get("sight")
        self.limit = device.length
        cache = self.silent is None and not recurrent(model) if s.cache is None else s.cache
        chunk = s.chunk or (cpu.CHUNK if cpu.here() else None)
        schedule = Schedule(Pool(device.pages, PAGE, cache), s.rows, s.budget, BLOCK, device.width, s.queue, chunk)
        super().__init__(Core(device, schedule, overlap=s.overlap))
        self._ids = itertools.count()

    @property
    def model(self) -> Model:
        """The family, its Config, and the parameters that are served now, with listed layers. Do not donate them."""
        return self._device.model._replace(params=self._device.weights[""])

    def submit(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        mask: MaskSource | None = None,
        media: PromptMedia | None = None,
        **where: Any,
    ) -> Job:
        """Queue one output of a prompt, with its MaskSource and its pictures; all other options as in `submit_all`."""
        sampling = SamplingParams() if sampling is None else sampling
        if isinstance(sampling, SamplingParams):  # else refused below
            sampling.check_single()
        return self.submit_all([prompt], sampling, mask=None if mask is None else lambda: mask, media=[media], **where)[
            0
        ]

    def submit_all(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        *,
        mask: Callable[[], MaskSource] | None = None,
        queue: DeltaQueue | None = None,
        key: str = "",
        salt: str = "",
        priority: int = 0,
        adapter: str = "",
        media: Sequence[PromptMedia | None] | None = None,
    ) -> list[Job]:
        """Queue n outputs (or best_of) of each prompt, in order: all of them, or none. `best` chooses among them later.

        `mask` makes each output's MaskSource; `queue` gets their deltas, by the place of each in what is returned. `key` is
        whose fair share it uses; cached pages are shared by those who have the same key and salt. The highest priority goes
        first. `media` are the pictures of each prompt, None for none, as `prompt_media` gives them beside its tokens:
        each is encoded once, whoever shows it, as long as it has room in `settings.media_bytes`.

        Raises ValueError for what cannot be served, QueueFull, and RuntimeError once the engine is closed.
        """
        self.check_open()
        if self.silent is not None:
            raise ValueError(self.silent)
        if not isinstance(sampling, SamplingParams):
            raise ValueError(f"sampling is a {type(sampling).__name__}; expected SamplingParams")
        if not (isinstance(key, str) and isinstance(salt, str) and whole(priority)):
            raise ValueError(f"{key=}, {salt=}, {priority=}; expected two texts and a whole number")
        self._device.weights.check(adapter, there=not self._core.asleep)
        if self.tokenizer is None and sampling.stops:
            raise ValueError("stop strings need a tokenizer; pass tokenizer=text.load(folder), or use stop_token_ids")
        owner = f"{len(key)} {key} {len(salt)} {salt} {adapter}".encode("utf-8", "surrogatepass")
        jobs: list[Job] = []
        for prompt, shown in zip(prompts, shown_by(prompts, media), strict=True):
            first = None
            for i in range(sampling.outputs):
                job = self._job(prompt, sampling, i, shown)
                r = job.request
                r.priority, r.key, r.salt, r.adapter, r.after = int(priority), key, owner, adapter, first
                first = first or r
                job.mask, job.queue, job.index = None if mask is None else mask(), queue, len(jobs)
                jobs.append(job)
        self._enqueue(jobs)
        return jobs

    def _job(self, prompt: Sequence[int], sampling: SamplingParams, index: int, media: PromptMedia | None) -> Job:
        """Make output `index` of a prompt."""
        vocab, tok = self._device.model.cfg.vocab, self.tokenizer
        prompt = check_prompt(fit(prompt, sampling, self.limit), vocab, self.limit, "the prompt")
        ends, room = stop_ids(sampling, self.eos), min(int(sampling.max_tokens), self.limit - len(prompt))
        if tok is not None:
            ends |= {i for i in special_stops(tok, sampling.stops) if i < vocab}
        seed = noise(sampling.seed, prompt, index)
        keyed = sampling if seed is None else replace(sampling, seed=seed)
        row = pack_bits(sampling_rows([keyed], [len(prompt)], [ends], [room], vocab=vocab))
        whole = media is not None and self._device.whole
        request = Request(next(self._ids), prompt, len(prompt), len(prompt) + room, media=media, whole=whole)
        if media is not None:
            self._device.check_media(media, prompt)
        self._core.schedule.check(request)
        return Job(request, Reply(sampling, ends, room, None if tok is None else OutputText(tok, sampling.stops)), row)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        media: Sequence[PromptMedia | None] | None = None,
        **where: Any,
    ) -> list[Generation]:
        """Continue prompts; n outputs of each, in order. `mask` and all other options as in `submit_all`.

        A request that failed has finish_reason "error" and its reason in `error`; the others are complete.
        """
        every = [sampling or SamplingParams()] * len(prompts) if not isinstance(sampling, Sequence) else list(sampling)
        if len(every) != len(prompts):
            raise ValueError(f"{len(every)} SamplingParams for {len(prompts)} prompts; give one, or one per prompt")
        groups: list[list[Job]] = []
        try:
            for prompt, s, shown in zip(prompts, every, shown_by(prompts, media), strict=True):
                if shown is not None and s.prompt_logprobs is not None:
                    raise ValueError("prompt_logprobs of a prompt with pictures; leave them out")
                groups.append(self._queue(prompt, s, media=[shown], **where))
            self.wait(lambda: all(job.reply.finish_reason for job in itertools.chain(*groups)))
        except BaseException:
            for job in itertools.chain(*groups):
                self.abort(job)
            raise
        out, adapter = [], where.get("adapter", "")
        for prompt, s, group in zip(prompts, every, groups, strict=True):
            scored = None
            if s.prompt_logprobs is not None:
                scored = self.score(fit(prompt, s, self.limit), s.prompt_logprobs, adapter=adapter)
            out += [group[i].reply.generation(scored, group[i].request.cached or 0) for i in best(group, s)]
        return out

    def _queue(self, prompt: Sequence[int], sampling: SamplingParams, **where: Any) -> list[Job]:
        """Submit as soon as the queue has room."""
        while True:
            try:
                return self.submit_all([prompt], sampling, **where)
            except QueueFull:
                self.wait(lambda: self.settings.queue - self._waiting >= sampling.outputs)

    async def stream(
        self, prompt: Sequence[int], sampling: SamplingParams | None = None, **where: Any
    ) -> AsyncIterator[Delta]:
        """Continue one prompt (n = 1) and yield what each step adds, or several together if the reader is slow.

        Leaving the loop aborts the request. The first stream of an engine waits for `start`, which compiles.
        """
        self.start()
        queue = DeltaQueue()
        job = self.submit(prompt, sampling, queue=queue, **where)
        try:
            while True:
                for _, delta in await queue.get():
                    yield delta
                    if delta.finish_reason:
                        return
        finally:
            self.abort(job)

    def stats(self) -> dict[str, float]:
        """Count what the engine has done and holds; counters only grow."""
        core, schedule = self._core, self._core.schedule
        return {
            **{name: core.counts[name] for name in COUNTED},
            **{f"pictures {name}": self._device.holders.counts[name] for name in ("encoded", "found")},
            **{name: schedule.counts[name] for name in ("arrived", "preempted", "looked up", "found")},
            "running": len(schedule.running),
            "waiting": self._waiting,
            "pages": schedule.pool.total,
            "free pages": schedule.pool.available,
            "compiled": sum(self._device.programs.traces.values()),
            "to compile": len(self._device.uncompiled) + len(core.held.sizes),
            "seconds since a step": time.monotonic() - self._stepped,
        }


def shown_by(prompts: Sequence[Any], media: Sequence[PromptMedia | None] | None) -> Sequence[PromptMedia | None]:
    """List the pictures of each prompt. ValueError if there are those of another number of prompts."""
    if media is not None and len(media) != len(prompts):
        raise ValueError(f"media of {len(media)} prompts for {len(prompts)}; give one for each, None without pictures")
    return [None] * len(prompts) if media is None else media
