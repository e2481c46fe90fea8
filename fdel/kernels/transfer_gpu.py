"""Between memory and registers on NVIDIA GPUs: one form for versions of jax that ask for different ones."""

import inspect
from typing import Any

from jaxtyping import Array

COPIED = 8  # rows of a tiled reference that TMA copies together; begun elsewhere, it leaves out those in the next tile


def load(ref: Any, layout: Any = None, *, optimized: bool = True) -> Array:
    """Read all of a reference to registers, in a layout of Mosaic GPU's.

    Without `optimized`, also where its threads read less than 32 bytes side by side, or the same bank at once.
    """
    from jax.experimental.pallas import mosaic_gpu as gpu

    index = inspect.signature(gpu.load).parameters.get("idx")  # of all, which jax 0.10 asks for and 0.11 warns of
    asked = index is not None and index.default is inspect.Parameter.empty
    return gpu.load(ref, *[()] * asked, layout=layout, optimized=optimized)


def store(ref: Any, value: Array) -> None:
    """Write registers to a reference where threads write less than 32 bytes side by side, or the same bank at once.

    From jax 0.12 on that has to be asked for.
    """
    from jax.experimental.pallas import mosaic_gpu as gpu

    if hasattr(gpu, "store"):
        gpu.store(ref, value, optimized=False)
    else:
        ref[...] = value
