"""A process that interprets the Hopper kernels for prompts in an engine's blocks: prints errors against float64.

`ssd`, `delta`, `channels` (a delta rule with a decay of each) and `scan`: of outputs and states of sequences that come in
pieces, with others' between them, relative to the largest number, with a detector of races, of which `race` plants one;
`few`: one call or two. `shared`: of a scan against the reference, of sequences that follow each other in a slot, and of
slots that are none. See `interpreted_pages`.
"""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret import params as interpreter
from jax.experimental.pallas import mosaic_gpu

from fdel import ops
from fdel.kernels import delta_slots_gpu, scan_slots_gpu, ssd_slots_gpu
from fdel.ops.batch import Paged, Slots, State
from fdel.ops.carry import Carry
from tests.ops import test_recurrences_paged_tpu as cases
from tests.ops.interpreted_delta import plant_a_race

# Blocks of 32 and 64: pieces shorter than one, of several chunks, none at all, one between others'.
FEW = [(32, 160, [(0, 70), (1, 5)])]
CALLS = {
    "few": [*FEW, (16, 64, [(1, 20), (0, 3)])],
    "dear": [*FEW, (32, 96, []), (16, 64, [(1, 20), (0, 3)]), (64, 192, [(2, 66), (0, 20)])],
    "all": [*FEW, (32, 96, []), (32, 224, [(1, 40), (0, 33), (2, 1)]), (64, 192, [(2, 66)]), (16, 64, [(2, 17), (1, 3)])],
    "scans": [(32, 96, [(0, 37), (1, 5)]), (64, 128, [(2, 40)]), (32, 64, []), (16, 80, [(1, 20), (0, 3), (2, 9)]),
              (8, 40, [(2, 9), (0, 10)])],
}  # fmt: skip
SSDS, SCANS = ([(2, 128), (1, 192)], [(1, 64)]), ([(256, 16), (128, 32)], [(128, 16)])  # by whether there are few


def ssd_case(heads: int, states: int) -> cases.Case:
    """Heads of 64 channels in two groups, if they can be."""
    groups = min(heads, 2)
    share, a, d = heads // groups, cases.A[:heads], cases.D[:heads]

    def inputs(r, t: int) -> tuple[np.ndarray, ...]:
        b, c = r.normal(size=(2, t, groups, states))
        return r.normal(size=(t, heads, 64)), np.exp(r.normal(size=(t, heads)) - 2), b / states**0.5, c

    def step(state, x, dt, b, c):
        b, c = (np.repeat(y, share, 0) for y in (b, c))
        state = state * np.exp(dt * a)[:, None, None] + (dt[:, None] * x)[..., None] * b[:, None]
        return state, np.einsum("nhs,ns->nh", state, c) + d[:, None] * x

    return cases.Case("ssd", inputs, step, (heads, 64, states), (1,), (a, d))


def scan_case(channels: int, states: int) -> cases.Case:
    """One or two programs for each sequence, one or two calls."""
    r = np.random.default_rng(7)
    a, d = -np.exp(r.normal(size=(channels, states))), r.normal(size=channels)
    a, d = (np.float32(x).astype(float) for x in (a, d))

    def inputs(r, t: int) -> tuple[np.ndarray, ...]:
        return r.normal(size=(t, channels)), np.exp(r.normal(size=(t, channels)) - 2), *r.normal(size=(2, t, states))

    def step(state, x, dt, b, c):
        state = np.exp(dt[:, None] * a) * state + (dt * x)[:, None] * b
        return state, state @ c + d * x

    return cases.Case("selective_scan", inputs, step, (channels, states), (1,), (a, d))


def delta_case(heads: int, gate: tuple[int, ...]) -> cases.Case:
    """Heads of 128 and 128 channels, with a decay of each, or of each of its channels."""
    cases.N = heads
    return cases.Case(
        "gated_delta_rule", lambda r, t: cases.delta_inputs(r, t, gate), cases.delta_step, (heads, 128, 128), (3, 4)
    )


