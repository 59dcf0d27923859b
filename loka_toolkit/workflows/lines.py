"""Summaries as text: one line per fact, numbers with their units."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import TYPE_CHECKING

from loka_toolkit.artifacts.dispatch_table import DispatchTable
from loka_toolkit.artifacts.safety_map import SafetyMap, Verdict
from loka_toolkit.console import table_lines

if TYPE_CHECKING:
    from loka_toolkit.harness import Ceiling, Forecast
    from loka_toolkit.workflows.check_table import CheckReport
    from loka_toolkit.workflows.demo import DemoSummary
    from loka_toolkit.workflows.inspect_environment import (
        CandidateState,
        EnvironmentDescription,
    )
    from loka_toolkit.workflows.record_script import ScriptSummary
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
        f"not judged {percent(summary.not_judged_share)} of GEMM FLOPs: "
        f"{counts_text(summary.not_judged_reasons)}",
        f"repeated   {percent(summary.repeated_share)} of GEMM FLOPs: "
        f"{counts_text(summary.repeated_reasons)}",
        f"recording  {summary.seconds_recording:.2f} s",
    ]
    lines += [
        f"event      {event.kind} (x{event.count}): {event.message}" for event in summary.events
    ]
    return lines


def script_lines(summary: ScriptSummary) -> list[str]:
    """Return what was recorded of a script as lines."""
    lines = []
    for model in summary.models:
        lines += [f"model      {model.name} ({model.type})"]
        lines += [f"note       {note}" for note in model.notes]
        if model.trace is not None:
            lines += trace_lines(model.trace)
    return lines + [f"failure    {failure}" for failure in summary.failures]


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
    from loka_toolkit.dispatch import table_rows

    entries, misses = [], []
    for row in table_rows(table):
        site = f"{row['fqn']}#{row['call']}:{row['role']}"
        if row["reason"] is None:
            rate = percent(row["p_exceed"])
            columns = [row[name] for name in ("tokens", "candidate", "scale_policy")]
            entries.append([site, *columns, rate, row["detail"]])
        else:
            misses.append([site, row["reason"], row["detail"]])
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
    families: dict[str, list[CandidateState]] = {}
    for state in description.candidates:
        families.setdefault(state.name.partition("/")[0], []).append(state)
    rows = []
    for family, states in families.items():
        recipes = [s.name.partition("/")[2] for s in states if s.refusal is None]
        refusals = collections.Counter(s.refusal for s in states if s.refusal is not None)
        why = "" if recipes else f" ({refusals.most_common(1)[0][0]})"
        rows.append(
            [family, states[0].version or "absent", f"{len(recipes)} of {len(states)}" + why]
        )
    return [*lines, "", *table_lines(["kernels", "version", "recipes that run here"], rows)]


def estimate_lines(forecast: Forecast) -> list[str]:
    """Return predictions as lines, the most that could be gained first."""
    estimates = forecast.sites
    rows = [
        [
            row.site,
            row.recipe,
            f"{row.batch}x{row.m}x{row.n}x{row.k}",
            f"{row.baseline_us:.1f}",
            "-" if row.gemm_us is None else f"{row.cast_a_us + row.cast_b_us + row.gemm_us:.1f}",
            "-" if row.speedup is None else f"{row.speedup:.2f}",
        ]
        for row in estimates
    ]
    baseline = forecast.ceiling.baseline
    headers = ["site", "recipe", "batch x m x n x k", f"{baseline} us", "fp8 us", "speed-up"]
    return [
        *ceiling_lines(forecast.ceiling),
        "",
        "Each site by itself, every cast charged in full:",
        "",
        *table_lines(headers, rows),
        *dict.fromkeys(f"no time for {e.recipe}: {e.reason}" for e in estimates if e.reason),
    ]


def ceiling_lines(ceiling: Ceiling) -> list[str]:
    """Return the most that FP8 could gain as lines."""
    basis = "constants measured on it" if ceiling.measured else "data sheet, not measured"
    share = ""
    if ceiling.step_ms is not None:
        share = f", {ceiling.baseline_us / ceiling.step_ms / 10:.0f} % of a step"
    gains = [
        [
            name,
            f"{gain.saved_us:.1f}",
            f"{gain.gemms:.2f}",
            "-" if gain.step is None else f"{gain.step:.2f}",
        ]
        for name, gain in ceiling.gains().items()
    ]
    layers = [
        [
            layer.layer,
            next(iter(layer.roles.values())),
            f"{layer.baseline_us:.1f}",
            f"{layer.baseline_us / layer.standalone_us:.2f}" if layer.standalone_us else "-",
            f"{layer.baseline_us / layer.fused_us:.2f}" if layer.fused_us else "-",
            f"{layer.removed_us:.1f}",
            ", ".join(f"{role} {recipe}" for role, recipe in layer.fused.items()) or "none pays",
        ]
        for layer in ceiling.layers
    ]
    headers = ["layer", "batch x m x n x k", f"{ceiling.baseline} us", "alone", "fused"]
    lines = [
        f"At most, on {ceiling.chip}, by roofline ({basis}); nothing was run, no error is judged",
        "",
        f"products of a step: {ceiling.baseline_us:.1f} us in {ceiling.baseline}{share}",
        "",
        *table_lines(["account", "us saved", "products", "whole step"], gains),
        "",
        *table_lines([*headers, "Mods us", "in FP8 with fused casts"], layers),
    ]
    if not ceiling.recipes:
        lines += ["", f"{ceiling.chip} computes none of the recipes: no product can be faster"]
    if ceiling.step_ms is None:
        lines += ["", "the whole step: pass --step-ms, its time in 16 bits on that chip"]
    if ceiling.not_counted:
        lines += ["", f"not counted, no kernel can stand in: {', '.join(ceiling.not_counted)}"]
    return lines


def check_lines(report: CheckReport) -> list[str]:
    """Return what checking a table found as lines."""
    lines = [
        f"table      {'usable' if report.usable else 'NOT usable'} on {report.chip}",
        f"unmeasured {report.unmeasured} entries",
    ]
    rows = []
    for check in report.checks:
        state = "ok" if check.holds else "REFUSED" if check.hard else "differs"
        rows.append([state, check.name, check.expected or "none", check.actual or "none"])
    lines += ["", *table_lines(["", "validator", "expected", "actual"], rows)]
    if report.sites:
        sites = [
            [f"{s.fqn}#{s.call}:{s.role}", s.candidate or s.reason or "", s.detail]
            for s in report.sites
        ]
        lines += ["", *table_lines(["site", "kernel or reason", "detail"], sites)]
    lines += [f"mismatch   {line}" for line in report.mismatches]
    return lines


def demo_lines(summary: DemoSummary) -> list[str]:
    """Return the demo's summary as lines."""
    difference = summary.difference
    verdict = "resolved" if difference.resolved else "not resolved"
    lines = [
        f"sites      {counts_text(summary.site_verdicts)}",
        f"cells      {counts_text(summary.cell_verdicts)} (site x recipe)",
    ]
    lines += [f"unsafe     {site}: {reason}" for site, reason in summary.unsafe_sites.items()]
    lines += [
        f"in FP8     {counts_text(summary.fp8_sites)} (objective {summary.objective} on "
        f"{summary.chip}: not measured as faster)",
        f"misses     {counts_text(summary.misses)}",
        f"at run time {counts_text(summary.run_time_misses)}",
        f"log loss   {difference.log_loss_default:.6f} without the table, "
        f"{difference.log_loss_table:.6f} with it: "
        f"{100 * difference.relative_difference:+.4f} % +- "
        f"{100 * difference.standard_error:.4f} % over {difference.pairs} pairs ({verdict})",
        "",
    ]
    lines += [f"{name:<10} {path}" for name, path in summary.run.paths.items()]
    return lines
