"""Which rows hold the samples of a step: one each, several of one prompt, or several of any prompts."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from fdel.recipe.build import build_mesh
from fdel.recipe.settled import Settled
from fdel.train.processes import share as share_of
from fdel.train.rollout import collate
from fdel.train.rollout.local import even

SPLIT = ("dp", "fsdp", "ep")  # axes over which rows are divided


def placing(s: Settled, put: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Let `put`, which gives each sample a row, place them as keys say."""
    if getattr(s.keys, "pack_samples", False):
        media = put.keywords["media"]  # type: ignore[attr-defined]
        return _alike(partial(collate, length=s.length, rows=unit(s), packed=True, media=media))
    n = getattr(s.keys, "samples_per_row", 1)
    return put if n == 1 else share(s, put, n)


def _alike(packed: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Let all processes have as many packed rows, and places that are learnt, as the one with most."""
    return packed if jax.process_count() == 1 else lambda *args, **how: even(packed(*args, **how))


def unit(s: Settled) -> int:
    """Give the number of which this process's packed rows are a multiple: parts of all updates, on all devices."""
    mesh = build_mesh(s)
    split = math.prod(mesh.shape[a] for a in SPLIT) // (share_of(mesh)[1] if jax.process_count() > 1 else 1)
    return s.recipe.trainer.gradient_accumulation_steps * s.keys.updates * split


def share(s: Settled, put: Callable[..., dict[str, Any]], n: int) -> Callable[..., dict[str, Any]]:
    """Let `put` place `n` samples of a prompt in a row, in so many rows that it always has room for `n`."""
    given, k = put.keywords, s.keys  # type: ignore[attr-defined]
    length = s.length - k.max_completion_length + n * (k.max_completion_length + 1)
    return _alike(partial(put, length=length, rows=given["rows"] // n, most=None, shared=True))
