"""A server under faults: what survives is right, what dies is told, and nothing is kept.

    python benchmarks/faults.py [--count 1000] [--out benchmarks/results/FILE.md]

A server with a tiny random checkpoint runs as a process of its own. Its steps raise now and then, and always where a
poisoned request takes part. Mixed requests (chats, completions, responses; whole and streamed; greedy and seeded; n = 2;
tools and grammars) are asked alone first, then by many clients at a time, some of whom leave at any moment, read slowly,
or send what no server should take. Half way the server is killed and started again; clients ask again. Properties: every
answer equals the one given alone; every request gets an answer; pages, rows and memory come back. Exits 1 if one fails.
"""

import argparse
import asyncio
import contextlib
import http.client
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from client import answer, checkpoint, exchange, free_port, post, process, resident

POISON = 299  # the token that breaks the steps of whoever has it as first
PATIENCE = 120.0  # seconds that a client asks again: longer than the server takes to start


# ---- the server ----------------------------------------------------------------------------------------------------


def serve(directory: str, port: int, every: int) -> None:
    """Serve with a device that fails for poisoned requests, and, from the first of them on, at each `every`-th decode."""
    from fdel import models, text
    from fdel.serve import Settings
    from fdel.serve.server import launch

    options = launch.ServerOptions(
        port=port,
        names=["m"],
        programs=Path(directory) / "programs",
        settings=Settings(rows=16, budget=64, batches=(2, 16)),
    )
    found = launch.served(models.load(directory, stacked=False), text.load(directory), "m", options)
    device = found[0].engine._core.device
    decode, calls = device.decode, Counter()

    def failing(requests, *args):
        poisoned = any(r.tokens[0] == POISON for r in requests)
        calls["all"] += bool(calls["all"] or poisoned)
        if poisoned:
            raise RuntimeError("a poisoned request")
        out = decode(requests, *args)
        if calls["all"] and calls["all"] % every == 0:  # after the state was donated
            raise RuntimeError("a passing fault")
        return out

    device.decode = failing
    launch.listen(found, options, launch.check(options))


# ---- what is asked -------------------------------------------------------------------------------------------------


def requests(rng: random.Random) -> list[tuple[str, dict]]:
    """(path, body) of what is asked, each answer a function of its body."""
    out: list[tuple[str, dict]] = []
    tool = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"]}
    function = {"type": "function", "function": {"name": "weather", "parameters": tool}}
    for i in range(6):
        prompt = [rng.randrange(8, 290) for _ in range(rng.randrange(1, 150))]
        said = [{"role": "user", "content": "".join(rng.choices("the weather ", k=rng.randrange(1, 60)))}]
        length, drawn = {"max_tokens": rng.randrange(2, 40)}, {"temperature": 1.0, "seed": i}
        greedy = {"temperature": 0}
        c, chat, stream = "/v1/completions", "/v1/chat/completions", {"stream": True}
        out += [
            (c, {"prompt": prompt} | greedy | length),
            (c, {"prompt": prompt, "n": 2} | drawn | length),
            (c, {"prompt": "the music", "stop": ["e"], "ignore_eos": True, "logprobs": 2} | stream | drawn | length),
            (c, {"prompt": [prompt, prompt[:9]], "stream_options": {"include_usage": True}} | stream | greedy | length),
            (c, {"prompt": "fine", "structured_outputs": {"regex": "(a|bc)+d"}} | drawn | length),
            (chat, {"messages": said} | greedy | length),
            (chat, {"messages": said, "n": 2} | stream | drawn | length),
            (chat, {"messages": said, "tools": [function], "tool_choice": "required"} | drawn | {"max_tokens": 60}),
            (chat, {"messages": said, "tools": [function], "tool_choice": "required"} | stream | drawn | length),
            ("/v1/responses", {"input": said[0]["content"], "max_output_tokens": 20} | greedy),
        ]
    return [(path, {"model": "m"} | body) for path, body in out]


BROKEN: tuple[tuple[str, bytes, int], ...] = (  # (path, body, the status that it deserves)
    ("/v1/completions", b"{", 400),
    ("/v1/completions", b'{"model": "m", "prompt": [1], "max_tokens": NaN}', 400),
    ("/v1/completions", b'{"model": "m", "prompt": [1], "n": 1000000000}', 400),
    ("/v1/completions", b'{"model": "m", "prompt": [300]}', 400),
    ("/v1/completions", json.dumps({"model": "m", "prompt": [5] * 1000}).encode(), 400),
    ("/v1/chat/completions", b'{"model": "m", "messages": []}', 400),
    ("/v1/chat/completions", b"[" * 100_000, 400),
    ("/v1/completions", b" " * (2**23 + 1), 413),
    ("/v1/completions", b'{"model": "n", "prompt": "a"}', 404),
    ("/v1/nowhere", b"{}", 404),
)


