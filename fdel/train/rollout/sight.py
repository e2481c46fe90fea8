"""What tasks show and play: as an engine takes it beside a prompt, and in the batch that learns the samples."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fdel.media.sight import Sight
from fdel.serve import PromptMedia
from fdel.serve.engine.pictures import beside
from fdel.train.data import pictures
from fdel.train.rollout.records import Sample, Task

Part = tuple[Sample, int, int]


def prompt_media(sight: Sight | None, task: Task, length: int) -> PromptMedia | None:
    """Give what an engine takes beside a prompt that goes on to `length` tokens; None of a task without pictures.

    ValueError for a model that does not see.
    """
    if not task.images:
        return None
    found = pictures.longer(_columns(_known(sight), task), length)
    turned = any(p.turns is not None for p in found["pictures"])
    return beside(_known(sight), found["pictures"], found["index"], found["rotary"] if turned else None)


def shown(
    rows: Sequence[Sequence[Part]], shape: tuple[int, int], *, sight: Sight | None,
    agree: Callable[[np.ndarray], np.ndarray] | None = None,
) -> Mapping[str, Any]:  # fmt: skip
    """Give the "media" and "rotary" of a batch of `shape`, whose first rows have these parts; empty if none shows anything.

    A part is a sample, and the first and the end of its tokens that stand there. With `agree` (`pictures.room`) that is
    none of any process.
    """
    tasks = {id(s.task): s.task for row in rows for s, _, _ in row}
    if agree is None and not any(task.images for task in tasks.values()):
        return {}
    every = {i: _columns(_known(sight), task) for i, task in tasks.items()}
    part = lambda s, first, end: pictures.part(
        pictures.longer(every[id(s.task)], max(end, len(s.task.prompt))), first, end
    )
    each = [[pictures.join([part(*x) for x in row], _known(sight))] for row in rows]
    room = pictures.room([([{"media": x} for x in row], None) for row in each], _known(sight), agree)
    if room is None:
        return {}
    found = pictures.media(each, _known(sight), (shape[0], 1, shape[1]), room)
    return {k: jax.tree.map(lambda x: x[:, 0], v) for k, v in found.items()}


def _known(sight: Sight | None) -> Sight:
    if sight is None:
        raise ValueError("a task shows pictures, and the engine does not see; give it sight=")
    return sight


def _columns(sight: Sight, task: Task) -> dict[str, Any]:
    return pictures.columns(sight, np.array(task.prompt, np.int32), task.images)
