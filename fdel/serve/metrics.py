"""Counters, gauges and histograms with closed label sets, and their Prometheus text (format 0.0.4)."""

import bisect
import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)


@dataclass(frozen=True)
class Metric:
    """One metric: labels are names with all values that they may have, so that no client can add series."""

    name: str
    kind: str  # "counter", "gauge" or "histogram"
    help: str
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    buckets: Sequence[float] = ()


class Registry:
    """The values of metrics. Any thread may change them; `text` gives a consistent view."""

    def __init__(self, metrics: Sequence[Metric]):
        self.metrics = {m.name: m for m in metrics}
        self._lock = threading.Lock()
        self._values: dict[tuple[str, tuple[str, ...]], float] = {}
        self._counts: dict[tuple[str, tuple[str, ...]], list[int]] = {}
        for m in metrics:
            for values in itertools.product(*m.labels.values()):
                self._values[m.name, values] = 0.0
                if m.kind == "histogram":
                    self._counts[m.name, values] = [0] * (len(m.buckets) + 1)

    def _key(self, name: str, labels: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
        m = self.metrics[name]
        key = name, tuple(labels.get(k, "") for k in m.labels)
        if key not in self._values or set(labels) != set(m.labels):
            known = {k: list(v) for k, v in m.labels.items()}
            raise ValueError(f"metric {name} has no series {dict(labels)}; its labels are {known}")
        return key

    def add(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Add to a counter or gauge. An unknown label value is a ValueError."""
        key = self._key(name, labels)
        with self._lock:
            self._values[key] += amount

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge, or a counter that is kept elsewhere."""
        key = self._key(name, labels)
        with self._lock:
            self._values[key] = value

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Add a value to a histogram."""
        key = self._key(name, labels)
        with self._lock:
            self._values[key] += value
            self._counts[key][bisect.bisect_left(self.metrics[name].buckets, value)] += 1

    def text(self) -> str:
        """Write all metrics in Prometheus' text format."""
        with self._lock:
            return "".join(itertools.chain.from_iterable(self._lines(m) for m in self.metrics.values()))

    def _lines(self, m: Metric) -> Iterator[str]:
        yield f"# HELP {m.name} {m.help}\n# TYPE {m.name} {m.kind}\n"
        for values in itertools.product(*m.labels.values()):
            labels = [f'{k}="{_escaped(v)}"' for k, v in zip(m.labels, values, strict=True)]
            braces = lambda more=(), labels=labels: "{" + ",".join([*labels, *more]) + "}" if labels or more else ""
            value = self._values[m.name, values]
            if m.kind != "histogram":
                yield f"{m.name}{braces()} {value:.17g}\n"
                continue
            total = 0
            for bound, count in zip([*m.buckets, "+Inf"], self._counts[m.name, values], strict=True):
                total += count
                limit = f'le="{bound}"'
                yield f"{m.name}_bucket{braces([limit])} {total}\n"
            yield f"{m.name}_sum{braces()} {value:.17g}\n{m.name}_count{braces()} {total}\n"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def server_metrics(models: Sequence[str], routes: Sequence[str]) -> Registry:
    """List what a server measures, with vLLM's meanings; only these models and routes become labels."""
    each = {"model": tuple(models)}
    ends = {"finished_reason": ("stop", "length", "abort", "error", "tool_calls")}
    hist = lambda name, help, buckets=SECONDS: Metric(f"fdel_{name}", "histogram", help, each, buckets)
    gauge = lambda name, help: Metric(f"fdel_{name}", "gauge", help, each)
    counter = lambda name, help, **labels: Metric(f"fdel_{name}_total", "counter", help, {**each, **labels})
    status = {"route": (*routes, "other"), "status": ("2xx", "3xx", "4xx", "5xx")}
    return Registry(
        [
            gauge("num_requests_running", "Sequences that are being computed."),
            gauge("num_requests_waiting", "Sequences in the queue."),
            gauge("kv_cache_usage_ratio", "Share of the cache's pages in use, 0 to 1."),
            gauge("heartbeat_age_seconds", "Time since the engine's loop last turned."),
            counter("preemptions", "Sequences whose pages were taken away and computed again."),
            counter("prompt_tokens", "Tokens of prompts."),
            counter("generation_tokens", "Tokens of answers."),
            counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
            counter("prefix_cache_hits", "Prompt tokens found there."),
            counter("compiles", "Programs compiled; constant once the server is ready."),
            counter("request_success", "Sequences that have ended.", **ends),
            hist("time_to_first_token_seconds", "From arrival to the first token."),
            hist("inter_token_latency_seconds", "Between two deltas of a stream, per token."),
            hist("e2e_request_latency_seconds", "From arrival to the end."),
            hist("request_prompt_tokens", "Tokens of a request's prompt.", TOKENS),
            hist("request_generation_tokens", "Tokens of a request's answer.", TOKENS),
            Metric("fdel_http_requests_total", "counter", "Requests by route and class of status.", status),
        ]
    )
