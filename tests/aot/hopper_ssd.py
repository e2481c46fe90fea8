"""What ptxas makes of the Hopper kernels for `ops.ssd` at the shapes of models, and the memory of Mamba-2's training step.

As `hopper_products`, in a process of its own: `python -m tests.aot.hopper_ssd`. Calls have 4 rows of 1,024 tokens.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from fdel import aot, ops, params, plan
from fdel.models import mamba2
from fdel.ops.batch import Packed
from tests.aot.hopper_products import say

ROWS, TOKENS = 4, 1024
# Heads, channels, groups, states; whether with the gradient.
CALLS = {
    "80 heads of 64, 128 states": (80, 64, 1, 128, False),
    "80 heads of 64, 128 states, 8 groups": (80, 64, 8, 128, False),
    "64 heads of 64, 64 states": (64, 64, 1, 64, False),
    "80 heads of 64, 128 states, gradient": (80, 64, 1, 128, True),
    "80 heads of 64, 128 states, 8 groups, gradient": (80, 64, 8, 128, True),
    "64 heads of 64, 64 states, gradient": (64, 64, 1, 64, True),
}
STEPS = ("xla", "hopper")  # implementations of the recurrence in a training step
# Two layers of the published 2.7 billion parameters, with few tokens in the vocabulary.
MODEL = mamba2.Config(
    vocab=1024, embed=2560, layers=2, heads=80, head_dim=64, groups=1, chunk=256, tied=True, limits=(0.0, float("inf"))
)


def lower(name: str) -> aot.Compiled:
    """Compile a call for one H100."""
    heads, channels, groups, states, gradient = CALLS[name]
    target = aot.parse_target("h100:1x1x1")
    mesh = params.make_mesh({}, aot.devices(target))
    put = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))
    each = lambda n, dtype=jnp.bfloat16: put(dtype, ROWS, TOKENS, n)
    cut = lambda x, n: x.reshape(ROWS, TOKENS, n, -1)

    @ops.use(ssd="hopper")
    def call(batch, dy, x, dt, a, b, c, d):
        """Heads lie beside each other, as products with weights give them."""
        one = lambda x, dt, a, b, c, d: ops.ssd(
            batch, None, 0, cut(x, heads), dt, a, cut(b, groups), cut(c, groups), d=d
        )[0]
        y, vjp = jax.vjp(one, x, dt, a, b, c, d) if gradient else (one(x, dt, a, b, c, d), None)
        return y.reshape(dy.shape) if vjp is None else vjp(cut(dy, heads))

    ints: Any = put(jnp.int32, ROWS, TOKENS)
    wide, shared = each(heads * channels), each(groups * states)
    numbers, steps = put(jnp.float32, heads), each(heads, jnp.float32)
    return aot.compile(
        target, jax.jit(call), Packed(ints, ints), wide, wide, steps, numbers, shared, shared, numbers, mesh=mesh
    )


def step(impl: str) -> aot.Compiled:
    """Compile a training step of `MODEL` for one H100."""
    target = aot.parse_target("h100:1x1x1")
    with ops.use(ssd=impl):
        return aot.train_step(target, mamba2, MODEL, plan.Training("fsdp=1", ROWS, TOKENS, remat="nothing_saveable"))


if __name__ == "__main__":
    calls = [*CALLS, *(f"training step, {impl}" for impl in STEPS)]
    say(calls, lambda name: lower(name) if name in CALLS else step(name.split()[-1]), sys.argv[1:])
