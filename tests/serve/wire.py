"""A small server in a thread, and raw requests to it: what tests of the server over a socket share."""

import asyncio
import contextlib
import dataclasses
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

from fdel import models, text
from fdel.serve.engine.engine import Engine, Settings
from fdel.serve.server import auth, grammar, keyfile, metrics
from fdel.serve.server import http as server_http
from fdel.serve.server.call import Server
from fdel.serve.server.served import ServedModel
from fdel.serve.server.worker_pool import WorkerPool
from tests.serve import small

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if tools %}<tool_call>{% endif %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = ["a b c d e f g h i j k l m n o p q r s t u v w x y z", "the weather in Paris is fine, the music is not"]
CHAT = {"model": "small", "messages": [{"role": "user", "content": "the weather"}], "temperature": 0, "max_tokens": 12}
LONG = CHAT | {"max_tokens": 150, "ignore_eos": True}


def tokenizer() -> text.Tokenizer:
    tok = text.train_bpe(WORDS, small.VOCAB - 10, ["<|im_start|>", "<|im_end|>"])
    return dataclasses.replace(tok, templates={"default": TEMPLATE}, eos_ids=(small.EOS,))


def make_state(model: models.Model, keys=None, path: Path | None = None) -> Server:
    """A server of an engine that runs; all have the same programs."""
    tok = tokenizer()
    sizes = Settings(rows=4, batches=(4,), max_length=small.CONTEXT, budget=64, queue=64, max_loras=1, max_lora_rank=4)
    engine = Engine(model, sizes, tokenizer=tok)
    served = ServedModel("small", engine, tok, 1.0, grammar.Vocabulary(tok, small.VOCAB), format="hermes")
    engine.start(wait=True)
    return Server(
        {"small": served},
        metrics.Metrics(metrics.serving(["small"], server_http.PATHS)),
        keys,
        path and keyfile.Watch(path),
    )


@contextlib.contextmanager
def listening(state: Server) -> Iterator[int]:
    """Answer in a thread; yields the port."""
    started, found, end = threading.Event(), [], []

    async def serve_it() -> None:
        runner = server_http.runner(state)
        await runner.setup()
        await server_http.web.TCPSite(runner, "127.0.0.1", 0).start()
        end[:] = [asyncio.get_running_loop(), asyncio.Event()]
        found.append(runner.addresses[0][1])
        started.set()
        await end[1].wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: asyncio.run(serve_it()), daemon=True)
    thread.start()
    assert started.wait(60)
    yield found[0]
    end[0].call_soon_threadsafe(end[1].set)
    thread.join(30)


@contextlib.contextmanager
def server(model: models.Model, folder: Path) -> Iterator[SimpleNamespace]:
    """Yield a server's port, secrets by role, state, model and file of keys."""
    path = folder / "keys.json"
    made = {role: auth.create(role, role, 0.0) for role in auth.ROLES}
    made["slow"] = auth.create("slow", "user", 0.0, requests_per_minute=2)
    keyfile.save(path, [key for key, _ in made.values()])
    state = make_state(model, keyfile.load(path), path)
    served = state.models["small"]
    try:
        with listening(state) as port:
            secrets = {name: secret for name, (_, secret) in made.items()}
            yield SimpleNamespace(port=port, secrets=secrets, state=state, served=served, path=path)
    finally:
        served.engine.close()


@contextlib.contextmanager
def also(running, *served: ServedModel) -> Iterator[None]:
    """Serve other models meanwhile, whose engines run."""
    models, workers = running.state.models, running.state.workers
    running.state.models = {**models, **{s.name: s for s in served}}
    running.state.workers = WorkerPool({name: s.encoder.facts() for name, s in running.state.models.items()})
    for s in served:
        running.state.metrics.extend("model", s.name)
    try:
        yield
    finally:
        running.state.workers.close()
        running.state.workers.process.wait()
        running.state.models, running.state.workers = models, workers


def call(running, method, path, body=None, role="user", headers=None):
    """(status, JSON or text, headers) of a raw request."""
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=60)
    sent = {"Authorization": f"Bearer {running.secrets[role]}"} if role else {}
    if isinstance(body, dict | list):
        body = json.dumps(body)
    sent |= {"Content-Type": "application/json"} if body is not None else {}
    try:
        connection.request(method, path, body, sent | (headers or {}))
        response = connection.getresponse()
        raw = response.read()
        kind = response.getheader("Content-Type", "")
        return response.status, json.loads(raw) if "json" in kind and raw else raw.decode(), dict(response.getheaders())
    finally:
        connection.close()


def chat(running, body=None, **options):
    """(status, JSON, headers) of a chat; `body` changes CHAT."""
    return call(running, "POST", "/v1/chat/completions", CHAT | (body or {}), **options)


def open_chat(running, body, role="user") -> http.client.HTTPConnection:
    """Send a chat and read nothing yet."""
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=60)
    headers = {"Authorization": f"Bearer {running.secrets[role]}", "Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(CHAT | body), headers)
    return connection


def raw(running, *pieces: bytes, wait: float = 30.0) -> bytes:
    """Write bytes to a socket as they are, and read until the server closes it or says nothing for `wait` seconds."""
    with socket.create_connection(("127.0.0.1", running.port), timeout=wait) as s:
        out = b""
        with contextlib.suppress(OSError):
            for piece in pieces:
                s.sendall(piece)
            while data := s.recv(65536):
                out += data
        return out


def refusal(said: bytes) -> tuple[int, dict, dict]:
    """(status, JSON, headers) of a raw answer."""
    top, _, body = said.partition(b"\r\n\r\n")
    first, *lines = top.decode().split("\r\n")
    return (
        int(first.split()[1]),
        json.loads(body),
        {k.lower(): v for k, _, v in (line.partition(": ") for line in lines)},
    )


def head(running, path: str, *lines: str, role: str = "user", method: str = "POST") -> bytes:
    """The head of a raw request."""
    first = (f"{method} {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {running.secrets[role]}")
    return "\r\n".join([*first, *lines, "", ""]).encode()


def frames(said: str) -> list[dict]:
    """The JSON of a stream's events."""
    return [json.loads(line[6:]) for line in said.splitlines() if line.startswith("data: {")]


def at_rest(running) -> bool:
    """Whether the engine holds nothing."""
    stats = running.served.engine.stats()
    return stats["running"] == stats["waiting"] == 0 and stats["free pages"] == stats["pages"]


def wait_for(condition) -> None:
    """Wait, at most 30 seconds, until something holds."""
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def sample(running, name: str, **labels: str) -> float:
    """A value of /metrics."""
    said = call(running, "GET", "/metrics", role="readonly")[1]
    wanted = {f'{k}="{v}"' for k, v in labels.items()}
    for line in said.splitlines():
        found, _, value = line.rpartition(" ")
        inside = found.partition("{")[2].rstrip("}")
        if found.partition("{")[0] == name and set(filter(None, inside.split(","))) == wanted:
            return float(value)
    raise AssertionError((name, labels))
