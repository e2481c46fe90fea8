"""Metrics in Prometheus' text format: closed sets of labels, and the meanings that vLLM's metrics have.

Counters end in _total, units are base units, labels take only values that were declared: clients cannot make series.
"""

import bisect
import http.server
import itertools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FINISH = ("stop", "length", "abort", "error")
STATUS = ("2xx", "3xx", "4xx", "5xx")
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 50_000, 100_000)


@dataclass(frozen=True)
class Metric:
    """A declaration. `labels` gives each label's values; `buckets` (upper bounds) make it a histogram."""

    name: str
    kind: str  # "counter", "gauge", "histogram"
    help: str
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    buckets: Sequence[float] = ()


def serving(models: Sequence[str], routes: Sequence[str]) -> list[Metric]:
    """Declare the metrics of a server, for its models (adapters too) and its routes (templates, not paths)."""
    by_model = {"model": models}
    gauges = {
        "num_requests_running": "Requests in the batch.",
        "num_requests_waiting": "Requests that wait for their first step, or again after preemption.",
        "kv_cache_usage_ratio": "Part of the cache's pages in use, from 0 to 1.",
        "sizes_to_compile": "Sizes of steps whose programs are still to be compiled; steps use larger ones meanwhile.",
    }
    counters = {
        "num_preemptions_total": ("Requests put back because the cache was full.", {}),
        "prefix_cache_queries_total": ("Prompt tokens looked up in the prefix cache.", {}),
        "prefix_cache_hits_total": ("Prompt tokens found in the prefix cache.", {}),
        "compilations_total": ("Programs compiled since the start; none once no size is to be compiled.", {}),
        "prompt_tokens_total": ("Prompt tokens processed.", by_model),
        "generation_tokens_total": ("Tokens generated.", by_model),
        "requests_total": ("Requests that ended, by reason.", by_model | {"finished_reason": FINISH}),
        "http_requests_total": ("HTTP requests answered.", {"route": routes, "status": STATUS}),
    }
    times = {
        "time_to_first_token_seconds": "From arrival to the first token.",
        "inter_token_latency_seconds": "Between two tokens of a request.",
        "request_time_per_output_token_seconds": "Mean time per token of a request, without the first.",
        "e2e_request_latency_seconds": "From arrival to the end.",
        "request_queue_time_seconds": "From arrival to the first step.",
        "request_prefill_time_seconds": "From the first step to the first token.",
        "request_decode_time_seconds": "From the first token to the last.",
        "request_inference_time_seconds": "From the first step to the last token.",
    }
    sizes = {
        "request_prompt_tokens": "Prompt tokens of a request.",
        "request_generation_tokens": "Tokens generated for a request.",
        "request_params_n": "n of a request.",
        "request_params_max_tokens": "max_tokens of a request.",
    }
    return [
        *(Metric(f"fdel_{name}", "gauge", text) for name, text in gauges.items()),
        *(Metric(f"fdel_{name}", "counter", text, labels) for name, (text, labels) in counters.items()),
        *(Metric(f"fdel_{name}", "histogram", text, buckets=SECONDS) for name, text in times.items()),
        *(Metric(f"fdel_{name}", "histogram", text, buckets=TOKENS) for name, text in sizes.items()),
    ]


