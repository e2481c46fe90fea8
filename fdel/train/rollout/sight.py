"""What tasks and environments show and play: as an engine takes it beside a prompt, and in the batch that is learnt."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fdel.media.sight import Sight
from fdel.serve import PromptMedia
from fdel.serve.engine.pictures import beside
from fdel.train.data import pictures
from fdel.train.data.images import Shown
from fdel.train.rollout.records import Sample, Task

Part = tuple[Sample, int, int]
Columns = Mapping[str, Any]  # of `pictures.columns`


def begun(sight: Sight | None, task: Task) -> Columns | None:
    """Read what a task's prompt shows; None if that is nothing. ValueError for a model that does not see."""
    return _columns(_known(sight), task) if task.images else None


def went_on(
    sight: Sight | None, before: Columns | None, tokens: Sequence[int], shown: Sequence[Shown]
) -> Columns | None:
    """Read what a trajectory of these tokens shows, of which that `before` is read, and `shown` is new.

    None if that is nothing. ValueError for a model that does not see, and for what the tokens are not those of.
    """
    if before is None and not shown:
        return None
    nothing = pictures.none(np.zeros(0, np.int32))
    return pictures.following(before or nothing, np.array(tokens, np.int32), shown, _known(sight))


def prompt_media(sight: Sight | None, seen: Columns | None) -> PromptMedia | None:
    """Give what an engine takes beside a prompt that shows this."""
    if seen is None:
        return None
    turned = any(p.turns is not None for p in seen["pictures"])
    return beside(_known(sight), seen["pictures"], seen["index"], seen["rotary"] if turned else None)


def shown(
    rows: Sequence[Sequence[Part]], shape: tuple[int, int], *, sight: Sight | None,
    agree: Callable[[np.ndarray], np.ndarray] | None = None,
) -> Mapping[str, Any]:  # fmt: skip
    """Give the "media" and "rotary" of a batch of `shape`, whose first rows have these parts; empty if none shows anything.

    A part is a sample, and the first and the end of its tokens that stand there. What an environment showed and that end
    cuts is left out: nothing stands behind it. With `agree` (`pictures.room`) it is empty if none of any process shows.
    """
    every = [s for row in rows for s, _, _ in row]
    if agree is None and not any(s.task.images or s.images for s in every):
        return {}
    see = _known(sight)
    tasks = {id(task): _columns(see, task) for task in {id(s.task): s.task for s in every}.values()}

    def part(s: Sample, first: int, end: int) -> dict[str, Any]:
        whole = [x for x in s.images if x.start + len(x.run) <= end]
        tokens = s.tokens[: max(end, len(s.task.prompt))]
        return pictures.part(pictures.following(tasks[id(s.task)], tokens, whole, see), first, end, see)

    each = [[pictures.join([part(*x) for x in row], see)] for row in rows]
    room = pictures.room([([{"media": x} for x in row], None) for row in each], see, agree)
    if room is None:
        return {}
    found = pictures.media(each, see, (shape[0], 1, shape[1]), room)
    return {k: jax.tree.map(lambda x: x[:, 0], v) for k, v in found.items()}


def _known(sight: Sight | None) -> Sight:
    if sight is None:
        raise ValueError("a task or an environment shows pictures, and the engine does not see; give it sight=")
    return sight


def _columns(sight: Sight, task: Task) -> dict[str, Any]:
    return pictures.columns(sight, np.array(task.prompt, np.int32), task.images)
