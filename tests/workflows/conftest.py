"""Safety maps made by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from loka_toolkit.artifacts.map_facts import Coverage, FitHealth, MapFacts
from loka_toolkit.artifacts.safety_map import Cell, SafetyMap, SpeedEvidence, Verdict
from loka_toolkit.environment import current_environment
from loka_toolkit.numerics.tolerance import REASONS, Tolerance


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
