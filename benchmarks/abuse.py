"""Attack a server that runs on this machine, and print per class what was tried and what passed: bounded in count and time.

python benchmarks/abuse.py PORT KEY OTHER_KEY MODEL [--key-file FILE]

KEY is the attacker's (role user), OTHER_KEY an honest client's. A case passes if each answer has an expected status
and an honest client's /health and 4-token chat come within SECONDS right after it.
FILE, the server's own keys, is damaged and mended.
"""

import argparse
import contextlib
import gzip
import http.client
import json
import re
import socket
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path

SECONDS = 5.0
Case = tuple[
    str, bytes | Callable[[], list[int]], tuple[int, ...]
]  # name, bytes to send or an act, statuses (0: closed)
CLASSES: dict[str, Callable[["Target"], Iterator[Case]]] = {}


def attack(function: Callable[["Target"], Iterator[Case]]) -> Callable[["Target"], Iterator[Case]]:
    """Add a class of attacks; its docstring is its name in the table."""
    CLASSES[(function.__doc__ or "").rstrip(".")] = function
    return function


class Target:
    """A server, and what may be said to it."""

    def __init__(self, port: int, key: str, other: str, model: str, file: Path | None):
        self.port, self.key, self.other, self.file = port, key, other, file
        self.chat = {"model": model, "messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
        self.body = json.dumps(self.chat).encode()

    def head(
        self, path: str = "/v1/chat/completions", *lines: str, method: str = "POST", key: str | None = ""
    ) -> bytes:
        """The head of a request, with the attacker's key, or with another, or with none."""
        own = [f"Authorization: Bearer {key or self.key}"] if key is not None else []
        kind = ["Content-Type: application/json"] if method == "POST" else []
        return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: localhost", *own, *kind, *lines, "", ""]).encode()

    def post(self, body: bytes, *lines: str, key: str | None = "") -> bytes:
        """A whole request."""
        return self.head("/v1/chat/completions", f"Content-Length: {len(body)}", *lines, key=key) + body

    def connect(self) -> socket.socket:
        """A connection that gives up after SECONDS."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=SECONDS)

    def say(self, said: bytes, end: bool = False) -> list[int]:
        """Write bytes, half-close if that is the `end`; the statuses that come back in a short while, or 0 for none."""
        out = b""
        with self.connect() as s, contextlib.suppress(OSError):
            with contextlib.suppress(OSError):
                s.sendall(said)
                if end:
                    s.shutdown(socket.SHUT_WR)
            s.settimeout(1.0)
            while data := s.recv(65536):
                out += data
        return [int(x) for x in re.findall(rb"HTTP/1\.[01] (\d{3})", out) if x != b"100"] or [0]

    def honest(self) -> bool:
        """Whether an honest client is served at once."""
        begin = time.monotonic()
        for method, path, body in (("GET", "/health", None), ("POST", "/v1/chat/completions", self.body)):
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
            headers = {"Authorization": f"Bearer {self.other}", "Content-Type": "application/json"}
            try:
                connection.request(method, path, body, headers)
                if connection.getresponse().status != 200:
                    return False
            except OSError:
                return False
            finally:
                connection.close()
        return time.monotonic() - begin < SECONDS


@attack
def trailers(t: Target) -> Iterator[Case]:
    """trailers and chunks."""
    top = t.head("/v1/chat/completions", "Transfer-Encoding: chunked")
    chunk = b"%x\r\n%s\r\n" % (len(t.body), t.body)
    for name, end in {"none": b"", "one": b"x: y\r\n", "a key": b"Authorization: Bearer x\r\n",
                      "a length": b"Content-Length: 9\r\n",
                      "no colon": b"nonsense\r\n", "1,000": b"x: y\r\n" * 1000,
                      "a megabyte": b"x: " + b"y" * 2**20}.items():  # fmt: skip
        yield f"trailer {name}", top + chunk + b"0\r\n" + end + b"\r\n", (200, 400)
    small = b"".join(b"1\r\n%c\r\n" % c for c in t.body)
    yield "a byte each", top + small + b"0\r\n\r\n", (200,)
    yield "200,000 of a byte", top + b"1\r\n \r\n" * 200_000 + chunk + b"0\r\n\r\n", (200, 400)
    for name, said in {"negative": b"-1\r\n", "overflow": b"f" * 40 + b"\r\n", "extension": b"1;" + b"a" * 2**20 + b"\r\n",
                       "space": b"1 \r\n{\r\n", "no end": b"1\r\n{"}.items():  # fmt: skip
        yield f"chunk {name}", top + said, (400, 0)


@attack
def expect(t: Target) -> Iterator[Case]:
    """Expect: 100-continue."""
    length = f"Content-Length: {len(t.body)}"
    for value, statuses in {
        "100-continue": (0,),
        "100-Continue": (0,),
        "pigs": (417,),
        "": (0,),
        "100-continue, x": (417,),
    }.items():
        yield f"{value!r} and no body", t.head("/v1/chat/completions", length, f"Expect: {value}"), statuses
    yield "of a stranger", t.head("/v1/chat/completions", length, "Expect: 100-continue", key=None), (401,)
    yield "with its body", t.post(t.body, "Expect: 100-continue"), (200,)


@attack
def heads(t: Target) -> Iterator[Case]:
    """counts, sizes and bytes of headers."""
    ask = lambda *lines: t.head("/v1/models", *lines, method="GET")
    for n in (50, 1_000, 20_000):
        yield f"{n} headers", ask(*(f"x{i}: y" for i in range(n))), (200,) if n == 50 else (400, 0)
    for n in (2_000, 9_000, 10**6):
        yield f"{n} bytes", ask("x: " + "y" * n), (200,) if n == 2_000 else (400, 0)
        yield f"a name of {n} bytes", ask("x" * n + ": y"), (200,) if n == 2_000 else (400, 0)
        yield f"a path of {n} bytes", t.head("/" + "a" * n, method="GET"), (404,) if n == 2_000 else (400, 0)
    for line in ("x: a\0b", "x : y", " x: y", "x: a\r b", "x: a\n\tb", ": y", "x"):
        yield repr(line), ask(line), (200, 400)


@attack
def twice(t: Target) -> Iterator[Case]:
    """headers that come twice."""
    for line in (f"Authorization: Bearer {t.other}", "Host: evil", f"Content-Length: {len(t.body)}", "Content-Length: 1",
                 "Content-Type: text/plain", "Transfer-Encoding: chunked", "Transfer-Encoding: identity, chunked",
                 "Content-Encoding: gzip", "Content-Length: +9", "Connection: close, keep-alive"):  # fmt: skip
        yield line[:40], t.post(t.body, line), (200,) if line.startswith("Connection") else (200, 400, 401, 415)


@attack
def pipelines(t: Target) -> Iterator[Case]:
    """pipelining."""
    ask = t.head("/v1/models", method="GET")
    for n in (2, 100, 1000):
        yield f"{n} questions", ask * n, (200,)
    yield "behind a refusal", t.head("/v1/chat/completions", "Content-Length: 1000000", key=None) + ask * 9, (401,)
    yield "garbage behind", ask + b"\x00\xff" * 100, (200, 400)
    yield "100 chats", t.post(t.body) * 100, (200,)


@attack
def halves(t: Target) -> Iterator[Case]:
    """half-closed sockets."""
    for name, said in {"a question": t.head("/v1/models", method="GET"), "half a head": t.head()[:40],
                       "half a body": t.post(t.body)[:-9],
                       "a chat": t.post(t.body), "nothing": b"",
                       "a stream": t.post(json.dumps(t.chat | {"stream": True}).encode())}.items():  # fmt: skip
        yield name, lambda said=said: t.say(said, end=True), (200, 400, 0)


@attack
def upgrades(t: Target) -> Iterator[Case]:
    """upgrades."""
    for line in ("Upgrade: websocket", "Upgrade: h2c", "Upgrade: TLS/1.0", "Upgrade: " + "a, " * 2000):
        more = ("Connection: Upgrade, HTTP2-Settings", "HTTP2-Settings: AAMAAABkAAQ",
                "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==",
                "Sec-WebSocket-Version: 13")  # fmt: skip
        yield line[:30], t.head("/v1/models", line, *more, method="GET") + b"\x81\x85" * 1000, (200, 400)
        yield f"{line[:30]} and a body", t.post(t.body, line, *more), (200, 400)
    yield "HTTP/2 preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", (400, 505)


@attack
def paths(t: Target) -> Iterator[Case]:
    """paths, and ids of models and keys."""
    odd = ("//v1/models", "/v1/./models", "/v1/../admin/keys", "/v1/%2e%2e/admin/keys", "/v1%2fmodels", "/v1/models%00",
           "/v1/models;a",
           "/V1/MODELS", "/admin/keys", "/admin%2fkeys", "/%61dmin/keys", "/admin/keys/",
           "\\admin\\keys", "/v1/models/..%2f..%2fadmin")  # fmt: skip
    for path in odd:
        yield f"{path} with a key", t.head(path, method="GET"), (400, 403, 404, 405)
        yield f"{path} without", t.head(path, method="GET", key=None), (400, 401)
    names = (
        "../x",
        "%2e%2e",
        "a%00b",
        "%ff",
        "%ed%a0%80",
        "a/b",
        "%0d%0aSet-Cookie:a",
        "\u202e",
        "\uff41",
        "𝓪",
        "a" * 5000,
        "%",
        "%zz",
    )
    for name in names:
        quoted = name if "%" in name else urllib.parse.quote(name)
        yield f"model {name[:20]!r}", t.head(f"/v1/models/{quoted}", method="GET"), (400, 404)
        yield f"key {name[:20]!r}", t.head(f"/admin/keys/{quoted}", method="DELETE"), (400, 403, 404)
        yield f"model {name[:20]!r} in a body", t.post(json.dumps(t.chat | {"model": name}).encode()), (404,)


@attack
def strangers(t: Target) -> Iterator[Case]:
    """bodies that hang or are compressed, idle connections."""
    bomb = gzip.compress(bytes(2**27), 9)

    def many(count: int, said: bytes) -> list[int]:
        with contextlib.ExitStack() as stack:
            for _ in range(count):
                s = stack.enter_context(t.connect())
                with contextlib.suppress(OSError):
                    s.sendall(said)
            return [200 if t.honest() else 0]

    for key in (None, t.key):
        top = t.head("/v1/chat/completions", "Content-Encoding: gzip", f"Content-Length: {len(bomb)}", key=key)
        yield f"40 bombs, key {bool(key)}", lambda top=top: many(40, top + bomb), (200,)
    for n in (300, 600):
        yield (
            f"{n} bodies of one byte",
            lambda n=n: many(n, t.head("/v1/chat/completions", "Content-Length: 99") + b"{"),
            (200,),
        )
    yield "600 idle", lambda: many(600, b""), (200,)
    yield "600 half heads", lambda: many(600, t.head()[:40]), (200,)
    flood = t.post(json.dumps(t.chat | {"n": 32, "max_tokens": 400, "stream": True, "ignore_eos": True}).encode())
    yield "20 readers that do not read", lambda: many(20, flood), (200,)


@attack
def files(t: Target) -> Iterator[Case]:
    """the file of keys, damaged and mended."""
    if t.file is None:
        return
    good = t.file.read_bytes()
    for name, said in {
        "empty": b"",
        "half": good[: len(good) // 2],
        "no keys": b"[]x",
        "NUL": bytes(1000),
        "deep": b"[" * 10**5,
    }.items():

        def harm(said: bytes = said) -> list[int]:
            t.file.write_bytes(said)
            time.sleep(1.1)
            found = t.say(t.head("/v1/models", "Connection: close", method="GET"))
            t.file.write_bytes(good)
            return found

        yield name, harm, (200,)


def main() -> None:
    """Run all classes."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("port", type=int)
    for name in ("key", "other", "model"):
        p.add_argument(name)
    p.add_argument("--key-file", type=Path)
    args = p.parse_args()
    target = Target(args.port, args.key, args.other, args.model, args.key_file)
    print("| class | tried | passed |\n|---|---|---|")
    for name, cases in CLASSES.items():
        tried, failed = 0, []
        for case, what, statuses in cases(target):
            found = target.say(what) if isinstance(what, bytes) else what()
            tried += 1
            if not set(found) <= {*statuses} or not target.honest():
                failed.append(f"{case}: {sorted(set(found))}, expected {statuses}")
        print(f"| {name} | {tried} | {tried - len(failed)} |", flush=True)
        for line in failed:
            print(f"  {line}", flush=True)


if __name__ == "__main__":
    main()
