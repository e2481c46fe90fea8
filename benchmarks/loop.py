"""What going on costs, and whether it is exact: kill -9 at random moments, and time lost to saving. CPU, float32.

    python benchmarks/loop.py [kills] [saving] [--kills 20] [--out FILE.md]

kills: a run of 40 steps is killed at a random moment and started again, each time in a new directory; its curve and its
last state are compared, bit by bit, with those of a run that nothing interrupted.
saving: processor and wall time of steps and of checkpoints, in turn, on the model of `fdel demo`.
"""

import argparse
import hashlib
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEPS, EVERY = 40, 5


def table(header: tuple, rows: list[tuple]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


# ---- the run that is killed ----------------------------------------------------------------------------------------


def train(directory: str, steps: str) -> None:
    """Train on four devices with everything that a checkpoint must hold; print a digest of the last state."""
    import jax

    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_compilation_cache_dir", str(Path(directory).parent / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    import grain
    import jax.numpy as jnp
    import numpy as np

    from fdel import ops, params, train
    from fdel.models import llama
    from fdel.train import parallel

    cfg = llama.Config(vocab=96, embed=32, ffn=64, layers=2, heads=4, kv_heads=2, head_dim=8, rope=ops.Rope(8, 1e4))
    spec, rate = llama.spec(cfg), train.schedules.cosine(1e-2, warmup=5, steps=STEPS)
    mesh = params.make_mesh({"dp": 2, "fsdp": 2})
    optimizer = train.optim.adamw(rate, weight_decay=0.1, mask=train.optim.decay_mask(spec))

    def init() -> train.TrainState:
        weights = params.init(spec, jax.random.key(0), dtype=jnp.float32)
        return train.init_state(weights, optimizer, ema=weights)

    def example(index: int, rng: np.random.Generator) -> dict:
        tokens = (np.cumsum(rng.integers(1, 3, 32)) + index) % cfg.vocab
        return {"tokens": tokens.astype(np.int32), "lengths": np.int32(rng.integers(8, 33))}

    rows = grain.MapDataset.source(range(200)).seed(1).shuffle().repeat().random_map(example)
    data = rows.batch(8).to_iter_dataset(grain.ReadOptions(num_threads=2))
    g = parallel.reduce_once(train.accumulate(train.grads(train.losses.sft(llama, cfg)), 2))
    step = train.ema(train.update(train.normalize(g), optimizer, skip_nonfinite=True), 0.99)
    at = parallel.state_shardings(jax.eval_shape(init), params.shardings(spec, mesh))
    with jax.set_mesh(mesh):
        step = jax.jit(train.metrics.reporting(step, learning_rate=rate), donate_argnums=0, out_shardings=(at, None))
        state = train.fit(
            step,
            jax.jit(init, out_shardings=at),
            data,
            train.Loop(steps=int(steps), directory=directory, log_every=1, save_every=EVERY, progress_bar=False),
            sharding=params.batch_sharding(mesh),
        )
    blob = b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(state))
    print("state", hashlib.sha256(blob).hexdigest(), flush=True)


