"""What samplers' penalties and routers' noise and capacity make of a training step, as accelerators' compilers have it."""

import math
import re

import pytest
from aot_programs import note, operations, target

from fdel import plan
from tests.aot import learning_programs as programs


@pytest.mark.aot
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("chip", "mesh", "packed"),
    [("v5p", "ep=4,tp=2", False), ("v5p", "fsdp=1", True), ("h100", "fsdp=1", False), ("h100", "fsdp=1", True)],
    indirect=["chip"],
)
def test_penalties_and_routing_add_a_few_chunks_of_logits(chip, mesh, packed, record_property):
    """No loop, no array of all tokens and the vocabulary, and no device sends logits: a vocabulary is sent with weights."""
    on = target(chip, 8 if "=1" not in mesh else 1)
    plain, _ = note(record_property, "mixtral", "policy", chip, mesh, programs.step(on, mesh, {}, packed), 0)
    c = programs.step(on, mesh, programs.ROUTES, packed, **programs.PENALTIES)
    note(record_property, "mixtral", "policy, penalties, routing", chip, mesh, c, 0)
    assert c.loops <= plain.loops
    assert c.temporaries <= plain.temporaries + 8 * 4 * programs.CHUNK * programs.VOCAB
    vocabulary = {programs.VOCAB // n for n in (1, 2, 4, 8)}
    wide = [shape for _, shape, _ in operations(c.text) if not vocabulary.isdisjoint(shape)]
    assert max(map(math.prod, wide)) < programs.ROWS * programs.TOKENS * programs.VOCAB // 4
    sent = [shape for x in plan.collectives(c.text, narrow=False) for shape in x.shapes]
    sizes = [[int(n) for n in re.findall(r"\d+", shape[shape.find("[") :])] for shape in sent]
    assert all(vocabulary.isdisjoint(shape) or len(shape) == 2 for shape in sizes)  # weights
