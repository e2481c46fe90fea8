"""A process that interprets the Hopper kernels for pages: prints the largest errors against float64; `race` plants one.

With `latents`, those of the kernel for values that are channels of the keys.

Mosaic GPU's interpreter is found in jax's own modules only, and may hang after an error: hence a process of its own.
"""

import sys
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret import params as interpreter
from jax.experimental.pallas import mosaic_gpu

from fdel import ops
from fdel.kernels import paged_attention_gpu as kernel
from fdel.ops.batch import Paged, Pages
from tests.ops.paged_cases import Sizes, case

K, H, SIZE, WIDTH, SCALE = 2, 64, 64, 4, 0.3


def plant_a_race(every: int) -> None:
    """Leave out one wait in so many: that for the values, or for the probabilities that they are multiplied with."""
    wait, calls = mosaic_gpu.barrier_wait, []

    def some(barrier):
        calls.append(barrier)
        if len(calls) % every:
            wait(barrier)

    mosaic_gpu.barrier_wait = some


def formula(q, k, v, position: int, window: int, softcap: float, sink: float) -> np.ndarray:
    """Attend from one head of one token to its sequence's keys and values [tokens H], in float64."""
    seen = slice(max(0, position - window + 1), position + 1)
    s = np.concatenate([softcap * np.tanh(k[seen] @ q * SCALE / softcap), [sink]])
    p = np.exp(s - s.max())
    return (p / p.sum())[:-1] @ v[seen]


def error(block: int, heads: int, sequences: list, window: int, softcap: float, splits: int) -> float:
    """Sequences of (length, new tokens); NaN fills pages and tails without tokens, a huge key stands before windows."""
    r = np.random.default_rng(0)
    total = len(sequences) * WIDTH + 2
    draw: Callable = lambda *shape: np.array(jnp.asarray(r.normal(size=shape), jnp.bfloat16), np.float64)
    k, v = (np.full((2, total, K, SIZE, H), np.nan) for _ in range(2))
    table, free = np.full((len(sequences), WIDTH), total), iter(r.permutation(total))
    positions, past = np.full((len(sequences), block), -1), []
    for i, (length, new) in enumerate(sequences):
        keys, values = draw(length, K, H), draw(length, K, H)
        if length > window + new:
            keys[length - window - new] = 1e4
        past.append((keys, values))
        positions[i, :new] = np.arange(length - new, length)
        for j in range(-(-length // SIZE)):
            table[i, j], part = next(free), slice(j * SIZE, (j + 1) * SIZE)
            for pages, x in ((k, keys[part]), (v, values[part])):
                pages[1, table[i, j], :, : len(x)] = x.swapaxes(0, 1)
    q, sinks = draw(len(sequences) * block, heads, H), r.normal(size=heads).astype(np.float32)
    want = np.zeros(q.shape)
    for i, (length, new) in enumerate(sequences):
        for t in range(new):
            for n in range(heads):
                keys, values = (x[:, n * K // heads] for x in past[i])
                row = i * block + t
                want[row, n] = formula(q[row, n], keys, values, length - new + t, window, softcap, sinks[n])
    ints = lambda x: jnp.asarray(x, jnp.int32)
    batch = Paged(ints(positions.reshape(-1)), ints(table), jnp.arange(len(sequences)), block)
    k, v, q = (jnp.asarray(x, jnp.bfloat16) for x in (k, v, q))
    mask, how = ops.Mask(SCALE, window=window, softcap=softcap), kernel.Call(SCALE, softcap, splits, True)
    with interpreter.force_gpu_interpret_mode(interpreter.InterpretGPUParams(detect_races=True)):
        got = kernel.attend(batch, Pages(k, v), jnp.int32(1), q, mask, jnp.asarray(sinks), how)
    return float(np.abs(np.asarray(got, np.float64) - want).max())  # NaN if any number is


def latent_error(block: int, heads: int, sequences: list, mask: ops.Mask, splits: int, sinks: bool) -> float:
    """Latents of 128 + 64 channels; NaN and a huge key as in `error`. Padding may give anything but what is no number."""
    c = case(Sizes(1, 192, 1, SIZE, WIDTH, 128), block, heads, sequences, mask, jnp.bfloat16, sinks)
    cache = replace(c.cache, k=c.cache.k[..., :192])  # rows of whole registers are TPUs'
    how = kernel.Call(mask.scale, mask.softcap, splits, True)
    with interpreter.force_gpu_interpret_mode(interpreter.InterpretGPUParams(detect_races=True)):
        got = kernel.attend(c.batch, cache, jnp.int32(1), c.q, mask, c.sinks, how, 128)
    got = np.asarray(got, np.float64)
    return float(np.abs(got - c.want)[c.real].max()) if np.isfinite(got).all() else np.nan


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    if "race" in sys.argv:
        if "latents" in sys.argv:
            plant_a_race(7)
            print(latent_error(1, 4, [(100, 1)], ops.Mask(SCALE), 1, False))
        else:
            plant_a_race(5)
            print(error(1, 4, [(100, 1)], 1000, 20.0, 1))
    elif "latents" in sys.argv:
        print(latent_error(1, 16, [(200, 1), (0, 0), (77, 1)], ops.Mask(0.1, window=70, softcap=20.0), 2, True),
              latent_error(8, 12, [(250, 7)], ops.Mask(0.1), 1, False))  # fmt: skip
    else:
        print(error(1, 8, [(200, 1), (0, 0), (77, 1)], 70, 20.0, 2), error(32, 6, [(100, 30)], 50, 20.0, 1))
