"""Demo and benchmark from one end to the other, with a tiny model and short texts."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from slot_cache.cli import bench, demo
from slot_cache.cli.output import Output

pytestmark = pytest.mark.real


def test_demo_finds_every_cache_again(tiny_models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "SENTENCES", 8)
    stream = io.StringIO()
    totals = demo.play_one(demo.Stage(Output(stream), tiny_models / "dense.gguf"), plugin=True)
    assert totals.turns == 12
    assert totals.returning == 9
    assert totals.reuse == 1.0, stream.getvalue()
    rows = [line.split() for line in stream.getvalue().splitlines()]
    outcomes = [row[2] for row in rows if row and row[0] in demo.SESSIONS]
    assert outcomes == ["cold"] * 3 + ["restored"] * 6 + ["resident"] + ["restored"] * 2


def test_bench_measures_every_section(tiny_models: Path) -> None:
    plan = bench.Plan(
        *((600,), 2, (600,), 2, 5, 3, 2, 400, 1),
        slots_turns=2,
        slots_tokens=400,
        slots_rounds=1,
        shared_sessions=2,
        shared_tokens=400,
    )
    stream = io.StringIO()
    report = bench.bench_embedded(Output(stream), plan, tiny_models / "dense.gguf")
    assert report.notes == []
    assert report.prefill is not None
    assert report.prefill.rows[0].restored_reuse > 0.8
    assert report.switch is not None
    assert report.switch.rows[0].switched_reuse > 0.9
    assert report.overhead is not None
    assert report.overhead.with_ms.count == 5
    assert report.load is not None
    reuse = {row.label: row.reuse for row in report.load.rows}
    assert reuse["with the plugin"] == 1.0
    assert reuse["without the plugin"] is not None
    assert reuse["without the plugin"] < 0.5
    assert report.slots is not None
    pinned, plugin, pinned_defaults, plugin_defaults = report.slots.rows
    assert plugin.reuse == 1.0, stream.getvalue()
    assert plugin_defaults.reuse is not None
    assert plugin_defaults.reuse >= 0.8, stream.getvalue()  # one of six may end in the step in which another one starts
    for row in (pinned, pinned_defaults):
        assert row.reuse is not None
        assert row.reuse < 0.9
        assert row.outcomes == {}
    assert sum(plugin.outcomes.values()) == sum(plugin_defaults.outcomes.values()) == 12
    assert report.shared is not None
    shared = {row.label: row for row in report.shared.rows}
    assert shared["without the plugin"].reuse < 0.2
    assert shared["with the plugin"].least_reuse > 0.9
    assert shared["with the plugin"].outcomes == {"donor": 2}
