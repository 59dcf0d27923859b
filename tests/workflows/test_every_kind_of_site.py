"""Sites that nothing can stand in for, on the whole road: trace, map, report, replay, table."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from loka_toolkit.analysis import analyze
from loka_toolkit.artifacts.safety_map import SafetyMap
from loka_toolkit.artifacts.trace import Trace
from loka_toolkit.dispatch import build_table
from loka_toolkit.harness.workloads import workloads_of
from loka_toolkit.recording import Schedule, record
from loka_toolkit.reporting import report
from loka_toolkit.workflows.lines import trace_lines
from loka_toolkit.workflows.summaries import summarize_trace

RECIPE = "e4m3/rowwise/fp32"


class Mixed(nn.Module):
    """A convolution, fused attention, a checkpoint and linear layers over [N, 6, 13]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution = nn.Conv1d(6, 4, 3, padding=1)
        self.projection = nn.Linear(13, 16)
        self.block = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
        self.head = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.projection(self.convolution(x)).unsqueeze(1)
        h = F.scaled_dot_product_attention(h, h, h).squeeze(1).mean(1)
        return self.head(checkpoint(self.block, h, use_reentrant=False)).squeeze(-1)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    path = tmp_path_factory.mktemp("mixed") / "run"
    model = Mixed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    with record(model, path, schedule=Schedule.always(), recipes=(RECIPE,)) as recorder:
        for _ in range(6):
            x = torch.randn(32, 6, 13, generator=generator) ** 3
            y = (torch.rand(32, generator=generator) < 0.3).float()
            optimizer.zero_grad()
            F.binary_cross_entropy_with_logits(model(x), y).backward()
            optimizer.step()
            recorder.step()
    return Trace.open(path)


@pytest.fixture(scope="module")
def safety(trace: Trace) -> SafetyMap:
    return analyze(trace, chains=2, tune=200, draws=200, recipes=[RECIPE])


def test_the_summary_of_a_trace_names_every_share(trace: Trace) -> None:
    summary = summarize_trace(trace)
    (attention,) = summary.not_judged_reasons
    assert "attention" in attention
    assert set(summary.repeated_reasons) == {"recompute: activation checkpointing"}
    assert summary.unseen_share == 0.0
    assert summary.not_judged_share is not None and 0.0 < summary.not_judged_share < 0.5
    # Two products forward and five backward of [4, 4] scores over 16 features.
    assert summary.not_judged_reasons[attention] == 7 * 2.0 * 32 * 4 * 4 * 16
    assert summary.repeated_reasons == {"recompute: activation checkpointing": 2.0 * 32 * 16 * 16}
    assert summary.sites_by_role["bwd"] == 1
    text = "\n".join(trace_lines(summary))
    for part in ("not judged", "repeated", "recompute", "fused attention"):
        assert part in text


def test_replay_leaves_out_what_no_kernel_can_stand_in_for(trace: Trace) -> None:
    plan = workloads_of(trace)
    roles = ("fwd", "wgrad")
    assert set(plan.not_dispatchable) == {
        *(f"convolution#0:{role}" for role in roles),
        "(root)#0:fwd",
        "(root)#0:bwd",
    }
    fqns = {workload.site.fqn for workload in plan.workloads}
    assert fqns == {"projection", "block.0", "head"}


def test_the_map_judges_convolutions_and_counts_what_it_cannot(safety: SafetyMap) -> None:
    cells = {cell.site: cell for cell in safety.cells}
    assert "convolution#0:fwd" in cells and not cells["convolution#0:fwd"].dispatchable
    assert cells["convolution#0:fwd"].impact is not None
    assert not any(cell.startswith("(root)") for cell in cells)
    coverage = safety.facts.coverage
    assert coverage.flops_not_judged > 0 and coverage.flops_repeated > 0
    shares = {cell.site: cell.flops_share for cell in safety.cells}
    attention = coverage.flops_not_judged / coverage.flops
    assert sum(shares.values()) == pytest.approx(1 - attention)
    assert any("not judged" in alert for alert in safety.facts.alerts) == (attention > 0.05)


def test_the_report_lists_sites_without_a_verdict(trace: Trace, safety: SafetyMap) -> None:
    text = report(safety, trace=trace)
    assert "Recorded without a verdict" in text
    assert "fused attention: its products are computed inside of one operator" in text
    assert "belong to sites that are not judged" in text
    assert "recompute: activation checkpointing" in text


def test_a_table_never_touches_them(safety: SafetyMap, tmp_path: Path) -> None:
    table = build_table(safety, chip="H200", objective="coverage")
    fqns = {entry.fqn for entry in table.entries}
    assert "convolution" not in fqns and "(root)" not in fqns
    missed = {miss.fqn for miss in table.misses}
    assert "convolution" in missed
