"""Kill the command of a run file with SIGKILL in the middle, let it go on, and compare it with a run that nobody killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from fdel import recipe
from fdel.train import metrics

ROOT = Path(__file__).parents[1]
CLOCKS = ("time/", "tokens_per_second", "rollout/tokens_per_second")


def rows_of(out: Path) -> list[dict]:
    """The rows of a run's metrics, but for what clocks say."""
    return [{k: v for k, v in row.items() if not k.startswith(CLOCKS)} for row in metrics.read(out)]


def shown(out: Path) -> list[dict]:
    """The samples that a run has written down."""
    return metrics.read(out / "completions.jsonl")


def goes_on(runs: dict[str, recipe.Recipe], folder: Path, after: int) -> None:
    """Run "whole", and "killed" until its checkpoint of step `after` is there and a little longer, then to its end.

    Each in a process of its own, with one device and shared programs. Metrics, samples and the bytes of the final weights
    are to be equal.
    """
    env = os.environ | {"XLA_FLAGS": "", "JAX_COMPILATION_CACHE_DIR": str(folder / "programs")}
    env |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    out = {name: Path(found.trainer.save_directory) for name, found in runs.items()}
    for name, found in runs.items():
        found.to_yaml(folder / f"{name}.yaml")
    command = lambda name: [sys.executable, "-m", "fdel", "run", str(folder / f"{name}.yaml")]
    child = subprocess.Popen(command("killed"), env=env, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 600
    while time.monotonic() < end and child.poll() is None:
        if (out["killed"] / "checkpoints" / str(after)).is_dir():
            break
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL, "it ended before it was killed"
    for name in runs:
        done = subprocess.run(command(name), env=env, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert rows_of(out["whole"]) == rows_of(out["killed"])
    assert shown(out["whole"]) == shown(out["killed"]) != []
    for weights in (out["whole"] / "model").glob("*.safetensors"):
        assert weights.read_bytes() == (out["killed"] / "model" / weights.name).read_bytes()