class Metrics:
    """The values of declared metrics. Threads may share one."""

    def __init__(self, declared: Sequence[Metric]) -> None:
        """Begin every series at zero, so that rates are right from the first event on."""
        self._lock = threading.Lock()
        self._metrics = {m.name: m for m in declared}
        self._values: dict[
            tuple[str, tuple[str, ...]], list[float]
        ] = {}  # a histogram's: counts per bucket, then the sum
        for m in declared:
            self._begin(m)

    def extend(self, label: str, value: str) -> None:
        """Declare one more value of a label, with its series at zero; nothing changes if it is declared already."""
        with self._lock:
            for name, m in self._metrics.items():
                if label in m.labels and value not in m.labels[label]:
                    m = replace(m, labels={**m.labels, label: [*m.labels[label], value]})
                    self._metrics[name] = m
                    self._begin(m)

    def _begin(self, m: Metric) -> None:
        for labels in itertools.product(*m.labels.values()):
            zeros = [0.0] * (len(m.buckets) + 2 if m.kind == "histogram" else 1)
            self._values.setdefault((m.name, labels), zeros)

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        """Count; ValueError for less than 0, a metric that is no counter, or a label value that was not declared."""
        if amount < 0:
            raise ValueError(f"{name}: a counter cannot go down by {-amount}; declare a gauge")
        values = self._find(name, "counter", labels)
        with self._lock:
            values[0] += amount

    def reach(self, name: str, total: float, **labels: str) -> None:
        """Bring a counter to a total that is counted elsewhere; it never goes down. ValueError as in `add`."""
        values = self._find(name, "counter", labels)
        with self._lock:
            values[0] = max(values[0], total)

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge; ValueError as in `add`."""
        values = self._find(name, "gauge", labels)
        with self._lock:
            values[0] = value

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Put a value in a histogram; ValueError as in `add`."""
        values = self._find(name, "histogram", labels)
        with self._lock:
            values[bisect.bisect_left(self._metrics[name].buckets, value)] += 1
            values[-1] += value

    def text(self) -> str:
        """Write all metrics in the text exposition format, version 0.0.4."""
        with self._lock:
            values = {key: list(v) for key, v in self._values.items()}
        lines = []
        for name, m in self._metrics.items():
            lines += [f"# HELP {name} {m.help}", f"# TYPE {name} {m.kind}"]
            for (_, given), v in ((key, v) for key, v in values.items() if key[0] == name):
                labels = [f'{label}="{_escape(value)}"' for label, value in zip(m.labels, given, strict=True)]
                if m.kind != "histogram":
                    lines.append(f"{name}{_braces(labels)} {v[0]:.17g}")
                    continue
                for bound, count in zip([*m.buckets, "+Inf"], itertools.accumulate(v[:-1]), strict=True):
                    braces = _braces([*labels, f'le="{bound}"'])
                    lines.append(f"{name}_bucket{braces} {count:.17g}")
                lines += [
                    f"{name}_sum{_braces(labels)} {v[-1]:.17g}",
                    f"{name}_count{_braces(labels)} {sum(v[:-1]):.17g}",
                ]
        return "\n".join([*lines, ""])

    def _find(self, name: str, kind: str, labels: Mapping[str, str]) -> list[float]:
        m = self._metrics.get(name)
        if m is None or m.kind != kind:
            raise ValueError(f"{name} is {'not declared' if m is None else f'a {m.kind}'}; expected a {kind}")
        values = self._values.get((name, tuple(labels.get(label, "") for label in m.labels)))
        if values is None or set(labels) != set(m.labels):
            raise ValueError(f"{name}: found the labels {labels}, expected values of {dict(m.labels)}")
        return values


# ---- engines ---------------------------------------------------------------------------------------------------------


def gather(metrics: Metrics, every: Sequence[Mapping[str, float]]) -> None:
    """Take in what engines say of themselves (`Engine.stats`), summed over them."""
    total = lambda name: sum(stats[name] for stats in every)
    metrics.set("fdel_num_requests_running", total("running"))
    metrics.set("fdel_num_requests_waiting", total("waiting"))
    metrics.set("fdel_kv_cache_usage_ratio", 1 - total("free pages") / total("pages"))
    metrics.set("fdel_sizes_to_compile", total("to compile"))
    metrics.reach("fdel_num_preemptions_total", total("preempted"))
    metrics.reach("fdel_prefix_cache_queries_total", total("looked up"))
    metrics.reach("fdel_prefix_cache_hits_total", total("found"))
    metrics.reach("fdel_compilations_total", total("compiled"))


def prometheus(engine: Any, name: str = "model") -> str:
    """Write the metrics of an `Engine` that no server runs, as Prometheus reads them; `name` is the label `model`.

    Counts and gauges under the names that `fdel serve` has them; times of requests are measured by the server alone.
    """
    declared = [m for m in serving([name], []) if m.kind != "histogram" and "route" not in m.labels]
    metrics, stats = Metrics(declared), engine.stats()
    gather(metrics, [stats])
    metrics.reach("fdel_prompt_tokens_total", stats["prompt tokens"], model=name)
    metrics.reach("fdel_generation_tokens_total", stats["generated tokens"], model=name)
    for reason in FINISH:
        metrics.reach("fdel_requests_total", stats[reason], model=name, finished_reason=reason)
    return metrics.text()


def export_metrics(
    engine: Any, port: int, host: str = "127.0.0.1", name: str = "model"
) -> http.server.ThreadingHTTPServer:
    """Answer each GET at a port with `prometheus(engine, name)`, in threads of their own, until `.shutdown()`.

    Port 0 takes a free one: `.server_port`. OSError if the port is taken.
    """

    class Page(http.server.BaseHTTPRequestHandler):
        timeout = 10.0  # seconds for a request to come

        def do_GET(self) -> None:
            said = prometheus(engine, name).encode()
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer((host, port), Page)
    threading.Thread(target=server.serve_forever, name="fdel-metrics", daemon=True).start()
    return server


def _braces(labels: Sequence[str]) -> str:
    return f"{{{','.join(labels)}}}" if labels else ""


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
