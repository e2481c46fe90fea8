"""Experts and products that devices share along `tp` and `ep`, as accelerators' compilers make them.

Most programs of `test_aot` are divided by rows alone. XLA:CPU has neither the kernels nor the ragged exchange.
"""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from aot_programs import note, row, target
from jax.sharding import NamedSharding, PartitionSpec

from fdel import aot, ops, params, plan, train
from fdel.params import Param
from tests.aot.expert_parts import HOPPER

EXPERTS, HIDDEN, UNITS, CHOICES = 8, 512, 2048, 2
declared = lambda axes, *shape: Param(axes, shape, params.spec.zeros)
UP = declared("experts ffn embed", EXPERTS, UNITS, HIDDEN)
MIXTURE = {"experts": {"gate": UP, "up": UP, "down": declared("experts embed ffn", EXPERTS, HIDDEN, UNITS)}}
MATRICES = {"up": declared("ffn embed", UNITS, HIDDEN), "down": declared("embed ffn", HIDDEN, UNITS)}
FORMATS = [None, "int8", "mxfp4"]
matrix = lambda *values: pytest.param(*values, marks=pytest.mark.matrix)
# Models that a mesh divides otherwise than by rows: a mixture, its shared experts, its biases, a recurrence, latents.
DIVIDED = [
    ("mixtral-wide", "decode", "fsdp=2,tp=4"),
    ("mixtral-wide", "train", "ep=2,fsdp=2,tp=2"),
    matrix("mixtral-wide", "prefill", "ep=4,tp=2"),
    matrix("llama-wide", "decode", "fsdp=2,tp=4"),
    matrix("gpt_oss-wide", "train", "fsdp=4,tp=2"),
    matrix("gpt_oss-wide", "decode", "fsdp=2,tp=4"),
    matrix("qwen3_next-wide", "decode", "ep=2,fsdp=2,tp=2"),
    matrix("deepseek_v3-wide", "prefill", "ep=4,tp=2"),
    matrix("mamba2-wide", "train", "fsdp=4,tp=2"),
]
HEADS = ["mamba-4-layers", "mamba2-4-layers", "kimi_linear-4-layers", "gpt_oss-2-layers", "phi3-10-heads"]


def laid(spec: Any, form: str | None, mesh: Any) -> Any:
    """Give shapes of weights, in a format or in bfloat16, that lie where an engine has them."""
    shapes = params.abstract(spec, jnp.bfloat16)
    if form is not None:
        shapes = jax.eval_shape(lambda p: params.quantize(p, form, "", spec=spec), shapes)
    on = lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at)
    put = lambda w, at: jax.tree.map(on, w, at)
    return params.reshard(shapes, spec, mesh, params.SERVE, put)


