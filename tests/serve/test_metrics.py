"""Metrics: what is written is what Prometheus' own parser reads, and labels are closed sets."""

import random
import re
import urllib.request

import pytest

from fdel import serve
from fdel.serve.server.metrics import SECONDS, Metric, Metrics, serving

parser = pytest.importorskip("prometheus_client.parser", reason="the oracle")

MODELS, ROUTES = ["org/model", 'odd "name"\\\n'], ["/v1/chat/completions", "/metrics"]


def read(metrics: Metrics) -> dict:
    """(sample name, labels) -> value, and name -> type."""
    families = list(parser.text_string_to_metric_families(metrics.text()))
    samples = {(s.name, tuple(sorted(s.labels.items()))): s.value for f in families for s in f.samples}
    return samples | {f.name: f.type for f in families}


def test_values_arrive() -> None:
    metrics = Metrics(serving(MODELS, ROUTES))
    metrics.set("fdel_num_requests_running", 3)
    metrics.set("fdel_num_requests_running", 2)
    metrics.add("fdel_prompt_tokens_total", 5, model=MODELS[1])
    metrics.add("fdel_prompt_tokens_total", 2**53, model=MODELS[0])
    metrics.add("fdel_requests_total", model=MODELS[0], finished_reason="abort")
    found = read(metrics)
    assert found["fdel_num_requests_running", ()] == 2 and found["fdel_num_requests_running"] == "gauge"
    assert found["fdel_prompt_tokens_total", (("model", MODELS[1]),)] == 5
    assert found["fdel_prompt_tokens_total", (("model", MODELS[0]),)] == 2**53
    assert found["fdel_requests_total", (("finished_reason", "abort"), ("model", MODELS[0]))] == 1
    assert found["fdel_requests_total", (("finished_reason", "stop"), ("model", MODELS[0]))] == 0
    assert found["fdel_prompt_tokens"] == "counter" and found["fdel_num_preemptions_total", ()] == 0


def test_histogram() -> None:
    metrics, rng = Metrics(serving(MODELS, ROUTES)), random.Random(0)
    values = [*SECONDS, 0.0, 1e9, *(rng.expovariate(1.0) for _ in range(200))]
    for value in values:
        metrics.observe("fdel_time_to_first_token_seconds", value)
    found = read(metrics)
    name = "fdel_time_to_first_token_seconds"
    for bound in (*SECONDS, float("inf")):
        label = "+Inf" if bound == float("inf") else str(bound)
        assert found[f"{name}_bucket", (("le", label),)] == sum(v <= bound for v in values)
    assert found[f"{name}_count", ()] == len(values) and found[f"{name}_sum", ()] == pytest.approx(
        sum(values), rel=1e-12
    )
    assert found[name] == "histogram" and found["fdel_request_params_n_bucket", (("le", "5"),)] == 0


def test_a_label_that_is_gone_leaves_no_series() -> None:
    """However many adapters come and go; what stays keeps its counts."""
    metrics = Metrics(serving(["m"], ROUTES))
    metrics.add("fdel_prompt_tokens_total", 5, model="m")
    before = metrics.text()
    for i in range(100):
        metrics.extend("model", f"a{i}")
        metrics.add("fdel_prompt_tokens_total", 7, model=f"a{i}")
        assert read(metrics)["fdel_prompt_tokens_total", (("model", f"a{i}"),)] == 7
        metrics.remove("model", f"a{i}")
    assert metrics.text() == before and metrics.declares("model", "m") and not metrics.declares("model", "a1")
    with pytest.raises(ValueError, match="found the labels"):
        metrics.add("fdel_prompt_tokens_total", 1, model="a1")


WRONG = [
    ("add", "fdel_nothing_total", 1, {}, "not declared"),
    ("add", "fdel_num_requests_running", 1, {}, "a gauge; expected a counter"),
    ("set", "fdel_num_preemptions_total", 1, {}, "a counter; expected a gauge"),
    ("observe", "fdel_num_preemptions_total", 1, {}, "expected a histogram"),
    ("add", "fdel_num_preemptions_total", -1, {}, "cannot go down"),
    ("add", "fdel_prompt_tokens_total", 1, {}, "found the labels"),
    ("add", "fdel_prompt_tokens_total", 1, {"model": "other"}, "found the labels"),
    ("add", "fdel_prompt_tokens_total", 1, {"model": MODELS[0], "user": "a"}, "found the labels"),
    ("add", "fdel_http_requests_total", 1, {"route": "/v1/FOO1", "status": "2xx"}, "found the labels"),
    ("add", "fdel_http_requests_total", 1, {"route": "/metrics", "status": "200"}, "found the labels"),
]


@pytest.mark.parametrize(("method", "name", "value", "labels", "why"), WRONG)
def test_closed_sets(method: str, name: str, value: float, labels: dict, why: str) -> None:
    metrics = Metrics(serving(MODELS, ROUTES))
    before = metrics.text()
    with pytest.raises(ValueError, match=why):
        getattr(metrics, method)(name, value, **labels)
    assert metrics.text() == before


def test_names_follow_prometheus() -> None:
    """The rules of `promtool check metrics`: help texts, base units, _total on counters and on nothing else."""
    for m in serving(MODELS, ROUTES):
        assert re.fullmatch("fdel_[a-z0-9_]+", m.name) and m.help.endswith(".") and "\n" not in m.help
        assert m.name.endswith("_total") == (m.kind == "counter")
        assert not re.search("_(ms|milliseconds|percent|perc|bucket|count|sum|info)$", m.name)
        assert list(m.buckets) == sorted(set(m.buckets)) and bool(m.buckets) == (m.kind == "histogram")
    size = len(Metrics(serving(MODELS, ROUTES)).text())
    assert size < 20_000
    assert (
        Metrics([Metric("a_total", "counter", "A.")]).text() == "# HELP a_total A.\n# TYPE a_total counter\na_total 0\n"
    )


def test_an_engine_without_a_server(model) -> None:
    """As text, and at a port: its counts, and nothing that only a server knows."""
    engine = serve.Engine(model, serve.Settings(rows=2, max_length=64))
    engine.generate([[1, 2, 3], [4, 5]], serve.SamplingParams(max_tokens=5, temperature=0, ignore_eos=True))
    said = serve.prometheus(engine, "small")
    server = serve.export_metrics(engine, 0, name="small")
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=10) as answer:
            assert answer.read().decode() == said and answer.headers["Content-Type"].startswith(
                "text/plain; version=0.0.4"
            )
    finally:
        server.shutdown()
        server.server_close()
    samples = {
        (s.name, *sorted(s.labels.values())): s.value
        for f in parser.text_string_to_metric_families(said)
        for s in f.samples
    }
    assert samples["fdel_prompt_tokens_total", "small"] == 5 and samples["fdel_generation_tokens_total", "small"] == 10
    assert samples["fdel_requests_total", "length", "small"] == 2 and samples["fdel_num_requests_running",] == 0
    assert samples["fdel_kv_cache_usage_ratio",] == 0 and not [n for n, *_ in samples if "http" in n or "bucket" in n]
