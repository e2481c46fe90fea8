"""In which order a TPU keeps the axes of served weights: as kernels and look-ups read them, row after row.

XLA:TPU chooses an order in which little memory is empty, since its innermost axis fills rows of `LANES` numbers: of 128
matrices of 2,880 by 2,880 the axis of matrices. A program that reads rows then copies the whole array first, in every step.
jax.jit takes the order from the arrays, or the shapes, that a function is called with; values are the same.
"""

from typing import Any

import jax
from jax.experimental.layout import Format, Layout
from jax.sharding import Sharding

LANES = 128
EMPTY = 8  # of a row's lanes at most the eighth part is left empty


def order(shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Give the axes of an array on one TPU, the innermost last; None where it is left to XLA.

    Rows that nearly fill lanes stay rows. Where only columns do, as of scales of groups of inputs, these are innermost, and
    matrices stay apart. Where rows fill lanes, XLA leaves the axes as they are; where neither do, any order wastes memory.
    >>> order((128, 2880, 1440)), order((128, 2880, 90)), order((2880, 64, 64)), order((8, 4096, 4096))
    ((0, 1, 2), (0, 2, 1), None, None)
    """
    fill = lambda n: EMPTY * (-n % LANES) <= n + -n % LANES
    if len(shape) < 2 or shape[-1] % LANES == 0:
        return None
    axes = tuple(range(len(shape)))
    if fill(shape[-1]):
        return axes
    return (*axes[:-2], axes[-1], axes[-2]) if len(shape) > 2 and fill(shape[-2]) else None


def on_tpu(sharding: Sharding) -> bool:
    """Tell whether arrays with this sharding lie on TPUs."""
    devices: set[Any] = sharding.device_set
    return next(iter(devices)).platform == "tpu"


def laid(tree: Any) -> Any:
    """Lay arrays out in that order where they lie on TPUs: the others are copied. Shapes with shardings, too."""
    return jax.tree.map(_laid, tree)


def _laid(x: Any) -> Any:
    known = isinstance(x, jax.Array | jax.ShapeDtypeStruct)  # not of the host
    axes = order(x.sharding.shard_shape(x.shape)) if known and on_tpu(x.sharding) else None
    if axes is None:
        return x
    at = Format(Layout(axes), x.sharding)
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)
    return x if x.format.layout.major_to_minor == axes else jax.device_put(x, at)


def placement(x: jax.ShapeDtypeStruct) -> Any:
    """Say where an array like this is put: its sharding, with the order of axes unless that is left to XLA."""
    return x.sharding if x.format.layout is None else x.format
