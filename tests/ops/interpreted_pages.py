"""A process that interprets the Hopper kernels for pages: prints the largest errors against float64; `race` plants one.

With `latents`, those of the kernel for values that are channels of the keys; else of a row of `CASES`.

Mosaic GPU's interpreter is found in jax's own modules only, and may hang after an error: hence a process of its own.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret import params as interpreter
from jax.experimental.pallas import mosaic_gpu

from fdel import ops
from fdel.kernels import paged_attention_gpu as kernel
from tests.ops.paged_cases import Sizes, case

SIZE, WIDTH, SCALE = 64, 4, 0.3
of: Callable = lambda channels: Sizes(2, channels, 1, SIZE, WIDTH)


def plant_a_race(every: int) -> None:
    """Leave out one wait in so many: that for the pages, or for the probabilities that latents are multiplied with."""
    wait, calls = mosaic_gpu.barrier_wait, []

    def some(barrier):
        calls.append(barrier)
        if len(calls) % every:
            wait(barrier)

    mosaic_gpu.barrier_wait = some


def error(
    sizes: Sizes, block: int, heads: int, sequences: list, mask: ops.Mask, splits: int, sinks: bool, **how: Any
) -> float:
    """Padding may give anything but what is no number."""
    c = case(sizes, block, heads, sequences, mask, jnp.bfloat16, sinks, **how)
    slopes = c.slopes if how.get("alibi") else None
    call = kernel.Call(mask.scale, mask.softcap, splits, True)
    with interpreter.force_gpu_interpret_mode(interpreter.InterpretGPUParams(detect_races=True)):
        got = kernel.attend(c.batch, c.cache, jnp.int32(1), c.q, mask, c.sinks, call, None, slopes)
    got = np.asarray(got, np.float64)
    return float(np.abs(got - c.want)[c.real].max()) if np.isfinite(got).all() else np.nan


def latent_error(block: int, heads: int, sequences: list, mask: ops.Mask, splits: int, sinks: bool) -> float:
    """Latents of 128 + 64 channels; else as `error`."""
    c = case(Sizes(1, 192, 1, SIZE, WIDTH, 128), block, heads, sequences, mask, jnp.bfloat16, sinks)
    cache = replace(c.cache, k=c.cache.k[..., :192])  # rows of whole registers are TPUs'
    how = kernel.Call(mask.scale, mask.softcap, splits, True)
    with interpreter.force_gpu_interpret_mode(interpreter.InterpretGPUParams(detect_races=True)):
        got = kernel.attend(c.batch, cache, jnp.int32(1), c.q, mask, c.sinks, how, 128)
    got = np.asarray(got, np.float64)
    return float(np.abs(got - c.want)[c.real].max()) if np.isfinite(got).all() else np.nan


LONG, SHORT = ops.Mask(SCALE, window=70, softcap=20.0), ops.Mask(SCALE, window=50, softcap=20.0)
RAGGED = [(200, 1), (0, 0), (77, 1)]
CASES: dict[str, list] = {  # a cache, tokens of a block, query heads, sequences, mask, parts; whether there are sinks
    "": [(of(64), 1, 8, RAGGED, LONG, 2, True), (of(64), 32, 6, [(100, 30)], SHORT, 1, True)],
    "int8": [(of(128), 1, 8, RAGGED, LONG, 2, True), (of(64), 32, 6, [(100, 30)], SHORT, 1, True)],
    "fp8": [(of(64), 1, 8, RAGGED, LONG, 2, True), (of(128), 16, 6, [(100, 14)], ops.Mask(0.1), 1, False)],
    "wide": [(of(256), 1, 4, RAGGED, LONG, 2, True), (of(256), 20, 4, [(90, 18)], ops.Mask(0.1), 1, False)],
    "alibi": [(of(64), 1, 8, RAGGED, LONG, 2, True), (of(64), 12, 6, [(100, 30)], ops.Mask(0.1, chunk=48), 1, False)],
    "wide int8": [(of(256), 1, 4, RAGGED, LONG, 2, True), (of(256), 20, 4, [(90, 18)], ops.Mask(0.1), 1, False)],
}


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    words = sys.argv[1:]
    if "race" in words:
        plant_a_race(7 if "latents" in words else 2)
    kind = " ".join(x for x in words if x not in ("race", "latents"))
    more = {"format": next((x for x in ("int8", "fp8") if x in words), None), "alibi": "alibi" in words}
    if "latents" in words and "race" in words:
        print(latent_error(1, 4, [(100, 1)], ops.Mask(SCALE), 1, False))
    elif "latents" in words:
        print(latent_error(1, 16, RAGGED, ops.Mask(0.1, window=70, softcap=20.0), 2, True),
              latent_error(8, 12, [(250, 7)], ops.Mask(0.1), 1, False))  # fmt: skip
    else:
        print(*(error(*x, **more) for x in CASES[kind][: 1 if "race" in words else None]))
