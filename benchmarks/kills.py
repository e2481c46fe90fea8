"""Kill a run on own samples with SIGKILL at random moments, let it go on, and compare it with one that nobody killed. CPU.

    python benchmarks/kills.py [--type grpo] [--kills 20] [--seed 0] [--steps 60] [--ahead 0] [--out FILE.md]

Each run has a directory and a process of its own; the moments are drawn evenly from the time that the whole run takes, its
start included; a run that ends before its moment is not counted, and another moment is drawn. What is compared: the bytes
of the final weights, each row of metrics.jsonl but for what clocks say, and the samples of completions.jsonl. Exit status
1 if any differs. The last line says how much of the whole run's time was sampling: so many of the moments fall into it,
the others into the start, learning and saving.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CLOCKS = ("time/", "tokens_per_second", "rollout/tokens_per_second")
EVEN = """def even(completion_ids, **columns):
    return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]
"""


def prepare(folder: Path) -> None:
    """Write a tiny model with its tokenizer, tasks, and a reward function."""
    import jax
    import jax.numpy as jnp

    from fdel import models, ops, params, text
    from fdel.models import llama

    cfg = llama.Config(vocab=300, embed=32, ffn=48, layers=2, heads=4, kv_heads=2, head_dim=8, rope=ops.Rope(8, 1e4))
    weights = params.init(llama.spec(cfg), jax.random.key(0), dtype=jnp.float32)
    models.save(models.Model(llama, cfg, weights), folder / "model")
    text.save(text.train_bpe(["what is one and one and two", "it is two"] * 3, 300), folder / "model")
    rows = [{"prompt": f"what is {a} and {b}", "answer": str(a + b)} for a in range(4) for b in range(4)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rewards.py").write_text(EVEN)


def run_file(folder: Path, name: str, kind: str, steps: int, ahead: int) -> Path:
    """Write the file of a run, which trains in the directory of its name."""
    from fdel import recipe

    trainer = {
        "trainer_type": kind, "reward_functions": [{"path": f"{folder}/rewards.py:even"}],
        "num_generations": 2 if kind in ("online_dpo", "xpo", "nash_md") else 4,
        "max_completion_length": 16, "max_length": 32, "total_batch_size": 32, "learning_rate": 1e-2,
        "scheduler": "constant", "max_training_steps": steps, "log_steps": 1, "save_steps": 2,
        "save_directory": str(folder / name), "rollout_ahead": ahead,
    }  # fmt: skip
    made = recipe.from_dict({
        "model": {"name_or_path": str(folder / "model")}, "trainer": trainer, "actions": ["train"],
        "mixture": {"informs": [{"type": "json", "data_files": str(folder / "rows.jsonl")}]},
        "sharding": {"axis_dims": [1, 1, 1, 1, 1]},
    })  # fmt: skip
    made.to_yaml(folder / f"{name}.yaml")
    return folder / f"{name}.yaml"


def begin(folder: Path, file: Path) -> subprocess.Popen:
    """Start a run; all share their compiled programs."""
    env = os.environ | {"XLA_FLAGS": "", "JAX_COMPILATION_CACHE_DIR": str(folder / "programs")}
    env |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    with (folder / "log").open("a") as log:
        return subprocess.Popen([sys.executable, "-m", "fdel", "run", str(file)], env=env, stdout=log, stderr=log)


def finish(folder: Path, file: Path) -> float:
    """Let a run go to its end: seconds."""
    start = time.monotonic()
    if begin(folder, file).wait():
        raise RuntimeError((folder / "log").read_text()[-2000:])
    return time.monotonic() - start


def result(directory: Path) -> tuple[bytes, list[Any], list[Any]]:
    """Read what a run left: weights, rows of metrics, samples."""
    from fdel.train import metrics

    rows = [{k: v for k, v in row.items() if not k.startswith(CLOCKS)} for row in metrics.read(directory)]
    return (directory / "model" / "model.safetensors").read_bytes(), rows, metrics.read(directory / "completions.jsonl")


def killed(folder: Path, file: Path, moment: float) -> int | None:
    """Kill a run at a moment and let it go on: how many rows of metrics it had, or None where it had ended."""
    child = begin(folder, file)
    try:
        child.wait(moment)
        return None
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGKILL)
        child.wait()
    rows = folder / file.stem / "metrics.jsonl"
    done = len(rows.read_bytes().splitlines()) if rows.exists() else 0
    finish(folder, file)
    return done


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--type", default="grpo", choices=("grpo", "rloo", "ppo", "online_dpo", "xpo", "nash_md"))
    ask.add_argument("--kills", type=int, default=20)
    ask.add_argument("--seed", type=int, default=0)
    ask.add_argument("--steps", type=int, default=60)
    ask.add_argument("--ahead", type=int, default=0)
    ask.add_argument("--out", type=Path)
    args = ask.parse_args()
    from fdel.train import metrics

    lines, wrong = ["| kill at, s | rows of metrics then | weights | metrics | samples |", "|" + " --- |" * 5], 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        file = lambda name: run_file(folder, name, args.type, args.steps, args.ahead)
        finish(folder, file("first"))  # compiles
        seconds = finish(folder, file("whole"))
        sampling = sum(row["time/rollout"] for row in metrics.read(folder / "whole"))
        whole, drawn = result(folder / "whole"), random.Random(args.seed)
        for i in range(args.kills):
            moment, tries = drawn.uniform(0, seconds), 0
            while (rows := killed(folder, file(f"killed-{i}-{tries}"), moment)) is None:
                moment, tries = drawn.uniform(0, seconds), tries + 1
            same = [a == b for a, b in zip(result(folder / f"killed-{i}-{tries}"), whole, strict=True)]
            wrong += not all(same)
            lines.append(f"| {moment:.2f} | {rows} | " + " | ".join("equal" if s else "DIFFERENT" for s in same) + " |")
            print(lines[-1], flush=True)
    took = f"{seconds:.1f} s, {sampling:.1f} s of them sampling"
    lines.append(f"\n{args.kills - wrong} of {args.kills} runs are equal to the whole one, which took {took}.")
    print(lines[-1])
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