def run(case: str, impl: str, batch, states, inputs):
    """Call the kernel in layer 1, in place of what compiles one."""
    carry, (a, d) = Carry(State(slots=Slots(None, states))), (None, None)
    if rest := cases.CASES[case].rest:
        a, d = (jnp.asarray(x, jnp.float32) for x in rest)
    call = {
        "ssd": lambda x, dt, b, c: ssd_slots_gpu.call(True, batch, carry, 1, x, dt, a, b, c, d),
        "selective_scan": lambda x, dt, b, c: scan_slots_gpu.call(batch, carry, 1, x, dt, a, b, c, d),
        "gated_delta_rule": partial(delta_slots_gpu.call, batch, carry, 1),
    }[cases.CASES[case].op]
    with interpreted():
        y, carry = call(*inputs)
    return y, carry.slots.ssm


def interpreted():
    return interpreter.force_gpu_interpret_mode(interpreter.InterpretGPUParams(detect_races=True))


def shared_slots() -> list[float]:
    """Slot 2 ends a sequence and begins another, slot 0 goes on; blocks of no slot. NaN where a sequence begins."""
    case, r, rows, block = scan_case(256, 16), np.random.default_rng(3), np.array([2, 4, 2, 0, 2, 9, 2]), 16
    begins, lengths = [32, 0, 48, 7, 0, 16, 16], [16, 16, 5, 16, 16, 16, 0]
    tokens = np.arange(block)
    positions = np.concatenate([np.where(tokens < n, i + tokens, -1) for i, n in zip(begins, lengths, strict=True)])
    valid, states = positions >= 0, np.full((2, 4, *case.state), np.nan, np.float32)
    states[0, [0, 2]] = r.normal(size=(2, *case.state))
    inputs = [np.where(valid[:, None], x, np.nan) for x in case.inputs(r, len(positions))]
    x, dt, b, c, a, d = (jnp.asarray(y, jnp.float32) for y in (*inputs, *case.rest))
    batch = Paged(jnp.asarray(positions), jnp.zeros((7, 1), int), jnp.asarray(rows), block)
    carry = Carry(State(slots=Slots(None, jnp.asarray(states))))
    with interpreted():
        y, new = scan_slots_gpu.call(batch, carry, 0, x, dt, a, b, c, d)
    with ops.use(selective_scan="xla"):
        y_want, want = ops.selective_scan(batch, carry, 0, x, dt, a, b, c, d=d)
    used = valid & np.isin(np.repeat(rows, block), [0, 2])
    if (y[~used] != 0).any() or (np.isnan(new.slots.ssm) != np.isnan(want.slots.ssm)).any():
        raise RuntimeError("what is no token has an output, or another slot was written")
    return [cases.error(y[used], y_want[used]), cases.error(new.slots.ssm[0, [0, 2]], want.slots.ssm[0, [0, 2]])]


def errors(name: str, calls: list) -> list[float]:
    """Of outputs and of states, the largest of all sequences."""
    lengths = [sum(n for *_, pieces in calls for i, n in pieces if i == j) for j in range(3)]
    sequences = [cases.CASES[name].inputs(np.random.default_rng(i), n) for i, n in enumerate(lengths) if n]
    got, states = cases.serve(name, calls, sequences, jnp.bfloat16)
    if not (np.isnan(states[0]).all() and np.isnan(states[1, len(sequences) :]).all()):
        raise RuntimeError("other slots were written")
    want = [cases.recurrence(name, x, jnp.bfloat16) for x in sequences]
    return [max(map(cases.error, x, y)) for x, y in zip((got, states[1]), zip(*want, strict=True), strict=True)]


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)  # threads, of which each group of warps that waits holds one
    cases.run, kind = run, sys.argv[1]
    if "race" in sys.argv and kind in ("ssd", "scan"):
        mosaic_gpu.barrier_wait = lambda barrier: None  # no copy is waited for
    elif "race" in sys.argv:
        plant_a_race()
    few = "few" in sys.argv
    makers = {
        "ssd": lambda: [ssd_case(*x) for x in SSDS[few]],
        "scan": lambda: [scan_case(*x) for x in SCANS[few]],
        "delta": lambda: [delta_case(1 if few else 2, ())],
        "channels": lambda: [delta_case(1 if few else 2, (128,))],
    }
    calls = {"ssd": "all", "scan": "scans"}
    for case in makers[kind]() if kind in makers else []:
        cases.CASES["case"] = case
        print(*errors("case", CALLS["few" if few else calls.get(kind, "dear")]))
    if kind == "shared":
        print(*shared_slots())
