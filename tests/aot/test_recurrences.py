"""Serving of recurrences on TPUs: what their kernels make of an engine's prefill."""

import re

import pytest
from aot_programs import copies, row

OPS = {"mamba": "selective_scan", "mamba2": "ssd", "qwen3_next": "gated_delta_rule"}


@pytest.mark.aot
@pytest.mark.matrix
@pytest.mark.parametrize("chip", ["v5p"], indirect=True)
@pytest.mark.parametrize("family", OPS)
def test_prefill_of_recurrences_needs_less_memory_with_their_kernels(family, chip, record_property):
    """In each layer, with published sizes of heads; fewer loops, and states stay where they are."""
    name, op = f"{family}-4-layers", OPS[family]
    plain, _ = row(record_property, name, "prefill", chip, 1, **{op: "xla"})
    c, cache = row(record_property, name, "prefill", chip, 1)
    assert len(re.findall(rf"{op}\S* = .*custom-call", c.text)) == (3 if family == "qwen3_next" else 4)
    assert c.temporaries < plain.temporaries and c.loops < plain.loops
    assert copies(c.text, cache // 4 // 4) == 0  # of a quarter of the state
