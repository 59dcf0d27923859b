"""What must be read before anything else."""

from __future__ import annotations

import dataclasses
import enum

from loka_toolkit.artifacts.dispatch_table import DispatchTable
from loka_toolkit.artifacts.map_facts import Coverage, MapFacts
from loka_toolkit.artifacts.replay_results import ReplayResults
from loka_toolkit.artifacts.safety_map import SafetyMap, SpeedEvidence
from loka_toolkit.artifacts.trace import Trace
from loka_toolkit.reporting import formatting as fmt
from loka_toolkit.reporting.overview_view import Overview
from loka_toolkit.reporting.trust_view import skip_reasons, trace_events


class Level(enum.StrEnum):
    """How much an alert matters; the value is the word shown before it."""

    DANGER = "Do not act on this map"
    WARNING = "Warning"
    NOTE = "Note"

    @property
    def css(self) -> str:
        """Class of its colours."""
        return self.name.lower()


@dataclasses.dataclass(frozen=True)
class Alert:
    """One alert.

    Attributes:
        level: How much it matters.
        text: What is the matter, in sentences.
        items: Particulars.
        target: Anchor of the section that says more, without ``#``.
    """

    level: Level
    text: str
    items: tuple[str, ...] = ()
    target: str | None = None


def alerts(
    safety: SafetyMap,
    summary: Overview,
    *,
    safety_digest: str | None,
    trace: Trace | None,
    replay: ReplayResults | None,
    table: DispatchTable | None,
) -> tuple[Alert, ...]:
    """Return the alerts, those that matter most first."""
    facts = safety.facts
    found = [
        *_fit_alerts(facts),
        *(Alert(Level.WARNING, text) for text in facts.alerts if not _in_banner(facts, text)),
        *_coverage_alerts(facts, () if trace is None else skip_reasons(trace)),
        *_result_alerts(safety, summary),
        *_provenance_alerts(facts, safety_digest, trace, replay, table),
    ]
    if trace is not None:
        found.extend(
            Alert(Level.WARNING, event.sentence)
            for event in trace_events(trace)
            if not _said(facts, event.message)
        )
    if replay is not None and not replay.facts.complete:
        text = "The replay was broken off before every workload was visited."
        found.append(Alert(Level.WARNING, text, target="replay"))
    order = list(Level)
    unique = {(alert.level, alert.text): alert for alert in reversed(found)}
    return tuple(sorted(reversed(unique.values()), key=lambda alert: order.index(alert.level)))


def coverage_sentence(coverage: Coverage) -> str:
    """Return which share of the work was seen, judged and repeated."""
    total = coverage.flops
    if total <= 0:
        return "No GEMM was seen at any sampled step."
    rest = [
        f"{fmt.share(flops / total).text} {what}"
        for what, flops in (
            ("belong to sites that are not judged", coverage.flops_not_judged),
            ("are sites running again", coverage.flops_repeated),
        )
        if flops > 0
    ]
    return (
        f"{fmt.share(coverage.flops_seen / total).text} of the GEMM FLOPs of a sampled step were "
        f"recorded as sites and judged ({fmt.flops(coverage.flops_seen)} of {fmt.flops(total)})"
        f"{''.join(f', {part}' for part in rest)}, over "
        f"{fmt.plural(coverage.steps_recorded, 'sampled step')}; "
        f"{fmt.plural(coverage.steps_skipped, 'sampled step')} skipped."
    )


def unseen_items(coverage: Coverage) -> tuple[str, ...]:
    """Return why work was not seen, the largest share first."""
    return _items(coverage, coverage.unseen_reasons)


def not_judged_items(coverage: Coverage) -> tuple[str, ...]:
    """Return why sites were not judged, likewise."""
    return _items(coverage, coverage.not_judged_reasons)


def repeated_items(coverage: Coverage) -> tuple[str, ...]:
    """Return why sites ran again, likewise."""
    return _items(coverage, coverage.repeated_reasons)


