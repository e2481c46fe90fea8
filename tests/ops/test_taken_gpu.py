"""What is taken unasked on an H100: kernels that ran there, in some form, faster than XLA's programs; and what is not.

Nothing is computed: a mesh without devices says what they are, and shapes suffice.
"""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

from fdel import ops
from fdel.ops import platform
from fdel.ops.batch import Packed, Paged, Pages, Slots
from fdel.ops.paged import paged_attention
from tests.aot import hopper_products

pytestmark = pytest.mark.of_cpu("it sets targets itself")
HALF, SINGLE = jnp.bfloat16, jnp.float32
put = jax.ShapeDtypeStruct


def explained(f, *args, kind: str | None = "NVIDIA H100 80GB HBM3", **sizes: int) -> str:
    """Explain f on devices of this kind, in a mesh of these sizes, or on a GPU of which no more is known."""
    if kind is None:
        with platform.tracing_for("gpu"):
            return ops.explain(f, *args)
    about = type(jax.make_mesh((1,), ("x",)).abstract_mesh.abstract_device)
    device = about(device_kind=kind, num_cores=None, platform="gpu")
    axes, shape = zip(*(sizes or {"dp": 1}).items(), strict=True)
    mesh = jax.sharding.AbstractMesh(shape, axes, axis_types=(AxisType.Auto,) * len(axes), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        return ops.explain(f, *args)


def taken(f, *args, kind: str = "NVIDIA H100 80GB HBM3", **sizes: int) -> str:
    """Name what the first operation in f takes."""
    return re.findall(r"^ *(\w+): chosen", explained(f, *args, kind=kind, **sizes), re.M)[0]


def attend(width: int, values: int, dtype=HALF, single: bool = False, **how):
    zeros = jnp.zeros((2, 256), jnp.int32)
    batch = Packed(zeros, zeros, single=single)
    q, v = put((2, 256, 4, width), dtype), put((2, 256, 4, values), dtype)
    return lambda q, v: ops.attend(batch, None, 0, q, q, v, mask=ops.Mask(0.1, **how))[0], q, v


@pytest.mark.parametrize(
    ("args", "how", "expected"),
    [
        ((128, 128), {"single": True}, "cudnn"),
        ((128, 128), {}, "hopper_ordered"),  # several sequences in a row
        ((128, 128), {"single": True, "softcap": 30.0}, "hopper_ordered"),
        ((64, 64), {}, "hopper"),
        ((256, 256), {"single": True}, "hopper"),
        ((192, 128), {"single": True}, "hopper"),
        ((80, 80), {}, "flash"),
        ((64, 64, jnp.float16), {}, "flash"),
        ((128, 128, SINGLE), {}, "flash"),
    ],
)
def test_attention(args, how, expected):
    assert taken(*attend(*args, **how)) == expected


@pytest.mark.parametrize(
    ("heads", "expected"), [((128, 128), "hopper_ordered"), ((64, 64), "hopper"), ((80, 80), "flash")]
)
def test_parts_of_a_row_in_a_ring(heads, expected):
    found = explained(*attend(*heads, single=True), sp=2)
    assert "ring: chosen" in found and f"{expected}: chosen" in found.partition("attend_part")[2]


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("NVIDIA A100-SXM4-80GB", "the device is a NVIDIA A100-SXM4-80GB"),
        (None, "the device is not known to be of Hopper"),
    ],
)
def test_other_gpus_take_none_of_hopper(kind, why):
    for call in (attend(128, 128), product("int4", 64, 8)):
        found = explained(*call, kind=kind)
        assert not re.search(r"hopper\w*: chosen", found) and why in found


def product(form: str, group: int, rows: int):
    w = hopper_products.weight(lambda dtype, *shape: put(shape, dtype), (1024,), 1024, form, group, False)
    return lambda x, w: ops.einsum("td,fd->tf", x, w), put((rows, 1024), HALF), w


@pytest.mark.parametrize(
    ("form", "group", "rows", "expected"),
    [("int4", 64, 64, "hopper"), ("int4", 64, 65, "xla"), ("fp8", 1024, 8, "hopper"), ("nf4", 64, 1, "hopper"),
     ("int8", 1024, 8, "xla"), ("uint8", 128, 8, "xla")],
)  # fmt: skip
def test_quantized_products(form, group, rows, expected):
    assert taken(*product(form, group, rows)) == expected


def test_sizes_are_those_of_a_devices_part():
    """Rows that are few on each device are taken; channels of a scan that fill no program are not."""
    assert taken(*product("int4", 64, 256), dp=8) == "hopper"
    assert taken(*product("int4", 64, 1024), dp=8) == "xla"
    assert taken(*product("int4", 64, 60), dp=8) == "hopper"  # which dp does not divide
    batch = ops.packed(jnp.zeros((2, 256), jnp.int32))
    scan = lambda x, dt, a, b: ops.selective_scan(batch, None, 0, x, dt, a, b, b)[0]
    x, a, b = (2, 256, 1536), put((1536, 16), SINGLE), put((2, 256, 16), HALF)
    assert taken(scan, put(x, HALF), put(x, SINGLE), a, b, tp=4) == "hopper"  # 384 channels
    assert "192 channels of 16 states" in explained(scan, put(x, HALF), put(x, SINGLE), a, b, tp=8)


