"""Everything a report shows, as data: artifacts go in, a frozen view comes out."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping
from typing import Any

from loka_toolkit.artifacts.dispatch_table import DispatchTable
from loka_toolkit.artifacts.replay_results import ReplayResults
from loka_toolkit.artifacts.safety_map import SafetyMap
from loka_toolkit.artifacts.sites import Role
from loka_toolkit.artifacts.trace import Trace
from loka_toolkit.errors import ConfigurationError
from loka_toolkit.reporting import (
    calibration_view,
    map_view,
    overview_view,
    replay_view,
    site_view,
    trust_view,
)
from loka_toolkit.reporting import formatting as fmt
from loka_toolkit.reporting.alert_view import (
    Alert,
    alerts,
    coverage_sentence,
    not_judged_items,
    repeated_items,
    unseen_items,
)
from loka_toolkit.reporting.glossary import TERMS

DEFAULT_TITLE = "FP8 safety report"


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The artifacts of a report, and where they came from.

    Attributes:
        safety: The safety map.
        trace: The trace, if given.
        replay: Replay results, if given.
        table: A dispatch table, if given.
        locations: Path as given, by ``safety map``, ``trace``, ``replay results`` and
            ``dispatch table``, of those read from a path.
        digests: SHA-256 by the same names, where known.
    """

    safety: SafetyMap
    trace: Trace | None = None
    replay: ReplayResults | None = None
    table: DispatchTable | None = None
    locations: dict[str, str] = dataclasses.field(default_factory=dict)
    digests: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class ReportView:
    """A report.

    Attributes:
        title: Its title.
        subtitle: What it speaks of: chip, date, sizes.
        alerts: What must be read first.
        overview: The map in a few numbers.
        coverage: Which share of the work was seen.
        unseen: Why work was not seen.
        not_judged: Why sites were not judged.
        repeated: Why sites ran again.
        recording: What recording cost; empty without a trace.
        recipes: Columns of the map.
        sites: Rows of the map.
        roles: Roles present, for the filter.
        verdicts: Verdicts, for the filter and the legend.
        norms: Norm sites; None without a trace.
        unjudged: Recorded products without a verdict; None without a trace.
        details: The sites that matter most.
        health: Whether to trust the fit.
        calibration: Whether the steps fell where the fit says; or why that is not known.
        tolerance: The tolerance.
        scales: Static scales.
        replay: Replay results; None if not given.
        table: Dispatch table; None if not given.
        sources: What the report was made from.
        environments: Fingerprints.
        glossary: Terms.
    """

    title: str
    subtitle: str
    alerts: tuple[Alert, ...]
    overview: overview_view.Overview
    coverage: str
    unseen: tuple[str, ...]
    not_judged: tuple[str, ...]
    repeated: tuple[str, ...]
    recording: str
    recipes: tuple[str, ...]
    sites: tuple[map_view.SiteRow, ...]
    roles: tuple[str, ...]
    verdicts: tuple[map_view.VerdictMark, ...]
    norms: tuple[site_view.NormRow, ...] | None
    unjudged: tuple[site_view.UnjudgedRow, ...] | None
    details: site_view.Details
    health: trust_view.HealthView
    calibration: calibration_view.Calibration | str
    tolerance: tuple[trust_view.ToleranceRow, ...]
    scales: tuple[trust_view.ScaleRow, ...]
    replay: replay_view.ReplayView | None
    table: replay_view.TableView | None
    sources: tuple[trust_view.Source, ...]
    environments: trust_view.EnvironmentTable
    glossary: tuple[tuple[str, str], ...]

    @property
    def cells(self) -> tuple[map_view.CellRow, ...]:
        """The cells, site by site."""
        return tuple(cell for site in self.sites for cell in site.cells if cell is not None)


