"""Metrics in Prometheus' text format: closed sets of labels, and the meanings that vLLM's metrics have.

Counters end in _total, units are base units, labels take only values that were declared: clients cannot make series.
"""

import bisect
import http.server
import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FINISH = ("stop", "length", "abort", "error")
STATUS = ("2xx", "3xx", "4xx", "5xx")
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 50_000, 100_000)
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


@dataclass(frozen=True)
class Metric:
    """A declaration. `labels` gives each label's values; `buckets` (upper bounds) make it a histogram.

    `stat` is the entry of `Engine.stats` of which it is the sum over all engines, if it is one.
    """

    name: str
    kind: str  # "counter", "gauge", "histogram"
    help: str
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    buckets: Sequence[float] = ()
    stat: str = ""

    def zeros(self) -> dict[tuple[str, ...], list[float]]:
        """All its series, by values of labels, at zero; those of a histogram are counts per bucket, then the sum."""
        size = len(self.buckets) + 2 if self.kind == "histogram" else 1
        return {labels: [0.0] * size for labels in itertools.product(*self.labels.values())}


def serving(models: Sequence[str], routes: Sequence[str]) -> list[Metric]:
    """Declare the metrics of a server, for its models (adapters too) and its routes (templates, not paths)."""
    model = {"model": models}
    gauge = lambda name, stat, help: Metric(f"fdel_{name}", "gauge", help, stat=stat)
    total = lambda name, stat, help: Metric(f"fdel_{name}_total", "counter", help, stat=stat)
    counter = lambda name, help, labels: Metric(f"fdel_{name}_total", "counter", help, labels)
    times = lambda name, help: Metric(f"fdel_{name}_seconds", "histogram", help, buckets=SECONDS)
    sizes = lambda name, help: Metric(f"fdel_{name}", "histogram", help, buckets=TOKENS)
    later = (
        "Sizes of steps whose programs are still to be compiled (steps use larger ones meanwhile), and of pictures and "
        "sounds that requests wait for."
    )
    return [
        gauge("num_requests_running", "running", "Requests in the batch."),
        gauge("num_requests_waiting", "waiting", "Requests that wait for their first step, or again after preemption."),
        gauge("kv_cache_usage_ratio", "", "Part of the cache's pages in use, from 0 to 1."),
        gauge("sizes_to_compile", "to compile", later),
        total("num_preemptions", "preempted", "Requests put back because the cache was full."),
        total("prefix_cache_queries", "looked up", "Prompt tokens looked up in the prefix cache."),
        total("prefix_cache_hits", "found", "Prompt tokens found in the prefix cache."),
        total("media_encoded", "pictures encoded", "Images, frames of videos and sounds that were encoded."),
        total("media_found", "pictures found", "Those that were found encoded, by their content."),
        total("compilations", "compiled", "Programs compiled since the start; none once no size is to be compiled."),
        counter("prompt_tokens", "Prompt tokens processed.", model),
        counter("generation_tokens", "Tokens generated.", model),
        counter("audio_seconds", "Seconds of sound written down.", model),
        counter("requests", "Requests that ended, by reason.", model | {"finished_reason": FINISH}),
        counter("http_requests", "HTTP requests answered.", {"route": routes, "status": STATUS}),
        times("time_to_first_token", "From arrival to the first token."),
        times("inter_token_latency", "Between two tokens of a request."),
        times("request_time_per_output_token", "Mean time per token of a request, without the first."),
        times("e2e_request_latency", "From arrival to the end."),
        times("request_queue_time", "From arrival to the first step."),
        times("request_prefill_time", "From the first step to the first token."),
        times("request_decode_time", "From the first token to the last."),
        times("request_inference_time", "From the first step to the last token."),
        sizes("request_prompt_tokens", "Prompt tokens of a request."),
        sizes("request_generation_tokens", "Tokens generated for a request."),
        sizes("request_params_n", "n of a request."),
        sizes("request_params_max_tokens", "max_tokens of a request."),
    ]  # fmt: skip


