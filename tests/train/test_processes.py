"""Several processes on one machine find each other, train, save and restore as one process does."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fdel import models, params, recipe, text
from fdel.models import llama
from fdel.train import metrics, processes

WORKER = Path(__file__).parent / "worker.py"


def launch(count: int, directory: Path) -> list[float]:
    """Run `count` processes of two devices each (one process: of one) and return the losses."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        address = f"localhost:{s.getsockname()[1]}"
    devices = 2 if count > 1 else 1
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(WORKER), address, str(count)]
    running = [
        subprocess.Popen(
            [*command, str(i), str(directory)], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for i in range(count)
    ]
    try:
        outputs = [p.communicate(timeout=300) for p in running]
    finally:
        for p in running:
            p.kill()
    assert all(p.returncode == 0 for p in running), "\n".join(err[-2000:] for _, err in outputs)
    return json.loads(outputs[0][0].strip().splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.matrix)])
def test_processes_train_save_and_restore_as_one(count, tmp_path):
    want, got = launch(1, tmp_path / "one"), launch(count, tmp_path / "many")
    assert len(want) == 6 and want[-1] < want[0]
    np.testing.assert_allclose(got, want, rtol=1e-5)


# ---- who starts them -----------------------------------------------------------------------------------------------

LAUNCHED = [
    ({}, None),
    ({"HOSTNAME": "x", "WORLD_SIZE": "4"}, None),
    ({"MASTER_ADDR": "a", "MASTER_PORT": "7", "WORLD_SIZE": "1", "RANK": "0"}, None),
    ({"MASTER_ADDR": "a", "MASTER_PORT": "7", "WORLD_SIZE": "4", "RANK": "3"}, ("a:7", 4, 3, None)),
    (
        {"MASTER_ADDR": "a", "MASTER_PORT": "7", "WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
         "TORCHELASTIC_USE_AGENT_STORE": "True"},
        ("a:8", 4, 3, 1),
    ),
    ({"COORDINATOR_ADDRESS": "job-0", "COORDINATOR_PORT": "6666", "NUM_PROCESSES": "2", "PROCESS_ID": "1"},
     ("job-0:6666", 2, 1, None)),
    ({"JAX_COORDINATOR_ADDRESS": "set-0-0.set:1234", "NUM_PROCESSES": "2", "JOB_COMPLETION_INDEX": "0"},
     ("set-0-0.set:1234", 2, 0, None)),
    ({"SLURM_NTASKS": "4", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_PROCID": "2"}, "jax"),
    ({"SLURM_NTASKS": "4"}, None),  # a shell of salloc
    ({"SLURM_NTASKS": "1", "SLURM_STEP_NODELIST": "n1"}, None),
    ({"OMPI_COMM_WORLD_SIZE": "2"}, "jax"),
    ({"TPU_WORKER_HOSTNAMES": "t0,t1"}, "jax"),
    ({"TPU_WORKER_HOSTNAMES": "localhost"}, None),
    ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),
]  # fmt: skip


@pytest.mark.parametrize(("found", "want"), LAUNCHED)
def test_launchers_are_known_by_their_variables(found, want):
    how = processes.cluster(found)
    if want in (None, "jax"):
        assert how == (None if want is None else {})
    else:
        names = ("coordinator_address", "num_processes", "process_id", "local_device_ids")
        assert tuple(how.get(name) for name in names) == want


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"MASTER_ADDR": "a", "WORLD_SIZE": "4"}, "WORLD_SIZE is '4' and RANK is None"),
        ({"COORDINATOR_ADDRESS": "a", "PROCESS_ID": "0"}, "NUM_PROCESSES is None"),
        ({"KUBERNETES_SERVICE_HOST": "x", "JOB_COMPLETION_INDEX": "0"}, "distributed.processes: 1"),
    ],
)
def test_what_launchers_leave_out(found, message):
    with pytest.raises(ValueError, match=message):
        processes.cluster(found)


