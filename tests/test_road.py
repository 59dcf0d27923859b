"""The whole road, walked once on a small scale; every command line on what it left behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from loka_toolkit.artifacts.dispatch_table import DispatchTable
from loka_toolkit.artifacts.replay_results import ReplayResults, Status
from loka_toolkit.artifacts.safety_map import SafetyMap, Verdict
from loka_toolkit.artifacts.trace import Trace
from loka_toolkit.datasets.click_log import ClickLog
from loka_toolkit.workflows.demo import (
    DemoSize,
    DemoSummary,
    run_demo,
    train_both_arms,
    train_step,
)
from loka_toolkit.workflows.two_tower import TensorBatch, TwoTower

ROOT = Path(__file__).resolve().parents[1]
SMALL = DemoSize(recorded_steps=80, further_steps=4, pairs=2, batch=256, evaluation_rows=2048)


@pytest.fixture(scope="module")
def road(tmp_path_factory) -> tuple[Path, DemoSummary]:
    out = tmp_path_factory.mktemp("road") / "demo"
    return out, run_demo(out, size=SMALL)


def loka(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "loka_toolkit.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd or ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def expect_error(result: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr


def test_the_road_leaves_every_artifact(road):
    out, summary = road
    assert set(summary.run.paths) == {"trace", "safety", "replay", "table", "report"}
    for path in summary.run.paths.values():
        assert Path(path).exists()
    Trace.open(out / "trace").require_evidence()
    assert (out / "report.html").read_text(encoding="utf-8").lower().startswith("<!doctype html>")


def test_something_ran_in_fp8_in_every_role_and_no_miss_is_unexplained(road):
    out, summary = road
    assert set(summary.fp8_sites) == {"fwd", "dgrad", "wgrad"}
    table = DispatchTable.load(out / "table.json")
    sites = set(SafetyMap.load(out / "safety.parquet").to_frame()["site"])
    accounted = {f"{e.fqn}#0:{e.role}" for e in table.entries}
    accounted |= {f"{m.fqn}#{m.call}:{m.role}" for m in table.misses}
    assert accounted == sites
    assert all(miss.detail for miss in table.misses)
    assert sum(summary.fp8_sites.values()) + sum(summary.misses.values()) == len(sites)


def test_without_entries_the_two_arms_are_the_same_to_the_last_bit(road):
    out, _ = road
    empty = msgspec.structs.replace(DispatchTable.load(out / "table.json"), entries=(), layers=())
    log = ClickLog(seed=0)
    model = TwoTower(log.spec)
    optimizer = torch.optim.Adam(model.parameters(), lr=SMALL.learning_rate)
    train_step(model, optimizer, TensorBatch.of(log.batch(64, 0)))
    outcome = train_both_arms(model, optimizer, log, empty, SMALL, lambda stage, done, total: None)
    assert outcome.fp8_sites == {}
    assert outcome.difference.relative_difference == 0.0
    assert not outcome.difference.resolved


def test_no_emulated_and_no_failed_candidate_enters_the_table(road):
    out, _ = road
    rows = ReplayResults.load(out / "replay.parquet").rows
    ok = {(r.site, r.candidate) for r in rows if r.status is Status.OK and not r.emulated}
    for entry in DispatchTable.load(out / "table.json").entries:
        assert (f"{entry.fqn}#0:{entry.role}", entry.candidate) in ok


def test_raw_counts_beside_embeddings_are_unsafe_tensorwise_with_a_reason(road):
    out, _ = road
    safety = SafetyMap.load(out / "safety.parquet")
    cell = next(
        c for c in safety.cells if c.site == "user.input#0:fwd" and c.recipe.startswith("e4m3/tens")
    )
    assert cell.verdict is Verdict.UNSAFE
    assert "x[" in cell.reason
    assert "%" in cell.reason


def test_the_same_seed_gives_the_same_summary(road, tmp_path):
    _, first = road
    second = run_demo(tmp_path / "again", size=SMALL)
    assert msgspec.structs.replace(second, run=first.run) == first


def test_summaries_of_every_artifact_print_as_text_and_as_json(road):
    out, _ = road
    for arguments in (
        ("trace", out / "trace"),
        ("table", "show", out / "table.json"),
        ("table", "check", out / "table.json"),
        ("estimate", out / "trace", "--chip", "H200"),
        ("env",),
    ):
        text = loka(*arguments)
        assert text.returncode == 0, text.stderr
        assert text.stdout.strip()
        parsed = loka(*arguments, "--json")
        assert parsed.returncode == 0, parsed.stderr
        json.loads(parsed.stdout)
        assert loka(*arguments, "--quiet").stdout == ""


def test_a_table_for_another_chip_is_built_but_refused_here(road, tmp_path):
    out, _ = road
    table = tmp_path / "h200.json"
    built = loka(
        "table", "build", out / "safety.parquet", "--chip", "H200", "--objective", "coverage",
        "-o", table,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    checked = loka("table", "check", table)
    expect_error(checked, 1, "expected H200", "actual cpu")
    unknown = loka("table", "build", out / "safety.parquet", "--chip", "H2000")
    expect_error(unknown, 2, "H200")


def test_bad_input_has_one_clear_line(road, tmp_path):
    out, _ = road
    expect_error(loka("analyze", tmp_path / "none"), 1, "no trace at")
    expect_error(
        loka("analyze", out / "trace", "--recipe", "e4m3/rowise/fp32"), 2, "e4m3/rowwise/fp32"
    )
    expect_error(loka("report", out / "table.json", "-o", tmp_path / "r.html"), 1, "table.json")
    expect_error(loka("table", "show", out / "safety.parquet"), 1, "safety.parquet")
    expect_error(loka("report", out / "safety.parquet", "-o", out / "report.html"), 1, "--force")
    expect_error(loka("replay", out / "trace", "--candidate", "torch.scaled"), 2, "torch.scaled_mm")
    (tmp_path / "loka.toml").write_text("[tolerance]\nsqnr = 1\n")
    expect_error(loka("analyze", out / "trace", cwd=tmp_path), 2, "sqnr")
    expect_error(loka("analyse"), 2)
    expect_error(
        loka("table", "check", out / "table.json", "--model", "no_module:f"), 2, "no_module"
    )


def test_a_damaged_trace_is_one_clear_line(road, tmp_path):
    out, _ = road
    for name, damage in {
        "truncated": lambda p: p.write_bytes(p.read_bytes()[: p.stat().st_size // 2]),
        "empty": lambda p: p.write_bytes(b""),
        "foreign": lambda p: p.write_text("hello"),
    }.items():
        copy = tmp_path / name
        shutil.copytree(out / "trace", copy)
        damage(next((copy / "errors").glob("*.parquet")))
        expect_error(loka("analyze", copy, "-o", tmp_path / "s.parquet"), 1, "errors")
        shutil.copytree(out / "trace", copy, dirs_exist_ok=True)
        damage(copy / "manifest.json")
        expect_error(loka("trace", copy), 1, "manifest.json")


def test_gates_exit_as_documented(road, tmp_path):
    out, _ = road
    report = loka(
        "report", out / "safety.parquet", "-o", tmp_path / "r.html", "--fail-on", "unsafe",
    )  # fmt: skip
    unsafe = any(
        v.verdict is Verdict.UNSAFE for v in SafetyMap.load(out / "safety.parquet").site_verdicts()
    )
    assert report.returncode == (3 if unsafe else 0)
    used = loka(
        "table", "check", out / "table.json", "--safety", out / "safety.parquet",
        "--fail-on", "unsafe,insufficient",
    )  # fmt: skip
    assert used.returncode == 0, used.stderr
    expect_error(loka("table", "check", out / "table.json", "--fail-on", "unsafe"), 2, "--safety")
