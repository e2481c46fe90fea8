"""Continuous batching: a window is encoded when a place is free, written in a slot, and leaves when its transcript ends."""

import logging
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fdel.serve.hear.listen import Listener
from fdel.serve.hear.windows import Detect, Follow, Hear, Transcript

log = logging.getLogger(__name__)
STEPS = 16  # tokens of each transcript between two looks at what has come in


@dataclass(eq=False)
class Batch:
    """Windows that are being written: the sound of each slot, None for an empty one, and what the device holds of them."""

    sounds: list[Any] = field(default_factory=list)
    memory: Any = None
    slots: Any = None  # `decode.Slots`


def turn(listener: Listener, batch: Batch, asks: Mapping[Any, Any]) -> dict[Any, Any]:
    """Answer some questions of sounds, {sound: question} in their order: an answer for each, or what went wrong.

    A window has one of the listener's `rows` places from when it is encoded until its sound asks for the next: so as many
    memories are kept as there are slots. Questions of one kind are answered together; while there is none, transcripts are
    written for some steps, and whose ends is answered. Who asks no more leaves its slot.
    """
    free = listener.rows - sum(not isinstance(a, Hear) for a in asks.values())
    for kind, most in ((Follow, listener.rows), (Detect, listener.rows), (Hear, max(0, free))):
        chosen = [sound for sound, a in asks.items() if isinstance(a, kind)][:most]
        if chosen:
            chosen = chosen[: 1 << (len(chosen).bit_length() - 1)]  # few sizes are compiled, none is padded
            try:
                return dict(zip(chosen, listener.answer([asks[s] for s in chosen]), strict=True))
            except Exception as e:
                return _failed(chosen, e)
    return _written(listener, batch, asks)


def _failed(sounds: Collection[Any], error: Exception) -> dict[Any, Exception]:
    log.error("a batch of %d windows failed", len(sounds), exc_info=error)
    return dict.fromkeys(sounds, error)


def _written(listener: Listener, batch: Batch, asks: Mapping[Any, Any]) -> dict[Any, Any]:
    """Give new windows their slots, write, and hand on what is done."""
    new = {s: a for s, a in asks.items() if s not in batch.sounds and not isinstance(a, Hear)}
    try:
        begun = listener.begin(_padded(list(new.values()), listener.rows)) if new else None
    except Exception as e:
        return _failed(new, e)
    try:
        _arrange(listener, batch, list(new), begun, [i for i, s in enumerate(batch.sounds) if s in asks])
        batch.slots, drafts = listener.write(batch.memory, batch.slots, STEPS)
    except Exception as e:
        batch.sounds, batch.memory, batch.slots, lost = [], None, None, {*batch.sounds, *new}
        return _failed([s for s in asks if s in lost], e)
    found = {batch.sounds[i]: draft for i, draft in drafts.items() if batch.sounds[i] is not None}
    batch.sounds = [None if s in found else s for s in batch.sounds]
    if all(s is None for s in batch.sounds):
        batch.sounds, batch.memory, batch.slots = [], None, None
    return found


def _size(count: int, most: int) -> int:
    """So many slots are computed for `count` windows: few sizes are compiled."""
    return min(most, 1 << (count - 1).bit_length())


def _padded(asks: list[Any], most: int) -> list[Any]:
    return asks + [asks[0]._replace(limit=0)] * (_size(len(asks), most) - len(asks))


def _arrange(listener: Listener, batch: Batch, new: list[Any], begun: Any, going: list[int]) -> None:
    """Put windows that join, with what `begin` gave of them, beside the slots that go on, and no more slots than needed."""
    before, left = len(batch.sounds), sum(s is not None for s in batch.sounds) > len(going)
    kept = [*(batch.sounds[i] for i in going), *new]
    empty = [None] * (_size(len(kept), listener.rows) - len(kept))
    if not going:
        batch.memory, batch.slots = begun
    elif new or left or len(kept + empty) < before:
        order = np.array([*going, *range(before, before + len(new)), *[-1] * len(empty)], np.int32)
        here = batch.memory, batch.slots
        batch.memory, batch.slots = listener.pick([here, begun] if new else [here], order)
    else:
        return
    batch.sounds = kept + empty


def run(listener: Listener, sounds: Sequence[Generator[Any, Any, Transcript]]) -> list[Transcript]:
    """Write down several sounds, whose windows share a batch: one `transcribe` of each."""
    batch, found = Batch(), dict[int, Transcript]()
    asks = {i: next(sound) for i, sound in enumerate(sounds)}
    while asks:
        for i, answer in turn(listener, batch, asks).items():
            del asks[i]
            if isinstance(answer, Exception):
                raise answer
            try:
                asks[i] = sounds[i].send(answer)
            except StopIteration as end:
                found[i] = end.value
    return [found[i] for i in range(len(sounds))]
