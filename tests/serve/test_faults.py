"""A small run of the fault benchmark: a server process that is killed, whose steps raise, whose clients leave."""

import importlib
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest


@pytest.mark.slow
def test_what_survives_is_right_and_nothing_is_kept(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    assert importlib.import_module("faults").main(40) == []


RUNNING = """
import signal, sys, threading
from fdel.serve.server import launch
launch.dump_threads_on(signal.SIGUSR1)
deep = lambda n: n and deep(n - 1) + len([deep(0) for _ in range(3)])
ended = threading.Event()
def run():
    while not ended.is_set():
        deep(60)
threads = [threading.Thread(target=run) for _ in range(4)]
for thread in threads:
    thread.start()
print("runs", flush=True)
sys.stdin.readline()
ended.set()
"""


def test_the_signal_that_asks_where_threads_stand_ends_nothing(tmp_path):
    """Not while they call and return, either: reading their frames from the signal itself ended two servers of three."""
    command, said = [sys.executable, "-c", RUNNING], tmp_path / "said"
    with said.open("w") as file:
        server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file)
    assert server.stdout.readline() == b"runs\n"
    for _ in range(300):
        server.send_signal(signal.SIGUSR1)
        time.sleep(0.003)
    server.communicate(b"\n", timeout=60)
    assert server.returncode == 0
    assert said.read_text().count("most recent call first") >= 5
