"""Write down a sound of any length, window by window (arXiv:2212.04356, sections 3.8 and 4.5): a pure loop.

`transcribe` is a generator: it yields what a model is to compute (`Hear`, `Detect`, `Write`, `Follow`), and is sent the
result; so the windows of several sounds can share a batch (`listen.run`).
"""

import math
import zlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from fdel.serve.hear import words
from fdel.serve.hear.tokens import Tokens

STEP = 0.02  # seconds between times, and between the encoder's states: two frames


class Hear(NamedTuple):
    """Encode a window's features, float32[bins, frames]; the answer is its memory."""

    features: np.ndarray


class Detect(NamedTuple):
    """Find the language: log-probabilities of `Tokens.languages`."""

    memory: Any


class Write(NamedTuple):
    """Write a transcript; the answer is a `Draft`."""

    memory: Any
    prompt: list[int]
    start: int  # place of `Tokens.start` in the prompt
    limit: int
    times: bool
    temperature: float
    seed: int


class Follow(NamedTuple):
    """Give the alignment's attention of each token to the sound: float32[heads, tokens, states]."""

    memory: Any
    said: list[int]


class Draft(NamedTuple):
    """A window's transcript: its tokens with the end, if it has one; the sum of their log-probabilities; see `decode`."""

    tokens: list[int]
    logprob: float
    no_speech: float

    @property
    def mean_logprob(self) -> float:
        """The mean over its tokens."""
        return self.logprob / max(1, len(self.tokens))


@dataclass(frozen=True)
class Options:
    """How a sound is written down.

    Temperatures are tried in turn while a transcript repeats itself (its tokens compress to less than 1 / `compression`)
    or is unlikely (a mean log-probability below `logprob`); where it is unlikely and there is no speech with more than the
    probability `no_speech`, the window is silence. With `condition` each window knows what was said before, unless that
    took a temperature of 0.5 or more. `prompt` holds tokens of a text that came before. `words`: find their times.
    """

    language: str | None = None  # detected
    task: str = "transcribe"
    prompt: tuple[int, ...] = ()
    temperatures: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    compression: float | None = 1.35
    logprob: float | None = -1.0
    no_speech: float | None = 0.6
    condition: bool = True
    words: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Segment:
    """A part of a transcript, from `start` to `end` in seconds; its tokens have the times in them.

    `seek` is the frame at which its window begins. `spoken`, where asked for, is (id, start, end) of each token of text.
    """

    start: float
    end: float
    tokens: tuple[int, ...]
    seek: int
    temperature: float
    mean_logprob: float
    compression: float
    no_speech: float
    language: str | None = None
    spoken: tuple[tuple[int, float, float], ...] = ()


class Transcript(NamedTuple):
    """What was written down."""

    language: str | None
    segments: list[Segment]


def compression(tokens: Sequence[int], vocabulary: int) -> float:
    """Give how many times smaller zlib makes the tokens' bytes, as transformers measures it."""
    size = int(math.log2(vocabulary) / 8) + 1
    raw = b"".join(t.to_bytes(size, "little") for t in tokens)
    return len(raw) / len(zlib.compress(raw))


def transcribe(
    features: np.ndarray, cfg: Any, tokens: Tokens, options: Options, tell: Callable[[Segment], None] | None = None
) -> Generator[Any, Any, Transcript]:
    """Write down a sound of log-mel features float32[bins, frames]; `tell` is called with each segment as it is written.

    ValueError for a language or a task that the model does not have.
    """
    language, seek, frames, cool = options.language, 0, features.shape[1], True
    tokens.prompt(language, options.task, True)  # refuses what is unknown before anything is computed
    said, segments = list(options.prompt), list[Segment]()
    while seek < frames:
        window = features[:, seek : seek + cfg.frames]
        size = window.shape[1]
        memory = yield Hear(np.pad(window, ((0, 0), (0, cfg.frames - size))))
        if language is None and tokens.languages:
            language = tokens.languages[int(np.argmax((yield Detect(memory))))][0]
        begin = tokens.prompt(language, options.task, True)
        before = _before(said if options.condition and cool else options.prompt, tokens, cfg)
        ask = Write(memory, before + begin, len(before), cfg.max_positions - len(before + begin), True, 0.0, 0)
        draft, warmth = yield from _write(ask, options, cfg, seek)
        cool = warmth < 0.5
        unlikely = options.logprob is not None and draft.mean_logprob < options.logprob
        if unlikely and options.no_speech is not None and draft.no_speech > options.no_speech:
            seek += size
            continue
        written = [t for t in draft.tokens if t != tokens.end]
        facts: Any = seek, warmth, draft.mean_logprob, compression(draft.tokens, cfg.vocab), draft.no_speech, language
        parts, ahead = cut(written, tokens, size)
        found = [Segment(*part, *facts) for part in parts]
        if options.words and written:
            found = yield from _spoken(found, memory, language, (cfg, tokens, options), size)
        for segment in found:
            segment = _later(segment, seek * STEP / 2)
            said += segment.tokens[:-1] if _doubled(segment.tokens, tokens) else segment.tokens
            segments.append(segment)
            if tell is not None:
                tell(segment)
        seek += ahead
    return Transcript(language, segments)


