"""What a connection may cost before and after its requests: strangers' bodies, malformed HTTP, readers that do not read."""

import contextlib
import gzip
import json
import logging
import re
import socket
import time

import pytest

from tests.serve.wire import CHAT, call, chat, head, raw, sample


def refusal(said: bytes) -> tuple[int, dict, dict]:
    """(status, JSON, headers) of a raw answer."""
    top, _, body = said.partition(b"\r\n\r\n")
    first, *lines = top.decode().split("\r\n")
    return (
        int(first.split()[1]),
        json.loads(body),
        {k.lower(): v for k, _, v in (line.partition(": ") for line in lines)},
    )


# ---- bodies that nobody wants ----------------------------------------------------------------------------------------

BOMB = gzip.compress(bytes(2**27), 9)  # 127 KiB


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/health", "/nothing"])
def test_bodies_of_strangers_are_not_inflated(running, path):
    """Forty of them at once keep the server from an honest client for less than inflating one takes."""
    begin = time.process_time()
    gzip.decompress(BOMB)
    one = time.process_time() - begin
    top = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Encoding: gzip\r\n"
    with contextlib.ExitStack() as stack:
        all_ = [
            stack.enter_context(socket.create_connection(("127.0.0.1", running.port), timeout=30)) for _ in range(40)
        ]
        begin = time.process_time()
        for s in all_:
            s.sendall(f"{top}Content-Length: {len(BOMB)}\r\n\r\n".encode() + BOMB)
        assert call(running, "GET", "/health", role=None)[0] == 200
        for s in all_:
            assert s.recv(12) == b"HTTP/1.1 %d" % 401
        assert time.process_time() - begin < 20 * one


@pytest.mark.parametrize("role", ["user", None])
def test_what_is_not_read_is_thrown_away(running, role):
    """The answer says that the connection ends; whoever still sends gets it all the same, and no second request in."""
    key = f"Authorization: Bearer {running.secrets[role]}\r\n" if role else ""
    top = f"POST /v1/models HTTP/1.1\r\nHost: a\r\n{key}Content-Length: 4000000\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", running.port), timeout=30) as s:
        s.sendall(top + b"x" * 4_000_000 + b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        said = b""
        while data := s.recv(65536):
            said += data
    status, _, headers = refusal(said)
    assert status == (405 if role else 401) and headers["connection"] == "close"


def test_a_compressed_body_with_a_key_is_refused_by_name(running):
    top = head(running, "/v1/chat/completions", "Content-Type: application/json", "Content-Encoding: gzip",
               "Connection: close", f"Content-Length: {len(BOMB)}")  # fmt: skip
    status, said, _ = refusal(raw(running, top, BOMB, wait=10))
    assert status == 415 and said["error"]["code"] == "unsupported_encoding"


def test_nobody_is_asked_to_send_what_will_be_refused(running):
    """Expect: 100-continue: a 100 comes only to who may send the body."""
    lines = ("Content-Type: application/json", "Expect: 100-continue", f"Content-Length: {len(json.dumps(CHAT))}")
    top = head(running, "/v1/chat/completions", *lines)
    with socket.create_connection(("127.0.0.1", running.port), timeout=30) as s:
        s.sendall(top)
        assert s.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        s.sendall(json.dumps(CHAT).encode())
        assert s.recv(1000).startswith(b"HTTP/1.1 200")
    stranger = re.sub(b"Bearer [^\r]*", b"Bearer x", top)
    status, _, headers = refusal(raw(running, stranger, wait=10))
    assert status == 401 and headers["connection"] == "close"
    odd = head(running, "/v1/chat/completions", lines[0], "Expect: pigs", "Content-Length: 9")
    status, said, _ = refusal(raw(running, odd, wait=10))
    assert status == 417 and said["error"]["code"] == "expectation_failed"


# ---- malformed HTTP ---------------------------------------------------------------------------------------------------

MALFORMED = [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
             b"GET / HTTP/1.1\r\nHost a\r\n\r\n", b"G\x00T / HTTP/1.1\r\n\r\n",
             b"GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", b"GET /\xff\x80 HTTP/9.9\r\n\r\n",
             b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 1000 + b"\r\n"]  # fmt: skip


@pytest.mark.parametrize("said", MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_http_is_refused_as_all_else_is(running, said):
    before = sample(running, "fdel_http_requests_total", route="other", status="4xx")
    status, error, headers = refusal(raw(running, said, wait=5))
    assert status == 400 and error["error"]["code"] == "malformed_http" and headers["x-request-id"].startswith("req_")
    assert headers["content-type"].startswith("application/json")
    assert sample(running, "fdel_http_requests_total", route="other", status="4xx") == before + 1


def test_malformed_http_does_not_fill_the_log(running, caplog):
    """A line now and then, that counts; it has no traceback, and nothing in it that a terminal would obey."""
    with caplog.at_level(logging.DEBUG):
        for _ in range(30):
            raw(running, b"GET / HTTP/1.1\r\n\x1b[2J" + b"x" * 3000 + b"\r\n\r\n", wait=5)
    lines = [r for r in caplog.records if r.name != "fdel.audit"]
    assert len(lines) <= 2 and not any(r.exc_info for r in lines)
    assert all(len(r.getMessage()) < 300 and r.getMessage().isprintable() for r in lines)


@pytest.mark.parametrize("version", ["", " HTTP/0.9", " HTTP/2.0"])
def test_other_versions_of_http_are_refused(running, version):
    status = raw(running, f"GET /health{version}\r\n\r\n".encode(), wait=5)[9:12]
    assert status in (b"400", b"505")


def test_every_answer_says_who_serves_and_forbids_guessing(running):
    """Also where the protocol is broken, where nothing is found, and in a stream."""
    found = [chat(running)[2], chat(running, {"stream": True})[2], call(running, "GET", "/nothing")[2],
             call(running, "GET", "/health", role=None)[2], call(running, "GET", "/", role=None)[2],
             call(running, "OPTIONS", "/v1/models")[2]]  # fmt: skip
    found = [{k.lower(): v for k, v in headers.items()} for headers in found]
    for headers in [*found, refusal(raw(running, MALFORMED[1], wait=5))[2]]:
        assert headers["server"] == "fdel" and headers["x-content-type-options"] == "nosniff"
        assert headers["x-request-id"].startswith("req_")


def test_two_keys_in_one_request_are_none(running):
    """A proxy and this server might each look at another one."""
    top = head(
        running, "/v1/models", f"Authorization: Bearer {running.secrets['admin']}", "Connection: close", method="GET"
    )
    assert refusal(raw(running, top, wait=5))[0] in (400, 401)
