"""The exposition against Prometheus' own parser."""

import pytest

from fdel.serve import metrics

parser = pytest.importorskip("prometheus_client.parser", reason="the oracle is prometheus_client (extra `test`)")


def samples(registry):
    found = {}
    for family in parser.text_string_to_metric_families(registry.text()):
        for s in family.samples:
            found[s.name, *sorted(s.labels.items())] = s.value
    return found


def test_text_is_read_back():
    odd = 'a "quoted" \\ name\nin two lines'
    registry = metrics.server_metrics([odd, "b"], ["/v1/models"])
    registry.add("fdel_prompt_tokens_total", 3, model=odd)
    registry.add("fdel_prompt_tokens_total", 4, model=odd)
    registry.set("fdel_kv_cache_usage_ratio", 0.1 + 0.2, model="b")
    registry.add("fdel_http_requests_total", route="/v1/models", status="2xx")
    for value in (0.0005, 0.001, 0.2, 1e9):
        registry.observe("fdel_time_to_first_token_seconds", value, model="b")
    found = samples(registry)
    assert found["fdel_prompt_tokens_total", ("model", odd)] == 7
    assert found["fdel_kv_cache_usage_ratio", ("model", "b")] == 0.1 + 0.2
    assert found["fdel_http_requests_total", ("route", "/v1/models"), ("status", "2xx")] == 1
    name = "fdel_time_to_first_token_seconds"
    bucket = lambda le: found[f"{name}_bucket", ("le", le), ("model", "b")]
    assert [bucket("0.001"), bucket("0.1"), bucket("0.25"), bucket("300"), bucket("+Inf")] == [2, 2, 3, 3, 4]
    assert found[f"{name}_count", ("model", "b")] == 4 and found[f"{name}_sum", ("model", "b")] == 1e9 + 0.2015


def test_no_client_can_add_series():
    registry = metrics.server_metrics(["m"], ["/health"])
    before = len(registry.text())
    for labels in (dict(model="FOO1"), dict(model="m", method="BREW"), {}):
        with pytest.raises(ValueError, match="its labels are"):
            registry.add("fdel_prompt_tokens_total", **labels)
    assert len(registry.text()) == before
