"""What a request asks for, checked. Plain Python: the layers above the engine need no jax."""

import hashlib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

TOP = 20  # top log-probabilities that are computed when any row asks for some, and the most that one can ask for
BIASES = 300  # entries of logit_bias, OpenAI's limit
STOPS = 32  # stop ids of one request, eos included
BAD_WORDS, BAD_LENGTH = 32, 8  # bad words of one request, and the most tokens of one
SAMPLES = 128  # the most outputs of one prompt, OpenAI's limit
TRUNCATIONS = (None, "left", "right", "middle")


def _number(default: Any, kind: type, lowest: float, highest: float = math.inf) -> Any:
    """Declare a field that is a number, with its type and limits, which `LIMITS` lists."""
    return field(default=default, metadata={"limits": (kind, lowest, highest)})


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What one request asks for. Values out of range and unknown types are a ValueError that names the field.

    temperature 0 is greedy; the softmax of logits / temperature otherwise. top_k 0 keeps all tokens; top_p keeps the
    fewest tokens whose probability reaches it (arXiv:1904.09751); min_p those with at least min_p times the highest
    probability (arXiv:2407.01082). repetition_penalty divides positive and multiplies negative logits of tokens in
    prompt or output (arXiv:1909.05858); presence and frequency penalties count the output only (OpenAI).
    `allowed_tokens` bans all others, `bad_words` the last token of each of these token sequences after the others.
    min_tokens bans every stop id before. The same seed and prompt give the same tokens, whatever else runs; another
    prompt, and each of the n outputs of one, has noise of its own (see `noise`); None draws a seed. `logprobs` and
    `prompt_logprobs` ask for that many most likely tokens. n outputs per prompt; of `best_of` outputs those n with the
    highest sum of log-probabilities. `truncate` cuts a prompt that leaves no room for max_tokens at its "left", "right"
    or "middle"; None refuses it.
    >>> serve.generate(model, [[4, 5]], serve.SamplingParams(max_tokens=4, temperature=0.7, seed=0))[0].tokens
    [11, 28, 10, 21]
    """

    max_tokens: int = _number(256, int, 1)
    min_tokens: int = _number(0, int, 0)
    temperature: float = _number(0.0, float, 0, 100)
    top_k: int = _number(0, int, 0)
    top_p: float = _number(1.0, float, 0, 1)
    min_p: float = _number(0.0, float, 0, 1)
    repetition_penalty: float = _number(1.0, float, 1e-2, 100)
    presence_penalty: float = _number(0.0, float, -2, 2)
    frequency_penalty: float = _number(0.0, float, -2, 2)
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_tokens: Sequence[int] | None = None
    bad_words: Sequence[Sequence[int]] = ()
    seed: int | None = _number(None, int, 0, 2**64 - 1)
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int = _number(0, int, 0, TOP)
    prompt_logprobs: int | None = _number(None, int, 0, TOP)
    n: int = _number(1, int, 1, SAMPLES)
    best_of: int | None = _number(None, int, 1, SAMPLES)
    truncate: str | None = None

    def __post_init__(self) -> None:
        for name, (kind, low, high) in LIMITS.items():
            value = getattr(self, name)
            if name in ("seed", "prompt_logprobs", "best_of") and value is None:
                continue
            if not (whole(value) or (kind is float and isinstance(value, float | np.floating))):
                raise ValueError(f"{name}={value!r} is a {type(value).__name__}; expected {kind.__name__}")
            if not low <= value <= high:
                raise ValueError(f"{name}={value!r} is out of range; expected {low:g} <= {name} <= {high:g}")
        if self.top_p == 0:
            raise ValueError("top_p=0 keeps no token; for the most likely one use temperature=0")
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}; lower it")
        if not isinstance(self.ignore_eos, bool | np.bool_):
            raise ValueError(f"ignore_eos={self.ignore_eos!r}; expected True or False")
        listed = isinstance(self.stop, str) or _listed(self.stop)
        if not (listed and all(isinstance(s, str) and s for s in self.stops)):
            raise ValueError(f"stop={self.stop!r}: expected a string or strings, none empty")
        self._check_ids()
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"best_of={self.best_of} is less than n={self.n}; raise it")
        if not (self.truncate is None or isinstance(self.truncate, str) and self.truncate in TRUNCATIONS):
            raise ValueError(f"truncate={self.truncate!r}; expected one of {TRUNCATIONS}")

    def _check_ids(self) -> None:
        """Check what names tokens, but for the vocabulary, which the model knows."""
        if not isinstance(self.logit_bias, Mapping):
            raise ValueError(f"logit_bias={self.logit_bias!r}; expected a mapping from token ids to numbers")
        if len(self.logit_bias) > BIASES:
            raise ValueError(f"logit_bias has {len(self.logit_bias)} entries; the most is {BIASES}")
        fits = lambda b: (whole(b) or isinstance(b, float | np.floating)) and -100 <= b <= 100
        if wrong := {t: b for t, b in self.logit_bias.items() if not fits(b)}:
            raise ValueError(f"logit_bias {wrong} is out of range; expected -100 <= bias <= 100")
        words: Any = self.bad_words if _listed(self.bad_words) else [None]
        for name in ("stop_token_ids", "allowed_tokens", "bad_words"):
            value = getattr(self, name)
            if not (_listed(value) or (value is None and name == "allowed_tokens")):
                raise ValueError(f"{name}={value!r}; expected a sequence of token ids")
        if self.allowed_tokens is not None and len(self.allowed_tokens) == 0:
            raise ValueError("allowed_tokens is empty, so no token could be drawn; use None to allow all")
        if len(words) > BAD_WORDS or not all(_listed(w) and 0 < len(w) <= BAD_LENGTH for w in words):
            most = f"at most {BAD_WORDS} sequences of 1 to {BAD_LENGTH} token ids"
            raise ValueError(f"bad_words: expected {most}, found {len(words)}: {str(self.bad_words)[:80]}")

    def check_single(self) -> None:
        """Refuse what one output alone cannot have: ValueError."""
        if self.outputs > 1:
            several = f"n={self.n}, best_of={self.best_of}"
            raise ValueError(f"{several}: this gives one output; for several use generate or submit_all")
        if self.prompt_logprobs is not None:
            raise ValueError(f"prompt_logprobs={self.prompt_logprobs}: use generate, or score the prompt")

    @property
    def outputs(self) -> int:
        """Outputs of each prompt that are computed."""
        return self.best_of or self.n

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


# field -> (type, lowest, highest); what a number may be
LIMITS = {f.name: f.metadata["limits"] for f in fields(SamplingParams) if f.metadata}


def whole(value: Any) -> bool:
    """Tell whether this is an integer, Python's or numpy's; True and False are none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _listed(value: Any) -> bool:
    """Tell whether this is a collection that can be read again: no text, no iterator, no array of several axes."""
    sized = isinstance(value, Collection) or (isinstance(value, np.ndarray) and value.ndim == 1)
    return sized and not isinstance(value, str | bytes | Mapping)


