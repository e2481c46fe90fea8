"""How arrays lie in a checkpoint: their tensors' names, the layout in the file, and which axes are a matrix's inputs."""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from .spec import Param


def hf_names(p: Param) -> list[str]:
    """The checkpoint tensors that make up one array, in the order of its stacked axes."""
    names, index = [a for a, _ in p.stacked], [r for _, r in p.stacked]
    unknown = sorted(set(re.findall(r"{(\w+)}", p.hf)) ^ set(names))
    if unknown:
        differ = ", ".join(unknown)
        raise ValueError(f"{p.hf}: placeholders and stacked axes {names} differ in {differ}; name each once")
    return [p.hf.format(**dict(zip(names, i, strict=True))) for i in itertools.product(*index)]


def as_modules(spec: Any) -> Any:
    """Declare arrays as transformers' modules hold them, where that differs from the file."""
    return jax.tree.map(lambda p: p.module or p, spec)


def with_modules(spec: Any, names: Mapping[str, str]) -> Any:
    """Note how transformers' modules are called: patterns of names in files, with what is there instead."""

    def one(p: Param) -> Param:
        held, name = p.module or p, (p.module or p).hf
        for pattern, other in names.items():
            name = re.sub(pattern, other, name, count=1)
        return p if name == held.hf else replace(p, module=replace(held, hf=name))

    return jax.tree.map(one, spec)


def without_modules(spec: Any) -> Any:
    """Declare arrays of modules that hold them as the file does, such as those that are no part of transformers."""
    return jax.tree.map(lambda p: replace(p, module=None), spec)


@dataclass(frozen=True)
class Layout:
    """How one checkpoint tensor maps to one (unstacked) array; made by `layout`."""

    file_shape: tuple[int, ...]  # the tensor as it is in the file
    flat: tuple[int, ...]  # the file's axes pulled apart; a fused dimension stays one axis of its total size
    cut: tuple[slice, ...]  # our part of `flat`
    sizes: tuple[int, ...]  # our axes in file order, without axes of size one
    order: tuple[int, ...]  # permutation from file order to our order
    shape: tuple[int, ...]  # of our array, where an axis that is two in the file is one again

    divided = property(lambda self: len(self.sizes) != len(self.shape))

    def read(self, tensor: np.ndarray) -> np.ndarray:
        """Checkpoint tensor -> our array (a view where numpy can)."""
        array = tensor.reshape(self.flat)[self.cut].reshape(self.sizes).transpose(self.order)
        return array.reshape(self.shape) if self.divided else array

    def write(self, tensor: np.ndarray, array: np.ndarray) -> None:
        """Write our array into its place in a checkpoint tensor."""
        where: Any = (*self.cut, ...)  # a scalar's view too is an array with the ellipsis
        view = tensor.reshape(self.flat)[where]
        apart = array.reshape([self.sizes[i] for i in self.order])
        view[...] = apart.transpose(np.argsort(self.order)).reshape(view.shape)


def file_dims(p: Param) -> list[str]:
    """The dimensions of the checkpoint tensor, each as `hf_axes` writes it: "(heads head_dim)", "embed"."""
    return re.findall(r"\([^)]*\)|\[[^\]]*\]|\S+", p.hf_axes or " ".join(p.axes.split()[len(p.stacked) :]))


def axes_in(dim: str) -> list[str]:
    """Our axes in one dimension of a checkpoint tensor; an axis of size one is none of ours."""
    return list(dict.fromkeys(re.findall(r"(?<![/%\w])[a-z_]\w*", dim)))


def layout(p: Param) -> Layout:
    """Derive the file layout of one checkpoint tensor of `p` from its axis names."""
    n = len(p.stacked)
    ours = p.axes.split()[n:]
    size: dict[str, int] = dict(zip(ours, p.shape[n:], strict=True)) | {"1": 1}
    pieces = {axis: [axis] for axis in ours}  # of each of our axes, in the file
    for axis, by in set(re.findall(r"(\w+)(?://|%)(\d+)", p.hf_axes)):
        if axis not in size or size[axis] % int(by):
            raise ValueError(f"{p.hf}: layout {p.hf_axes!r} divides axis {axis!r} of {size.get(axis)} by {by}")
        pieces[axis] = [f"{axis}//{by}", f"{axis}%{by}"]
        size |= {f"{axis}//{by}": size[axis] // int(by), f"{axis}%{by}": int(by)}
    file_shape: list[int] = []
    flat: list[int] = []
    cut: list[slice] = []
    order: list[str] = []
    for group in file_dims(p):
        start = len(flat)
        for item in re.findall(r"\[[^\]]*\]|[^\s()]+", group):
            names = item.strip("[]").split()
            unknown = [a for a in names if a not in size]
            if unknown:
                raise ValueError(f"{p.hf}: axis {unknown[0]!r} of layout {p.hf_axes!r} is not one of {ours}")
            length = math.prod(size[a] for a in names)
            offset, total = p.part if item.startswith("[") and p.part else (0, length)
            if not 0 <= offset <= total - length:
                why = f"has {length} elements, which do not fit part {p.part} (offset, total)"
                raise ValueError(f"{p.hf}: {item} {why}")
            flat.append(total)
            cut.append(slice(offset, offset + length))
            order += [a for a in names if a != "1"]
        file_shape.append(math.prod(flat[start:]))
    every = [piece for axis in ours for piece in pieces[axis]]
    if sorted(order) != sorted(every) or ("[" in p.hf_axes) != (p.part is not None):
        raise ValueError(f"{p.hf}: layout {p.hf_axes!r} (part {p.part}) does not name each of {ours} once")
    sizes, ours_at = tuple(size[a] for a in order), tuple(order.index(a) for a in every)
    return Layout(tuple(file_shape), tuple(flat), tuple(cut), sizes, ours_at, p.shape[n:])


@dataclass(frozen=True)
class Matrix:
    """An array seen as a matrix: `batch` axes in front, then `outputs` ones; the others are its inputs."""

    batch: int
    outputs: int

    def cut(self, axes: Sequence) -> tuple[tuple, tuple, tuple]:
        """Cut a shape, or anything else that has one item per axis, into (batch, outputs, inputs)."""
        axes, end = tuple(axes), self.batch + self.outputs
        return axes[: self.batch], axes[self.batch : end], axes[end:]


def matrix(p: Param) -> Matrix | None:
    """See an array as a matrix, or None if it is none: what quantisation, adapters, Muon and Adafactor go by.

    Axes in one dimension of the checkpoint tensor are one side of it, and outputs come first in ours: "embed heads
    head_dim", in the file "embed (heads head_dim)", has two inputs. Where the file does not show it, `Param.inputs` does.
    Stacked axes and `experts` in front of a matrix are batch axes. Biases, convolutions (a dimension of size one) and
    arrays of a fixed dtype are none.
    """
    batch, names, dims = len(p.stacked), p.axes.split()[len(p.stacked) :], [axes_in(d) for d in file_dims(p)]
    if len(names) > 2 and names[0] == "experts":
        batch, names = batch + 1, names[1:]
    if p.inputs is not None:
        return Matrix(batch, len(names) - p.inputs) if p.inputs else None
    sides = [side for dim in dims if (side := set(names) & set(dim))]
    if p.dtype or p.hf.endswith("bias") or len(sides) != 2 or not all(dims):
        return None
    outputs = len(next(side for side in sides if names[0] in side))
    return Matrix(batch, outputs) if set(names[:outputs]) in sides else None
