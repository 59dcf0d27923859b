"""What only a GPU can prove: the scaled_mm kernels of CUDA, both clocks, faults of the device."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from loka_toolkit.artifacts.replay_results import ReplayResults, Status
from loka_toolkit.environment import chip_of
from loka_toolkit.harness import POLICIES, replay
from loka_toolkit.harness.judge import judge
from loka_toolkit.harness.timing import measure
from loka_toolkit.harness.trial import Trial
from loka_toolkit.kernels.catalog import find_candidate

pytestmark = pytest.mark.gpu

FP8 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0),
    reason="needs compute capability 9.0 for row-wise scales",
)


@pytest.fixture
def bf16_trace(writer: Any) -> Any:
    """Shapes that compute bounds, and one that nothing about FP8 likes."""
    writer.linear("big", tokens=4096, width=1024, outputs=1024, dtype="bfloat16")
    writer.linear("odd", tokens=117, width=39, outputs=13, dtype="bfloat16")
    writer.linear("single", tokens=2048, width=256, outputs=512, dtype="float32")
    for role, dims in {"fwd": (64, 32, 48, 16), "grad_a": (64, 32, 16, 48)}.items():
        writer.site("dot", role, dims)
    for site, operand, width in (("fwd", "a", 16), ("fwd", "b", 48), ("grad_a", "g", 48)):
        writer.operand(f"dot#0:{site}", operand, writer.correlated(64, width))
    return writer.write()


@FP8
def test_scaled_mm_on_cuda_end_to_end(bf16_trace: Any, tmp_path: Path) -> None:
    path = tmp_path / "replay.parquet"
    results = replay(bf16_trace, path, device="cuda")
    assert ReplayResults.load(path) == results
    assert results.facts.policy == "cuda-graph" and results.facts.complete
    statuses = {(r.site, r.candidate): (r.status, r.detail) for r in results.rows}
    assert {s for s, _ in statuses.values()} == {Status.OK, Status.UNSUPPORTED}, statuses
    chip = chip_of(torch.device("cuda"))
    assert {row.chip for row in results.rows} == {chip}
    fast = [
        row
        for row in results.rows
        if row.candidate.startswith("torch.scaled_mm/") and row.status is Status.OK
    ]
    assert {row.role for row in fast} >= {"fwd", "dgrad", "wgrad"}
    for row in fast:
        assert row.excess_error is not None and 0.8 < row.excess_error < 1.2, row
        assert row.latency_us is not None and row.gemm_us is not None and row.gemm_us > 0
        assert row.latency_us >= 0.5 * row.gemm_us
        assert row.kernel_ran, row
        assert row.detail is None, row.detail
    for site in ("odd#0:fwd", "odd#0:wgrad"):
        served = [r for r in fast if r.site == site]
        assert served, f"nothing of scaled_mm served {site}"


@FP8
def test_a_second_run_finds_the_same_errors(bf16_trace: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "device": "cuda",
        "candidates": ["torch.scaled_mm/e4m3/*/fast"],
        "include": ["big#0:*"],
    }
    first, again = (replay(bf16_trace, **options) for _ in range(2))
    for one, two in zip(first.rows, again.rows, strict=True):
        assert (one.status, one.kernel_sqnr_db, one.total_sqnr_db) == (
            two.status,
            two.kernel_sqnr_db,
            two.total_sqnr_db,
        )


@FP8
@pytest.mark.parametrize("accumulation", ["fast", "promoted-128"])
@pytest.mark.parametrize("k", [128, 1024, 16384])
@pytest.mark.parametrize("positive", [False, True])
def test_the_limit_fits_the_hardware(accumulation: str, k: int, positive: bool) -> None:
    """Real accumulators stay below the limit, with signs mixed and with none."""
    generator = torch.Generator("cuda").manual_seed(k)
    a = torch.randn(512, k, generator=generator, device="cuda").to(torch.bfloat16)
    b = torch.randn(k, 384, generator=generator, device="cuda").to(torch.bfloat16)
    if positive:
        a, b = a.abs(), b.abs()
    candidate = find_candidate(f"torch.scaled_mm/e4m3/tensorwise/{accumulation}")
    found = judge(candidate, Trial(a, b, torch.bfloat16))
    assert found.fault is None, found


@pytest.mark.parametrize("name", ["fp32", "tf32", "bf16", "fp16"])
def test_baselines_are_right_on_cuda(name: str) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    a = torch.randn(1000, 2048, generator=generator, device="cuda")
    b = torch.randn(2048, 130, generator=generator, device="cuda")
    found = judge(find_candidate(f"torch.matmul/{name}"), Trial(a, b, torch.float32))
    assert found.fault is None, found


def test_the_clocks_agree_on_a_large_product() -> None:
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    device = a.device
    calls = [lambda: a @ a]
    graph = measure(calls, POLICIES["cuda-graph"], device)
    events = measure(calls, POLICIES["cuda-events"], device)
    assert graph.note is None and events.note is None
    # A millisecond of work hides launch gaps; clocks and power state leave a quarter.
    assert graph.median_us == pytest.approx(events.median_us, rel=0.25)
    flops = 2 * 8192**3
    assert 50 < flops / graph.median_us / 1e6 < 2500  # TFLOP/s of anything from A100 on


def test_what_cannot_be_captured_is_timed_by_events_and_said() -> None:
    x = torch.randn(64, 64, device="cuda")
    times = measure([lambda: float(x.sum())], POLICIES["cuda-graph"], x.device)
    assert times.median_us > 0
    assert times.note is not None and "timed with CUDA events" in times.note
    # The device still works.
    assert torch.equal(x + 0, x)


def test_out_of_memory_is_a_status(writer: Any, fake_kernels: None) -> None:
    writer.linear("l", tokens=64, width=64, outputs=64, roles=("fwd",))
    results = replay(
        writer.write(),
        device="cuda",
        catalog="fake_kernels:cuda_catalog",
        draws=1,
        policy=dataclasses.replace(POLICIES["cuda-events"], row_seconds=60.0),
    )
    rows = {row.candidate: row for row in results.rows}
    assert rows["good"].status is Status.OK, rows["good"].detail
    assert rows["too-big"].status is Status.OUT_OF_MEMORY, rows["too-big"].detail
    assert rows["asserts"].status is Status.CRASHED, rows["asserts"].detail
    # A device-side assertion poisons the process's context; the next row has a new process.
    assert rows["good-after"].status is Status.OK, rows["good-after"].detail
