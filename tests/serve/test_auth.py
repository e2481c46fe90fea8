"""Keys, scopes, rates and the audit log: no secret is kept or written, no rate is exceeded."""

import hashlib
import json
import os
import re
import stat
import subprocess
import sys

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fdel import cli
from fdel.serve.server import auth, keyfile
from fdel.serve.server.auth import Key, Rates
from fdel.serve.server.openai import APIError, body
from fdel.serve.server.openai.schema import SCHEMAS


def test_a_key_is_found_by_its_secret_only() -> None:
    made = [auth.create(f"n{i}", role, 12.0) for i, role in enumerate(auth.ROLES)]
    keys = {key.hash: key for key, _ in made}
    secrets = {secret for _, secret in made}
    assert len(secrets) == len({key.id for key, _ in made}) == len(made)
    for key, secret in made:
        assert auth.SECRET.fullmatch(secret) and key.hash == hashlib.sha256(secret.encode()).hexdigest()
        assert auth.authenticate(keys, f"Bearer {secret}") is auth.authenticate(keys, f"bearer {secret}") is key
        assert secret not in repr(key) and secret[5:] not in json.dumps(key.__dict__)
    secret = made[0][1]
    wrong = [None, "", "Bearer", "Bearer ", secret, f"Basic {secret}", f"Bearer {secret} ", f"Bearer  {secret}",
             "Bearer é\udcff", f"Bearer {secret[:-1]}", f"Bearer {secret}x", f"Bearer {made[0][0].hash}",
             f"Bearer {made[0][0].id}", "Bearer " + "a" * 10**6]  # fmt: skip
    messages = set()
    for header in wrong:
        with pytest.raises(APIError) as e:
            auth.authenticate(keys, header)
        assert e.value.status == 401 and e.value.code == "invalid_api_key"
        jsonschema.validate(body.error(e.value), SCHEMAS["error"])
        messages.add(e.value.message)
    assert len(messages) == 1  # nothing tells one wrong key from another
    assert len(re.findall("[A-Za-z0-9_-]", secret[5:])) * 6 >= 256


def test_file(tmp_path) -> None:
    made = [
        auth.create("a", "user", 1.5, requests_per_minute=3, tokens_per_minute=None),
        auth.create("b", "admin", 2.0),
    ]
    path = tmp_path / "keys.json"
    keyfile.save(path, [key for key, _ in made])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and [p.name for p in tmp_path.iterdir()] == ["keys.json"]
    assert not any(secret in path.read_text() for _, secret in made)
    assert keyfile.load(path) == {key.hash: key for key, _ in made}
    path.chmod(0o644)
    keyfile.save(path, [made[0][0]])  # replaces the file, and its mode with it
    assert list(keyfile.load(path).values()) == [made[0][0]]
    for mode in (0o640, 0o604, 0o660):
        path.chmod(mode)
        with pytest.raises(ValueError, match=f"mode {mode:04o}"):
            keyfile.load(path)
    path.chmod(0o600)
    row = json.loads(path.read_text())[0]
    broken = ["{", "[1]", "1", json.dumps([row | {"x": 1}]), json.dumps([row | {"role": "root"}]), json.dumps([row, row]),
              json.dumps([row | {"hash": made[0][1]}]), json.dumps([row | {"requests_per_minute": -1}]),
              json.dumps([row | {"tokens_per_minute": True}])]  # fmt: skip
    for said in broken:
        path.write_text(said)
        with pytest.raises(ValueError, match="key") as e:
            keyfile.load(path)
        assert made[0][1] not in str(e.value)


def test_scopes() -> None:
    table = {"admin": "models infer metrics admin", "service": "models infer metrics", "user": "models infer",
             "readonly": "models metrics"}  # fmt: skip
    for role, allowed in table.items():
        key = auth.create("k", role, 0)[0]
        for scope in (*auth.SCOPES, "unknown", ""):
            if scope in allowed.split():
                auth.authorize(key, scope)
            else:
                with pytest.raises(APIError, match=f"role {role} cannot") as e:
                    auth.authorize(key, scope)
                assert e.value.status == 403
    with pytest.raises(ValueError, match="role 'root'"):
        auth.create("k", "root", 0)


def key_with(requests: float | None, tokens: float | None) -> Key:
    return auth.create("k", "user", 0, requests_per_minute=requests, tokens_per_minute=tokens)[0]


def admitted(rates: Rates, key: Key, tokens: int, now: float) -> bool:
    try:
        rates.admit(key, tokens, now)
        return True
    except APIError as e:
        assert e.status == 429 and e.code == "rate_limit_exceeded" and int(e.headers["Retry-After"]) >= 1
        return False


