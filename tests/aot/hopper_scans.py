"""What ptxas makes of the Hopper kernels for selective scans, at the shapes of models: see `hopper_products`.

`python -m tests.aot.hopper_scans`. A gradient's registers are the most of both passes; what the forward pass keeps, 2 bytes
for each token and channel, and the programs' sums for db and dc, 1 byte, are among its temporaries.
"""

import sys

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from fdel import aot, ops, params
from fdel.ops.batch import Packed
from tests.aot.hopper_products import say

# Rows, tokens, channels of 16 states, dtype, whether gradients are wanted.
SCANS = {
    "4 x 1,024 tokens, 5,120 channels": (4, 1024, 5120, "bfloat16", False),
    "the same, gradient": (4, 1024, 5120, "bfloat16", True),
    "4 x 1,024 tokens, 8,192 channels": (4, 1024, 8192, "bfloat16", False),
    "8,192 channels, gradient": (4, 1024, 8192, "bfloat16", True),
    "float32, 2 x 1,000 tokens, 1,536 channels, gradient": (2, 1000, 1536, "float32", True),
}


def lower(name: str, impl: str = "hopper") -> aot.Compiled:
    """Compile a call for one H100."""
    rows, t, channels, dtype, backward = SCANS[name]
    target = aot.parse_target("h100:1x1x1")
    mesh = params.make_mesh({}, aot.devices(target))
    put = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))
    x, shared = put(dtype, rows, t, channels), put(dtype, rows, t, 16)
    inputs = x, put(jnp.float32, *x.shape), put(jnp.float32, channels, 16), shared, shared, put(jnp.float32, channels)
    scan = lambda batch, *inputs: ops.selective_scan(batch, None, 0, *inputs[:-1], d=inputs[-1])[0]

    @ops.use(selective_scan=impl)
    def call(batch, dy, *inputs):
        if not backward:
            return scan(batch, *inputs)
        y, vjp = jax.vjp(lambda *inputs: scan(batch, *inputs), *inputs)
        return y, vjp(dy)

    tokens = put(jnp.int32, rows, t)
    return aot.compile(target, jax.jit(call), Packed(tokens, tokens), x, *inputs, mesh=mesh)


if __name__ == "__main__":
    say(SCANS, lower, sys.argv[1:])
