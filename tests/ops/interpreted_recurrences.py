"""A process that interprets the Hopper kernel for the delta rule: prints the largest errors against float64; `race` plants one.

See `interpreted_pages`.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret import params as interpreter
from jax.experimental.pallas import mosaic_gpu

from fdel.kernels import gated_delta_rule_gpu as kernel
from fdel.ops.batch import Packed
from tests.ops.test_recurrences_tpu import H, N, SEGMENTS, delta_inputs, delta_step, error, recurrence


def delta() -> float:
    """Relative to the largest number; see `delta_inputs`."""
    inputs = delta_inputs((), jnp.bfloat16)
    batch = Packed(jnp.zeros(SEGMENTS.shape, int), jnp.asarray(SEGMENTS))
    with interpreter.force_gpu_interpret_mode(interpreter.InterpretGPUParams(detect_races=True)):
        got = kernel.rule(batch, *inputs)
    return error(got, recurrence(delta_step, (N, H, H), inputs))


def plant_a_race() -> None:
    """Leave out the wait for what is prepared of a chunk."""
    wait, calls = mosaic_gpu.barrier_wait, []

    def some(barrier):
        calls.append(barrier)
        if len(calls) % 4 != 3:  # full, full, ready, free
            wait(barrier)

    mosaic_gpu.barrier_wait = some


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    if "race" in sys.argv:
        plant_a_race()
    print(delta())
