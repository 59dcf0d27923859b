"""The map as a reader sees it: the row of a site over all recipes, the row of a cell."""

from __future__ import annotations

import dataclasses
import math

from loka_toolkit.artifacts.safety_map import Cell, SafetyMap, SpeedEvidence, Verdict
from loka_toolkit.artifacts.sites import Role
from loka_toolkit.numerics.tolerance import Tolerance
from loka_toolkit.reporting import formatting as fmt
from loka_toolkit.reporting.formatting import Quantity

_SHORT = {Verdict.SAFE: "safe", Verdict.UNSAFE: "unsafe", Verdict.INSUFFICIENT: "insufficient"}
_GRADIENT_ROLES = frozenset(role.value for role in Role if role.is_gradient)


@dataclasses.dataclass(frozen=True)
class VerdictMark:
    """A verdict as it is shown.

    Attributes:
        name: ``safe``, ``unsafe`` or ``insufficient-evidence``.
        css: Class of its colours.
        symbol: The sign before the word.
        short: The word where space is scarce.
    """

    name: str
    css: str
    symbol: str
    short: str

    @classmethod
    def of(cls, verdict: Verdict) -> VerdictMark:
        """Return the mark of a verdict."""
        short = _SHORT[verdict]
        return cls(name=verdict.value, css=short, symbol=verdict.symbol, short=short)


@dataclasses.dataclass(frozen=True)
class CellRow:
    """One site under one recipe.

    Attributes:
        anchor: Identifier of the row in the page.
        site: Site name.
        role: Its role.
        module_type: Class of its module.
        recipe: Recipe name.
        shape: Dimensions, written out.
        flops: Share of the GEMM FLOPs.
        mark: The verdict.
        p_exceed: Exceedance rate.
        by_impact: Whether it is unsafe for its impact although its exceedance rate may be within
            the tolerance.
        p_exceed_interval: Its 5-95 % interval.
        sqnr: Posterior mean of the SQNR.
        sqnr_interval: 5-95 % of a future step.
        impact: Impact for a forward site; the gradient's bias for a gradient site.
        impact_detail: Interval and allotment, or bias and noise.
        impact_share: Impact over allotment; of a gradient site, the larger of bias and noise over
            their limits.
        speedup: Speed-up.
        speed_evidence: ``measured``, ``predicted`` or ``not measured``.
        fast: Safe and fast.
        steps: Evidence: steps and effective steps.
        notes: Worst column group, drift, binding criterion.
        reason: Why the verdict is what it is.
    """

    anchor: str
    site: str
    role: str
    module_type: str
    recipe: str
    shape: str
    flops: Quantity
    mark: VerdictMark
    p_exceed: Quantity
    by_impact: bool
    p_exceed_interval: str
    sqnr: Quantity
    sqnr_interval: str
    impact: str
    impact_detail: str
    impact_share: Quantity
    speedup: Quantity
    speed_evidence: str
    fast: bool
    steps: Quantity
    notes: tuple[str, ...]
    reason: str


@dataclasses.dataclass(frozen=True)
class SiteRow:
    """One site over all recipes.

    Attributes:
        site: Site name.
        role: Its role.
        module_type: Class of its module.
        shape: Dimensions, written out.
        flops: Share of the GEMM FLOPs.
        mark: The site's verdict.
        recipe: The recipe that made it safe, or None.
        fast: Whether a safe recipe is fast.
        dispatchable: Whether a kernel can stand in for it at all.
        cells: Its cells in the order of the map's recipes; None where a recipe was not judged.
        reason: The deciding cell's reason.
    """

    site: str
    role: str
    module_type: str
    shape: str
    flops: Quantity
    mark: VerdictMark
    recipe: str | None
    fast: bool
    dispatchable: bool
    cells: tuple[CellRow | None, ...]
    reason: str


def recipes_of(safety: SafetyMap) -> tuple[str, ...]:
    """Return the recipes of the map's facts, then any that only cells name."""
    return tuple(dict.fromkeys((*safety.facts.recipes, *(cell.recipe for cell in safety.cells))))


def site_rows(safety: SafetyMap) -> tuple[SiteRow, ...]:
    """Return one row per site, in the order of the cells."""
    cells = {
        (c.site, c.recipe): (c, _cell_row(c, i, safety.facts.tolerance))
        for i, c in enumerate(safety.cells)
    }
    recipes = recipes_of(safety)
    rows = []
    for verdict in safety.site_verdicts():
        found = [cells.get((verdict.site, recipe)) for recipe in recipes]
        cell = next(pair[0] for pair in found if pair is not None)
        rows.append(
            SiteRow(
                site=verdict.site,
                role=verdict.role,
                module_type=cell.module_type,
                shape=fmt.shape(cell.batch, cell.m, cell.n, cell.k),
                flops=fmt.share(verdict.flops_share),
                mark=VerdictMark.of(verdict.verdict),
                recipe=verdict.recipe,
                fast=verdict.fast,
                dispatchable=cell.dispatchable,
                cells=tuple(None if pair is None else pair[1] for pair in found),
                reason=verdict.reason,
            )
        )
    return tuple(rows)


