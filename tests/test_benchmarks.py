"""The benchmark of kernels, which a GPU has for minutes only: all but its numbers is tried here, without one."""

import importlib
import json
import re
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fdel.ops.dispatch import TABLES

ROOT = Path(__file__).parents[1]


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    timing = importlib.import_module("kernel_timing")
    monkeypatch.setattr(timing, "MOST", 2)
    monkeypatch.setattr(timing, "COLD", 1)
    return importlib.import_module("kernels")


def small(case):
    """The small problem in the place of the whole one."""
    return replace(case, build=lambda _, build=case.build: build(True))


def test_a_worker_checks_then_times_and_says_what_fails(bench, tmp_path):
    """What is wrong is not timed, what cannot serve says why, and nothing stops the run; the table has fractions."""
    found = {c.name: small(c) for c in bench.cases() if c.op == "quantized_matmul"}
    some = [found["8 rows, GPTQ by 32"], replace(found["8 rows, int8"], tolerance=0.0)]
    log, done = tmp_path / "log", bench.Row("quantized_matmul", "8 rows, int8", "bfloat16", failed="before")
    known = {"row": done}, {"first": dict.fromkeys(("dot", "copy", "read", "exp"), 1e9)}
    log.write_text("".join(json.dumps(event) + "\n" for event in known))
    bench.worker(log, some, time.time() + 100, threads=2, scale=2**-16)
    events = bench.events(log)
    rows = [bench.Row(*e["row"]) for e in events if "row" in e]
    by_way = {(row.call, row.way): row for row in rows}
    assert len(rows) == len(by_way) == 6
    right = by_way["8 rows, GPTQ by 32", "xla"]
    assert 1e-4 < right.error < 0.02 and right.seconds and right.failed is None
    assert "written for NVIDIA GPUs" in by_way["8 rows, GPTQ by 32", "hopper"].failed
    wrong = by_way["8 rows, int8", "xla"]
    assert wrong.failed == "wrong, so not timed" and wrong.error and not wrong.seconds
    text = bench.page(rows, {k: v for e in events for k, v in e.items()}, ["one more"])
    assert re.search(r"\| \d+\.\d\d of (dot|copy)[^|]*\| 0\.80 \|", text) and "| before |" in text
    assert "Not measured: one more." in text


def test_who_waits_to_measure_is_not_passed_by_those_who_compile(bench, tmp_path):
    """Four threads compile without a pause: a lock that lets them pass one who waits is never free."""
    ended = threading.Event()

    def compile_on():
        while not ended.is_set():
            with bench.holding(tmp_path / "lock", False):
                time.sleep(0.2)

    compiling = [threading.Thread(target=compile_on, daemon=True) for _ in range(4)]
    measured = threading.Thread(target=lambda: bench.holding(tmp_path / "lock", True).__enter__(), daemon=True)
    for thread in compiling:
        thread.start()
        time.sleep(0.05)
    measured.start()
    measured.join(2)
    ended.set()
    assert not measured.is_alive()


def test_what_ends_the_process_is_a_row_and_the_next_goes_on(bench, tmp_path, monkeypatch):
    """While several compile no one is blamed: the next worker does one after the other."""
    log, script = tmp_path / "log", tmp_path / "worker.py"
    script.write_text(f"""
import json, os, sys
log, threads = open({str(log)!r}, "a+"), sys.argv[-1]
log.seek(0)
seen = log.read()
say = lambda **e: (log.write(json.dumps(e) + "\\n"), log.flush())
if "crashes" not in seen:
    say(at=("op", "crashes", "a"), doing="run")
    os.abort()
if '"row": ["op", "compiles"' not in seen:
    say(at=("op", "compiles", threads), doing="compile")
    os.abort()
if '"row": ["op", "hangs"' not in seen:
    say(at=("op", "hangs", "b"), doing="run")
    import time; time.sleep(60)
""")
    monkeypatch.setitem(bench.QUIET, "run", 0.5)
    bench.supervised([sys.executable, str(script)], log, time.time() + 60)
    rows = [e["row"] for e in map(json.loads, log.read_text().splitlines()) if "row" in e]
    assert [row[:3] for row in rows] == [["op", "crashes", "a"], ["op", "compiles", "1"], ["op", "hangs", "b"]]
    assert "ended the process" in rows[0][9] and "did not end" in rows[2][9]


