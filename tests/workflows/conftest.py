"""Safety maps made by hand; scripts that are recorded in this process."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from loka_toolkit.artifacts.map_facts import Coverage, FitHealth, MapFacts
from loka_toolkit.artifacts.safety_map import Cell, SafetyMap, SpeedEvidence, Verdict
from loka_toolkit.artifacts.trace import Trace
from loka_toolkit.environment import current_environment
from loka_toolkit.numerics.tolerance import REASONS, Tolerance
from loka_toolkit.recording import Schedule
from loka_toolkit.workflows.record_script import ScriptOptions, ScriptSummary, record_script
from loka_toolkit.workflows.script_program import Program


def make_cell(site: str, recipe: str, verdict: Verdict) -> Cell:
    fqn, _, rest = site.partition("#")
    call, _, role = rest.partition(":")
    return Cell(
        site=site,
        fqn=fqn,
        call=int(call),
        role=role,
        recipe=recipe,
        module_type="Linear",
        weight=f"{fqn}.weight",
        dispatchable=True,
        batch=1,
        m=512,
        n=128,
        k=71,
        dtype="float32",
        flops_share=0.25,
        evidence_steps=30,
        evidence_effective=30.0,
        sqnr_db=29.0,
        sqnr_db_lo=28.0,
        sqnr_db_hi=30.0,
        row_sqnr_db=27.0,
        underflow_share_worst_group=0.0,
        underflow_worst_group=None,
        saturation_share=0.0,
        p_exceed=0.01,
        p_exceed_lo=0.0,
        p_exceed_hi=0.03,
        p_exceed_mcse=0.001,
        p_unsafe=0.01,
        binding_criterion="sqnr",
        impact=None,
        impact_lo=None,
        impact_hi=None,
        impact_allotment=1e-5,
        impact_reason="examples not given",
        gradient_bias=None,
        gradient_noise_ratio=None,
        drift_db_per_1000_steps=None,
        verdict=verdict,
        reason="made by hand",
        fast=False,
        speedup=None,
        speedup_evidence=SpeedEvidence.NONE,
        posteriors={},
    )


MapMaker = Callable[..., SafetyMap]


@pytest.fixture
def make_map() -> MapMaker:
    def make(verdicts: dict[tuple[str, str], Verdict], *, healthy: bool = True) -> SafetyMap:
        facts = MapFacts(
            created="2026-01-01T00:00:00Z",
            environment=current_environment(),
            trace_environment=current_environment(),
            trace_digest="0" * 64,
            config={},
            tolerance=Tolerance(),
            tolerance_reasons=REASONS,
            recipes=tuple(sorted({recipe for _, recipe in verdicts})),
            baseline_loss=0.4,
            false_discovery_rate=0.01,
            health=FitHealth(
                healthy=healthy,
                problems=() if healthy else ("R-hat 1.2 exceeds 1.01",),
                max_r_hat=1.0 if healthy else 1.2,
                min_ess=900.0,
                divergences=0,
                min_bfmi=0.9,
                chains=4,
                draws=500,
                seconds=1.0,
            ),
            hyperparameters=(),
            scales=(),
            coverage=Coverage(1.0, 0.0, {}, 30, 0),
            alerts=(),
        )
        cells = tuple(make_cell(site, recipe, v) for (site, recipe), v in verdicts.items())
        return SafetyMap(cells=cells, facts=facts)

    return make


PRELUDE = """
import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
def batch(rows=24, width=13):
    return torch.distributions.StudentT(2.0).sample((rows, width))
def mlp(width=13, out=1):
    return nn.Sequential(nn.Linear(width, 7), nn.ReLU(), nn.Linear(7, out))
def loss_of(logits):
    return F.binary_cross_entropy_with_logits(logits[:, 0], torch.ones(len(logits)))
"""

ONE_MODEL = """
model = mlp()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
for step in range(4):
    optimizer.zero_grad()
    loss_of(model(batch())).backward()
    optimizer.step()
    scheduler.step()
"""


class Ran:
    """A script that was recorded."""

    def __init__(self, out: Path, program: Program, summary: ScriptSummary) -> None:
        self.out = out
        self.variables = vars(program.main)
        self.summary = summary

    def trace(self, name: str = "") -> Trace:
        return Trace.open(self.out / name)

    def steps(self, name: str = "") -> int:
        return self.trace(name).manifest.status.steps_seen

    def roles(self, name: str = "") -> dict[str, set[str]]:
        sites = self.trace(name).sites.to_pandas()
        return {fqn: set(rows.role) for fqn, rows in sites.groupby("fqn")}

    def events(self, name: str = "") -> set[str]:
        return {event.kind for event in self.trace(name).manifest.events}


@pytest.fixture
def untouched() -> Iterator[None]:
    """Check that a run leaves the process as it found it."""

    def state() -> tuple[Any, ...]:
        return (
            nn.Module.__call__,
            torch.optim.Optimizer.__init__,
            torch.amp.GradScaler.step,
            torch.autograd.backward,
            len(_global_optimizer_pre_hooks),
            len(_global_optimizer_post_hooks),
            torch.utils._python_dispatch._get_current_dispatch_mode_stack(),
            sys.modules["__main__"],
            list(sys.argv),
            list(sys.path),
        )

    before = state()
    yield
    assert state() == before


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Ran]:
    def run_text(text: str, *arguments: str, **options: Any) -> Ran:
        script = tmp_path / "train.py"
        script.write_text(PRELUDE + textwrap.dedent(text))
        program = Program(str(script), arguments, is_module=False)
        options.setdefault("recipes", ("e4m3/tensorwise/fast",))
        options.setdefault("schedule", Schedule.always())
        out = tmp_path / "run"
        return Ran(out, program, record_script(program, ScriptOptions(out=out, **options)))

    return run_text


@pytest.fixture
def one_model() -> str:
    """Return a script of four steps; the helpers that it uses stand before it."""
    return ONE_MODEL


@pytest.fixture
def prelude() -> str:
    """Return the helpers that stand before every script."""
    return PRELUDE
