"""In which order a TPU keeps the axes of weights whose sizes fill no lanes: no step copies one to another order first."""

import jax
import jax.numpy as jnp
import pytest
from aot_programs import copies, note, target

from fdel import aot, models, params
from fdel.params import device_layout
from tests.params.test_device_layout import ORDERS

matrix = lambda *values: pytest.param(*values, marks=pytest.mark.matrix)
ROWS, LENGTH, VOCAB = 64, 1024, 32768
EXPERTS = {"20b": 32, "120b": 128}
# Programs of two layers of gpt_oss: the model, its format, the program, the chip's devices and its mesh.
STEPS = [
    ("20b", "mxfp4", "decode", "v5p", 1, ""),
    matrix("20b", None, "decode", "v5p", 1, ""),
    matrix("20b", "mxfp4", "prefill", "v5p", 1, ""),
    matrix("120b", "mxfp4", "decode", "v5p", 1, ""),
    matrix("120b", None, "decode", "v5p", 1, ""),
    matrix("20b", "mxfp4", "decode", "v5p", 8, "ep=8"),
    matrix("20b", "mxfp4", "decode", "v6e", 1, ""),
]


@pytest.mark.aot
@pytest.mark.parametrize("chip", ["v5p", "v6e"])
def test_xla_leaves_axes_as_they_are_where_rows_fill_lanes(chip) -> None:
    """And elsewhere chooses as it likes: so these are the arrays for which an order is asked."""
    on = target(chip, 1)
    if why := aot.missing(on):
        pytest.skip(why)
    mesh = params.make_mesh({}, aot.devices(on))
    at = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    shapes = [s for s in (*ORDERS, (128, 2944, 2944), (8, 4096, 128), (4, 640, 384)) if len(s) > 1]
    given = [jax.ShapeDtypeStruct(s, d, sharding=at) for s in shapes for d in (jnp.bfloat16, jnp.uint8)]
    asked = [device_layout.laid(x) for x in given]
    with jax.set_mesh(mesh):
        program = jax.jit(lambda *x: x[0][0, 0, 0], keep_unused=True).trace(*given, *asked)
        lowered = program.lower(lowering_platforms=("tpu",))
    found = [f.layout.major_to_minor for f in lowered.compile().input_formats[0]]
    for x, own, ours in zip(given, found[: len(given)], found[len(given) :], strict=True):
        wanted = device_layout.order(x.shape)
        assert ours == (wanted or own), x
        if x.shape[-1] % device_layout.LANES == 0:
            assert own == tuple(range(x.ndim)), x
    assert found[0] == (1, 2, 0)  # of 128 matrices of 2,880 by 2,880: what all this is for


@pytest.mark.aot
@pytest.mark.parametrize(("model", "form", "what", "chip", "devices", "mesh"), STEPS)
def test_a_step_of_gpt_oss_copies_no_weight(model, form, what, chip, devices, mesh, record_property) -> None:
    """No expert's matrices, no scales, and no embedding: temporaries are those of activations."""
    on = target(chip, devices)
    if why := aot.missing(on):
        pytest.skip(why)
    sizes = dict(model_type="gpt_oss", num_local_experts=EXPERTS[model], num_hidden_layers=2, vocab_size=VOCAB)
    family = models.family("gpt_oss")
    cfg = family.Config.from_hf(sizes)
    c, cache = aot.serving(on, family, cfg, aot.Serving(mesh, ROWS, LENGTH, format=form), what)
    note(record_property, f"gpt_oss {model} {form}", what, chip, mesh or devices, c, cache)
    # No array of a step's rows has so many numbers; all scales of a matrix's experts have.
    least = max(2**22, EXPERTS[model] // devices * 2880 * 90)
    assert what == "prefill" or copies(c.text, least) == 0
    assert c.temporaries <= (2**27 if what == "decode" else 2**28)
