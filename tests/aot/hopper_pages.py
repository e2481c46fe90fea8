"""What ptxas makes of the Hopper kernel for pages at the shapes of models, and the memory of a Llama's decode step.

As `hopper_products`, in a process of its own: `python -m tests.aot.hopper_pages`.
"""

import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from fdel import aot, ops, params
from fdel.models import llama
from fdel.ops.batch import Paged, Pages
from fdel.ops.paged import paged_attention
from tests.aot.hopper_products import say

DECODE, ONE, PROMPT = (64, 1, 8192), (1, 1, 8192), (16, 32, 4096)  # blocks, tokens of each, tokens of a sequence
LLAMA, NARROW, GEMMA = (32, 8, 128), (64, 8, 64), (16, 8, 256)  # query heads, key heads, channels
NEAR, SHORT = ops.Mask(0.1, window=1024, softcap=50.0), ops.Mask(0.1, window=128, softcap=30.0)
# Blocks, heads, dtype of pages, mask; whether there are sinks and slopes of alibi.
CALLS: dict[str, tuple] = {
    "decode, 64 x 8,192 tokens, 32 heads over 8 of 128": (DECODE, LLAMA, "bfloat16"),
    "decode, 64 x 8,192 tokens, 32 heads over 8 of 128, int8": (DECODE, LLAMA, "int8"),
    "decode, 64 x 8,192 tokens, 32 heads over 8 of 128, fp8": (DECODE, LLAMA, "uint8"),
    "decode, 1 x 8,192 tokens, 32 heads over 8 of 128": (ONE, LLAMA, "bfloat16"),
    "decode, 1 x 8,192 tokens, 32 heads over 8 of 128, int8": (ONE, LLAMA, "int8"),
    "decode, 1 x 8,192 tokens, 32 heads over 8 of 128, fp8": (ONE, LLAMA, "uint8"),
    "prefill, 16 blocks of 32, 32 heads over 8 of 128": (PROMPT, LLAMA, "bfloat16"),
    "prefill, 16 blocks of 32, 32 heads over 8 of 128, int8": (PROMPT, LLAMA, "int8"),
    "prefill, 16 blocks of 32, 32 heads over 8 of 128, fp8": (PROMPT, LLAMA, "uint8"),
    "decode, 64 x 8,192 tokens, 64 heads over 8 of 64, sinks, slopes": (DECODE, NARROW, "bfloat16", SHORT, True),
    "decode, 64 x 8,192 tokens, 64 heads over 8 of 64, sinks, slopes, int8": (DECODE, NARROW, "int8", SHORT, True),
    "decode, 64 x 8,192 tokens, 16 heads over 8 of 256, window, softcap": (DECODE, GEMMA, "bfloat16", NEAR),
    "decode, 64 x 8,192 tokens, 16 heads over 8 of 256, window, softcap, int8": (DECODE, GEMMA, "int8", NEAR),
    "prefill, 16 blocks of 32, 16 heads over 8 of 256, window, softcap": (PROMPT, GEMMA, "bfloat16", NEAR),
    "prefill, 16 blocks of 32, 16 heads over 8 of 256, window, softcap, fp8": (PROMPT, GEMMA, "uint8", NEAR),
}
STEPS = {f"decode step, {kv}, {impl}": (kv, impl) for kv in ("int8", "fp8") for impl in ("xla", "hopper")}
# 1.2 billion parameters with Llama's heads of 128, as `aot_programs` has it; 64 sequences of 1,024 tokens.
MODEL = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
}  # fmt: skip


def lower(name: str) -> aot.Compiled:
    """Compile a call for one H100."""
    (blocks, block, tokens), (heads, kv_heads, width), kind, *more = CALLS[name]
    mask, per_head = [*more, ops.Mask(0.1)][0], len(more) == 2
    target = aot.parse_target("h100:1x1x1")
    mesh = params.make_mesh({}, aot.devices(target))
    put = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))
    ints = lambda *shape: put(jnp.int32, *shape)
    count: Any = blocks * tokens // 64
    pages = put(jnp.dtype(kind), 2, count, kv_heads, 64, width)
    scale = None if kind == "bfloat16" else put(jnp.float32, 2, count, kv_heads, 1, 64)
    batch = Paged(ints(blocks * block), ints(blocks, tokens // 64), ints(blocks), block)
    numbers = put(jnp.float32, heads) if per_head else None

    @ops.use(paged_attention="hopper")
    def call(batch, cache, q, numbers):
        return paged_attention(batch, cache, 1, q, mask=mask, sinks=numbers, alibi=numbers)

    q = put(jnp.bfloat16, blocks * block, heads, width)
    return aot.compile(target, jax.jit(call), batch, Pages(pages, pages, scale, scale), q, numbers, mesh=mesh)


def step(kv: str, impl: str) -> aot.Compiled:
    """Compile an engine's decode step of `MODEL` for one H100."""
    target = aot.parse_target("h100:1x1x1")
    with ops.use(paged_attention=impl):
        return aot.serving(target, llama, llama.Config.from_hf(MODEL), aot.Serving("tp=1", 64, 1024, kv=kv), "decode")[
            0
        ]


def of_step(name: str, found: aot.Compiled) -> None:
    """Say how many loops and kernels a step has."""
    if name in STEPS:
        kernels = len(re.findall(r"custom-call\(.*mosaic_gpu", found.text))
        print("loops:", found.loops, "kernels:", kernels, flush=True)


if __name__ == "__main__":
    say([*CALLS, *STEPS], lambda name: lower(name) if name in CALLS else step(*STEPS[name]), sys.argv[1:], of_step)
