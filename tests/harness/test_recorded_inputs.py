"""From a recorded run to draws: heads, tied and joint factors, lists of parameters, wide layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from torch import nn

from loka_toolkit.artifacts import storage
from loka_toolkit.artifacts.trace import MOMENTS, Trace
from loka_toolkit.errors import ArtifactCorruptError
from loka_toolkit.harness.inputs import Draw, InputDrawer
from loka_toolkit.harness.moments import MomentsOfTrace
from loka_toolkit.harness.workloads import Workload, workloads_of
from loka_toolkit.recording import Schedule, record

CPU = torch.device("cpu")
ROWS, TOKENS = 96, 5


class Model(nn.Module):
    """Two unlike heads, dots of fields with themselves, a list of parameters, a wide layer."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 16)
        self.experts = nn.Parameter(
            torch.randn(3, 8, 4) * torch.tensor([1.0, 10.0, 100.0])[:, None, None]
        )
        self.wide = nn.Linear(70, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, _ = x.shape
        q, k = self.project(x).chunk(2, dim=-1)
        q, k = (
            t.reshape(rows, tokens, 2, 4).transpose(1, 2).reshape(-1, tokens, 4) for t in (q, k)
        )
        size = torch.tensor([1.0, 50.0]).repeat(rows).reshape(-1, 1, 1)
        scores = torch.bmm(q * size, k.mT).reshape(rows, 2, tokens, tokens).mean((1, 2))
        dots = torch.bmm(x, x.mT).flatten(1)
        mixed = torch.bmm(x.mean(1).expand(3, rows, 8), self.experts).sum(0)
        wide = torch.cat([dots, x.flatten(1), scores], dim=1)
        return self.wide(wide).squeeze(1) + mixed.sum(1)


@pytest.fixture
def recorded(tmp_path: Path) -> Trace:
    torch.manual_seed(0)
    model = Model()
    with record(model, tmp_path / "run", schedule=Schedule.always(), moments_width=64) as recorder:
        for _ in range(3):
            x = torch.randn(ROWS, TOKENS, 8).cumsum(1).requires_grad_()
            y = torch.rand(ROWS).round()
            nn.functional.binary_cross_entropy_with_logits(model(x) * 0.01, y).backward()
            recorder.step(examples=ROWS)
    return Trace.open(tmp_path / "run")


@pytest.fixture
def draws(recorded: Trace) -> Callable[..., tuple[Workload, Draw]]:
    drawer = InputDrawer(MomentsOfTrace(recorded), CPU, seed=0)
    workloads = {str(w.site): w for w in workloads_of(recorded).workloads}

    def draw(site: str, index: int = 0) -> tuple[Workload, Draw]:
        return workloads[site], drawer.draw(workloads[site], index)

    return draw


def test_every_site_is_drawn_from_moments(recorded: Trace) -> None:
    found = MomentsOfTrace(recorded)
    workloads = workloads_of(recorded).workloads
    assert {w.site.fqn for w in workloads} == {"(root)", "project", "wide"}
    for workload in workloads:
        draw = InputDrawer(found, CPU, 0).draw(workload, 0)
        assert draw.inputs == "moments", workload.site
        p = workload.problem
        assert draw.a.shape[-2:] == (p.m, p.k) and draw.b.shape[-2:] == (p.k, p.n)
        assert torch.isfinite(draw.a).all() and torch.isfinite(draw.b).all()
        again = InputDrawer(found, CPU, 0).draw(workload, 0)
        assert torch.equal(again.a, draw.a) and torch.equal(again.b, draw.b)
        other = InputDrawer(found, CPU, 0).draw(workload, 1)
        assert not torch.equal(other.a, draw.a)


def test_heads_keep_their_sizes(draws: Callable[..., tuple[Workload, Draw]]) -> None:
    _, draw = draws("(root)#0:fwd")
    squares = [float(draw.a[head::2].square().mean()) for head in (0, 1)]
    # The means of squares of 96 correlated matrices each: within a third.
    assert squares[1] / squares[0] == pytest.approx(2500, rel=0.35)


def test_tied_factors_are_drawn_tied(draws: Callable[..., tuple[Workload, Draw]]) -> None:
    _, draw = draws("(root)#1:fwd")
    assert torch.equal(draw.b, draw.a.mT)
    # Fields are sums of one another: within a matrix rows are alike, as recorded.
    first, last = draw.a[:, 3].flatten(), draw.a[:, 4].flatten()
    correlation = torch.corrcoef(torch.stack([first, last]))[0, 1]
    assert float(correlation) == pytest.approx((4 / 5) ** 0.5, abs=0.1)


def test_each_of_a_list_of_parameters_is_drawn_as_itself(
    draws: Callable[..., tuple[Workload, Draw]], recorded: Trace
) -> None:
    sites = [row["site"] for row in recorded.sites.to_pylist() if row["weight"] == "experts"]
    forward = next(site for site in sites if site.endswith(":fwd"))
    workload, draw = draws(forward)
    assert workload.problem.batch == 3
    sizes = draw.b.square().mean((1, 2)).sqrt()
    # Gram matrices are exact, so norms are those of the parameters.
    torch.manual_seed(0)
    truth = Model().experts.detach().square().mean((1, 2)).sqrt()
    torch.testing.assert_close(sizes, truth, rtol=1e-3, atol=0)


def test_matrices_of_another_shape_are_said(recorded: Trace) -> None:
    found = MomentsOfTrace(recorded)
    dots = next(w for w in workloads_of(recorded).workloads if str(w.site) == "(root)#0:fwd")
    longer = dataclasses.replace(
        dots,
        problem=dataclasses.replace(dots.problem, m=7),
        a=dataclasses.replace(dots.a, rows=7),
    )
    draw = InputDrawer(found, CPU, 0).draw(longer, 0)
    assert draw.a.shape == (192, 7, 4)
    assert draw.inputs == "matrices a recorded in another shape: rows drawn one by one"


def test_ranks_are_pooled_and_corrupt_lists_named(recorded: Trace) -> None:
    part = next(iter((recorded.path / "moments").glob("*.parquet")))
    kind = storage.part_kind(MOMENTS)
    table, _ = storage.read_table(part, MOMENTS, kind=kind)
    rows = table.to_pylist()
    second = [row | {"rank": 1} for row in rows]
    other = storage.part_path(recorded.path / "moments", 1, 0)
    storage.write_table(other, storage.table_from_rows(MOMENTS, second), MOMENTS, kind=kind)
    both = MomentsOfTrace(recorded)
    cross = both.cross("wide#0", 1, 70)
    assert cross is not None and cross.left.shape[0] >= 2
    single = next(row for row in rows if row["operand"] == "gx" and row["site"] == "wide#0:wgrad")
    # Twice the same moments are the same moments.
    assert cross.square == pytest.approx(sum(v**2 for v in single["mean"]), rel=1e-3)
    assert len(both.spectra("wide#0", 70)) == 1
    broken = [row | {"factors": row["factors"][:-1] if row["factors"] else None} for row in rows]
    other.unlink()
    table = storage.table_from_rows(MOMENTS, broken)
    assert isinstance(table, pa.Table)
    storage.write_table(part, table, MOMENTS, kind=kind)
    damaged = MomentsOfTrace(recorded)
    with pytest.raises(ArtifactCorruptError, match="do not fit a weight"):
        damaged.spectra("wide#0", 70)
    with pytest.raises(ArtifactCorruptError, match="do not fit a width"):
        damaged.cross("wide#0", 1, 70)


def test_the_file_is_no_larger_than_stated(recorded: Trace) -> None:
    """Float32: what the formula of ``recording.moments`` says, at most half of it, plus lists."""
    from loka_toolkit.recording.moments import moments_bytes

    for row in recorded.moments.to_pylist():
        features = row["width"] * row["sample_rows"]
        if row["kind"] not in ("full", "low-rank"):
            continue
        lists = [v for v in row.values() if isinstance(v, list)]
        held = 4 * sum(len(v) for v in lists)
        counted = row["marginal_counts"] is not None
        assert held <= moments_bytes(features, 64, with_marginals=counted)
