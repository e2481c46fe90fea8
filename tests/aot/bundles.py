"""What Mosaic TPU makes of the kernel for pages: a table of instructions in its loops, and the seconds that follow.

Run by `test_aot` in a process of its own, because libtpu reads its flags once: `python -m tests.aot.bundles v5p`.
XLA's own estimate leaves kernels out. What is counted: the program's bundles (one is issued in a cycle), a copy's bytes.
Copies run beside, so the estimate is the larger of the two, and the first group of pages, which nothing hides.
"""

import json
import os
import re
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from fdel import aot, ops, params
from fdel.kernels import paged_attention_tpu as kernel
from fdel.kernels import paged_program_tpu as program
from fdel.kernels import paged_prompt_tpu as prompt
from fdel.ops import platform, quantized_pages
from fdel.ops.batch import Paged, Pages
from fdel.ops.paged import paged_attention

CLOCK, CORES = 1.75e9, {"v5p": 2, "v6e": 1}
# Sequences, tokens of each, tokens of a page, key heads, query heads of each, channels; in "prefill" all tokens are new.
CALLS = {
    "decode, pages of 64": (64, 8192, 64, 8, 4, 128),
    "decode, pages of 128": (64, 8192, 128, 8, 4, 128),
    "decode, 1,024 tokens": (64, 1024, 64, 8, 4, 128),
    "decode, heads of 64": (64, 8192, 64, 8, 8, 64),
    "decode, one key head": (64, 8192, 64, 1, 4, 128),
    "prefill": (1, 4096, 64, 8, 4, 128),
    "decode, latents": (64, 8192, 64, 1, 128, 576),
    "decode, latents, 16 heads": (64, 8192, 64, 1, 16, 576),
    "prefill, latents": (1, 4096, 64, 1, 128, 576),
    "decode, int8": (64, 8192, 64, 8, 4, 128),
    "decode, fp8": (64, 8192, 64, 8, 4, 128),
    "decode, one key head, int8": (64, 8192, 64, 1, 4, 128),
    "prefill, int8": (1, 4096, 64, 8, 4, 128),
    "prefill, fp8": (1, 4096, 64, 8, 4, 128),
    "decode, latents, int8": (64, 8192, 64, 1, 128, 576),
    "decode, latents, 16 heads, int8": (64, 8192, 64, 1, 16, 576),
    "decode, latents, 16 heads, fp8": (64, 8192, 64, 1, 16, 576),
    "prefill, latents, int8": (1, 4096, 64, 1, 128, 576),
}
FEW = tuple(quantized_pages.FORMATS)  # ends of names whose pages are in 8 bits
LATENT = 512  # channels of values, the first of keys of 576
BLOCK = 32  # tokens of a block of a prompt


