"""What is printed of a server is what it did, by Prometheus' definitions; the dashboard asks for metrics that exist."""

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest

from fdel import cli, monitor
from fdel.serve.server.metrics import SECONDS, Metric, Metrics, serving
from tests.serve.wire import chat


def test_quantiles_are_linear_in_their_bucket() -> None:
    """Against numpy's interpolation of the cumulative counts, of the second of two samples alone."""
    metrics, rng = Metrics([Metric("t", "histogram", "", buckets=SECONDS)]), np.random.default_rng(0)
    for x in rng.exponential(3.0, 50):
        metrics.observe("t", x)
    before = monitor.parse(metrics.text())
    new = rng.exponential(0.2, 400)
    for x in new:
        metrics.observe("t", x)
    bounds = np.array([0.0, *SECONDS])
    counts = [(new <= b).sum() for b in bounds]
    for q in (0.1, 0.5, 0.9, 0.99):
        want = np.interp(q * len(new), counts, bounds)
        assert monitor.quantile(q, monitor.parse(metrics.text()), before, "t") == pytest.approx(want)
    metrics.observe("t", 1e9)
    beyond = monitor.parse(metrics.text())
    assert monitor.quantile(1.0, beyond, before, "t") == SECONDS[-1]
    assert np.isnan(monitor.quantile(0.5, before, before, "t"))


def test_lines_of_a_server(running, tmp_path, capsys, monkeypatch) -> None:
    """A chat between two samples is seen in the second; a wrong key is one line on standard error."""
    path = tmp_path / "key"
    path.write_text(running.secrets["service"] + "\n")
    now = iter(range(100))
    wait = lambda _: chat(running, {"max_tokens": 12, "ignore_eos": True})
    monkeypatch.setattr(monitor, "time", SimpleNamespace(monotonic=lambda: 2.0 * next(now), sleep=wait))
    lines = monitor.lines(f"http://127.0.0.1:{running.port}/", path.read_text().strip())
    head, row = re.split(r"  +", next(lines)), next(lines).split()
    shown = dict(zip(head, row, strict=True))
    assert shown["tokens/s"] == "6.0" and shown["requests/s"] == "0.5" and shown["running"] == "0.0"
    assert float(shown["first p50 ms"]) > 0
    path.write_text("fdel-wrong")
    assert cli.main(["monitor", f"http://127.0.0.1:{running.port}", "--key-file", str(path)]) == 2
    assert "401" in capsys.readouterr().err


def test_the_dashboard_asks_for_metrics_that_exist(capsys) -> None:
    assert cli.main(["monitor", "--grafana"]) == 0
    panels = json.loads(capsys.readouterr().out)["panels"]
    kinds = {m.name: m.kind for m in serving(["m"], ["/"])}
    for panel in panels:
        (target,) = panel["targets"]
        name = re.search(r"fdel_[a-z_]+", target["expr"])[0]
        histogram = name.endswith("_bucket")
        assert kinds[name.removesuffix("_bucket")] == ("histogram" if histogram else "counter" if "rate" in target["expr"]
                                                       else "gauge")  # fmt: skip
    places = {(p["gridPos"]["x"], p["gridPos"]["y"]) for p in panels}
    assert len(places) == len(panels) == len(monitor.GRAPHS)
