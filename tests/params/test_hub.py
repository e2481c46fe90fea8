"""The Hub: downloads, cache, offline mode and uploads against a small server that speaks its protocol."""

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fdel import params as P

SHA = "0123456789abcdef0123456789abcdef01234567"
REPOS = {
    "org/new": {
        "config.json": b'{"a": 1}', "model.safetensors": b"weights", "pytorch_model.bin": b"pickle",
        "tokenizer.json": b"{}", "chat_template.jinja": b"{{ x }}", "tokenizer.model": b"sp", "merges.txt": b"a b",
        "README.md": b"# x", "modeling.py": b"evil()", "consolidated.safetensors": b"again",
        "onnx/model.safetensors": b"other",
    },
    "org/old": {"config.json": b"{}", "pytorch_model.bin": b"pickle", "tf_model.h5": b"h5"},
    "org/secret": {"config.json": b"{}", "model.safetensors": b"hidden"},
}  # fmt: skip


class Hub(BaseHTTPRequestHandler):
    """The endpoints of the Hub that a download and an upload use."""

    def log_message(self, *args: object) -> None:
        pass

    def reply(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def json(self, value: object) -> None:
        self.reply(200, json.dumps(value).encode(), Content_Type="application/json")

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].strip("/")
        self.server.seen.append(f"{self.command} {path}")
        api = path.startswith("api/models/")
        parts = path.removeprefix("api/models/").split("/")
        repo = "/".join(parts[:2])
        files = REPOS.get(repo)
        if files is None or (repo == "org/secret" and self.headers.get("Authorization") != "Bearer hf_right"):
            return self.reply(401, X_Error_Code="RepoNotFound")
        oid = lambda name: hashlib.sha1(files[name]).hexdigest()
        if api and parts[2] == "tree":
            return self.json([{"type": "file", "path": n, "size": len(x), "oid": oid(n)} for n, x in files.items()])
        if api:
            if parts[3:] not in (["main"], [SHA], []):
                return self.reply(404, X_Error_Code="RevisionNotFound")
            return self.json({"id": repo, "sha": SHA, "siblings": [{"rfilename": n} for n in files]})
        name = "/".join(parts[4:])
        self.reply(200, files[name], ETag=f'"{oid(name)}"', X_Repo_Commit=SHA)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.posts.append((self.path, body))
        if self.path == "/api/repos/create":
            return self.json({"url": f"{self.url()}/org/mine", "name": "org/mine"})
        if "/preupload/" in self.path:
            names = [f["path"] for f in json.loads(body)["files"]]
            return self.json({"files": [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]})
        self.json({"commitUrl": f"{self.url()}/org/mine/commit/{SHA}", "commitOid": SHA, "success": True})


@pytest.fixture
def hub() -> Iterator[ThreadingHTTPServer]:
    """A running server on a free port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.seen, server.posts = [], []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def client(code: str, home: Path, hub: ThreadingHTTPServer | None, **env: str) -> list:
    """Run code that calls `out(value)` in a new interpreter (the Hub library reads its settings on import)."""
    prelude = """
import json
from fdel import params as P
def out(value): print("OUT " + json.dumps(value))
def tree(path): return {str(f.relative_to(path)): f.read_text() for f in sorted(path.rglob("*")) if f.is_file()}
def error(f, *args, **kw):
    try: out(["no error", str(f(*args, **kw))])
    except Exception as e: out([type(e).__name__, str(e)])
"""
    address = f"http://127.0.0.1:{hub.server_address[1]}" if hub else "http://127.0.0.1:9"
    settings = {
        "HF_ENDPOINT": address,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_XET": "1",
    }
    keep = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING")) and "proxy" not in k.lower()}
    root = str(Path(__file__).resolve().parents[2])
    run = subprocess.run(
        [sys.executable, "-c", prelude + code], env=keep | settings | {"PYTHONPATH": root} | env,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return [json.loads(line[4:]) for line in run.stdout.splitlines() if line.startswith("OUT ")]


@pytest.mark.slow
def test_download_cache_and_offline(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub", reason="needs the hub extra")
    new, old, main, again, secret, missing, revision = client(
        """
for repo in ("org/new", "org/old"):
    out(tree(P.resolve(repo)))
