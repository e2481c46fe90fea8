"""What a connection may cost before and after its requests: strangers' bodies, malformed HTTP, readers that do not read."""

import contextlib
import gzip
import json
import logging
import re
import socket
import time

import pytest

from tests.serve.wire import CHAT, call, chat, head, raw, refusal, sample

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


# ---- without keys: what a web page of somebody else may make a browser send -------------------------------------------


def ask(running, path="/v1/models", method="GET", body=None, **headers) -> int:
    """The status of a request with these headers (_ for -) and no key."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return call(running, method, path, body, role=None, headers=named)[0]


@pytest.fixture
def open_to_all(running, monkeypatch):
    """The server without keys."""
    monkeypatch.setattr(running.state, "keys", None)
    return running


OWN = ("localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.9:1", "[::1]:8000", "own.example:8000")
OTHER = ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "127.0.0.1@evil.example", "evil.example:127",
         "[::2]", "10.0.0.1", "[", "", "127.1", "localhost@x")  # fmt: skip


@pytest.mark.parametrize("host", [*OWN, *OTHER])
def test_a_name_that_leads_here_by_rebinding_is_refused(open_to_all, monkeypatch, host):
    """Without keys, this machine's own names alone, and that of --host."""
    monkeypatch.setattr(open_to_all.state, "hosts", ("own.example",))
    assert ask(open_to_all, Host=host) == (200 if host in OWN else 403)
    assert ask(open_to_all, "/health", Host=host) == 200
    monkeypatch.setattr(open_to_all.state, "hosts", None)  # beyond this machine, by --insecure
    assert ask(open_to_all, Host=host) == 200


def test_who_names_no_host_is_no_browser(open_to_all):
    assert raw(open_to_all, b"GET /v1/models HTTP/1.0\r\n\r\n", wait=5).startswith(b"HTTP/1.0 200")


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_pages_of_others_may_not_ask(open_to_all, method):
    path, body = ("/v1/models", None) if method == "GET" else ("/v1/chat/completions", CHAT)
    own = f"127.0.0.1:{open_to_all.port}"
    asks = lambda **headers: ask(open_to_all, path, method, body, **headers)
    for site, status in {"cross-site": 403, "same-site": 403, "same-origin": 200, "none": 200, "new": 403}.items():
        assert asks(Sec_Fetch_Site=site) == status
    for origin, status in {f"http://{own}": 200, f"https://{own}": 200, "null": 403, "http://127.0.0.1:1": 403,
                           "http://evil.example": 403, f"http://{own}.evil.example": 403, "": 403}.items():  # fmt: skip
        assert asks(Origin=origin) == status
    assert asks(Origin=f"http://{own}", Sec_Fetch_Site="cross-site") == 403


def test_a_link_to_the_playground_works(open_to_all):
    """Another page may lead there, and nowhere else."""
    lead = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate"}
    assert ask(open_to_all, "/", **lead) == 200
    assert ask(open_to_all, "/v1/models", **lead) == 403 and ask(open_to_all, "/", Sec_Fetch_Site="cross-site") == 403


def test_with_keys_the_page_that_asks_does_not_matter(running):
    """A browser sends none by itself."""
    headers = {"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site", "Host": "evil.example"}
    assert call(running, "GET", "/v1/models", headers=headers)[0] == 200


@pytest.mark.parametrize("keys", [False, True])
def test_an_empty_post_changes_nothing(running, monkeypatch, keys):
    """A form or `fetch` of any page can send one, but not with this content type."""
    if not keys:
        monkeypatch.setattr(running.state, "keys", None)
    role = "admin" if keys else None
    try:
        for kind in (None, "text/plain", "application/x-www-form-urlencoded"):
            headers = {"Content-Type": kind} if kind else {}
            assert call(running, "POST", "/admin/drain", role=role, headers=headers)[0] == 415
        assert not running.state.draining
        assert call(running, "POST", "/admin/drain", role=role, headers={"Content-Type": "application/json"})[0] == 200
    finally:
        running.state.draining = False


def test_the_document_asks_for_keys_where_the_server_does(running, monkeypatch):
    asks = lambda role: "'security'" in str(call(running, "GET", "/openapi.json", role=role)[1])
    assert asks("user")
    monkeypatch.setattr(running.state, "keys", None)
    assert not asks(None)