# ---- what is answered ----------------------------------------------------------------------------------------------


def plain(status: int, raw: bytes) -> object:
    """What an answer says without the names and times that differ each time; streams are put together by choice."""
    if not raw.startswith((b"data: ", b"event: ")):
        said = json.loads(raw)
        return status, _without(said)
    texts: dict[tuple, str] = {}
    for line in raw.decode().splitlines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            return event["error"]["code"]
        for choice in event["choices"]:
            delta = choice.get("delta") or {"text": choice.get("text") or ""}
            for call in delta.get("tool_calls", ()):
                key = choice["index"], "call", call["index"]
                texts[key] = texts.get(key, "") + "".join(map(str, call["function"].values()))
            for name in ("text", "content"):
                texts[choice["index"], name] = texts.get((choice["index"], name), "") + (delta.get(name) or "")
            texts[choice["index"], "end"] = texts.get((choice["index"], "end"), "") + (choice["finish_reason"] or "")
        texts["usage",] = str((event.get("usage") or {}).get("completion_tokens"))
    return "stream" if raw.endswith(b"data: [DONE]\n\n") else "cut", texts


def _without(said: object) -> object:
    if isinstance(said, dict):
        drop = ("id", "created", "created_at", "completed_at", "call_id", "cached_tokens", "logprobs")
        return {k: _without(v) for k, v in said.items() if k not in drop}
    return [_without(x) for x in said] if isinstance(said, list) else said


# ---- the storm -----------------------------------------------------------------------------------------------------


