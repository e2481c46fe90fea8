"""Serving of recurrences: what their kernels make of an engine's prefill and decode steps."""

import re

import pytest
from aot_programs import copies, row, target

from fdel import aot
from tests.aot import hopper_decode, hopper_products

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
    # Of Mamba what the convolution reads stands beside the kernel, 13 MiB that a loop over blocks needs not.
    assert c.temporaries < (1.25 if family == "mamba" else 1) * plain.temporaries and c.loops < plain.loops
    assert copies(c.text, cache // 4 // 4) == 0  # of a quarter of the state


@pytest.mark.aot
@pytest.mark.matrix
@pytest.mark.parametrize("family", OPS)
def test_a_decode_step_of_recurrences_on_hopper_leaves_states_where_they_are(family, record_property):
    """As machine code, in each layer; no copy of the states, and none of those that a step reads."""
    if why := aot.missing(target("h100", 1)):
        pytest.skip(why)
    name, op = f"{family}-4-layers", OPS[family]
    plain, _ = row(record_property, name, "decode", "h100", 1, **{op: "xla"})
    c, cache = row(record_property, name, "decode", "h100", 1, **{op: "hopper"})
    assert len(re.findall(r"custom-call\(.*mosaic_gpu", c.text)) == (3 if family == "qwen3_next" else 4)
    assert c.temporaries <= plain.temporaries and c.loops <= plain.loops
    assert copies(c.text, cache // 4 // 4) == 0


@pytest.mark.aot
@pytest.mark.matrix
@pytest.mark.parametrize(("family", "kernels"), [("mamba", 4), ("mamba2", 4), ("qwen3_next", 3), ("kimi_linear", 6)])
def test_prefill_of_recurrences_on_hopper_needs_less_memory(family, kernels, record_property):
    """As machine code, in each layer; fewer loops, and states stay where they are."""
    if why := aot.missing(target("h100", 1)):
        pytest.skip(why)
    name, op = f"{family}-4-layers", OPS.get(family, "gated_delta_rule")
    plain, _ = row(record_property, name, "prefill", "h100", 1, **{op: "xla"})
    c, cache = row(record_property, name, "prefill", "h100", 1, **{op: "hopper"})
    assert len(re.findall(r"custom-call\(.*mosaic_gpu", c.text)) == kernels
    assert c.temporaries < plain.temporaries and c.loops < plain.loops
    assert copies(c.text, cache // 4 // 4) == 0


@pytest.mark.aot
@pytest.mark.matrix
def test_the_hopper_kernels_for_decoding_move_states_once():
    """XLA's programs move twice what is needed, or more; prompts of scans are moved once, too. Nothing is spilled."""
    if why := aot.missing(target("h100", 1)):
        pytest.skip(why)
    for x in hopper_products.table(module="hopper_decode"):
        print(x)
        assert x["registers"] and not x["spills"] and not x["serialized"]
        assert x["call"].startswith(("prompts, ssd", "prompts, gated")) or x["temporaries"] < 2**21
    for name in hopper_decode.CALLS:
        ours, plain = (hopper_decode.moved(name, hopper_decode.lower(name, impl).text) for impl in ("hopper", "xla"))
        assert ours < 1.05 * hopper_decode.needed(name) < plain / 1.9
    for name in (x for x in hopper_decode.PROMPTS if "scan" in x):
        assert hopper_decode.moved(name, hopper_decode.lower(name).text) < 1.05 * hopper_decode.needed(name)