def _before(said: Sequence[int], tokens: Tokens, cfg: Any) -> list[int]:
    """What a prompt tells of what was said before: the end of it, in half of the decoder's places."""
    if not said or tokens.previous is None:
        return []
    return [tokens.previous, *said[-(cfg.max_positions // 2 - 1) :]]


def _doubled(segment: Sequence[int], tokens: Tokens) -> bool:
    return len(segment) > 2 and segment[-2] >= tokens.first_time


def _write(ask: Write, options: Options, cfg: Any, seek: int) -> Generator[Any, Any, tuple[Draft, float]]:
    """Try temperatures in turn until a transcript is good enough."""
    for warmth in options.temperatures:
        draft = yield ask._replace(temperature=warmth, seed=(options.seed + seek) % 2**31)
        unlikely = options.logprob is not None and draft.mean_logprob < options.logprob
        silent = unlikely and options.no_speech is not None and draft.no_speech > options.no_speech
        repeats = options.compression is not None and compression(draft.tokens, cfg.vocab) > options.compression
        if silent or not (unlikely or repeats):
            break
    return draft, warmth


def _later(s: Segment, by: float) -> Segment:
    spoken = tuple((t, start + by, end + by) for t, start, end in s.spoken)
    return replace(s, start=s.start + by, end=s.end + by, spoken=spoken)


def cut(written: list[int], tokens: Tokens, size: int) -> tuple[list[tuple[float, float, tuple[int, ...]]], int]:
    """Cut a window's transcript into segments (start, end, tokens) at its pairs of times, in seconds of the window.

    Returns them, and by how many frames to go on: all `size` of the window where the transcript ends with one time (nobody
    speaks behind it) or has no pair; else to the last pair, and what was written behind it is written again.
    """
    is_time = [t >= tokens.first_time for t in written]
    seconds = lambda token: (token - tokens.first_time) * STEP
    ends = [i + 1 for i in range(len(written) - 1) if is_time[i] and is_time[i + 1]]
    if not ends:
        last = [t for t in written if t >= tokens.first_time][-1:]
        end = seconds(last[0]) if last and last[0] != tokens.first_time else size // 2 * STEP
        return [(0.0, end, tuple(written))] if written else [], size
    single = is_time[-2:] == [False, True]
    ends = [*ends, len(written)] if single else [*ends[:-1], ends[-1] + 1]
    found, first = [], 0
    for i, end in enumerate(ends):
        part = written[first:end]
        stop = part[-2] if i == len(ends) - 1 and not single else part[-1]
        found.append((seconds(part[0]), seconds(stop), tuple(part)))
        first = end
    return found, size if single else (written[first - 2] - tokens.first_time) * 2


def _spoken(
    found: list[Segment], memory: Any, language: str | None, model: tuple[Any, Tokens, Options], size: int
) -> Generator[Any, Any, list[Segment]]:
    """Find the times of a window's tokens, by which head follows which part of the sound."""
    cfg, tokens, options = model
    begin, text = tokens.prompt(language, options.task, False), lambda s: [t for t in s.tokens if t < tokens.end]
    said = [t for s in found for t in text(s)][: cfg.max_positions - len(begin) - 1]
    if not said:
        return found
    weights = yield Follow(memory, [*begin, *said, tokens.end])
    # The row of a token says where the model looks when it writes the next one.
    rows = weights[:, len(begin) - 1 : len(begin) + len(said), : max(1, size // 2)]
    times = [float(i) * STEP for i in words.align(rows, cfg.median)]
    out, at = [], 0
    for s in found:
        ids = text(s)[: len(said) - at]
        spoken = tuple((t, times[at + i], times[at + i + 1]) for i, t in enumerate(ids))
        out.append(replace(s, spoken=spoken))
        at += len(ids)
    return out
