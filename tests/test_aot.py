"""`fdel plan --target`: texts of targets, the report of a compiled program, and what happens without the compilers."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from fdel import aot, plan
from fdel.models import llama

CONFIG = dict(model_type="llama", vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
              num_attention_heads=4, num_key_value_heads=2)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "shape", "count"),
    [
        ("v5p:4x4x4", (4, 4, 4), 64),
        ("V6E:16x16", (16, 16), 256),
        ("h100:4x8x8", (4, 8, 8), 256),
        ("v5e:1x1", (1, 1), 1),
    ],
)
def test_targets_are_read(text, shape, count):
    target = aot.parse_target(text)
    assert (target.shape, target.count, str(target)) == (shape, count, text.lower())


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("v9:2x2", "the chip 'v9' is unknown, known are v5e, v5p"),
        ("v5p:4x4", "found the shape '4x4', expected 3 sizes above 0"),
        ("v6e:2x2x2", "expected 2 sizes"),
        ("h100:8", "write CHIP:SHAPE, as v5p:4x4x4"),
        ("h100:1x0x8", "expected 3 sizes above 0"),
        ("v6e", "found the shape ''"),
    ],
)
def test_wrong_targets_are_told_with_examples(text, why):
    with pytest.raises(ValueError, match="CHIP:SHAPE") as e:
        aot.parse_target(text)
    assert why in str(e.value)


ASYNC = """HloModule t, num_partitions=8

ENTRY %main (a: bf16[8,64]) -> bf16[64,64] {
  %a = bf16[8,64]{1,0} parameter(0)
  %s = (bf16[8,64]{1,0}, bf16[64,64]{1,0}) all-gather-start(%a), replica_groups=[1,8]<=[8], dimensions={0}
  %d = bf16[64,64]{1,0} all-gather-done(%s)
  %f = f32[8,64]{1,0} convert(%a)
  %r = f32[8,64]{1,0} all-reduce-start(%f), replica_groups=[1,8]<=[8], to_apply=%add
  %p = (bf16[8,64]{1,0}, bf16[8,64]{1,0}, u32[], u32[]) collective-permute-start(%a), source_target_pairs={{0,1},{1,0}}
  %g = f32[64,64]{1,0} all-gather(%f), replica_groups=[1,8]<=[8], dimensions={0}
}
"""


def test_what_is_started_is_counted_once_and_in_the_dtype_that_is_sent():
    found = [(c.kind, c.shapes, c.nbytes) for c in plan.collectives(ASYNC, narrow=False)]
    assert found == [
        ("all-gather", ("bf16[64,64]",), 8192),
        ("all-reduce", ("f32[8,64]",), 2048),
        ("collective-permute", ("bf16[8,64]",), 1024),
        ("all-gather", ("f32[64,64]",), 16384),
    ]
    assert plan.collectives(ASYNC)[-1].shapes == ("bf16[64,64]",)  # XLA:CPU widened it


def test_the_report_of_a_program():
    target = aot.parse_target("v5e:1x1")
    compiled = aot.Compiled(ASYNC, 12.3, 3 * 2**30, 2**30, 0, 1e12, 0.005)
    text = aot.describe(target, "train", compiled)
    assert "fits in 16 GiB: 12.0 GiB are left" in text and "by the compiler's estimate 5 ms" in text
    assert "all-gather bf16 among 8" in text and "all-reduce f32 among 8" in text and "compiled in 12 s" in text
    assert "does NOT fit in 2 GiB: 2.0 GiB too much; divide more (fsdp, tp), remat" in aot.describe(
        target, "train", compiled, memory=2
    )


def test_a_program_is_measured():
    """The host's own compiler answers too: arguments to the byte, no loops, the FLOPs of a product."""
    f = jax.jit(lambda x, y: x @ y)
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    c = aot.measure(f.lower(x, x))
    assert c.arguments == 2 * 64 * 64 * 4 and c.loops == 0 and c.flops >= 2 * 64**3


@pytest.mark.slow
def test_without_its_compiler_a_target_is_planned_on_virtual_devices(tmp_path):
    if aot.missing(aot.parse_target("v5p:2x2x1")) is None:
        pytest.skip("libtpu is installed here")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))

    def run(*args):
        env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
        command = [sys.executable, "-m", "fdel", "plan", str(tmp_path), "--rows", "4", "--length", "32", *args]
        return subprocess.run(command, capture_output=True, text=True, env=env)

    done = run("--target", "v5p:2x2x1")
    assert done.returncode == 0, done.stderr
    assert 'needs libtpu: pip install "jax[tpu]"; until then planned for virtual CPU devices' in done.stdout
    assert "fsdp=-1 (4 devices)" in done.stdout and "fits in 95 GiB" in done.stdout
    for args, why in [
        (["--target", "v5p:2x2x1", "--serve"], "needs libtpu"),
        (["--target", "v5p:2"], "CHIP:SHAPE"),
        ([], "give either --target"),
        (["--devices", "4", "--serve"], "--serve needs --target"),
    ]:
        done = run(*args)
        assert done.returncode == 2 and why in done.stderr


@pytest.mark.aot
@pytest.mark.parametrize("name", ["v6e:2x2", "h100:1x1x4"])
def test_a_plan_for_a_target(name):
    """bfloat16 stays so on the way: each layer's matrices are fetched in two bytes a number."""
    if why := aot.missing(target := aot.parse_target(name)):
        pytest.skip(why)
    cfg = llama.Config.from_hf(CONFIG)
    text = aot.report(target, llama, cfg, plan.Training("fsdp=-1", 8, 64))
    assert "all-gather bf16 among 4" in text and "all-gather f32" not in text and "fits in" in text
    serving = aot.report(target, llama, cfg, aot.Serving("tp=2,fsdp=2", 4, 128))
    assert "decode: memory per device" in serving and "prefill: memory per device" in serving


@pytest.mark.aot
def test_what_does_not_fit_is_told_with_the_compiler_s_account():
    if why := aot.missing(target := aot.parse_target("v5e:1x1")):
        pytest.skip(why)
    big = llama.Config.from_hf(
        CONFIG | dict(hidden_size=4096, intermediate_size=16384, num_hidden_layers=24, num_attention_heads=32)
    )
    text = aot.report(target, llama, big, plan.Training("fsdp=-1", 1, 128))
    assert "does NOT fit" in text and "more microbatches" in text
