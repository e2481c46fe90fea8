"""What accelerators' compilers make of fdel's programs: bounds on what an expert would not want to see in them.

`make aot` runs these where the compilers are installed, and prints one row per program.
"""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import sound_programs
from aot_programs import (
    FAMILIES,
    SEEING,
    copies,
    floor,
    gathers,
    model,
    note,
    read_once,
    row,
    target,
    transposes,
    wide_products,
)
from tiny import TINY

from fdel import aot, ops, params, plan
from fdel.kernels.decode_gpu import FORMATS
from tests.aot import expert_parts, hopper_decoding, hopper_pages, hopper_products, hopper_scans

LARGE = 2**20  # numbers of an array that is worth a bound: every matrix of the large model has more
LENGTH = 4096  # of a row in its training step; no weight has such an axis
# Loops in a toy program. Two of them draw, or walk the head's chunks and layers; in prefill each of at most two mixtures
# has one for each of three products (rounds of all experts on GPUs), in training one for each product and pass of the
# stacked mixtures, for each kind of layer. Recurrences are loops over chunks or tokens, forward and backward; an
# indexer has loops over blocks and heads.
LOOPS = {"train": 20, "decode": 2, "prefill": 8, "forward": 2}
MORE_LOOPS = {"mamba2": 12, "qwen3_next": 40, "kimi_linear": 40, "minimax": 24, "qwen3_5_moe_text": 24, "qwen3_5_moe": 24,
              "glm_moe_dsa": 24, "qwen3_vl_moe": 24, "glm4v_moe": 24, "qwen3_omni_moe": 24}  # fmt: skip
PROGRAMS = {True: ("train", "decode", "prefill"), False: ("forward",)}  # of what is causal, and of an encoder
TOYS = [
    pytest.param(name, what, n, marks=[] if TINY[name].wiring else pytest.mark.matrix)
    for name in FAMILIES for what in PROGRAMS[TINY[name].causal] for n in (1, 8)
]  # fmt: skip
CAUSAL = [name for name in FAMILIES if TINY[name].causal]
# Families whose programs of heads of 128 have no kernel on TPUs: recurrences, slopes of alibi, latents of other sizes,
# and attention to chosen tokens, beside experts that few tokens take densely.
PLAIN = {"train": ("rwkv", "mpt"), "decode": ("rwkv", "mpt", "xerxes2", "glm_moe_dsa")}
# Latent attention: DeepSeek-V3's heads, all and a part of eight; and toys whose latents the kernel for Hopper takes.
NARROWS = [pytest.param("deepseek_v3-narrow", n, marks=pytest.mark.matrix) for n in (1, 8)]
LATENT_TOYS = [
    pytest.param(f"{name}-wide", 1, marks=pytest.mark.matrix) for name in ("deepseek_v2", "deepseek_v3", "kimi_linear")
]
SERVED = [(name, what) for name in ("llama-1b", "llama-1b-h128") for what in ("decode", "prefill")]


@pytest.mark.aot
@pytest.mark.parametrize(("name", "what", "devices"), TOYS)
def test_every_family_compiles(name, what, devices, chip, record_property):
    c, _ = row(record_property, name, what, chip, devices)
    assert c.loops <= MORE_LOOPS.get(name, LOOPS[what])


@pytest.mark.aot
@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("name", [n if n == "qwen3_vl" else pytest.param(n, marks=pytest.mark.matrix) for n in SEEING])
def test_every_tower_compiles(name, devices, chip, record_property):
    """Gradients of rows with images (and sounds), of the tower, the projector and the language model."""
    c, _ = row(record_property, name, "see", chip, devices)
    assert not gathers(c.text, 64 * 8)  # no row but a device's own


@pytest.mark.aot
@pytest.mark.parametrize("chip", ["v5p", "v6e"], indirect=True)
@pytest.mark.parametrize("what", ["train", "decode"])
@pytest.mark.parametrize("name", [n if n == "llama" else pytest.param(n, marks=pytest.mark.matrix) for n in CAUSAL])
def test_every_family_compiles_with_the_kernels_that_it_takes(name, what, chip, record_property):
    """With heads of 128 and wide matrices; without one only where attention is of a kind that none serves.

    No gradient of a selective scan holds the states of every token.
    """
    c, _ = row(record_property, f"{name}-wide", what, chip, 1)
    assert ("tpu_custom_call" in c.text) != (name in PLAIN[what])
    assert name not in ("mamba", "falcon_mamba") or c.temporaries < 2**27


