"""What Mosaic TPU makes of the kernels for groups of rows: instructions of a part of a tile, and the seconds that follow.

As `bundles`, in a process of its own: `python -m tests.aot.grouped_bundles v5p`. Steps are walked one after another for
sizes that a router without preferences draws: a step takes as long as its instructions, its FLOPs at the data sheet's, or
the copies beside it (blocks of the next step, results of the one before), each core with its share of the bandwidth. The
floor is of bytes (matrices of groups with rows, rows and results, once) or of FLOPs, whichever take longer.
"before" is jax's megablox with tiles of 128 x 512 x 512, walked alike, and its passes over rows and results.
"""

import json
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from fdel import aot, ops, params
from fdel.kernels import grouped_matmul_tpu as kernel
from fdel.kernels.grouped_program_tpu import ALIGNED, visits
from fdel.ops import grouped
from tests.aot.bundles import CLOCK, CORES, parts


class Experts(NamedTuple):
    """Experts that a device holds, and the rows that it has for them."""

    rows: int
    groups: int
    embed: int
    ffn: int


CALLS = {
    "Mixtral 8x7B, 16,384 tokens": Experts(32768, 8, 4096, 14336),
    "Mixtral 8x7B, 8 tokens": Experts(16, 8, 4096, 14336),
    "Qwen3-30B-A3B, 16,384 tokens": Experts(131072, 128, 2048, 768),
    "Qwen3-30B-A3B, 4,096 tokens": Experts(32768, 128, 2048, 768),
    "Qwen3-30B-A3B, 64 tokens": Experts(512, 128, 2048, 768),
    "Qwen3-30B-A3B, 4 tokens": Experts(32, 128, 2048, 768),
    "DeepSeek-V3, ep=32, 4,096 tokens": Experts(32768, 8, 7168, 2048),
    "DeepSeek-V3, ep=32, 16 tokens": Experts(128, 8, 7168, 2048),
}
PASSES = ("glu", "down", "glu rows", "glu matrices", "down rows", "down matrices")  # the last four are gradients
OLD = (128, 512, 512)  # rows, inputs and outputs of megablox's tiles before


def put(chip: str, *shapes: tuple, dtype: Any = jnp.bfloat16) -> tuple[aot.Target, Any, list]:
    """Give one chip, its mesh, and shapes that lie on it."""
    target = aot.parse_target({"v5p": "v5p:1x1x1", "v6e": "v6e:1x1"}[chip])
    mesh = params.make_mesh({}, aot.devices(target))
    at = NamedSharding(mesh, PartitionSpec())
    return target, mesh, [jax.ShapeDtypeStruct(s, jnp.int32 if len(s) == 1 else dtype, sharding=at) for s in shapes]


def silu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Join as most families do."""
    return jax.nn.silu(gate) * up


def lower(chip: str, e: Experts, what: str, impl: str) -> aot.Compiled:
    """Compile a pass for one chip; a gradient's program has that of the other argument left out."""
    first, second = (e.groups, e.ffn, e.embed), (e.groups, e.embed, e.ffn)
    wide, narrow = (e.rows, e.embed), (e.rows, e.ffn)
    shapes = {
        "glu": (wide, first, first), "down": (narrow, second),
        "glu rows": (narrow, narrow, first, first), "glu matrices": (wide, narrow),
        "down rows": (wide, second), "down matrices": (narrow, wide),
    }[what]  # fmt: skip
    target, mesh, given = put(chip, *shapes, (e.groups,))

    def call(*args: Any) -> Any:
        *arrays, sizes = args
        if impl == "megablox":
            from jax.experimental.pallas.ops.tpu.megablox import gmm

            padded = jnp.pad(arrays[0], ((0, -e.rows % OLD[0]), (0, 0)))
            return gmm(padded, arrays[1], sizes, jnp.bfloat16, OLD, None, None, True)
        with ops.use(grouped_matmul=impl, grouped_glu=impl):
            if what == "glu":
                return ops.grouped_glu(*arrays, sizes, silu)
            if what == "down":
                return ops.grouped_matmul(*arrays, sizes)
            if what == "glu rows":
                how = kernel.tiling(arrays[0], arrays[2], xs=2, matrices=2, turned=False)
                return kernel.rows_times(how, tuple(arrays[:2]), tuple(arrays[2:]), (), sizes, lambda a, b: [a + b])[0]
            if what == "down rows":
                how = kernel.tiling(*arrays, turned=False)
                return kernel.rows_times(how, arrays[:1], arrays[1:], (), sizes, lambda y: [y])[0]
            x, dy = arrays
            return kernel.matrices_of(kernel.tiling_of_matrices(dy, x, e.groups), dy, x, sizes)

    return aot.compile(target, jax.jit(call), *given, mesh=mesh)