@pytest.mark.parametrize(
    ("form", "rows", "expected"), [("int4", 64, "hopper"), ("int4", 4096, "xla"), ("int8", 64, "xla")]
)
def test_products_of_experts(form, rows, expected):
    w = hopper_products.weight(lambda dtype, *shape: put(shape, dtype), (8, 1024), 1024, form, 1024, False)
    call = lambda x, w, sizes: ops.grouped_matmul(x, w, sizes)
    both = lambda x, w, sizes: ops.grouped_glu(x, w, w, sizes, lambda gate, up: jax.nn.silu(gate) * up)
    assert taken(both, put((rows, 1024), HALF), w, put((8,), jnp.int32)) == expected
    assert taken(call, put((rows, 1024), HALF), w, put((8,), jnp.int32)) == expected
    whole = lambda dtype: (put((rows, 1024), dtype), put((8, 1024, 1024), dtype), put((8,), jnp.int32))
    assert taken(call, *whole(HALF), kind="NVIDIA H200") == "hopper"
    assert "measured with matrices in bfloat16; found float16" in explained(call, *whole(jnp.float16))


@pytest.mark.parametrize(
    ("outputs", "inputs", "expected"),
    [(2880, 2880, "hopper"), (192, 2048, "hopper"), (2048, 96, "hopper"), (2880, 360, "xla")],
)
def test_experts_whose_sizes_end_inside_of_a_tile(outputs, inputs, expected):
    """GPT-OSS, and Qwen3 30B on four and eight devices; GPT-OSS on eight has 360 hidden units, no multiple of 16."""
    args = put((512, inputs), HALF), put((32, outputs, inputs), HALF), put((32,), jnp.int32)
    assert taken(lambda x, w, sizes: ops.grouped_matmul(x, w, sizes), *args) == expected


@pytest.mark.parametrize(
    ("block", "heads", "dtype", "expected"),
    [(1, 128, HALF, "hopper"), (1, 256, HALF, "xla"), (32, 128, HALF, "xla"), (1, 128, jnp.float16, "xla")],
)
def test_attention_over_pages(block, heads, dtype, expected):
    ints = lambda *shape: put(shape, jnp.int32)
    batch, pages = Paged(ints(2 * block), ints(2, 4), ints(2), block), put((1, 8, 2, 64, heads), dtype)
    call = lambda batch, pages, q: paged_attention(batch, Pages(pages, pages), 0, q, mask=ops.Mask(0.1))
    assert taken(call, batch, pages, put((2 * block, 8, heads), dtype)) == expected


def test_attention_over_pages_of_8_bits_and_over_latents():
    ints = lambda *shape: put(shape, jnp.int32)
    batch, pages, scale = (
        Paged(ints(2), ints(2, 4), ints(2), 1),
        put((1, 8, 2, 64, 128), jnp.int8),
        put((1, 8, 2, 1, 64), SINGLE),
    )
    call = lambda batch, x, s, q: paged_attention(batch, Pages(x, x, s, s), 0, q, mask=ops.Mask(0.1))
    assert taken(call, batch, pages, scale, put((2, 8, 128), HALF)) == "hopper"
    over = lambda batch, x, q: paged_attention(batch, Pages(x, None), 0, q, mask=ops.Mask(0.1), v_dim=512)
    assert taken(over, batch, put((1, 8, 1, 64, 576), HALF), put((2, 16, 576), HALF)) == "hopper"


@pytest.mark.parametrize(("dtype", "expected"), [(HALF, "hopper"), (SINGLE, "xla")])
def test_recurrences_in_training(dtype, expected):
    batch = ops.packed(jnp.zeros((2, 256), jnp.int32))
    x, few = put((2, 256, 4, 128), dtype), put((2, 256, 4), SINGLE)
    rule = lambda *inputs: ops.gated_delta_rule(batch, None, 0, *inputs)[0]
    assert taken(rule, x, x, x, few, few) == expected
    assert taken(rule, x, x, x, put((2, 256, 4, 128), SINGLE), few) == "xla"
    assert dtype == SINGLE or "decays of channels" in explained(rule, x, x, x, put((2, 256, 4, 128), SINGLE), few)
    ssd = lambda x, dt, a, b: ops.ssd(batch, None, 0, x, dt, a, b, b)[0]
    assert taken(ssd, put((2, 256, 4, 64), dtype), few, put((4,), SINGLE), put((2, 256, 1, 128), dtype)) == expected
    scan = lambda x, dt, a, b: ops.selective_scan(batch, None, 0, x, dt, a, b, b)[0]
    wide = put((2, 256, 128), dtype), put((2, 256, 128), SINGLE), put((128, 16), SINGLE), put((2, 256, 16), dtype)
    assert taken(scan, *wide) == expected


@pytest.mark.parametrize("block", [1, 32])
def test_recurrences_of_an_engine(block):
    some = jnp.zeros(2 * block, jnp.int32)
    batch = Paged(some, jnp.zeros((2, 1), jnp.int32), some[:2], block)
    carry = lambda *states: ops.Carry(ops.State(slots=Slots(None, jnp.zeros((1, 2, *states)))))
    x, few, shared = put((2 * block, 4, 64), HALF), put((2 * block, 4), SINGLE), put((2 * block, 1, 128), HALF)
    ssd = lambda x, dt, b: ops.ssd(batch, carry(4, 64, 128), 0, x, dt, jnp.ones(4), b, b)[0]
    assert taken(ssd, x, few, shared) == "hopper"
    rule = lambda x, g: ops.gated_delta_rule(batch, carry(4, 128, 128), 0, x, x, x, g, g)[0]
    assert taken(rule, put((2 * block, 4, 128), HALF), few) == (
        "hopper" if block == 1 else "xla"
    )  # prompts did not run
