"""`fdel plan`: reading compiled programs, and a plan for more devices than there are."""

import json
import os
import re
import subprocess
import sys

import jax
import pytest

from fdel import params, plan
from fdel.models import llama

PROGRAM = """HloModule jit_step, num_partitions=8

%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %g.1 = bf16[64,32]{1,0} all-gather(%x), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}, metadata={op_name="a/b"}
  %r = (f32[8]{0}, f32[]) all-reduce(%x, %y), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
}

%add (a: f32[], b: f32[]) -> f32[] {
  %sum = f32[] add(%a, %b)
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %w = (s32[], f32[4]) while(%t), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"12"}}
  %p = f32[16]{0} collective-permute(%x), source_target_pairs={{0,1},{1,0}}
  %s = f32[4]{0} reduce-scatter(%x), replica_groups={}, to_apply=%add
  %m = f32[6]{0} all-to-all(%x), replica_groups=mesh['a'=4,'b'=2,'c'=1] {'a':(1)2,'b'}, dimensions={0}
}
"""


def test_collectives_are_read_with_loops_and_groups():
    found = [(c.kind, c.nbytes, c.devices, c.count, c.moved) for c in plan.collectives(PROGRAM)]
    assert sorted(found) == [
        ("all-gather", 4096, 4, 12, 12 * 4096 * 3 / 4),
        ("all-reduce", 36, 2, 12, 12 * 36 * 2 * 1 / 2),
        ("all-to-all", 24, 4, 1, 24 * 3 / 4),
        ("collective-permute", 64, 2, 1, 64),
        ("reduce-scatter", 16, 8, 1, 16 * 7),
    ]
    assert next(c.source for c in plan.collectives(PROGRAM) if c.kind == "all-gather") == "a/b"


def test_what_was_converted_from_16_bits_is_counted_in_them():
    """Through a fusion, slices and copies; not where numbers were computed, nor for sums."""
    text = """HloModule jit_step, num_partitions=4

%fused (param_0.1: bf16[2,16,64], param_1.1: s32[]) -> f32[64,16] {
  %param_0.1 = bf16[2,16,64]{2,1,0} parameter(0)
  %param_1.1 = s32[] parameter(1)
  %slice.1 = bf16[1,16,64]{2,1,0} dynamic-slice(%param_0.1, %param_1.1, %param_1.1, %param_1.1)
  %convert.1 = f32[1,16,64]{2,1,0} convert(%slice.1)
  ROOT %bitcast.1 = f32[64,16]{1,0} bitcast(%convert.1)
}

%moved (param_0.2: f32[64,16]) -> f32[16,64] {
  %param_0.2 = f32[64,16]{1,0} parameter(0)
  ROOT %transpose.1 = f32[16,64]{0,1} transpose(%param_0.2), dimensions={1,0}
}

ENTRY %main (w: bf16[2,16,64], i: s32[]) -> f32[64,64] {
  %w = bf16[2,16,64]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %a = f32[64,16]{1,0} fusion(%w, %i), kind=kLoop, calls=%fused
  %b = f32[16,64]{0,1} fusion(%a), kind=kLoop, calls=%moved
  %c = f32[16,64]{0,1} multiply(%b, %b)
  %x = f32[64,64]{1,0} all-gather(%b), replica_groups={}, dimensions={0}
  %y = f32[64,64]{1,0} all-gather(%c), replica_groups={}, dimensions={0}
  %z = f32[16,64]{1,0} all-reduce(%b), replica_groups={}, to_apply=%add
}
"""
    shapes = [(c.kind, *c.shapes) for c in plan.collectives(text)]
    assert shapes == [("all-gather", "bf16[64,64]"), ("all-gather", "f32[64,64]"), ("all-reduce", "f32[16,64]")]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_fetched_in_their_dtype(dtype):
    """With fsdp each layer's matrices twice a step, exactly: 2 x 131,072 numbers of a layer, in 2 or 4 bytes."""
    cfg = llama.Config.from_hf(CONFIG)
    program, _ = plan.compile_step(llama, cfg, plan.Training("fsdp=8", 8, 32, dtype=dtype))
    found = [c for c in plan.collectives(program.as_text()) if c.kind == "all-gather" and c.count == cfg.layers]
    fetched = sum(c.count * c.nbytes for c in found if re.search(r"\[\d+,\d+", c.shapes[0]))
    matrices = [p for p in jax.tree.leaves(llama.spec(cfg)["layers"]) if len(p.shape) > 2]
    assert fetched == 2 * sum(params.nbytes(p, dtype) for p in matrices)


def test_groups_in_an_unknown_form_are_an_error():
    with pytest.raises(ValueError, match="replica_groups"):
        plan.collectives(PROGRAM.replace("replica_groups={},", "replica_groups=new,"))


CONFIG = dict(model_type="llama", vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=4,
              num_attention_heads=8, num_key_value_heads=4)  # fmt: skip


def run_plan(directory, *args):
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    command = [sys.executable, "-m", "fdel", "plan", str(directory), *args]
    return subprocess.run(command, capture_output=True, text=True, env=env)


@pytest.mark.slow
def test_plan_for_devices_that_nobody_has(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    args = "--devices 32 --mesh dp=2,fsdp=4,tp=4 --rows 32 --length 64 --microbatches 2 --dtype float32".split()
    done = run_plan(tmp_path, *args, "--memory", "1")
    assert done.returncode == 0, done.stderr
    spec = llama.spec(llama.Config.from_hf(CONFIG))
    table = {c[0]: c[1:] for c in (re.split(r"\s{2,}", line) for line in done.stdout.splitlines())}
    share = params.nbytes(spec, "float32") / 16 / 2**20  # of fsdp * tp; norms are divided by fsdp only
    assert 0.98 * share <= float(table["parameters"][0]) <= 1.1 * share
    assert 1.98 * share <= float(table["optimizer state"][0]) <= 2.2 * share
    assert f"{params.count(spec):,} parameters" in done.stdout and "fits in 1 GiB" in done.stdout
    calls, sent = table["all-reduce among 2"]  # the replicas', once per step: 2 * (1 / 2) of a device's gradients
    assert calls == "1" and share <= float(sent) <= 1.2 * share


@pytest.mark.slow
def test_plan_says_what_does_not_fit_and_what_is_wrong(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    base = ["--devices", "4", "--rows", "8", "--length", "64"]
    assert "does NOT fit in 0.001 GiB" in run_plan(tmp_path, *base, "--memory", "0.001").stdout
    wrong = run_plan(tmp_path, *base, "--mesh", "fsdp=3")
    assert wrong.returncode == 2 and "needs a multiple of 3 devices, found 4" in wrong.stderr
