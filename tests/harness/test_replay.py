"""Replay end to end on a CPU: selection, resumption, determinism, and the kernels of torch."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loka_toolkit.artifacts.replay_results import ReplayResults, ReplayRow, Status
from loka_toolkit.artifacts.trace import Trace
from loka_toolkit.errors import (
    ArtifactCorruptError,
    ConfigurationError,
    NoMatchError,
    ReplayError,
    UnknownNameError,
)
from loka_toolkit.harness import POLICIES, TimingPolicy, replay

ROOT = Path(__file__).resolve().parents[2]
QUICK = dataclasses.replace(POLICIES["cpu-median"], repetitions=2, warmups=0)
TIMES = {"latency_us", "latency_us_p10", "latency_us_p90", "cast_a_us", "cast_b_us", "gemm_us"}


def without_times(row: ReplayRow) -> dict[str, Any]:
    return {k: v for k, v in msgspec.structs.asdict(row).items() if k not in TIMES}


def here(trace: Trace, path: Path | None = None, **options: Any) -> ReplayResults:
    defaults: dict[str, Any] = {"device": "cpu", "isolate": False, "policy": QUICK}
    return replay(trace, path, **(defaults | options))


@pytest.fixture
def calls(
    tmp_path: Path, fake_kernels: None, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], Counter[str]]:
    file = tmp_path / "calls.txt"
    monkeypatch.setenv("LOKA_TEST_CALLS", str(file))

    def count() -> Counter[str]:
        found = Counter(file.read_text().split() if file.exists() else [])
        file.unlink(missing_ok=True)
        return found

    return count


def test_scaled_mm_on_a_cpu_end_to_end(linear_trace: Trace, tmp_path: Path) -> None:
    """The default candidates, in a worker process, saved and read back."""
    path = tmp_path / "replay.parquet"
    results = replay(linear_trace, path, device="cpu", policy=QUICK)
    loaded = ReplayResults.load(path)
    assert loaded == results
    assert results.facts.complete and results.facts.policy == "cpu-median"
    assert results.facts.trace_digest == linear_trace.digest
    assert results.facts.environment.chip == "cpu"
    assert not any(row.emulated for row in results.rows)
    assert {row.status for row in results.rows} == {Status.OK, Status.UNSUPPORTED}
    ran = [row for row in results.rows if row.candidate.startswith("torch.scaled_mm/")]
    ran = [row for row in ran if row.status is Status.OK]
    assert {row.role for row in ran} == {"fwd", "dgrad", "wgrad"}
    assert {row.recipe for row in ran} == {
        "e4m3/tensorwise/fp32",
        "e4m3/rowwise/fp32",
        "e4m3/static/fp32",
        "e5m2/tensorwise/fp32",
        "e5m2/rowwise/fp32",
        "e5m2-e4m3/tensorwise/fp32",
    }
    for row in ran:
        assert row.inputs == "moments" and row.draws == 2 and row.chip == "cpu"
        assert "aten._scaled_mm.default" in (row.kernel_ran or "")
        # float32 sums of at most 117 terms: far above 100 dB; the same casts as the emulation.
        assert row.kernel_sqnr_db is not None and row.kernel_sqnr_db > 100
        assert row.excess_error == pytest.approx(1.0, abs=1e-3)
        assert row.total_sqnr_db is not None and 15 < row.total_sqnr_db < 40
        assert row.latency_us is not None and row.gemm_us is not None
        assert row.latency_us_p10 is not None and row.latency_us_p90 is not None
        assert row.latency_us_p10 <= row.latency_us <= row.latency_us_p90
    e4m3, e5m2 = (
        next(r for r in ran if r.role == "fwd" and r.recipe == f"{f}/rowwise/fp32")
        for f in ("e4m3", "e5m2")
    )
    assert e4m3.total_sqnr_db is not None and e5m2.total_sqnr_db is not None
    # One mantissa bit is 6.02 dB in the normal range.
    assert e4m3.total_sqnr_db - e5m2.total_sqnr_db == pytest.approx(6.02, abs=0.6)
    refused = [row for row in results.rows if row.status is Status.UNSUPPORTED]
    assert all(row.detail and row.latency_us is None for row in refused)
    assert any("CUDA only" in (row.detail or "") for row in refused)


def test_emulated_candidates_are_judged_and_not_timed(forward_trace: Trace) -> None:
    results = here(forward_trace, candidates=["emulated/e4m3/rowwise/*", "reference/*"])
    assert len(results.rows) == 2 * 4
    for row in results.rows:
        assert row.status is Status.OK and row.emulated
        assert row.latency_us is None and row.gemm_us is None and row.repetitions == 0
        assert row.kernel_sqnr_db is not None


def test_the_same_seed_gives_the_same_numbers_in_any_process(forward_trace: Trace) -> None:
    options: dict[str, Any] = {"candidates": ["torch.scaled_mm/e4m3/*/fp32", "torch.matmul/bf16"]}
    first = here(forward_trace, **options)
    again = here(forward_trace, isolate=True, **options)
    other = here(forward_trace, seed=1, **options)
    assert [without_times(r) for r in first.rows] == [without_times(r) for r in again.rows]
    ran = 0
    for one, two in zip(first.rows, other.rows, strict=True):
        assert one.workload_digest != two.workload_digest
        if one.status == two.status == "ok":
            ran += 1
            assert one.total_sqnr_db != two.total_sqnr_db
    assert ran >= 6  # two FP8 recipes and one baseline, fwd and wgrad; others need other chips


def test_products_of_activations_and_odd_shapes(writer: Any) -> None:
    for role, dims in {
        "fwd": (6, 13, 7, 5),
        "grad_a": (6, 13, 5, 7),
        "grad_b": (6, 5, 7, 13),
    }.items():
        writer.site("dot", role, dims)
    for site, operand, width in (("fwd", "a", 5), ("fwd", "b", 7), ("grad_a", "g", 7)):
        writer.operand(f"dot#0:{site}", operand, writer.correlated(64, width))
    writer.linear("head", tokens=13, width=39, outputs=1)
    writer.linear("empty", tokens=0, width=16, outputs=8)
    writer.site("norm", "norm", (1, 8, 16, 0))
    writer.site("attention", "fwd", (4, 8, 8, 8), dispatchable=False)
    results = here(
        writer.write(),
        candidates=[
            "torch.scaled_mm/e4m3/rowwise/fp32",
            "emulated/e4m3/rowwise/fast",
            "*matmul/bf16",
        ],
    )
    assert results.facts.config["not_dispatchable"] == ["attention#0:fwd"]
    rows = {(row.site, row.candidate.split("/")[0]): row for row in results.rows}
    assert len(rows) == 9 * 3
    for (site, library), row in rows.items():
        assert row.status is Status.OK, (site, library, row.detail)
    for role in ("fwd", "grad_a", "grad_b"):
        row = rows[f"dot#0:{role}", "emulated"]
        assert row.inputs == "moments"
        assert row.total_sqnr_db is not None and row.total_sqnr_db > 20
    for role in ("fwd", "dgrad", "wgrad"):
        assert (rows[f"head#0:{role}", "torch.scaled_mm"].total_sqnr_db or 0) > 20
    assert rows["empty#0:fwd", "torch.scaled_mm"].total_sqnr_db is None
    assert rows["empty#0:wgrad", "torch.matmul"].excess_error is None


def test_resuming_measures_only_what_is_missing(
    forward_trace: Trace, tmp_path: Path, calls: Callable[[], Counter[str]]
) -> None:
    path = tmp_path / "replay.parquet"
    options: dict[str, Any] = {"catalog": "fake_kernels:good_catalog"}
    here(forward_trace, path, candidates=["good"], **options)
    assert set(calls()) == {"good"}
    both = here(forward_trace, path, **options)
    assert set(calls()) == {"good-too", "nan"}
    assert len(both.rows) == 6
    # Nothing is left to do; failures are results too and not tried again.
    assert here(forward_trace, path, **options).rows == both.rows
    assert not calls()
    # A selection leaves the rows outside of it alone.
    kept = here(forward_trace, path, include=["*:fwd"], candidates=["good"], **options)
    assert len(kept.rows) == 6 and kept.facts.complete
    assert not calls()
    # Another version of the library, policy or seed makes rows stale.
    newer = here(forward_trace, path, catalog="fake_kernels:newer_catalog")
    assert set(calls()) == {"good"}
    assert {r.version for r in newer.rows if r.candidate == "good"} == {"2.0"}
    here(forward_trace, path, seed=5, catalog="fake_kernels:newer_catalog")
    assert set(calls()) == {"good", "good-too", "nan"}
    here(forward_trace, path, seed=5, catalog="fake_kernels:newer_catalog", force=True)
    assert set(calls()) == {"good", "good-too", "nan"}


def test_progress_counts_what_is_there(
    forward_trace: Trace,
    tmp_path: Path,
    calls: Callable[[], Counter[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "replay.parquet"
    told: list[tuple[str, int, int]] = []
    options: dict[str, Any] = {"catalog": "fake_kernels:good_catalog"}
    here(forward_trace, path, candidates=["good"], **options)
    here(forward_trace, path, progress=lambda *a: told.append(a), **options)
    assert told == [("replay", done, 6) for done in (3, 4, 5, 6)]
    here(forward_trace, None, progress=True, candidates=["nan"], **options)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(
        "[1/2] tower.0#0:fwd 96x48x64 nan: wrong-numerics: draw 1: 1 outputs"
    )


def test_an_interrupt_saves_first(
    forward_trace: Trace, tmp_path: Path, calls: Callable[[], Counter[str]]
) -> None:
    path = tmp_path / "replay.parquet"
    with pytest.raises(KeyboardInterrupt):
        here(forward_trace, path, catalog="fake_kernels:interrupting_catalog")
    saved = ReplayResults.load(path)
    assert [row.candidate for row in saved.rows] == ["good"]
    assert not saved.facts.complete
    calls()
    finished = here(forward_trace, path, catalog="fake_kernels:good_catalog")
    assert finished.facts.complete and len(finished.rows) == 6
    assert calls()["good"] > 0  # the other site's


SCRIPT = """
import sys
from loka_toolkit.harness import ledger, replay
ledger._SAVE_EVERY_SECONDS = 0.0
sys.path.insert(0, {here!r})
def told(stage, done, total):
    print(done, flush=True)
    if done == 3:
        import time
        time.sleep(600)
