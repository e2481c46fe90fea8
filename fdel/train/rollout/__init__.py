"""Learning from own samples: an engine answers tasks, answers get rewards, rewards become advantages, and these a batch.

    samples = rollout(engine, tasks, SamplingParams(max_tokens=256, temperature=1.0), samples=8, seed=step)
    batch = collate(samples, advantages.grouped(rewards, 8), length=1024)
    state, metrics = step(state, batch)
    engine.update_params(state.params)

`Source` joins these to the data of `train.fit`. Rewards come from functions that `rewards.score` asks: yours, those of
`verify` (answers), `form` (length, JSON), `programs` (tests) and `judges` (models), in a process by `isolated`.
"""

from . import advantages, select, turns
from .collate import collate
from .records import Rewards, Sample, Task
from .run import Adapter, rollout
from .source import Mixed, Source
from .turns import Said, Turn

__all__ = [
    "rollout", "Adapter", "collate", "Source", "Mixed", "Task", "Sample", "Rewards", "Said", "Turn", "advantages", "select",
    "turns",
]  # fmt: skip
