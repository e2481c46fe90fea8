"""How PEFT's factors lie: which arrays have some, and how lora_A and lora_B map to those of a `LowRank` leaf."""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from .hf_layout import Layout, Matrix, axes_in, file_dims, hf_names, layout, matrix
from .peft_names import EXPERTS, TURNED
from .quantize import declarations
from .spec import Param, zeros

Tree = Any

TABLES = ("embed", "positions", "types", "input_embed")  # leaves whose rows are looked up


def adaptable(spec: Tree, params: Tree) -> Iterator[tuple[str, Param, Matrix]]:
    """The leaves of params that PEFT adapts: (path, declaration, how it is a matrix)."""
    for leaf, p in declarations(params, spec).items():
        dims, own = file_dims(p), len(p.stacked)
        m = Matrix(own, 0) if dims[0] == "1" and len(dims) == 2 else matrix(replace(p, dtype=None))
        experts = p.hf.rpartition(".")[2] in EXPERTS and dims[0] == "experts"
        if m and m.batch == own + experts and (experts or p.hf.endswith(".weight")):
            yield leaf, p, m


def names_of(p: Param) -> Iterator[tuple[tuple[int, ...], str]]:
    """(Index in the stacked axes, name) of each tensor of an array."""
    return zip(np.ndindex(tuple(len(r) for _, r in p.stacked)), hf_names(p), strict=True)


def is_table(leaf: str) -> bool:
    """Tell whether PEFT takes an array for an embedding."""
    return leaf.rpartition(".")[2] in TABLES


def experts_of(p: Param, m: Matrix) -> tuple[int, ...]:
    """The number of experts that a tensor has, if it has several."""
    return p.shape[len(p.stacked) : m.batch]


class Sides(NamedTuple):
    """How PEFT's factors, here A [*experts rank columns] and B [rows rank *experts], map to those of an array.

    `turned`: rows are inputs, so that A is the transpose of our b, and B that of our a.
    """

    a: Layout
    b: Layout
    turned: bool
    batch: int  # axes before the ranks of our a

    @property
    def apart(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Their shapes."""
        a, b = self.a.file_shape, self.b.file_shape
        return (b[::-1], a[::-1]) if self.turned else (a, b)

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Their shapes in the file, of two axes."""
        a, b = self.apart
        return (math.prod(a[:-1]), a[-1]), (b[0], math.prod(b[1:]))

    def read(self, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """PEFT's of the file -> ours, without ranks that other parts of a fused tensor have for themselves."""
        a, b = (x.reshape(shape) for x, shape in zip((a, b), self.apart, strict=True))
        a, b = (b.T, a.T) if self.turned else (a, b)
        some = lambda x, axis: x.any(tuple({*range(x.ndim)} - {axis % x.ndim}))
        every, a, b = some(b, 1), self.a.read(a), self.b.read(b)
        own = some(b, -1) | ~every
        return a.compress(own, self.batch), b.compress(own, -1)

    def write(self, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Ours -> PEFT's."""
        factors = np.zeros(self.a.file_shape, a.dtype), np.zeros(self.b.file_shape, b.dtype)
        self.a.write(factors[0], a)
        self.b.write(factors[1], b)
        return (factors[1].T, factors[0].T) if self.turned else factors


@functools.lru_cache(maxsize=64)
def sides(leaf: str, p: Param, m: Matrix, rank: int) -> Sides:
    """Find how factors of this rank lie for one tensor of an array."""
    sizes = dict(zip(p.axes.split(), p.shape, strict=True)) | {"rank": rank}
    batch, outputs, inputs = m.cut(p.axes.split())
    experts = batch[len(p.stacked) :]

    def one(axes: list[str], side: Sequence[str], file: str) -> Layout:
        dim = next((d for d in file_dims(p) if {*side} & {*axes_in(d)}), "1")
        shape, file = tuple(sizes[axis] for axis in axes), file.format(dim, " ".join(experts)).strip()
        return layout(Param(" ".join(axes), shape, zeros, p.hf, file, p.part if "[" in dim else None))

    a = one([*experts, "rank", *inputs], inputs, "{1} rank {0}")
    b = one([*experts, *outputs, "rank"], outputs, "{0} rank {1}")
    return Sides(a, b, is_table(leaf) or TURNED in p.hf, len(experts))
