"""Short summaries of artifacts, for machines; ``lines`` turns them into text."""

from __future__ import annotations

from collections import Counter

import msgspec

from loka_toolkit.artifacts.dispatch_table import DispatchTable
from loka_toolkit.artifacts.replay_results import ReplayResults
from loka_toolkit.artifacts.safety_map import SafetyMap
from loka_toolkit.artifacts.trace import Event, Trace


class TraceSummary(msgspec.Struct, frozen=True):
    """What a trace holds.

    Attributes:
        path: Its directory.
        closed: Whether every rank closed it.
        ranks: Ranks that wrote.
        steps_seen: Calls of ``step()``, over ranks.
        steps_recorded: Sampled steps with rows, over ranks.
        steps_skipped: Sampled steps skipped, by status.
        sites_by_role: Distinct sites per role.
        recipes: Recipes answered for.
        unseen_share: Share of GEMM FLOPs that no site accounts for, or null.
        unseen_reasons: FLOPs per sampled step, by reason.
        not_judged_share: Share of GEMM FLOPs of sites without errors, or null.
        not_judged_reasons: FLOPs per sampled step, by reason.
        repeated_share: Share of GEMM FLOPs of sites that ran again, or null.
        repeated_reasons: FLOPs per sampled step, by reason.
        seconds_recording: Time spent recording, over sampled steps and ranks.
        events: What a reader must know.
    """

    path: str
    closed: bool
    ranks: int
    steps_seen: int
    steps_recorded: int
    steps_skipped: dict[str, int]
    sites_by_role: dict[str, int]
    recipes: tuple[str, ...]
    unseen_share: float | None
    unseen_reasons: dict[str, float]
    not_judged_share: float | None
    not_judged_reasons: dict[str, float]
    repeated_share: float | None
    repeated_reasons: dict[str, float]
    seconds_recording: float
    events: tuple[Event, ...]


def summarize_trace(trace: Trace) -> TraceSummary:
    """Return what a trace holds."""
    steps = trace.steps.to_pylist()
    sites = {row["site"]: row["role"] for row in trace.sites.select(["site", "role"]).to_pylist()}
    recorded = [row for row in steps if row["status"] == "recorded"]
    parts = ("seen", "not_judged", "repeated", "unseen")
    total = sum(row[f"gemm_flops_{part}"] for row in recorded for part in parts)

    def share(part: str) -> float | None:
        flops = sum(row[f"gemm_flops_{part}"] for row in recorded)
        return flops / total if total else None

    def reasons(part: str) -> dict[str, float]:
        found: Counter[str] = Counter()
        for row in recorded:
            text = row[f"{part}_reason"] or "{}"
            found.update(msgspec.json.decode(text, type=dict[str, float]))
        return {reason: flops / len(recorded) for reason, flops in sorted(found.items())}

    return TraceSummary(
        path=str(trace.path),
        closed=all(m.status.closed for m in trace.manifests),
        ranks=len(trace.manifests),
        steps_seen=sum(m.status.steps_seen for m in trace.manifests),
        steps_recorded=len(recorded),
        steps_skipped=dict(Counter(r["status"] for r in steps if r["status"] != "recorded")),
        sites_by_role=dict(sorted(Counter(sites.values()).items())),
        recipes=trace.manifest.recipes,
        unseen_share=share("unseen"),
        unseen_reasons=reasons("unseen"),
        not_judged_share=share("not_judged"),
        not_judged_reasons=reasons("not_judged"),
        repeated_share=share("repeated"),
        repeated_reasons=reasons("repeated"),
        seconds_recording=sum(row["seconds_recording"] for row in steps),
        events=tuple(event for m in trace.manifests for event in m.events),
    )


class MapSummary(msgspec.Struct, frozen=True):
    """What a safety map concludes.

    Attributes:
        sites: Sites per verdict.
        cells: Cells per verdict.
        flops_share: Share of GEMM FLOPs per verdict of the site.
        false_discovery_rate: Expected share of wrong ``safe`` verdicts.
        healthy: Whether the sampler passed its gates.
        alerts: Sentences to be read first.
    """

    sites: dict[str, int]
    cells: dict[str, int]
    flops_share: dict[str, float]
    false_discovery_rate: float
    healthy: bool
    alerts: tuple[str, ...]


def summarize_map(safety: SafetyMap) -> MapSummary:
    """Return what a safety map concludes."""
    verdicts = safety.site_verdicts()
    shares: dict[str, float] = {}
    for site in verdicts:
        shares[site.verdict.value] = shares.get(site.verdict.value, 0.0) + site.flops_share
    return MapSummary(
        sites=dict(sorted(Counter(v.verdict.value for v in verdicts).items())),
        cells=dict(sorted(Counter(cell.verdict.value for cell in safety.cells).items())),
        flops_share=dict(sorted(shares.items())),
        false_discovery_rate=safety.facts.false_discovery_rate,
        healthy=safety.facts.health.healthy,
        alerts=safety.facts.alerts,
    )


class TableSummary(msgspec.Struct, frozen=True):
    """What a dispatch table does.

    Attributes:
        chip: Chip it is for.
        objective: What it was built for.
        entries_by_role: Entries per role.
        candidates: Entries per candidate.
        misses_by_reason: Recorded sites left in their original precision.
    """

    chip: str
    objective: str
    entries_by_role: dict[str, int]
    candidates: dict[str, int]
    misses_by_reason: dict[str, int]


def summarize_table(table: DispatchTable) -> TableSummary:
    """Return what a dispatch table does."""
    return TableSummary(
        chip=table.chip,
        objective=table.objective.value,
        entries_by_role=dict(sorted(Counter(e.role for e in table.entries).items())),
        candidates=dict(sorted(Counter(e.candidate for e in table.entries).items())),
        misses_by_reason=dict(sorted(Counter(m.reason.value for m in table.misses).items())),
    )


class ReplaySummary(msgspec.Struct, frozen=True):
    """How the candidates fared.

    Attributes:
        chip: Chip it ran on.
        policy: Measurement policy.
        sites: Sites replayed.
        statuses: Rows per status.
        statuses_by_candidate: The same per candidate.
        complete: Whether every workload was visited.
    """

    chip: str
    policy: str
    sites: int
    statuses: dict[str, int]
    statuses_by_candidate: dict[str, dict[str, int]]
    complete: bool


def summarize_replay(results: ReplayResults) -> ReplaySummary:
    """Return how the candidates fared."""
    by_candidate: dict[str, Counter[str]] = {}
    for row in results.rows:
        by_candidate.setdefault(row.candidate, Counter())[row.status.value] += 1
    return ReplaySummary(
        chip=results.facts.environment.chip,
        policy=results.facts.policy,
        sites=len({row.site for row in results.rows}),
        statuses=dict(sorted(Counter(row.status.value for row in results.rows).items())),
        statuses_by_candidate={k: dict(sorted(v.items())) for k, v in sorted(by_candidate.items())},
        complete=results.facts.complete,
    )
