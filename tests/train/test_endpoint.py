"""A judge behind OpenAI's protocol: what it is sent, what it answers, and what it may do instead."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from fdel.train.rollout.endpoint import LONGEST, ask_endpoint, read

KEY = "sk-hush"


def completion(content) -> bytes:
    return json.dumps({"choices": [{"index": 0, "message": {"role": "assistant", "content": content}}]}).encode()


class Judge(BaseHTTPRequestHandler):
    """Answers a question as its text says."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, self.headers["Authorization"], body))
        word, _, rest = body["messages"][0]["content"].partition(" ")
        count = sum(body == b for _, _, b in self.server.seen)
        busy = word == "busy" and count <= int(rest)
        status = {"wrong": 400, "elsewhere": 307}.get(word, 503 if busy else 200)
        answer = {"wrong": KEY.encode() * 2, "words": b"yes", "none": completion(None), "long": b" " * (LONGEST + 9)}
        self.send_response(status)
        self.send_header("Location", rest)
        self.end_headers()
        if word == "slow":
            for _ in range(50):
                self.wfile.write(b" ")
                time.sleep(0.02)
        self.wfile.write(answer.get(word, completion(f"{word}!")))

    do_GET = do_POST

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    """One that many connect to at once."""

    request_queue_size = 64


@pytest.fixture
def server():
    with Server(("127.0.0.1", 0), Judge) as made:
        made.seen, made.url = [], f"http://127.0.0.1:{made.server_address[1]}"
        made.handle_error = lambda *_: None  # a client that hangs up
        thread = threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield made
        made.shutdown()


def test_what_is_sent_and_answered(server):
    ask = ask_endpoint(server.url + "/v1/", "the-judge", key=KEY, max_tokens=5)
    assert ask([f"q{i} é" for i in range(40)]) == [f"q{i}!" for i in range(40)]
    assert ask([]) == [] and len(server.seen) == 40
    path, key, body = min(server.seen, key=str)
    assert path == "/v1/chat/completions" and key == f"Bearer {KEY}"
    message = {"role": "user", "content": "q0 é"}
    assert body == {"model": "the-judge", "temperature": 0.0, "max_tokens": 5, "messages": [message]}
    ask_endpoint(server.url, "the-judge", temperature=1.0)(["q"])
    assert server.seen[-1][1:] == (None, {**server.seen[-1][2], "temperature": 1.0})


def test_what_openai_answers_is_read():
    chat = pytest.importorskip("openai.types.chat.chat_completion")
    message = {"role": "assistant", "content": "7 é"}
    choice = {"index": 0, "finish_reason": "stop", "message": message, "logprobs": None}
    said = {"id": "x", "created": 1, "model": "m", "object": "chat.completion", "choices": [choice]}
    assert read(chat.ChatCompletion.model_validate(said).model_dump_json().encode()) == "7 é"


def test_questions_that_fail_have_no_answer(server, caplog):
    ask = ask_endpoint(server.url, "j", key=KEY, pause=0.01, tries=3)
    other = f"elsewhere {server.url}/stolen"
    asked = ["busy 2", "busy 3", "wrong", "words", "none", "long", other, "fine"]
    assert ask(asked) == ["busy!", None, None, None, None, None, None, "fine!"]
    (warning,) = caplog.messages
    assert "6 of 8 questions failed" in warning and "503" in warning and KEY not in warning
    tried = lambda word: sum(b["messages"][0]["content"] == word for _, _, b in server.seen)
    assert [tried(x) for x in asked] == [3, 3, 1, 1, 1, 1, 1, 1]
    assert {path for path, *_ in server.seen} == {"/chat/completions"}


@pytest.mark.parametrize(
    ("question", "why"),
    [
        ("wrong", r"HTTP Error 400: Bad Request b'\(the key\)\(the key\)'"), ("words", "no chat completion: b'yes'"),
        ("none", "content is a NoneType"), ("long", f"more than {LONGEST} bytes"), ("elsewhere /x", "HTTP Error 307"),
        ("slow", "TimeoutError: the answer comes too slowly"),
    ],
)  # fmt: skip
def test_all_that_fail_are_an_error(server, question, why):
    with pytest.raises(RuntimeError, match=f"1 of 1 questions failed at http.*: .*{why}"):
        ask_endpoint(server.url, "j", key=KEY, tries=1, timeout=0.3)([question])


def test_an_endpoint_that_is_not_there():
    with pytest.raises(RuntimeError, match="1 of 1 questions failed .*refused"):
        ask_endpoint("http://127.0.0.1:9/v1", "j", pause=0.01)(["q"])
    with pytest.raises(ValueError, match="one of http:// or https://"):
        ask_endpoint("file:///etc", "j")
    with pytest.raises(ValueError, match="tries=0; expected 1"):
        ask_endpoint("http://x", "j", tries=0)
