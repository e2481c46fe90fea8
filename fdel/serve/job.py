"""One request on its way, and the guard around what it brings along: a failure there is the request's own."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from fdel.serve.drafts import NGRAM
from fdel.serve.reply import Delta, Reply
from fdel.serve.schedule import Request

T = TypeVar("T")
NOTHING = "no token is left to draw"  # how the error of a request begins that bans every token


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
class Job:
    """One request with all that steps need to know of it."""

    request: Request
    reply: Reply
    sampling: Any  # a Sampling of one row
    mask: MaskSource | None = None
    box: Any = None  # of who reads it
    seen: set[tuple[int, ...]] = field(default_factory=set)  # for drafts: the NGRAMs before the newest
    repeats: bool = False  # the newest NGRAM was there before, so that there is a draft

    def see(self, start: int) -> None:
        """Note the tokens from `start` on, for drafts."""
        tokens = self.request.tokens
        for end in range(max(start + 1, NGRAM), len(tokens) + 1):
            newest = tuple(tokens[end - NGRAM : end])
            self.repeats = newest in self.seen
            self.seen.add(newest)


def allowed(source: MaskSource, words: int) -> np.ndarray:
    """Ask which tokens may come next: uint32[words]."""
    mask = _guarded(lambda: source.mask())
    if not (isinstance(mask, np.ndarray) and mask.dtype == np.uint32 and mask.shape == (words,)):
        found = f"{mask.dtype}{list(mask.shape)}" if isinstance(mask, np.ndarray) else type(mask).__name__
        raise TypeError(f"a MaskSource gave {found}; expected uint32[{words}], one bit per token of the vocabulary")
    return mask


def accept(job: Job, token: int, logprob: float, sampled: float, likely: Sequence[tuple[int, float]]) -> Delta:
    """Give a request a token that was drawn for it, unless the draw itself failed."""
    reply, at = job.reply, len(job.reply.tokens)
    if math.isnan(logprob):
        return reply.end("error", f"logits are not finite at output token {at}; check weights and dtype")
    if math.isnan(sampled):
        return reply.end("error", f"{NOTHING} at output token {at}: the request bans every token there")
    last = job.mask is not None and _guarded(lambda: _commit(job.mask, token))
    return _guarded(lambda: reply.push(token, logprob, sampled, likely, last=last))


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
        raise RuntimeError(say(e)) from e


def say(error: BaseException) -> str:
    """Tell an error's type and text, if it can be told."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as e:
        return f"{type(error).__name__}, whose text raises {type(e).__name__}"
