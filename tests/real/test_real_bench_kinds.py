"""The benchmark by kind of model, on a llama-server that saves no context checkpoints."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest
from router_server import find_binary

from slot_cache.cli import bench_kinds
from slot_cache.cli.output import Output
from slot_cache.lab.kinds import KindsPlan

BINARY, WHY_NOT = find_binary()
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(BINARY is None, reason=f"no real llama-server: {WHY_NOT}"),
]


def test_rewinding_is_what_a_hybrid_model_needs_and_a_dense_one_does_not(tiny_models: Path, tmp_path: Path) -> None:
    for name in ("dense", "hybrid"):
        shutil.copyfile(tiny_models / f"{name}.gguf", tmp_path / f"{name}.gguf")
    stream = io.StringIO()
    plan = KindsPlan(first_tokens=1200, turn_tokens=300, returns=1)
    report = bench_kinds.bench_kinds(Output(stream), plan, bench_kinds.find_models(tmp_path), BINARY)
    print(stream.getvalue())
    assert report.notes == []
    dense, hybrid = report.rows
    assert (dense.learned, hybrid.learned) == ("plain", "rewind")
    for case in (dense.as_it_stands, dense.with_plugin, hybrid.with_plugin):
        assert case is not None
        assert case.after_swap.reuse.low >= 0.9
        assert case.after_restart.reuse.low >= 0.9
    assert hybrid.as_it_stands is not None
    assert hybrid.as_it_stands.after_swap.reuse.high < 0.1
    assert hybrid.as_it_stands.after_restart.reuse.high < 0.1
