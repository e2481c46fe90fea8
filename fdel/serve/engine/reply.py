"""The host's side of requests: their tokens, where they end, who reads them, and the guard around what they bring along."""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import numpy as np

from fdel.serve.engine.packing import Token
from fdel.serve.engine.request import SamplingParams
from fdel.serve.engine.rows import NGRAM
from fdel.serve.engine.work import Request

T = TypeVar("T")
NOTHING = "no token is left to draw"  # how the error of a request begins that bans every token


@dataclass(frozen=True)
class Generation:
    """The output of one prompt.

    `tokens` ends with the stop id, if one ended it; `text` is cut before the stop id or stop string. `logprobs` are
    of the model's own distribution, log_softmax(logits), before penalties, temperature and truncation, as OpenAI's API
    gives them. `sampled_logprobs` are of the distribution that each token was drawn from, after all of these, masks and
    bans: 0 where the draw is greedy (temperature 0), since then nothing else could come. `kept` is the log of the
    probability that top-k, top-p and min-p left, 0 where they cut nothing: exp(sampled_logprobs + kept) is the token's
    probability before truncation. `versions` tell how many updates the weights that drew it had had: see
    `Engine.update_params`.
    """

    tokens: list[int]
    logprobs: list[float]
    finish_reason: str  # "stop": a stop id, stop string or finished grammar; "length": max_tokens or the context's end;
    # "abort"; "error": see `error`
    text: str | None = None  # with a tokenizer
    top_logprobs: list[dict[int, float]] | None = None  # per token, most likely first; with logprobs > 0
    prompt: "Score | None" = None  # with prompt_logprobs
    cached: int = 0  # tokens of the prompt that were found in the cache
    error: str | None = None
    sampled_logprobs: list[float] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    seconds: float = field(default=0.0, compare=False)  # from its first step to its end

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the output by the time from its first step, the prompt's computation included."""
        return len(self.tokens) / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Score:
    """What the model says of given tokens: of the first one nothing, None and no most likely ones."""

    logprobs: list[float | None]
    top_logprobs: list[dict[int, float]]  # most likely first


@dataclass(frozen=True)
class Delta:
    """What one or more steps added to a stream; `text` may lag behind by a part of a character or of a stop string."""

    tokens: list[int]
    text: str
    finish_reason: str | None
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)  # per token, with logprobs > 0
    error: str | None = None
    sampled_logprobs: list[float] = field(default_factory=list)  # see `Generation`, for these and the next
    kept: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


def join(deltas: Sequence[Delta]) -> Delta:
    """Make one of several that followed each other."""
    if len(deltas) == 1:
        return deltas[0]
    last = deltas[-1]
    names = ("tokens", "logprobs", "top_logprobs", "sampled_logprobs", "kept", "versions")
    lists: Any = {name: [x for d in deltas for x in getattr(d, name)] for name in names}
    return replace(last, text="".join(d.text for d in deltas), **lists)


class Text(Protocol):
    """What turns the tokens of one output to text and ends it at a stop string; see `fdel.serve.output_text`."""

    shown: list[str]

    def push(self, tokens: Sequence[int], *, over: bool, stoppable: bool) -> tuple[str, bool]:
        """Take tokens: (the text to show, whether a stop string ends it)."""


@dataclass
class Reply:
    """One output under way."""

    sampling: SamplingParams
    ends: frozenset[int]  # stop ids
    room: int  # the most tokens
    text: Text | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampled_logprobs: list[float] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    begun: float | None = None  # when it got its first row, by time.monotonic
    first: float | None = None  # when its first token was drawn
    ended: float | None = None

    def push(self, drawn: Token, version: int, *, last: bool = False) -> Delta:
        """Take the next token, and the number of the weights that drew it. `last`: a grammar ends with it.

        The delta has the text that can be shown now.
        """
        token, logprob, sampled_logprob, kept, likely = drawn
        self.first = self.first or time.monotonic()
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.sampled_logprobs.append(sampled_logprob)
        self.kept.append(kept)
        self.versions.append(version)
        top = [dict(likely[: self.sampling.logprobs])] if self.sampling.logprobs else []
        self.top_logprobs += top
        stopped = token in self.ends
        over = stopped or last or len(self.tokens) >= self.room
        shown, found = "", False
        if self.text is not None:
            stoppable = len(self.tokens) >= self.sampling.min_tokens
            shown, found = self.text.push([] if stopped else [token], over=over, stoppable=stoppable)
        if over or found:
            self.finish_reason = "stop" if stopped or last or found else "length"
            self.ended = time.monotonic()
        facts = [logprob], top, None, [sampled_logprob], [kept], [version]
        return Delta([token], shown, self.finish_reason, *facts)

    def end(self, reason: str, error: str | None = None) -> Delta:
        """End here, whatever the tokens are; shows what was held back."""
        self.finish_reason, self.error, self.ended = reason, error, time.monotonic()
        shown = "" if self.text is None else self.text.push([], over=True, stoppable=False)[0]
        return Delta([], shown, reason, error=error)

    def generation(self, prompt: Score | None = None, cached: int = 0) -> Generation:
        """The whole output."""
        shown = None if self.text is None else "".join(self.text.shown)
        top = self.top_logprobs if self.sampling.logprobs else None
        reason, seconds = self.finish_reason or "length", (self.ended or 0.0) - (self.begun or self.ended or 0.0)
        facts = self.sampled_logprobs, self.kept, self.versions
        return Generation(
            self.tokens, self.logprobs, reason, shown, top, prompt, cached, self.error, *facts, seconds=seconds
        )


