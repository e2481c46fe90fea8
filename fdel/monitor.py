"""Watch a server from a terminal, by its /metrics; and the same graphs as a dashboard for Grafana. Needs no jax."""

import re
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

Sample = Mapping[str, Mapping[str, float]]  # values by name and labels, as they are written


class Graph(NamedTuple):
    """One column, and how its numbers come from a metric."""

    title: str
    kind: str  # "gauge", "percent", "rate" of a counter per second, "p50" or "p99" of a histogram of seconds in ms
    metric: str


GRAPHS = (
    Graph("tokens/s", "rate", "fdel_generation_tokens_total"),
    Graph("prompt/s", "rate", "fdel_prompt_tokens_total"),
    Graph("requests/s", "rate", "fdel_requests_total"),
    Graph("running", "gauge", "fdel_num_requests_running"),
    Graph("waiting", "gauge", "fdel_num_requests_waiting"),
    Graph("cache %", "percent", "fdel_kv_cache_usage_ratio"),
    Graph("cached/s", "rate", "fdel_prefix_cache_hits_total"),
    Graph("first p50 ms", "p50", "fdel_time_to_first_token_seconds"),
    Graph("first p99 ms", "p99", "fdel_time_to_first_token_seconds"),
    Graph("next p50 ms", "p50", "fdel_inter_token_latency_seconds"),
    Graph("next p99 ms", "p99", "fdel_inter_token_latency_seconds"),
)


def parse(text: str) -> Sample:
    """Read Prometheus' text format."""
    out: dict[str, dict[str, float]] = defaultdict(dict)
    for name, labels, value in re.findall(r"^([a-z_]+)(?:\{(.*)\})? (\S+)$", text, re.MULTILINE):
        out[name][labels] = float(value)
    return out


def quantile(q: float, now: Sample, before: Sample, metric: str) -> float:
    """Estimate a quantile of what came between two samples as Prometheus does, linear in its bucket; NaN of nothing."""
    name = f"{metric}_bucket"
    counts = [(float(labels.rpartition('le="')[2].rstrip('"')), n - before[name].get(labels, 0.0))
              for labels, n in now[name].items()]  # fmt: skip
    counts.sort()
    wanted, below, low = q * counts[-1][1] if counts else 0.0, 0.0, 0.0
    for bound, count in counts:
        if count >= wanted > 0:
            return low if bound == float("inf") else low + (bound - low) * (wanted - below) / (count - below)
        below, low = count, bound
    return float("nan")


def value(graph: Graph, now: Sample, before: Sample, seconds: float) -> float:
    """Compute one column from two samples that are `seconds` apart."""
    total = lambda sample: sum(sample[graph.metric].values())
    if graph.kind == "rate":
        return (total(now) - total(before)) / seconds
    if graph.kind.startswith("p") and graph.kind[1:].isdigit():
        return 1e3 * quantile(int(graph.kind[1:]) / 100, now, before, graph.metric)
    return total(now) * (100 if graph.kind == "percent" else 1)


def lines(address: str, key: str = "", every: float = 1.0) -> Iterator[str]:
    """Yield a line each `every` seconds, and a header each 20; OSError if the server does not answer."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(address.rstrip("/") + "/metrics", headers=headers)

    def sample() -> tuple[float, Sample]:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return time.monotonic(), parse(answer.read().decode())

    then, before = sample()
    count = 0
    while True:
        time.sleep(every)
        at, now = sample()
        if count % 20 == 0:
            yield "  ".join(g.title for g in GRAPHS)
        cells = (value(g, now, before, at - then) for g in GRAPHS)
        yield "  ".join(f"{'-' if x != x else f'{x:.1f}':>{len(g.title)}}" for g, x in zip(GRAPHS, cells, strict=True))
        then, before, count = at, now, count + 1


def dashboard() -> dict[str, Any]:
    """Make a dashboard that Grafana imports: a panel for each graph, from any Prometheus data source."""
    ask = {
        "gauge": "sum({0})", "percent": "100 * avg({0})", "rate": "sum(rate({0}[1m]))",
        "p50": "1000 * histogram_quantile(0.5, sum by (le) (rate({0}_bucket[1m])))",
        "p99": "1000 * histogram_quantile(0.99, sum by (le) (rate({0}_bucket[1m])))",
    }  # fmt: skip
    panels = [
        {
            "id": i + 1, "type": "timeseries", "title": g.title, "datasource": "${source}",
            "gridPos": {"x": 8 * (i % 3), "y": 7 * (i // 3), "w": 8, "h": 7},
            "targets": [{"refId": "A", "expr": ask[g.kind].format(g.metric)}],
        }
        for i, g in enumerate(GRAPHS)
    ]  # fmt: skip
    source = {"name": "source", "type": "datasource", "query": "prometheus"}
    return {
        "title": "fdel", "uid": "fdel", "schemaVersion": 39, "refresh": "5s", "time": {"from": "now-15m", "to": "now"},
        "templating": {"list": [source]}, "panels": panels,
    }  # fmt: skip
