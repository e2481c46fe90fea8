"""Every family compiles for H100 with the kernels for Hopper that serve it, named as users name them."""

import re

import pytest
from aot_programs import FAMILIES, compiled, note, target
from tiny import TINY

from fdel import aot
from fdel.ops import dispatch

CAUSAL = [name for name in FAMILIES if TINY[name].causal]
# Programs without an operation that has such a kernel: for few tokens sparse attention and experts are XLA's.
NONE = {"train": ("rwkv",), "prefill": ("rwkv",), "decode": ("rwkv", "glm_moe_dsa")}


@pytest.mark.aot
@pytest.mark.parametrize("devices", [1, pytest.param(8, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("what", ["train", "decode", "prefill"])
@pytest.mark.parametrize("name", [n if n == "llama" else pytest.param(n, marks=pytest.mark.matrix) for n in CAUSAL])
def test_every_family_compiles_with_the_kernels_for_hopper(name, what, devices, record_property):
    """At sizes that kernels take. An operation that has one and cannot serve all calls says why, and goes without."""
    if why := aot.missing(target("h100", devices)):
        pytest.skip(why)
    names = {op: "hopper" for op, table in dispatch.TABLES.items() if "hopper" in table.implementations}
    refused = dict[str, str]()
    while True:
        try:
            program = compiled(f"{name}-wide", what, "h100", devices, **names)
            break
        except ValueError as e:
            found = re.search(r"(\w+): impl='hopper' cannot serve this call: (.+); leave it out", str(e))
            if found is None:
                raise
            refused[found[1]] = found[2]
            del names[found[1]]
    record_property("refused", refused)
    c, _ = note(record_property, f"{name}-wide, hopper", what, "h100", devices, *program)
    assert "mosaic_gpu" in c.text or refused or name in NONE[what]
