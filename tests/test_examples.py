"""The examples run, one stage after the other, as a reader would run them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from loka_toolkit.artifacts.trace import Trace

ROOT = Path(__file__).resolve().parents[1]


def run(name: str, *arguments: str | Path, launcher: tuple[str | Path, ...] = ()) -> str:
    result = subprocess.run(
        [sys.executable, *launcher, ROOT / "examples" / name, *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_a_plain_script_is_recorded_and_prints_what_it_prints_alone(tmp_path):
    launcher = ("-m", "loka_toolkit.cli", "record", "--first", "2", "--out", tmp_path / "run")
    recorded = run("train_plain.py", "--epochs", "2", launcher=launcher)
    assert recorded == run("train_plain.py", "--epochs", "2")
    assert Trace.open(tmp_path / "run").manifest.status.steps_seen == 40


def test_the_stages_in_order(tmp_path):
    trace, safety, replay, table = (
        tmp_path / name for name in ("run", "safety.parquet", "replay.parquet", "table.json")
    )
    assert "28 of 60 steps recorded" in run("1_record.py", "--out", trace)
    report = tmp_path / "report.html"
    printed = run("2_analyze.py", "--run", trace, "--out", safety, "--report", report)
    assert "0#0:fwd" in printed
    assert report.stat().st_size > 10_000
    assert "torch.scaled_mm/e4m3/rowwise/fp32" in run(
        "3_replay.py", "--run", trace, "--out", replay
    )
    trained = run("4_dispatch.py", "--safety", safety, "--replay", replay, "--out", table)
    assert "'fwd'" in trained.partition("products in FP8")[2].splitlines()[0]