out(str(P.resolve("org/new", revision="main")))
out(str(P.resolve("org/new")))
error(P.resolve, "org/secret")
error(P.resolve, "org/missing")
error(P.resolve, "org/new", revision="v9")
""",
        tmp_path,
        hub,
    )
    wanted = [
        "chat_template.jinja",
        "config.json",
        "merges.txt",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer.model",
    ]
    assert sorted(new) == wanted and new["model.safetensors"] == "weights"
    assert sorted(old) == ["config.json", "pytorch_model.bin"]
    assert main == again and main.startswith(str(tmp_path)) and SHA in main
    got = [x for x in hub.seen if x.startswith("GET org/new")]
    assert len(got) == len(wanted)  # each file once, and nothing else
    assert [secret[0], missing[0], revision[0]] == ["RepositoryNotFoundError"] * 2 + ["RevisionNotFoundError"]

    (allowed,) = client('out(tree(P.resolve("org/secret")))', tmp_path, hub, HF_TOKEN="hf_right")
    assert allowed["model.safetensors"] == "hidden"

    seen = len(hub.seen)
    cached, gone = client(
        'out(tree(P.resolve("org/new")))\nerror(P.resolve, "org/gone")', tmp_path, hub, HF_HUB_OFFLINE="1"
    )
    assert cached == new and len(hub.seen) == seen  # no request was made
    assert gone[0] == "FileNotFoundError"
    assert "org/gone is neither a local directory nor complete in the Hub cache, and the Hub is out of reach" in gone[1]


@pytest.mark.slow
def test_a_cache_made_by_hand_and_no_network(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub", reason="needs the hub extra")
    repo = tmp_path / "hub" / "models--org--hand"
    snapshot = repo / "snapshots" / SHA
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").write_text("w")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(SHA)
    code = 'out(str(P.resolve("org/hand")))\nerror(P.resolve, "org/gone")'
    found, gone = client(code, tmp_path, None)
    assert found == str(snapshot)
    assert gone[0] == "FileNotFoundError" and "out of reach" in gone[1]
    code = f'out(str(P.resolve("org/hand", revision="{SHA}")))'
    assert client(code, tmp_path, None, HF_HUB_OFFLINE="1") == [str(snapshot)]


def test_push(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub", reason="needs the hub extra")
    directory = tmp_path / "model"
    (directory / ".partial-x").mkdir(parents=True)
    (directory / ".partial-x" / "model.safetensors").write_text("half")
    (directory / "model.safetensors").write_text("weights")
    (directory / "config.json").write_text("{}")
    code = """
from pathlib import Path
out(P.push(Path({0!r}), "org/mine"))
out(P.push({0!r}, "org/mine", private=False, message="Second"))
"""
    urls = client(code.format(str(directory)), tmp_path / "home", hub, HF_TOKEN="hf_right")
    assert urls == [f"http://127.0.0.1:{hub.server_address[1]}/org/mine/commit/{SHA}"] * 2
    made = [json.loads(body) for path, body in hub.posts if path == "/api/repos/create"]
    assert [x.get("visibility", x.get("private")) in ("private", True) for x in made] == [True, False]
    commits = [[json.loads(line) for line in body.splitlines()] for path, body in hub.posts if "/commit/" in path]
    for lines, message in zip(commits, ["Upload a checkpoint with fdel", "Second"], strict=True):
        assert lines[0]["value"]["summary"] == message
        sent = {x["value"]["path"]: base64.b64decode(x["value"]["content"]) for x in lines[1:]}
        assert sent == {"model.safetensors": b"weights", "config.json": b"{}"}


def test_a_local_directory_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # not needed for this
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert P.resolve("org/model") == Path("org/model")
    assert P.resolve(tmp_path) == tmp_path
    with pytest.raises(ValueError, match="local directory, which has no revision 'v1'"):
        P.resolve("org/model", revision="v1")


@pytest.mark.parametrize("name", ["./model", "../model", "/nowhere/model", "~/no-such-model", "a/b/c", "a\\b"])
def test_paths_are_not_taken_for_ids(name: str) -> None:
    with pytest.raises(FileNotFoundError, match="is not a directory; expected one, or a Hub id"):
        P.resolve(name)


def test_a_file_is_no_checkpoint_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.safetensors").touch()
    with pytest.raises(FileNotFoundError, match="is not a directory"):
        P.resolve("model.safetensors")


def test_without_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"org/x is not a local directory; .*pip install 'fdel\[hub\]'"):
        P.resolve("org/x")
    with pytest.raises(FileNotFoundError, match="save a checkpoint there first"):
        P.push(tmp_path, "org/x")
    (tmp_path / "config.json").touch()
    with pytest.raises(ImportError, match=r"uploading needs huggingface_hub: pip install 'fdel\[hub\]'"):
        P.push(tmp_path, "org/x")