class MaskSource(Protocol):
    """Structured output of one request: which tokens may come next."""

    @property
    def done(self) -> bool:
        """Whether the output is complete, so that generation stops after the newest token."""

    def mask(self) -> np.ndarray:
        """One bit per token of the vocabulary, the lowest first: uint32[ceil(V / 32)]."""

    def commit(self, token: int) -> None:
        """Take a token that was drawn."""


@dataclass(eq=False)
class DeltaQueue:
    """What one asyncio reader of some outputs has not read yet. A slow reader gets fewer, larger deltas; no step waits."""

    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    unread: dict[int, list[Delta]] = field(default_factory=dict)  # by the index of the output

    def put(self, index: int, delta: Delta) -> None:
        """Add a delta of an output; in the reader's own thread."""
        self.unread.setdefault(index, []).append(delta)
        self.ready.set()

    async def get(self, timeout: float | None = None) -> list[tuple[int, Delta]]:
        """Wait for the next deltas, one of each output that has any; none after `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout):  # `wait_for` may swallow a cancellation before Python 3.12
                await self.ready.wait()
        except TimeoutError:
            return []
        self.ready.clear()
        unread, self.unread = self.unread, {}
        return [(i, join(deltas)) for i, deltas in sorted(unread.items())]


@dataclass(eq=False)
class Job:
    """One request with all that steps need to know of it."""

    request: Request
    reply: Reply
    packed_sampling: Any  # its `Sampling`, of one row, packed (`packing.pack_bits`)
    mask: MaskSource | None = None
    queue: DeltaQueue | None = None  # of its asyncio reader, as output `index` of those that are read together
    index: int = 0
    seen: set[tuple[int, ...]] = field(default_factory=set)  # for drafts: the NGRAMs before the newest
    repeats: bool = False  # the newest NGRAM was there before, so that there is a draft
    mask_seconds: float = 0.0  # that its newest mask took, which was made at `masked_at`
    masked_at: float = 0.0

    def note_ngrams(self, start: int) -> None:
        """Note the NGRAMs of the tokens from `start` on, for drafts."""
        tokens = self.request.tokens
        for end in range(max(start + 1, NGRAM), len(tokens) + 1):
            newest = tuple(tokens[end - NGRAM : end])
            self.repeats = newest in self.seen
            self.seen.add(newest)


def best(jobs: Sequence[Job], sampling: SamplingParams) -> list[int]:
    """Choose the outputs to return: of `best_of` outputs of each prompt the n with the highest sum of log-probabilities."""
    each, chosen = sampling.outputs, list[int]()
    for first in range(0, len(jobs), each):
        group = range(first, first + each)
        ranked = sorted(group, key=lambda i: -sum(jobs[i].reply.logprobs))
        chosen += ranked[: sampling.n] if sampling.best_of else group
    return chosen


def allowed(source: MaskSource, words: int) -> np.ndarray:
    """Ask which tokens may come next: uint32[words]."""
    mask = _guarded(lambda: source.mask())
    if not (isinstance(mask, np.ndarray) and mask.dtype == np.uint32 and mask.shape == (words,)):
        found = f"{mask.dtype}{list(mask.shape)}" if isinstance(mask, np.ndarray) else type(mask).__name__
        raise TypeError(f"a MaskSource gave {found}; expected uint32[{words}], one bit per token of the vocabulary")
    return mask


def accept(job: Job, drawn: Token, version: int) -> Delta:
    """Give a request a token that weights of this number drew for it, unless the draw itself failed."""
    reply, at = job.reply, len(job.reply.tokens)
    if math.isnan(drawn.logprob):
        return reply.end("error", f"logits are not finite at output token {at}; check weights and dtype")
    if math.isnan(drawn.sampled_logprob):
        return reply.end("error", f"{NOTHING} at output token {at}: the request bans every token there")
    last = job.mask is not None and _guarded(lambda: _commit(job.mask, drawn.id))
    return _guarded(lambda: reply.push(drawn, version, last=last))


def _commit(source: Any, token: int) -> bool:
    source.commit(token)
    return bool(source.done)


def _guarded(call: Callable[[], T]) -> T:
    """Call what a request brought along. A panic of Rust code, which is no Exception, becomes one."""
    try:
        return call()
    except (Exception, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as e:
        raise RuntimeError(describe(e)) from e


def describe(error: BaseException) -> str:
    """Tell an error's type and text, if it can be told."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as e:
        return f"{type(error).__name__}, whose text raises {type(e).__name__}"
