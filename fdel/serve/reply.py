"""The host's side of one request: collect its tokens, turn them into text, and find where it ends."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from fdel import text
from fdel.serve.request import SamplingParams


@dataclass(frozen=True)
class Generation:
    """The output of one prompt.

    `tokens` ends with the stop id, if one ended it; `text` is cut before the stop id or stop string. `logprobs` are
    of the model's own distribution, log_softmax(logits), before penalties, temperature and truncation, as OpenAI's API
    gives them. `sampled_logprobs` are of the distribution that each token was drawn from, after all of these, masks and
    bans: 0 where the draw is greedy (temperature 0), since then nothing else could come.
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
    sampled_logprobs: list[float] = field(default_factory=list)  # see `Generation`


def join(deltas: Sequence[Delta]) -> Delta:
    """Make one of several that followed each other."""
    if len(deltas) == 1:
        return deltas[0]
    last = deltas[-1]
    chain = lambda name: [x for d in deltas for x in getattr(d, name)]
    said = "".join(d.text for d in deltas)
    lists = [chain(name) for name in ("tokens", "logprobs", "top_logprobs", "sampled_logprobs")]
    return Delta(lists[0], said, last.finish_reason, lists[1], lists[2], last.error, lists[3])


@dataclass
class Reply:
    """One prompt's output under way."""

    request: SamplingParams
    ends: frozenset[int]  # stop ids
    room: int  # the most tokens
    detokenizer: text.Detokenizer | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    sampled: list[float] = field(default_factory=list)
    top: list[dict[int, float]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    held: str = ""  # text that may be the beginning of a stop string
    finish_reason: str | None = None
    error: str | None = None
    begun: float | None = None  # when it got its first row, by time.monotonic
    ended: float | None = None

    def push(
        self,
        token: int,
        logprob: float,
        sampled: float,
        likely: Sequence[tuple[int, float]] = (),
        *,
        last: bool = False,
    ) -> Delta:
        """Take the next token; says what can be shown now. `last`: a grammar ends with it."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.sampled.append(sampled)
        top = [dict(likely[: self.request.logprobs])] if self.request.logprobs else []
        self.top += top
        shown = self._say(token, last)
        self.ended = time.monotonic() if self.finish_reason else None
        return Delta([token], shown, self.finish_reason, [logprob], top, None, [sampled])

    def end(self, reason: str, error: str | None = None) -> Delta:
        """End here, whatever the tokens are; shows what was held back."""
        self.finish_reason, self.error, self.ended = reason, error, time.monotonic()
        held = "" if self.detokenizer is None else self.held + text.flush(self.detokenizer)
        self.said.append(held)
        self.held = ""
        return Delta([], held, reason, error=error)

    def _say(self, token: int, last: bool) -> str:
        """Find out whether the output ends, and what of its text can be shown."""
        stopped = token in self.ends
        over = stopped or last or len(self.tokens) >= self.room
        if over:
            self.finish_reason = "stop" if stopped or last else "length"
        if self.detokenizer is None:
            return ""
        new = ""
        if not stopped:
            self.detokenizer, new = text.step(self.detokenizer, [token])
        self.held += new + (text.flush(self.detokenizer) if over else "")
        end, found = len(self.held), False
        if self.request.stops and len(self.tokens) >= self.request.min_tokens:
            end, found = find_stop(self.held, self.request.stops, final=over)
        if found:
            self.finish_reason = "stop"
        shown, self.held = self.held[:end], self.held[end:]
        self.said.append(shown)
        return shown

    def generation(self, prompt: Score | None = None, cached: int = 0) -> Generation:
        """The whole output."""
        said = None if self.detokenizer is None else "".join(self.said)
        top = self.top if self.request.logprobs else None
        reason, seconds = self.finish_reason or "length", (self.ended or 0.0) - (self.begun or self.ended or 0.0)
        return Generation(
            self.tokens, self.logprobs, reason, said, top, prompt, cached, self.error, self.sampled, seconds
        )


def find_stop(said: str, stops: Sequence[str], *, final: bool = False) -> tuple[int, bool]:
    """Find the first stop string: (its start, True); else (the end of what cannot be part of one, False)."""
    found = [i for i in (said.find(s) for s in stops) if i >= 0]
    if found:
        return min(found), True
    longest = 0 if final else min(len(said), max(map(len, stops)) - 1)
    part = next((n for n in range(longest, 0, -1) if any(s.startswith(said[-n:]) for s in stops)), 0)
    return len(said) - part, False
