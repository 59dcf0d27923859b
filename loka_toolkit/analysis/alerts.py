"""Sentences to be read before the map."""

from __future__ import annotations

from collections.abc import Sequence

from loka_toolkit.analysis.scales import AmaxSeries
from loka_toolkit.artifacts.map_facts import Coverage, FitHealth
from loka_toolkit.artifacts.safety_map import Cell, Verdict
from loka_toolkit.artifacts.sites import Operand
from loka_toolkit.artifacts.trace import Trace
from loka_toolkit.numerics.tolerance import Tolerance

FEW_STEPS = 10
UNSEEN_SHARE = 0.05
BIG_SHARE = 0.05
DRIFT_DEVIATIONS = 4.0
DRIFT_LOG2 = 1.0
"""An amax drifts if its slope is this many standard errors from zero and, going on, would double or
halve it before the next probe or within as many steps as were observed."""

_NAMED = 5


def alerts(
    trace: Trace,
    cells: Sequence[Cell],
    health: FitHealth,
    coverage: Coverage,
    series: Sequence[AmaxSeries],
    tolerance: Tolerance,
    unknown_sites: Sequence[str],
) -> tuple[str, ...]:
    """Return the alerts of a map, those that matter most first."""
    found = []
    if not health.healthy:
        found.append(
            f"The fit is unhealthy, so nothing is called safe: {'; '.join(health.problems)}."
        )
    if not all(m.status.closed for m in trace.manifests):
        found.append("The recording was not closed: the trace holds the steps flushed by then.")
    for manifest in trace.manifests:
        for event in manifest.events:
            times = f" ({event.count} times)" if event.count > 1 else ""
            found.append(f"Recorder, rank {manifest.rank}: {event.message}{times}")
    if coverage.steps_skipped:
        found.append(
            f"{_steps(coverage.steps_skipped)} skipped as non-finite or failed; "
            f"{coverage.steps_recorded} were recorded."
        )
    if coverage.steps_recorded < FEW_STEPS:
        found.append(
            f"Only {_steps(coverage.steps_recorded)} recorded: verdicts lean on what sites share."
        )
    found.extend(_coverage_alerts(coverage))
    found.extend(_unsafe_alert(cells))
    found.extend(_drift_alert(series, tolerance))
    if unknown_sites:
        found.append(
            f"Errors of {len(unknown_sites)} sites are left out because the trace does not "
            f"describe them: {_listed(unknown_sites)}."
        )
    return tuple(dict.fromkeys(found))


def _coverage_alerts(coverage: Coverage) -> list[str]:
    """Say what share of the work no verdict speaks of, where it is much."""
    total = coverage.flops
    parts = (
        ("not seen", coverage.flops_unseen, coverage.unseen_reasons),
        ("seen and not judged", coverage.flops_not_judged, coverage.not_judged_reasons),
    )
    found = []
    for what, flops, reasons in parts:
        if total and flops > UNSEEN_SHARE * total:
            ordered = sorted(reasons.items(), key=lambda item: -item[1])
            why = ", ".join(f"{reason} {part / total:.0%}" for reason, part in ordered)
            found.append(
                f"{flops / total:.0%} of the GEMM FLOPs were {what}" + (f": {why}." if why else ".")
            )
    return found


def _unsafe_alert(cells: Sequence[Cell]) -> list[str]:
    """Name sites that are unsafe under every recipe and do much of the work."""
    verdicts: dict[str, set[Verdict]] = {}
    shares: dict[str, float] = {}
    for cell in cells:
        verdicts.setdefault(cell.site, set()).add(cell.verdict)
        shares[cell.site] = cell.flops_share
    hopeless = [
        site
        for site, seen in verdicts.items()
        if seen == {Verdict.UNSAFE} and shares[site] >= BIG_SHARE
    ]
    if not hopeless:
        return []
    hopeless.sort(key=lambda site: -shares[site])
    named = [f"{site} ({shares[site]:.0%} of the FLOPs)" for site in hopeless]
    return [f"Unsafe under every recipe considered: {_listed(named)}."]


def _drift_alert(series: Sequence[AmaxSeries], tolerance: Tolerance) -> list[str]:
    """Name gradients whose amax drifts; a slope is followed no further than it was observed."""
    observed = max((int(s.step[-1] - s.step[0]) for s in series if len(s.step)), default=0)
    ahead = min(tolerance.horizon_steps, observed)
    drifting = [
        f"{s.operand} of {s.layer} ({s.per_step * ahead:+.1f} octaves)"
        for s in sorted(series, key=lambda s: -abs(s.per_step))
        if s.operand is Operand.G
        and abs(s.slope_deviations) > DRIFT_DEVIATIONS
        and abs(s.per_step) * ahead > DRIFT_LOG2
    ]
    if not drifting:
        return []
    return [
        f"The largest gradient drifts; going on for {ahead:,} steps it would move: "
        f"{_listed(drifting)}. Static scales of these will not last."
    ]


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMED])
    return shown + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def _steps(count: int) -> str:
    return f"{count} sampled step{' was' if count == 1 else 's were'}"
