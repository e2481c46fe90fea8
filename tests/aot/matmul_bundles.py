"""What Mosaic TPU makes of the kernel for quantized products: instructions in its loops, and the seconds that follow.

As `bundles`, in a process of its own: `python -m tests.aot.matmul_bundles v5p`. The floor is of bytes (stored values and
scales, x and the result), or of FLOPs if they take longer.
"""

import json
import math
import os
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from fdel import aot, ops, params
from fdel.kernels import quantized_matmul_tpu as kernel
from fdel.kernels.quantized_program_tpu import unrolled
from fdel.ops.weights import PACKED, Quantized
from tests.aot.bundles import CLOCK, CORES, parts

# Rows, inputs, outputs, format, inputs of a group, whether zero points are stored.
CALLS = {
    "8 rows, int8": (8, 4096, 14336, "int8", 4096, False),
    "8 rows, int8, long": (8, 14336, 4096, "int8", 14336, False),
    "8 rows, GPTQ": (8, 4096, 14336, "uint4", 128, True),
    "8 rows, GPTQ, long": (8, 14336, 4096, "uint4", 128, True),
    "8 rows, int4 by 64": (8, 4096, 14336, "int4", 64, False),
    "32 rows, GPTQ": (32, 4096, 14336, "uint4", 128, True),
    "64 rows, GPTQ": (64, 4096, 14336, "uint4", 128, True),
    "64 rows, int8": (64, 4096, 14336, "int8", 4096, False),
    "512 rows, int8": (512, 4096, 14336, "int8", 4096, False),
    "512 rows, GPTQ": (512, 4096, 14336, "uint4", 128, True),
    "512 rows, int4 by 64": (512, 4096, 14336, "int4", 64, False),
}


def lower(chip: str, name: str, impl: str) -> aot.Compiled:
    """Compile a call for one chip."""
    rows, inputs, outputs, format, group, zero = CALLS[name]
    target = aot.parse_target({"v5p": "v5p:1x1x1", "v6e": "v6e:1x1"}[chip])
    mesh = params.make_mesh({}, aot.devices(target))
    put = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))
    scale = put(jnp.float32, outputs, inputs // group)
    values = put(jnp.int8 if format == "int8" else jnp.uint8, outputs, inputs // (2 if format in PACKED else 1))
    w = Quantized(values, scale, put(jnp.uint8, *scale.shape) if zero else None, format, (inputs,), np.dtype("float32"))

    def call(x, w):
        with ops.use(quantized_matmul=impl):
            return ops.einsum("td,fd->tf", x, w)

    return aot.compile(target, jax.jit(call), put(jnp.bfloat16, rows, inputs), w, mesh=mesh)


def estimate(chip: str, name: str, found: list[tuple[int, int, str]]) -> tuple[int, float, float]:
    """Give the bundles of a step of the grid, the seconds of a call and the floor."""
    rows, inputs, outputs, format, group, zero = CALLS[name]
    about, lanes, groups = aot.CHIPS[chip], inputs // (2 if format in PACKED else 1), inputs // group
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)
    w = Quantized(shape(outputs, lanes), shape(outputs, groups), None, format, (inputs,), np.dtype("float32"))
    t = kernel.tiling(shape(rows, inputs), w, jnp.bfloat16)
    chunks = trips = lanes // t.chunk
    if t.few:
        inner = max(1, t.each // t.chunk)  # a loop of its own, if there are several
        trips = inner if inner > 1 else chunks
        trips //= unrolled(trips)
    start = next(i for i, (_, _, text) in enumerate(found) if "vmatpush" in text) if t.few else 0
    once = (
        chunks / math.gcd(chunks, 4) * sum(n for depth, n, _ in found[:start] if depth == 2)
    )  # of digits, in the first step
    cycles = sum(n * (trips if depth == 2 else 1) for i, (depth, n, _) in enumerate(found) if depth == 1 or i >= start)
    steps = -(-outputs // t.outputs) * -(-rows // t.rows)
    beside = 2 * rows * (inputs + outputs)
    read = outputs * (lanes + groups * (4 + zero)) + beside
    floor = max(read / about.bandwidth, 2 * rows * inputs * outputs / about.flops)
    first = (t.outputs * lanes + 2 * rows * inputs) / about.bandwidth
    return cycles, max((steps * cycles / CORES[chip] + once) / CLOCK, floor) + first, floor


def main(chip: str) -> None:
    """Print one line of JSON for each call: bundles, estimate, floor and XLA's estimate for the reference, in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        flags = {"to": folder, "llo_text": "true", "llo_pass_label_regex": ".*final_bundles.*"}
        os.environ["LIBTPU_INIT_ARGS"] = " ".join(f"--xla_jf_dump_{k}={v}" for k, v in flags.items())
        for name in CALLS:
            lower(chip, name, "mosaic")
            found = [x for x in Path(folder).glob("*quantized_matmul*-final_bundles.txt") if "analysis" not in x.name]
            counted = parts(max(found, key=lambda x: x.name).read_text())
            cycles, seconds, floor = estimate(chip, name, counted)
            xla = lower(chip, name, "xla").estimate
            told = dict(call=name, bundles=cycles, estimate=seconds, floor=floor, xla=xla)
            print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
