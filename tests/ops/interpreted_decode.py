"""A process that interprets the Hopper kernels for a decode step of recurrences: prints errors against float64.

`delta`, `ssd` and `scan`, each of outputs and states relative to the largest number, with a detector of races, of which
`race` plants one; `few`: the first case of each. See `interpreted_pages`.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret import params as interpreter
from jax.experimental.pallas import mosaic_gpu

from fdel import ops
from fdel.ops.batch import Paged, Slots, State
from fdel.ops.carry import Carry
from fdel.ops.platform import tracing_for

# Of tokens: one that goes on, one that begins where NaN is left, padding, slots that are none, and another.
ROWS, POSITIONS, SLOTS = (3, 5, 1, 7, -1, 0), (4, 0, -1, 9, 2, 11), 7
USED, NEW = np.array([0, 1, 5]), np.array([False, True, False])
CASES: dict[str, list[tuple[str, tuple]]] = {  # dtypes, and sizes
    "delta": [("bfloat16", (2, 32, 128, ())), ("float32", (1, 16, 256, (16,)))],  # heads, keys, values, gates
    "ssd": [("bfloat16", (2, 64, 2, 32)), ("float32", (1, 128, 1, 256))],  # heads, channels, groups, states
    "scan": [("bfloat16", (64, 16)), ("float32", (128, 32))],  # channels, states
}


def delta(r: np.random.Generator, t: int, heads: int, keys: int, values: int, gate: tuple[int, ...]) -> tuple:
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in r.normal(size=(2, t, heads, keys)))
    g, beta = -np.exp(r.normal(size=(t, heads, *gate))), r.uniform(0, 1, (t, heads))

    def step(state, q, k, v, g, beta):
        state = state * np.exp(g).reshape(t, heads, -1, 1)
        state = state + k[..., None] * (beta[..., None] * (v - np.einsum("tnk,tnkv->tnv", k, state)))[..., None, :]
        return state, np.einsum("tnk,tnkv->tnv", q, state)

    return (heads, keys, values), (q, k, r.normal(size=(t, heads, values)), g, beta), (3, 4), {}, step


def ssd(r: np.random.Generator, t: int, heads: int, channels: int, groups: int, states: int) -> tuple:
    a, d = (np.float32(x).astype(float) for x in (-r.uniform(0.1, 4, heads), r.normal(size=heads)))
    x, (b, c) = r.normal(size=(t, heads, channels)), r.normal(size=(2, t, groups, states))

    def step(state, x, dt, b, c):
        b, c = (np.repeat(y, heads // groups, 1) for y in (b, c))
        state = state * np.exp(dt * a)[..., None, None] + (dt[..., None] * x)[..., None] * b[:, :, None]
        return state, np.einsum("tnhs,tns->tnh", state, c) + d[:, None] * x

    return (heads, channels, states), (x, np.exp(r.normal(size=(t, heads)) - 2), b, c), (1,), {"a": a, "d": d}, step


def scan(r: np.random.Generator, t: int, channels: int, states: int) -> tuple:
    a, d = (np.float32(x).astype(float) for x in (-np.exp(r.normal(size=(channels, states))), r.normal(size=channels)))
    x, (b, c) = r.normal(size=(t, channels)), r.normal(size=(2, t, states))

    def step(state, x, dt, b, c):
        state = state * np.exp(dt[..., None] * a) + (dt * x)[..., None] * b[:, None]
        return state, np.einsum("tcs,ts->tc", state, c) + d * x

    return (channels, states), (x, np.exp(r.normal(size=(t, channels)) - 2), b, c), (1,), {"a": a, "d": d}, step


def errors(kind: str, dtype: str, sizes: tuple) -> list[float]:
    """Of outputs and states in layer 1 of 2; all that is not to be touched holds NaN, as do the inputs of no tokens."""
    r, t = np.random.default_rng(0), len(ROWS)
    shape, inputs, floats, rest, step = {"delta": delta, "ssd": ssd, "scan": scan}[kind](r, t, *sizes)
    used = np.zeros(t, bool)
    used[USED] = True
    fill = lambda x: np.where(used.reshape(t, *[1] * (x.ndim - 1)), x, np.nan)
    given = [jnp.asarray(fill(x), jnp.float32 if i in floats else dtype) for i, x in enumerate(inputs)]
    states = np.full((2, SLOTS, *shape), np.nan, np.float32)
    begun = np.zeros((t, *shape))
    for i in USED[~NEW]:
        begun[i] = states[1, ROWS[i]] = r.normal(size=shape).astype(np.float32)
    want = [x[USED] for x in step(begun, *(np.asarray(x, float) for x in given))]
    batch = Paged(jnp.asarray(POSITIONS), jnp.zeros((t, 1), int), jnp.asarray(ROWS), 1)
    op = {"delta": "gated_delta_rule", "ssd": "ssd", "scan": "selective_scan"}[kind]
    if rest:
        given.insert(2, jnp.asarray(rest["a"], jnp.float32))
    skip = {"d": jnp.asarray(rest["d"], jnp.float32)} if rest else {}
    call = lambda states: getattr(ops, op)(batch, Carry(State(slots=Slots(None, states))), 1, *given, **skip)
    with tracing_for("gpu"), ops.use(**{op: "hopper"}):
        with interpreter.force_gpu_interpret_mode(interpreter.InterpretGPUParams(detect_races=True)):
            y, carry = call(jnp.asarray(states))
    y, new = np.asarray(y, float), np.asarray(carry.slots.ssm, float)
    if (y[~used] != 0).any():
        raise RuntimeError(f"outputs of no tokens are not 0: {y[~used]}")
    kept = np.ones(states.shape[:2], bool)
    kept[1, np.asarray(ROWS)[USED]] = False
    if not np.isnan(new[kept]).all():
        raise RuntimeError("other slots were written")
    far = lambda got, want: float(np.abs(got - want).max() / np.abs(want).max())  # NaN if any number is
    return [far(y[USED], want[1]), far(new[1, np.asarray(ROWS)[USED]], want[0])]


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    if "race" in sys.argv:
        mosaic_gpu.barrier_wait = lambda barrier: None  # no copy is waited for
    kinds = [kind for kind in CASES if kind in sys.argv]
    cases = [(kind, *case) for kind in kinds for case in CASES[kind][: 1 if "few" in sys.argv else None]]
    print(*(x for case in cases for x in errors(*case)))
