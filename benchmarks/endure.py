"""A server that goes on and on: memory over many requests, many idle connections, and small answers beside streams.

    python benchmarks/endure.py [--requests 10000] [--idle 1000] [--out benchmarks/results/FILE.md]

`fdel serve` runs with a tiny random checkpoint and a key file. Memory is read after a tenth of the requests (completions,
streams, chats, and calls without a key) and after all. `--idle` streams are then opened by clients that do not read,
more than run at a time, and /health is asked meanwhile. Last, requests per second of /health, of calls without a key
(401) and of calls that make no sense (400), alone and beside 32 streams.
"""

import argparse
import asyncio
import json
import re
import resource
import tempfile
import time
from pathlib import Path

from client import answer, checkpoint, exchange, post, process, resident
from model import publish


class Client:
    """Requests to one server with one key."""

    def __init__(self, port: int, secret: str):
        self.port, self.key = port, f"Authorization: Bearer {secret}"

    def post(self, path: str, **body: object) -> bytes:
        return post(path, json.dumps({"model": "m"} | body).encode(), self.key)

    def get(self, path: str) -> bytes:
        return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{self.key}\r\nConnection: close\r\n\r\n".encode()

    async def status(self, sent: bytes) -> int:
        return answer(await exchange(self.port, sent) or b"")[0]

    async def many(self, count: int, kinds: list[tuple[bytes, int]], clients: int = 32) -> None:
        """Send requests in turn, each with the status that it must get."""
        left = iter(range(count))

        async def client() -> None:
            for i in left:
                sent, want = kinds[i % len(kinds)]
                if (got := await self.status(sent)) != want:
                    raise RuntimeError(f"{sent[:60]!r} got {got}, expected {want}")

        await asyncio.gather(*(client() for _ in range(clients)))

    async def rate(self, sent: bytes, want: int, seconds: float = 3.0) -> float:
        """Requests per second of 8 clients, a connection for each request."""
        count, begin = 0, time.perf_counter()
        while (spent := time.perf_counter() - begin) < seconds:
            await self.many(80, [(sent, want)], 8)
            count += 80
        return count / spent

    async def held(self) -> tuple[float, float]:
        """Requests that run or wait, and those that have ended."""
        text = answer(await exchange(self.port, self.get("/metrics")) or b"")[1].decode()
        total = lambda pattern: sum(float(x) for x in re.findall(rf"^{pattern} (\S+)$", text, re.MULTILINE))
        return total(r"fdel_num_requests_(?:running|waiting)"), total(r"fdel_requests_total\{.*\}")


async def measure(c: Client, pid: int, requests: int, idle: int) -> list[str]:
    """Everything, one line of the table each."""
    short = {"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True}
    nobody = post("/v1/completions", b'{"model": "m", "prompt": [5]}')
    senseless = c.post("/v1/completions", prompt="")
    kinds = [
        (c.post("/v1/completions", **short), 200),
        (c.post("/v1/completions", stream=True, **short), 200),
        (c.post("/v1/chat/completions", messages=[{"role": "user", "content": "the"}], max_tokens=4), 200),
        (nobody, 401),
        (senseless, 400),
    ]
    await c.many(requests // 10, kinds)
    first = resident(pid)
    begin = time.perf_counter()
    await c.many(requests - requests // 10, kinds)
    spent = time.perf_counter() - begin
    lines = [
        f"| memory after {requests // 10} requests, MB | {first:.0f} |",
        f"| memory after {requests} requests, MB | {resident(pid):.0f} |",
        f"| mixed requests per second | {(requests - requests // 10) / spent:.0f} |",
    ]
    long = c.post("/v1/completions", prompt=[5, 6, 7], max_tokens=200, ignore_eos=True, stream=True)
    before, (_, ended), open_ = resident(pid), await c.held(), []
    for _ in range(idle):
        open_.append(await asyncio.open_connection("127.0.0.1", c.port, limit=256))
        open_[-1][1].write(long)
    await asyncio.sleep(1.0)
    begin = time.perf_counter()
    if await c.status(c.get("/health")) != 200:
        raise RuntimeError("/health failed beside idle streams")
    waited, (held, then) = time.perf_counter() - begin, await c.held()
    if held + then - ended != idle:
        raise RuntimeError(f"{held} of {idle} streams are held and {then - ended} have ended; the others are lost")
    lines += [
        f"| streams opened; of these run or wait, have ended | {idle}; {held:.0f}, {then - ended:.0f} |",
        f"| /health beside them, ms | {1e3 * waited:.0f} |",
        f"| memory for each, kB | {1e3 * (resident(pid) - before) / max(1, idle):.0f} |",
    ]
    begin = time.perf_counter()
    for _, writer in open_:
        writer.transport.abort()
    while (await c.held())[0]:
        if time.perf_counter() - begin > 60:
            raise RuntimeError("requests are held 60 s after their readers have gone")
        await asyncio.sleep(0.05)
    lines.append(f"| until all were dropped after their readers left, s | {time.perf_counter() - begin:.2f} |")
    asked = {"/health": (c.get("/health"), 200), "without a key": (nobody, 401), "senseless": (senseless, 400)}
    for name, (sent, want) in asked.items():
        lines.append(f"| {name} per second, alone | {await c.rate(sent, want):.0f} |")

    async def streams() -> None:
        while True:
            await c.many(32, [(long, 200)])

    busy = asyncio.create_task(streams())
    for name, (sent, want) in asked.items():
        lines.append(f"| {name} per second, beside 32 streams | {await c.rate(sent, want):.0f} |")
    busy.cancel()
    return lines


def main(requests: int = 10_000, idle: int = 1000, out: Path | None = None) -> None:
    """Run it."""
    from fdel.serve.server import auth, keyfile

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4 * idle + 256)), hard))  # the server inherits it
    with tempfile.TemporaryDirectory() as directory:
        checkpoint(directory)
        key, secret = auth.create("benchmark", "admin", time.time())
        keyfile.save(Path(directory) / "keys.json", [key])
        options = ["--name", "m", "--port", "0", "--api-key-file", f"{directory}/keys.json"]
        with process(directory, "-m", "fdel", "serve", directory, *options) as running:
            port = int(re.search(r"http://[^/]+:(\d+)", (Path(directory) / "log").read_text())[1])
            found = asyncio.run(measure(Client(port, secret), running.pid, requests, idle))
    publish("a tiny model, CPU", "\n".join(["| what | found |", "|---|---|", *found]), out)


if __name__ == "__main__":
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--requests", type=int, default=10_000, help="for the memory (default: %(default)s)")
    cli.add_argument("--idle", type=int, default=1000, help="streams held (default: %(default)s)")
    cli.add_argument("--out", type=Path, help="also write the table here")
    args = cli.parse_args()
    main(args.requests, args.idle, args.out)