replay({trace!r}, {path!r}, device="cpu", catalog="fake_kernels:good_catalog", progress=told)
"""


def test_a_killed_replay_resumes(
    forward_trace: Trace, tmp_path: Path, calls: Callable[[], Counter[str]]
) -> None:
    path = tmp_path / "replay.parquet"
    script = SCRIPT.format(
        here=str(Path(__file__).parent), trace=str(forward_trace.path), path=str(path)
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == "3":
            break
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    saved = ReplayResults.load(path)
    assert len(saved.rows) == 3 and not saved.facts.complete
    before = calls()
    assert before["good"] and before["good-too"] and before["nan"]
    results = replay(
        forward_trace, path, device="cpu", catalog="fake_kernels:good_catalog", isolate=False
    )
    assert results.facts.complete and len(results.rows) == 6
    by_digest = {row.workload_digest: row for row in results.rows}
    assert all(by_digest[row.workload_digest] == row for row in saved.rows)
    fresh = calls()
    per_row = before["nan"]
    assert fresh["nan"] == per_row  # one of its two rows only
    # The worker notices that its parent is gone.
    deadline = time.monotonic() + 20
    while _workers_left() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not _workers_left()


def _workers_left() -> list[int]:
    """Processes that still run the worker on this test's behalf (its parent is gone)."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes()
            environ = (entry / "environ").read_bytes()
        except OSError:
            continue
        own = f"LOKA_TEST_CALLS={os.environ['LOKA_TEST_CALLS']}".encode()
        if b"loka_toolkit.harness.worker" in command and own in environ:
            found.append(int(entry.name))
    return found