def test_a_worker_that_still_compiles_when_the_minutes_are_over_is_ended(bench, tmp_path):
    """What started the run may end it soon after, before anything of it is printed."""
    log, script = tmp_path / "log", tmp_path / "worker.py"
    script.write_text(f"""
import time
for i in range(600):
    print('{{"at": ["op", "call", "way"], "doing": "compile"}}', file=open({str(log)!r}, "a"), flush=True)
    time.sleep(0.1)
""")
    began = time.time()
    bench.supervised([sys.executable, str(script)], log, began - bench.LAST + 1)
    assert time.time() - began < 30 and len(bench.events(log)) > 1


WRONG = [
    ("kernels", ["--ways", "hopper", "hoper"], "no case has 'hoper'; known are .*hopper_ordered"),
    ("kernels", ["--only", "8 rows", "4096 rows"], "no case has '4096 rows' in its operation or name"),
    ("shapes", ["--shape", "toy", "--kernels", "attend=hoper"], "attend: impl='hoper' is unknown"),
    ("shapes", ["--shape", "toy", "--kernels", "moe=dense", "moe=fused"], "an operation stands twice"),
]


@pytest.mark.parametrize(("script", "options", "said"), WRONG, ids=lambda x: str(x)[:40])
def test_names_that_nothing_has_are_refused_before_a_minute_goes_by(bench, script, options, said, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [script, *options])
    module = importlib.import_module(script)
    with pytest.raises(SystemExit):
        module.main() if script == "kernels" else module.main(module.trained, None)
    assert re.search(said, capsys.readouterr().err.replace("\n", " "))


def test_programs_whose_description_was_not_finished_are_compiled_again(bench, tmp_path):
    case = next(c for c in bench.cases() if c.name == "decode, 64 sequences" and c.op == "ssd")
    job = bench.Job(case, "xla", folder=tmp_path)
    job.path.with_suffix(".json").write_text('{"made": "')
    assert bench.Job(case, "xla", folder=tmp_path).lowered


def test_every_kernel_of_a_gpu_has_a_case_that_is_lowered_for_one(bench, monkeypatch):
    """One of each operation by what is named "hopper", whatever that will be; tables are those of tests/aot."""
    kernels = {op for op, table in TABLES.items() if "hopper" in table.implementations}
    assert kernels - {"attend_part"} <= {case.op for case in bench.cases()}  # that is `attend`'s, in a ring
    monkeypatch.setattr("kernel_timing.COLD", 2e8)
    case = next(c for c in bench.cases() if c.name == "8 rows, int8")
    job = bench.Job(case, "hopper", bench.Dry())
    assert job.sets > 1 and "mosaic_gpu" in job.lowered[0].as_text()


def test_programs_that_were_compiled_elsewhere_are_loaded_and_give_the_same(bench, tmp_path, monkeypatch):
    """Here by the reference, on this CPU: nothing is traced again."""
    case = next(c for c in bench.cases() if c.name == "decode, 64 sequences" and c.op == "ssd")
    first = bench.Job(case, "xla", folder=tmp_path)
    first.compile()
    first.save()
    second = bench.Job(case, "xla", folder=tmp_path)
    assert not second.lowered
    second.compile()
    (off, got), (_, want) = second.check(), first.check()
    assert off <= case.tolerance and (second.sets, second.count) == (first.sets, first.count)
    assert all((a == b).all() for a, b in zip(got, want, strict=True)) and len(got) == 2
    monkeypatch.setattr("kernel_timing.made", lambda: "of another jax, or of other kernels")
    assert bench.Job(case, "xla", folder=tmp_path).lowered


@pytest.mark.matrix  # torch is imported
def test_torchs_attention_is_timed_at_the_same_shapes(bench):
    torch = pytest.importorskip("torch")
    from kernel_report import torch_attention

    assert torch_attention((1, 32, 4, 2, 64, {}, 1), True, device="cpu", repeats=1) > 0
    assert torch_attention((1, 32, 4, 2, 64, {"window": 4}, 1), False, device="cpu") is None and torch