@dataclass
class Storm:
    """Clients and what they have found; `wrong` says how the server failed."""

    port: int
    rng: random.Random
    alone: dict[str, object] = field(default_factory=dict)  # by request
    seen: Counter = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    async def ask(self, sent: bytes, pause: float = 0.0) -> tuple[int, bytes]:
        """Ask until there is a whole answer that does not say to come again."""
        begin = time.monotonic()
        while time.monotonic() < begin + PATIENCE:
            try:
                status, raw = answer(await exchange(self.port, sent, pause=pause) or b"")
                if status != 503 and b'"aborted"' not in raw:
                    return status, raw
            except (OSError, http.client.HTTPException):
                pass
            self.seen["asked again"] += 1
            await asyncio.sleep(0.1)
        raise TimeoutError

    async def one(self, kind: str, path: str, body: dict) -> None:
        """Be one client of a kind."""
        raw = json.dumps(body).encode()
        self.seen[kind] += 1
        if kind == "leaves":
            with contextlib.suppress(OSError):
                await exchange(self.port, post(path, raw), leave=self.rng.expovariate(1 / 0.2))
            return
        if kind == "broken":
            path, raw, want = self.rng.choice(BROKEN)
            status, got = await self.ask(post(path, raw))
            if status != want or "message" not in json.loads(got)["error"]:
                self.wrong.append(f"{raw[:60]!r} got {status} {got[:100]!r}, expected {want}")
            return
        if kind == "poisoned":
            poison = {"model": "m", "prompt": [POISON, 5, 6], "max_tokens": 9, "ignore_eos": True}
            status, got = await self.ask(post("/v1/completions", json.dumps(poison).encode()))
            if status != 500 or json.loads(got)["error"]["code"] != "engine":
                self.wrong.append(f"a poisoned request got {status} {got[:100]!r}")
            return
        said = plain(*await self.ask(post(path, raw), pause=0.01 if kind == "slow" else 0.0))
        if said != self.alone[raw.decode()]:
            self.wrong.append(f"{raw[:200]!r} gave {said}, alone {self.alone[raw.decode()]}")

    async def blow(self, asked: list[tuple[str, dict]], count: int, clients: int = 32) -> None:
        """Send `count` requests, some clients at a time."""
        shares = {"whole": 65, "leaves": 20, "slow": 5, "broken": 8, "poisoned": 2}
        left = self.rng.choices(list(shares), list(shares.values()), k=count)

        async def client() -> None:
            while left:
                kind, (path, body) = left.pop(), self.rng.choice(asked)
                try:
                    await self.one(kind, path, body)
                except TimeoutError:
                    self.wrong.append(f"no answer ({kind}): {body}")

        await asyncio.gather(*(client() for _ in range(clients)))

    async def metric(self, name: str) -> float:
        """Read one of /metrics."""
        raw = await exchange(self.port, b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return float(re.search(rf"^{name} (\S+)$", answer(raw or b"")[1].decode(), re.MULTILINE)[1])

    async def rest(self, seconds: float = 120.0) -> None:
        """Wait until the server holds nothing, and has no program left to compile."""
        names = ("fdel_num_requests_running", "fdel_num_requests_waiting", "fdel_kv_cache_usage_ratio",
                 "fdel_sizes_to_compile")  # fmt: skip
        begin = time.monotonic()
        while any(held := {n: await self.metric(n) for n in names if await self.metric(n)}):
            if time.monotonic() - begin > seconds:
                self.wrong.append(f"still held {seconds} s after the last request: {held}")
                return
            await asyncio.sleep(0.1)


def storm(directory: str, count: int, growth: float = 64.0, every: int = 97) -> tuple[Storm, dict[str, float]]:
    """Run everything: what the clients found, and measures."""
    found = Storm(free_port(), random.Random(0))
    asked = requests(found.rng)[: max(10, count // 4)]

    async def run(running: subprocess.Popen) -> None:
        for path, body in asked:
            raw = json.dumps(body)
            found.alone[raw] = plain(*await found.ask(post(path, raw.encode())))
        await found.one("poisoned", "", {})
        blowing = asyncio.create_task(found.blow(asked, count // 2))
        while found.seen.total() < count // 4 and not blowing.done():
            await asyncio.sleep(0.01)
        running.send_signal(signal.SIGKILL)
        await asyncio.to_thread(running.wait)
        found.seen["kill -9"] += 1
        with contextlib.ExitStack() as stack:
            again = await asyncio.to_thread(stack.enter_context, process(directory, *command))
            await blowing
            await found.one("poisoned", "", {})
            await found.rest()
            first, compiled = resident(again.pid), await found.metric("fdel_compilations_total")
            await found.blow(asked, count - count // 2)
            await found.rest()
            last, late = resident(again.pid), await found.metric("fdel_compilations_total") - compiled
            if last - first > growth:
                found.wrong.append(f"memory grew from {first:.0f} to {last:.0f} MB, expected at most {growth:.0f} more")
            if late:
                found.wrong.append(f"{late:.0f} programs were compiled under way")
            again.terminate()
            if code := await asyncio.to_thread(again.wait, 30):
                found.wrong.append(f"SIGTERM ended the server with {code}")
            measures.update(first=first, last=last)

    measures: dict[str, float] = {}
    begin = time.perf_counter()
    command = [__file__, "--serve", directory, "--port", str(found.port), "--every", str(every)]
    with process(directory, *command) as running:
        asyncio.run(run(running))
    return found, measures | {"seconds": time.perf_counter() - begin}


def main(count: int = 1000, out: Path | None = None) -> list[str]:
    """Print what happened; returns what went wrong."""
    with tempfile.TemporaryDirectory() as directory:
        checkpoint(directory)
        try:
            found, measures = storm(directory, count)
        finally:
            log = (Path(directory) / "log").read_text()
    if "Traceback" in log:
        found.wrong.append(f"the server's log has tracebacks:\n{log[log.index('Traceback') :][:3000]}")
    lines = ["| what | count |", "|---|---|", *(f"| {k} | {v} |" for k, v in sorted(found.seen.items()))]
    lines += [f"| wrong | {len(found.wrong)} |", ""]
    lines += [f"{measures['seconds']:.0f} s; memory {measures['first']:.0f} MB, then {measures['last']:.0f} MB.", ""]
    lines += [f"WRONG: {w}" for w in found.wrong[:20]]
    print("\n".join(lines))
    if out:
        out.write_text(f"{time.strftime('%Y-%m-%d')}, {count} requests\n\n" + "\n".join(lines))
    return found.wrong


if __name__ == "__main__":
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--count", type=int, default=1000, help="requests (default: %(default)s)")
    cli.add_argument("--out", type=Path, help="also write the table here")
    cli.add_argument("--serve", help=argparse.SUPPRESS)
    cli.add_argument("--port", type=int, help=argparse.SUPPRESS)
    cli.add_argument("--every", type=int, help=argparse.SUPPRESS)
    args = cli.parse_args()
    if args.serve:
        serve(args.serve, args.port, args.every)
    else:
        sys.exit(bool(main(args.count, args.out)))
