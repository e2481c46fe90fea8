"""The engine: continuous batching over one model, for callers in this thread, in other threads, and in asyncio."""

import itertools
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Array, Float, Int

from fdel import text
from fdel.models import Model, heads
from fdel.models.pooling import Pooling, default_pooling
from fdel.ops import cpu
from fdel.serve.engine.changes import Changes
from fdel.serve.engine.core import Core
from fdel.serve.engine.device import BLOCK, Device
from fdel.serve.engine.packing import together
from fdel.serve.engine.pages import Pool
from fdel.serve.engine.reply import Delta, DeltaQueue, Generation, Job, MaskSource, Reply, Score, best
from fdel.serve.engine.request import TOP, SamplingParams, check_prompt, end_ids, fit, noise, stop_ids, whole
from fdel.serve.engine.sampling import sampling_rows
from fdel.serve.engine.schedule import QueueFull, Schedule
from fdel.serve.engine.settings import Settings, recurrent, unsupported
from fdel.serve.engine.step import PAGE
from fdel.serve.engine.work import Request
from fdel.serve.output_text import OutputText, special_stops

COUNTED = ("steps", "prompt tokens", "generated tokens", "stop", "length", "abort", "error", "faults", "drafting steps")


class Engine(Changes):
    """Serves one model: many requests at a time, whose answers do not depend on their company.

    `generate`, `score` and `embed` can be called from any thread, `stream` in asyncio. A background thread runs the steps
    from `start` (which `stream` calls) to `close`; without it, `generate` runs them itself.

    `adapters` are parameters with LoRA adapters (share the base arrays with `model.params`), by name. `draft` is a
    smaller model that guesses `settings.drafts` tokens ahead; guesses change no output. With a `tokenizer`, outputs have
    text and may end at stop strings (`OutputText`). `make` makes the device, here (`Device`) or for several processes
    (`engine.follow.leading`). Raises ValueError with the reason of `unsupported`.
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
            model, s, adapters, draft
        )
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
        **where: Any,
    ) -> Job:
        """Queue one output of a prompt, with its MaskSource; all other options as in `submit_all`."""
        sampling = SamplingParams() if sampling is None else sampling
        if isinstance(sampling, SamplingParams):  # else refused below
            sampling.check_single()
        return self.submit_all([prompt], sampling, mask=None if mask is None else lambda: mask, **where)[0]

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
    ) -> list[Job]:
        """Queue n outputs (or best_of) of each prompt, in order: all of them, or none. `best` chooses among them later.

        `mask` makes each output's MaskSource; `queue` gets their deltas, by the place of each in what is returned. `key` is
        whose fair share it uses; cached pages are shared by those who have the same key and salt. The highest priority goes
        first. Raises ValueError for what cannot be served, QueueFull, and RuntimeError once the engine is closed.
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
        for prompt in prompts:
            first = None
            for i in range(sampling.outputs):
                job = self._job(prompt, sampling, i)
                r = job.request
                r.priority, r.key, r.salt, r.adapter, r.after = int(priority), key, owner, adapter, first
                first = first or r
                job.mask, job.queue, job.index = None if mask is None else mask(), queue, len(jobs)
                jobs.append(job)
        self._enqueue(jobs)
        return jobs

    def _job(self, prompt: Sequence[int], sampling: SamplingParams, index: int) -> Job:
        """Make output `index` of a prompt."""
        vocab, tok = self._device.model.cfg.vocab, self.tokenizer
        prompt = check_prompt(fit(prompt, sampling, self.limit), vocab, self.limit, "the prompt")
        ends, room = stop_ids(sampling, self.eos), min(int(sampling.max_tokens), self.limit - len(prompt))
        if tok is not None:
            ends |= {i for i in special_stops(tok, sampling.stops) if i < vocab}
        keyed = replace(sampling, seed=noise(sampling.seed, prompt, index))
        row = sampling_rows([keyed], [len(prompt)], [ends], [room], vocab=vocab)
        request = Request(next(self._ids), prompt, len(prompt), len(prompt) + room)
        self._core.schedule.check(request)
        return Job(request, Reply(sampling, ends, room, None if tok is None else OutputText(tok, sampling.stops)), row)

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

    def score(self, tokens: Sequence[int], top: int = 0, *, adapter: str = "") -> Score:
        """Tell the log-probability of each token after those before it, and of the `top` likeliest (at most 20)."""
        if not (whole(top) and 0 <= top <= TOP):
            raise ValueError(f"top={top!r}; expected 0 to {TOP}")
        self._device.model_of(adapter)  # refused first
        if self.silent is not None:
            raise ValueError(self.silent)
        rows, count = self._device.padded(tokens), len(tokens) - 1
        positions = np.arange(rows[0].shape[1], dtype=np.int32)
        out = self.score_rows(rows, np.stack([0 * positions, positions, np.roll(rows[0][0], -1)]), count, TOP, adapter)
        logprobs, ids, best = (np.asarray(x)[:count].tolist() for x in out)
        likely = [dict(zip(i[:top], b[:top], strict=True)) for i, b in zip(ids, best, strict=True)]
        return Score([None, *logprobs], [{}, *likely])

    def score_rows(
        self, rows: tuple[np.ndarray, np.ndarray], targets: np.ndarray, count: int, top: int = 1, adapter: str = ""
    ) -> tuple[Float[Array, " N"], Int[Array, "N top"], Float[Array, "N top"]]:
        """Score the first `count` of `targets`: log-probabilities, and the `top` likeliest with theirs.

        `rows` are tokens int32[B T] and lengths int32[B]; `targets`, int32[3 N], row, position, and the token that may come
        next there. Each new shape compiles a program; what it gives may not be computed yet.
        """
        params, slot = self._device.model_of(adapter)
        return self._device.programs.score(params, *rows, slot, targets, np.int32(count), top=top)

    def embed(
        self, tokens: Sequence[int], pool: str | Pooling | None = None, *, adapter: str = ""
    ) -> Float[np.ndarray, " D"]:
        """Give a text's embedding, float32[D]: final hidden states pooled as `pool` or `pooling` says, or the last one.

        A prompt of `pooling` is text, which the tokens begin with already.
        """
        return self.embed_all([tokens], pool, adapter=adapter)[0]

    def embed_all(
        self, texts: Sequence[Sequence[int]], pool: str | Pooling | None = None, *, adapter: str = ""
    ) -> list[Float[np.ndarray, " D"]]:
        """Embed texts, several at a time in one row."""
        how = Pooling((pool,), normalize=False) if isinstance(pool, str) else pool or self.pooling
        how = how or default_pooling(self._device.model)
        if self.head is not None:
            raise ValueError(f"this model has a head for a {self.head} and embeds no text; use classify")
        return [how(x) for x in self._outputs(texts, adapter)]

    @property
    def head(self) -> str | None:
        """The kind of the model's head (`models.heads`), None without one."""
        return heads.kind_of(self._device.weights.like)

    def classify(self, tokens: Sequence[int], *, adapter: str = "") -> Float[np.ndarray, "..."]:
        """Give logits of the model's head, float32: [labels] for a sequence, [T labels] for its tokens.

        ValueError for a model without one.
        """
        return self.classify_all([tokens], adapter=adapter)[0]

    def classify_all(self, texts: Sequence[Sequence[int]], *, adapter: str = "") -> list[Float[np.ndarray, "..."]]:
        """Classify texts, several at a time in one row."""
        if self.head is None:
            raise ValueError("this model has no head that classifies; use embed, score or generate")
        pool = heads.of(self._device.model.family, self.head).pool
        found = self._outputs(texts, adapter)
        return found if pool == "every" else [x[0 if pool == "first" else -1] for x in found]

    def together(self, texts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Tell which texts, by their numbers, are computed at once."""
        return together(texts, self._device.lengths[-1])

    def _outputs(self, texts: Sequence[Sequence[int]], adapter: str) -> list[Float[np.ndarray, "T N"]]:
        """Compute whole sequences: what the head says of each token, or final hidden states."""
        (params, slot), out = self._device.model_of(adapter), dict[int, np.ndarray]()
        for group in self.together(texts):
            tokens, batch = self._device.row([texts[i] for i in group])
            x = np.asarray(self._device.programs.embed(params, tokens, slot, batch=batch))[0].astype(np.float32)
            parts = np.split(x, np.cumsum([len(texts[i]) for i in group]))  # and the spare end
            out |= zip(group, parts[:-1], strict=True)
        return [out[i] for i in range(len(texts))]

    def stats(self) -> dict[str, float]:
        """Count what the engine has done and holds; counters only grow."""
        core, schedule = self._core, self._core.schedule
        return {
            **{name: core.counts[name] for name in COUNTED},
            **{name: schedule.counts[name] for name in ("arrived", "preempted", "looked up", "found")},
            "running": len(schedule.running),
            "waiting": self._waiting,
            "pages": schedule.pool.total,
            "free pages": schedule.pool.available,
            "compiled": sum(self._device.programs.traces.values()),
            "to compile": len(self._device.uncompiled),
            "seconds since a step": time.monotonic() - self._stepped,
        }
