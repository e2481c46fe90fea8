"""Environments: what answers a generation, before the next one."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

from fdel.train.rollout.records import Sample


class Said(NamedTuple):
    """What an environment says after a generation."""

    tokens: Sequence[int] = ()  # appended to the trajectory as they are
    done: bool = False  # the trajectory ends here
    reward: float | None = None  # so far: the last one counts
    info: Mapping[str, float] = {}  # counters, summed over turns


Turn = Callable[[Sample], Said | Awaitable[Said]]  # a function of the trajectory so far