@pytest.mark.aot
@pytest.mark.parametrize("what", [sound_programs.hear, sound_programs.talker, sound_programs.vocoder])
def test_what_hears_and_speaks_compiles(what, chip, record_property):
    """A batch of Whisper's windows, a talker's frame, a vocoder's samples: at most one loop of our own in each."""
    c, _ = note(record_property, what.__name__, "sound", chip, 1, sound_programs.compiled(what, chip), 0)
    assert c.loops <= (10 if what is sound_programs.talker else 1)  # experts of a mixture have theirs on GPUs


@pytest.mark.aot
@pytest.mark.parametrize(("name", "what"), SERVED)
def test_an_engine_s_step_leaves_the_cache_where_it_is(name, what, chip, record_property):
    """No copy of it, few temporaries beside it, no wide product and no weight that is turned round."""
    c, cache = row(record_property, name, what, chip, 1)
    assert copies(c.text, cache // 2 // 4) == 0  # of a quarter of the keys, in two bytes
    assert c.temporaries <= 0.1 * cache  # sampling's, too
    assert wide_products(c.text, LARGE) == 0
    assert transposes(c.text, name) == 0


@pytest.mark.aot
@pytest.mark.parametrize("name", ["llama-1b", "llama-1b-h128"])
def test_a_step_of_the_model_reads_its_cache_at_a_few_times_the_floor(name, chip, record_property):
    """Without a kernel, pages are fetched, written and read again: by XLA:TPU's estimate at most 3 times the floor."""
    with ops.use(paged_attention="xla"):
        c, cache = note(record_property, name, "model", chip, 1, *read_once(name, chip))
    assert copies(c.text, cache // 2 // 4) == 0
    assert c.temporaries <= 0.1 * cache
    if c.estimate is not None:
        assert c.estimate <= 3 * floor(name, chip, cache)


@pytest.mark.aot
@pytest.mark.parametrize("chip", ["v5p"], indirect=True)
@pytest.mark.parametrize("devices", [1, 8])
def test_a_trainer_hands_its_weights_over_in_parts(devices, chip, record_property):
    """From fsdp to tp no device gets more than its part, in bfloat16; beside its new part there is little else."""
    c, _ = row(record_property, "llama-1b-h128", "hand-over", chip, devices)
    family, cfg = model("llama-1b-h128")
    part = params.nbytes(family.spec(cfg), "bfloat16") / devices
    assert c.loops == 0 and c.output <= 1.01 * part
    assert sum(x.moved for x in plan.collectives(c.text, narrow=False)) <= part * (devices > 1)
    assert (
        c.temporaries <= (1.2 if devices > 1 else 0.25) * part
    )  # 0.2: one stacked weight, which is cast before it is cut


@pytest.mark.aot
@pytest.mark.parametrize(("name", "devices"), [("llama-1b-h128", 1), *NARROWS, *LATENT_TOYS])
def test_a_decode_step_compiles_with_the_kernel_for_pages(name, devices, record_property):
    """For H100, as machine code, in each layer; no copy of the cache, and no loop, which toys never have."""
    if why := aot.missing(target("h100", devices)):
        pytest.skip(why)
    plain, _ = row(record_property, name, "decode", "h100", devices, paged_attention="xla")
    c, cache = row(record_property, name, "decode", "h100", devices, paged_attention="hopper")
    assert len(re.findall(r"custom-call\(.*mosaic_gpu", c.text)) >= 1
    assert name != "llama-1b-h128" or "mosaic_gpu" in row(record_property, name, "decode", "h100", devices)[0].text
    assert copies(c.text, cache // 2 // 4) == 0
    assert c.loops < plain.loops or name.endswith("-wide")


@pytest.mark.aot
@pytest.mark.parametrize("chip", ["v5p"], indirect=True)
@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("name", ["llama-1b-h128", "deepseek_v3-narrow", "phi3-heads-of-96"])
def test_a_decode_step_with_the_tpu_kernel_needs_no_more_memory(name, devices, chip, record_property):
    """In each layer, beside no copy of the cache, with fewer temporaries and loops than XLA's program."""
    plain, _ = row(record_property, name, "decode", chip, devices, paged_attention="xla")
    c, cache = row(record_property, name, "decode", chip, devices)
    assert len(re.findall(r"custom-call\(.*tpu_custom_call", c.text)) >= 1
    assert copies(c.text, cache // devices // 2 // 4) == 0
    assert c.temporaries <= plain.temporaries and c.loops < plain.loops


@pytest.mark.aot
@pytest.mark.parametrize("chip", ["v5p", "v6e"], indirect=True)
@pytest.mark.parametrize(
    "few", [(), pytest.param((", int8", ", fp8"), marks=pytest.mark.matrix)], ids=["whole", "8 bits"]
)
def test_the_tpu_kernel_for_pages_is_bound_by_its_bytes(chip, few):
    """Decoding: 1.3 times the floor, with one key head of few query heads 1.4. XLA's takes longer.

    Prompts are bound by products, which on a v6e are half empty with heads of 128, and so take twice the floor. Of pages in
    8 bits, one key head is bound by requests for copies, latents by what makes them numbers, of 128 heads by products, too;
    fp8 on v6e takes 1.38."""
    command = [sys.executable, "-m", "tests.aot.bundles", chip, *few]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    calls = {x["call"]: x for x in map(json.loads, (x for x in done.stdout.splitlines() if x.startswith("{")))}
    assert len(calls) == 9  # of either kind
    v5p = chip == "v5p"
    prompts = {
        "prefill": (1.6 if few else 1.45) if v5p else (4 if few else 3.4),
        "prefill, latents": 1.35 if v5p else 2,
    }
    bounds = prompts | {"decode, one key head": 2.4 if few else 1.4}
    if few:
        bounds |= {"decode, latents": 1.5 if v5p else 2.6, "decode, latents, 16 heads": 1.5}
    for name, x in calls.items():
        print(name, {k: x[k] for k in ("bundles", "estimate", "floor", "xla")})
        other = 1.4 if name.endswith("fp8") and not v5p else 1.3
        most = bounds.get(name.removesuffix(", int8").removesuffix(", fp8"), other)
        assert x["estimate"] <= most * x["floor"] and 2 * x["estimate"] < x["xla"]


@pytest.mark.aot
@pytest.mark.matrix
@pytest.mark.parametrize("chip", ["v5p"], indirect=True)
@pytest.mark.parametrize(("name", "devices"), [("llama-1b-h128", 1), ("llama-1b-h128", 8), ("phi3-10-heads", 1)])
@pytest.mark.parametrize("kv", ["int8", "fp8"])
def test_a_decode_step_over_pages_in_8_bits_copies_neither_them_nor_scales(kv, name, devices, chip, record_property):
    """The kernels in each layer, on one chip and on eight; hardly more temporaries than beside bfloat16."""
    plain, _ = row(record_property, name, "decode", chip, devices)
    how = aot.Serving("tp=8" if devices > 1 else "fsdp=1", 64, 1024, kv=kv)
    c, cache = aot.serving(target(chip, devices), *model(name), how, "decode")
    note(record_property, name, f"decode {kv}", chip, devices, c, cache)
    assert len(re.findall(r"custom-call\(.*tpu_custom_call", c.text)) >= 1
    sizes = model(name)[1]
    assert (
        copies(c.text, sizes.layers * 64 * 16 * sizes.kv_heads // devices * 128) == 0
    )  # numbers of all scales of keys
    assert c.temporaries <= plain.temporaries + 2**23 and c.loops == plain.loops


@pytest.mark.aot
@pytest.mark.matrix  # all calls of the table: minutes
@pytest.mark.parametrize("chip", ["v5p", "v6e"], indirect=True)
def test_the_tpu_kernel_for_quantized_products_reads_at_the_floor_s_speed(chip):
    """Eight rows: 1.3 times the floor, with int4 by 64 1.45; floats of 4 bits 2.4, in groups of 16 3.7, NF4 6.6.
    512 rows: 1.05 times on v5p and twice on v6e, NF4 1.3 and 3. XLA's product takes longer, of any rows; on v6e but for
    fp8 per output, where it counts bytes."""
    command = [sys.executable, "-m", "tests.aot.matmul_bundles", chip]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False, timeout=1200
    )
    assert done.returncode == 0, done.stderr
    for x in map(json.loads, (line for line in done.stdout.splitlines() if line.startswith("{"))):
        print(x)
        bounds = {"by 64": 1.45, "MXFP4, 2,880": 4, "MXFP4": 2.4, "NVFP4": 3.7, "NF4": 6.6}
        if x["call"].startswith("8 rows"):
            assert x["estimate"] <= next((n for name, n in bounds.items() if name in x["call"]), 1.3) * x["floor"]
        if x["call"].startswith("512 rows"):
            near = {"v5p": (1.05, 1.3), "v6e": (2.05, 3)}[chip]
            assert x["estimate"] <= near["NF4" in x["call"]] * x["floor"]
        if not (chip == "v6e" and x["call"].endswith("fp8")):
            assert x["estimate"] < x["xla"]


@pytest.mark.aot
@pytest.mark.parametrize("chip", ["v5p", "v6e"], indirect=True)
def test_the_tpu_kernels_for_recurrences_keep_what_a_chunk_prepares_in_fast_memory(chip):
    """Few temporaries beside inputs and outputs, of an engine's prefill a block's chunks. Bound by products and vector
    operations: 4 times the floor of bytes, with decays of channels and in a selective scan 5.7 times, gradients 9 times.
    Decoding is bound by bytes, but for scans, whose steps are short: 1.5 times."""
    command = [sys.executable, "-m", "tests.aot.recurrence_bundles", chip]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    calls = list(map(json.loads, (line for line in done.stdout.splitlines() if line.startswith("{"))))
    assert len(calls) == 16
    for x in calls:
        print(x)
        name, _, kind = x["call"].replace(", channels", " of channels").partition(", ")
        assert x["temporaries"] <= {"": 2**23, "backward": 2**27}.get(kind, 2**25)
        most = (
            9 if kind == "backward" else 1.5 if kind == "decode" else 4 if name in ("gated_delta_rule", "ssd") else 5.7
        )
        assert x["estimate"] <= most * x["floor"]


@pytest.mark.aot
@pytest.mark.matrix  # all calls of the table: minutes
@pytest.mark.parametrize("chip", ["v5p", "v6e"], indirect=True)
def test_the_tpu_kernels_for_training_batches_are_bound_by_their_products(chip):
    """A pair of whole tiles takes the cycles that its products take the multipliers, and up to 1.5 times as many: in a
    forward pass of v6e exponentials, too. Eight sequences in a row take less than half of the time of one."""
    command = [sys.executable, "-m", "tests.aot.flash_bundles", chip]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, done.stderr
    calls = list(map(json.loads, (line for line in done.stdout.splitlines() if line.startswith("{"))))
    assert len(calls) == 18
    for one, eight in zip(calls[:3], calls[3:6], strict=True):
        assert eight["estimate"] < 0.4 * one["estimate"]
    for x in calls:
        print(x)
        assert x["whole"] <= (1.5 if x["kernel"] == "flash_attention" else 1.1) * x["products"]


@pytest.mark.aot
@pytest.mark.matrix  # all calls of the table: minutes
@pytest.mark.parametrize("chip", ["v5p", "v6e"], indirect=True)
def test_the_tpu_kernels_for_groups_of_rows_are_near_the_floor(chip):
    """1.5 times the floor with many rows, of FLOPs; 1.1 times in decoding, of bytes. megablox took longer, and XLA does."""
    several = "16,384 tokens, glu", "16,384 tokens, down", "B, 8 tokens", "A3B, 64 tokens", "A3B, 4 tokens"
    command = [sys.executable, "-m", "tests.aot.grouped_bundles", chip, *several]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, done.stderr
    calls = list(map(json.loads, (line for line in done.stdout.splitlines() if line.startswith("{"))))
    assert len(calls) == 18
    for x in calls:
        print(x)
        assert x["estimate"] <= (1.5 if "16,384" in x["call"] else 1.1) * x["floor"]
        assert x["estimate"] < min(x.get("before", 1), x.get("xla", 1))


@pytest.mark.aot
@pytest.mark.matrix  # all calls of the table: minutes
@pytest.mark.parametrize("chip", ["v5p", "v6e"], indirect=True)
def test_the_tpu_kernel_for_experts_in_few_bits_reads_them_at_the_floor_s_speed(chip):
    """64 tokens: bytes 1.3 times the floor; narrow groups of 4 bits, which wait for the multiplier, up to 4 times.
    2,048 tokens, whose blocks are expanded for some 128 rows: up to 3.5 times, GPT-OSS's 64 rows 4.5."""
    command = [sys.executable, "-m", "tests.aot.expert_bundles", chip]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False, timeout=1200
    )
    assert done.returncode == 0, done.stderr
    for x in map(json.loads, (line for line in done.stdout.splitlines() if line.startswith("{"))):
        print(x)
        few = 1.3 if "int8" in x["call"] or "fp8" in x["call"] else 4
        assert x["estimate"] <= (few if " 64 tokens" in x["call"] else 4.5 if "gpt" in x["call"] else 3.5) * x["floor"]


@pytest.mark.aot
@pytest.mark.parametrize("chip", ["v5p", pytest.param("v6e", marks=pytest.mark.matrix)], indirect=True)
@pytest.mark.parametrize("name", ["mixtral", pytest.param("gpt_oss", marks=pytest.mark.matrix)])
def test_a_prompt_through_a_mixture_in_few_bits_expands_no_matrix_in_memory(name, chip, record_property):
    """XLA's program holds gate and up of all experts in bfloat16."""
    plain, c = (expert_parts.step(name, "prefill", target(chip, 1), grouped_matmul=way) for way in ("xla", "mosaic"))
    for about in (plain, c):
        note(record_property, f"{name}, two layers", "prefill", chip, 1, about, 0)
    assert 4 * c.temporaries < plain.temporaries


@pytest.mark.aot
@pytest.mark.parametrize("format", expert_parts.GROUPS)
@pytest.mark.parametrize("chip", ["v5p", "h100"], indirect=True)
def test_quantized_experts_along_tp_are_read_where_they_lie(chip, format, record_property):
    """Each device reads its hidden units of all experts, by the kernels; one sum over devices is all they send."""
    with ops.use(**expert_parts.HOPPER if chip == "h100" else {}):
        found = expert_parts.experts(chip, format)
    c, _ = note(record_property, f"experts {format}", "tp", chip, 4 if chip == "v5p" else 8, found, 0)
    (sent,) = plan.collectives(c.text, narrow=False)
    assert (sent.kind, sent.count) == ("all-reduce", 1)
    assert len(re.findall(r"custom-call\(.*(?:tpu_custom_call|mosaic_gpu)", c.text)) == 3


@pytest.mark.aot
@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("format", expert_parts.GROUPS)
@pytest.mark.parametrize("chip", ["v5p", "h100"], indirect=True)
def test_quantized_products_along_tp_take_the_kernel(chip, format, summed, record_property):
    """Of a device's part of the weight: outputs are sent nowhere, parts of sums once."""
    with ops.use(**{"quantized_matmul": "hopper"} if chip == "h100" else {}):
        found = expert_parts.product(chip, format, summed)
    c, _ = note(record_property, f"product {format}", "tp", chip, 4 if chip == "v5p" else 8, found, 0)
    sent = plan.collectives(c.text, narrow=False)
    assert [(x.kind, x.count) for x in sent] == [("all-reduce", 1)] * summed
    assert len(re.findall(r"custom-call\(.*(?:tpu_custom_call|mosaic_gpu)", c.text)) == 1


@pytest.mark.aot
@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("qwen3_next", 1),
        pytest.param("qwen3_next", 8, marks=pytest.mark.matrix),
        pytest.param("kimi_linear", 1, marks=pytest.mark.matrix),
        pytest.param("kimi_linear", 8, marks=pytest.mark.matrix),
    ],
)
def test_a_training_step_compiles_with_the_delta_rule_for_hopper(name, devices, record_property):
    """In the forward pass, again where it is recomputed, and in the backward pass; with fewer temporaries and loops."""
    if why := aot.missing(target("h100", devices)):
        pytest.skip(why)
    plain, _ = row(record_property, f"{name}-wide", "train", "h100", devices, gated_delta_rule="xla")
    c, _ = row(record_property, f"{name}-wide", "train", "h100", devices, gated_delta_rule="hopper")
    assert len(re.findall(r"custom-call\(.*mosaic_gpu", c.text)) >= 2
    assert c.temporaries < plain.temporaries and c.loops < plain.loops


@pytest.mark.aot
@pytest.mark.matrix  # minutes
def test_the_hopper_kernel_for_pages_keeps_its_sums_in_registers():
    """No spill, products of tensor cores in a row, and the parts' sums beside; a step needs less memory than XLA's."""
    if why := aot.missing(target("h100", 1)):
        pytest.skip(why)
    found = {x["call"]: x for x in hopper_products.table(module="hopper_pages")}
    for x in found.values():
        print(x)
        assert x["registers"] is None or not x["spills"] and not x["serialized"]
        assert x["call"] not in hopper_pages.CALLS or x["registers"] and x["temporaries"] <= 1.02 * 2**23
    for kv in ("int8", "fp8"):
        plain, step = (found[f"decode step, {kv}, {impl}"] for impl in ("xla", "hopper"))
        assert plain["registers"] is None and step["registers"] and step["temporaries"] < 0.7 * plain["temporaries"]


@pytest.mark.aot
def test_the_hopper_kernels_for_products_and_latents_keep_their_sums_in_registers():
    """No spill, products of tensor cores in a row, and few temporaries beside: no decoded weight, no padded rows.

    16 heads over latents take tiles of 64, in two parts: 16 MiB of sums beside 576 MiB of latents. Many rows are written in
    the order of narrow groups: 32 MiB, and 92 MiB.
    """
    if why := aot.missing(target("h100", 1)):
        pytest.skip(why)
    for x in hopper_products.table():
        print(x)
        assert x["registers"] and not x["spills"] and not x["serialized"]
        if "delta rule" in x["call"]:
            assert x["temporaries"] <= (2**30 if "channels" in x["call"] else 2**29)
            continue
        few = x["call"].startswith(("8 rows", "16 rows,", "512 rows of 64"))  # tiles of 8 and 16 rows
        assert x["registers"] <= 80 or not few  # two programs, of 384 threads, share 65,536
        in_order = "4,096" in x["call"] and "MXFP4" in x["call"]
        assert x["temporaries"] <= (2**27 if in_order else 2**25 if "16 heads" in x["call"] else 1.01 * 2**22)


@pytest.mark.aot
@pytest.mark.matrix
def test_instructions_of_a_hopper_decode_every_code():
    """Exact, but for nf4's values, which are rounded to bfloat16, and fp4's, which have a factor of 1 / 12."""
    if why := aot.missing(target("h100", 1)):
        pytest.skip(why)
    texts = hopper_decoding.texts()
    assert texts.keys() == FORMATS.keys() | hopper_decoding.SCALES.keys()
    for name, ptx in texts.items():
        found = hopper_decoding.errors(name, ptx)
        least = 254 if name in hopper_decoding.SCALES else 1984
        assert found.size >= least and found.max() <= {"nf4": 2**-8, "fp4": 1e-7}.get(name, 0), name


@pytest.mark.aot
@pytest.mark.matrix  # minutes
@pytest.mark.parametrize("what", ["decode", "prefill"])
@pytest.mark.parametrize("name", expert_parts.MIXTURES)
def test_a_mixture_in_few_bits_is_read_as_it_is_stored_on_hopper(name, what, record_property):
    """Seven products of each layer by the kernels; XLA's program writes all of a layer's experts in bfloat16, in loops."""
    if why := aot.missing(target("h100", 1)):
        pytest.skip(why)
    plain, c = (
        expert_parts.step(
            name, what, target("h100", 1), paged_attention="xla", **dict.fromkeys(expert_parts.HOPPER, way)
        )
        for way in ("xla", "hopper")
    )
    for about in (plain, c):
        note(record_property, f"{name}, two layers", what, "h100", 1, about, 0)
    assert len(re.findall(r"custom-call\(.*mosaic_gpu", c.text)) == 2 * 7
    assert 4 * c.temporaries < plain.temporaries and c.loops < plain.loops


@pytest.mark.aot
def test_the_hopper_kernels_for_scans_keep_states_in_registers():
    """No spill; beside the results little but the states before chunks, and sums of programs: 3 bytes a channel."""
    if why := aot.missing(target("h100", 1)):
        pytest.skip(why)
    for x in hopper_products.table(module="hopper_scans"):
        print(x)
        rows, t, channels, _, backward = hopper_scans.SCANS[x["call"]]
        assert x["registers"] and not x["spills"]
        assert "float32" in x["call"] or x["temporaries"] <= rows * t * channels * 3 * backward + 2**22


@pytest.mark.aot
@pytest.mark.parametrize("name", ["mamba", pytest.param("falcon_mamba", marks=pytest.mark.matrix)])
def test_a_training_step_with_the_kernel_for_scans_needs_less_memory(name, record_property):
    """For H100, as machine code; the loops over chunks, there and back, are gone."""
    if why := aot.missing(target("h100", 1)):
        pytest.skip(why)
    plain, _ = row(record_property, f"{name}-wide", "train", "h100", 1, selective_scan="xla")
    c, _ = row(record_property, f"{name}-wide", "train", "h100", 1, selective_scan="hopper")
    assert len(re.findall(r"custom-call\(.*mosaic_gpu", c.text)) >= 2
    assert c.temporaries < plain.temporaries and c.loops < plain.loops


@pytest.mark.aot
@pytest.mark.matrix
def test_the_hopper_kernels_for_ssd_keep_states_and_sums_in_registers():
    """No spill, and no wgmma is serialized. A step needs half of XLA's memory, or less."""
    if why := aot.missing(target("h100", 1)):
        pytest.skip(why)
    *calls, plain, step = hopper_products.table(module="hopper_ssd")
    for x in (*calls, plain, step):
        print(x)
    for x in (*calls, step):
        assert x["registers"] and not x["serialized"] and not x["spills"]
    assert plain["registers"] is None and 2 * step["temporaries"] < plain["temporaries"]


@pytest.mark.aot
@pytest.mark.matrix
def test_the_hopper_kernel_for_attention_keeps_sums_and_probabilities_in_registers():
    """No spill, and no wgmma is serialized. A step needs less memory than with loops."""
    if why := aot.missing(target("h100", 1)):
        pytest.skip(why)
    *calls, plain, step = hopper_products.table(module="hopper_flash")
    for x in (*calls, plain, step):
        print(x)
    for x in (*calls, step):
        assert x["registers"] and not x["serialized"] and not x["spills"]
    assert all(x["temporaries"] <= 2**23.1 for x in calls)
    assert plain["registers"] is None and step["temporaries"] < plain["temporaries"]


@pytest.mark.aot
@pytest.mark.matrix
def test_the_hopper_kernels_for_attention_s_gradients_keep_sums_and_probabilities_in_registers():
    """No spill, and no wgmma is serialized."""
    if why := aot.missing(target("h100", 1)):
        pytest.skip(why)
    for x in hopper_products.table(module="hopper_flash_backward"):
        print(x)
        assert x["registers"] and not x["serialized"] and not x["spills"]
        added = "of 128" in x["call"] and "ordered" not in x["call"]  # dq in float32, 256 MiB, is added up in memory
        assert x["temporaries"] <= 2**24.1 + added * 2**28


@pytest.mark.aot
def test_a_training_step_sends_weights_and_gradients_only(chip, record_property):
    c, _ = row(record_property, "llama-1b", "train", chip, 8)
    assert gathers(c.text, LENGTH) == 0
    assert wide_products(c.text, LARGE) == 0
    fetched = [x for x in plan.collectives(c.text, narrow=False) if x.kind == "all-gather"]
    wide = sum(x.moved for x in fetched if any(shape.startswith("f32") for shape in x.shapes))
    assert wide <= 0.05 * sum(x.moved for x in fetched)  # norms and their like


@pytest.mark.aot
def test_a_training_step_of_24_layers_compiles_within_a_minute(chip, record_property):
    """A minute on two cores, counted in processor time, which other work on the machine does not change."""
    start = time.process_time()
    row(record_property, "llama-24-layers", "train", chip, 8)
    assert time.process_time() - start <= 2 * 60
