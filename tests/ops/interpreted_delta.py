"""A process that interprets the Hopper kernel for the delta rule: prints the largest error against float64.

`race` plants one. `channels`: with a decay of each key channel. `near`: keys that are nearly equal, with which the inverse
of a chunk is hardest. See `interpreted_pages`.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret import params as interpreter
from jax.experimental.pallas import mosaic_gpu

from fdel.kernels import gated_delta_rule_gpu as kernel
from fdel.ops.batch import Packed
from tests.ops.test_recurrences_tpu import SEGMENTS, H, N, delta_inputs, delta_loss, delta_step, error, recurrence

CHANNELS = (H,) if "channels" in sys.argv else ()


def drawn(near: bool) -> tuple:
    """Two rows with sequences that end inside of chunks and NaN in padding, the second extreme; see `delta_inputs`."""
    q, k, v, g, beta = delta_inputs(CHANNELS, jnp.bfloat16)
    if near:
        noise = np.asarray(k, np.float64)
        noise = 0.3 * noise + noise[1, 0, 0]
        k = jnp.asarray(noise / np.linalg.norm(noise, axis=-1, keepdims=True), k.dtype)
        g, beta = jnp.where(jnp.isnan(g), g, -0.01), jnp.where(jnp.isnan(beta), beta, 1.0)
    return q, k, v, g, beta


def delta(near: bool) -> float:
    """Relative to the largest number."""
    inputs = drawn(near)
    batch = Packed(jnp.zeros(SEGMENTS.shape, int), jnp.asarray(SEGMENTS))
    with interpreter.force_gpu_interpret_mode(interpreter.InterpretGPUParams(detect_races=True)):
        got = kernel.rule(True, batch, *inputs)
    return error(got, recurrence(delta_step, (N, H, H), inputs))


def gradient() -> list[float]:
    """Of q, k, v, g and beta, each relative to its largest; weights of padding are NaN, too."""
    inputs, batch = drawn(False), Packed(jnp.zeros(SEGMENTS.shape, int), jnp.asarray(SEGMENTS))
    weights = jnp.asarray(np.random.default_rng(1).normal(size=inputs[2].shape), jnp.bfloat16)
    with jax.enable_x64(True):
        exact = [jnp.asarray(np.nan_to_num(np.asarray(x, np.float64))) for x in (*inputs, weights)]
        want = jax.jit(jax.grad(delta_loss, range(5)))(*exact, jnp.asarray(SEGMENTS))
        want = [np.asarray(x) for x in want]
    weights = jnp.where(jnp.asarray(SEGMENTS)[..., None, None] < 0, jnp.nan, weights)
    with interpreter.force_gpu_interpret_mode(interpreter.InterpretGPUParams(detect_races=True)):
        got = jax.vjp(lambda *x: kernel.rule(True, batch, *x), *inputs)[1](weights)
    return [error(a, b) for a, b in zip(got, want, strict=True)]


def plant_a_race() -> None:
    """Leave out one walker's wait for what is prepared of a chunk.

    In the order of tracing it is the third: copied, of those who prepare; copied, prepared, free, of the first walker; ...
    Where a kernel of its own prepares, it waits first.
    """
    wait, calls, left_out = mosaic_gpu.barrier_wait, [], 4 if CHANNELS else 3

    def some(barrier):
        calls.append(barrier)
        if len(calls) != left_out:
            wait(barrier)

    mosaic_gpu.barrier_wait = some


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)  # threads, of which each group of warps that waits holds one
    if "race" in sys.argv:
        plant_a_race()
    print(*gradient() if "gradient" in sys.argv else [delta("near" in sys.argv)])
