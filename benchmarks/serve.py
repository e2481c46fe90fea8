"""The server against the bare engine and against other servers, on one checkpoint in one run: 125M Llama, CPU, float32.

    python benchmarks/serve.py [--python PATH ...] [--only NAME ...] [--out benchmarks/results/FILE.md] [--scale 0.25]

Each server runs as a process of its own; completions (prompts of 64 to 256 tokens, 64 new ones) are streamed to 1, 8 and
32 readers at a time: output tokens/s, time to the first token and between events, and the server's CPU time per token,
which other work on the machine disturbs least. `bare engine` is ours without a server, read through `Engine.stream`.
Other servers (peers.py) are looked for in the interpreters of --python, and llama.cpp's among them as .../llama-server; its
weights need the package gguf here.
`--scale` shrinks the model, prompts and outputs, to try the script out.
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
import urllib.error
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from client import post
from model import publish
from peers import PEERS, checkpoint, convert, found, get, running

BARE = "bare engine"
READERS = (1, 8, 32)


def prompts(directory: str, scale: float) -> list[str]:
    """Texts of 64 to 256 tokens."""
    from fdel import text

    tok, rng = text.load(directory), np.random.default_rng(0)
    size = tok.backend.get_vocab_size()
    lengths = [max(2, int(scale * rng.integers(64, 257))) for _ in range(32)]
    return [text.decode(tok, rng.integers(300, size, n).tolist()) for n in lengths]


async def read(port: int, body: dict, *headers: str) -> list[float]:
    """Stream one completion: the times at which its events came, after the time at which it was asked for."""
    times, tail, ended = [time.perf_counter()], b"", b""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(post("/v1/completions", json.dumps(body).encode(), *headers))
    while part := await reader.read(2**16):
        times += [time.perf_counter()] * len(re.findall(rb'"text":\s*"[^"]', tail + part))
        tail, ended = (tail + part)[-8:], ended + part[-4000:]
    writer.close()
    if not re.search(rb'"finish_reason":\s*"length"', ended):
        raise RuntimeError(f"a completion did not come to its length: {ended[-500:]!r}")
    return times


async def load(asked: Sequence[tuple[Callable[..., Any], tuple]], readers: int) -> dict[str, float]:
    """Read all streams, each an async function with its arguments that returns its times, some readers at a time."""
    left, every = list(asked), []

    async def reader() -> None:
        while left:
            read, args = left.pop()
            every.append(await read(*args))

    begin = time.perf_counter()
    await asyncio.gather(*(reader() for _ in range(readers)))
    spent = time.perf_counter() - begin
    first = [1e3 * (t[1] - t[0]) for t in every]
    between = [1e3 * d for t in every for d in np.diff(t[1:])]
    at = lambda values, q: float(np.percentile(values, q))
    return {"s": spent, "ttft p50": at(first, 50), "ttft p99": at(first, 99), "itl p50": at(between, 50),
            "itl p99": at(between, 99)}  # fmt: skip


def cpu(pid: int) -> float:
    """Seconds of CPU time that a process and those that it started have used."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # a process that has just ended
            fields = path.read_text().rsplit(")", 1)[1].split()
            found[int(path.parent.name)] = int(fields[1]), sum(map(int, fields[11:13])) / 100
    family = {pid}
    while more := {p for p, (parent, _) in found.items() if parent in family} - family:
        family |= more
    return sum(found[p][1] for p in family)


def row(name: str, readers: int, r: dict[str, float]) -> str:
    return (
        f"| {name} | {readers} | {r['tok_s']:.1f} | {r['ttft p50']:.0f}, {r['ttft p99']:.0f} | "
        f"{r['itl p50']:.1f}, {r['itl p99']:.1f} | {r['cpu']:.2f} |"
    )


def settle(port: int, key: str = "") -> None:
    """Wait until our server has compiled all its programs; the others have no such metric."""
    with contextlib.suppress(urllib.error.HTTPError):
        while re.search(rb"^fdel_sizes_to_compile [1-9]", get(port, "/metrics", key), re.MULTILINE):
            time.sleep(0.2)


