"""The loop: what it logs, when it stops, and that a run that was cut off goes on bit by bit."""

import importlib.util
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import types
from pathlib import Path

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel import ops, params, train
from fdel.models import llama
from fdel.train import checkpoint, metrics, parallel
from fdel.train.evaluation import evaluator
from fdel.train.loop import Event, Loop, fit

CFG = llama.Config(vocab=48, embed=16, ffn=24, layers=1, heads=4, kv_heads=2, head_dim=4, rope=ops.Rope(4, 1e4))
SPEC = llama.spec(CFG)
ROWS, LENGTH = 8, 12
RATE = train.schedules.cosine(1e-2, warmup=2, steps=12)
UNEVEN = ("tokens_per_second", "mfu")  # all that may differ between two runs


def example(index, rng):
    walk = (np.cumsum(rng.integers(1, 3, LENGTH)) + index) % CFG.vocab
    return {"tokens": walk.astype(np.int32), "lengths": np.int32(rng.integers(3, LENGTH + 1))}


def data(epochs=None):
    """80 rows, shuffled anew in each epoch and made at random, read ahead by threads."""
    rows = grain.MapDataset.source(range(80)).seed(5).shuffle().repeat(epochs).random_map(example)
    return rows.batch(ROWS, drop_remainder=True).to_iter_dataset(grain.ReadOptions(num_threads=2))


OPTIMIZER = train.optim.adamw(RATE, weight_decay=0.1)
LOSS = train.losses.sft(llama, CFG)


def init():
    weights = params.init(SPEC, jax.random.key(0), dtype=jnp.float32)
    return train.init_state(weights, OPTIMIZER, ema=weights)


@pytest.fixture(scope="module")
def step():
    g = train.normalize(train.accumulate(train.grads(LOSS), 2))
    composed = train.ema(train.update(g, OPTIMIZER, skip_nonfinite=True), 0.9)
    return jax.jit(metrics.reporting(composed, learning_rate=RATE), donate_argnums=0)


@pytest.fixture(scope="module")
def start():
    return jax.jit(init)


def even(rows):
    return [{k: v for k, v in row.items() if k not in UNEVEN} for row in rows]


def logged(directory):
    return even(metrics.read(directory))


def same(a, b):
    return jax.tree.all(jax.tree.map(lambda x, y: np.array_equal(np.asarray(x), np.asarray(y)), a, b))


class Crash(Exception):
    pass


def crash_at(step):
    def callback(event: Event) -> None:
        if event.step == step:
            raise Crash

    return callback


def loop(directory, **changes):
    given = dict(steps=12, directory=directory, log_every=1, save_every=4, progress_bar=False)
    return Loop(**given | changes)


@pytest.fixture(scope="module")
def whole(step, start, tmp_path_factory):
    """A run that nothing interrupts: its directory and its last state."""
    directory = tmp_path_factory.mktemp("whole")
    return directory, fit(step, start, data(), loop(directory))


@pytest.fixture(params=["waits", "background"])
def saving(request, monkeypatch):
    """A loop that waits for checkpoints, as on CPU, or that trains on meanwhile, as elsewhere."""
    made = checkpoint.Saver.__init__

    def init(self, *args, **kept):
        made(self, *args, **kept)
        self.background = request.param == "background"

    monkeypatch.setattr(checkpoint.Saver, "__init__", init)


# ---- what is logged ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_rows_hold_the_numbers_of_their_own_step(whole, step):
    """Against a plain loop that reads every metric at once."""
    state, rows, tokens = jax.jit(init)(), [], 0
    for i, batch in zip(range(1, 13), data(), strict=False):
        state, values = step(state, batch)
        tokens += int(batch["lengths"].sum())
        rows.append({"step": i, **jax.tree.map(float, values), "num_tokens": tokens, "nonfinite_steps": 0})
    assert logged(whole[0]) == rows
    assert same(whole[1], state)
    np.testing.assert_allclose([r["learning_rate"] for r in rows], [RATE(i) for i in range(12)], rtol=1e-5)
    assert rows[-1]["loss"] < rows[0]["loss"] and rows[0]["grad_norm"] > 0


