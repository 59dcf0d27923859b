"""Whole models, the lean environment and the examples."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from loka_toolkit.artifacts.trace import Trace

REPOSITORY = Path(__file__).parents[2]
SHARED = Path(os.environ.get("LOKA_SHARED_DATA", REPOSITORY.parent / "shared"))
CRITEO = SHARED / "data" / "criteo_sample_200.csv"


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False
    )


class DLRM(nn.Module):
    """Bottom MLP, embeddings, pairwise dot products, top MLP; a cross layer of raw parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = nn.ModuleList(nn.Embedding(50, 8) for _ in range(4))
        self.bottom = nn.Sequential(nn.Linear(13, 16), nn.ReLU(inplace=True), nn.Linear(16, 8))
        self.cross = nn.ParameterList(nn.Parameter(torch.randn(18, 18) / 4) for _ in range(2))
        self.top = nn.Sequential(nn.LayerNorm(18), nn.Linear(18, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: torch.Tensor, categories: torch.Tensor) -> torch.Tensor:
        bottom = self.bottom(dense)
        vectors = [t(categories[:, i]) for i, t in enumerate(self.tables)]
        stacked = torch.stack([bottom, *vectors], dim=1)
        dots = torch.bmm(stacked, stacked.transpose(1, 2))
        rows, columns = torch.triu_indices(5, 5, offset=1)
        x0 = torch.cat([bottom, dots[:, rows, columns]], dim=1)
        x = x0
        for weight in self.cross:
            x = x0 * (x @ weight) + x
        return self.top(x).squeeze(-1)


def test_a_dlrm_is_seen_whole_and_its_impact_verified(record_run):
    from loka_toolkit.recording import verify_impact

    model = DLRM()
    generator = torch.Generator().manual_seed(1)
    dense = torch.randn(39, 13, generator=generator).exp()
    categories = torch.randint(50, (39, 4), generator=generator)
    y = (torch.rand(39, generator=generator) < 0.3).float()

    def loss(m, dense, categories, y):
        return F.binary_cross_entropy_with_logits(m(dense, categories), y)

    run = record_run(model, lambda _: loss(model, dense, categories, y), steps=2, learning_rate=0.1)
    assert run.site_names("fwd") == [
        "bottom.0#0:fwd",
        "bottom.2#0:fwd",
        "(root)#0:fwd",
        "cross#0:fwd",
        "cross#1:fwd",
        "top.1#0:fwd",
        "top.3#0:fwd",
    ]
    assert {"(root)#0:grad_a", "(root)#0:grad_b", "cross#1:dgrad"} <= set(run.sites.site)
    assert run.steps.gemm_flops_unseen.sum() == 0
    forward = run.errors[run.errors.site.str.endswith("fwd")]
    assert set(forward.impact_status) <= {"ok", "beyond-validity"}
    checks = verify_impact(model, loss, (dense, categories, y))
    assert all(check.agrees for check in checks)
    assert sum(check.is_resolved for check in checks) > len(checks) / 2


def test_recording_needs_the_lean_core_only(tmp_path):
    script = f"""
import sys
for name in ("pymc", "pandas", "matplotlib", "jinja2", "nutpie", "arviz", "triton"):
    sys.modules[name] = None
import torch
from loka_toolkit.recording import Schedule, record
model = torch.nn.Linear(13, 1)
with record(model, {str(tmp_path / "run")!r}, schedule=Schedule.always()) as recorder:
    model(torch.randn(4, 13)).square().mean().backward()
    recorder.step(examples=4, reduction="mean")
assert recorder.steps_recorded == 1
"""
    done = run_python("-W", "error", "-c", script)
    assert done.returncode == 0, done.stderr


def test_example_of_one_layer(tmp_path):
    done = run_python(
        str(REPOSITORY / "examples" / "record_linear.py"), "--out", str(tmp_path / "run")
    )
    assert done.returncode == 0, done.stderr
    assert "6 of 30 steps recorded" in done.stdout


@pytest.mark.skipif(not CRITEO.is_file(), reason=f"no Criteo rows at {CRITEO}")
def test_example_of_a_third_party_model(tmp_path):
    pytest.importorskip("deepctr_torch.models")
    script = str(REPOSITORY / "examples" / "deepctr_dcn.py")
    out = str(tmp_path / "run")
    short = ("--epochs", "2", "--warm-steps", "1", "--every", "4")
    done = run_python(script, "record", "--data", str(CRITEO), "--out", out, *short)
    assert done.returncode == 0, done.stderr
    trace = Trace.open(out)
    assert trace.manifest.status.steps_recorded == 3
    assert set(trace.steps["reduction"].to_pylist()) == {"sum"}
    missing = run_python(script, "record", "--data", "nowhere.csv", "--out", out)
    assert missing.returncode == 1 and "no Criteo file" in missing.stderr
    assert "Traceback" not in missing.stderr
