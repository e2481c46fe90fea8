"""A process that interprets the Hopper kernels for selective scans: prints the largest errors against float64.

`forward` or `gradient`, with a detector of races, of which `race` plants one; see `interpreted_pages`.
"""

import sys

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu

from fdel.kernels import selective_scan_gpu as kernel
from fdel.ops.batch import Packed
from tests.ops import test_recurrences_tpu as cases
from tests.ops.interpreted_products import interpreted

# Sequences that end inside of chunks, one that goes on in the next; the second row is one of extreme steps.
cases.T, cases.SEGMENTS = 50, cases.SEGMENTS[:, 45:95]


def scan(inputs):
    batch = Packed(jnp.zeros(cases.SEGMENTS.shape, int), jnp.asarray(cases.SEGMENTS))
    x, dt, b, c = inputs
    a, d = jnp.asarray(cases.RATES, jnp.float32), jnp.asarray(cases.SKIP, jnp.float32)
    with interpreted():
        return kernel.call(batch, None, 0, x, dt, a, b, c, d=d)[0]


def forward(dtype) -> float:
    """Relative to the largest number."""
    inputs = cases.scan_inputs(dtype)
    want = cases.recurrence(cases.scan_step, (cases.WIDE, cases.STATES), inputs, cases.SEGMENTS)
    return cases.error(scan(inputs), want)


def gradient(dtype) -> float:
    """Of x, dt, a, b, c and d, relative to the largest number of each."""
    with interpreted():
        return max(cases.scan_gradient_errors(cases.SEGMENTS, dtype, impl="hopper", platform="gpu"))


def plant_a_race(backward: bool) -> None:
    """Leave out the waits for chunks; in the gradient's own program that for the states before them, one barrier."""
    wait = mosaic_gpu.barrier_wait
    of_several = lambda barrier: hasattr(barrier, "transforms")
    mosaic_gpu.barrier_wait = lambda barrier: wait(barrier) if backward and of_several(barrier) else None


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    if sys.argv[1] == "race":
        plant_a_race("gradient" in sys.argv)
    run = gradient if "gradient" in sys.argv else forward
    names = [name for name in sys.argv if name in ("float32", "bfloat16")]
    print(*(run(jnp.dtype(name)) for name in names))