def test_every_nth_step_and_the_last_are_logged(step, start, tmp_path, whole):
    fit(step, start, data(), loop(tmp_path, log_every=5, save_every=0, steps_per_epoch=10, flops_per_token=2.0))
    rows = metrics.read(tmp_path)
    all_rows = {row["step"]: row for row in logged(whole[0])}
    assert [row["step"] for row in rows] == [5, 10, 12]
    assert [row.pop("epoch") for row in rows] == [0.5, 1.0, 1.2]
    assert all(row["tokens_per_second"] > 0 and "mfu" not in row for row in rows)  # a CPU's peak is not known
    assert even(rows) == [all_rows[i] for i in (5, 10, 12)]
    assert not (tmp_path / "checkpoints").exists()


def test_the_run_ends_with_the_data(step, start, tmp_path):
    state = fit(step, start, data(epochs=1), Loop(steps=None, directory=tmp_path, save_every=4, progress_bar=False))
    assert int(state.step) == 10 == metrics.read(tmp_path)[-1]["step"]
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["10", "4", "8"]


def test_half_a_line_is_passed_over_and_later_steps_are_cut(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [{"step": i, "loss": 1 / i} for i in range(1, 8)]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows[:6]) + '[1]\n\n{"step": 7, "lo')
    assert metrics.read(tmp_path) == rows[:6]
    with metrics.jsonl(path, 3) as write:
        write(rows[6])
    assert path.read_text() == "".join(json.dumps(r) + "\n" for r in [*rows[:3], rows[6]])


def test_rows_that_a_full_disk_refuses_are_written_later(tmp_path, full_disk, caplog):
    path = tmp_path / "metrics.jsonl"
    with metrics.jsonl(path, 0) as write:
        write({"step": 1, "loss": 0.5})
        full_disk(40)
        write({"step": 2, "loss": 0.25})
        write({"step": 3, "loss": 0.125})
        assert 0 < path.stat().st_size <= 40 and "will be tried again" in caplog.text
        full_disk(10_000_000)
        write({"step": 4, "loss": 0.5})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]


def events(directory):
    """Read TensorBoard's files by their format: length, checksum, a protocol buffer, checksum."""
    from tensorboardX.proto import event_pb2

    for file in sorted(directory.glob("events.*")):
        blob = file.read_bytes()
        while blob:
            (size,) = struct.unpack("<Q", blob[:8])
            yield event_pb2.Event.FromString(blob[12 : 12 + size])
            blob = blob[16 + size :]


def test_tensorboard_has_every_number_under_trl_names(step, start, tmp_path, whole):
    chosen = loop(tmp_path, save_every=0, eval_every=6, report_to=("tensorboard",))
    fit(step, start, data(), chosen, evaluate=lambda state: {"eval_loss": 1.5})
    found = {}
    for event in events(tmp_path / "tensorboard"):
        for value in event.summary.value:
            found.setdefault(value.tag, {})[event.step] = value.simple_value
    want = {row["step"]: row for row in logged(whole[0])}
    for name in ("loss", "grad_norm", "learning_rate", "num_tokens"):
        assert found[f"train/{name}"] == {i: np.float32(row[name]) for i, row in want.items()}
    assert found["eval/loss"] == {6: 1.5, 12: 1.5}


def test_wandb_goes_on_in_the_same_run(monkeypatch, tmp_path):
    calls = []

    class Run:
        def __getattr__(self, name):
            return lambda *args, **options: calls.append((name, args, options))

    fake = types.SimpleNamespace(init=lambda **options: calls.append(("init", (), options)) or Run())
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for first in (0, 1):
        with metrics.rows(tmp_path, first, ("wandb",)) as write:
            write({"step": first + 1, "loss": 0.5, "eval_loss": 0.25})
    opened = [options for name, _, options in calls if name == "init"]
    assert opened[0] == opened[1] and opened[0]["resume"] == "allow" and len(opened[0]["id"]) == 32
    sent = [args[0] for name, args, _ in calls if name == "log"]
    assert sent[1] == {"train/loss": 0.5, "eval/loss": 0.25, "train/global_step": 2}
    assert [name for name, *_ in calls].count("finish") == 2


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_reporter_that_is_not_installed_is_an_error_that_says_how(monkeypatch, tmp_path, name):
    monkeypatch.setitem(sys.modules, {"tensorboard": "tensorboardX"}.get(name, name), None)
    with pytest.raises(ImportError, match=f"report_to names {name}; install it: pip install"):
        with metrics.rows(tmp_path, 0, (name,)):
            pass