@pytest.mark.parametrize("content", [b"", b"PAR1", None])
def test_a_half_written_file_is_an_error_with_the_next_step(
    forward_trace: Trace, tmp_path: Path, fake_kernels: None, content: bytes | None
) -> None:
    path = tmp_path / "replay.parquet"
    options: dict[str, Any] = {"catalog": "fake_kernels:good_catalog", "candidates": ["good"]}
    here(forward_trace, path, **options)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if content is None else content)
    with pytest.raises(ArtifactCorruptError, match=r"replay\.parquet.*use --force to replace it"):
        here(forward_trace, path, **options)
    assert len(here(forward_trace, path, force=True, **options).rows) == 2
    # What a kill during the write leaves beside the results is not mistaken for them.
    (tmp_path / ".replay.parquet.1.ab.tmp").write_bytes(whole[:100])
    assert len(here(forward_trace, path, **options).rows) == 2


def test_results_of_another_trace_are_refused(
    forward_trace: Trace, new_writer: Callable[[str, int], Any], tmp_path: Path, fake_kernels: None
) -> None:
    other = new_writer("other", 99)
    other.linear("tower.0", tokens=96, width=64, outputs=48, roles=("fwd", "wgrad"))
    second = other.write()
    path = tmp_path / "replay.parquet"
    options: dict[str, Any] = {"catalog": "fake_kernels:good_catalog", "candidates": ["good"]}
    here(forward_trace, path, **options)
    with pytest.raises(ReplayError) as caught:
        here(second, path, **options)
    message = str(caught.value)
    assert forward_trace.digest[:12] in message and second.digest[:12] in message
    assert "--force" in message
    assert here(second, path, force=True, **options).facts.trace_digest == second.digest


