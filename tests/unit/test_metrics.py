"""The Prometheus metrics, and the dashboard that shows them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from slot_cache import metrics
from slot_cache.events import Event

DASHBOARD = Path(__file__).resolve().parents[2] / "examples" / "grafana-dashboard.json"


@pytest.fixture
def counted() -> metrics.Metrics:
    found = metrics.shared()
    assert found is not None
    return found


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


def test_a_request_is_counted(counted: metrics.Metrics) -> None:
    labels = {"route": "m1"}
    counted.note(
        Event("request", route="m1", outcome="restored", seconds=0.02, reused=90, computed=10, cause="edited", tokens=7)
    )
    counted.note(Event("request", route="m1", outcome="unmanaged", seconds=0.0))
    assert value("slot_cache_requests_total", outcome="restored", **labels) == 1
    assert value("slot_cache_requests_total", outcome="unmanaged", **labels) == 1
    assert value("slot_cache_prompt_tokens_total", source="reused", **labels) == 90
    assert value("slot_cache_prompt_tokens_total", source="computed", **labels) == 10
    assert value("slot_cache_recomputed_tokens_total", cause="edited", **labels) == 7
    assert value("slot_cache_wait_seconds_count", **labels) == 2
    assert value("slot_cache_wait_seconds_bucket", le="0.01", **labels) == 1


def test_actions_and_faults_are_counted_by_server(counted: metrics.Metrics) -> None:
    for kind in ("save", "save", "restore"):
        counted.note(Event(kind, server="http://s", bytes=1000, seconds=0.5))
    counted.note(Event("fault", server="http://s", cause="failed saves", words="whatever"))
    assert value("slot_cache_actions_total", server="http://s", action="save") == 2
    assert value("slot_cache_action_bytes_total", server="http://s", action="save") == 2000
    assert value("slot_cache_action_seconds_sum", server="http://s", action="restore") == 0.5
    assert value("slot_cache_faults_total", server="http://s", kind="failed saves") == 1


def test_prefill_that_was_not_spared_does_not_count_back(counted: metrics.Metrics) -> None:
    counted.spared("m2", 3.0)
    counted.spared("m2", -1.0)
    assert value("slot_cache_prefill_seconds_saved_total", route="m2") == 3.0


def test_clients_cannot_make_series_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    values = metrics._Values()
    told = {values(f"route {number}") for number in range(1000)}
    assert len(told) == metrics.MOST_VALUES + 1
    assert "other" in told
    assert values("route 3") == "route 3"
    assert metrics._Values()("a\nb" + "c" * 500) == "a?b" + "c" * 117


def test_no_label_tells_a_session(counted: metrics.Metrics) -> None:
    session = "deadbeef" * 4
    for kind in ("ask", "switch", "save", "evict", "request", "fault"):
        counted.note(Event(kind, key=f"smol_{session}", session=session, server="s", route="r", words=session))  # type: ignore[arg-type]  # each is a kind
    assert session not in metrics.exposition()[0].decode()


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"slot_cache_[a-z_]+", expression))


def expressions(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        for key, child in node.items():
            if key in ("expr", "query") and isinstance(child, str):
                yield child
            yield from expressions(child)
    elif isinstance(node, list):
        for child in node:
            yield from expressions(child)


def test_the_dashboard_uses_only_metrics_that_exist_and_all_of_them(counted: metrics.Metrics) -> None:
    families = list(metrics._Ours(REGISTRY).collect())
    exist = set()
    for family in families:
        endings = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "gauge": [""]}[family.type]
        exist |= {family.name + ending for ending in endings}
    asked = [names_in(expression) for expression in expressions(json.loads(DASHBOARD.read_text()))]
    assert len(asked) > 15
    used = set.union(*asked)
    assert used - exist == set()
    assert {re.sub(r"_(total|bucket)$", "", name) for name in used} == {family.name for family in families}


def test_the_dashboard_asks_for_labels_that_exist() -> None:
    known = {"route", "outcome", "source", "server", "action", "kind", "cause", "le"}
    for expression in expressions(json.loads(DASHBOARD.read_text())):
        for inner in re.findall(r"by \(([^)]*)\)", expression):
            assert set(re.split(r",\s*", inner)) <= known
        assert set(re.findall(r"(\w+)=~?\"", expression)) <= known


WORKER = """
import sys
from slot_cache import metrics
from slot_cache.events import Event
counted = metrics.shared()
counted.note(Event("request", route="r", outcome="cold", seconds=0.1, reused=1, computed=2))
counted.now("s", 1, 2, 100.0)
print(metrics.exposition()[0].decode())
sys.stdin.readline()
"""


def test_several_workers_are_added_up(tmp_path: Path) -> None:
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        for _ in range(2)
    ]
    try:
        for worker in workers:
            assert worker.stdout is not None
            while not worker.stdout.readline().startswith("slot_cache_requests_total"):
                assert worker.poll() is None
        read = "import sys; from slot_cache import metrics; sys.stdout.write(metrics.exposition()[0].decode())"
        told = subprocess.run([sys.executable, "-c", read], capture_output=True, text=True, env=environment, check=True)
    finally:
        for worker in workers:
            worker.communicate("\n")
    assert 'slot_cache_requests_total{outcome="cold",route="r"} 2.0' in told.stdout
    assert 'slot_cache_waiting_requests{server="s"} 4.0' in told.stdout
    assert 'slot_cache_prefill_tokens_per_second{server="s"} 100.0' in told.stdout
