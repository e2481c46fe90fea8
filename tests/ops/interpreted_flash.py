"""A process that interprets the Hopper kernel for attention in training batches: prints the largest errors against float64.

`race` plants one; a number chooses one of `flash_cases.OUTPUTS`. See `interpreted_pages`.
"""

import sys

import jax
from jax._src.pallas.mosaic_gpu.interpret import params as interpreter
from jax.experimental.pallas import mosaic_gpu

from fdel.kernels import flash_attention_gpu as kernel
from fdel.ops.mask import Mask
from tests.ops.flash_cases import OUTPUTS, Case, error


def plant_a_race() -> None:
    """Leave out the wait for the values of the first tile: the fifth, in the order of tracing."""
    wait, calls = mosaic_gpu.barrier_wait, []

    def some(barrier):
        calls.append(barrier)
        if (
            len(calls) != 5
        ):  # of who copies: keys, values free; of who multiplies: queries, keys, values, then the loop's
            wait(barrier)

    mosaic_gpu.barrier_wait = some


def forward(*args):
    """Call the kernel, with a detector of races."""
    with interpreter.force_gpu_interpret_mode(interpreter.InterpretGPUParams(detect_races=True)):
        return kernel.forward(*args, interpreted=True)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    if "race" in sys.argv:
        plant_a_race()
        print(*error(Case(Mask(0.3), 128, 400, heads=(1, 1), lengths=((400,),), starts=(272, 0)), forward))
    else:
        for case in [OUTPUTS[int(n)] for n in sys.argv[1:]] or OUTPUTS:
            print(*error(case, forward), flush=True)
