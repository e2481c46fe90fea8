"""The host's side of one request: collect its tokens, turn them into text, and find where it ends."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fdel import text
from fdel.serve.request import SamplingParams


@dataclass(frozen=True)
class Generation:
    """The output of one prompt.

    `tokens` ends with the stop id, if one ended it; `text` is cut before the stop id or stop string. `logprobs` are
    of the model's own distribution, log_softmax(logits), before penalties, temperature and truncation.
    """

    tokens: list[int]
    logprobs: list[float]
    finish_reason: str  # "stop": a stop id or stop string; "length": max_tokens or the context's end
    text: str | None = None  # with a tokenizer
    top_logprobs: list[dict[int, float]] | None = None  # per token, most likely first; with logprobs > 0


@dataclass(frozen=True)
class Delta:
    """What one step added to a stream; `text` may lag behind by a part of a character or of a stop string."""

    tokens: list[int]
    text: str
    finish_reason: str | None


@dataclass
class Reply:
    """One prompt's output under way."""

    request: SamplingParams
    ends: frozenset[int]  # stop ids
    room: int  # the most tokens
    detokenizer: text.Detokenizer | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[dict[int, float]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    held: str = ""  # text that may be the beginning of a stop string
    finish_reason: str | None = None

    def push(self, token: int, logprob: float, top: Iterable[tuple[int, float]] = ()) -> Delta:
        """Take the next token; says what can be shown now."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.request.logprobs:
            self.top.append(dict(top))
        stopped = token in self.ends
        over = stopped or len(self.tokens) >= self.room
        if over:
            self.finish_reason = "stop" if stopped else "length"
        if self.detokenizer is None:
            return Delta([token], "", self.finish_reason)
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
        return Delta([token], shown, self.finish_reason)

    def generation(self) -> Generation:
        """The whole output."""
        said = None if self.detokenizer is None else "".join(self.said)
        top = self.top if self.request.logprobs else None
        return Generation(self.tokens, self.logprobs, self.finish_reason or "length", said, top)


def find_stop(said: str, stops: Sequence[str], *, final: bool = False) -> tuple[int, bool]:
    """Find the first stop string: (its start, True); else (the end of what cannot be part of one, False)."""
    found = [i for i in (said.find(s) for s in stops) if i >= 0]
    if found:
        return min(found), True
    longest = 0 if final else min(len(said), max(map(len, stops)) - 1)
    part = next((n for n in range(longest, 0, -1) if any(s.startswith(said[-n:]) for s in stops)), 0)
    return len(said) - part, False
