"""A process that interprets the Hopper kernels for `ops.ssd`: prints the largest errors against float64.

`forward` or `gradient`, of the first so many cases, with a detector of races, of which `race` plants one; see
`interpreted_pages`. An error is relative to the largest number of its row, of gradients to the largest of each.
"""

import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret import params as interpreter
from jax.experimental.pallas import mosaic_gpu

from fdel.kernels import ssd_backward_gpu, ssd_gpu
from fdel.ops.batch import Packed


class Drawn(NamedTuple):
    """Heads, channels, groups and states; tokens, and the places of sequences among those of the first row."""

    heads: int
    channels: int
    groups: int
    states: int
    tokens: int
    places: tuple[tuple[int, int], ...]


CASES = [
    Drawn(2, 64, 1, 128, 150, ((0, 70), (73, 74), (74, 140))),  # as in Mamba-2; one goes on in two chunks of 64
    Drawn(2, 64, 2, 192, 64, ((3, 60),)),  # states in parts of 64
    Drawn(2, 128, 2, 128, 100, ((0, 64), (64, 100))),
]


def drawn(c: Drawn) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """Segments [2 T], and x, dt, a, b, c, d and a cotangent; the second row's steps are extreme: 0, or nothing stays."""
    r, t = np.random.default_rng(0), c.tokens
    segments = np.full((2, t), -1, np.int32)
    segments[1] = 7
    for i, (start, end) in enumerate(c.places):
        segments[0, start:end] = i
    dt = np.exp(r.normal(size=(2, t, c.heads)) - 2)
    dt[1][r.random((t, c.heads)) < 0.1], dt[1][r.random((t, c.heads)) < 0.05] = 0, 1000
    of_heads, of_groups = (2, t, c.heads, c.channels), (2, t, c.groups, c.states)
    half = lambda shape, scale=1.0: np.asarray(jnp.asarray(r.normal(size=shape) * scale, jnp.bfloat16), np.float64)
    a, d = -np.exp(r.normal(size=c.heads)), r.normal(size=c.heads)
    single = lambda x: np.asarray(x, np.float32).astype(np.float64)
    x, b, key, dy = half(of_heads), half(of_groups, c.states**-0.5), half(of_groups), half(of_heads)
    return segments, (x, single(dt), single(a), b, key, single(d), dy)


def recurrence(segments, x, dt, a, b, c, d):
    """Token by token, in the inputs' dtype; padding gives 0."""

    def step(state, token):
        x, dt, b, c, start, valid = token
        b, c = (jnp.repeat(y, len(a) // len(y), 0) for y in (b, c))
        new = jnp.exp(dt * a)[:, None, None] * jnp.where(start, 0, state) + (dt[:, None] * x)[..., None] * b[:, None]
        y = jnp.einsum("nhs,ns->nh", new, c) + d[:, None] * x
        return jnp.where(valid, new, state), jnp.where(valid, y, 0)

    starts = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    zero = jnp.zeros((*x.shape[2:], b.shape[-1]), x.dtype)
    return jax.vmap(lambda *row: jax.lax.scan(step, zero, row)[1])(x, dt, b, c, starts, segments >= 0)


def errors(case: Drawn, backward: bool) -> list[float]:
    """Of both rows, or of the gradients of x, dt, a, b, c and d; padding holds NaN."""
    segments, (*inputs, dy) = drawn(case)
    with jax.enable_x64(True):
        want, vjp = jax.vjp(lambda *x: recurrence(jnp.asarray(segments), *x), *map(jnp.asarray, inputs))
        real = (segments >= 0)[..., None, None]
        want = [np.asarray(y) for y in (vjp(jnp.asarray(dy * real)) if backward else want)]
    pad = lambda x: np.where(segments.reshape(*segments.shape, *[1] * (x.ndim - 2)) < 0, np.nan, x) if x.ndim > 1 else x
    given = [jnp.asarray(pad(x), jnp.bfloat16 if x.ndim > 3 else jnp.float32) for x in (*inputs, dy)]
    batch = Packed(jnp.zeros(segments.shape, int), jnp.asarray(segments))
    with interpreter.force_gpu_interpret_mode(interpreter.InterpretGPUParams(detect_races=True)):
        call = lambda *x: ssd_gpu.in_parts(True, batch, *x)
        got = jax.vjp(call, *given[:-1])[1](given[-1]) if backward else call(*given[:-1])
    far = lambda x, y: float(np.abs(np.asarray(x, np.float64) - y).max() / np.abs(y).max())  # NaN if any number is
    return [far(x, y) for x, y in zip(got, want, strict=True)]


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)  # threads, of which each group of warps that waits holds one
    ssd_backward_gpu.PROGRAMS = 2  # so that a group's columns are not divided more than in a batch of some size
    if sys.argv[1] == "race":
        mosaic_gpu.barrier_wait = lambda barrier: None  # no copy is waited for
        print(errors(CASES[1], False))
    else:
        some = CASES[: int(sys.argv[2])] if len(sys.argv) > 2 else CASES
        print(*(max(errors(case, sys.argv[1] == "gradient")) for case in some))