def walk(chip: str, fetched: list[tuple[Any, float]], stored: tuple[Any, float], work: np.ndarray) -> float:
    """Give the seconds of steps: (which block each reads, its bytes) of the inputs, and of the result; seconds of work."""
    bandwidth = aot.CHIPS[chip].bandwidth / CORES[chip]
    change = lambda at: np.any(np.diff(at, axis=0) != 0, axis=1)
    get, give = np.zeros(len(work)), np.zeros(len(work))
    for at, each in fetched:
        get[:-1] += change(at) * each
    at, each = stored
    give[1:] += change(at) * each
    first, last = sum(each for _, each in fetched), each
    return float(np.maximum(work, (get + give) / bandwidth).sum() + (first + last) / bandwidth)


def estimate(chip: str, e: Experts, what: str, cycles: int) -> tuple[float, float]:
    """Give the seconds of a pass by our kernels, from the instructions of a part, and the floor."""
    about, cores, sizes = aot.CHIPS[chip], CORES[chip], drawn(e)
    count, (inputs, outputs) = 2 if "glu" in what else 1, (e.embed, e.ffn) if "glu" in what else (e.ffn, e.embed)
    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.bfloat16)
    w = shape(e.groups, outputs, inputs)
    rate = about.flops / cores / 2
    xs = count if "rows" in what else 1
    with jax.set_mesh(put(chip)[1]):  # tiles are those of the chip
        if "matrices" in what:
            t = kernel.tiling_of_matrices(shape(e.rows, outputs), shape(e.rows, inputs), e.groups)
            count = 1
        elif "rows" in what:
            t = kernel.tiling(shape(e.rows, outputs), w, xs=xs, matrices=count, turned=False)
            outputs, inputs = inputs, outputs
        else:
            t = kernel.tiling(shape(e.rows, inputs), w, matrices=count)
    found, steps = visits(jnp.asarray(sizes), e.rows, t.rows, matrices="matrices" in what)
    tile, matrix, low, high = (np.asarray(x)[: int(steps)] for x in found)
    many = np.where(high > low, -(-(high - low // ALIGNED * ALIGNED) // t.part), 0)
    block = (t.outputs, t.inputs) if "matrices" in what else (t.outputs, inputs)
    work = many * max(cycles / CLOCK, count * t.part * math.prod(block) / rate)
    blocks = -(-outputs // t.outputs)
    mine = -(-blocks // cores)  # of a core
    if "matrices" in what:
        across = -(-inputs // t.inputs)
        n, k = np.repeat(np.arange(mine * across), steps) // across, np.repeat(np.arange(mine * across), steps) % across
        tile, matrix, work = (np.tile(a, mine * across) for a in (tile, matrix, work))
        reads = [(np.stack([n, tile], 1), 2 * t.rows * t.outputs), (np.stack([k, tile], 1), 2 * t.rows * t.inputs)]
        seconds = walk(chip, reads, (np.stack([n, k, matrix], 1), 2 * t.outputs * t.inputs), work)
        moved = e.rows * (inputs + outputs) + e.groups * inputs * outputs
    else:
        n = np.repeat(np.arange(mine), steps)
        tile, matrix, work = (np.tile(a, mine) for a in (tile, matrix, work))
        reads = [(tile[:, None], 2 * xs * t.rows * inputs), (np.stack([n, matrix], 1), 2 * count * t.outputs * inputs)]
        seconds = walk(chip, reads, (np.stack([n, tile], 1), 2 * t.rows * t.outputs), work)
        moved = e.rows * (xs * inputs + outputs) + int((sizes > 0).sum()) * count * inputs * outputs
    floor = max(2 * moved / about.bandwidth, 2 * count * e.rows * inputs * outputs / about.flops)
    return seconds, floor


def before(chip: str, e: Experts, what: str, cycles: int) -> float:
    """Give the seconds of "glu" or "down" by megablox: its products, a pass over x, over each result, and to join."""
    about, cores = aot.CHIPS[chip], CORES[chip]
    inputs, outputs = (e.embed, e.ffn) if what == "glu" else (e.ffn, e.embed)
    rows, deep, wide = OLD
    found, steps = visits(jnp.asarray(drawn(e)), e.rows, rows, matrices=False)
    tile, matrix = (np.asarray(x)[: int(steps)] for x in found[:2])
    mine, deeper = math.ceil(outputs / wide / cores), -(-inputs // deep)
    n, k = np.repeat(np.arange(mine), steps * deeper), np.tile(np.arange(deeper), mine * int(steps))
    tile, matrix = (np.tile(np.repeat(a, deeper), mine) for a in (tile, matrix))
    work = np.full(len(n), max(cycles / CLOCK, rows * deep * wide / (about.flops / cores / 2)))
    reads = [(np.stack([tile, k], 1), 2 * rows * deep), (np.stack([n, k, matrix], 1), 2 * deep * wide)]
    product = walk(chip, reads, (np.stack([n, tile], 1), 2 * rows * wide), work)
    passes = 2 * e.rows * (2 * inputs + 2 * outputs)
    count = 2 if what == "glu" else 1
    return count * (product + passes / about.bandwidth) + (
        2 * 3 * e.rows * outputs / about.bandwidth if count == 2 else 0
    )


def drawn(e: Experts) -> np.ndarray:
    """Draw the rows of each group."""
    return np.random.default_rng(0).multinomial(e.rows, np.full(e.groups, 1 / e.groups)).astype(np.int32)


def main(chip: str, *names: str) -> None:
    """Print a line of JSON for each pass: bundles, seconds by our kernel, the floor, before, and XLA's of its rounds.

    `names` are parts of calls and passes that are run; with "--ours" nothing is compiled beside our kernels.
    """
    ours, names = "--ours" in names, tuple(n for n in names if n != "--ours")
    with tempfile.TemporaryDirectory() as folder:
        flags = {"to": folder, "llo_text": "true", "llo_pass_label_regex": ".*final_bundles.*"}
        os.environ["LIBTPU_INIT_ARGS"] = " ".join(f"--xla_jf_dump_{k}={v}" for k, v in flags.items())

        def counted(e: Experts, what: str, impl: str) -> list[tuple[int, int, str]]:
            for old in Path(folder).iterdir():
                old.unlink()
            lower(chip, e, what, impl)
            names = (x for x in Path(folder).glob("*-final_bundles.txt") if "analysis" not in x.name)
            return next(
                found for found in (parts(x.read_text()) for x in names) if any("vmatmul" in p[2] for p in found)
            )

        for name, e in CALLS.items():
            for what in PASSES:
                if names and not any(n in f"{name}, {what}" for n in names):
                    continue
                if e.rows < 4096 and what not in PASSES[:2]:
                    continue
                cycles = max(n for _, n, text in counted(e, what, "mosaic") if "vmatmul" in text)
                seconds, floor = estimate(chip, e, what, cycles)
                told = dict(call=name, what=what, bundles=cycles, estimate=seconds, floor=floor)
                if what in PASSES[:2] and not ours:
                    old = sum(n for depth, n, _ in counted(e, what, "megablox") if depth == 1)
                    block = min(grouped.BLOCK["tpu"], 1 << max(0, e.rows // e.groups - 1).bit_length())
                    rounds = math.ceil(drawn(e).max() / block)
                    xla = lower(chip, e, what, "xla").estimate
                    told |= dict(before=before(chip, e, what, old), old=old, xla=xla and xla * rounds)
                print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