def test_peak_flops_go_by_the_longest_name():
    kinds = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H100 PCIe": 756e12, "TPU v5 lite": 197e12, "TPU v5p": 459e12,
             "cpu": 0.0}  # fmt: skip
    assert {kind: metrics.peak_flops(kind) for kind in kinds} == kinds


def test_mfu_is_the_share_of_all_devices_peak(monkeypatch):
    monkeypatch.setattr(metrics, "peak_flops", lambda kind: 1e9)
    row = metrics.Speed(tokens=10_000, since=time.perf_counter() - 2).read(flops_per_token=3e5)
    assert 4000 < row["tokens_per_second"] <= 5000
    np.testing.assert_allclose(row["mfu"], row["tokens_per_second"] * 3e5 / (8 * 1e9), rtol=1e-4)
    speed = metrics.Speed()
    speed.add(512)  # the first step compiles
    assert speed.read(3e5) == {}


# ---- going on ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("saving")
def test_a_run_that_crashes_goes_on_bit_by_bit(step, start, tmp_path, whole):
    """It crashes twice, the second time before it comes to a new checkpoint."""
    for at in (7, 6):
        with pytest.raises(Crash):
            fit(step, start, data(), loop(tmp_path), callbacks=[crash_at(at)], config={"rate": 0.01})
        assert [row["step"] for row in logged(tmp_path)] == list(range(1, at + 1))
    seen = []
    state = fit(step, start, data(), loop(tmp_path), callbacks=[lambda e: seen.append(e.step)])
    assert seen == list(range(5, 13))
    assert logged(tmp_path) == logged(whole[0]) and same(state, whole[1])
    again = fit(step, start, data(), loop(tmp_path))  # it is over: nothing is run or written
    assert logged(tmp_path) == logged(whole[0]) and same(again, whole[1])


@pytest.mark.slow
def test_a_state_that_is_given_as_arrays_makes_room(step, start, tmp_path, whole):
    with pytest.raises(Crash):
        fit(step, start(), data(), loop(tmp_path), callbacks=[crash_at(5)])
    fresh = start()
    assert same(fit(step, fresh, data(), loop(tmp_path)), whole[1])
    assert all(x.is_deleted() for x in jax.tree.leaves(fresh))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_step_saves_and_exits(step, start, tmp_path, whole, number, caplog):
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as e:
        stop = lambda event: os.kill(os.getpid(), number) if event.step == 5 else None
        fit(step, start, data(), loop(tmp_path, log_every=5), callbacks=[stop])
    assert e.value.code == 128 + number and signal.getsignal(number) is before
    assert f"{number.name}: stopped after step 6, which is saved" in caplog.text
    assert (tmp_path / "checkpoints" / "6").is_dir()
    state = fit(step, start, data(), loop(tmp_path, log_every=5))
    assert same(state, whole[1]) and [row["step"] for row in logged(tmp_path)] == [5, 10, 12]


@pytest.mark.slow
def test_another_mesh_goes_on_within_rounding(step, start, tmp_path, whole):
    with pytest.raises(Crash):
        fit(step, start, data(), loop(tmp_path), callbacks=[crash_at(5)])
    mesh = params.make_mesh({"fsdp": 2}, jax.devices()[:2])
    at = parallel.state_shardings(jax.eval_shape(init), params.shardings(SPEC, mesh))
    g = parallel.reduce_once(train.accumulate(train.grads(LOSS), 2))
    composed = train.ema(train.update(train.normalize(g), OPTIMIZER, skip_nonfinite=True), 0.9)
    meshed = jax.jit(metrics.reporting(composed, learning_rate=RATE), donate_argnums=0, out_shardings=(at, None))
    with jax.set_mesh(mesh):
        state = fit(
            meshed, jax.jit(init, out_shardings=at), data(), loop(tmp_path), sharding=params.batch_sharding(mesh)
        )
    assert jax.tree.map(lambda x: x.sharding, state.params) == at.params
    got, want = ([row["loss"] for row in logged(d)] for d in (tmp_path, whole[0]))
    assert got[:4] == want[:4]
    np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.slow