def measure(name: str, python: str, directory: str, texts: list[str], new: int) -> list[str]:
    """Measure one server: rows of the table."""
    out, asked = [], {"model": directory, "max_tokens": new, "temperature": 0, "stream": True} | PEERS[name].asked
    if PEERS[name].gguf:
        convert(directory, PEERS[name].gguf)
    with running(name, python, directory) as (port, pid, ready):
        settle(port)
        asyncio.run(load([(read, (port, asked | {"prompt": "warm up " * 9, "max_tokens": 8}))] * 8, 8))
        for readers in READERS:
            used = cpu(pid)
            bodies = [asked | {"prompt": t} for t in texts[: max(4, readers)]]
            # Other beginnings than those of the run before, which its cache of prefixes holds.
            bodies = [b | {"prompt": f"{readers} {b['prompt']}"} for b in bodies]
            r = asyncio.run(load([(read, (port, b)) for b in bodies], readers))
            tokens = len(bodies) * new
            r |= {"tok_s": tokens / r["s"], "cpu": 1e3 * (cpu(pid) - used) / tokens}
            out.append(row(name, readers, r))
            print(out[-1], file=sys.stderr, flush=True)
    return [*out, f"| {name} | ready after | {ready:.1f} s | | | |"]


def bare(directory: str, texts: list[str], new: int) -> None:
    """Print the rows of the engine without a server, its streams read in asyncio."""
    from fdel import models, text
    from fdel.serve import Engine, SamplingParams

    tok = text.load(directory)
    engine = Engine(models.load(directory, stacked=False), tokenizer=tok)
    engine.start(wait=True)

    async def read(said: str, tokens: int) -> list[float]:
        times, some = [time.perf_counter()], SamplingParams(max_tokens=tokens, ignore_eos=True)
        async for delta in engine.stream(text.encode(tok, said), some):
            times += [time.perf_counter()] * bool(delta.tokens)
        return times

    asyncio.run(load([(read, ("warm up " * 9, 8))] * 8, 8))
    for readers in READERS:
        used = time.process_time()
        asked = [(read, (f"{readers} {t}", new)) for t in texts[: max(4, readers)]]
        r = asyncio.run(load(asked, readers))
        tokens = len(asked) * new
        print(row(BARE, readers, r | {"tok_s": tokens / r["s"], "cpu": 1e3 * (time.process_time() - used) / tokens}))
    engine.close()


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--out", type=Path, help="also write the table here")
    cli.add_argument("--scale", type=float, default=1.0, help="shrink everything (default: %(default)s)")
    cli.add_argument("--only", nargs="*", choices=[BARE, *PEERS], default=[BARE, *PEERS], help="what to measure")
    cli.add_argument("--python", nargs="*", default=[], help="interpreters that have other servers; llama-server")
    cli.add_argument("--bare", help=argparse.SUPPRESS)
    args = cli.parse_args()
    new = max(4, int(64 * args.scale))
    if args.bare:
        bare(args.bare, prompts(args.bare, args.scale), new)
        return
    with tempfile.TemporaryDirectory() as directory:
        checkpoint(directory, args.scale)
        texts = prompts(directory, args.scale)
        lines = [
            "| server | readers | output tokens/s | first token p50, p99 ms | between p50, p99 ms | CPU ms per token |",
            "|---|---|---|---|---|---|",
        ]
        if BARE in args.only:
            command = [sys.executable, __file__, "--bare", directory, "--scale", str(args.scale)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            lines += done.stdout.splitlines()[-len(READERS) :]
            print(*lines[2:], sep="\n", file=sys.stderr, flush=True)
        here = [n for n in args.only if n != BARE]
        there = found(here, [sys.executable, *args.python])
        for name in here:
            try:
                lines += measure(name, there[name], directory, texts, new) if name in there else []
            except (RuntimeError, OSError, ImportError) as e:  # a peer's failure is no reason to lose the others' rows
                lines.append(f"| {name} | failed | | | | |")
                print(name, e, file=sys.stderr, flush=True)
        lines += ["", f"Not installed: {', '.join(n for n in here if n not in there) or 'none'}."]
    publish(f"CPU float32, scale {args.scale}", "\n".join(lines), args.out)


if __name__ == "__main__":
    main()