def lower(chip: str, name: str, impl: str, length: int):
    """Lower a call for one chip, from the table's shapes."""
    sequences, _, page, heads, group, dim = CALLS[name]
    target = aot.parse_target({"v5p": "v5p:1x1x1", "v6e": "v6e:1x1"}[chip])
    mesh = params.make_mesh({}, aot.devices(target))
    put = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))
    block, blocks = (BLOCK, CALLS[name][1] // BLOCK) if "prefill" in name else (1, sequences)
    v_dim = LATENT if "latents" in name else None
    side = max(1, 128 // dim)
    row = -(-dim // 128) * 128 if v_dim else dim * side
    shape = 2, sequences * length // page, heads // side, page
    format = next((format for format in FEW if name.endswith(format)), None)
    kept = put(jnp.bfloat16 if format is None else quantized_pages.FORMATS[format][0], *shape, row)
    with platform.tracing_for("tpu"):
        rows = quantized_pages.scale_rows(quantized_pages.scales(row), page)
    scales = None if format is None else put(jnp.float32, *shape[:3], *rows)
    second = (lambda x: None) if v_dim else (lambda x: x)
    pages = Pages(kept, second(kept), scales, second(scales))
    ints = lambda *shape: put(jnp.int32, *shape)
    batch = Paged(ints(blocks * block), ints(blocks, length // page), ints(blocks), block)

    def call(batch, pages, q):
        with ops.use(paged_attention=impl):
            return paged_attention(batch, pages, 1, q, mask=ops.Mask(0.1), v_dim=v_dim)

    q = put(jnp.bfloat16, blocks * block, heads * group, dim)
    return aot.compile(target, jax.jit(call), batch, pages, q, mesh=mesh)


def parts(text: str) -> list[tuple[int, int, str]]:
    """Cut a program at the borders of its loops: depth, bundles and instructions of each part."""
    loops: list[list] = []
    for label, depth, rest in re.findall(r"^\s*0x[0-9a-f]+\s+(\w\w)?\s*: (>*)(.*)$", text, re.M):
        if not loops or loops[-1][0] != len(depth) or label == "LB":
            loops.append([len(depth), 0, ""])
        loops[-1][1] += 1
        loops[-1][2] += rest
    return [(depth, n, ops) for depth, n, ops in loops]


def sections(text: str) -> list[str]:
    """Cut a program where one of its conditions may be left."""
    return re.split(r"^(?=\s*0x[0-9a-f]+\s+PF\s*: )", text, flags=re.M)


def branches(text: str, items: int, depth: int = 2) -> list[int]:
    """Count the bundles of a prompt's group of pages, without a mask and with one, which has `items` to compute."""
    found: list[list[int]] = []  # outside of loops, and in a round of one
    for part in sections(text):
        if "vmatmul" in part:
            found.append([sum(n for at, n, _ in parts(part) if at == d) for d in (depth, depth + 1)])
    rounds = [max(0, items - 2) // prompt.TOGETHER[plain] for plain in (True, False)]
    if len(found) == 1:  # of latents, which have a mask always
        found, rounds = found * 2, rounds[1:] * 2
    if len(found) != 2:
        raise ValueError(
            f"{len(found)} parts of the program have products; expected one without a mask, and one with it"
        )
    return [once + n * each for n, (once, each) in zip(rounds, found, strict=True)]


def bundles(text: str) -> tuple[int, int, float, int]:
    """Count the bundles of a step of the grid, of a group of pages, of a page, and of products in a loop of their own."""
    loops = parts(text)
    inner = [(n, "vmatmul" in ops, "dma" in ops) for depth, n, ops in loops if depth == 3]
    products = sum(n for n, matmul, _ in inner if matmul)
    starts = [(n, ops.count("dma.hbm_to_vmem")) for depth, n, ops in loops if depth == 3]  # of some pages, or of one
    starts = [(n, copies) for n, copies in starts if copies]
    if starts:
        # A whole group is waited for at once.
        page = min(n * min(c for _, c in starts) / copies for n, copies in starts)
    else:  # of a large program the compiler makes a loop of its own for each copy
        each = [n for depth, n, ops in loops if depth == 4 or (depth == 3 and "vmatmul" not in ops)]
        page = sum(each) / sum(depth == 4 for depth, *_ in loops)
    clear = sum(n for n, *kinds in inner if not any(kinds))  # of what no token wrote: in the last page of a sequence
    # Loops that start copies before a walk are of the first step, and of rows without tokens.
    step, group = (sum(n for depth, n, ops in loops if depth == d and (d == 1 or "hbm_to" not in ops)) for d in (1, 2))
    return step + clear, group, page, products


def rows_of(name: str) -> tuple[int, int, int]:
    """Give the tokens of a prompt's tile, the parts of its heads, each with a walk of its own, and the items of a group."""
    _, _, _, heads, group, _ = CALLS[name]
    tile, walks = (BLOCK, 2) if "latents" in name else (kernel.TOKENS, 1)
    return tile, walks, heads * -(-tile * group // walks // program.ROWS)


def estimate(chip: str, name: str, counted: tuple, plain: int = 0, masked: int = 0) -> tuple[float, float]:
    """Give the seconds of a call, and the floor: of its bytes, or of its FLOPs if they take longer.

    `plain` and `masked` are the bundles of a prompt's group of pages (`branches`), which `counted` has in it, too."""
    sequences, length, page, heads, group, dim = CALLS[name]
    about, (step, each, one, products), prefill = aot.CHIPS[chip], counted, "prefill" in name
    # Bytes of a token that are needed and those that are copied, in rows of whole lanes; channels of keys and values.
    few = name.endswith(FEW)
    needed, token, channels = 4 * heads * dim, 4 * heads * dim, 2 * dim
    if few:  # a scale of 4 bytes, in rows of which a page fills a part
        needed, token = 2 * heads * (dim + 4), 2 * heads * (dim + 4 * 128 // page)
    if latents := "latents" in name:
        needed, token, channels = 2 * dim, 2 * (dim + -dim % 128), dim + LATENT
        if few:
            needed, token = dim + 4 * dim // 64, dim + -dim % 128 + 4 * 8 * 128 // page
    pages = max(1, min(program.KEYS[not prefill] // page, program.GROUP[not prefill] // (page * token), length // page))
    keys = pages * page
    tile, walks, _ = rows_of(name)
    cycles = pages * one + (0 if prefill else each + products)
    if prefill:
        tiles = [end for end in range(tile, length + 1, tile) for _ in range(walks)]
        groups, steps = sum(-(-end // keys) for end in tiles), len(tiles)
        whole = sum((end - tile + 1) // keys for end in tiles)
        read, flops = sum(-(-end // page) * page for end in tiles) * token, length**2 * heads * group * channels
        floor = max(length * needed / about.bandwidth, flops / about.flops)
    else:
        groups, steps, read = sequences * -(-length // keys), sequences, sequences * length * token
        flops = 2 * sequences * length * heads * group * channels
        floor = max(sequences * length * needed / about.bandwidth, flops / about.flops)
    made = groups * keys * (tile // walks if prefill else 1) * heads * group * 2 * (channels + latents * (-dim % 128))
    busy = groups * cycles + steps * step + (whole * plain + (groups - whole) * masked if prefill else 0)
    busy = busy / CLOCK / CORES[chip]
    return max(busy, made / about.flops, read / about.bandwidth) + keys * token / about.bandwidth, floor


def main(chip: str, *only: str) -> None:
    """Print one line of JSON for each call: bundles, estimate, floor and XLA's estimate for the reference, in seconds.

    `only` those that have some text in their names; without, none of pages in 8 bits."""
    with tempfile.TemporaryDirectory() as folder:
        flags = {"to": folder, "llo_text": "true", "llo_pass_label_regex": ".*final_bundles.*"}
        os.environ["LIBTPU_INIT_ARGS"] = " ".join(f"--xla_jf_dump_{k}={v}" for k, v in flags.items())
        for name in [x for x in CALLS if (any(text in x for text in only) if only else not x.endswith(FEW))]:
            lower(chip, name, "mosaic", CALLS[name][1])
            found = [x for x in Path(folder).glob("*paged_attention*-final_bundles.txt") if "analysis" not in x.name]
            loop = lower(chip, name, "xla", 512).estimate * CALLS[name][1] / 512  # one round of its loop is of 512 keys
            text = max(found, key=lambda x: x.name).read_text()  # libtpu wrote it in the meantime
            counted, more = bundles(text), branches(text, rows_of(name)[2]) if "prefill" in name else ()
            seconds, floor = estimate(chip, name, counted, *more)
            counted = (counted[0], *more) if more else counted  # of a step; of a group of pages of either kind
            print(json.dumps(dict(call=name, bundles=counted, estimate=seconds, floor=floor, xla=loop)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
