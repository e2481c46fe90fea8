"""Fine-tuning end to end beside TRL's SFTTrainer: tokens per second, memory, losses, time lost to saving. CPU, float32.

    python benchmarks/sft.py [--steps 10] [--layers 12] [--trl-python PYTHON] [--out FILE.md]

A Llama of 125M parameters (with 12 layers) is trained on rows of 4 x 512 tokens of Python's standard library, with AdamW.
No matrix product is computed twice (fdel computes again what is between them: half the memory, and no more time).

    packed     each row of two texts that do not see each other: `packing: true` on both sides, as its users write it
    full rows  each row of one text, without packing: the easier task, since nothing has to be masked

Both sides read one checkpoint and one file, in its order (the lengths are such that only one packing is the best), so that
their losses agree. fdel runs a run file, TRL its trainer; each is a process of its own. In the middle of the run and at its
end a checkpoint is written, with the optimizer's state. Without `--trl-python` (with trl 1.16) fdel runs alone.

Speeds are of the median step after the first. "lost to saving" is how much longer these steps took than as many median
ones: what the checkpoint in the middle cost, on a machine that does nothing else.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

ROWS, LENGTH, RATE = 4, 512, 1e-4
TASKS = "packed", "full rows"
CONFIG = dict(model_type="llama", vocab_size=32000, hidden_size=768, num_hidden_layers=12, num_attention_heads=12,
              num_key_value_heads=4, intermediate_size=2048, max_position_embeddings=2048, rms_norm_eps=1e-6,
              tie_word_embeddings=False)  # fmt: skip


def prepare(folder: Path, steps: int, layers: int) -> None:
    """Write the checkpoint with its tokenizer, and the texts of each task."""
    import jax
    import jax.numpy as jnp

    from fdel import models, params, text
    from fdel.models import llama

    cfg = llama.Config.from_hf(CONFIG | {"num_hidden_layers": layers})
    weights = jax.jit(lambda key: params.init(llama.spec(cfg), key, dtype=jnp.float32))(jax.random.key(0))
    models.save(models.Model(llama, cfg, weights), folder / "model")
    documents = (f.read_text("utf-8", "replace") for f in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    documents = list(documents)
    tok = text.train_bpe(documents[::8], 16384)
    text.save(tok, folder / "model")
    rows: list[list[int]] = []
    for said in documents:
        ids = text.encode(tok, said)
        rows += [ids[i : i + LENGTH] for i in range(0, len(ids) - LENGTH + 1, LENGTH)]
    rows = rows[:: max(1, len(rows) // (steps * ROWS))][: steps * ROWS]
    # First parts of different lengths, the longest first, all longer than the rest of their rows: one way to fill each row.
    cuts = [LENGTH - 16 - i * (LENGTH // 2 - 32) // len(rows) for i in range(len(rows))]
    parts = [part for row, cut in zip(rows, cuts, strict=True) for part in (row[:cut], row[cut:])]
    for task, texts in zip(TASKS, (parts, rows), strict=True):
        (folder / f"{task}.jsonl").write_text("".join(json.dumps({"input_ids": t}) + "\n" for t in texts))


def result(losses: list[float], seconds: list[float]) -> None:
    """Print what a side measured; `seconds` are those of the steps after the first."""
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    cpu = time.process_time() - BEGIN
    print(json.dumps({"losses": losses, "seconds": seconds, "memory": memory, "cpu": cpu}))


def fdel(folder: Path, steps: int, task: str) -> None:
    from fdel import recipe
    from fdel.train import metrics

    trainer = dict(
        trainer_type="sft", max_training_steps=steps, total_batch_size=ROWS, max_length=LENGTH, learning_rate=RATE,
        scheduler="constant", weight_decay=0.0, gradient_checkpointing="dots_saveable", packing=task == "packed",
        log_steps=1, save_steps=steps // 2, save_directory=str(folder / task / "fdel"),
    )  # fmt: skip
    informs = [{"data_files": str(folder / f"{task}.jsonl")}]
    mixture = {"informs": informs, "shuffle_buffer_size": 0, "pack_shuffle": False}
    model, sharding = {"name_or_path": str(folder / "model")}, {"axis_dims": [1] * 5}
    recipe.train(recipe.from_dict(dict(model=model, mixture=mixture, trainer=trainer, sharding=sharding)))
    rows = metrics.read(folder / task / "fdel")
    speeds = [row["tokens_per_second"] for row in rows if "tokens_per_second" in row]
    result([row["loss"] for row in rows], [ROWS * LENGTH / s for s in speeds])


def trl(folder: Path, steps: int, task: str) -> None:
    import datasets
    import torch
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    losses: list[float] = []
    ends: list[float] = []

    class Ends(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            ends.append(time.perf_counter())

    class InOrder(SFTTrainer):
        def _get_train_sampler(self, *_):
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            losses.append(float(loss))
            return loss

    config = SFTConfig(
        str(folder / task / "trl"), packing=task == "packed", max_steps=steps, max_length=LENGTH,
        use_cpu=True, bf16=False, gradient_checkpointing=False, per_device_train_batch_size=ROWS, learning_rate=RATE,
        lr_scheduler_type="constant", weight_decay=0.0, logging_steps=1, save_steps=steps // 2, report_to="none",
        model_init_kwargs={"dtype": "float32"},
    )  # fmt: skip
    data = datasets.load_dataset(
        "json", data_files=str(folder / f"{task}.jsonl"), split="train", cache_dir=str(folder / task / "c")
    )
    InOrder(str(folder / "model"), args=config, train_dataset=data, callbacks=[Ends()]).train()
    result(losses, [b - a for a, b in zip(ends, ends[1:], strict=False)])


def table(header: tuple, rows: list[tuple]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--steps", type=int, default=10, help="an even number from 6 to 56")
    cli.add_argument("--layers", type=int, default=12)
    cli.add_argument("--trl-python", help="a Python that has trl 1.16")
    cli.add_argument("--out", type=Path, help="also write the tables here")
    cli.add_argument("--side", nargs=4, help=argparse.SUPPRESS)
    args = cli.parse_args()
    if args.side:
        name, folder, steps, task = args.side
        {"fdel": fdel, "trl": trl}[name](Path(folder), int(steps), task)
        return
    if args.steps not in range(6, 57, 2):
        cli.error(f"--steps {args.steps}: expected an even number from 6 to 56")
    pythons = {"fdel": sys.executable} | ({"trl": args.trl_python} if args.trl_python else {})
    if "trl" not in pythons:
        print("TRL is left out: give --trl-python a Python that has it")
    said = f"Llama, {args.layers} layers, {ROWS} x {LENGTH} tokens, {args.steps} steps\n"
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder), args.steps, args.layers)
        for task in TASKS:
            found = {name: run(python, name, folder, str(args.steps), task) for name, python in pythons.items()}
            said += f"\n**{task}**\n\n{compared(found)}"
    print(said)
    if args.out:
        args.out.write_text(said)


def run(python: str, *side: str) -> dict:
    ran = subprocess.run([python, __file__, "--side", *side], capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(f"{side[0]}: {ran.stderr[-4000:]}")
    return json.loads(ran.stdout.splitlines()[-1])


def compared(found: dict[str, dict]) -> str:
    rows = []
    for name, r in found.items():
        step = statistics.median(r["seconds"])
        late = sum(r["seconds"]) - len(r["seconds"]) * step
        cells = f"{ROWS * LENGTH / step:,.0f}", f"{step:.2f}", f"{r['cpu']:.0f}", f"{r['memory']:,.0f}", f"{late:.2f}"
        rows.append(({"fdel": "fdel", "trl": "TRL"}[name], *cells))
    text = table(("", "tokens/s", "s a step", "CPU s in all", "peak memory MiB", "s lost to saving"), rows) + "\n\n"
    losses = [[f"{x:.6f}" for x in r["losses"]] for r in found.values()]
    text += table(("step", *found), [(i + 1, *at) for i, at in enumerate(zip(*losses, strict=True))]) + "\n"
    if "trl" in found:
        worst = max(abs(a - b) for a, b in zip(found["fdel"]["losses"], found["trl"]["losses"], strict=True))
        text += f"\nlargest difference of losses: {worst:.1e}\n"
    return text


BEGIN = time.process_time()

if __name__ == "__main__":
    main()
