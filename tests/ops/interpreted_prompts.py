"""A process that interprets the Hopper kernels for prompts in an engine's blocks: prints errors against float64.

`ssd`: of outputs and states of sequences that come in pieces, with others' between them, relative to the largest number,
with a detector of races, of which `race` plants one; `few`: one call. See `interpreted_pages`.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret import params as interpreter
from jax.experimental.pallas import mosaic_gpu

from fdel.kernels import ssd_slots_gpu
from fdel.ops.batch import Slots, State
from fdel.ops.carry import Carry
from tests.ops import test_recurrences_paged_tpu as cases

# Blocks of 32 and 64: pieces shorter than one, of several chunks, none at all, one between others'.
FEW = [(32, 160, [(0, 70), (1, 5)])]
CALLS = {
    "few": [*FEW, (16, 64, [(1, 20), (0, 3)])],
    "all": [*FEW, (32, 96, []), (32, 224, [(1, 40), (0, 33), (2, 1)]), (64, 192, [(2, 66)]), (16, 64, [(2, 17), (1, 3)])],
}  # fmt: skip


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


def run(case: str, impl: str, batch, states, inputs):
    """Call the kernel in layer 1, in place of what compiles one."""
    carry, (x, dt, b, c) = Carry(State(slots=Slots(None, states))), inputs
    a, d = (jnp.asarray(x, jnp.float32) for x in cases.CASES[case].rest)
    with interpreter.force_gpu_interpret_mode(interpreter.InterpretGPUParams(detect_races=True)):
        y, carry = ssd_slots_gpu.call(True, batch, carry, 1, x, dt, a, b, c, d)
    return y, carry.slots.ssm


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
    cases.run = run
    if "race" in sys.argv:
        mosaic_gpu.barrier_wait = lambda barrier: None  # no copy is waited for
    kinds = {"ssd": [ssd_case(1, 64)] if "few" in sys.argv else [ssd_case(2, 128), ssd_case(1, 192)]}
    for case in kinds[sys.argv[1]]:
        cases.CASES["case"] = case
        print(*errors("case", CALLS["few" if "few" in sys.argv else "all"]))
