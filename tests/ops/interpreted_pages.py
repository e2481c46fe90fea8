"""A process that interprets the Hopper kernels for pages: prints the largest errors against float64; `race` plants one.

With `latents`, those of the kernel for values that are channels of the keys; else of a row of `CASES`.

Mosaic GPU's interpreter is found in jax's own modules only, and may hang after an error: hence a process of its own.
"""

import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret import params as interpreter
from jax.experimental.pallas import mosaic_gpu

from fdel import ops
from fdel.kernels import paged_attention_gpu as kernel
from fdel.ops.batch import Pages
from tests.ops.paged_cases import Case, Sizes, case

SIZE, WIDTH, SCALE = 64, 4, 0.3


def plant_a_race(every: int) -> None:
    """Leave out one wait in so many: that for the pages, or for the probabilities that latents are multiplied with."""
    wait, calls = mosaic_gpu.barrier_wait, []

    def some(barrier):
        calls.append(barrier)
        if len(calls) % every:
            wait(barrier)

    mosaic_gpu.barrier_wait = some


def stored(x: np.ndarray, format: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Give pages [... page H] in 8 bits, numbers of the greatest's 127th or the bits of e4m3, scales, and what that is.

    Where no token is, scales are NaN, and all bits but the sign are set: in e4m3 NaN.
    """
    top = np.abs(x).max(-1)
    scale = (top / {"int8": 127, "fp8": 448}[format]).astype(np.float32)
    parts = np.nan_to_num(x / scale[..., None]).astype(np.float32)
    kept = np.rint(parts) if format == "int8" else parts.astype(ml_dtypes.float8_e4m3fn)
    held = kept.astype(np.float64) * scale[..., None]
    kept = kept.astype(np.int8) if format == "int8" else kept.view(np.uint8)
    return np.where(np.isnan(top)[..., None], kept.dtype.type(127), kept), scale[:, :, :, None], held


def attended(c: Case, k: np.ndarray, v: np.ndarray, mask: ops.Mask, slopes: np.ndarray) -> np.ndarray:
    """Attend in float64, head by head, to pages [P K page H] as the table names them."""
    q, sinks = (np.asarray(x, np.float64) for x in (c.q, c.sinks))
    out = np.zeros(q.shape)
    for row, position in enumerate(np.asarray(c.batch.positions)):
        pages = np.asarray(c.batch.page_table)[row // c.batch.block].clip(0, len(k) - 1)
        first = max(0, position - (mask.window or position + 1) + 1)
        seen = np.arange(first if mask.chunk is None else max(first, position // mask.chunk * mask.chunk), position + 1)
        for n in range(q.shape[1]):
            keys, values = (x[pages, n * x.shape[1] // q.shape[1]].reshape(-1, q.shape[2])[seen] for x in (k, v))
            s = keys @ q[row, n] * mask.scale
            s = s if mask.softcap is None else mask.softcap * np.tanh(s / mask.softcap)
            s = np.append(s + slopes[n] * (seen - position), sinks[n])
            p = np.exp(s - s.max())
            out[row, n] = (p / p.sum())[:-1] @ values
    return out


def error(
    channels: int, block: int, heads: int, sequences: list, mask: ops.Mask, splits: int,
    sinks: bool, format: str = "", alibi: bool = False,
) -> float:  # fmt: skip
    """Padding may give anything but what is no number."""
    c = case(Sizes(2, channels, 1, SIZE, WIDTH), block, heads, sequences, mask, jnp.bfloat16, sinks)
    k, v = (np.asarray(x, np.float64) for x in (c.cache.k, c.cache.v))
    slopes, cache = 2.0 ** -np.arange(1, heads + 1) * alibi, c.cache
    if format:
        (keys, k_scale, k), (values, v_scale, v) = (stored(x, format) for x in (k, v))
        cache = Pages(*map(jnp.asarray, (keys, values, k_scale, v_scale)))
    call, more = kernel.Call(mask.scale, mask.softcap, splits, True), jnp.asarray(slopes) if alibi else None
    with interpreter.force_gpu_interpret_mode(interpreter.InterpretGPUParams(detect_races=True)):
        got = kernel.attend(c.batch, cache, jnp.int32(1), c.q, mask, c.sinks, call, None, more)
    got = np.asarray(got, np.float64)
    away = np.abs(got - attended(c, k[1], v[1], mask, slopes))
    return float(away[c.real].max()) if np.isfinite(got).all() else np.nan


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
RAGGED, PROMPT, CHUNKS = [(200, 1), (0, 0), (77, 1)], [(100, 30)], ops.Mask(0.1, chunk=48)
LATENTS = [
    (1, 16, RAGGED, ops.Mask(0.1, window=70, softcap=20.0), 2, True), (8, 12, [(250, 7)], ops.Mask(0.1), 1, False),
]  # fmt: skip
# Channels, tokens of a block, query heads, sequences, mask, parts; whether with sinks; format; whether with slopes
CASES: dict[str, list] = {
    "": [(64, 1, 8, RAGGED, LONG, 2, True), (64, 32, 6, PROMPT, SHORT, 1, True, "fp8")],
    "half": [(128, 1, 16, RAGGED, LONG, 2, True), (64, 32, 6, PROMPT, SHORT, 1, True)],
    "int8": [(128, 1, 8, RAGGED, LONG, 2, True, "int8"), (64, 32, 6, PROMPT, SHORT, 1, True, "int8")],
    "fp8": [(64, 1, 8, RAGGED, LONG, 2, True, "fp8"), (128, 16, 6, PROMPT, CHUNKS, 1, False, "fp8")],
    "wide": [(256, 1, 4, RAGGED, LONG, 2, True), (256, 20, 4, PROMPT, CHUNKS, 1, False)],
    "wide8": [(256, 1, 4, RAGGED, LONG, 2, True, "int8"), (256, 20, 4, PROMPT, CHUNKS, 1, False, "fp8")],
    "alibi": [(64, 1, 8, RAGGED, LONG, 2, True, "", True), (128, 12, 12, PROMPT, CHUNKS, 1, False, "fp8", True)],
}


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    race, latent = ("race" in sys.argv), ("latents" in sys.argv)
    kind = "".join(x for x in sys.argv[1:] if x not in ("race", "latents"))
    if race:
        plant_a_race(7 if latent else 2)
    if latent:
        calls = [(1, 4, [(100, 1)], ops.Mask(SCALE), 1, False)] if race else LATENTS
        print(*(latent_error(*x) for x in calls))
    else:
        print(*(error(*x) for x in CASES[kind][: 1 if race else None]))
