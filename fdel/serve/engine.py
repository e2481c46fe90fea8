"""The engine: continuous batching over one model, for callers in this thread, in other threads, and in asyncio."""

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fdel import text
from fdel.models import Model
from fdel.ops import cpu
from fdel.serve.core import Core, Job, MaskSource
from fdel.serve.device import BLOCK, Device, sizes
from fdel.serve.loop import Loop, Mailbox
from fdel.serve.pages import Pool
from fdel.serve.reply import Delta, Generation, Reply, Score, join
from fdel.serve.request import SamplingParams, check_prompt, default_eos, fit, length_limit, stop_ids
from fdel.serve.sample import sampling_rows
from fdel.serve.schedule import QueueFull, Request, Schedule
from fdel.serve.settings import Settings, recurrent, unsupported
from fdel.serve.step import PAGE

COUNTED = ("steps", "prompt tokens", "generated tokens", "stop", "length", "abort", "error", "faults", "drafting steps")
LENGTH = 4096  # most tokens of a sequence if neither the model nor the settings limit it


def make_device(
    model: Model,
    settings: Settings,
    adapters: Mapping[str, Any] | None = None,
    draft: Model | None = None,
    make: Callable[..., Device] = Device,
) -> Device:
    """Make the device of an engine with these settings; processes that follow one make the same."""
    s, limit = settings, length_limit(model, settings.max_length)
    length = LENGTH if limit == math.inf else int(limit)
    width = -(-length // PAGE)
    pages = s.pages or max(width, s.rows * min(width, 1024 // PAGE))
    blocks, batches = sizes(2, max(2, -(-s.budget // BLOCK)), 2), s.batches or sizes(1, s.rows, 8)
    return make(
        model, s.rows, length, pages, blocks, batches, s.drafts, draft,
        adapters or {}, s.kv_cache_dtype, s.max_loras, s.max_lora_rank or 16, s.decode_steps, s.lora_rank,
    )  # fmt: skip


class Engine:
    """Serves one model: many requests at a time, whose answers do not depend on their company.

    `generate`, `score` and `embed` can be called from any thread, `stream` in asyncio. A background thread runs the steps
    from `start` (which `stream` calls) to `close`; without it, `generate` runs them itself.

    `adapters` are parameters with LoRA adapters (share the base arrays with `model.params`), by name. `draft` is a
    smaller model that guesses `settings.drafts` tokens ahead; guesses change no output. `make` makes the device, here
    (`Device`) or for several processes (`serve.follow.leading`). Raises ValueError with the
    reason if `unsupported` has one.
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
        make: Callable[..., Device] = Device,
    ):
        self.settings = s = Settings() if settings is None else settings
        if reason := unsupported(model, s, draft):
            raise ValueError(reason)
        self.tokenizer = tokenizer
        self.eos = tuple(eos) if eos is not None else default_eos(model) if tokenizer is None else tokenizer.eos_ids
        device = make_device(model, s, adapters, draft, make)
        self.limit = device.length
        cache = not recurrent(model) if s.cache is None else s.cache
        width = max(s.drafts + 1, s.decode_steps)
        chunk = s.chunk or (cpu.CHUNK if cpu.here() else None)
        schedule = Schedule(Pool(device.pages, PAGE, cache), s.rows, s.budget, BLOCK, width, s.queue, chunk)
        self.core = Core(device, schedule, overlap=s.overlap)
        self.loop = Loop(self.core)
        self.ids = itertools.count()

    @property
    def model(self) -> Model:
        """The family, its Config, and the parameters that are served now, with listed layers. Do not donate them."""
        return self.core.device.model._replace(params=self.core.device.weights[""])

    # ---- requests ----

    def submit(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        key: str = "",
        priority: int = 0,
        adapter: str = "",
        mask: MaskSource | None = None,
        after: Job | None = None,
        box: Mailbox | None = None,
    ) -> Job:
        """Queue one output of a prompt.

        `key` is whose fair share and whose cached pages it uses; the highest priority goes first. `after` waits until
        that job's prompt is cached. `box` gets every delta. Raises ValueError for a request
        that cannot be served, QueueFull, and RuntimeError once the engine is closed.
        """
        sampling = SamplingParams() if sampling is None else sampling
        self.loop.check_open()
        if adapter not in self.core.device.weights:
            known = ", ".join(filter(None, self.core.device.weights))
            raise ValueError(f"adapter {adapter!r} is not loaded; loaded are: {known or 'none'}")
        if self.tokenizer is None and sampling.stops:
            raise ValueError("stop strings need a tokenizer; pass tokenizer=text.load(folder), or use stop_token_ids")
        vocab = self.core.device.model.cfg.vocab
        prompt = fit(prompt, sampling, self.limit)
        check_prompt(prompt, vocab, self.limit, "the prompt")
        ends, room = stop_ids(sampling, self.eos), min(sampling.max_tokens, self.limit - len(prompt))
        if (
            self.tokenizer is not None
        ):  # a special token's text is never shown: as a stop string, its id ends the output
            ends |= self.tokenizer.special_ids & {self.tokenizer.backend.token_to_id(s) for s in sampling.stops}
        arrays = sampling_rows([sampling], [len(prompt)], [ends], [room], vocab=vocab)
        salt = f"{len(key)} {key} {adapter}".encode()
        request = Request(
            next(self.ids), [int(t) for t in prompt], len(prompt), len(prompt) + room, priority, key, salt
        )
        request.adapter, request.after = adapter, None if after is None else after.request
        self.core.schedule.check(request, len(self.loop.inbox))
        detokenizer = None if self.tokenizer is None else text.Detokenizer(self.tokenizer)
        job = Job(request, Reply(sampling, ends, room, detokenizer), arrays, mask, box)
        self.loop.post(lambda: self.core.add(job))
        return job

    def abort(self, job: Job) -> None:
        """End a request wherever it stands; its reader is told finish_reason "abort". Ended ones stay as they are."""
        self.loop.post(lambda: self.core.end(job.request.id, "abort"))

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        mask: Callable[[], MaskSource] | None = None,
        **where: Any,
    ) -> list[Generation]:
        """Continue prompts; n outputs of each, in order. `mask` makes the MaskSource of each; `where` as in `submit`.

        A request that failed has finish_reason "error" and its reason in `error`; the others are complete.
        """
        every = [sampling or SamplingParams()] * len(prompts) if not isinstance(sampling, Sequence) else list(sampling)
        if len(every) != len(prompts):
            raise ValueError(f"{len(every)} SamplingParams for {len(prompts)} prompts; give one, or one per prompt")
        groups: list[list[Job]] = []
        try:
            for prompt, s in zip(prompts, every, strict=True):
                groups.append([])
                for i in range(s.best_of or s.n):
                    seed = None if s.seed is None else (s.seed + i) % 2**64
                    where |= {"mask": mask and mask(), "after": groups[-1][0] if i else None}
                    groups[-1].append(self._queue(prompt, replace(s, seed=seed), **where))
            jobs = [job for group in groups for job in group]
            self.loop.wait(lambda: all(job.reply.finish_reason for job in jobs))
        except BaseException:
            for job in (job for group in groups for job in group):
                self.abort(job)
            raise
        out = []
        for prompt, s, group in zip(prompts, every, groups, strict=True):
            scored = None
            if s.prompt_logprobs is not None:
                fitted = fit(prompt, s, self.limit)
                scored = self.score(fitted, s.prompt_logprobs, adapter=where.get("adapter", ""))
            found = [j.reply.generation(scored, j.request.cached or 0) for j in group]
            best = sorted(range(len(found)), key=lambda i: -sum(found[i].logprobs))[: s.n]
            out += [found[i] for i in (best if s.best_of else range(s.n))]
        return out

    def _queue(self, prompt: Sequence[int], sampling: SamplingParams, **where: Any) -> Job:
        """Submit as soon as the queue has room."""
        while True:
            try:
                return self.submit(prompt, sampling, **where)
            except QueueFull:
                self.loop.wait(lambda: len(self.core.schedule.waiting) + len(self.loop.inbox) < self.settings.queue)

    async def stream(
        self, prompt: Sequence[int], sampling: SamplingParams | None = None, **where: Any
    ) -> AsyncIterator[Delta]:
        """Continue one prompt (n = 1) and yield what each step adds, or several together if the reader is slow.

        Leaving the loop aborts the request. The first stream of an engine waits for `start`, which compiles.
        """
        self.start()
        box = Mailbox(asyncio.get_running_loop())
        job = self.submit(prompt, sampling, box=box, **where)
        try:
            while True:
                await box.ready.wait()
                box.ready.clear()
                deltas, box.deltas = box.deltas, []
                yield (delta := join(deltas))
                if delta.finish_reason:
                    return
        finally:
            self.abort(job)

    # ---- control ----

    def start(self, *, wait: bool = False) -> None:
        """Compile, then run the steps in a thread of their own. A second call does nothing.

        Steps begin when the programs of the largest size are there, which any step can use; the others are compiled
        meanwhile, in a thread of their own. With `wait`, they begin when all are there, and nothing compiles afterwards.
        """
        self.loop.start(wait)

    def close(self) -> None:
        """Stop the thread and abort all requests."""
        self.loop.close()
        self.core.device.close()

    def pause(self) -> None:
        """Do no steps until `resume`; requests are still queued."""
        self.loop.pause()

    def resume(self) -> None:
        """Go on after `pause`."""
        self.loop.resume()

    def update_params(self, params: Any, adapter: str = "", *, reshard: bool = False, cast: bool = False) -> None:
        """Serve with other weights from the next step on (an adapter that is new is added). They are copied.

        Running requests go on with their tokens so far, whose keys and values are computed again. `params`, stacked or
        listed, have the structure, shapes, dtypes and shardings of those that are served, and finite values, else
        ValueError, and nothing changes. `reshard` lays them out as those, from wherever they are; `cast` casts them.
        """
        self._check_free()
        new = self.core.device.weights.checked(adapter, params, reshard=reshard, cast=cast)
        self.loop.between(lambda: self.core.replace_weights(adapter, new))

    def remove_adapter(self, name: str) -> None:
        """Forget an adapter; requests that still use it fail."""
        self._check_free()
        self.loop.between(lambda: self.core.drop_adapter(name))

    def _check_free(self) -> None:
        if reason := self.core.device.fixed:
            raise ValueError(reason)

    # ---- without a cache ----

    def score(self, tokens: Sequence[int], top: int = 0, *, adapter: str = "") -> Score:
        """Tell the log-probability of each token after those before it, and of the `top` likeliest (at most 20)."""
        padded, n = self._padded(tokens)
        out = self.core.device.programs.score(self.core.device.weights[adapter], padded, np.int32(n))
        logprobs, ids, best = (np.asarray(x)[: n - 1].tolist() for x in out)
        likely = [dict(zip(i[:top], b[:top], strict=True)) for i, b in zip(ids, best, strict=True)]
        return Score([None, *logprobs], [{}, *likely])

    def embed(self, tokens: Sequence[int], pool: str = "last", *, adapter: str = "") -> np.ndarray:
        """Give the final hidden state of the "last" token, or the "mean" over all: float32[D]."""
        if pool not in ("last", "mean"):
            raise ValueError(f"pool={pool!r}; expected 'last' or 'mean'")
        padded, n = self._padded(tokens)
        x = self.core.device.programs.embed(self.core.device.weights[adapter], padded, np.int32(n))
        x = np.asarray(x)[:n].astype(np.float32)
        return x[-1] if pool == "last" else x.mean(0)

    def _padded(self, tokens: Sequence[int]) -> tuple[np.ndarray, int]:
        """Check tokens and pad them to one of few lengths."""
        self._check_free()
        check_prompt(tokens, self.core.device.model.cfg.vocab, self.limit + 1, "the text")
        padded = np.zeros(max(PAGE, 1 << (len(tokens) - 1).bit_length()), np.int32)
        padded[: len(tokens)] = tokens
        return padded, len(tokens)

    def stats(self) -> dict[str, float]:
        """Count what the engine has done and holds; counters only grow."""
        core, schedule = self.core, self.core.schedule
        return {
            **{name: core.counts[name] for name in COUNTED},
            **{name: schedule.counts[name] for name in ("arrived", "preempted", "looked up", "found")},
            "running": len(schedule.running),
            "waiting": len(schedule.waiting) + len(self.loop.inbox),
            "pages": schedule.pool.total,
            "free pages": schedule.pool.available,
            "compiled": sum(core.device.programs.traces.values()),
            "to compile": len(core.device.left),
            "seconds since a turn": time.monotonic() - self.loop.beat,
        }