def test_one_process_joins_nothing(monkeypatch):
    monkeypatch.setattr(jax.distributed, "initialize", lambda **how: pytest.fail(f"joined {how}"))
    processes.join()
    processes.join("host:1", 1, 0)
    monkeypatch.setattr(processes.os, "environ", {"MASTER_ADDR": "a", "WORLD_SIZE": "2", "RANK": "0"})
    processes.join(processes=1)


def test_processes_along_tp_read_the_same_rows(monkeypatch):
    """Eight devices as if of two processes: 0 to 3, and 4 to 7."""

    class Sharding:
        def __init__(self, mesh):
            self.real = params.batch_sharding(mesh)

        def devices_indices_map(self, shape):
            of = lambda d: type("Device", (), {"process_index": d.id // 4})()
            return {of(d): i for d, i in self.real.devices_indices_map(shape).items()}

    monkeypatch.setattr(processes, "batch_sharding", Sharding)
    for me in (0, 1):
        monkeypatch.setattr(jax, "process_index", lambda me=me: me)
        share = lambda **shape: processes.share(params.make_mesh(shape))
        assert share(dp=2, tp=4) == share(fsdp=8) == share(dp=2, fsdp=2, tp=2) == (me, 2)
        assert share(tp=8) == share(sp=2, tp=4) == (0, 1)


# ---- a run file ----------------------------------------------------------------------------------------------------

CFG = llama.Config.from_hf(
    dict(vocab_size=280, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4,
         num_key_value_heads=1, max_position_embeddings=64)
)  # fmt: skip


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    path = tmp_path_factory.mktemp("start")
    models.save(models.Model(llama, CFG, params.init(llama.spec(CFG), jax.random.key(0), dtype=jnp.float32)), path)
    text.save(text.train_bpe(["one two three four five six"], 280), path)
    rows = [{"text": f"one two {'three ' * (i % 5)}four {i}"} for i in range(32)]
    (path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return path


# XLA:CPU ends a process whose devices wait for each other for 40 s, as they may where other programs take the cores.
PATIENT = " ".join(
    f"--xla_cpu_collective_{name}timeout_seconds=600" for name in ("call_terminate_", "call_warn_stuck_", "")
)


def begin(start, directory, count, dims, steps, how="torchrun", rows="rows", mixture=None, **keys):
    """Start `fdel run` on `count` processes, four devices in all."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    trainer = {"trainer_type": "sft", "learning_rate": 1e-2, "total_batch_size": 8, "max_length": 16, "log_steps": 1,
               "save_steps": 2, "max_training_steps": steps, "num_train_epochs": 50,
               "save_directory": str(directory), **keys}  # fmt: skip
    wanted = {"model": {"name_or_path": str(start)}, "trainer": trainer, "sharding": {"axis_dims": dims},
              "mixture": {"informs": [{"type": "jsonl", "data_files": str(start / f"{rows}.jsonl")}], **(mixture or {})},
              "actions": ["validate", "train"]}  # fmt: skip
    file = directory.with_suffix(".json")
    file.write_text(json.dumps(wanted))
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={4 // count} {PATIENT}"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    running = []
    for i in range(count):
        mine, more = {}, []
        if count > 1 and how == "torchrun":
            mine = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": str(count), "RANK": str(i)}
        elif count > 1:
            given = {"coordinator": f"localhost:{port}", "processes": count, "process_id": i}
            more = [x for k, v in given.items() for x in ("--set", f"distributed.{k}={json.dumps(v)}")]
        command = [sys.executable, "-m", "fdel", "run", str(file), *more]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        running.append(subprocess.Popen(command, env=env | mine, **pipes))
    return running


def ended(running):
    try:
        said = [p.communicate(timeout=300) for p in running]
    finally:
        for p in running:
            p.kill()
    return [p.returncode for p in running], said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dims", "how"), [((1, -1, 1, 1, 1), "torchrun"), pytest.param((1, 1, 1, 4, 1), "keys", marks=pytest.mark.matrix)]
)
def test_a_run_file_on_two_processes_is_that_of_one(start, tmp_path, dims, how):
    """The same losses and the same model; tp=4 crosses processes, and key-value heads, which then read the same rows."""
    codes, said = ended(begin(start, tmp_path / "one", 1, dims, 4))
    assert codes == [0], said
    codes, said = ended(begin(start, tmp_path / "two", 2, dims, 4, how))
    assert codes == [0, 0], [err[-1500:] for _, err in said]
    one, two = (metrics.read(tmp_path / d) for d in ("one", "two"))
    assert [r["step"] for r in two] == [1, 2, 3, 4]
    tokens = [(a["num_tokens"], b["num_tokens"]) for a, b in zip(one, two, strict=True)]
    assert all(a == b if how == "keys" else abs(a / b - 1) < 0.1 for a, b in tokens)  # by those of the first process
    np.testing.assert_allclose([r["loss"] for r in one], [r["loss"] for r in two], rtol=1e-5)
    a, b = (models.load(tmp_path / d / "model").params for d in ("one", "two"))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), a, b)
    gloo = lambda x: (
        "[Gloo]" in x or "peer ranks" in x or not x.strip(" 01")
    )  # its threads write into each other's lines
    said = [[x for x in out.splitlines() if not gloo(x)] for out, _ in said]
    assert len(said[0]) == 2 and said[1] == [], said  # the first speaks for all


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [{}, *(pytest.param(x, marks=pytest.mark.matrix) for x in ({"lora": {"r": 4}}, {"pack_samples": True}))],
    ids=["all", "adapters", "packed"],
)
def test_each_process_samples_its_own_tasks(start, tmp_path, how):
    """Noise depends on the task alone: two processes draw what one draws, and reward and learn it as one."""
    (start / "rewards.py").write_text("def even(completion_ids, **_):\n    return [sum(i % 2 == 0 for i in c) / len(c)"
                                      " for c in completion_ids]\n")  # fmt: skip
    tasks = [{"prompt": f"one two {i}"} for i in range(8)]
    (start / "tasks.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    keys = {"trainer_type": "grpo", "reward_functions": [{"path": f"{start}/rewards.py:even"}], "num_generations": 4,
            "max_completion_length": 8, "total_batch_size": 16, "max_length": 16, **how}  # fmt: skip
    for count in (1, 2):
        codes, said = ended(begin(start, tmp_path / str(count), count, (1, -1, 1, 1, 1), 2, rows="tasks", **keys))
        assert codes == [0] * count, [err[-1500:] for _, err in said]
    one, two = (metrics.read(tmp_path / d) for d in "12")
    for name in ("reward", "completions/mean_length", "loss", "entropy", "sampling/sampling_logp_difference/mean"):
        np.testing.assert_allclose([r[name] for r in one], [r[name] for r in two], rtol=1e-3, atol=1e-6)
    assert one[-1]["sampling/sampling_logp_difference/mean"] < 1e-5


@pytest.mark.slow
def test_killed_processes_go_on_where_they_were(start, tmp_path):
    dims = (2, -1, 1, 1, 1)
    running = begin(start, tmp_path / "run", 2, dims, 40)
    saved = tmp_path / "run" / "checkpoints"
    until = time.monotonic() + 240
    while not any(p.name.isdigit() for p in (saved.iterdir() if saved.is_dir() else ())):
        assert time.monotonic() < until and all(p.poll() is None for p in running)
        time.sleep(0.05)
    for p in running:
        p.kill()
    ended(running)
    codes, said = ended(begin(start, tmp_path / "run", 2, dims, 40))
    assert codes == [0, 0], [err[-1500:] for _, err in said]
    rows = metrics.read(tmp_path / "run")
    assert [r["step"] for r in rows] == list(range(1, 41)) and rows[-1]["loss"] < rows[0]["loss"]


def test_serving_and_evaluating_are_for_one_process(start, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    wanted = recipe.from_dict({"model": {"name_or_path": str(start)}, "actions": ["serve"]})
    with pytest.raises(recipe.RecipeError, match="actions.serve: one process alone does it"):
        recipe.run(wanted)
    with pytest.raises(recipe.RecipeError, match="all 1 is the first device alone, but there are 2 processes"):
        recipe.build_mesh(wanted.set("sharding.axis_dims", [1] * 5))
