"""The checkpoints of a run: one directory per step, complete or absent; a run goes on from the newest that is whole.

<directory>/<step>/            the state (orbax), notes/process_<i>.json (data, progress, config), digests.<i>.json
<directory>/<step>.damaged/    could not be read; an older one was
"""

import base64
import contextlib
import importlib.metadata
import json
import logging
import math
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax

from fdel.ops.platform import target
from fdel.params import CheckpointError, store
from fdel.train.evaluation import everywhere

Notes = dict[str, Any]
SAVE_ERRORS = (OSError, ValueError)  # a full disk comes as either, from the JSON or from the arrays
# What damage may raise; of notes that are JSON but not what was saved, nearly anything.
RESTORE_ERRORS = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)

log = logging.getLogger(__name__)


def steps(directory: Path) -> list[int]:
    """List the steps that have a complete checkpoint, oldest first."""
    return sorted(int(p.name) for p in directory.glob("*") if p.name.isdecimal() and p.is_dir())


def restore(directory: Path, like: Any, accept: Callable[[Notes], Any] = lambda notes: notes) -> tuple[Any, Any]:
    """Read the newest checkpoint that is whole: the state, and what `accept` makes of its notes.

    `like` is a tree of `jax.ShapeDtypeStruct`. `accept` raises one of `RESTORE_ERRORS` for notes that are damaged. Damaged
    ones are reported, and renamed once an older one was read. If none can be read, a CheckpointError says why: starting
    over would bury them.
    """
    failed: dict[int, Exception] = {}
    for step in reversed(steps(directory)):
        path = directory / str(step)
        try:
            found = _read(path, like, accept)
        except RESTORE_ERRORS as e:
            log.warning("checkpoint %s cannot be restored: %s", path, _reason(e))
            failed[step] = e
            continue
        for bad in failed if jax.process_index() == 0 else ():
            aside = directory / f"{bad}.damaged"
            shutil.rmtree(aside, ignore_errors=True)
            (directory / str(bad)).rename(aside)
        if failed:
            log.warning("going on from step %d, the last good checkpoint", step)
        return found
    reasons = [f"{step}: {_reason(e)}" for step, e in failed.items()] or ["there is none"]
    raise CheckpointError(directory, [*reasons, "move the checkpoints away to start over"])


def _read(path: Path, like: Any, accept: Callable[[Notes], Any]) -> tuple[Any, Any]:
    problem: Exception | None = None
    try:
        store.verify(path)
        notes = store.read_notes(path)
        if 0 < jax.process_index() < notes["processes"]:
            notes = store.read_notes(path, jax.process_index())
        accepted = accept(notes)
    except RESTORE_ERRORS as e:
        problem = e
    if not everywhere(problem is None):
        raise problem or CheckpointError(path, ["another process found damage"])
    return store.restore(path, like), accepted


