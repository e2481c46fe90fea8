"""Keys, roles and rates; the bucket against a simulation in small steps."""

import json

import numpy as np
import pytest

from fdel.serve import auth


def test_a_key_file_holds_no_secret_and_is_private(tmp_path):
    secret, key = auth.new_key(role="service", name="bot", requests_per_minute=60)
    path = tmp_path / "keys.json"
    auth.save(path, [key])
    assert path.stat().st_mode & 0o777 == 0o600
    assert secret not in path.read_text() and secret.removeprefix(auth.PREFIX) not in path.read_text()
    assert auth.load(path) == {key.sha256: key}
    assert auth.find(auth.load(path), f"Bearer {secret}") == key
    assert len(secret.removeprefix(auth.PREFIX)) >= 43  # 256 bits


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Basic {}", "{}", "Bearer {}x", "Bearer \udc80", "Bearer " + "x" * 10**6]
)
def test_other_headers_find_nothing(header):
    secret, key = auth.new_key()
    assert auth.find({key.sha256: key}, header and header.format(secret)) is None


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (dict(mode=0o644), "chmod 600"),
        (dict(text="[]"), "not a key file"),
        (dict(text="{"), "not a key file"),
        (dict(role="root"), "role 'root'"),
        (dict(sha256="12"), "no hash"),
        (dict(requests_per_minute=-1), "requests_per_minute"),
        (dict(secret="x"), "not a key file"),
        (dict(twice=True), "twice"),
    ],
)
def test_wrong_key_files_are_refused(tmp_path, change, complaint):
    path = tmp_path / "keys.json"
    auth.save(path, [auth.new_key()[1]])
    entry = json.loads(path.read_text())["keys"][0]
    own = {k: v for k, v in change.items() if k not in ("mode", "text", "twice")}
    path.write_text(change.get("text", json.dumps({"keys": [entry | own] * (2 if "twice" in change else 1)})))
    path.chmod(change.get("mode", 0o600))
    with pytest.raises(ValueError, match=complaint):
        auth.load(path)


def test_roles():
    may = {role: {s for s in auth.SCOPES["admin"] if auth.new_key(role=role)[1].may(s, 0.0)} for role in auth.SCOPES}
    assert may["admin"] == {"infer", "models", "metrics", "admin"}
    assert may["user"] == {"infer", "models"} and may["readonly"] == {"models", "metrics"}
    assert "admin" not in may["service"]
    expired = auth.new_key(expires=10.0)[1]
    assert expired.may("infer", 9.9) and not expired.may("infer", 10.0)


def test_rates_let_through_what_they_say():
    """Sixty requests of ten tokens a minute: first the full bucket, then one a second; tokens of answers count later."""
    key = auth.new_key(requests_per_minute=60, tokens_per_minute=1200)[1]
    rates, other = auth.Rates(), auth.new_key(requests_per_minute=1)[1]
    passed = [t for t in np.arange(0, 120, 0.25) if not rates.admit(key, 10, float(t))]
    assert passed[59] == 14.75 and len(passed) == 60 + 119  # a request each quarter second, then one a second
    assert rates.admit(other, 0, 0.0) == 0 and rates.admit(other, 0, 0.0) == 60
    rates.charge(key, 2400, 120.0)  # an answer longer than a minute's worth
    wait = rates.admit(key, 10, 120.0)
    assert 60 < wait < 125 and rates.admit(key, 10, 120.0 + wait + 1e-6) == 0


def test_a_refused_request_uses_nothing():
    key = auth.new_key(requests_per_minute=2, tokens_per_minute=60)[1]
    rates = auth.Rates()
    assert rates.admit(key, 60, 0.0) == 0
    assert rates.admit(key, 30, 0.0) == 30  # no tokens are left, but a request is
    assert rates.admit(key, 0, 0.0) == 0


def test_no_limits():
    key, rates = auth.new_key()[1], auth.Rates()
    assert not any(rates.admit(key, 10**9, 0.0) for _ in range(100)) and not rates.buckets
