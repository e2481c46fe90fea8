"""What a request asks for, checked. Plain Python: the layers above the engine need no jax."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

TOP = 20  # top log-probabilities that are computed when any row asks for some, and the most that one can ask for
BIASES = 300  # entries of logit_bias, OpenAI's limit
STOPS = 32  # stop ids of one request, eos included
NO_LIMIT = float("inf")

# field -> (type, lowest, highest); what a number may be
LIMITS: Mapping[str, tuple[type, float, float]] = {
    "max_tokens": (int, 1, NO_LIMIT),
    "min_tokens": (int, 0, NO_LIMIT),
    "temperature": (float, 0, 100),
    "top_k": (int, 0, NO_LIMIT),
    "top_p": (float, 0, 1),
    "min_p": (float, 0, 1),
    "repetition_penalty": (float, 1e-2, 100),
    "presence_penalty": (float, -2, 2),
    "frequency_penalty": (float, -2, 2),
    "seed": (int, 0, 2**64 - 1),
    "logprobs": (int, 0, TOP),
}


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What one request asks for. Values out of range and unknown types are a ValueError that names the field.

    temperature 0 is greedy; the softmax of logits / temperature otherwise. top_k 0 keeps all tokens; top_p keeps the
    fewest tokens whose probability reaches it (arXiv:1904.09751); min_p those with at least min_p times the highest
    probability (arXiv:2407.01082). repetition_penalty divides positive and multiplies negative logits of tokens in
    prompt or output (arXiv:1909.05858); presence and frequency penalties count the output only (OpenAI).
    `allowed_tokens` bans all others. min_tokens bans every stop id before. The same seed and prompt give the same
    tokens, whatever else runs; None draws one.
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_tokens: Sequence[int] | None = None
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int = 0

    def __post_init__(self) -> None:
        for name, (kind, low, high) in LIMITS.items():
            value = getattr(self, name)
            if name == "seed" and value is None:
                continue
            integral = isinstance(value, int | np.integer) and not isinstance(value, bool)
            if not (integral or (kind is float and isinstance(value, float | np.floating))):
                raise ValueError(f"{name}={value!r} is a {type(value).__name__}; expected {kind.__name__}")
            if not low <= value <= high:
                raise ValueError(f"{name}={value!r} is out of range; expected {low:g} <= {name} <= {high:g}")
        if self.top_p == 0:
            raise ValueError("top_p=0 keeps no token; for the most likely one use temperature=0")
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}; lower it")
        if not all(isinstance(s, str) and s for s in self.stops):
            raise ValueError(f"stop={self.stop!r}: expected a string or strings, none empty")
        if len(self.logit_bias) > BIASES:
            raise ValueError(f"logit_bias has {len(self.logit_bias)} entries; the most is {BIASES}")
        wrong = {t: b for t, b in self.logit_bias.items() if not -100 <= b <= 100}
        if wrong:
            raise ValueError(f"logit_bias {wrong} is out of range; expected -100 <= bias <= 100")
        if self.allowed_tokens is not None and not self.allowed_tokens:
            raise ValueError("allowed_tokens is empty, so no token could be drawn; use None to allow all")

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


def stop_ids(request: SamplingParams, eos: Collection[int]) -> frozenset[int]:
    """The ids that end a request's output."""
    return frozenset(request.stop_token_ids) | (frozenset() if request.ignore_eos else frozenset(eos))
