"""What Mosaic TPU makes of products of groups of rows with quantized matrices: instructions, and the seconds that follow.

As `bundles`, in a process of its own: `python -m tests.aot.expert_bundles v5p`. A step takes as long as its instructions or
as the copy of the next block, of a tile's first step with those that lay out its rows. Sizes of groups are drawn evenly.
The floor is of bytes (stored matrices of groups with rows, rows and results, once) or of FLOPs, whichever take longer.
"""

import json
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout

from fdel import aot, ops
from fdel.kernels import grouped_matmul_tpu, quantized_matmul_tpu
from fdel.kernels import grouped_quantized_tpu as kernel
from fdel.kernels.grouped_program_tpu import ALIGNED, visits
from fdel.kernels.quantized_program_tpu import unrolled
from fdel.ops import grouped
from fdel.ops.weights import PACKED, Quantized
from tests.aot.bundles import CLOCK, CORES, parts
from tests.aot.grouped_bundles import Experts, drawn, put, walk


class Call(NamedTuple):
    """Rows, groups, inputs and outputs of a matrix, its format, inputs of a group of scales, whether zeros are stored."""

    rows: int
    groups: int
    inputs: int
    outputs: int
    format: str
    group: int
    zero: bool = False


OSS, UP, DOWN = (256, 128, 2880, 2880), (512, 128, 2048, 768), (512, 128, 768, 2048)
CALLS = {
    "gpt_oss 120b, 64 tokens, MXFP4": Call(*OSS, "e2m1", 32),
    "Qwen3-30B-A3B, 64 tokens, gate, int8": Call(*UP, "int8", 2048),
    "Qwen3-30B-A3B, 64 tokens, gate, fp8 by 128": Call(*UP, "fp8", 128),
    "Qwen3-30B-A3B, 64 tokens, gate, int4 by 128": Call(*UP, "int4", 128),
    "Qwen3-30B-A3B, 64 tokens, gate, int4 by 64": Call(*UP, "int4", 64),
    "Qwen3-30B-A3B, 64 tokens, gate, MXFP4": Call(*UP, "e2m1", 32),
    "Qwen3-30B-A3B, 64 tokens, down, int8": Call(*DOWN, "int8", 768),
    "Qwen3-30B-A3B, 64 tokens, down, fp8 by 128": Call(*DOWN, "fp8", 128),
    "Qwen3-30B-A3B, 64 tokens, down, int4 by 128": Call(*DOWN, "int4", 128),
    "Qwen3-30B-A3B, 64 tokens, down, MXFP4": Call(*DOWN, "e2m1", 32),
    "gpt_oss 120b, 2048 tokens, MXFP4": Call(8192, *OSS[1:], "e2m1", 32),
    "Qwen3-30B-A3B, 2048 tokens, gate, int8": Call(16384, *UP[1:], "int8", 2048),
    "Qwen3-30B-A3B, 2048 tokens, gate, fp8 by 128": Call(16384, *UP[1:], "fp8", 128),
    "Qwen3-30B-A3B, 2048 tokens, gate, GPTQ": Call(16384, *UP[1:], "uint4", 128, True),
    "Qwen3-30B-A3B, 2048 tokens, gate, int4 by 128": Call(16384, *UP[1:], "int4", 128),
    "Qwen3-30B-A3B, 2048 tokens, gate, MXFP4": Call(16384, *UP[1:], "e2m1", 32),
    "Qwen3-30B-A3B, 2048 tokens, down, int4 by 128": Call(16384, *DOWN[1:], "int4", 128),
    "Mixtral 8x7B, 2048 tokens, gate, int4 by 128": Call(4096, 8, 4096, 14336, "int4", 128),
}


def weight(c: Call, shape) -> Quantized:
    """Make the matrices of a call, of arrays that `shape` makes of their dtype and sizes."""
    values = c.groups, c.outputs, c.inputs // (2 if c.format in PACKED else 1)
    scale = c.groups, c.outputs, c.inputs // c.group
    return Quantized(
        shape(jnp.int8 if c.format == "int8" else jnp.uint8, *values),
        shape(jnp.uint8 if c.format == "e2m1" else jnp.float32, *scale),
        shape(jnp.uint8, *scale) if c.zero else None, c.format, (c.inputs,), np.dtype("float32"),
    )  # fmt: skip


def lower(chip: str, c: Call, impl: str) -> aot.Compiled:
    """Compile a call for one chip."""
    target, mesh, (sizes,) = put(chip, (c.groups,))
    rows_first = lambda dtype, *s: jax.ShapeDtypeStruct(s, dtype, sharding=Format(Layout((0, 1, 2)), sizes.sharding))
    shape = lambda dtype, *s: jax.ShapeDtypeStruct(s, dtype, sharding=sizes.sharding)

    def call(x, w, sizes):
        with ops.use(grouped_matmul=impl):
            return ops.grouped_matmul(x, w, sizes)

    x = shape(jnp.bfloat16, c.rows, c.inputs)
    # Left to itself the compiler lays out 128 matrices of 2,880 with matrices innermost, and copies them at every call.
    w = weight(c, rows_first if c.inputs % 128 else shape)
    return aot.compile(target, jax.jit(call), x, w, sizes, mesh=mesh)


