"""Honest streams beside a mixed attack: what their readers feel, and whether one of them is lost.

    python benchmarks/siege.py [--minutes 10] [--scale 1.0] [--out benchmarks/results/FILE.md]

`fdel serve` runs with the 125M Llama of the other benchmarks (`--scale` shrinks it) and a key file. Eight readers
stream completions one after the other with one key for a minute; then for `--minutes` beside attackers with another key
and with none, in a process that gives way to all others (strangers have machines of their own). Each kind of attack
goes on all the time: chains of references in schemas and grammars, regexes and templates that cost too much, bombs of
JSON, long texts, compressed bodies, bodies that come a byte at a time, requests for all that there is, malformed HTTP,
clients that hang up. Exits 1 if an honest stream was lost, or if the 99th percentile of its pauses rose beyond twice
that without attack.
"""

import argparse
import asyncio
import contextlib
import gzip
import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
from client import answer, exchange, post, process, resident
from model import publish
from peers import checkpoint
from serve import prompts, read, settle

READERS, TOKENS = 8, 64


# ---- the attack ----------------------------------------------------------------------------------------------------


def attacks() -> dict[str, list[bytes]]:
    """Requests by kind, each with the attacker's key but for the last kinds; see `besiege`."""
    chat = {"model": "m", "messages": [{"role": "user", "content": "a b c"}], "max_tokens": 8}
    text = {"model": "m", "prompt": "a b c", "max_tokens": 8}
    n = 3000
    array = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(n)}
    schema = {"$ref": "#/$defs/d0", "$defs": array | {f"d{n}": {"type": "string"}}}
    plain = {"$ref": "#/$defs/d0", "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(n)} | {f"d{n}": {}}}
    lark = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(n)) + f'\nr{n}: "b"'
    shaped = lambda s: chat | {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": s}}}
    body = lambda path, value: (path, json.dumps(value).encode())
    bomb = lambda item: (
        "/v1/completions",
        b'{"model": "m", "prompt": "a", "guided_json": [' + b",".join([item] * (8_000_000 // (len(item) + 1))) + b"]}",
    )
    kinds = {
        "grammars": [
            body("/v1/chat/completions", shaped(schema)),
            body("/v1/chat/completions", shaped(plain)),
            body("/v1/chat/completions", chat | {"guided_grammar": lark}),
            body("/v1/completions", text | {"guided_regex": "a?" * 40_000}),
            body("/v1/completions", text | {"guided_regex": "(" * 20_000 + "a" + ")" * 20_000}),
        ],
        "bombs": [bomb(b"{}"), bomb(b"[]"), bomb(b'{"a":1}'), bomb(b"1")],
        "long texts": [
            body("/tokenize", {"model": "m", "prompt": "a" * 4_000_000}),
            body("/v1/embeddings", {"model": "m", "input": ["a b c"] * 2048}),
            body("/v1/chat/completions", chat | {"messages": [{"role": "user", "content": "a " * 1_000_000}]}),
            body("/v1/chat/completions", chat | {"messages": [{"role": "user", "content": "\ufdd0999\ufdd1"}]}),
        ],
        "everything": [body("/v1/completions", text | {"n": 128, "max_tokens": 500, "ignore_eos": True})],
    }
    return {
        kind: [post(path, raw, "Authorization: Bearer KEY") for path, raw in every] for kind, every in kinds.items()
    }


async def besiege(port: int, secret: str, seconds: float, kinds: list[str]) -> Counter:
    """Attack in these kinds (all, if none is named) until the time is over: answers by kind and status."""
    end, seen = time.monotonic() + seconds, Counter[str]()

    async def note(kind: str, sent: bytes, **options: float) -> None:
        try:
            got = await exchange(port, sent, **options)
            seen[f"{kind} {'left' if got is None else answer(got)[0] if got else 'closed'}"] += 1
        except (OSError, http.client.HTTPException) as e:
            seen[f"{kind} {type(e).__name__}"] += 1

    async def go_on(kind: str, every: list[bytes], workers: int = 4, pause: float = 0.02, **options: float) -> None:
        turns = iter(range(10**9))

        async def worker() -> None:
            while time.monotonic() < end:
                await note(kind, every[next(turns) % len(every)], **({"leave": 120.0} | options))
                await asyncio.sleep(pause)

        await asyncio.gather(*(worker() for _ in range(workers)))

    async def trickle() -> None:
        async def one() -> None:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                head = post("/v1/completions", b" " * 1000, f"Authorization: Bearer {secret}")[:-1000]
                writer.write(head)
                for _ in range(10):
                    writer.write(b"{")
                    await asyncio.sleep(1.0)
                writer.transport.abort()
                seen["slow bodies"] += 1

        while time.monotonic() < end:
            await asyncio.gather(*(one() for _ in range(300)))

    zeros = gzip.compress(bytes(2**27))
    compressed = [post("/v1/completions", zeros, "Content-Encoding: gzip")]
    junk = [
        b"\x00\xff" * 500 + b"\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    ]
    keyed = {k: [s.replace(b"Bearer KEY", f"Bearer {secret}".encode()) for s in v] for k, v in attacks().items()}
    stream = json.dumps({"model": "m", "prompt": "a b", "max_tokens": 400, "stream": True, "n": 8}).encode()
    hang_up = [post("/v1/completions", stream, f"Authorization: Bearer {secret}")]
    every = {kind: go_on(kind, requests) for kind, requests in keyed.items()} | {
        "compressed, no key": go_on("compressed, no key", compressed, 40, 0.1),
        "malformed": go_on("malformed", junk, 8, 0.05),
        "hang up": go_on("hang up", hang_up, 8, leave=0.2),
        "slow bodies": trickle(),
    }
    if wrong := sorted(set(kinds) - set(every)):
        raise ValueError(f"unknown kinds {wrong}; expected some of {sorted(every)}")
    chosen = [attack for kind, attack in every.items() if not kinds or kind in kinds]
    for attack in set(every.values()) - set(chosen):
        attack.close()
    await asyncio.gather(*chosen)
    return seen


# ---- the defence ---------------------------------------------------------------------------------------------------


async def honest(port: int, secret: str, texts: list[str], seconds: float) -> tuple[list[float], list[float], int]:
    """Stream until the time is over: (pauses in ms, times to the first token in ms, streams that were lost)."""
    end, between, first, lost = time.monotonic() + seconds, [], [], 0

    async def reader(i: int) -> None:
        nonlocal lost
        turn = 0
        while time.monotonic() < end:
            turn += 1
            body = {"model": "m", "prompt": f"{i} {turn} {texts[(i + turn) % len(texts)]}", "max_tokens": TOKENS,
                    "temperature": 0, "stream": True, "ignore_eos": True}  # fmt: skip
            try:
                times = await read(port, body, f"Authorization: Bearer {secret}")
            except (OSError, RuntimeError) as e:
                print(f"lost: {e!r:.300}", file=sys.stderr)
                lost += 1
                continue
            first.append(1e3 * (times[1] - times[0]))
            between.extend(1e3 * d for d in np.diff(times[1:]))

    await asyncio.gather(*(reader(i) for i in range(READERS)))
    return between, first, lost


def main() -> int:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--minutes", type=float, default=10.0, help="how long the attack goes on (default: %(default)s)")
    cli.add_argument("--scale", type=float, default=1.0, help="shrink the model (default: %(default)s)")
    cli.add_argument("--out", type=Path, help="also write the table here")
    cli.add_argument("--kinds", nargs="*", default=[], help="these kinds of attack alone, for example: bombs 'hang up'")
    cli.add_argument("--attack", nargs=3, metavar=("PORT", "KEY", "SECONDS"), help=argparse.SUPPRESS)
    args = cli.parse_args()
    if args.attack:
        os.setsid()
        os.nice(19)
        with contextlib.suppress(OSError):  # Linux groups processes by session, and gives each group an equal share
            Path("/proc/self/autogroup").write_text("19")
        seen = asyncio.run(besiege(int(args.attack[0]), args.attack[1], float(args.attack[2]), args.kinds))
        print(json.dumps(dict(sorted(seen.items()))))
        return 0
    from fdel.serve.server import auth, keyfile

    with tempfile.TemporaryDirectory() as directory:
        checkpoint(directory, args.scale)
        keys = {name: auth.create(name, role, 0.0) for name, role in (("honest", "service"), ("attacker", "user"))}
        keyfile.save(Path(directory) / "keys.json", [key for key, _ in keys.values()])
        secrets = {name: secret for name, (_, secret) in keys.items()}
        texts = prompts(directory, args.scale)
        command = [
            "-m",
            "fdel",
            "serve",
            directory,
            "--port",
            "0",
            "--name",
            "m",
            "--api-key-file",
            f"{directory}/keys.json",
        ]
        rows = []
        with process(directory, *command) as server:
            port = int((Path(directory) / "log").read_text().rsplit("127.0.0.1:", 1)[1].partition("/")[0])
            settle(port, secrets["honest"])
            asyncio.run(honest(port, secrets["honest"], texts, 5.0))
            for name, seconds in (("alone", 60.0 * min(1.0, args.minutes)), ("under attack", 60.0 * args.minutes)):
                attack = None
                if name != "alone":
                    mine = [sys.executable, __file__, "--attack", str(port), secrets["attacker"], str(seconds)]
                    mine += ["--kinds", *args.kinds]
                    attack = subprocess.Popen(mine, stdout=subprocess.PIPE, text=True)
                between, first, lost = asyncio.run(honest(port, secrets["honest"], texts, seconds))
                at = lambda values, q: float(np.percentile(values, q))
                rows.append((name, len(first), lost, at(between, 50), at(between, 99), at(first, 50), at(first, 99),
                             resident(server.pid)))  # fmt: skip
                print(rows[-1], file=sys.stderr, flush=True)
            seen = json.loads(attack.communicate()[0])
            survived = server.poll() is None
    lines = [
        "| 8 readers | streams | lost | between p50, p99 ms | first token p50, p99 ms | server MB |",
        "|---|---|---|---|---|---|",
    ]
    lines += [f"| {n} | {s} | {x} | {a:.1f}, {b:.1f} | {c:.0f}, {d:.0f} | {m:.0f} |" for n, s, x, a, b, c, d, m in rows]
    lines += ["", "Answers to attackers: " + "; ".join(f"{k}: {v}" for k, v in seen.items()) + "."]
    publish(f"a siege of {args.minutes:g} minutes, scale {args.scale}", "\n".join(lines), args.out)
    held = survived and not any(row[2] for row in rows) and rows[1][4] <= 2 * rows[0][4]
    print("held" if held else "NOT HELD")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
