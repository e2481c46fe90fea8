"""fdel against transformers + torch on one checkpoint in one run: a Llama of 125M parameters, CPU, float32.

    python benchmarks/model.py [--out benchmarks/results/FILE.md]
    python benchmarks/model.py --shape 1b 8b [--kernels attend=hopper ...]

Each measure runs in a process of its own, sides alternating; all threads of the machine are free for it. Prints a
markdown table: prefill 512, decode at batch 1 and 8, train step 4 x 512 (AdamW), load, peak memory, first token.

With --shape nothing is compared with torch: models of the shapes of Llama-3.2-1B and Llama-3.1-8B with random weights in
bfloat16, on the default device: tokens/s of the loss and of a training step (of 8b a LoRA step), and the part of the FLOPs
of a product of matrices in the same run.
"""

import argparse
import importlib.metadata
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CONFIG = dict(vocab_size=32000, hidden_size=768, num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=4,
              intermediate_size=2048, max_position_embeddings=2048, tie_word_embeddings=False)  # fmt: skip
MEASURES = ("load", "prefill", "decode1", "decode8", "train", "first", "first_cached", "compile24")


def peak_mb() -> float:
    """Largest resident size of this process so far."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def torch_side(measure: str, directory: str) -> dict:
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    base, begin = peak_mb(), time.perf_counter()
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    out = {"load_s": time.perf_counter() - begin, "load_peak_mb": peak_mb() - base}
    ids = lambda rows, n: torch.randint(3, 32000, (rows, n), generator=torch.Generator().manual_seed(0))

    def generate(tokens, n):
        with torch.no_grad():
            model.generate(tokens, max_new_tokens=n, min_new_tokens=n, do_sample=False, pad_token_id=0)

    from fdel.bench import seconds

    if measure == "prefill":
        out["prefill_ms"] = 1e3 * seconds(lambda: generate(ids(1, 512), 1))
    elif measure.startswith("decode"):
        tokens = ids(int(measure[6:]), 128)
        spent = seconds(lambda: generate(tokens, 65), 3) - seconds(lambda: generate(tokens, 1), 3)
        out[measure + "_tok_s"] = len(tokens) * 64 / spent
    elif measure == "first":
        begin = time.perf_counter()
        generate(ids(1, 128), 1)
        out["first_s"] = time.perf_counter() - begin
    elif measure == "train":
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-4, weight_decay=0.1)
        tokens = ids(4, 512)

        def step():
            model(input_ids=tokens, labels=tokens).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        out["train_tok_s"] = 2048 / seconds(step, 3)
    return out | {"peak_mb": peak_mb()}


def fdel_side(measure: str, directory: str) -> dict:
    import jax

    cache = str(Path(directory) / "xla_cache")
    if measure == "first_cached":
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    from fdel import bench, models, params

    jax.devices()
    base, begin = peak_mb(), time.perf_counter()
    model = models.load(directory, stacked=measure == "train")
    jax.block_until_ready(model.params)
    weights = params.nbytes(model.params) / 2**20
    out = {"load_s": time.perf_counter() - begin, "load_peak_mb": peak_mb() - base, "weights_mb": weights}
    if measure == "prefill":
        out["prefill_ms"] = 1e3 * bench.prefill(model)
    elif measure.startswith("decode"):
        out[measure + "_tok_s"] = bench.decode(model, int(measure[6:]))
    elif measure.startswith("first"):
        from fdel import serve

        begin = time.perf_counter()
        serve.generate(model, bench.prompts(model, 1, 128), max_tokens=1)
        out[measure + "_s"] = time.perf_counter() - begin
    elif measure == "train":
        out["train_tok_s"] = 2048 / bench.train_step(model)
    elif measure == "compile24":
        out["compile24_s"] = compile_seconds()
    return out | {"peak_mb": peak_mb()}


def compile_seconds() -> float:
    """Compile the train step of the same model with 24 layers."""
    import dataclasses

    import jax
    import jax.numpy as jnp

    from fdel import params, train
    from fdel.models import llama

    cfg = dataclasses.replace(llama.Config.from_hf(CONFIG), layers=24)
    optimizer = train.optim.adamw(1e-4)
    step = train.update(train.normalize(train.grads(train.losses.sft(llama, cfg))), optimizer)
    state = jax.eval_shape(lambda p: train.init_state(p, optimizer), params.abstract(llama.spec(cfg)))
    begin = time.perf_counter()
    batch = {"tokens": jax.ShapeDtypeStruct((4, 512), jnp.int32)}
    jax.jit(step, donate_argnums=0).lower(state, batch).compile()
    return time.perf_counter() - begin


def table(results: dict[str, dict[str, dict]]) -> str:
    """Format both sides, one row per measure."""
    rows = [
        ("prefill 512, ms", "prefill", "prefill_ms", True),
        ("decode batch 1, tok/s", "decode1", "decode1_tok_s", False),
        ("decode batch 8, tok/s", "decode8", "decode8_tok_s", False),
        ("train step 4x512, tok/s", "train", "train_tok_s", False),
        ("train, peak MB", "train", "peak_mb", True),
        ("load, s", "load", "load_s", True),
        ("load, peak over start MB", "load", "load_peak_mb", True),
        ("decode batch 1, peak MB", "decode1", "peak_mb", True),
        ("first token of 128, cold, s", "first", "first_s", True),
        ("first token, compilation cache, s", "first_cached", "first_cached_s", True),
        ("compile 24-layer train step, s", "compile24", "compile24_s", True),
    ]
    lines = ["| measure | torch | fdel | fdel is better by |", "|---|---|---|---|"]
    for label, measure, key, smaller in rows:
        ours, theirs = (results[side].get(measure, {}).get(key) for side in ("fdel", "torch"))
        if ours is None:
            continue
        ratio = "" if theirs is None else f"{theirs / ours if smaller else ours / theirs:.2f}x"
        lines.append(f"| {label} | {'' if theirs is None else f'{theirs:.4g}'} | {ours:.4g} | {ratio} |")
    weights = next(iter(results["fdel"].values()))["weights_mb"]
    return "\n".join([*lines, "", f"Weights: {weights:.0f} MiB in float32."])


def publish(what: str, found: str, out: Path | None) -> None:
    """Print a table under the date and the versions that it was measured with, and write it to a file."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "torch", "transformers"))
    page = f"{time.strftime('%Y-%m-%d')}, {versions}, {what}\n\n{found}\n"
    print(page)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(page)


