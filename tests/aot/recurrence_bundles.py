"""What Mosaic TPU makes of the kernels for recurrences: instructions of a step, and the seconds that follow.

As `bundles`, in a process of its own: `python -m tests.aot.recurrence_bundles v5p`. The floor is of bytes (inputs and
outputs, once) or of FLOPs, if they take longer. Each call has 4 rows of 1,024 tokens, or is of an engine: the prefill of
one sequence in blocks, or a token of each of many.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from fdel import aot, ops, params
from fdel.kernels import gated_delta_rule_tpu, recurrent_decode_tpu, selective_scan_tpu, ssd_tpu
from fdel.kernels.chunks_tpu import CHUNK
from fdel.ops.batch import Packed, Paged, Slots, State
from fdel.ops.carry import Carry
from tests.aot.bundles import CLOCK, CORES, parts

ROWS, TOKENS = 4, 1024
# Heads, channels of keys (of delta rules, or states) and of values; whether each channel of the keys has a decay.
CALLS = {
    "gated_delta_rule": (32, 128, 128, False),
    "gated_delta_rule, channels": (32, 128, 128, True),
    "gated_delta_rule, backward": (32, 128, 128, False),
    "gated_delta_rule, channels, backward": (32, 128, 128, True),
    "ssd": (80, 128, 64, False),
    "ssd, backward": (80, 128, 64, False),
    "selective_scan": (5120, 16, 1, True),
    "selective_scan, backward": (5120, 16, 1, True),
}
SERVED = {"prefill": (512, 32), "decode": (64, 1)}  # tokens and those of a block
for kind in SERVED:
    CALLS |= {f"{name}, {kind}": CALLS[name] for name in ("gated_delta_rule", "gated_delta_rule, channels")}
    CALLS |= {f"{name}, {kind}": CALLS[name] for name in ("ssd", "selective_scan")}
SLOTS = 64


def lower(chip: str, name: str, impl: str) -> aot.Compiled:
    """Compile a call for one chip. Heads lie beside each other, as products with weights give them."""
    heads, keys, values, of_channels = CALLS[name]
    target = aot.parse_target({"v5p": "v5p:1x1x1", "v6e": "v6e:1x1"}[chip])
    mesh = params.make_mesh({}, aot.devices(target))
    at = NamedSharding(mesh, PartitionSpec())
    kind = name.rpartition(", ")[2]
    tokens, block = SERVED.get(kind, (0, 0))
    lead = (tokens,) if tokens else (ROWS, TOKENS)
    put = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct((*lead, *shape), dtype, sharding=at)
    batch, states = Packed(put(dtype=jnp.int32), put(dtype=jnp.int32)), None
    if tokens:
        ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=at)
        batch = Paged(ints(tokens), ints(tokens // block, 1), ints(tokens // block), block)
        shape = (heads, keys, values) if name.startswith("gated") else (heads, values, keys)
        shape = (heads, keys) if name.startswith("selective") else shape
        states = jax.ShapeDtypeStruct((2, SLOTS, *shape), jnp.float32, sharding=at)
    cut = lambda x, n: x.reshape(*lead, n, -1)

    def delta_rule(batch, carry, q, k, v, g, beta):
        q, k, v = (cut(x, heads) for x in (q, k, v))
        return ops.gated_delta_rule(batch, carry, 0, q, k, v, cut(g, heads) if of_channels else g, beta)

    def ssd(batch, carry, x, b, c, dt):
        a = -jnp.ones(heads)
        return ops.ssd(batch, carry, 0, cut(x, heads), dt, a, cut(b, 1), cut(c, 1), d=a)

    def scan(batch, carry, x, b, c, dt):
        a = -jnp.ones((heads, keys))
        return ops.selective_scan(batch, carry, 0, x, dt, a, b, c, d=a[:, 0])

    numbers, wide = put(heads, dtype=jnp.float32), put(heads * values)
    if not name.startswith("gated"):
        f, args = scan if name.startswith("selective") else ssd, (wide, put(keys), put(keys), numbers)
    else:
        gate = put(heads * (keys if of_channels else 1), dtype=jnp.float32)
        f, args = delta_rule, (put(heads * keys), put(heads * keys), wide, gate, numbers)

    def call(batch, states, *args):
        carry = None if states is None else Carry(State(slots=Slots(None, states)))
        with ops.use(**{name.partition(",")[0]: impl}):
            if "backward" not in name:
                y, carry = f(batch, carry, *args)
                return y.reshape(*lead, -1), carry.slots
            y, back = jax.vjp(lambda *x: f(batch, carry, *x)[0], *args[:-1])
            return back(args[-1].reshape(y.shape))

    back = (wide,) if "backward" in name else ()
    return aot.compile(target, jax.jit(call, donate_argnums=1), batch, states, *args, *back, mesh=mesh)


def count(name: str, loops: list[tuple[int, int, str]]) -> int:
    """Count the bundles of a step of the grid; clearing of padding is among them.

    A selective scan has loops in a step: over blocks of tokens, to spread b (and c); over tiles; in a tile over blocks (its
    gradient twice), which take one of two branches of much the same length.
    """
    step = sum(n for depth, n, _ in loops if depth)
    if not name.startswith("selective_scan") or name.endswith("decode"):
        return step
    blocks, tiles = CHUNK // selective_scan_tpu.BLOCK, selective_scan_tpu.CHANNELS // selective_scan_tpu.TILE
    inner = next(i for i, (depth, *_) in enumerate(loops) if depth == 3)
    spread = sum(n for depth, n, _ in loops[: inner - 1] if depth == 2)
    branches = sum(n for depth, n, _ in loops if depth == 3)
    tile = sum(n for depth, n, _ in loops if depth == 2) - spread + blocks * branches // 2
    return sum(n for depth, n, _ in loops if depth == 1) + blocks * spread + tiles * tile


def estimate(chip: str, name: str, cycles: int) -> tuple[float, float]:
    """Give the seconds of a call and the floor: its FLOPs are those of chunks of 64, without an inverse."""
    heads, keys, values, of_channels = CALLS[name]
    about, tokens = aot.CHIPS[chip], SERVED.get(name.rpartition(", ")[2], (ROWS * TOKENS,))[0]
    if name.startswith("ssd"):
        back = "backward" in name  # with dy and dx, and each product in two
        read = tokens * 2 * ((2 + back) * heads * values + (2 + 2 * back) * keys)
        flops = tokens * heads * (2 * 64 * values + 4 * keys * values) * (1 + back)
        steps = tokens // CHUNK * heads // ssd_tpu.HEADS
    elif name.startswith("selective_scan"):
        back = "backward" in name
        read, flops = tokens * ((8 + 6 * back) * heads + (4 + 4 * back) * keys), 0  # dt is float32
        steps = tokens // CHUNK * heads // selective_scan_tpu.CHANNELS
    else:
        back = "backward" in name  # with gradients, and each product in two
        read = (
            tokens * heads * (2 * ((2 + 2 * back) * keys + (2 + back) * values) + 4 * keys * of_channels * (1 + back))
        )
        flops = tokens * heads * (2 * 64 * (2 * keys + 2 * values) + 6 * keys * values) * (1 + back)
        steps = tokens // CHUNK * heads // gated_delta_rule_tpu.HEADS[not of_channels]
    if name.endswith("prefill"):
        read += 2 * 4 * heads * keys * values
    if name.endswith("decode"):
        read, flops = read + tokens * 2 * 4 * heads * keys * values, 0
        scan = name.startswith("selective_scan")
        steps = tokens * heads // (selective_scan_tpu.CHANNELS if scan else recurrent_decode_tpu.HEADS)
    floor = max(read / about.bandwidth, flops / about.flops)
    return max(steps * cycles / CORES[chip] / CLOCK, floor), floor


def main(chip: str, beside: str = "", only: str = "") -> None:
    """Print one line of JSON for each call: bundles, estimate and floor; with "xla" XLA's estimate for the reference, too.

    That compiles for minutes.
    """
    with tempfile.TemporaryDirectory() as folder:
        flags = {"to": folder, "llo_text": "true", "llo_pass_label_regex": ".*final_bundles.*"}
        os.environ["LIBTPU_INIT_ARGS"] = " ".join(f"--xla_jf_dump_{k}={v}" for k, v in flags.items())
        for name in [name for name in CALLS if only in name]:
            ours = lower(chip, name, "mosaic")
            op = name.partition(",")[0] + "_backward" * ("backward" in name) + "_decode" * ("decode" in name)
            found = [x for x in Path(folder).glob(f"*{op}*-final_bundles.txt") if "analysis" not in x.name]
            cycles = count(name, parts(max(found, key=lambda x: x.name).read_text()))
            seconds, floor = estimate(chip, name, cycles)
            told = dict(call=name, bundles=cycles, estimate=seconds, floor=floor, temporaries=ours.temporaries)
            if beside == "xla":
                xla = lower(chip, name, "xla")
                told |= dict(xla=xla.estimate, xla_temporaries=xla.temporaries)
            print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
