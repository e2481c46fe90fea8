"""What ptxas makes of the Hopper kernels for attention in training batches, and the memory of a training step.

As `hopper_products`, in a process of its own: `python -m tests.aot.hopper_flash`. Calls have 4 rows of 4,096 tokens.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from fdel import aot, ops, params, plan
from fdel.models import llama
from fdel.ops import platform
from fdel.ops.batch import Packed
from fdel.ops.mask import Mask, Where
from tests.aot.hopper_products import say

ROWS, TOKENS = 4, 4096
# Heads of queries and of keys, channels of keys and of values, the mask, and whether there are sinks.
CALLS = {
    "32 heads over 8 of 128": (32, 8, 128, 128, Mask(0.1), False),
    "16 heads over 8 of 256, softcap, window": (16, 8, 256, 256, Mask(0.1, window=1024, softcap=50.0), False),
    "64 heads over 8 of 64, sinks, window": (64, 8, 64, 64, Mask(0.1, window=128), True),
    "128 heads of 192 and 128": (128, 128, 192, 128, Mask(0.1), False),
}
STEPS = ("flash", "hopper")  # implementations of attention in a training step with packed rows
# Two layers of Llama 3 8B, with few tokens in the vocabulary.
MODEL = llama.Config(
    vocab=1024, embed=4096, ffn=14336, layers=2, heads=32, kv_heads=8, head_dim=128, rope=ops.Rope(128, 5e5)
)


def lower(name: str) -> aot.Compiled:
    """Compile a call for one H100."""
    heads, kv_heads, channels, values, mask, sinks = CALLS[name]
    target = aot.parse_target("h100:1x1x1")
    mesh = params.make_mesh({}, aot.devices(target))
    put = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))
    half = lambda heads, channels: put(jnp.bfloat16, ROWS, TOKENS, heads, channels)

    @ops.use(attend="hopper")
    def call(q, k, v, segments, sinks):
        return ops.dispatch.run(
            ops.attention.ATTEND, None, q, k, v, Where(segments), mask=mask, sinks=sinks, alibi=None, bias=None
        )

    args: Any = half(heads, channels), half(kv_heads, channels), half(kv_heads, values), put(jnp.int32, ROWS, TOKENS)
    return aot.compile(target, jax.jit(call), *args, put(jnp.float32, heads) if sinks else None, mesh=mesh)


def step(impl: str) -> aot.Compiled:
    """Compile a training step of `MODEL` for one H100, with rows of several sequences."""
    target = aot.parse_target("h100:1x1x1")
    mesh = params.make_mesh(params.parse_mesh("fsdp=1"), aot.devices(target))
    with ops.use(attend=impl), platform.tracing_for(target.facts.platform):
        training = plan.Training("fsdp=1", ROWS, TOKENS, remat="nothing_saveable")
        step, (state, batch), _ = plan.training_step(llama, MODEL, training, mesh)
        batch["packed"] = Packed(batch["tokens"], batch["tokens"])
        return aot.compile(target, step, state, batch, mesh=mesh)


if __name__ == "__main__":
    calls = [*CALLS, *(f"training step, {impl}" for impl in STEPS)]
    say(calls, lambda name: lower(name) if name in CALLS else step(name.split()[-1]), sys.argv[1:])