def main() -> None:
    if "--shape" in sys.argv:
        import shapes

        return shapes.main(lambda shape, _, lock: shapes.trained(shape, lock), __doc__)
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--only", nargs="*", choices=MEASURES, default=MEASURES, help="measures to run (default: all)")
    cli.add_argument("--out", type=Path, help="also write the table here")
    cli.add_argument("--side", choices=("torch", "fdel"), help=argparse.SUPPRESS)
    cli.add_argument("--directory", help=argparse.SUPPRESS)
    args = cli.parse_args()
    if args.side:
        run = torch_side if args.side == "torch" else fdel_side
        print(json.dumps(run(args.only[0], args.directory)))
        return
    with tempfile.TemporaryDirectory() as directory:
        import torch
        import transformers

        torch.manual_seed(0)
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).save_pretrained(directory)
        results: dict[str, dict[str, dict]] = {"torch": {}, "fdel": {}}
        for measure in args.only:
            for side in ("torch", "fdel"):
                if side == "torch" and measure in ("first_cached", "compile24"):
                    continue
                for _ in range(2 if measure == "first_cached" else 1):  # the first run fills the cache
                    command = [sys.executable, __file__, "--side", side, "--directory", directory, "--only", measure]
                    done = subprocess.run(command, capture_output=True, text=True, check=False)
                    if done.returncode:
                        sys.exit(f"{side} {measure} failed:\n{done.stderr}")
                results[side][measure] = json.loads(done.stdout.splitlines()[-1])
                print(side, measure, results[side][measure], file=sys.stderr, flush=True)
        publish("CPU float32, 125M Llama", table(results), args.out)


if __name__ == "__main__":
    main()