def test_data_of_another_number_of_processes_is_refused_unless_they_share_its_place(step, start, tmp_path, whole):
    chosen = loop(tmp_path, steps=4)
    fit(step, start, data(), chosen)
    notes = tmp_path / "checkpoints" / "4" / "notes" / "process_0.json"
    notes.write_text(json.dumps(json.loads(notes.read_text()) | {"processes": 2}))
    (tmp_path / "checkpoints" / "4" / "digests.0.json").unlink()
    with pytest.raises(ValueError, match="divided among 2 processes, now there are 1; use as many"):
        fit(step, start, data(), chosen)
    shared = type("Shared", (), {"shared": True, "__iter__": lambda self: iter(data())})
    assert same(fit(step, start, shared(), loop(tmp_path)), whole[1])


@pytest.mark.slow
def test_what_differs_from_the_saved_run_is_said(step, start, tmp_path, caplog):
    fit(step, start, data(), loop(tmp_path, steps=4), config={"trainer": {"rate": 1, "rows": (8, 4)}})
    fit(step, start, data(), loop(tmp_path, steps=5), config={"trainer": {"rate": 2, "rows": (8, 4)}})
    said = [r.getMessage() for r in caplog.records if r.name.startswith("fdel")]
    assert said == ["since step 4 was saved, config.trainer.rate has changed from 1 to 2"]
    assert [row["step"] for row in logged(tmp_path)] == [1, 2, 3, 4, 5]
    notes = json.loads((tmp_path / "checkpoints" / "5" / "notes" / "process_0.json").read_text())
    assert notes["versions"]["jax"] == jax.__version__ and notes["config"]["trainer"]["rate"] == 2
    assert notes["progress"]["step"] == 5


@pytest.mark.usefixtures("saving")
def test_a_save_that_fails_is_survived(step, start, tmp_path, full_disk, caplog, whole):
    size = {4: 3000, 9: 10_000_000}  # the disk is full from before the first save until after the second has begun
    limit = lambda event: full_disk(size[event.step]) if event.step in size else None
    state = fit(step, start, data(), loop(tmp_path), callbacks=[limit])
    assert same(state, whole[1]) and logged(tmp_path) == logged(whole[0])
    assert "checkpoint of step 4 was not saved" in caplog.text and "step 12 was not" not in caplog.text
    assert not (tmp_path / "checkpoints" / "4").exists() and (tmp_path / "checkpoints" / "12").exists()


@pytest.mark.slow
def test_a_last_save_that_fails_is_an_error(step, start, tmp_path, full_disk):
    fit(step, start, data(), loop(tmp_path, steps=4))
    with pytest.raises((OSError, ValueError), match="too large"):
        fit(step, start, data(), loop(tmp_path, steps=5), callbacks=[lambda event: full_disk(8000)])
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["4"]


# ---- stopping and choosing -----------------------------------------------------------------------------------------


