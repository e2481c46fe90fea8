"""What ptxas makes of Hopper kernels for products and latents, at the shapes of models: registers, spills, wgmma in a row.

Run by `test_aot` in a process of its own, since what ptxas says is asked for by the environment: `python -m
tests.aot.hopper_products`. Temporaries are those of the program around the kernel, in bytes.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from fdel import aot, ops, params
from fdel.ops.batch import Packed, Paged, Pages
from fdel.ops.paged import paged_attention
from fdel.ops.weights import PACKED, Quantized

SERIALIZED = "wgmma.mma_async instructions are serialized"  # in what ptxas says
# Rows, inputs, outputs, format, inputs of a group; whether zero points are stored, or how scales are in 8 bits.
QUANTIZED = {
    "8 rows, int8": (8, 4096, 14336, "int8", 4096, False),
    "8 rows, GPTQ": (8, 4096, 14336, "uint4", 128, True),
    "8 rows, int4 by 64": (8, 4096, 14336, "int4", 64, False),
    "8 rows, fp8": (8, 4096, 14336, "fp8", 4096, False),
    "8 rows, fp8 by 128": (8, 4096, 14336, "fp8", 128, False),
    "8 rows, e2m1 by 64": (8, 4096, 14336, "e2m1", 64, False),
    "8 rows, MXFP4": (8, 4096, 14336, "e2m1", 32, "exponent"),
    "8 rows, MXFP4, 2,880": (8, 2880, 2880, "e2m1", 32, "exponent"),
    "8 rows, NVFP4": (8, 4096, 14336, "e2m1", 16, "fp8"),
    "8 rows, GPTQ by 32": (8, 4096, 14336, "uint4", 32, True),
    "8 rows, nf4 by 64": (8, 4096, 14336, "nf4", 64, False),
    "8 rows, 8,192 to 28,672, int8": (8, 8192, 28672, "int8", 8192, False),
    "8 rows, 8,192 to 28,672, GPTQ": (8, 8192, 28672, "uint4", 128, True),
    "16 rows, GPTQ": (16, 4096, 14336, "uint4", 128, True),
    "16 rows, nf4 by 64": (16, 4096, 14336, "nf4", 64, False),
    "64 rows, GPTQ": (64, 4096, 14336, "uint4", 128, True),
    "4,096 rows, int8": (4096, 4096, 14336, "int8", 4096, False),
    "4,096 rows, uint8 by 128": (4096, 4096, 14336, "uint8", 128, True),
    "4,096 rows, GPTQ": (4096, 4096, 14336, "uint4", 128, True),
    "4,096 rows, fp8": (4096, 4096, 14336, "fp8", 4096, False),
    "4,096 rows, MXFP4": (4096, 4096, 14336, "e2m1", 32, "exponent"),
    "4,096 rows, nf4 by 64": (4096, 4096, 14336, "nf4", 64, False),
}
# Rows, groups, outputs, inputs, and which of the three products.
GROUPED = {
    "16,384 rows of 8": (16384, 8, 14336, 4096, "forward"),
    "16,384 rows of 8, rows' gradient": (16384, 8, 14336, 4096, "rows"),
    "16,384 rows of 8, matrices' gradient": (16384, 8, 14336, 4096, "matrices"),
    "512 rows of 128": (512, 128, 768, 2048, "forward"),
    "16 rows of 64, of 1,408": (16, 64, 1408, 2048, "forward"),
    "16,384 rows of 8, gate and up": (16384, 8, 14336, 4096, "glu"),
    "16,384 rows of 8, gate and up, kept": (16384, 8, 14336, 4096, "kept"),
    "512 rows of 128, gate and up": (512, 128, 768, 2048, "glu"),
    "gpt_oss, ep=8, 32,768 rows": (32768, 4, 2880, 2880, "forward"),
    "gpt_oss, ep=8, 32,768 rows, rows' gradient": (32768, 4, 2880, 2880, "rows"),
    "gpt_oss, ep=8, 32,768 rows, matrices' gradient": (32768, 4, 2880, 2880, "matrices"),
    "gpt_oss, 64 tokens": (256, 32, 2880, 2880, "forward"),
    "gpt_oss, tp=4, down": (16384, 32, 2880, 720, "forward"),
    "gpt_oss, tp=4, down, rows' gradient": (16384, 32, 2880, 720, "rows"),
    "gpt_oss, tp=4, down, matrices' gradient": (16384, 32, 2880, 720, "matrices"),
    "qwen3_moe, tp=4, gate and up": (16384, 128, 192, 2048, "glu"),
    "qwen3_moe, tp=4, gate and up, kept": (16384, 128, 192, 2048, "kept"),
    "qwen3_moe, tp=4, down": (16384, 128, 2048, 192, "forward"),
    "qwen3_moe, tp=4, down, rows' gradient": (16384, 128, 2048, 192, "rows"),
    "qwen3_moe, tp=4, down, matrices' gradient": (16384, 128, 2048, 192, "matrices"),
    "qwen3_moe, tp=8, 64 tokens, gate and up": (512, 128, 96, 2048, "glu"),
    "qwen3_moe, tp=8, 64 tokens, down": (512, 128, 2048, 96, "forward"),
}
# Rows, matrices, outputs, inputs, format, inputs of a group; zero points or scales as above.
EXPERTS = {
    "gpt_oss, 64 tokens, MXFP4": (256, 32, 2880, 2880, "e2m1", 32, "exponent"),
    "gpt_oss, 4 tokens, MXFP4": (16, 128, 2880, 2880, "e2m1", 32, "exponent"),
    "gpt_oss, 4,096 tokens, MXFP4": (16384, 32, 2880, 2880, "e2m1", 32, "exponent"),
    "16 rows of 64, int8": (16, 64, 1408, 2048, "int8", 2048, False),
    "16 rows of 64, GPTQ": (16, 64, 1408, 2048, "uint4", 128, True),
    "16 rows of 64, nf4 by 64": (16, 64, 1408, 2048, "nf4", 64, False),
    "16 rows of 64, fp8 by 128": (16, 64, 1408, 2048, "fp8", 128, False),
    "512 rows of 64, GPTQ": (512, 64, 1408, 2048, "uint4", 128, True),
    "512 rows of 64, nf4 by 64": (512, 64, 1408, 2048, "nf4", 64, False),
    "512 rows of 128, int4 by 128": (512, 128, 768, 2048, "int4", 128, False),
    "16,384 rows of 8, int4 by 128": (16384, 8, 14336, 4096, "int4", 128, False),
    "16,384 rows of 8, fp8": (16384, 8, 14336, 4096, "fp8", 4096, False),
}
# Blocks, tokens of each, tokens of a sequence, query heads over latents of 512 + 64.
LATENTS = {
    "latents, decode, 64 x 8,192 tokens, 128 heads": (64, 1, 8192, 128),
    "latents, decode, 1 x 8,192 tokens, 128 heads": (1, 1, 8192, 128),
    "latents, decode, 64 x 8,192 tokens, 16 heads": (64, 1, 8192, 16),
    "latents, prefill, 16 blocks of 32, 128 heads": (16, 32, 4096, 128),
}
# Rows, tokens of each, heads of 128 and 128; whether gradients are computed, and whether each key channel has a decay.
DELTAS = {
    "delta rule, 4 x 1,024 tokens, 32 heads": (4, 1024, 32, False, False),
    "delta rule, 4 x 1,024 tokens, 32 heads, gradient": (4, 1024, 32, True, False),
    "delta rule, decays of channels": (4, 1024, 32, False, True),
    "delta rule, decays of channels, gradient": (4, 1024, 32, True, True),
}


def weight(
    put: Callable, outputs: tuple[int, ...], inputs: int, format: str, group: int, more: bool | str
) -> Quantized:
    """Make matrices of `QUANTIZED`."""
    of_groups, kind = (*outputs, inputs // group), np.dtype("float32")
    scale: Any = put(jnp.float32 if isinstance(more, bool) else jnp.uint8, *of_groups)
    if more == "fp8":
        scale = Quantized(scale, put(jnp.float32, *outputs, 1), None, "fp8", of_groups[-1:], kind)
    values = put(jnp.int8 if format == "int8" else jnp.uint8, *outputs, inputs // (2 if format in PACKED else 1))
    return Quantized(values, scale, put(jnp.uint8, *of_groups) if more is True else None, format, (inputs,), kind)


def lower(name: str) -> aot.Compiled:
    """Compile a call for one H100."""
    target = aot.parse_target("h100:1x1x1")
    mesh = params.make_mesh({}, aot.devices(target))
    put = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))
    if name in QUANTIZED:
        rows, inputs, outputs, format, group, zero = QUANTIZED[name]
        args = put(jnp.bfloat16, rows, inputs), weight(put, (outputs,), inputs, format, group, zero)
        call = ops.use(quantized_matmul="hopper")(lambda x, w: ops.einsum("td,fd->tf", x, w))
        return aot.compile(target, jax.jit(call), *args, mesh=mesh)
    if name in LATENTS:
        blocks, block, tokens, heads = LATENTS[name]
        pages = blocks * tokens // 64
        ints = lambda *shape: put(jnp.int32, *shape)
        batch = Paged(ints(blocks * block), ints(blocks, tokens // 64), ints(blocks), block)
        call = ops.use(paged_attention="hopper")(
            lambda batch, cache, q: paged_attention(batch, cache, 1, q, mask=ops.Mask(0.1), v_dim=512)
        )
        args = (
            batch,
            Pages(put(jnp.bfloat16, 2, pages, 1, 64, 576), None),
            put(jnp.bfloat16, blocks * block, heads, 576),
        )
        return aot.compile(target, jax.jit(call), *args, mesh=mesh)
    if name in EXPERTS:
        rows, groups, outputs, *how = EXPERTS[name]
        args = put(jnp.bfloat16, rows, how[0]), weight(put, (groups, outputs), *how), put(jnp.int32, groups)
        call = ops.use(grouped_matmul="hopper")(lambda x, w, sizes: ops.grouped_matmul(x, w, sizes))
        return aot.compile(target, jax.jit(call), *args, mesh=mesh)
    if name in DELTAS:
        rows, tokens, heads, backward, channels = DELTAS[name]
        half, single = put(jnp.bfloat16, rows, tokens, heads, 128), put(jnp.float32, rows, tokens, heads)

        @ops.use(gated_delta_rule="hopper")
        def rule(segments, dy, *inputs):
            call = lambda *x: ops.gated_delta_rule(Packed(segments, segments), None, 0, *x)[0]
            return jax.vjp(call, *inputs)[1](dy) if backward else call(*inputs)

        decays = put(jnp.float32, *half.shape) if channels else single
        args = put(jnp.int32, rows, tokens), half, half, half, half, decays, single
        return aot.compile(target, jax.jit(rule), *args, mesh=mesh)
    rows, groups, outputs, inputs, which = GROUPED[name]

    @ops.use(grouped_matmul="hopper")
    def several(x, w, sizes, dy):
        y, vjp = jax.vjp(lambda x, w: ops.grouped_matmul(x, w, sizes), x, w)
        return {"forward": y} if which == "forward" else dict(zip(("rows", "matrices"), vjp(dy), strict=True))

    half = lambda *shape: put(jnp.bfloat16, *shape)
    if which in ("glu", "kept"):
        join = lambda gate, up: jax.nn.silu(gate) * up
        one = ops.use(grouped_glu="hopper")(lambda x, gate, up, sizes: ops.grouped_glu(x, gate, up, sizes, join))
        kept = lambda *args: jax.vjp(lambda x: one(x, *args[1:]), args[0])  # what a backward pass reads is written, too
        args = half(rows, inputs), *[half(groups, outputs, inputs)] * 2, put(jnp.int32, groups)
        return aot.compile(target, jax.jit(one if which == "glu" else kept), *args, mesh=mesh)
    call = lambda *args: several(*args)[which]
    args = half(rows, inputs), half(groups, outputs, inputs), put(jnp.int32, groups), half(rows, outputs)
    return aot.compile(target, jax.jit(call), *args, mesh=mesh)


def say(
    names: Iterable[str], lower: Callable[[str], aot.Compiled], some: Sequence[str],
    more: Callable[[str, aot.Compiled], None] = lambda *_: None,
) -> None:  # fmt: skip
    """Compile the calls, or those that have some text in their names; ptxas writes what it found beside."""
    for name in names:
        if not some or any(text in name for text in some):
            print("call:", name, flush=True)
            found = lower(name)
            print("temporaries:", found.temporaries, flush=True)
            more(name, found)


def table(*some: str, module: str = "hopper_products") -> list[dict]:
    """Run a module in a process and read what it says: one row for each call."""
    command, root = [sys.executable, "-m", f"tests.aot.{module}", *some], Path(__file__).parents[2]
    done = subprocess.run(
        command, cwd=root, env=os.environ | {"MOSAIC_GPU_DUMP_PTXAS": "1"}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, check=False, timeout=1500,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stdout[-4000:])
    rows = []
    for part in done.stdout.split("call: ")[1:]:
        numbers = lambda pattern, part=part: [int(n) for n in re.findall(pattern, part)]
        rows.append({
            "call": part.partition("\n")[0], "registers": max(numbers(r"Used (\d+) registers"), default=None),
            "spills": sum(numbers(r"stack frame, (\d+) bytes spill stores")), "serialized": SERIALIZED in part,
            "temporaries": sum(numbers(r"temporaries: (\d+)")),
        })  # fmt: skip
    return rows


if __name__ == "__main__":
    say([*QUANTIZED, *GROUPED, *EXPERTS, *LATENTS, *DELTAS], lower, sys.argv[1:])
