"""A tiny server and raw clients of it, which can leave and read slowly: for faults.py and endure.py."""

import asyncio
import contextlib
import http.client
import io
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

VOCAB, CONTEXT = 300, 256  # of the tiny model


def checkpoint(directory: str) -> None:
    """Save a tiny random llama with weights large enough to make some tokens likely, and a tokenizer that knows tools."""
    import dataclasses

    import jax

    from fdel import models, params, text
    from fdel.models import llama

    cfg = llama.Config.from_hf(dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                                    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=CONTEXT,
                                    eos_token_id=7))  # fmt: skip
    weights = params.init(llama.spec(cfg), jax.random.key(0))
    big = jax.tree.map(lambda x: x * 10 if x.ndim > 1 else x, weights)
    models.save(models.Model(llama, cfg, big), directory)
    words = "a b c d e f g h i j k l m n o p q r s t u v w x y z the weather in Paris is fine, the music is not"
    template = "{% for m in messages %}{{ m.content }} {% endfor %}{% if tools %}<tool_call>{% endif %}"
    text.save(dataclasses.replace(text.train_bpe([words], 290), templates={"default": template}), directory)


@contextlib.contextmanager
def process(directory: str, *arguments: str) -> Iterator[subprocess.Popen]:
    """Run a server in Python and wait until it says that it listens; what it says stands in the directory's file `log`."""
    command = [sys.executable, *arguments]
    with open(Path(directory) / "log", "a+") as log:
        begin = log.seek(0, 2)
        running = subprocess.Popen(command, stderr=log)
        try:
            while True:
                log.seek(begin)
                if re.search(r"http://[^/]+", log.read()):
                    break
                if running.poll() is not None:
                    log.seek(begin)
                    raise RuntimeError(f"the server did not start:\n{log.read()[-2000:]}")
                time.sleep(0.1)
            yield running
        finally:
            running.kill()
            running.wait()


def resident(pid: int) -> float:
    """Memory of a process in MB."""
    return int(Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()[0]) / 1024


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


# ---- a client ------------------------------------------------------------------------------------------------------


def post(path: str, raw: bytes, *headers: str) -> bytes:
    """Write a request that asks for one answer."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    head += "".join(f"{h}\r\n" for h in headers)
    return f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw


def answer(raw: bytes) -> tuple[int, bytes]:
    """Read (status, body) of all that came over a connection; IncompleteRead or BadStatusLine if it was cut."""

    class Socket:
        def makefile(self, *_):
            return io.BytesIO(raw)

    response = http.client.HTTPResponse(Socket())  # type: ignore[arg-type]
    response.begin()
    return response.status, response.read()


async def exchange(port: int, sent: bytes, leave: float = float("inf"), pause: float = 0.0) -> bytes | None:
    """Send a request and read all that comes; None if the client left after `leave` seconds. `pause` slows reading."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**16 if not pause else 256)
    try:
        async with asyncio.timeout(leave if leave < 1e9 else None):
            with contextlib.suppress(ConnectionError):  # of a body that is refused before it is read
                writer.write(sent)
                await writer.drain()
            got = b""
            while part := await reader.read(65536 if not pause else 128):
                got += part
                await asyncio.sleep(pause)
            return got
    except TimeoutError:
        return None
    finally:
        writer.transport.abort()  # no polite end
