"""Which rows hold the samples of a step: one each, several of one prompt, or several of any prompts."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from fdel.recipe.build import build_mesh
from fdel.recipe.settled import Settled
from fdel.train.rollout import collate

SPLIT = ("dp", "fsdp", "ep")  # axes over which rows are divided


def placing(s: Settled, put: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Let `put`, which gives each sample a row, place them as keys say."""
    if getattr(s.keys, "pack_samples", False):
        return partial(collate, length=s.length, rows=unit(s), packed=True)
    n = getattr(s.keys, "samples_per_row", 1)
    return put if n == 1 else share(s, put, n)


def unit(s: Settled) -> int:
    """Give the number of which packed rows are a multiple: parts of all updates, on all devices."""
    mesh = build_mesh(s).shape
    return s.recipe.trainer.gradient_accumulation_steps * s.keys.updates * math.prod(mesh[a] for a in SPLIT)


def share(s: Settled, put: Callable[..., dict[str, Any]], n: int) -> Callable[..., dict[str, Any]]:
    """Let `put` place `n` samples of a prompt in a row, in so many rows that it always has room for `n`."""
    given, k = put.keywords, s.keys  # type: ignore[attr-defined]
    length = s.length - k.max_completion_length + n * (k.max_completion_length + 1)
    most = given["most"] and n * given["most"]
    return partial(put, length=length, rows=given["rows"] // n, most=most, shared=True)
