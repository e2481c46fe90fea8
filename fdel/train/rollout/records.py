"""What a rollout works with: tasks, the samples drawn for them, and their rewards. Host only, numpy arrays."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from fdel.train.data.images import Shown
from fdel.train.data.prompts import Task

FINISHES = ("stop", "length", "deadline", "turns", "error")


@dataclass(frozen=True)
class Sample:
    """One trajectory, in the token ids that were sampled: never decoded and encoded again.

    Each number stands at the token that it is about. logps are of the distribution that a token was drawn from;
    logps + kept those of the whole one, before top-k, top-p and min-p cut some of it off. finish is one of `FINISHES`:
    "deadline" was cut in time, "turns" by the most turns of an environment, "error" has its reason in `error`.
    """

    task: Task
    index: int  # among the samples of its task
    tokens: Int[np.ndarray, " T"]  # the prompt, then what was drawn and what an environment said
    drawn: Bool[np.ndarray, " T"]  # by the policy: what is learnt; not the prompt, nor what an environment said
    logps: Float[np.ndarray, " T"]  # 0 where not drawn
    kept: Float[np.ndarray, " T"]  # log of the mass that was kept; 0 where not drawn
    versions: Int[np.ndarray, " T"]  # how many updates the weights had seen that drew it; -1 where not drawn
    finish: str
    error: str | None = None
    reward: float | None = None  # what an environment gave
    info: Mapping[str, float] = field(default_factory=dict)  # turns, seconds, what an environment counted
    asked: tuple[int, ...] | None = None  # how many tokens stood there each time that the sampler was asked
    images: tuple[Shown, ...] = ()  # what an environment showed and played, by its places in `tokens`

    @property
    def prompt(self) -> Sequence[int]:
        """The task's prompt."""
        return self.task.prompt

    @property
    def completion(self) -> list[int]:
        """All tokens after the prompt, an environment's too."""
        return self.tokens[len(self.task.prompt) :].tolist()

    @property
    def length(self) -> int:
        """How many tokens the policy drew."""
        return int(self.drawn.sum())

    @property
    def turns(self) -> Int[np.ndarray, " T"]:
        """Where the turn begins that drew a token; if `asked` is None, drawn tokens side by side are one turn."""
        places = np.arange(len(self.tokens), dtype=np.int32)
        begins = (
            np.isin(places, self.asked) if self.asked is not None else self.drawn & ~np.append(False, self.drawn[:-1])
        )
        return np.maximum.accumulate(np.where(begins, places, np.int32(0)))


class Rewards(NamedTuple):
    """What reward functions gave to B samples; NaN where one abstained or failed."""

    each: Float[np.ndarray, "F B"]
    total: Float[np.ndarray, " B"]  # weighted sums; NaN where all abstained
    names: tuple[str, ...]
    failed: Mapping[str, int] = {}  # samples of each function that raised, or was late