def whole(mesh: Any, by: PartitionSpec, dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    """Give the shape of rows."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, by))


@pytest.mark.aot
@pytest.mark.parametrize("tokens", [16, 512])
@pytest.mark.parametrize("form", FORMATS)
def test_experts_along_tp_send_their_sum_alone(form, tokens, chip, record_property):
    """Of bfloat16 for each token, once: no hidden unit, and no part of a weight. A few tokens meet all experts."""
    on = target(chip, 8)
    mesh = params.make_mesh({"tp": 8}, aot.devices(on))
    rows = lambda dtype, size: whole(mesh, PartitionSpec(), dtype, tokens, size)
    call = jax.jit(lambda x, p, w, e: ops.moe(x, p, w, e, jax.nn.silu))
    args = rows(jnp.bfloat16, HIDDEN), laid(MIXTURE, form, mesh)["experts"]
    with ops.use(**HOPPER if chip == "h100" and form else {}):
        c = aot.compile(on, call, *args, rows(jnp.float32, CHOICES), rows(jnp.int32, CHOICES), mesh=mesh)
    note(record_property, f"experts {form}", f"{tokens} tokens", chip, "tp=8", c, 0)
    assert sum(x.moved for x in plan.collectives(c.text, narrow=False)) <= 2 * 2 * tokens * HIDDEN
    dense = form is None and tokens == 16
    assert ("tpu_custom_call" in c.text or "mosaic_gpu" in c.text) != dense


@pytest.mark.aot
@pytest.mark.parametrize("which", MATRICES)
@pytest.mark.parametrize("form", FORMATS[1:])
def test_a_quantized_matrix_along_tp_stays_where_it_is(form, which, chip, record_property):
    """Divided by outputs nothing is sent, by inputs the sum of what devices add to a token, in float32 at most."""
    on = target(chip, 8)
    mesh = params.make_mesh({"tp": 8}, aot.devices(on))
    spec, by = {which: MATRICES[which]}, PartitionSpec(None, "tp" if which == "down" else None)
    call = jax.jit(lambda x, w: ops.einsum("tf,df->td" if which == "down" else "td,fd->tf", x, w[which]))
    x = whole(mesh, by, jnp.bfloat16, 16, MATRICES[which].shape[1])
    c = aot.compile(on, call, x, laid(spec, form, mesh), mesh=mesh)
    note(record_property, f"matrix {form}", which, chip, "tp=8", c, 0)
    sent = plan.collectives(c.text, narrow=False)
    assert sum(x.moved for x in sent) <= 2 * 4 * 16 * HIDDEN * (which == "down")
    assert chip == "h100" or "tpu_custom_call" in c.text


@pytest.mark.aot
@pytest.mark.parametrize(("form", "units"), [("mxfp4", 2880), matrix("int4", 768)])
def test_experts_whose_groups_devices_cannot_share_send_units_alone(form, units, chip, record_property):
    """GPT-OSS's 90 groups of 32, and Qwen3's 12 of 64, on eight devices: `down` lies by its outputs. No weight is sent."""
    on = target(chip, 8)
    mesh = params.make_mesh({"tp": 8}, aot.devices(on))
    up = declared("experts ffn embed", EXPERTS, units, HIDDEN)
    spec = {"experts": {"gate": up, "up": up, "down": declared("experts embed ffn", EXPERTS, HIDDEN, units)}}
    rows = lambda dtype, size: whole(mesh, PartitionSpec(), dtype, 16, size)
    call = jax.jit(lambda x, p, w, e: ops.moe(x, p, w, e, jax.nn.silu))
    args = rows(jnp.bfloat16, HIDDEN), laid(spec, form, mesh)["experts"]
    c = aot.compile(on, call, *args, rows(jnp.float32, CHOICES), rows(jnp.int32, CHOICES), mesh=mesh)
    note(record_property, f"experts {form}", f"{units} units", chip, "tp=8", c, 0)
    sent = plan.collectives(c.text, narrow=False)
    assert sum(x.moved for x in sent) <= 2 * 16 * CHOICES * (units + HIDDEN)


@pytest.mark.aot
@pytest.mark.parametrize("way", ["all_to_all", matrix("ragged_all_to_all"), matrix("ring"), matrix("all_gather")])
def test_rows_get_to_the_devices_of_their_experts(way, chip, record_property):
    """And their gradients back: each way of exchange compiles, beside rows and hidden units that are divided too."""
    on = target(chip, 8)
    mesh = params.make_mesh({"ep": 2, "fsdp": 2, "tp": 2}, aot.devices(on))
    rows = lambda dtype, size: whole(mesh, PartitionSpec(("fsdp", "ep")), dtype, 4, 128, size)

    def loss(x, p, w, e):
        return ops.moe(x, p, w, e, jax.nn.silu).astype(jnp.float32).sum()

    args = rows(jnp.bfloat16, HIDDEN), laid(MIXTURE, None, mesh)["experts"]
    with ops.use(expert_parallel=way):
        call = jax.jit(jax.grad(loss, (0, 1)))
        c = aot.compile(on, call, *args, rows(jnp.float32, CHOICES), rows(jnp.int32, CHOICES), mesh=mesh)
    note(record_property, way, "gradients", chip, "ep=2,fsdp=2,tp=2", c, 0)
    kinds = {"ring": "collective-permute", "all_gather": "all-gather"}
    assert re.search(kinds.get(way, way.replace("_", "-")), c.text)


@pytest.mark.aot
@pytest.mark.parametrize(("name", "what", "mesh"), DIVIDED)
def test_a_family_compiles_for_devices_that_share_its_layers(name, what, mesh, chip, record_property):
    """With its kernels on TPUs, in training and in an engine's steps."""
    c, _ = row(record_property, name, what, chip, 8, mesh)
    assert chip == "h100" or "tpu_custom_call" in c.text


@pytest.mark.aot
def test_rows_that_devices_share_go_round_in_a_ring(chip, record_property):
    """By kernels, in both passes."""
    c, _ = row(record_property, "llama-wide", "train", chip, 8, "fsdp=4,sp=2")
    tpu, hopper = r"flash_(?:attention|backward_keys|backward_queries)", r"custom_call_target=.(mosaic_gpu)"
    assert "collective-permute" in c.text
    assert len(re.findall(hopper, c.text)) >= 3 if chip == "h100" else len(set(re.findall(tpu, c.text))) == 3


@pytest.mark.aot
@pytest.mark.parametrize("tied", [False, matrix(True)])
def test_no_device_has_a_vocabulary_whole_along_fsdp(tied, chip, record_property):
    """Gemma's 262,144 words, of 512 channels: neither table nor head is fetched, and no gradient is added up whole."""
    mesh, size = params.make_mesh({"fsdp": 8}, aot.devices(on := target(chip, 8))), 262144 * 512

    def loss(table, head, tokens):
        x = ops.embed(table, tokens)
        head = ops.Head(table if tied else head)
        return train.losses.token_sum(train.losses.nll, x, head, tokens, tokens >= 0, chunk=64)[0]

    weight = whole(mesh, PartitionSpec(None, "fsdp"), jnp.bfloat16, 262144, 512)
    args = weight, weight, whole(mesh, PartitionSpec("fsdp"), jnp.int32, 8, 1024)
    c = aot.compile(on, jax.jit(jax.grad(loss, (0, 1))), *args, mesh=mesh)
    note(record_property, "a vocabulary", "gradients", chip, "fsdp=8", c, 0)
    assert c.temporaries < 2 * size  # bytes: a matrix in bfloat16 has as many, a gradient in float32 twice
    assert sum(x.moved for x in plan.collectives(c.text, narrow=False)) < size


@pytest.mark.aot
@pytest.mark.parametrize("what", ["decode", matrix("prefill")])
@pytest.mark.parametrize("name", ["qwen3_next-4-layers", *map(matrix, HEADS)])
def test_heads_along_tp_send_their_sums_alone(name, what, chip, record_property):
    """Of two key heads, ten of Phi-4, or four rows of two in GPT-OSS, a device reads its own. What is convolved is not
    joined."""
    c, _ = row(record_property, name, what, chip, 8)
    assert sum(x.moved for x in plan.collectives(c.text, narrow=False) if x.kind != "all-reduce") < 3 * 2**20