def test_rates_of_requests() -> None:
    rates, key, other = Rates(), key_with(3, None), key_with(1, None)
    assert [admitted(rates, key, 10**9, 100.0) for _ in range(4)] == [True, True, True, False]
    assert admitted(rates, other, 1, 100.0)  # a bucket of its own
    with pytest.raises(APIError) as e:
        rates.admit(key, 1, 105.0)
    assert e.value.headers["Retry-After"] == "15"
    assert not admitted(rates, key, 1, 119.9) and admitted(rates, key, 1, 120.0) and not admitted(rates, key, 1, 120.0)
    assert not admitted(rates, key, 1, 0.0)  # a clock that goes back gives nothing
    assert all(admitted(Rates(), key_with(None, None), 10**9, 0.0) for _ in range(9))


def test_rates_of_tokens() -> None:
    rates, key = Rates(), key_with(None, 600)
    assert admitted(rates, key, 500, 0.0) and not admitted(rates, key, 200, 0.0) and admitted(rates, key, 100, 0.0)
    rates.settle(key, 500, 100, 0.0)
    assert admitted(rates, key, 400, 0.0) and not admitted(rates, key, 1, 0.0)
    assert admitted(rates, key, 10, 1.0)  # ten in a second
    rates.settle(key, 10, 40, 1.0)  # used more than was thought
    assert not admitted(rates, key, 1, 3.9) and admitted(rates, key, 10, 5.0)
    big = key_with(None, 600)
    assert admitted(rates, big, 6000, 0.0)  # more than a bucket holds: from a full one, and owed
    assert not admitted(rates, big, 1, 530.0) and admitted(rates, big, 1, 541.0)


def test_a_refused_request_takes_nothing() -> None:
    rates, key = Rates(), key_with(2, 100)
    assert admitted(rates, key, 100, 0.0) and not admitted(rates, key, 100, 0.0)
    before = dict(rates.buckets)
    assert not admitted(rates, key, 50, 0.0) and rates.buckets == before


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(0, 80), st.integers(0, 80)), max_size=30))
def test_rates_are_never_exceeded(events: list) -> None:
    """In any window: at most what a bucket holds and what flowed in (one request may owe)."""
    rates, key, now, log = Rates(), key_with(5, 100), 0.0, []
    for pause, tokens, used in events:
        now += pause
        if admitted(rates, key, tokens, now):
            rates.settle(key, tokens, min(used, tokens), now)
            log.append((now, min(used, tokens)))
    for i in range(len(log)):
        for j in range(i, len(log)):
            seconds = log[j][0] - log[i][0]
            assert j - i + 1 <= 5 + seconds * 5 / 60 + 1e-6
            assert sum(t for _, t in log[i : j + 1]) <= 100 + seconds * 100 / 60 + 1e-6


def test_audit() -> None:
    key, secret = auth.create("k", "user", 0)
    line = auth.audit({"time": 1.5, "key": key.id, "route": "/v1/chat\n/completions", "status": 200, "model": f"x{secret}",
                       "code": None, "remote": "a" * 1000})  # fmt: skip
    assert "\n" not in line and secret not in line and secret[5:] not in line
    facts = json.loads(line)
    assert facts == {"time": 1.5, "key": key.id, "route": "/v1/chat\n/completions", "status": 200,
                     "model": "xfdel-[redacted]", "remote": "a" * 200}  # fmt: skip
    for unknown in ("prompt", "authorization", "messages"):
        with pytest.raises(ValueError, match=f"found {unknown}"):
            auth.audit({unknown: "a"})


# ---- the file of keys, which `fdel keys` and a server share ----------------------------------------------------------


def test_changes_of_the_file_are_merged(tmp_path) -> None:
    """Whoever changes it begins with what it holds now."""
    path = tmp_path / "keys.json"
    made = [auth.create(f"n{i}", "user", 0.0)[0] for i in range(3)]
    for key in made:
        keyfile.change(path, lambda known, key=key: {**known, key.hash: key})
    assert keyfile.load(path) == {key.hash: key for key in made}
    keyfile.change(path, lambda known: {h: k for h, k in known.items() if k.id != made[1].id})
    assert [*keyfile.load(path).values()] == [made[0], made[2]]
    assert all(stat.S_IMODE(p.stat().st_mode) == 0o600 for p in tmp_path.iterdir())


def test_writers_at_the_same_time_lose_nothing(tmp_path) -> None:
    """Processes and threads, which add and remove."""
    path = tmp_path / "keys.json"
    code = f"""
import sys
from fdel.serve.server import auth, keyfile
for i in range(5):
    key, _ = auth.create(sys.argv[1] + str(i), "user", 0.0)
    keyfile.change({str(path)!r}, lambda known: {{**known, key.hash: key}})
    if i % 2:
        keyfile.change({str(path)!r}, lambda known: {{h: k for h, k in known.items() if k.id != key.id}})
"""
    jobs = [subprocess.Popen([sys.executable, "-c", code, name]) for name in "abcd"]
    assert [job.wait(60) for job in jobs] == [0] * 4
    assert sorted(key.name for key in keyfile.load(path).values()) == [f"{n}{i}" for n in "abcd" for i in (0, 2, 4)]


