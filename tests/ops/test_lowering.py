"""Every Hopper kernel is lowered for CUDA by the installed jax, at the shapes of models; the compilers are `make aot`'s."""

from types import SimpleNamespace

import jax
import pytest

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
    "prompts, gated_delta_rule, a decay per channel",
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
