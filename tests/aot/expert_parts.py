"""Quantized matrices of which devices along `tp` hold parts: experts, and products that give outputs or sum over inputs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fdel import aot, models, ops, params
from fdel.ops.weights import PACKED, Quantized

GROUPS = {"int8": 0, "int4": 128, "e2m1": 32}  # inputs of a scale; 0: all of them
EXPERTS, EMBED, FFN, TOKENS, CHOSEN = 8, 2048, 4096, 64, 2
TARGETS = {"v5p": "v5p:2x2x1", "h100": "h100:1x1x8"}


HOPPER = dict.fromkeys(("quantized_matmul", "grouped_matmul", "grouped_glu"), "hopper")
# Mixtures whose matrices are quantized, in two layers: sizes as published, and the format.
MIXTURES = {
    "gpt_oss": (dict(num_local_experts=32, num_hidden_layers=2, vocab_size=32768), "mxfp4"),
    "mixtral": (dict(num_hidden_layers=2, num_key_value_heads=8, hidden_size=4096, intermediate_size=14336,
                     num_attention_heads=32), "int4"),
}  # fmt: skip


def step(name: str, what: str, target: aot.Target, **chosen: str) -> aot.Compiled:
    """Compile an engine's program "decode" or "prefill" of such a mixture for a device: 64 rows of 1,024 tokens."""
    family, (sizes, form) = models.family(name), MIXTURES[name]
    cfg = family.Config.from_hf(sizes | {"model_type": name})
    with ops.use(**chosen):
        how = aot.Serving("", 64, 1024, format=form)
        return aot.serving(target, family, cfg, how, what)[0]


def mesh_of(chip: str) -> tuple[aot.Target, Mesh]:
    """Four chips or eight GPUs, all of them along `tp`."""
    target = aot.parse_target(TARGETS[chip])
    return target, params.make_mesh({"tp": target.count}, aot.devices(target))


def put(mesh: Mesh, dtype: Any, shape: tuple[int, ...], at: P) -> jax.ShapeDtypeStruct:
    """Say where an array lies; an axis of one number is whole everywhere."""
    names = [name if size > 1 else None for name, size in zip((*at, *[None] * len(shape)), shape, strict=False)]
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*names)))


def weight(mesh: Mesh, format: str, outputs: tuple[int, ...], inputs: int, at: P) -> Quantized:
    """Make a matrix [*outputs inputs], or several."""
    group = GROUPS[format] or inputs
    values, scale = inputs // (2 if format in PACKED else 1), inputs // group
    return Quantized(
        put(mesh, jnp.int8 if format == "int8" else jnp.uint8, (*outputs, values), at),
        put(mesh, jnp.uint8 if format == "e2m1" else jnp.float32, (*outputs, scale), at),
        None, format, (inputs,), np.dtype("float32"),
    )  # fmt: skip


def experts(chip: str, format: str) -> aot.Compiled:
    """Compile a mixture's feed-forward, each device with its hidden units of all experts."""
    target, mesh = mesh_of(chip)
    up = weight(mesh, format, (EXPERTS, FFN), EMBED, P(None, "tp"))
    p = {"gate": up, "up": up, "down": weight(mesh, format, (EXPERTS, EMBED), FFN, P(None, None, "tp"))}
    shape = (TOKENS, CHOSEN)
    args = put(mesh, jnp.bfloat16, (TOKENS, EMBED), P()), p
    args += put(mesh, jnp.float32, shape, P()), put(mesh, jnp.int32, shape, P())
    program = jax.jit(lambda x, p, weights, chosen: ops.moe(x, p, weights, chosen, jax.nn.silu))
    return aot.compile(target, program, *args, mesh=mesh)


def product(chip: str, format: str, summed: bool) -> aot.Compiled:
    """Compile a product of eight rows, with the weight's inputs divided (`summed`) or its outputs."""
    target, mesh = mesh_of(chip)
    w = weight(mesh, format, (EMBED,) if summed else (FFN,), FFN if summed else EMBED, P(*[None] * summed, "tp"))
    x = put(mesh, jnp.bfloat16, (8, w.inputs[0]), P(None, "tp") if summed else P())
    axes = "bf,df->bd" if summed else "bd,fd->bf"  # letters say which axis `tp` divides
    return aot.compile(target, jax.jit(lambda x, w: ops.einsum(axes, x, w)), x, w, mesh=mesh)