def start(directory: Path, steps: int = STEPS) -> subprocess.Popen:
    command = [sys.executable, __file__, "train", str(directory), str(steps)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(directory: Path, steps: int = STEPS) -> tuple[list[dict], str, str]:
    """Run to the end; return the rows but for the speeds, the digest of the state, and what was said."""
    process = start(directory, steps)
    out, err = process.communicate()
    if process.returncode:
        raise RuntimeError(f"exit code {process.returncode}: {err[-2000:]}")
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    rows = [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in rows]
    return rows, next(line for line in out.splitlines() if line.startswith("state ")), err


def last_step(directory: Path) -> int:
    file = directory / "metrics.jsonl"
    return len(file.read_bytes().splitlines()) if file.exists() else 0


def begun(directory: Path, steps: int = STEPS) -> subprocess.Popen:
    """Start a run and wait for its first logged steps."""
    process = start(directory, steps)
    while not last_step(directory) and process.poll() is None:
        time.sleep(0.01)
    return process


def kill(directory: Path, seconds: float, steps: int = STEPS) -> tuple[int, str]:
    """Start a run, kill it after some seconds of training, and say how far it was and what it left."""
    process = begun(directory, steps)
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    process.wait()
    found = sorted(p.name for p in (directory / "checkpoints").glob("*"))
    return last_step(directory), " ".join(name.replace("orbax-checkpoint-", "") for name in found)


def kills(count: int) -> str:
    with tempfile.TemporaryDirectory() as scratch:
        whole = Path(scratch) / "whole"
        want = finish(whole)[:2]  # compiles
        process, begin = begun(Path(scratch) / "timed"), time.perf_counter()
        process.communicate()
        seconds = time.perf_counter() - begin
        random.seed(0)
        lines = []
        for i in range(count):
            directory = Path(scratch) / str(i)
            moment = random.uniform(0, seconds)
            step, left = kill(directory, moment)
            rows, digest, _ = finish(directory)
            curve, state = rows == want[0], digest == want[1]
            lines.append((i + 1, f"{moment:.2f}", step, left, "yes" if curve else "NO", "yes" if state else "NO"))
            print(*lines[-1], flush=True)
    header = ("", "killed after (s)", "steps logged", "checkpoints then", "curve bitwise", "last state bitwise")
    good = sum(line[-2:] == ("yes", "yes") for line in lines)
    return f"{good} of {count} runs are bitwise what nothing interrupted ({STEPS} steps)\n\n" + table(header, lines)


# ---- the cost of saving --------------------------------------------------------------------------------------------


def saving(steps: int = 5, saves: int = 5) -> str:
    """Measure a step and a save."""
    import jax
    import numpy as np

    from fdel import demo, params, train
    from fdel.models import llama
    from fdel.train import checkpoint

    cfg = demo.config(demo.VOCAB)
    spec, optimizer = llama.spec(cfg), train.optim.adamw(1e-3)
    step = train.update(train.normalize(train.grads(train.losses.sft(llama, cfg))), optimizer)
    step = jax.jit(step, donate_argnums=0)
    state = jax.jit(lambda: train.init_state(params.init(spec, jax.random.key(0)), optimizer))()
    batch = {"tokens": np.random.default_rng(0).integers(0, cfg.vocab, (demo.ROWS, demo.LENGTH), np.int32)}
    size = sum(x.nbytes for x in jax.tree.leaves(state)) / 2**20
    times: dict[str, list[tuple[float, float]]] = {"a step": [], "a save": []}

    def note(name: str, cpu: float, wall: float) -> None:
        times[name].append((time.process_time() - cpu, time.perf_counter() - wall))

    with tempfile.TemporaryDirectory() as scratch:
        saver = checkpoint.Saver(Path(scratch), keep=1)
        for i in range(saves + 1):
            for _ in range(steps):
                begin = time.process_time(), time.perf_counter()
                state, _ = jax.block_until_ready(step(state, batch))
                note("a step", *begin)
            begin = time.process_time(), time.perf_counter()
            saver.save(i, state, {"metrics": {}})
            saver.wait()
            note("a save", *begin)
    # The first save loads the library, the first step compiles.
    cpu, wall = ({name: np.median([t[i] for t in ts[1:]]) for name, ts in times.items()} for i in (0, 1))
    ratio = wall["a save"] / wall["a step"]
    text = (
        f"{size:.0f} MiB of state, steps of {demo.ROWS * demo.LENGTH} tokens. On CPU the loop waits for a save, as long as "
        f"for {ratio:.2f} steps: one save in {50 * ratio:.0f} steps costs 2 %."
    )
    rows = [(name, f"{cpu[name]:.3f}", f"{wall[name]:.3f}") for name in times]
    return text + "\n\n" + table(("median of", "processor s", "wall s"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["kills", "saving"], help="which of: kills, saving")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    parts = [kills(args.kills) if part == "kills" else saving() for part in args.parts]
    text = "\n\n".join(f"## {part}\n\n{body}" for part, body in zip(args.parts, parts, strict=True)) + "\n"
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train(*sys.argv[2:])
    else:
        main()
