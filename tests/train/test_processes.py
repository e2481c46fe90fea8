"""Several processes on one machine train, save and restore as one process does."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

WORKER = Path(__file__).parent / "worker.py"


def launch(count: int, directory: Path) -> list[float]:
    """Run `count` processes of two devices each (one process: of one) and return the losses."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        address = f"localhost:{s.getsockname()[1]}"
    devices = 2 if count > 1 else 1
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
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
@pytest.mark.parametrize("count", [2, 4])
def test_processes_train_save_and_restore_as_one(count, tmp_path):
    want, got = launch(1, tmp_path / "one"), launch(count, tmp_path / "many")
    assert len(want) == 6 and want[-1] < want[0]
    np.testing.assert_allclose(got, want, rtol=1e-5)
