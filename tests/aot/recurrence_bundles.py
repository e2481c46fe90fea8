"""What Mosaic TPU makes of the kernels for recurrences: instructions of a step, and the seconds that follow.

As `bundles`, in a process of its own: `python -m tests.aot.recurrence_bundles v5p`. The floor is of bytes (inputs and
outputs, once) or of FLOPs, if they take longer. Each call has 4 rows of 1,024 tokens.
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
from fdel.kernels import gated_delta_rule_tpu as delta
from fdel.ops.batch import Packed
from tests.aot.bundles import CLOCK, CORES, parts

ROWS, TOKENS = 4, 1024
HEADS, CHANNELS = 32, 128
CALLS = ["gated_delta_rule", "gated_delta_rule, channels"]


def lower(chip: str, name: str, impl: str) -> aot.Compiled:
    """Compile a call for one chip."""
    target = aot.parse_target({"v5p": "v5p:1x1x1", "v6e": "v6e:1x1"}[chip])
    mesh = params.make_mesh({}, aot.devices(target))
    at = NamedSharding(mesh, PartitionSpec())
    put = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct((ROWS, TOKENS, *shape), dtype, sharding=at)
    batch = Packed(put(dtype=jnp.int32), put(dtype=jnp.int32))
    gate = (HEADS, CHANNELS) if "channels" in name else (HEADS,)
    args = *[put(HEADS * CHANNELS)] * 3, put(*gate, dtype=jnp.float32), put(HEADS, dtype=jnp.float32)

    def call(batch, q, k, v, g, beta):
        heads = lambda x: x.reshape(ROWS, TOKENS, HEADS, -1)
        with ops.use(gated_delta_rule=impl):
            return ops.gated_delta_rule(batch, None, 0, heads(q), heads(k), heads(v), g, beta)[0].reshape(q.shape)

    return aot.compile(target, jax.jit(call), batch, *args, mesh=mesh)


def estimate(chip: str, name: str, cycles: int) -> tuple[float, float]:
    """Give the seconds of a call and the floor."""
    about, tokens, of_channels = aot.CHIPS[chip], ROWS * TOKENS * HEADS, "channels" in name
    read = tokens * CHANNELS * (4 * 2 + 4 * of_channels)
    flops = tokens * (
        2 * 64 * 3 * CHANNELS + 6 * CHANNELS**2 + 2 * 64 * CHANNELS
    )  # in chunks of 64, without the inverse
    floor = max(read / about.bandwidth, flops / about.flops)
    steps = tokens // delta.CHUNK // delta.HEADS[not of_channels]
    return max(steps * cycles / CORES[chip] / CLOCK, floor), floor


def main(chip: str, beside: str = "") -> None:
    """Print one line of JSON for each call: bundles, estimate and floor; with "xla" XLA's estimate for the reference, too.

    That compiles for minutes.
    """
    with tempfile.TemporaryDirectory() as folder:
        flags = {"to": folder, "llo_text": "true", "llo_pass_label_regex": ".*final_bundles.*"}
        os.environ["LIBTPU_INIT_ARGS"] = " ".join(f"--xla_jf_dump_{k}={v}" for k, v in flags.items())
        for name in CALLS:
            ours = lower(chip, name, "mosaic")
            op = name.partition(",")[0]
            found = [x for x in Path(folder).glob(f"*{op}*-final_bundles.txt") if "analysis" not in x.name]
            cycles = sum(n for depth, n, _ in parts(max(found, key=lambda x: x.name).read_text()) if depth)
            seconds, floor = estimate(chip, name, cycles)
            told = dict(call=name, bundles=cycles, estimate=seconds, floor=floor, temporaries=ours.temporaries)
            if beside == "xla":
                xla = lower(chip, name, "xla")
                told |= dict(xla=xla.estimate, xla_temporaries=xla.temporaries)
            print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
