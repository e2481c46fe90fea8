"""What a run tells of its samples: metrics of their rewards, and some of them with theirs."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fdel.train.metrics import Row, cut_back
from fdel.train.rollout import Rewards, Sample


def statistics(found: Rewards, n: int) -> Row:
    """Compute TRL's metrics of rewards."""
    if not found.names:
        return {}
    mean = lambda x: float(np.nanmean(x)) if not np.isnan(x).all() else 0.0
    groups = np.where(np.isnan(found.total), 0.0, found.total).reshape(-1, n)
    row = {"reward": mean(found.total), "reward_std": float(groups.std(1, ddof=min(1, n - 1)).mean())}
    row["frac_reward_zero_std"] = float((groups.max(1) == groups.min(1)).mean())
    for name, each in zip(found.names, found.each, strict=True):
        there = each[~np.isnan(each)]
        row |= {f"rewards/{name}/mean": mean(each), f"rewards/{name}/std": float(there.std()) if len(there) else 0.0}
    return row | {f"rewards/{name}/failed": float(n) for name, n in found.failed.items()}


class Shown:
    """Samples of every `every`-th step with their rewards: one line of JSON each, and a few on the terminal.

    Lines of steps that a run repeats, which its checkpoint does not have, are dropped before the first.
    """

    def __init__(self, path: Path, every: int, count: int):
        self.path, self.every, self.count, self.begun = path, every, count, False
        self.step = 1  # of the run, in which they are drawn

    def __call__(self, samples: Sequence[Sample], found: Rewards, decode: Callable[[Sequence[int]], str]) -> None:
        if jax.process_index():
            return
        if not self.begun:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            cut_back(self.path, self.step - 1)
            self.begun = True
        if (self.step - 1) % self.every:
            return
        lines = [self.line(i, s, found, decode) for i, s in enumerate(samples[: max(self.count, 4)])]
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))
        for line in lines[: self.count]:
            cut = lambda x: " ".join(x.split())[:60]
            print(f"{line['reward']:8.3f}  {cut(line['prompt']):60}  {cut(line['completion'])}", file=sys.stderr)

    def line(self, i: int, s: Sample, found: Rewards, decode: Callable[[Sequence[int]], str]) -> Mapping[str, Any]:
        """Describe one sample."""
        number = lambda x: None if np.isnan(x) else float(x)
        each = {name: number(x[i]) for name, x in zip(found.names, found.each, strict=True)}
        return {
            "step": self.step, "task": s.task.number, "prompt": decode(s.prompt), "completion": decode(s.completion),
            "finish": s.finish, "reward": float(found.total[i]), "rewards": each,
        }  # fmt: skip