def curve(*values):
    """An evaluation that gives these values in turn, by the step."""
    return lambda state: {"eval_loss": values[int(state.step) // 2 - 1]}


@pytest.mark.slow
def test_training_stops_early_and_stays_stopped(step, start, tmp_path):
    chosen = loop(tmp_path, eval_every=2, patience=2, save_every=3)
    evaluate = curve(3.0, 2.0, 2.5, 1.0, 1.0, float("nan"))
    with pytest.raises(Crash):
        fit(step, start, data(), chosen, evaluate=evaluate, callbacks=[crash_at(7)])
    for _ in range(2):  # a third command finds it stopped
        state = fit(step, start, data(), chosen, evaluate=evaluate)
        assert int(state.step) == 12 and [r.get("eval_loss") for r in logged(tmp_path)][7:10] == [1.0, None, 1.0]
    other = loop(tmp_path / "b", eval_every=2, patience=1, save_every=3)
    for _ in range(2):
        assert int(fit(step, start, data(), other, evaluate=evaluate).step) == 6
    assert logged(tmp_path / "b")[-1]["eval_loss"] == 2.5


@pytest.mark.slow
def test_the_best_checkpoints_stay(step, start, tmp_path):
    chosen = loop(tmp_path, eval_every=2, save_every=0, keep=1, keep_best=2)
    fit(step, start, data(), chosen, evaluate=curve(3.0, 1.0, 2.5, 2.0, 4.0, 4.0))
    assert sorted(int(p.name) for p in (tmp_path / "checkpoints").iterdir()) == [4, 8, 12]


def test_callbacks_see_the_rows_and_may_end_the_run(step, start, tmp_path):
    seen = []

    def callback(event):
        seen.append((event.step, int(event.state.step), event.metrics["loss"]))
        return event.step == 4

    state = fit(step, start, data(), loop(tmp_path, log_every=2, save_every=20), callbacks=[callback])
    assert [s[:2] for s in seen] == [(2, 3), (4, 5), (5, 5)] and int(state.step) == 5
    assert [s[2] for s in seen] == [row["loss"] for row in logged(tmp_path)]
    assert (tmp_path / "checkpoints" / "5").is_dir()


def test_steps_that_are_not_finite_are_counted_and_stop_the_run(step, start, tmp_path):
    bad = lambda i: step if i not in (3, 5, 6) else poison
    poison = lambda state, batch: (lambda s, m: (s, m | {"loss": m["loss"] * jnp.nan, "skipped": 1.0}))(
        *step(state, batch)
    )
    count = iter(range(1, 100))
    chosen = loop(tmp_path, save_every=0, steps=8)
    fit(lambda state, batch: bad(next(count))(state, batch), start, data(), chosen)
    assert [row["nonfinite_steps"] for row in logged(tmp_path)] == [0, 0, 1, 1, 2, 3, 3, 3]
    count = iter(range(1, 100))
    with pytest.raises(FloatingPointError, match="2 steps in a row, up to step 6"):
        fit(lambda s, b: bad(next(count))(s, b), start, data(), loop(tmp_path, save_every=0, max_nonfinite=2))


def test_a_run_without_a_finite_step_fails_and_is_not_saved_as_ended(step, start, tmp_path, caplog):
    """After a warning at the tenth step in a row; also where it goes on; one finite step is enough."""
    poison = lambda state, batch: (lambda s, m: (s, m | {"loss": m["loss"] * jnp.nan}))(*step(state, batch))
    for steps, kept in ((11, ["4", "8"]), (12, ["4", "8"])):
        with pytest.raises(FloatingPointError, match=f"none of the {steps} steps had a finite loss"):
            fit(poison, start, data(), loop(tmp_path, steps=steps))
        assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == kept or steps == 12
    assert "10 steps in a row, up to step 10, had no finite loss or gradient" in caplog.text
    with pytest.raises(FloatingPointError, match="none of the 12 steps"):
        fit(step, start, data(), loop(tmp_path, steps=12))
    good = iter([step, poison, poison])
    fit(lambda s, b: next(good)(s, b), start, data(), loop(tmp_path / "one", steps=3, save_every=0))
    assert logged(tmp_path / "one")[-1]["nonfinite_steps"] == 2


def test_evaluation_is_exact_by_weight(start):
    """Against sums over single rows; the batches' weights differ."""
    batches = [batch for batch, _ in zip(data(), range(2), strict=False)]
    batches[1]["lengths"][3:] = 2
    state = start()
    total = weight = 0.0
    loss = jax.jit(LOSS)
    for batch in batches:
        for row in range(len(batch["tokens"])):
            value, sums = loss(state.params, {k: v[row : row + 1] for k, v in batch.items()})
            total, weight = total + float(value), weight + float(sums["weight"])
    got = evaluator(loss, batches)(state)
    np.testing.assert_allclose(got["eval_loss"], total / weight, rtol=1e-6)
    assert "eval_weight" not in got and abs(got["eval_loss"] - np.log(CFG.vocab)) < 0.5
    pairs = lambda params, batch, _: (2.0, {"weight": 4.0, "accuracy": (np.float32(batch["n"]), np.float32(8))})
    got = evaluator(pairs, [{"n": 2}, {"n": 4}])(state)
    assert got == {"eval_loss": 0.5, "eval_accuracy": 6 / 16}
    for empty, message in (([], "no batch"), ([{"n": 0}], "no token that counts")):
        with pytest.raises(ValueError, match=message):
            evaluator(lambda params, batch, _: (0.0, {"weight": 0.0}), empty)(state)


@pytest.mark.parametrize(
    "changes,message",
    [
        (dict(eval_every=2), "needs an `evaluate`"),
        (dict(patience=2), "set eval_every"),
        (dict(directory=None), "need a directory"),
        (dict(report_to=("carrier pigeon",)), "known are tensorboard, wandb"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(step, start, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        fit(step, start, data(), loop(**{"directory": tmp_path} | changes))


def test_data_without_a_place_cannot_be_saved(step, start, tmp_path):
    with pytest.raises(ValueError, match="generator, has no get_state"):
        fit(step, start, (batch for batch in data()), loop(tmp_path))


# ---- whole processes -----------------------------------------------------------------------------------------------

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "loop.py"


@pytest.fixture(scope="module")
def runs():
    spec = importlib.util.spec_from_file_location("benchmark_loop", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_a_run_that_is_killed_is_bitwise_the_whole_one(runs, tmp_path):
    """On four devices, with threads that read ahead, twice in a row; the second time a damaged checkpoint besides."""
    rows, digest, _ = runs.finish(tmp_path / "whole")
    assert [row["step"] for row in rows] == list(range(1, 41)) and rows[-1]["loss"] < rows[0]["loss"] - 0.2
    killed = tmp_path / "killed"
    runs.kill(killed, 0.2)
    step, _ = runs.kill(killed, 0.4)
    assert step < 40
    found = sorted((int(p.name), p) for p in (killed / "checkpoints").glob("*") if p.name.isdecimal())
    if len(found) > 1:
        (found[-1][1] / "notes" / "process_0.json").write_text("{")
    got, same_digest, said = runs.finish(killed)
    assert got == rows and same_digest == digest
    assert ("the last good checkpoint" in said) == (len(found) > 1)


@pytest.mark.slow
def test_a_process_that_is_terminated_saves_and_exits(runs, tmp_path):
    process = runs.begun(tmp_path / "run", 100_000)
    process.terminate()
    _, err = process.communicate(timeout=120)
    assert (
        process.returncode == 128 + signal.SIGTERM and "SIGTERM: stopped after step" in err and "Traceback" not in err
    )
    last = int(err.split("stopped after step ")[1].split(",")[0])
    saved = [int(p.name) for p in (tmp_path / "run" / "checkpoints").iterdir()]
    assert max(saved) == last == runs.last_step(tmp_path / "run")


def launch(directory, steps, count=2):
    """Start processes that run loop_worker.py together, on four devices in all."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        address = f"localhost:{s.getsockname()[1]}"
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={4 // count}"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(Path(__file__).parent / "loop_worker.py"), address, str(count)]
    return [
        subprocess.Popen([*command, str(i), str(directory), str(steps)], env=env, text=True, stderr=subprocess.PIPE)
        for i in range(count)
    ]


def ended(processes):
    try:
        said = [p.communicate(timeout=240)[1] for p in processes]
    finally:
        for p in processes:
            p.kill()
    return [p.returncode for p in processes], said


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 1), *(pytest.param(n, 2, marks=pytest.mark.matrix) for n in (1, 2))])
def test_processes_stop_at_one_step_and_others_go_on(runs, tmp_path, before, after):
    """One of them gets SIGTERM; others complete the run, also if they are more or fewer, as if nothing had happened."""
    processes = launch(tmp_path / "run", 100_000, before)
    while runs.last_step(tmp_path / "run") < 3 and all(p.poll() is None for p in processes):
        time.sleep(0.01)
    processes[-1].terminate()
    codes, said = ended(processes)
    assert codes == [143] * before, said
    (stopped,) = {int(err.split("SIGTERM: stopped after step ")[1].split(",")[0]) for err in said}
    assert (tmp_path / "run" / "checkpoints" / str(stopped)).is_dir()
    for directory, count in (("run", after), ("whole", 1)):
        codes, said = ended(launch(tmp_path / directory, stopped + 3, count))
        assert codes == [0] * count, said
    rows, whole = logged(tmp_path / "run"), logged(tmp_path / "whole")
    assert [row["step"] for row in rows] == list(range(1, stopped + 4))
    np.testing.assert_allclose([row["loss"] for row in rows], [row["loss"] for row in whole], rtol=1e-5)
    assert rows[-1]["num_tokens"] == whole[-1]["num_tokens"] == 8 * 12 * (stopped + 3)
