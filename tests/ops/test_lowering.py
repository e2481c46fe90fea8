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
CALLS = [
    *((P, name) for table in (P.QUANTIZED, P.GROUPED, P.EXPERTS, P.LATENTS, P.DELTAS) for name in table),
    *(
        (m, name)
        for m in (hopper_flash, hopper_flash_backward, hopper_pages, hopper_ssd, hopper_decode)
        for name in m.CALLS
    ),
    *((hopper_scans, name) for name in hopper_scans.SCANS),
]
TRIED = (  # by CI: one of each program
    "8 rows, MXFP4", "512 rows of 128", "16 rows of 64, GPTQ", "latents, decode, 1 x 8,192 tokens, 128 heads",
)  # fmt: skip


@pytest.mark.parametrize(
    ("module", "name"),
    [pytest.param(*c, marks=[] if c[1] in TRIED else pytest.mark.matrix, id=c[1]) for c in CALLS],
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