def test_bad_arguments_have_clear_answers(forward_trace: Trace, writer: Any) -> None:
    with pytest.raises(UnknownNameError, match=r"did you mean 'torch\.matmul/bf16'"):
        here(forward_trace, candidates=["torch.matmul/bf61"])
    with pytest.raises(NoMatchError, match="no candidate matches"):
        here(forward_trace, candidates=["tensorrt/*"])
    with pytest.raises(ConfigurationError, match="at least one name"):
        here(forward_trace, candidates=[])
    with pytest.raises(ConfigurationError, match="at least one name"):
        here(forward_trace, candidates="torch.matmul/bf16")
    with pytest.raises(NoMatchError, match="no site matches"):
        here(forward_trace, include=["tower.7*"])
    with pytest.raises(NoMatchError, match="no site matches"):
        here(forward_trace, exclude=["towel*"])
    with pytest.raises(NoMatchError, match="no site matches"):
        here(forward_trace, exclude=["*"])
    with pytest.raises(UnknownNameError, match="cpu-median"):
        here(forward_trace, policy="cpu-mean")
    with pytest.raises(ConfigurationError, match=r"cuda-graph.*choose cpu-median"):
        here(forward_trace, policy="cuda-graph")
    with pytest.raises(ConfigurationError, match="repetitions = 0"):
        here(forward_trace, policy=dataclasses.replace(QUICK, repetitions=0))
    with pytest.raises(ConfigurationError, match="row_seconds = inf"):
        here(forward_trace, policy=dataclasses.replace(QUICK, row_seconds=math.inf))
    with pytest.raises(ConfigurationError, match="draws = 0"):
        here(forward_trace, draws=0)
    with pytest.raises(ConfigurationError, match="is none; give cpu"):
        here(forward_trace, device="gpu")
    with pytest.raises(ConfigurationError, match="not here"):
        here(forward_trace, device="cuda:77")
    with pytest.raises(ConfigurationError, match="MODULE:FUNCTION"):
        here(forward_trace, catalog="nowhere.kernels:catalog")
    with pytest.raises(ConfigurationError, match="MODULE:FUNCTION"):
        here(forward_trace, catalog="loka_toolkit.kernels.catalog")


def test_a_trace_without_moments_or_gemms_is_refused(
    new_writer: Callable[[str, int], Any],
) -> None:
    bare = new_writer("bare", 0)
    bare.linear("a", 8, 8, 8)
    bare.moments.clear()
    with pytest.raises(ReplayError, match=r"holds no moments.*record again"):
        here(bare.write())
    norms = new_writer("norms", 0)
    norms.linear("a", 8, 8, 8)
    norms.sites.clear()
    norms.site("norm", "norm", (1, 8, 8, 0))
    with pytest.raises(ReplayError, match="no GEMM"):
        here(norms.write())


def test_a_policy_of_ones_own(forward_trace: Trace) -> None:
    policy = TimingPolicy("mine", "two calls", QUICK.method, 0, 2, 1.0, 30.0)
    results = here(forward_trace, candidates=["torch.matmul/fp32"], policy=policy)
    assert results.facts.policy == "mine"
    assert {row.repetitions for row in results.rows} == {2}