def _reason(error: BaseException) -> str:
    """Say what went wrong at the bottom of a chain of errors."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


def clean(directory: Path) -> None:
    """Remove what interrupted saves have left; threads of one that failed may write for a moment yet."""
    for pause in (0, 0.1, 0.5, 2) if jax.process_index() == 0 else ():
        time.sleep(pause)
        if not (left := list(directory.glob("*.orbax-checkpoint-tmp*"))):
            return
        for path in left:
            shutil.rmtree(path, ignore_errors=True)


def prune(directory: Path, keep: int, keep_best: int = 0, metric: str = "", greater: bool = False) -> None:
    """Delete all but the latest `keep` checkpoints (0: keep all) and the best `keep_best` by a metric in their notes."""
    if not keep or jax.process_index():
        return
    found = steps(directory)
    kept = {*found[-keep:], *ranked(directory, metric, greater)[:keep_best]}
    for step in found:
        if step not in kept:
            # Renamed first: a deletion that is interrupted must not leave half a checkpoint.
            doomed = (directory / str(step)).rename(directory / f"{step}.orbax-checkpoint-tmp-old")
            shutil.rmtree(doomed, ignore_errors=True)


def ranked(directory: Path, metric: str, greater: bool = False) -> list[int]:
    """List the steps whose notes hold a metric, the best first; among equals the earliest."""
    values = {}
    for step in steps(directory):
        try:
            value = store.read_notes(directory / str(step))["metrics"].get(metric)
        except RESTORE_ERRORS:
            continue  # damage is reported when it is restored
        if value is not None and not math.isnan(value):
            values[step] = -value if greater else value
    return sorted(values, key=lambda step: (values[step], step))


class Saver:
    """Write one checkpoint at a time in the background; a failure is reported, and the last good one stays.

    Not in the background on CPU: the processors that write are those that would train, and what is being written cannot
    be donated, so that a step would need room for a second state.
    """

    def __init__(self, directory: Path, **kept: Any) -> None:
        """Save into `directory`; `kept` are the arguments of `prune`."""
        self.directory, self.kept = directory, kept
        self.background = target() != "cpu"
        self.running: tuple[int, Future[None]] | None = None
        self.saved = max(steps(directory), default=-1)

    def save(self, step: int, state: Any, notes: Notes) -> Exception | None:
        """Begin to write a checkpoint, when the one before is done; the state may be donated on return.

        What went wrong so far is returned.
        """
        self.wait()
        try:
            self.running = step, store.save_async(self.directory / str(step), state, notes)
        except SAVE_ERRORS as e:
            return self._failed(step, e)
        return None if self.background else self.wait()

    def finish(self, step: int, state: Any, notes: Notes) -> None:
        """Save the last state, if it is not saved yet, and raise what goes wrong."""
        self.wait()
        if self.saved != step and (failure := self.save(step, state, notes) or self.wait()):
            raise failure

    def wait(self) -> Exception | None:
        """Wait for the save under way, delete old checkpoints, and return what went wrong."""
        if self.running is None:
            return None
        (step, future), self.running = self.running, None
        try:
            future.result()
        except SAVE_ERRORS as e:
            return self._failed(step, e)
        self.saved = step
        prune(self.directory, **self.kept)
        return None

    def _failed(self, step: int, error: Exception) -> Exception:
        clean(self.directory)
        last = f"the last good one is of step {self.saved}" if self.saved >= 0 else "there is none before it"
        log.warning("checkpoint of step %d was not saved (%s); %s", step, _reason(error), last)
        return error


# ---- what a checkpoint holds besides arrays ------------------------------------------------------------------------


def notes(iterator: Any, config: Any, **more: Any) -> Notes:
    """Collect the place in the data, the configuration and versions, and what else is given, as JSON."""
    data = iterator.get_state()
    place = {"base64": base64.b64encode(data).decode()} if isinstance(data, bytes) else {"json": data}
    return {"data": place, "processes": jax.process_count(), "config": config, "versions": _versions(), **more}


def _versions() -> dict[str, str]:
    """Name what decides whether lost steps are repeated bit by bit."""
    versions = dict.fromkeys(("fdel", "jax", "jaxlib", "orbax-checkpoint"), "not installed")  # run from its source
    for package in versions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions | {"device": jax.devices()[0].device_kind}


def resume(
    directory: Path, state: Any, iterator: Any, config: Any, shared: bool, read: Callable[[Any], Any]
) -> tuple[Any, Any]:
    """Restore the state and the place in the data, and say what differs from the run that saved them.

    `state` is a state to replace, whose arrays are deleted first (there may be no room for two), or the jitted function
    that makes it, which is not run. As many processes as before are needed, since each has its own part of the data,
    unless its place is `shared`: the same on all processes, however many they are. `read` makes something of the notes'
    progress, and raises one of `RESTORE_ERRORS` if it is damaged; (state, what it made) is returned.
    """
    one = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    shapes = jax.eval_shape(state) if callable(state) else state
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or one), shapes)
    if not callable(state):
        jax.tree.map(lambda x: x.delete(), state)
    fresh = iterator.get_state()

    def accept(found: Notes) -> tuple[Notes, Any]:
        place, progress = found["data"], read(found["progress"])
        if int(found["processes"]) == jax.process_count() or shared:
            place = base64.b64decode(place["base64"]) if "base64" in place else place["json"]
            iterator.set_state(_place(place, fresh))
        return found, progress

    state, (found, progress) = restore(directory, like, accept)
    if found["processes"] != jax.process_count() and not shared:
        raise ValueError(
            f"{directory}: its data was divided among {found['processes']} processes, now there are "
            f"{jax.process_count()}; use as many as before, or data whose place does not depend on it (data.shared)"
        )
    for name, now in {"config": json.loads(json.dumps(config)), "versions": _versions()}.items():
        for change in _changes(name, found.get(name), now):
            log.warning("since step %s was saved, %s", found["progress"]["step"], change)
    return state, progress


def _place(found: Any, fresh: Any) -> Any:
    """Give a place in the data back; TypeError if its numbers are none, where those of a new iterator are."""
    if isinstance(fresh, dict) and isinstance(found, dict):
        for name in fresh.keys() & found.keys():
            _place(found[name], fresh[name])
    elif isinstance(fresh, list | tuple) and isinstance(found, list):
        for a, b in zip(found, fresh, strict=False):
            _place(a, b)
    elif fresh is not None and not isinstance(found, type(fresh)):
        raise TypeError(f"the place in the data is {found!r:.80}, expected one like {fresh!r:.80}")
    return found


def _changes(name: str, old: Any, new: Any) -> list[str]:
    """Name what differs between two JSON values, by its dotted path."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [c for key in sorted(old | new) for c in _changes(f"{name}.{key}", old.get(key), new.get(key))]
    return [] if old == new else [f"{name} has changed from {old!r} to {new!r}"]
