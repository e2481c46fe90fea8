"""What ptxas makes of attention's backward pass on Hopper at the shapes of models: see `hopper_products`.

`python -m tests.aot.hopper_flash_backward`. Calls have 4 rows of 4,096 tokens, with segments. Registers are the most of
both kernels.
"""

import functools
import sys

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from fdel import aot, ops, params
from fdel.kernels import flash_backward_gpu as kernel
from fdel.ops.mask import Where
from tests.aot.hopper_products import say

ROWS, TOKENS = 4, 4096
# Query heads, key heads, channels of keys and of values, mask, sinks; whether sums have an order, where they need none.
CALLS = {
    "32 heads over 8 of 128": (32, 8, 128, 128, ops.Mask(0.09), False),
    "32 heads over 8 of 128, ordered": (32, 8, 128, 128, ops.Mask(0.09), False, True),
    "32 over 16 of 128, softcap, window": (32, 16, 128, 128, ops.Mask(0.09, window=1024, softcap=50.0), False),
    "16 over 8 of 256, softcap, window": (16, 8, 256, 256, ops.Mask(0.06, window=1024, softcap=50.0), False),
    "64 over 8 of 64, sinks, window": (64, 8, 64, 64, ops.Mask(0.125, window=128), True),
    "128 heads of 192 and 128": (128, 128, 192, 128, ops.Mask(0.07), False),
}


def lower(name: str) -> aot.Compiled:
    """Compile a call for one H100."""
    heads, kv_heads, width, values, mask, sinks, *ordered = CALLS[name]
    target = aot.parse_target("h100:1x1x1")
    mesh = params.make_mesh({}, aot.devices(target))
    put = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))
    half, single = (lambda *shape, d=d: put(d, ROWS, TOKENS, *shape) for d in (jnp.bfloat16, jnp.float32))
    segments = put(jnp.int32, ROWS, TOKENS)
    out, lse = half(heads, values), single(heads)
    backward = functools.partial(kernel.backward, mask, ordered=any(ordered))
    call = lambda segments, sinks, q, k, v, *after: backward(q, k, v, Where(segments), sinks, None, *after)
    given = half(heads, width), half(kv_heads, width), half(kv_heads, values), out, lse, out, lse
    sink = put(jnp.float32, heads) if sinks else None
    return aot.compile(target, jax.jit(call), segments, sink, *given, mesh=mesh)


if __name__ == "__main__":
    say(CALLS, lower, sys.argv[1:])