def estimate(chip: str, c: Call, found: list[tuple[int, int, str]]) -> dict[str, float]:
    """Give the bundles of a step and of laying out a tile's rows, the seconds of a call and the floor."""
    about, cores, sizes = aot.CHIPS[chip], CORES[chip], drawn(Experts(c.rows, c.groups, 0, 0))
    w = weight(c, lambda dtype, *s: jax.ShapeDtypeStruct(s, dtype))
    with jax.set_mesh(put(chip)[1]):  # tiles are those of the chip
        t = kernel.tiling(c.rows, w, jnp.bfloat16)
    lanes, kept = w.values.shape[2], [a.size * a.dtype.itemsize / c.groups for a in jax.tree.leaves(w)]
    chunks = trips = -(-lanes // t.chunk)
    if t.few:
        inner = max(1, t.each // t.chunk)
        trips = inner if inner > 1 else chunks
        trips //= unrolled(trips)
    start = next((i for i, (_, _, text) in enumerate(found) if "vmatpush" in text), 0) if t.few else 0
    lay = chunks / math.gcd(chunks, 4) * sum(n for depth, n, _ in found[:start] if depth == 2)
    step = sum(n * (trips if depth == 2 else 1) for i, (depth, n, _) in enumerate(found) if depth == 1 or i >= start)
    steps, count = -(-c.outputs // t.outputs), int(np.sum(-(-sizes // t.rows)))
    copies = sum(kept) * t.outputs / c.outputs / (about.bandwidth / cores)
    product = 2 * t.rows * t.outputs * c.inputs / (about.flops / cores)
    tile = max((step + lay) / CLOCK, copies, product) + (steps - 1) * max(step / CLOCK, copies, product)
    busy = int((sizes > 0).sum())
    read = busy * sum(kept) + 2 * c.rows * (c.inputs + c.outputs)
    floor = max(read / about.bandwidth, 2 * c.rows * c.inputs * c.outputs / about.flops)
    # The estimate is of the kernel: rows are copied to tiles and back by XLA, which tells how long.
    seconds = -(-count // cores) * tile
    return dict(step=step, lay=lay, tiles=count, steps=steps, copies=copies * CLOCK, estimate=seconds, floor=floor)


def estimate_many(chip: str, c: Call, found: list[tuple[int, int, str]]) -> dict[str, float]:
    """Give as `estimate` what many rows take: bundles of expanding a block, and of a part of a tile."""
    about, cores, sizes = aot.CHIPS[chip], CORES[chip], drawn(Experts(c.rows, c.groups, 0, 0))
    shape = lambda dtype, *s: jax.ShapeDtypeStruct(s, dtype)
    x, w = shape(jnp.bfloat16, c.rows, c.inputs), weight(c, shape)
    with jax.set_mesh(put(chip)[1]):
        t, how = grouped_matmul_tpu.tiling(x, w, matrices=2), quantized_matmul_tpu.tiling(x, w, x.dtype)
    within = lambda what: {at: sum(n for depth, n, text in found if depth == at and what in text) for at in (1, 2)}
    chunks = how.lanes // how.chunk
    expand = within("vxpose")[2] * chunks or within("vxpose")[1]  # no loop, if a block has one chunk
    part, step = within("vmatmul")[2], within("")[1] - within("vxpose")[1]
    visited, count = visits(jnp.asarray(sizes), c.rows, t.rows, matrices=False)
    tile, matrix, low, high = (np.asarray(x)[: int(count)] for x in visited)
    many = np.where(high > low, -(-(high - low // ALIGNED * ALIGNED) // t.part), 0)
    product = max(part / CLOCK, 2 * t.part * t.outputs * c.inputs / (about.flops / cores))
    work = many * product + (np.diff(matrix, prepend=-1) != 0) * expand / CLOCK + step / CLOCK
    mine, each = (
        math.ceil(math.ceil(c.outputs / t.outputs) / cores),
        sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(w)),
    )
    n = np.repeat(np.arange(mine), count)
    tile, matrix, work = (np.tile(a, mine) for a in (tile, matrix, work))
    block = each / c.groups * t.outputs / c.outputs
    reads = [(tile[:, None], 2 * t.rows * c.inputs), (np.stack([n, matrix], 1), block)]
    seconds = walk(chip, reads, (np.stack([n, tile], 1), 2 * t.rows * t.outputs), work)
    read = int((sizes > 0).sum()) * each / c.groups + 2 * c.rows * (c.inputs + c.outputs)
    floor = max(read / about.bandwidth, 2 * c.rows * c.inputs * c.outputs / about.flops)
    return dict(expand=expand, part=part, step=step, estimate=seconds, floor=floor)


def main(chip: str, *names: str) -> None:
    """Print a line of JSON for each call that is named in part: seconds of the kernel, of what is around it, and the floor.

    With "--xla" also XLA's own estimate of a round of the reference's loop, times the rounds.
    """
    xla, names = "--xla" in names, tuple(n for n in names if n != "--xla")
    with tempfile.TemporaryDirectory() as folder:
        flags = {"to": folder, "llo_text": "true", "llo_pass_label_regex": ".*final_bundles.*"}
        os.environ["LIBTPU_INIT_ARGS"] = " ".join(f"--xla_jf_dump_{k}={v}" for k, v in flags.items())
        for name, c in CALLS.items():
            if names and not any(n in name for n in names):
                continue
            for old in Path(folder).iterdir():
                old.unlink()
            ours = lower(chip, c, "mosaic")
            few = c.rows <= kernel.FEW * c.groups
            name_of = "quantized_matmul" if few else "grouped_quantized"
            found = [x for x in Path(folder).glob(f"*{name_of}*-final_bundles.txt") if "analysis" not in x.name]
            counted = parts(max(found, key=lambda x: x.name).read_text())
            told = (estimate if few else estimate_many)(chip, c, counted) | {"around": ours.estimate}
            if xla:
                block = min(grouped.BLOCK["tpu"], 1 << max(0, c.rows // c.groups - 1).bit_length())
                rounds = math.ceil(drawn(Experts(c.rows, c.groups, 0, 0)).max() / block)
                told["xla"] = lower(chip, c, "xla").estimate * rounds
            print(json.dumps(dict(call=name, chip=chip) | told), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