def _cell_row(cell: Cell, index: int, tolerance: Tolerance) -> CellRow:
    impact, detail, spent = _impact(cell, tolerance)
    return CellRow(
        anchor=f"cell-{index}",
        site=cell.site,
        role=cell.role,
        module_type=cell.module_type,
        recipe=cell.recipe,
        shape=fmt.shape(cell.batch, cell.m, cell.n, cell.k),
        flops=fmt.share(cell.flops_share),
        mark=VerdictMark.of(cell.verdict),
        p_exceed=fmt.share(cell.p_exceed),
        by_impact=cell.verdict is Verdict.UNSAFE
        and cell.p_exceed_lo is not None
        and cell.p_exceed_lo <= tolerance.exceedance_rate,
        p_exceed_interval=fmt.interval(fmt.share(cell.p_exceed_lo), fmt.share(cell.p_exceed_hi)),
        sqnr=fmt.decibel(cell.sqnr_db),
        sqnr_interval=fmt.interval(fmt.decibel(cell.sqnr_db_lo), fmt.decibel(cell.sqnr_db_hi)),
        impact=impact,
        impact_detail=detail,
        impact_share=spent,
        speedup=fmt.factor(cell.speedup),
        speed_evidence=(
            "not measured"
            if cell.speedup_evidence is SpeedEvidence.NONE
            else cell.speedup_evidence.value
        ),
        fast=cell.fast,
        steps=fmt.count(cell.evidence_steps),
        notes=_notes(cell),
        reason=cell.reason,
    )


def _impact(cell: Cell, tolerance: Tolerance) -> tuple[str, str, Quantity]:
    if cell.role in _GRADIENT_ROLES:
        return _gradient_impact(cell, tolerance)
    impact = fmt.relative(cell.impact)
    allotment = fmt.relative(cell.impact_allotment).text
    if impact.raw is None:
        return fmt.MISSING, cell.impact_reason or f"not known; {allotment} allotted", impact
    between = fmt.interval(fmt.relative(cell.impact_lo), fmt.relative(cell.impact_hi))
    detail = f"{between} of {allotment} allotted".strip()
    if cell.impact_reason:
        detail = f"{detail}; {cell.impact_reason}"
    return impact.text, detail, _spent(impact.raw, cell.impact_allotment)


def _gradient_impact(cell: Cell, tolerance: Tolerance) -> tuple[str, str, Quantity]:
    bias, noise = fmt.known(cell.gradient_bias), fmt.known(cell.gradient_noise_ratio)
    if bias is None and noise is None:
        return fmt.MISSING, cell.impact_reason or "effect on the update not known", fmt.share(None)
    spent = [
        _spent(abs(value), limit)
        for value, limit in (
            (bias, tolerance.gradient_bias),
            (noise, tolerance.gradient_noise_ratio),
        )
        if value is not None
    ]
    largest = max((q.raw for q in spent if q.raw is not None), default=None)
    text = f"bias {fmt.share(bias).text}" if bias is not None else "bias not known"
    detail = f"noise {fmt.share(noise).text}" if noise is not None else "noise not known"
    return text, detail, fmt.share(largest)


def _spent(value: float, limit: float) -> Quantity:
    return fmt.share(value / limit if limit > 0 else math.inf if value > 0 else 0.0)


def _notes(cell: Cell) -> tuple[str, ...]:
    notes = []
    if not cell.dispatchable:
        notes.append("no kernel can stand in for it")
    if cell.binding_criterion:
        notes.append(f"binding criterion: {cell.binding_criterion}")
    if cell.underflow_share_worst_group > 0:
        group = f" in {cell.underflow_worst_group}" if cell.underflow_worst_group else ""
        notes.append(f"underflow {fmt.share(cell.underflow_share_worst_group).text}{group}")
    if cell.saturation_share > 0:
        notes.append(f"saturation {fmt.share(cell.saturation_share).text}")
    drift = fmt.known(cell.drift_db_per_1000_steps)
    if drift is not None:
        notes.append(f"drift {fmt.decibel(drift).text} per 1000 steps")
    if fmt.known(cell.row_sqnr_db) is not None:
        notes.append(f"5th-percentile row {fmt.decibel(cell.row_sqnr_db).text}")
    if fmt.known(cell.p_unsafe) is not None:
        notes.append(f"P(rate above the limit) {fmt.share(cell.p_unsafe).text}")
    if fmt.known(cell.p_exceed_mcse) is not None:
        notes.append(f"Monte Carlo error {fmt.share(cell.p_exceed_mcse).text}")
    notes.append(f"{fmt.significant(cell.evidence_effective)} effective steps")
    return tuple(notes)
