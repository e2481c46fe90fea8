"""Ask a model behind OpenAI's protocol: many questions at once, each a chat of its own. Needs no jax."""

import http.client
import json
import logging
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

log = logging.getLogger(__name__)
LONGEST = 2**22  # bytes of an answer that are read
BUSY = (408, 429, 500, 502, 503, 504)  # statuses that may pass


def ask_endpoint(
    base_url: str, model: str, *, key: str | None = None, timeout: float = 60.0, at_once: int = 16, tries: int = 3,
    pause: float = 0.5, **options: Any,
) -> Callable[[list[str]], list[str | None]]:  # fmt: skip
    """Build a way to ask an endpoint, for `judges.judge`: POST base_url/chat/completions, temperature 0 unless given.

    `at_once` questions are under way at a time; each has `tries` tries of `timeout` seconds, after pauses from `pause`
    seconds on, twice as long each time, where the endpoint was busy or not reached. `options` go into each request. A
    question that fails has no answer (None), and a warning says why; RuntimeError if all fail. `key` is sent to that
    address only: redirects are errors; it is in no log and no error.
    """
    if urllib.parse.urlsplit(base_url).scheme not in ("http", "https"):
        raise ValueError(f"base_url {base_url!r}; expected one of http:// or https://")
    if at_once < 1 or tries < 1:
        raise ValueError(f"at_once={at_once}, tries={tries}; expected 1 at least")
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    url, opener = base_url.rstrip("/") + "/chat/completions", urllib.request.build_opener(_Stay)

    def post(question: str) -> str:
        chat = [{"role": "user", "content": question}]
        body = json.dumps({"model": model, "temperature": 0.0, **options, "messages": chat}).encode()
        with opener.open(urllib.request.Request(url, body, headers), timeout=timeout) as answer:
            return read(_body(answer, time.monotonic() + timeout))

    def one(question: str) -> str | Exception:
        left = tries
        while True:
            try:
                return post(question)
            except (OSError, http.client.HTTPException, ValueError) as e:  # HTTPError is an OSError
                left -= 1
                if not left or not _passing(e):
                    return e
            time.sleep(pause * 2 ** (tries - left - 1))

    def ask(questions: list[str]) -> list[str | None]:
        with ThreadPoolExecutor(at_once) as pool:  # a question ends by its timeouts, and so do these threads
            found = list(pool.map(one, questions))
        errors = [x for x in found if isinstance(x, Exception)]
        if errors:
            said = f"{len(errors)} of {len(found)} questions failed at {url}: {_reason(errors[0], key)}"
            if len(errors) == len(found):
                raise RuntimeError(said)
            log.warning(said)
        return [x if isinstance(x, str) else None for x in found]

    return ask


def read(body: bytes) -> str:
    """Take the text out of an answer; ValueError if it has none."""
    if len(body) > LONGEST:
        raise ValueError(f"the answer has more than {LONGEST} bytes")
    try:
        said = json.loads(body)["choices"][0]["message"]["content"]
    except (ValueError, TypeError, KeyError, IndexError, RecursionError) as e:
        raise ValueError(f"the answer is no chat completion: {body[:200]!r}") from e
    if not isinstance(said, str):
        raise ValueError(f"the answer's content is a {type(said).__name__}; expected text")
    return said


def _body(answer: http.client.HTTPResponse, end: float) -> bytes:
    """Read an answer to its end, or `LONGEST` bytes; TimeoutError if it comes too slowly."""
    parts, size = [], 0
    while size <= LONGEST and (part := answer.read1(2**16)):
        parts.append(part)
        size += len(part)
        if time.monotonic() > end:
            raise TimeoutError("the answer comes too slowly")
    return b"".join(parts)


def _passing(error: Exception) -> bool:
    """Tell whether another try may find an answer."""
    if isinstance(error, urllib.error.HTTPError):
        return error.code in BUSY
    return not isinstance(error, ValueError)


class _Stay(urllib.request.HTTPRedirectHandler):
    """Follow no redirect, which would carry the key to another address."""

    def redirect_request(self, *args: Any) -> None:
        return None


def _reason(error: Exception, key: str | None) -> str:
    """Say what failed, without the key, which a server may repeat."""
    said = f"{type(error).__name__}: {error}"
    if isinstance(error, urllib.error.HTTPError):
        try:
            said += f" {error.read(300)!r}"
        except (OSError, http.client.HTTPException):
            pass  # the connection is gone, the status tells enough
    return said.replace(key, "(the key)") if key else said
