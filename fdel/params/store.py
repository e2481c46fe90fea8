"""Checkpoints of any tree of arrays, sharded or not, through orbax: exact, atomic, and independent of the mesh."""

from pathlib import Path
from typing import Any

Tree = Any


def save(directory: str | Path, tree: Tree) -> None:
    """Write a tree of arrays to a new directory, every process its shards; it is complete or absent.

    All processes of `jax.distributed` call this, with the same directory on a file system that they share. A directory
    that exists is a ValueError of orbax. Needs the extra `train`.
    """
    import orbax.checkpoint.experimental.v1 as ocp

    ocp.save(Path(directory).absolute(), tree)


def restore(directory: str | Path, like: Tree) -> Tree:
    """Read a tree that has the structure, shapes, dtypes and shardings of `like`, a tree of `jax.ShapeDtypeStruct`.

    The mesh may be another one than at saving. All processes call this. Arrays that are missing, or of other shapes, are
    an error of orbax that names them. Needs the extra `train`.
    """
    import orbax.checkpoint.experimental.v1 as ocp

    return ocp.load(Path(directory).absolute(), like)
