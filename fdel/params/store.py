"""Checkpoints of any tree of arrays, sharded or not, through orbax: exact, atomic, and independent of the mesh."""

import json
import re
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from .tensor import CheckpointError

Tree = Any


class _Notes:
    """What a process remembers besides arrays: a JSON file of its own in the checkpoint, written by orbax's rules."""

    def __init__(self, notes: Any) -> None:
        self.text = json.dumps(notes)

    async def save(self, directory: Any) -> Any:
        """Return the writing of the file, for orbax to do in the background."""

        async def write() -> None:
            path = await directory.await_creation()
            (path / f"process_{jax.process_index()}.json").write_text(self.text)

        return write()

    async def load(self, directory: Any) -> Any:
        """Refuse: `read_notes` needs no orbax, which asks for this method nevertheless."""
        raise NotImplementedError(f"{directory}: read it with read_notes")


def save(directory: str | Path, tree: Tree) -> None:
    """Write a tree of arrays to a new directory, every process its shards; it is complete or absent.

    All processes of `jax.distributed` call this, with the same directory on a file system that they share. A directory
    that exists is a ValueError of orbax. Needs the extra `train`.
    """
    save_async(directory, tree).result()


def save_async(directory: str | Path, tree: Tree, notes: Any = None) -> Future[None]:
    """Copy a tree to the host and write it in the background, as `save` does; the arrays may be donated at once.

    `notes` is JSON that this process gets back from `read_notes`. The future raises what went wrong, as an OSError or a
    ValueError. After the checkpoint, a digest of every file is written beside it, for `verify`.
    """
    ocp = _orbax()
    target = Path(directory).absolute()
    # Weights hardly compress (7 % in float32), and a processor that compresses is one that does not train.
    context = ocp.Context()
    context.array.saving.use_compression = False
    with context:
        writing = ocp.save_checkpointables_async(target, {"state": tree, "notes": _Notes(notes)})

    def finish() -> None:
        writing.result()
        _write_digests(target)

    pool = ThreadPoolExecutor(1, "fdel-save")
    future = pool.submit(finish)
    pool.shutdown(wait=False)
    return future


def restore(directory: str | Path, like: Tree) -> Tree:
    """Read a tree that has the structure, shapes, dtypes and shardings of `like`, a tree of `jax.ShapeDtypeStruct`.

    The mesh may be another one than at saving. All processes call this. Arrays that are missing, or of other shapes, are
    a ValueError of orbax that names them; files that cannot be read are a CheckpointError, another ValueError or a
    KeyError. Needs the extra `train`.
    """
    try:
        return _orbax().load(Path(directory).absolute(), like)
    except Exception as e:
        if type(e) is not Exception:
            raise
        # Orbax raises the bare class for an array that it cannot read.
        raise CheckpointError(directory, [str(e.__cause__ or e)]) from e


def read_notes(directory: str | Path, process: int = 0) -> Any:
    """Read the notes that a process left in a checkpoint; OSError or ValueError if they are absent or damaged."""
    return json.loads((Path(directory) / "notes" / f"process_{process}.json").read_text())


def verify(directory: str | Path) -> None:
    """Compare a checkpoint's files with their digests: CheckpointError names those that are lost or changed.

    Each process checks its share. Files without a digest (the process was killed right after the save) pass.
    """
    directory, count = Path(directory), jax.process_count()
    problems = []
    for index in sorted(directory.glob("digests.*.json")):
        if int(index.name.split(".")[1]) % count == jax.process_index():
            for name, digest in json.loads(index.read_text()).items():
                path = directory / name
                if not path.is_file():
                    problems.append(f"{name} is missing")
                elif _digest(path) != digest:
                    problems.append(f"{name} has changed since it was saved")
    if problems:
        raise CheckpointError(directory, problems)


def _write_digests(directory: Path) -> None:
    """Write the CRC-32 of every file that this process wrote; process 0 also takes those that belong to none."""
    mine = jax.process_index()
    owner = lambda name: int(found[1]) if (found := re.search(r"process_(\d+)", name)) else 0
    names = (p.relative_to(directory).as_posix() for p in sorted(directory.rglob("*")) if p.is_file())
    digests = {name: _digest(directory / name) for name in names if owner(name) == mine}
    part = directory / f".digests.{mine}"
    part.write_text(json.dumps(digests))
    part.replace(directory / f"digests.{mine}.json")


def _digest(path: Path) -> int:
    crc = 0
    with path.open("rb") as f:
        while chunk := f.read(1 << 20):
            crc = zlib.crc32(chunk, crc)
    return crc


def _orbax() -> Any:
    try:
        import orbax.checkpoint.experimental.v1 as ocp
    except ImportError as e:
        raise ImportError("saving and restoring a training state needs orbax: pip install 'fdel[train]'") from e
    return ocp
