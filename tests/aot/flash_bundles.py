"""What Mosaic TPU makes of the kernels for attention in training batches: instructions of a pair of tiles, and seconds.

As `bundles`, in a process of its own: `python -m tests.aot.flash_bundles v5p`. Rows of 4,096 tokens, causal; the floor
is of the FLOPs of pairs of a query and a key that see each other.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from fdel import aot, ops, params
from fdel.kernels import flash_attention_tpu as kernel
from fdel.kernels import flash_program_tpu as program
from fdel.kernels.flash_walk_tpu import WHOLE, Call
from fdel.ops.batch import Packed
from fdel.ops.mask import Mask, Where
from tests.aot.bundles import CLOCK, CORES, branches, parts, sections

TOKENS = 4096
# Rows, query heads, key heads, channels of keys and of values, sequences in each row.
CALLS = {
    "32 heads over 8 of 128": (4, 32, 8, 128, 128, 1),
    "the same, 8 sequences in a row": (4, 32, 8, 128, 128, 8),
    "16 heads of 128": (4, 16, 16, 128, 128, 1),
    "64 heads over 8 of 64": (4, 64, 8, 64, 64, 1),
    "16 heads over 8 of 256": (2, 16, 8, 256, 256, 1),
    "16 heads of 192 and 128": (2, 16, 16, 192, 128, 1),
}
KERNELS = {"flash_attention": (2, 2), "flash_backward_queries": (4, 2), "flash_backward_keys": (4, 4)}  # H, Hv in FLOPs
WIDE = {"v5p": 128, "v6e": 256}  # channels and columns that a multiplier has at once
STORES = 100  # in a part of a program: more are of the start or the end of a tile


def lower(chip: str, name: str) -> aot.Compiled:
    """Compile a forward and a backward pass for one chip."""
    rows, heads, kv_heads, width, values, _ = CALLS[name]
    target = aot.parse_target({"v5p": "v5p:1x1x1", "v6e": "v6e:1x1"}[chip])
    mesh = params.make_mesh({}, aot.devices(target))
    at = NamedSharding(mesh, PartitionSpec())
    put = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct((rows, TOKENS, *shape), dtype, sharding=at)

    def call(batch: Packed, q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> tuple:
        with ops.use(attend="mosaic"):
            out, back = jax.vjp(lambda *x: ops.attend(batch, None, 0, *x, mask=Mask(0.1))[0], q, k, v)
            return out, back(dout)

    args = put(heads, width), put(kv_heads, width), put(kv_heads, values), put(heads, values)
    return aot.compile(target, jax.jit(call), Packed(*[put(dtype=jnp.int32)] * 2), *args, mesh=mesh)


def counted(text: str, items: int) -> tuple[int, int, int, int]:
    """Count the bundles of a pair of tiles: seen wholly, and in part; what each pair has beside, and what a tile has."""
    whole, masked = branches(text, items, 1)
    rest = [part for section in sections(text) if "vmatmul" not in section for part in parts(section) if part[0]]
    of_pair, of_tile = (sum(n for _, n, ops in rest if (ops.count("vst") > STORES) == long) for long in (False, True))
    return whole, masked, of_pair, of_tile


def walked(name: str, of_keys: bool) -> tuple[int, int, int, Call]:
    """Count pairs that are seen wholly, others, and tiles, of one row; and give what is static."""
    _, heads, kv_heads, width, _, sequences = CALLS[name]
    q, k = np.zeros((1, TOKENS, heads, width)), np.zeros((1, TOKENS, kv_heads, width))
    segments = jnp.repeat(jnp.arange(sequences, dtype=jnp.int32), TOKENS // sequences)[None]
    walk, *_ = kernel._walked(Mask(0.1), Where(segments), q, k, of_keys)
    whole = int((np.asarray(walk.partner[: int(walk.total)]) & WHOLE != 0).sum())
    return whole, int(walk.total) - whole, walk.tiles, kernel._plan(Mask(0.1), Where(segments), q, k)


def products(chip: str, op: str, name: str, how: Call) -> float:
    """Count the cycles that the products of a pair take the multipliers, whose sides are filled up."""
    (_, _, _, width, values, _), (queries, keys), wide = CALLS[name], how.tiles, WIDE[chip]
    up = lambda n: -(-n // wide) * wide
    of_keys, of_values = (n // 2 for n in KERNELS[op])
    flops = 2 * how.heads * queries * keys * (of_keys * up(width) + of_values * up(values))
    return flops * CLOCK * CORES[chip] / aot.CHIPS[chip].flops


def main(chip: str) -> None:
    """Print a line of JSON for each kernel of each call: bundles of a pair, seconds and their floor."""
    with tempfile.TemporaryDirectory() as folder:
        flags = {"to": folder, "llo_text": "true", "llo_pass_label_regex": ".*final_bundles.*"}
        os.environ["LIBTPU_INIT_ARGS"] = " ".join(f"--xla_jf_dump_{k}={v}" for k, v in flags.items())
        for name, (rows, heads, _, width, values, sequences) in CALLS.items():
            compiled = lower(chip, name)
            for op, (of_keys, of_values) in KERNELS.items():
                found = [x for x in Path(folder).glob(f"*{op}*-final_bundles.txt") if "analysis" not in x.name]
                plain, others, tiles, how = walked(name, op == "flash_backward_keys")
                items = how.heads * how.tiles.queries // program.rows(how)
                whole, masked, of_pair, of_tile = counted(max(found, key=lambda x: x.name).read_text(), items)
                least = products(chip, op, name, how)
                cycles = (
                    plain * max(whole, least)
                    + others * max(masked, least)
                    + (plain + others) * of_pair
                    + tiles * of_tile
                )
                seconds = cycles * rows * heads / how.heads / CORES[chip] / CLOCK
                length = TOKENS // sequences
                seen = rows * heads * sequences * length * (length + 1) / 2
                floor = seen * (of_keys * width + of_values * values) / aot.CHIPS[chip].flops
                told = dict(call=name, kernel=op, whole=whole, masked=masked, beside=of_pair, of_tile=of_tile)
                told |= dict(
                    products=least,
                    pairs=plain + others,
                    estimate=seconds,
                    floor=floor,
                    temporaries=compiled.temporaries,
                )
                print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