def noise(seed: int | None, prompt: Sequence[int], index: int) -> int | None:
    """Make the seed of one output's noise: a function of the request's seed, of its prompt and of which output it is.

    A hash (BLAKE2b) of all three, so that neighbouring seeds and outputs share nothing, and two prompts of one length
    are not drawn with the same noise.
    """
    if seed is None:
        return None
    data = b"%d %d " % (seed, index) + np.asarray(prompt, "<i8").tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def stop_ids(sampling: SamplingParams, eos: Collection[int]) -> frozenset[int]:
    """The ids that end an output."""
    return frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else frozenset(eos))


def fit(prompt: Sequence[int], sampling: SamplingParams, limit: float) -> Sequence[int]:
    """Cut a prompt as `truncate` says, so that prompt and max_tokens fit `limit` tokens together.

    "left" loses the beginning, "right" the end, "middle" what is between. Without `truncate` nothing is cut.
    """
    keep = limit - sampling.max_tokens
    if sampling.truncate is None or not _listed(prompt) or len(prompt) <= keep:
        return prompt
    if keep < 1:
        raise ValueError(f"max_tokens={sampling.max_tokens} leaves no room for a prompt in {limit} tokens; lower it")
    head = {"left": 0, "right": int(keep), "middle": (int(keep) + 1) // 2}[sampling.truncate]
    return [*prompt[:head], *prompt[len(prompt) - (int(keep) - head) :]]


def end_ids(model: Any, eos: Sequence[int] | None, tokenizer: Any = None) -> tuple[int, ...]:
    """The ids that end a text: `eos`, else the tokenizer's, else config.json's, as far as the model has them.

    ValueError for an `eos` that it lacks, and if it lacks all: then no text would end.
    """
    vocab = model.cfg.vocab
    if eos is not None:
        return tuple(check_ids("eos", eos, vocab))
    if tokenizer is not None:
        ends = tokenizer.eos_ids
    else:
        ids = json.loads(model.cfg.source).get("eos_token_id")
        ends = () if ids is None else (ids,) if isinstance(ids, int) else tuple(ids)
    known = tuple(t for t in ends if 0 <= t < vocab)
    if ends and not known:
        raise ValueError(f"a text ends with one of {ends}, but the model has {vocab} ids: is this its tokenizer?")
    return known


def length_limit(model: Any, max_length: int | None) -> float:
    """The most tokens of prompt and output: `max_length`, or the model's context; infinity for neither.

    ValueError for a `max_length` that is none, or longer than the context.
    """
    context = getattr(model.cfg, "max_positions", None)
    if max_length is not None and not (whole(max_length) and max_length >= 1):
        raise ValueError(f"max_length={max_length!r}; expected at least 1")
    if max_length is not None and context is not None and max_length > context:
        found = f"max_length={max_length} is longer than the model's context of {context} positions"
        raise ValueError(f"{found} (max_position_embeddings); lower it, or leave it out")
    return min(x for x in (max_length, context, math.inf) if x is not None)


def check_ids(name: str, ids: Collection[int], vocab: int) -> list[int]:
    """List token ids; ValueError for those that a vocabulary of `vocab` ids does not have."""
    if {*map(type, ids)} == {int} and 0 <= min(ids) and max(ids) < vocab:  # thousands of a prompt, as a rule
        return [*ids]
    wrong = [t for t in ids if not (whole(t) and 0 <= t < vocab)]
    if wrong:
        raise ValueError(f"{name} holds {str(wrong[:5])[:80]}; expected token ids from 0 to {vocab - 1}")
    return [int(t) for t in ids]


def check_prompt(prompt: Sequence[int], vocab: int, limit: float, name: str) -> list[int]:
    """List a prompt's ids. ValueError for one that is empty, leaves no room for a token, or has ids of no token."""
    if not _listed(prompt):
        raise ValueError(f"{name} is a {type(prompt).__name__}; expected a sequence of token ids")
    if not len(prompt):
        raise ValueError(f"{name} is empty; it needs at least one token, such as the tokenizer's bos")
    if len(prompt) >= limit:
        raise ValueError(f"{name} has {len(prompt)} tokens; prompt and output must fit {limit}, so shorten it")
    return check_ids(name, prompt, vocab)