class Metrics:
    """The values of declared metrics. Threads may share one."""

    def __init__(self, declared: Sequence[Metric]) -> None:
        """Begin every series at zero, so that rates are right from the first event on."""
        self._lock = threading.Lock()
        self.declared = {m.name: m for m in declared}
        self._series = {m.name: m.zeros() for m in declared}

    def extend(self, label: str, value: str) -> None:
        """Declare one more value of a label, with its series at zero; nothing changes if it is declared already."""
        self._relabel(label, lambda values: dict.fromkeys([*values, value]))

    def remove(self, label: str, value: str) -> None:
        """Forget a value of a label, and its series."""
        self._relabel(label, lambda values: [v for v in values if v != value])

    def declares(self, label: str, value: str) -> bool:
        """Whether a label has this value."""
        return any(value in m.labels.get(label, ()) for m in self.declared.values())

    def _relabel(self, label: str, change: Callable[[Sequence[str]], Iterable[str]]) -> None:
        with self._lock:
            for name, m in self.declared.items():
                if label in m.labels:
                    m = self.declared[name] = replace(m, labels={**m.labels, label: list(change(m.labels[label]))})
                    kept = self._series[name]
                    self._series[name] = {k: kept.get(k, zeros) for k, zeros in m.zeros().items()}

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        """Count; ValueError for less than 0, a metric that is no counter, or a label value that was not declared."""
        if amount < 0:
            raise ValueError(f"{name}: a counter cannot go down by {-amount}; declare a gauge")
        with self._lock:
            self._find(name, "counter", labels)[0] += amount

    def reach(self, name: str, total: float, **labels: str) -> None:
        """Bring a counter to a total that is counted elsewhere; it never goes down. ValueError as in `add`."""
        with self._lock:
            values = self._find(name, "counter", labels)
            values[0] = max(values[0], total)

    def set(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge; ValueError as in `add`."""
        with self._lock:
            self._find(name, "gauge", labels)[0] = value

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Put a value in a histogram; ValueError as in `add`."""
        with self._lock:
            values = self._find(name, "histogram", labels)
            values[bisect.bisect_left(self.declared[name].buckets, value)] += 1
            values[-1] += value

    def text(self) -> str:
        """Write all metrics in the text exposition format, version 0.0.4."""
        lines = []
        with self._lock:
            for name, m in self.declared.items():
                lines += [f"# HELP {name} {m.help}", f"# TYPE {name} {m.kind}"]
                for given, v in self._series[name].items():
                    labels = dict(zip(m.labels, given, strict=True))
                    if m.kind != "histogram":
                        lines.append(_sample(name, labels, v[0]))
                        continue
                    for bound, count in zip([*m.buckets, "+Inf"], itertools.accumulate(v[:-1]), strict=True):
                        lines.append(_sample(f"{name}_bucket", labels | {"le": str(bound)}, count))
                    lines += [_sample(f"{name}_sum", labels, v[-1]), _sample(f"{name}_count", labels, sum(v[:-1]))]
        return "\n".join([*lines, ""])

    def _find(self, name: str, kind: str, labels: Mapping[str, str]) -> list[float]:
        m = self.declared.get(name)
        if m is None or m.kind != kind:
            raise ValueError(f"{name} is {'not declared' if m is None else f'a {m.kind}'}; expected a {kind}")
        values = self._series[name].get(tuple(labels.get(label, "") for label in m.labels))
        if values is None or set(labels) != set(m.labels):
            raise ValueError(f"{name}: found the labels {labels}, expected values of {dict(m.labels)}")
        return values


def _sample(name: str, labels: Mapping[str, str], value: float) -> str:
    inside = ",".join(f'{label}="{said.translate(_ESCAPES)}"' for label, said in labels.items())
    return f"{name}{f'{{{inside}}}' if inside else ''} {value:.17g}"


def gather(metrics: Metrics, every: Sequence[Mapping[str, float]]) -> None:
    """Take in what engines say of themselves (`Engine.stats`), summed over them."""
    total = lambda name: sum(stats[name] for stats in every)
    for m in metrics.declared.values():
        if m.stat:
            (metrics.set if m.kind == "gauge" else metrics.reach)(m.name, total(m.stat))
    metrics.set("fdel_kv_cache_usage_ratio", 1 - total("free pages") / total("pages"))


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
