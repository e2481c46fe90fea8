"""Every Hopper kernel is lowered for CUDA by the installed jax, at the shapes of models; the compilers are `make aot`'s."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from fdel import ops
from fdel.ops import platform
from tests.aot import (
    hopper_decode,
    hopper_flash,
    hopper_flash_backward,
    hopper_pages,
    hopper_products,
    hopper_scans,
    hopper_ssd,
)

P = hopper_products
TABLES = [
    *((P, table) for table in (P.QUANTIZED, P.GROUPED, P.EXPERTS, P.LATENTS, P.DELTAS)),
    *((m, m.CALLS) for m in (hopper_flash, hopper_flash_backward, hopper_pages, hopper_ssd, hopper_decode)),
    (hopper_decode, hopper_decode.PROMPTS),
    (hopper_scans, hopper_scans.SCANS),
]
# CI tries these and the first call of each table: one for each program.
TRIED = (
    "4,096 rows, MXFP4", "512 rows of 128, gate and up", "16 rows of 64, GPTQ",
    "prompts, gated_delta_rule, a decay per channel", "qwen3_moe, tp=8, 64 tokens, down",
)  # fmt: skip


@pytest.mark.parametrize(
    ("module", "name"),
    [
        pytest.param(module, name, marks=[] if i == 0 or name in TRIED else pytest.mark.matrix, id=name)
        for module, table in TABLES
        for i, name in enumerate(table)
    ],
)
def test_kernels_are_lowered(module, name, monkeypatch) -> None:
    """The text has the kernel; jax refuses, say, a transfer between memory and registers that it has no plan for."""
    texts = []

    def lower(target, program, *args, mesh, **static):
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
        with platform.tracing_for("gpu"):
            texts.append(program.trace(*shapes, **static).lower(lowering_platforms=("cuda",)).as_text())
        return SimpleNamespace(temporaries=0)

    monkeypatch.setattr(module, "aot", SimpleNamespace(
        parse_target=lambda text: text, devices=lambda target: jax.devices()[:1], compile=lower,
    ))  # fmt: skip
    module.lower(name)
    assert all("mosaic_gpu" in text for text in texts) and texts


@pytest.mark.parametrize(
    ("format", "group", "more"),
    [("int4", 64, False), ("uint8", 32, True), ("int8", 64, False), ("fp8", 32, False), ("e2m1", 32, "exponent"),
     ("e2m1", 16, "fp8")],
)  # fmt: skip
def test_many_rows_with_a_result_in_float32_fit_into_shared_memory(format, group, more):
    """As logits: the result takes as much of it as two chunks."""
    w = P.weight(lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype), (1024,), 1024, format, group, more)
    call = lambda x, w: ops.einsum("td,fd->tf", x, w, out_dtype=jnp.float32)
    with platform.tracing_for("gpu"), ops.use(quantized_matmul="hopper"):
        traced = jax.jit(call).trace(jax.ShapeDtypeStruct((256, 1024), jnp.bfloat16), w)
        assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()
