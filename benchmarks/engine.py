"""The engine against transformers and llama.cpp on one checkpoint in one run: 125M Llama, CPU, float32 or 8 bits.

    python benchmarks/engine.py [--only MEASURE ...] [--python PATH ...] [--out benchmarks/results/FILE.md] [--scale 0.25]
    python benchmarks/engine.py --shape 1b 8b [--kernels paged_attention=hopper ...]

Each measure runs in a process of its own, sides alternating. `decode`: output tokens/s of 1 and 8 sequences after
prompts of 128, and of 1 with matrices of 8 bits, the head's too (int8; and a8q, which multiplies integers, as llama.cpp
does with q8_0, its side of both; `:4` with decode_steps 4); `load`: 32 requests at once, prompts of 64 to 256, 64 new
ones (transformers: generate_batch, its continuous batching); `latency`: time to the first token and between tokens with
1, 8 and 32 readers; `host`: time of a step outside the device at batch 32; `start`: from the weights to the first token,
cold and with jax's compilation cache; `prefix`: a prompt of 1024 tokens, then again; `drafts`: repetitive text with and
without n-gram drafts.
llama.cpp is looked for in the interpreters of --python as the module
llama_cpp; its weights need the package gguf here. `--scale` shrinks the model, prompts and outputs, to try the script out.

With --shape fdel alone is measured, with random weights in bfloat16 of the shapes of Llama-3.2-1B and Llama-3.1-8B on the
default device: prefill, and decode at batch 1, 8 and 64 after prompts of 1,024.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import peers
from model import CONFIG, publish

ROUNDS = 4
MEASURES = (
    "decode1",
    "decode1_int8",
    "decode1_a8q",
    "decode1_int8:4",
    "decode1_a8q:4",
    "decode8",
    "load",
    "latency",
    "host",
    "start",
    "start_cached",
    "prefix",
    "drafts",
)


def workload(n: int, scale: float) -> list[list[int]]:
    """Random prompts of 64 to 256 tokens."""
    rng = np.random.default_rng(0)
    return [rng.integers(3, 32000, max(2, int(scale * rng.integers(64, 257)))).tolist() for _ in range(n)]


def same_length(n: int, scale: float) -> list[list[int]]:
    return np.random.default_rng(0).integers(3, 32000, (n, int(128 * scale))).tolist()


def torch_side(measure: str, directory: str, scale: float) -> dict:
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    attention = "sdpa" if measure != "load" else "paged|sdpa"
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(directory, dtype=torch.float32, attn_implementation=attention).eval()
    new = max(2, int(64 * scale))
    if measure == "load":
        prompts = workload(32, scale)
        options = transformers.GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
        begin = time.perf_counter()
        out = model.generate_batch(inputs=prompts, generation_config=options)
        count = sum(len(r.generated_tokens) for r in out.values())
        return {"load_tok_s": count / (time.perf_counter() - begin)}
    tokens = torch.tensor(same_length(int(measure[6:]), scale))

    def run(n: int) -> float:
        begin = time.perf_counter()
        with torch.no_grad():
            model.generate(tokens, max_new_tokens=n, min_new_tokens=n, do_sample=False, pad_token_id=0)
        return time.perf_counter() - begin

    run(2)
    return {measure + "_tok_s": len(tokens) * rate(run, new)}


def llama_side(measure: str, directory: str, scale: float) -> dict:
    import itertools

    import llama_cpp

    kind = "q8_0" if "_" in measure else "f32"  # which rounds what it multiplies with to 8 bits too, as a8q does
    model = llama_cpp.Llama(f"{directory}/{kind}.gguf", n_ctx=512, verbose=False)
    tokens, new = same_length(1, scale)[0], max(2, int(64 * scale))

    def run(n: int) -> float:
        model.reset()
        return seconds(lambda: list(itertools.islice(model.generate(tokens, top_k=1, temp=0.0), n)))

    run(2)
    return {measure + "_tok_s": rate(run, new)}


def fdel_side(measure: str, directory: str, scale: float) -> dict:
    import jax

    if measure == "start_cached":
        jax.config.update("jax_compilation_cache_dir", directory + "/xla_cache")
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    from fdel import models, params
    from fdel.serve import Engine, SamplingParams, Settings

    model = models.load(directory, stacked=False)
    what, _, together = measure.partition(":")
    if what.startswith("decode1_"):
        spec = params.unstack(model.family.spec(model.cfg))
        model = model._replace(params=params.quantize(model.params, what[8:], r"\blayers\b|head", spec=spec))
    jax.block_until_ready(model.params)
    if measure.startswith("start"):
        begin = time.perf_counter()
        engine = Engine(model, Settings(rows=32))
        engine.start()
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=1))
        out = {measure + "_s": time.perf_counter() - begin}
        while engine.stats()["to compile"]:
            time.sleep(0.05)
        return out | {measure + "_all_s": time.perf_counter() - begin, "programs": engine.stats()["compiled"]}
    new = max(2, int(64 * scale))
    sampling = SamplingParams(max_tokens=new, ignore_eos=True)
    if measure == "drafts":
        return drafts(model, scale)
    engine = Engine(model, Settings(rows=32, decode_steps=int(together or 1)))
    if measure == "host":
        return {"host_ms": host(engine)}
    if measure == "prefix":
        engine._core.device.warm_up()
        prompt = np.random.default_rng(0).integers(3, 32000, max(130, int(1024 * scale))).tolist()
        first = SamplingParams(max_tokens=1)
        cold, warm = (
            seconds(lambda: engine.generate([prompt], first)),
            seconds(lambda: engine.generate([prompt], first)),
        )
        return {"prefix_cold_ms": 1e3 * cold, "prefix_hit_ms": 1e3 * warm, "prefix_speedup": cold / warm}
    engine.start(wait=True)
    if measure == "latency":
        return latency(engine, sampling, scale)
    if measure == "load":
        prompts = workload(32, scale)
        return {"load_tok_s": 32 * new / seconds(lambda: engine.generate(prompts, sampling))}
    prompts = same_length(int(measure[6]), scale)
    engine.generate(prompts, sampling)  # the prompts' pages stay in the cache, so both calls below hit them
    run = lambda n: seconds(lambda: engine.generate(prompts, SamplingParams(max_tokens=n, ignore_eos=True)))
    return {measure + "_tok_s": len(prompts) * rate(run, new)}


def rate(run, new: int) -> float:
    """Give tokens per second after the first one, of run(tokens) -> seconds: the least of `ROUNDS` each."""
    one, more = (min(run(n) for _ in range(ROUNDS)) for n in (1, 1 + new))
    return new / (more - one)


def seconds(run) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def latency(engine, sampling, scale: float) -> dict:
    """Percentiles over the tokens of all readers, in milliseconds."""

    async def read(prompt: list[int]) -> list[float]:
        times = [time.perf_counter()]
        async for delta in engine.stream(prompt, sampling):
            times += [time.perf_counter()] * len(delta.tokens)
        return times

    async def together(n: int) -> list[list[float]]:
        return await asyncio.gather(*(read(p) for p in workload(n, scale)))

    out = {}
    for n in (1, 8, 32):
        engine._core.schedule.pool.forget()
        times = asyncio.run(together(n))
        first = [t[1] - t[0] for t in times]
        between = np.concatenate([np.diff(t[1:]) for t in times])
        for name, x in (("ttft", first), ("itl", between)):
            for q in (50, 99):
                out[f"{name}{n}_p{q}_ms"] = 1e3 * float(np.percentile(x, q))
    return out


def host(engine) -> float:
    """Median milliseconds of a step at batch 32 whose programs return at once: planning, packing, handing out."""
    from fdel.serve import SamplingParams
    from fdel.serve.engine.packing import Out

    class OnHost(np.ndarray):
        def copy_to_host_async(self): ...

    def nothing(call):
        drawn = np.zeros((len(call.arrays[0]), 4), np.int32).view(OnHost)
        drawn[:, :2] = 1, 9
        return Out(drawn, None, None)

    engine._core.device.execute, engine._core.device.admit = nothing, lambda r, sampling: None
    for prompt in workload(32, 0.5):
        engine.submit(prompt, SamplingParams(max_tokens=400, ignore_eos=True))
    for _ in range(30):
        engine.step()
    return 1e3 * float(np.median([seconds(engine.step) for _ in range(200)]))


def drafts(model, scale: float) -> dict:
    """Output tokens/s of one sequence that is made to repeat itself."""
    from fdel.serve import Engine, SamplingParams, Settings

    out, new = {}, max(32, int(256 * scale))
    loop = np.random.default_rng(0).integers(3, 32000, 16).tolist()
    sampling = SamplingParams(max_tokens=new, ignore_eos=True, logit_bias={loop[0]: 100.0})
    for n in (0, 3):
        engine = Engine(model, Settings(rows=1, drafts=n))
        engine.start(wait=True)
        engine.generate([loop * 8], sampling)
        out[f"drafts{n}_tok_s"] = new / seconds(lambda e=engine: e.generate([loop * 8], sampling))
        engine.close()
    return out | {"drafts_speedup": out["drafts3_tok_s"] / out["drafts0_tok_s"]}


def table(results: dict) -> str:
    """Format all sides, one row per number."""
    lines = [
        "| measure | transformers | llama.cpp | fdel | fdel / transformers | fdel / llama.cpp |",
        "|---|" + "---|" * 5,
    ]
    for key, ours in results["fdel"].items():
        theirs = [results[side].get(key) for side in ("torch", "llama")]
        shown = ["" if x is None else f"{x:.4g}" for x in (*theirs, ours)]
        ratios = ["" if x is None else f"{ours / x:.2f}" for x in theirs]
        lines.append(f"| {key} | {' | '.join(shown + ratios)} |")
    return "\n".join(lines)


def prepare_llama(directory: str, interpreters: list[str]) -> str | None:
    """Convert the checkpoint for llama.cpp: the interpreter that has it, if one does."""
    from fdel import text

    python = next((p for p in interpreters if peers.has(p, "llama_cpp")), None)
    if python is not None:
        text.save(text.train_bpe(["a few words"], 300), directory)
        for kind in ("f32", "q8_0"):
            peers.convert(directory, kind)
    return python


SIDES = {"torch": torch_side, "llama": llama_side, "fdel": fdel_side}
MEASURED = {
    "decode1": ("torch", "llama"),
    "decode1_int8": ("llama",),
    "decode1_a8q": ("llama",),
    "decode1_int8:4": ("llama",),
    "decode1_a8q:4": ("llama",),
    "decode8": ("torch",),
    "load": ("torch",),
}


def main() -> None:
    if "--shape" in sys.argv:
        import shapes

        return shapes.main(shapes.served, __doc__)
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--only", nargs="*", choices=MEASURES, default=MEASURES, help="measures to run (default: all)")
    cli.add_argument("--out", type=Path, help="also write the table here")
    cli.add_argument("--scale", type=float, default=1.0, help="1 for the numbers, less to try it out")
    cli.add_argument("--python", nargs="*", default=[], help="interpreters that have llama_cpp")
    cli.add_argument("--side", choices=tuple(SIDES), help=argparse.SUPPRESS)
    cli.add_argument("--directory", help=argparse.SUPPRESS)
    args = cli.parse_args()
    if args.side:
        print(json.dumps(SIDES[args.side](args.only[0], args.directory, args.scale)))
        return
    with tempfile.TemporaryDirectory() as directory:
        import torch
        import transformers

        torch.manual_seed(0)
        config = CONFIG | {"num_hidden_layers": max(1, int(12 * args.scale))}
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).save_pretrained(directory)
        results: dict[str, dict] = {side: {} for side in SIDES}
        llama = prepare_llama(directory, [sys.executable, *args.python])
        for measure in args.only:
            for side in (*MEASURED.get(measure, ()), "fdel"):
                if side == "llama" and llama is None:
                    continue
                for _ in range(2 if measure == "start_cached" else 1):  # the first run fills the cache
                    python = llama if side == "llama" else sys.executable
                    command = [python, __file__, "--side", side, "--directory", directory, "--only", measure]
                    command += ["--scale", str(args.scale)]
                    done = subprocess.run(command, capture_output=True, text=True, check=False)
                    if done.returncode:
                        sys.exit(f"{side} {measure} failed:\n{done.stderr}")
                found = json.loads(done.stdout.splitlines()[-1])
                results[side] |= found
                print(side, measure, found, file=sys.stderr, flush=True)
        publish("CPU float32, 125M Llama", table(results), args.out)


if __name__ == "__main__":
    main()
