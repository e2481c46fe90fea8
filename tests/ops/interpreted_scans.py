"""A process that interprets the Hopper kernels for selective scans: prints the largest errors against float64.

`forward` or `gradient`, with a detector of races, of which `race` plants one; see `interpreted_pages`.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu

from fdel.kernels import selective_scan_gpu as kernel
from fdel.ops.batch import Packed
from tests.ops import test_recurrences_tpu as cases
from tests.ops.interpreted_products import interpreted


def scan(inputs, segments=cases.SEGMENTS):
    batch = Packed(jnp.zeros(segments.shape, int), jnp.asarray(segments))
    x, dt, b, c = inputs
    a, d = jnp.asarray(cases.RATES, jnp.float32), jnp.asarray(cases.SKIP, jnp.float32)
    with interpreted():
        return kernel.call(batch, None, 0, x, dt, a, b, c, d=d)[0]


def forward(dtype) -> float:
    """Relative to the largest number."""
    inputs = cases.scan_inputs(dtype)
    want = cases.recurrence(cases.scan_step, (cases.WIDE, cases.STATES), inputs)
    return cases.error(scan(inputs), want)


def plant_a_race() -> None:
    """Leave out the wait for a tile."""
    wait, calls = mosaic_gpu.barrier_wait, []

    def some(barrier):
        calls.append(barrier)
        if len(calls) % 2:
            wait(barrier)

    mosaic_gpu.barrier_wait = lambda barrier: None


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    if sys.argv[1] == "race":
        plant_a_race()
        print(forward(jnp.float32))
    elif sys.argv[1] == "forward":
        print(forward(jnp.float32), forward(jnp.bfloat16))
