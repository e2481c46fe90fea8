"""What Mosaic TPU makes of the kernel for quantized products: instructions in its loops, and the seconds that follow.

As `bundles`, in a process of its own: `python -m tests.aot.matmul_bundles v5p`. The floor is of bytes (stored values and
scales, x and the result), or of FLOPs if they take longer.
"""

import json
import math
import os
import sys
import tempfile
from collections.abc import Callable
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

FLOATS = {
    "fp8": ("fp8", 4096),
    "fp8 by 128": ("fp8", 128),
    "NF4": ("nf4", 64),
    "MXFP4": ("e2m1", 32),
    "NVFP4": ("e2m1", 16),
}
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
    **{f"{n} rows, {name}": (n, 4096, 14336, *how, False) for name, how in FLOATS.items() for n in (8, 64, 512)},
    "8 rows, MXFP4, 2,880": (8, 2880, 2880, "e2m1", 32, False),  # GPT-OSS's sizes: rows of 1,440 bytes
}  # fmt: skip
SCALES = {("nf4", 64): "uint8", ("e2m1", 32): "exponent", ("e2m1", 16): "fp8"}  # that are stored in 8 bits


def weight(name: str, put: Callable) -> Quantized:
    """Make the weight of a call, of arrays that `put` makes of their dtype and shape."""
    _, inputs, outputs, format, group, zero = CALLS[name]
    shape, full = (outputs, inputs // group), np.dtype("float32")
    values = put(jnp.int8 if format == "int8" else jnp.uint8, outputs, inputs // (2 if format in PACKED else 1))
    scale = put(jnp.uint8 if (format, group) in SCALES else jnp.float32, *shape)
    if (kind := SCALES.get((format, group))) in ("uint8", "fp8"):
        low = put(jnp.float32, outputs, 1) if kind == "uint8" else None
        scale = Quantized(scale, put(jnp.float32, outputs, 1), low, kind, shape[1:], full)
    return Quantized(values, scale, put(jnp.uint8, *shape) if zero else None, format, (inputs,), full)


def lower(chip: str, name: str, impl: str) -> aot.Compiled:
    """Compile a call for one chip."""
    rows, inputs = CALLS[name][:2]
    target = aot.parse_target({"v5p": "v5p:1x1x1", "v6e": "v6e:1x1"}[chip])
    mesh = params.make_mesh({}, aot.devices(target))
    put = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))
    w = weight(name, put)

    def call(x, w):
        with ops.use(quantized_matmul=impl):
            return ops.einsum("td,fd->tf", x, w)

    return aot.compile(target, jax.jit(call), put(jnp.bfloat16, rows, inputs), w, mesh=mesh)


def estimate(chip: str, name: str, found: list[tuple[int, int, str]]) -> tuple[int, float, float]:
    """Give the bundles of a step of the grid, the seconds of a call and the floor."""
    rows, inputs, outputs, format, group, zero = CALLS[name]
    about, shape = aot.CHIPS[chip], lambda dtype, *sizes: jax.ShapeDtypeStruct(sizes, dtype)
    w = weight(name, shape)
    t = kernel.tiling(shape(jnp.bfloat16, rows, inputs), w, jnp.bfloat16)
    lanes = w.values.shape[1]
    chunks = trips = -(-lanes // t.chunk)
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
    read = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(w)) + beside
    floor = max(read / about.bandwidth, 2 * rows * inputs * outputs / about.flops)
    first = (t.outputs * lanes + 2 * rows * inputs) / about.bandwidth
    return cycles, max((steps * cycles / CORES[chip] + once) / CLOCK, floor) + first, floor


def main(chip: str, only: str = "") -> None:
    """Print one line of JSON for each call: bundles, estimate, floor and XLA's estimates in seconds: for the
    reference, and for what is around the kernel."""
    with tempfile.TemporaryDirectory() as folder:
        flags = {"to": folder, "llo_text": "true", "llo_pass_label_regex": ".*final_bundles.*"}
        os.environ["LIBTPU_INIT_ARGS"] = " ".join(f"--xla_jf_dump_{k}={v}" for k, v in flags.items())
        for name in (name for name in CALLS if only in name):
            around = lower(chip, name, "mosaic").estimate
            found = [x for x in Path(folder).glob("*quantized_matmul*-final_bundles.txt") if "analysis" not in x.name]
            counted = parts(max(found, key=lambda x: x.name).read_text())
            cycles, seconds, floor = estimate(chip, name, counted)
            xla = lower(chip, name, "xla").estimate
            told = dict(call=name, bundles=cycles, estimate=seconds, floor=floor, xla=xla, around=around)
            print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
