"""Summaries as text: one line per fact, numbers with their units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from loka_toolkit.artifacts.dispatch_table import DispatchTable
from loka_toolkit.artifacts.safety_map import SafetyMap, Verdict
from loka_toolkit.console import table_lines
from loka_toolkit.workflows.inspect_environment import EnvironmentDescription
from loka_toolkit.workflows.summaries import (
    MapSummary,
    ReplaySummary,
    TableSummary,
    TraceSummary,
)


def counts_text(counts: Mapping[str, int | float]) -> str:
    """Return ``a 3, b 1``, or ``none``."""
    return ", ".join(f"{name} {value:g}" for name, value in counts.items()) or "none"


def percent(share: float | None) -> str:
    """Return a share as a percentage with sensible digits; a dash for None."""
    if share is None:
        return "-"
    return f"{100 * share:.3g} %"


def trace_lines(summary: TraceSummary) -> list[str]:
    """Return a trace's summary as lines."""
    state = "closed" if summary.closed else "NOT closed (killed, or still running)"
    lines = [
        f"trace      {summary.path}, {state}, ranks {summary.ranks}",
        f"steps      {summary.steps_seen} seen, {summary.steps_recorded} recorded, skipped: "
        f"{counts_text(summary.steps_skipped)}",
        f"sites      {counts_text(summary.sites_by_role)}",
        f"recipes    {', '.join(summary.recipes)}",
        f"not seen   {percent(summary.unseen_share)} of GEMM FLOPs: "
        f"{counts_text(summary.unseen_reasons)}",
        f"recording  {summary.seconds_recording:.2f} s",
    ]
    lines += [
        f"event      {event.kind} (x{event.count}): {event.message}" for event in summary.events
    ]
    return lines


def map_lines(summary: MapSummary, safety: SafetyMap, limit: int = 12) -> list[str]:
    """Return a map's summary and its sites that are not safe as lines."""
    lines = [f"alert      {alert}" for alert in summary.alerts]
    lines += [
        f"sites      {counts_text(summary.sites)}",
        f"FLOPs      {', '.join(f'{k} {percent(v)}' for k, v in summary.flops_share.items())}",
        f"cells      {counts_text(summary.cells)}",
        f"expected share of wrong 'safe' verdicts: {percent(summary.false_discovery_rate)}",
    ]
    rows = [
        [verdict.verdict.symbol, verdict.site, percent(verdict.flops_share), verdict.reason]
        for verdict in safety.site_verdicts()
        if verdict.verdict is not Verdict.SAFE
    ]
    if rows:
        lines += ["", *table_lines(["", "site", "FLOPs", "reason"], rows[:limit])]
    if len(rows) > limit:
        lines.append(f"... and {len(rows) - limit} more sites that are not safe")
    return lines


def replay_lines(summary: ReplaySummary) -> list[str]:
    """Return a replay's summary as lines."""
    lines = [
        f"replayed   {summary.sites} sites on {summary.chip}, policy {summary.policy}, "
        f"{'complete' if summary.complete else 'NOT complete'}",
        f"statuses   {counts_text(summary.statuses)}",
        "",
    ]
    rows = [[name, counts_text(found)] for name, found in summary.statuses_by_candidate.items()]
    return lines + table_lines(["candidate", "statuses"], rows)


def table_summary_lines(summary: TableSummary) -> list[str]:
    """Return a table's summary as lines."""
    return [
        f"table      for {summary.chip}, objective {summary.objective}",
        f"entries    {counts_text(summary.entries_by_role)}",
        f"kernels    {counts_text(summary.candidates)}",
        f"misses     {counts_text(summary.misses_by_reason)}",
    ]


def table_entry_lines(table: DispatchTable) -> list[str]:
    """Return every entry and miss of a table as lines."""
    entries: Sequence[Sequence[object]] = [
        [
            f"{entry.fqn}#{entry.call}:{entry.role}",
            f"{entry.tokens_min}-{entry.tokens_max}",
            entry.candidate,
            entry.scale_policy,
            percent(entry.evidence.p_exceed),
            entry.evidence.statement,
        ]
        for entry in table.entries
    ]
    misses = [
        [f"{miss.fqn}#{miss.call}:{miss.role}", miss.reason.value, miss.detail]
        for miss in table.misses
    ]
    lines = table_lines(["site", "tokens", "candidate", "scale", "P(exceed)", "evidence"], entries)
    return [*lines, "", *table_lines(["site in its own precision", "reason", "detail"], misses)]


def environment_lines(description: EnvironmentDescription) -> list[str]:
    """Return an environment's description as lines."""
    environment = description.environment
    lines = [
        f"chip       {environment.chip}"
        + (f", compute capability {environment.capability}" if environment.capability else ""),
        f"driver     {environment.driver or '-'}, CUDA {environment.cuda or '-'}",
        f"python     {environment.python} on {environment.platform}",
        f"loka       {environment.loka_toolkit}",
        f"libraries  {', '.join(f'{k} {v}' for k, v in environment.libraries.items())}",
    ]
    for extra, names in description.missing.items():
        lines.append(
            f"missing    {', '.join(names)}: pip install 'loka-toolkit[{extra}]' brings them"
        )
    rows = [[name, version or "absent"] for name, version in description.candidates.items()]
    return [*lines, "", *table_lines(["candidate", "library version"], rows)]