def _items(coverage: Coverage, reasons: dict[str, float]) -> tuple[str, ...]:
    total = coverage.flops
    if total <= 0:
        return ()
    ordered = sorted(reasons.items(), key=lambda pair: (-pair[1], pair[0]))
    return tuple(f"{reason}: {fmt.share(flops / total).text}" for reason, flops in ordered)


def _fit_alerts(facts: MapFacts) -> list[Alert]:
    if facts.health.healthy:
        return []
    text = "The fit is not healthy: an unhealthy fit yields no safe verdict."
    return [Alert(Level.DANGER, text, facts.health.problems, "trust")]


def _in_banner(facts: MapFacts, text: str) -> bool:
    """Whether an alert only repeats the problems of the fit, which stand above all alerts."""
    problems = facts.health.problems
    return not facts.health.healthy and bool(problems) and all(p in text for p in problems)


def _said(facts: MapFacts, words: str) -> bool:
    """Whether an alert of the map itself says so already."""
    return any(words in text for text in facts.alerts)


def _coverage_alerts(facts: MapFacts, skipped: tuple[str, ...]) -> list[Alert]:
    found = []
    coverage = facts.coverage
    total = coverage.flops
    if total <= 0:
        found.append(Alert(Level.DANGER, "No GEMM was seen at any sampled step."))
    elif coverage.flops_unseen > 0 and not _said(facts, "not seen"):
        text = (
            f"{fmt.share(coverage.flops_unseen / total).text} of the GEMM FLOPs were not seen; "
            "nothing in this report speaks of them."
        )
        found.append(Alert(Level.WARNING, text, unseen_items(coverage)))
    if coverage.steps_skipped and not _said(facts, "skipped"):
        text = (
            f"{fmt.plural(coverage.steps_skipped, 'sampled step')} skipped, for example as "
            f"non-finite; {fmt.count(coverage.steps_recorded).text} recorded."
        )
        found.append(Alert(Level.WARNING, text, skipped))
    return found


def _result_alerts(safety: SafetyMap, summary: Overview) -> list[Alert]:
    found = []
    if not safety.cells:
        found.append(Alert(Level.DANGER, "The map holds no cells: nothing was judged."))
        return found
    if summary.budget.within is False:
        text = (
            "The safe sites together are expected to cost more than the budget: "
            f"{summary.budget.total.text} against {summary.budget.budget.text}."
        )
        found.append(Alert(Level.WARNING, text, target="overview"))
    limit = safety.facts.tolerance.exceedance_rate
    if safety.facts.false_discovery_rate > limit:
        text = (
            f"The expected share of wrong safe verdicts is {summary.false_discovery_rate.text}, "
            f"above {fmt.share(limit).text}."
        )
        found.append(Alert(Level.WARNING, text, target="overview"))
    kinds = {cell.speedup_evidence for cell in safety.cells}
    if SpeedEvidence.MEASURED not in kinds:
        known = "predicted by the roofline model" if SpeedEvidence.PREDICTED in kinds else "unknown"
        text = (
            f"No speed was measured: every speed-up here is {known}. Replay the trace on the "
            "target chip to measure it."
        )
        found.append(Alert(Level.NOTE, text))
    return found


def _provenance_alerts(
    facts: MapFacts,
    safety_digest: str | None,
    trace: Trace | None,
    replay: ReplayResults | None,
    table: DispatchTable | None,
) -> list[Alert]:
    found = []
    if trace is not None and trace.digest != facts.trace_digest:
        found.append(
            "The trace given is not the one that the map was made from (its digest differs): "
            "distributions and verdicts may not belong together."
        )
    if replay is not None and replay.facts.trace_digest != facts.trace_digest:
        found.append("The replay results belong to another trace than the map.")
    if table is not None and safety_digest is not None and table.safety_digest != safety_digest:
        found.append("The dispatch table was built from another safety map than this one.")
    return [Alert(Level.WARNING, text, target="provenance") for text in found]
