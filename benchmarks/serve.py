"""The server against the bare engine on one checkpoint in one run: a Llama of 125M parameters, CPU, float32.

    python benchmarks/serve.py [--out benchmarks/results/FILE.md] [--scale 0.25] [--requests 300]

`fdel serve` runs as a process of its own; streams of completions are read by 1, 8 and 32 clients at a time (prompts of 64
to 256 tokens, 64 new ones): output tokens/s, time to the first token and between tokens. Then the same 32 requests in the
bare engine; `/health` per second, idle and under load; refusals per second; and the server's memory over --requests short
requests. `--scale` shrinks the model, prompts and outputs, to try the script out.
"""

import argparse
import asyncio
import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import numpy as np
from engine import workload
from model import CONFIG, publish


def checkpoint(directory: str, scale: float) -> None:
    """Save a random model, and a tokenizer, which is hardly used: prompts are token ids."""
    import jax

    from fdel import models, params, text
    from fdel.models import llama

    sizes = {k: max(1, int(CONFIG[k] * scale)) for k in ("num_hidden_layers", "hidden_size", "intermediate_size")}
    cfg = llama.Config.from_hf(CONFIG | sizes | {"hidden_size": sizes["hidden_size"] // 12 * 12})
    models.save(models.Model(llama, cfg, params.init(llama.spec(cfg), jax.random.key(0))), directory)
    text.save(text.train_bpe(["a few words"], 300), directory)


@contextlib.contextmanager
def server(directory: str) -> Iterator[tuple[str, int, float]]:
    """Run `fdel serve`: (address, process id, seconds until it was ready)."""
    begin = time.perf_counter()
    command = [sys.executable, "-m", "fdel", "serve", directory, "--name", "m", "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        address = next(found[0] for line in process.stderr if (found := re.search(r"http://[^/]+", line)))
        yield address, process.pid, time.perf_counter() - begin
    finally:
        process.terminate()
        process.wait()


async def read(session: aiohttp.ClientSession, prompt: list[int], new: int) -> list[float]:
    """Stream one completion: the times at which its events came, after the time at which it was asked for."""
    asked = {"model": "m", "prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True, "stream": True}
    times = [time.perf_counter()]
    async with session.post("/v1/completions", json=asked) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {"):
                times.append(time.perf_counter())
    return times


async def load(address: str, prompts: list[list[int]], readers: int, new: int) -> dict[str, float]:
    """Read all prompts' completions with some readers at a time."""
    left, every = list(prompts), []

    async def reader(session: aiohttp.ClientSession) -> None:
        while left:
            every.append(await read(session, left.pop(), new))

    async with aiohttp.ClientSession(address, timeout=aiohttp.ClientTimeout(None)) as session:
        await read(session, prompts[0], 2)
        begin = time.perf_counter()
        await asyncio.gather(*(reader(session) for _ in range(readers)))
        spent = time.perf_counter() - begin
    first = [1e3 * (t[1] - t[0]) for t in every]
    between = [1e3 * d for t in every for d in np.diff(t[1:])]
    at = lambda values, q: float(np.percentile(values, q))
    return {"tok_s": len(prompts) * new / spent, "ttft p50": at(first, 50), "ttft p99": at(first, 99),
            "itl p50": at(between, 50), "itl p99": at(between, 99)}  # fmt: skip


async def small(address: str, requests: int, pid: int) -> tuple[dict[str, float], list[int]]:
    """Requests per second of what needs no model, and the server's memory in MB over many short completions."""

    async def rate(path: str, body: object = None, seconds: float = 2.0) -> float:
        count, begin = 0, time.perf_counter()

        async def one() -> None:
            nonlocal count
            while time.perf_counter() - begin < seconds:
                async with session.request("GET" if body is None else "POST", path, json=body) as response:
                    await response.read()
                count += 1

        await asyncio.gather(*(one() for _ in range(8)))
        return count / seconds

    resident = lambda: int(Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()[0]) // 1024
    async with aiohttp.ClientSession(address, timeout=aiohttp.ClientTimeout(None)) as session:
        rates = {
            "/health": await rate("/health"),
            "refusals": await rate("/v1/completions", {"model": "m", "prompt": ""}),
        }
        busy = asyncio.gather(*(read(session, [5, 6, 7], 64) for _ in range(16)))
        rates["/health under load"] = await rate("/health")
        await busy
        memory = []
        for _ in range(10):
            await asyncio.gather(*(read(session, [5, 6, 7], 2) for _ in range(max(1, requests // 10))))
            memory.append(resident())
    return rates, memory


def bare(directory: str, prompts: list[list[int]], new: int) -> float:
    """Output tokens/s of the engine without a server, for all prompts at once."""
    from fdel import models
    from fdel.serve import Engine, SamplingParams

    engine = Engine(models.load(directory, stacked=False))
    engine.start()
    sampling = SamplingParams(max_tokens=new, ignore_eos=True)
    engine.generate(prompts[:1], SamplingParams(max_tokens=2, ignore_eos=True))
    begin = time.perf_counter()
    engine.generate(prompts, sampling)
    spent = time.perf_counter() - begin
    engine.close()
    return len(prompts) * new / spent


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--out", type=Path, help="also write the table here")
    cli.add_argument("--scale", type=float, default=1.0, help="shrink everything (default: %(default)s)")
    cli.add_argument("--requests", type=int, default=300, help="short requests for the memory (default: %(default)s)")
    args = cli.parse_args()
    new, prompts = max(2, int(64 * args.scale)), workload(32, args.scale)
    with tempfile.TemporaryDirectory() as directory:
        checkpoint(directory, args.scale)
        lines = [
            "| readers | output tokens/s | first token p50, p99 ms | between tokens p50, p99 ms |",
            "|---|---|---|---|",
        ]
        with server(directory) as (address, pid, ready):
            for readers in (1, 8, 32):
                r = asyncio.run(load(address, prompts[: max(4, readers)], readers, new))
                lines.append(
                    f"| {readers} | {r['tok_s']:.1f} | {r['ttft p50']:.0f}, {r['ttft p99']:.0f} | "
                    f"{r['itl p50']:.1f}, {r['itl p99']:.1f} |"
                )
                print(lines[-1], file=sys.stderr, flush=True)
            rates, memory = asyncio.run(small(address, args.requests, pid))
        lines.append(f"| bare engine, 32 at once | {bare(directory, prompts, new):.1f} | | |")
        lines += [
            "",
            f"Ready after {ready:.1f} s. Per second: " + ", ".join(f"{k} {v:.0f}" for k, v in rates.items()) + ".",
        ]
        lines += [f"Memory over {args.requests} short requests, MB: {json.dumps(memory)}."]
    publish(f"CPU float32, scale {args.scale}", "\n".join(lines), args.out)


if __name__ == "__main__":
    main()