def build_view(inputs: Inputs, *, top: int = 20, title: str | None = None) -> ReportView:
    """Return everything that a report of these artifacts shows.

    Args:
        inputs: The artifacts.
        top: How many sites are shown in detail.
        title: The title.

    Raises:
        ConfigurationError: If ``top`` is negative.
        ArtifactError: If the trace cannot be read.
    """
    if top < 0:
        raise ConfigurationError(f"top = {top} must be at least 0: the number of sites in detail")
    safety, trace = inputs.safety, inputs.trace
    summary = overview_view.overview(safety)
    sites = map_view.site_rows(safety)
    order = {role.value: index for index, role in enumerate(Role)}
    roles = sorted({site.role for site in sites}, key=lambda r: (order.get(r, len(order)), r))
    return ReportView(
        title=title or DEFAULT_TITLE,
        subtitle=_subtitle(safety),
        alerts=alerts(
            safety,
            summary,
            safety_digest=inputs.digests.get("safety map"),
            trace=trace,
            replay=inputs.replay,
            table=inputs.table,
        ),
        overview=summary,
        coverage=coverage_sentence(safety.facts.coverage),
        unseen=unseen_items(safety.facts.coverage),
        not_judged=not_judged_items(safety.facts.coverage),
        repeated=repeated_items(safety.facts.coverage),
        recording="" if trace is None else _recording_cost(trace),
        recipes=map_view.recipes_of(safety),
        sites=sites,
        roles=tuple(roles),
        verdicts=tuple(tally.mark for tally in summary.tallies),
        norms=None if trace is None else site_view.norm_rows(trace),
        unjudged=None if trace is None else site_view.unjudged_rows(trace, safety),
        details=site_view.details(safety, sites, trace, top),
        health=trust_view.health(safety),
        calibration=calibration_view.calibration(safety, trace),
        tolerance=trust_view.tolerance(safety.facts),
        scales=trust_view.scales(safety.facts),
        replay=None if inputs.replay is None else replay_view.replay(inputs.replay),
        table=None if inputs.table is None else replay_view.table(inputs.table),
        sources=_sources(inputs),
        environments=_environments(inputs),
        glossary=TERMS,
    )


def _subtitle(safety: SafetyMap) -> str:
    facts = safety.facts
    sites = len({cell.site for cell in safety.cells})
    loss = facts.baseline_loss
    baseline = "" if loss is None else f"; baseline loss {fmt.significant(loss, 5)}"
    return (
        f"{fmt.plural(sites, 'GEMM site')} under {fmt.plural(len(facts.recipes), 'recipe')}, "
        f"recorded on {facts.trace_environment.chip}, analyzed {facts.created}{baseline}"
    )


def _recording_cost(trace: Trace) -> str:
    seconds = trace.steps["seconds_recording"].to_pylist()
    if not seconds:
        return "No sampled step was flushed."
    return (
        f"Recording took {fmt.significant(1000 * statistics.median(seconds))} ms of a sampled step "
        f"(median of {fmt.plural(len(seconds), 'step')}, all ranks)."
    )


def _sources(inputs: Inputs) -> tuple[trust_view.Source, ...]:
    facts = inputs.safety.facts
    found: list[tuple[str, str | None, str | None, Mapping[str, Any]]] = [
        ("safety map", facts.created, inputs.digests.get("safety map"), facts.config)
    ]
    if inputs.trace is None:
        found.append(("trace", None, facts.trace_digest, {}))
    else:
        manifest = inputs.trace.manifest
        found.append(("trace", manifest.created, inputs.trace.digest, manifest.config))
    if inputs.replay is not None:
        replay = inputs.replay.facts
        name = "replay results"
        found.append((name, replay.created, inputs.digests.get(name), replay.config))
    if inputs.table is not None:
        name, table = "dispatch table", inputs.table
        found.append((name, table.created, inputs.digests.get(name), table.config))
    return tuple(
        trust_view.source(
            name,
            location=inputs.locations.get(name),
            created=created,
            digest=digest,
            config=config,
        )
        for name, created, digest, config in found
    )


def _environments(inputs: Inputs) -> trust_view.EnvironmentTable:
    facts = inputs.safety.facts
    columns = [("recording", facts.trace_environment), ("analysis", facts.environment)]
    if inputs.replay is not None:
        columns.append(("replay", inputs.replay.facts.environment))
    if inputs.table is not None:
        columns.append(("dispatch table", inputs.table.environment))
    return trust_view.environments(columns)
