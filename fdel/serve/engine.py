"""The engine: continuous batching over one model, for callers in this thread, in other threads, and in asyncio."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fdel import text
from fdel.models import Model
from fdel.ops import cpu
from fdel.serve.core import Core
from fdel.serve.device import BLOCK, Device, make_device
from fdel.serve.job import Job, MaskSource
from fdel.serve.loop import Loop, Mailbox
from fdel.serve.pages import Pool
from fdel.serve.reply import Delta, Generation, Reply, Score, join
from fdel.serve.request import TOP, SamplingParams, check_prompt, check_single, end_ids, fit, noise, stop_ids, whole
from fdel.serve.sample import sampling_rows
from fdel.serve.schedule import QueueFull, Request, Schedule
from fdel.serve.settings import Settings, recurrent, unsupported
from fdel.serve.step import PAGE

COUNTED = ("steps", "prompt tokens", "generated tokens", "stop", "length", "abort", "error", "faults", "drafting steps")


class Engine:
    """Serves one model: many requests at a time, whose answers do not depend on their company.

    `generate`, `score` and `embed` can be called from any thread, `stream` in asyncio. A background thread runs the steps
    from `start` (which `stream` calls) to `close`; without it, `generate` runs them itself.

    `adapters` are parameters with LoRA adapters (share the base arrays with `model.params`), by name. `draft` is a
    smaller model that guesses `settings.drafts` tokens ahead; guesses change no output. `make` makes the device, here
    (`Device`) or for several processes (`serve.follow.leading`). Raises ValueError with the reason of `unsupported`.
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
        self.eos = end_ids(model, eos, tokenizer)
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

    def submit(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        mask: MaskSource | None = None,
        box: Mailbox | None = None,
        **where: Any,
    ) -> Job:
        """Queue one output of a prompt; see `submit_all` for the rest of it. `box` gets every delta."""
        sampling = check_single(SamplingParams() if sampling is None else sampling)
        one: Any = {"mask": None if mask is None else lambda: mask, "box": None if box is None else lambda: box}
        return self.submit_all([prompt], sampling, **one, **where)[0]

    def submit_all(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        *,
        mask: Callable[[], MaskSource] | None = None,
        box: Callable[[], Mailbox] | None = None,
        key: str = "",
        salt: str = "",
        priority: int = 0,
        adapter: str = "",
    ) -> list[Job]:
        """Queue n outputs (or best_of) of each prompt, in order: all of them, or none.

        `mask` makes each output's MaskSource, `box` the Mailbox that gets its deltas. `key` is whose fair share it uses;
        cached pages are shared by those who have the same key and salt. The highest priority goes first. Raises ValueError
        for what cannot be served, QueueFull, and RuntimeError once the engine is closed.
        """
        self.loop.check_open()
        if not isinstance(sampling, SamplingParams):
            raise ValueError(f"sampling is a {type(sampling).__name__}; expected SamplingParams")
        if not (isinstance(key, str) and isinstance(salt, str) and whole(priority)):
            raise ValueError(f"{key=}, {salt=}, {priority=}; expected two texts and a whole number")
        self.weights(adapter)
        if self.tokenizer is None and sampling.stops:
            raise ValueError("stop strings need a tokenizer; pass tokenizer=text.load(folder), or use stop_token_ids")
        owner = f"{len(key)} {key} {len(salt)} {salt} {adapter}".encode("utf-8", "surrogatepass")
        jobs: list[Job] = []
        for prompt in prompts:
            first = None
            for i in range(sampling.best_of or sampling.n):
                job = self._job(prompt, sampling, i)
                r = job.request
                r.priority, r.key, r.salt, r.adapter, r.after = int(priority), key, owner, adapter, first
                first = first or r
                job.mask, job.box = None if mask is None else mask(), None if box is None else box()
                jobs.append(job)
        self.loop.submit(jobs)
        return jobs

    def _job(self, prompt: Sequence[int], sampling: SamplingParams, index: int) -> Job:
        """Make output `index` of a prompt."""
        vocab, tok = self.core.device.model.cfg.vocab, self.tokenizer
        prompt = check_prompt(fit(prompt, sampling, self.limit), vocab, self.limit, "the prompt")
        ends, room = stop_ids(sampling, self.eos), min(int(sampling.max_tokens), self.limit - len(prompt))
        if tok is not None:  # a special token's text is never shown: as a stop string, its id ends the output
            named = {tok.backend.token_to_id(s) for s in sampling.stops}
            ends |= {i for i in tok.special_ids & named if i < vocab}
        keyed = replace(sampling, seed=noise(sampling.seed, prompt, index))
        arrays = sampling_rows([keyed], [len(prompt)], [ends], [room], vocab=vocab)
        request = Request(next(self.ids), prompt, len(prompt), len(prompt) + room)
        self.core.schedule.check(request)
        detokenizer = None if tok is None else text.Detokenizer(tok)
        return Job(request, Reply(sampling, ends, room, detokenizer), arrays)

    def weights(self, adapter: str) -> Any:
        """The parameters of an adapter, "" for none. ValueError if it is not loaded."""
        weights = self.core.device.weights
        if not isinstance(adapter, str) or adapter not in weights:
            known = ", ".join(filter(None, weights))
            raise ValueError(f"adapter {adapter!r} is not loaded; loaded are: {known or 'none'}")
        return weights[adapter]

    def abort(self, job: Job) -> None:
        """End a request wherever it stands; its reader is told finish_reason "abort". Ended ones stay as they are."""
        self.loop.abort(job)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
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
            for prompt, s in zip(prompts, every, strict=True):
                groups.append(self._queue(prompt, s, **where))
            jobs = [job for group in groups for job in group]
            self.loop.wait(lambda: all(job.reply.finish_reason for job in jobs))
        except BaseException:
            for job in (job for group in groups for job in group):
                self.abort(job)
            raise
        out, adapter = [], where.get("adapter", "")
        for prompt, s, group in zip(prompts, every, groups, strict=True):
            scored = None
            if s.prompt_logprobs is not None:
                scored = self.score(fit(prompt, s, self.limit), s.prompt_logprobs, adapter=adapter)
            found = [j.reply.generation(scored, j.request.cached or 0) for j in group]
            best = sorted(range(len(found)), key=lambda i: -sum(found[i].logprobs))[: s.n]
            out += [found[i] for i in (best if s.best_of else range(s.n))]
        return out

    def _queue(self, prompt: Sequence[int], sampling: SamplingParams, **where: Any) -> list[Job]:
        """Submit as soon as the queue has room."""
        room = lambda: self.settings.queue - len(self.core.schedule.waiting) - self.loop.coming
        while True:
            try:
                return self.submit_all([prompt], sampling, **where)
            except QueueFull:
                self.loop.wait(lambda: room() >= (sampling.best_of or sampling.n))

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

    def score(self, tokens: Sequence[int], top: int = 0, *, adapter: str = "") -> Score:
        """Tell the log-probability of each token after those before it, and of the `top` likeliest (at most 20)."""
        if not (whole(top) and 0 <= top <= TOP):
            raise ValueError(f"top={top!r}; expected 0 to {TOP}")
        logprobs, ids, best = (x[:-1].tolist() for x in self._read("score", tokens, adapter))
        likely = [dict(zip(i[:top], b[:top], strict=True)) for i, b in zip(ids, best, strict=True)]
        return Score([None, *logprobs], [{}, *likely])

    def embed(self, tokens: Sequence[int], pool: str = "last", *, adapter: str = "") -> np.ndarray:
        """Give the final hidden state of the "last" token, or the "mean" over all: float32[D]."""
        if not isinstance(pool, str) or pool not in ("last", "mean"):
            raise ValueError(f"{pool=}; expected 'last' or 'mean'")
        x = self._read("embed", tokens, adapter)[0].astype(np.float32)
        return x[-1] if pool == "last" else x.mean(0)

    def _read(self, name: str, tokens: Sequence[int], adapter: str) -> list[np.ndarray]:
        """Run a sequence through the model as a whole, which may take all positions."""
        self._check_free()
        self.weights(adapter)
        tokens = check_prompt(tokens, self.core.device.model.cfg.vocab, self.limit + 1, "the text")
        return self.core.device.read(name, tokens, adapter)

    def stats(self) -> dict[str, float]:
        """Count what the engine has done and holds; counters only grow."""
        core, schedule = self.core, self.core.schedule
        return {
            **{name: core.counts[name] for name in COUNTED},
            **{name: schedule.counts[name] for name in ("arrived", "preempted", "looked up", "found")},
            "running": len(schedule.running),
            "waiting": len(schedule.waiting) + self.loop.coming,
            "pages": schedule.pool.total,
            "free pages": schedule.pool.available,
            "compiled": sum(core.device.programs.traces.values()),
            "to compile": len(core.device.left),
            "seconds since a turn": time.monotonic() - self.loop.beat,
        }
