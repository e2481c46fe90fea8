"""Work on TPUs in stages that stand beside each other, so that products, exponentials and loads take place together."""

from collections.abc import Callable, Sequence
from typing import Any

import jax


def run(items: int, stages: Sequence[Callable[[Any, int], None]], some: int) -> None:
    """Take each item through all stages, each called as stage(item, buffer).

    What a stage writes to its buffer, 0 and 1 in turn, the next stage reads in the next step; in a step every stage has
    another item, and none waits for another. `some` steps, an even number, are a round of a loop. The scheduler prefers
    what stands first in the program: the first stage, on which the most depends.
    """
    ahead = len(stages) - 1

    def step(n: Any, parity: int) -> None:
        for i, stage in enumerate(stages):
            if not isinstance(n, int) or 0 <= n - i < items:
                stage(n - i, (parity + i) % 2)

    rounds = max(0, items - ahead) // some

    def several(g: Any, _: None) -> None:
        for i in range(some):
            step(g * some + ahead + i, (ahead + i) % 2)

    for n in range(ahead):
        step(n, n % 2)
    if rounds:
        jax.lax.fori_loop(0, rounds, several, None)
    for n in range(ahead + rounds * some, items + ahead):
        step(n, n % 2)