def test_a_lock_that_is_never_given_back_is_named(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(keyfile, "WAIT", 0.1)
    path = tmp_path / "keys.json"

    def change(known):
        with pytest.raises(OSError, match="another process"):
            keyfile.change(path, dict)
        return known

    keyfile.change(path, change)
    keyfile.change(path, dict)


class Files:
    """A file of keys that a server watches, with a clock of its own."""

    def __init__(self, folder):
        self.path, self.now = folder / "keys.json", 100.0
        self.key, self.other = (auth.create(n, "user", 0.0)[0] for n in "ab")
        keyfile.save(self.path, [self.key, self.other])
        self.watch, self.keys = keyfile.Watch(self.path), {}

    def found(self, seconds: float = 1.0) -> list[Key]:
        """What the server goes by some time later."""
        self.now += seconds
        self.keys = found if (found := self.watch.changed(self.now)) is not None else self.keys
        return [*self.keys.values()]


@pytest.fixture
def files(tmp_path) -> Files:
    return Files(tmp_path)


def test_a_server_sees_a_change_within_a_second(files) -> None:
    assert files.found() == [files.key, files.other]
    for wanted in ([files.key], [files.key, files.other], [files.other], []):
        keyfile.save(files.path, wanted)  # at once, so that times and sizes may be the same as before
        assert files.found() == wanted


def test_the_file_is_looked_at_now_and_then(files, monkeypatch) -> None:
    """However many requests come."""
    files.found(5.0)
    looked = []
    monkeypatch.setattr(keyfile, "_signature", lambda path: (looked.append(path), 0))
    for _ in range(1000):
        files.found(0.001)
    assert len(looked) <= 2


@pytest.mark.parametrize("harm", ["gone", "mode", "half", "directory"])
def test_a_file_that_cannot_be_read_keeps_the_keys(files, harm, caplog) -> None:
    """One line in the log says why, and what comes back counts again."""
    text = files.path.read_text()
    assert files.found() == [files.key, files.other]
    if harm == "mode":
        files.path.chmod(0o644)
    else:
        files.path.unlink()
        if harm == "half":
            files.path.write_text(text[: len(text) // 2])
            files.path.chmod(0o600)
        elif harm == "directory":
            files.path.mkdir()
    for _ in range(9):
        assert files.found() == [files.key, files.other]
    assert len([r for r in caplog.records if "keys" in r.getMessage()]) == 1 and not caplog.records[0].exc_info
    if harm == "directory":
        files.path.rmdir()
    keyfile.save(files.path, [files.other])
    assert files.found() == [files.other]


def test_a_clock_that_jumps_reads_the_file_all_the_same(files) -> None:
    """The file's own times may lie in the future or the past."""
    for when in (2**31, 1, 0):
        keyfile.save(files.path, [files.other])
        os.utime(files.path, (when, when))
        assert files.found() == [files.other]
        keyfile.save(files.path, [files.key])
        os.utime(files.path, (when, when))
        assert files.found() == [files.key]


def test_keys_are_shown_as_they_are_and_move_no_cursor(tmp_path, capsys) -> None:
    path = tmp_path / "keys.json"
    names = ["plain", "Zoë 東京", "\x1b[2Jgone", "a\nb", "\u202eevil", ""]
    for name in names:
        assert cli.main(["keys", str(path), "add", name]) == 0
    capsys.readouterr()
    assert cli.main(["keys", str(path), "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(names) and all(line.isprintable() for line in lines)
    assert lines[0].endswith("user plain") and lines[1].endswith("user Zoë 東京")
    assert (
        cli.main(["keys", str(path), "remove", lines[0].split()[0]]) == 0 and len(keyfile.load(path)) == len(names) - 1
    )
    assert cli.main(["keys", str(path), "remove", "none"]) == 2 and len(keyfile.load(path)) == len(names) - 1


@pytest.mark.parametrize(
    "change", [{"id": 3}, {"id": ""}, {"id": "a\nb"}, {"id": "a" * 65}, {"name": None}, {"created": "x"}]
)
def test_keys_of_a_file_are_checked(tmp_path, change) -> None:
    path = tmp_path / "keys.json"
    key, _ = auth.create("a", "user", 0.0)
    keyfile.save(path, [key])
    path.write_text(json.dumps([json.loads(path.read_text())[0] | change]))
    with pytest.raises(ValueError, match=f"{path}|key"):
        keyfile.load(path)
