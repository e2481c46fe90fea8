"""What ptxas makes of the Hopper kernels that serve recurrences, at the shapes of models, and what XLA moves.

As `hopper_products`, in a process of its own: `python -m tests.aot.hopper_decode`. Calls have 64 tokens of 64 sequences;
prompts 512 tokens in blocks of 32.
"""

import functools
import math
import re
import sys

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from fdel import aot, ops, params
from fdel.ops.batch import Paged, Slots, State
from fdel.ops.carry import Carry
from tests.aot.hopper_products import say

ROWS, LAYERS, SLOTS = 64, 4, 65
BYTES = {"bf16": 2, "f32": 4, "s32": 4, "pred": 1}
# An operation; the state; inputs of a token in bfloat16 and in float32, as (place, sizes); others' sizes, by place.
CALLS = {
    "gated_delta_rule, 32 heads of 128 and 128": (
        "gated_delta_rule", (32, 128, 128), [(32, 128)] * 3, [(32,), (32,)], {},
    ),
    "gated_delta_rule, a decay per channel": (
        "gated_delta_rule", (32, 128, 128), [(32, 128)] * 3, [(32, 128), (32,)], {},
    ),
    "ssd, 80 heads of 64, 128 states": ("ssd", (80, 64, 128), [(80, 64), (1, 128), (1, 128)], [(80,)], {"a": (80,)}),
    "ssd, 64 heads of 64, 256 states, 8 groups": (
        "ssd", (64, 64, 256), [(64, 64), (8, 256), (8, 256)], [(64,)], {"a": (64,)},
    ),
    "selective_scan, 5,120 channels of 16 states": (
        "selective_scan", (5120, 16), [(5120,), (16,), (16,)], [(5120,)], {"a": (5120, 16)},
    ),
}  # fmt: skip


PROMPTS = [f"prompts, {name}" for name in sorted(CALLS, key=lambda name: name.startswith("gated"))]


def sizes_of(name: str) -> tuple[int, int]:
    """Tokens of a call, and of its blocks, each of a sequence of its own."""
    return (512, 32) if name in PROMPTS else (ROWS, 1)


def needed(name: str) -> int:
    """Bytes of a call: states twice, inputs and the output once."""
    _, state, half, single, rates = CALLS[name.removeprefix("prompts, ")]
    of, (tokens, block) = (lambda sizes: sum(map(math.prod, sizes))), sizes_of(name)
    out = half[2] if name.startswith("gated") else half[0]
    each = 2 * of([*half, out]) + 4 * of(single)
    return tokens // block * 8 * math.prod(state) + tokens * each + 4 * of(rates.values())


def lower(name: str, impl: str = "hopper") -> aot.Compiled:
    """Compile a call of `CALLS` or `PROMPTS` for one H100; the states are the result's memory."""
    op, state, half, single, rates = CALLS[name.removeprefix("prompts, ")]
    tokens, block = sizes_of(name)
    target = aot.parse_target("h100:1x1x1")
    mesh = params.make_mesh({}, aot.devices(target))
    put = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))
    inputs = [put(jnp.bfloat16, tokens, *x) for x in half]
    numbers = [put(jnp.float32, tokens, *x) for x in single]
    rates = [put(jnp.float32, *x) for x in rates.values()]
    inputs = [inputs[0], *numbers, *rates, *inputs[1:]] if rates else [*inputs, *numbers]
    skip = {"d": put(jnp.float32, state[0])} if rates else {}

    @ops.use(**{op: impl})
    def call(batch, states, layer, inputs, skip):
        y, carry = getattr(ops, op)(batch, Carry(State(slots=Slots(None, states))), layer, *inputs, **skip)
        return y, carry.slots.ssm

    ints, states = functools.partial(put, jnp.int32), put(jnp.float32, LAYERS, SLOTS, *state)
    batch = Paged(ints(tokens), ints(tokens // block, 1), ints(tokens // block), block)
    program = jax.jit(call, donate_argnums=1)
    return aot.compile(target, program, batch, states, put(jnp.int32), inputs, skip, mesh=mesh)


def moved(name: str, text: str) -> int:
    """Bytes that the operations of a compiled call read and write, each array once for each; of slots those of its tokens.

    What scatters writes into all slots and reads none; a kernel does both.
    """
    entry, total = text[text.index("\nENTRY") :].partition("\n}")[0], 0
    tokens, block = sizes_of(name)
    state = math.prod(CALLS[name.removeprefix("prompts, ")][1]) * 4
    slots, used, sizes = LAYERS * SLOTS * state, tokens // block * state, dict[str, list[tuple[bool, int]]]()
    for line in entry.split("\n"):
        if not (m := re.match(r"\s+(?:ROOT )?%([\w.\-]+) = (.*?) ([a-z\-]+)\((.*?)\)(?:,|$)", line)):
            continue
        result, kinds, op, operands = m.groups()
        own = []
        for kind, numbers in re.findall(r"(\w+)\[([\d,]*)\]", kinds):
            n = math.prod(int(x) for x in numbers.split(",") if x) * BYTES[kind]
            own.append((n == slots, used if n == slots else n))
        given = [x for y in re.findall(r"%([\w.\-]+)", operands) for x in sizes.get(y, [])]
        if op == "get-tuple-element":
            own = [given[int(re.search(r"index=(\d+)", line)[1])]]
        sizes[result] = given if op == "bitcast" else own
        if op in ("fusion", "custom-call", "copy"):
            writes_slots = op == "fusion" and any(of_slots for of_slots, _ in own)
            total += sum(n for of_slots, n in given if not (writes_slots and of_slots)) + sum(n for _, n in own)
    return total


def beside(name: str, found: aot.Compiled) -> None:
    """Say what XLA's program of the call comes to; its loops over prompts are not counted."""
    plain = lower(name, "xla")
    ours, xla = (f"{moved(name, c.text) / needed(name):.2f}" for c in (found, plain))
    print(f"moved: {ours} times the needed bytes" + (f", by XLA {xla}" if name in CALLS else ""), flush=True)
    print(f"by XLA {plain.temporaries / 2**20:.1f} MiB", flush=True)


if __name__ == "__main__":
    say([*CALLS, *PROMPTS], lower, sys.argv[1:], beside)
