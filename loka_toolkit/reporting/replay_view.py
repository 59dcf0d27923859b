"""Replay results and dispatch table as a reader sees them."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable

from loka_toolkit.artifacts.dispatch_table import DispatchTable, MissReason
from loka_toolkit.artifacts.replay_results import ReplayResults, ReplayRow, Status
from loka_toolkit.artifacts.sites import Role
from loka_toolkit.reporting import formatting as fmt
from loka_toolkit.reporting.formatting import Quantity


@dataclasses.dataclass(frozen=True)
class CandidateRow:
    """One candidate over all workloads.

    Attributes:
        candidate: Its name.
        library: Library and version.
        recipe: The recipe it implements.
        emulated: Whether its arithmetic is emulated.
        workloads: Workloads tried.
        statuses: Count per status of :class:`Status`, in its order.
        kernel_sqnr: Least SQNR against float64 on the de-quantized operands.
        total_sqnr: Least SQNR against float64 on the original operands.
        excess: Largest total error over the emulation's.
        latency: Median over workloads of the median latency, casts included.
        detail: The most frequent explanation of a failure.
    """

    candidate: str
    library: str
    recipe: str
    emulated: bool
    workloads: Quantity
    statuses: tuple[int, ...]
    kernel_sqnr: Quantity
    total_sqnr: Quantity
    excess: Quantity
    latency: Quantity
    detail: str


@dataclasses.dataclass(frozen=True)
class ReplayView:
    """A replay.

    Attributes:
        sentence: What was done.
        incomplete: Whether it was broken off.
        statuses: Names of the statuses, the order of the counts.
        totals: Rows per status.
        candidates: A row per candidate.
    """

    sentence: str
    incomplete: bool
    statuses: tuple[str, ...]
    totals: tuple[int, ...]
    candidates: tuple[CandidateRow, ...]


@dataclasses.dataclass(frozen=True)
class RoleRow:
    """Entries and misses of one role."""

    role: str
    entries: int
    misses: int


@dataclasses.dataclass(frozen=True)
class EntryRow:
    """One entry of a table."""

    site: str
    role: str
    candidate: str
    recipe: str
    scale_policy: str
    tokens: str
    speedup: Quantity
    evidence: str


@dataclasses.dataclass(frozen=True)
class MissRow:
    """Misses of one reason."""

    reason: str
    sites: int
    example: str


@dataclasses.dataclass(frozen=True)
class TableView:
    """A dispatch table.

    Attributes:
        sentence: What it is.
        roles: Entries and misses per role.
        plans: What the cast plans say, in a sentence; empty where there are none.
        misses: Misses per reason, the most frequent first.
        entries: The entries.
        validators: Name, expected value, and what happens on a difference.
    """

    sentence: str
    plans: str
    roles: tuple[RoleRow, ...]
    misses: tuple[MissRow, ...]
    entries: tuple[EntryRow, ...]
    validators: tuple[tuple[str, str, str], ...]


def replay(results: ReplayResults) -> ReplayView:
    """Return a replay by candidate."""
    groups: dict[str, list[ReplayRow]] = {}
    for row in results.rows:
        groups.setdefault(row.candidate, []).append(row)
    chips = sorted({row.chip for row in results.rows})
    counts = collections.Counter(row.status for row in results.rows)
    where = f" on {fmt.listing(chips)}" if chips else ""
    sentence = (
        f"{fmt.plural(len(groups), 'candidate')} on "
        f"{fmt.plural(len({row.site for row in results.rows}), 'site')}{where}, timed under the "
        f"policy {results.facts.policy}: {results.facts.policy_description}"
        if results.rows
        else "The replay holds no rows."
    )
    return ReplayView(
        sentence=sentence,
        incomplete=not results.facts.complete,
        statuses=tuple(status.value for status in Status),
        totals=tuple(counts[status] for status in Status),
        candidates=tuple(_candidate(name, rows) for name, rows in groups.items()),
    )


def table(dispatch: DispatchTable) -> TableView:
    """Return a dispatch table by role and reason."""
    entries = collections.Counter(entry.role for entry in dispatch.entries)
    misses = collections.Counter(miss.role for miss in dispatch.misses)
    order = {role.value: index for index, role in enumerate(Role)}
    roles = sorted({*entries, *misses}, key=lambda role: (order.get(role, len(order)), role))
    reasons = collections.Counter(miss.reason for miss in dispatch.misses)
    examples: dict[MissReason, str] = {}
    for miss in dispatch.misses:
        examples.setdefault(miss.reason, f"{miss.fqn}#{miss.call}:{miss.role}: {miss.detail}")
    return TableView(
        sentence=(
            f"Built for {dispatch.chip} with the objective {dispatch.objective.value}: "
            f"{fmt.plural(len(dispatch.entries), 'entry', 'entries')}, "
            f"{fmt.plural(len(dispatch.misses), 'site')} left in the original precision."
        ),
        plans=_plans(dispatch),
        roles=tuple(RoleRow(role, entries[role], misses[role]) for role in roles),
        misses=tuple(
            MissRow(reason.value, number, examples[reason])
            for reason, number in sorted(reasons.items(), key=lambda pair: (-pair[1], pair[0]))
        ),
        entries=tuple(
            EntryRow(
                site=f"{entry.fqn}#{entry.call}:{entry.role}",
                role=entry.role,
                candidate=entry.candidate,
                recipe=entry.recipe,
                scale_policy=entry.scale_policy,
                tokens=f"{fmt.count(entry.tokens_min).text} to {fmt.count(entry.tokens_max).text}",
                speedup=fmt.factor(entry.evidence.speedup),
                evidence=entry.evidence.statement,
            )
            for entry in dispatch.entries
        ),
        validators=tuple(
            (v.name, v.expected or fmt.MISSING, "refused" if v.hard else "used with a warning")
            for v in dispatch.validators
        ),
    )


def _plans(dispatch: DispatchTable) -> str:
    if not dispatch.layers:
        return ""
    casts = collections.Counter(
        plan.cast_by for layer in dispatch.layers for plan in layer.operands.values()
    )
    fused = sum(layer.producer_chain is not None for layer in dispatch.layers)
    words = [f"{number} cast by {who}" for who, number in sorted(casts.items()) if who != "none"]
    return (
        f"{fmt.plural(len(dispatch.layers), 'layer')} with a cast plan"
        + (f": {fmt.listing(words)}" if words else "")
        + (f"; {fmt.plural(fused, 'producer')} fused." if fused else "; no producer is fused.")
    )


def _candidate(name: str, rows: list[ReplayRow]) -> CandidateRow:
    first = rows[0]
    counts = collections.Counter(row.status for row in rows)
    details = collections.Counter(row.detail for row in rows if row.detail)
    latencies = sorted(_present(row.latency_us for row in rows))
    return CandidateRow(
        candidate=name,
        library=f"{first.library} {first.version}" if first.version else first.library,
        recipe=first.recipe,
        emulated=first.emulated,
        workloads=fmt.count(len(rows)),
        statuses=tuple(counts[status] for status in Status),
        kernel_sqnr=fmt.decibel(min(_present(r.kernel_sqnr_db for r in rows), default=None)),
        total_sqnr=fmt.decibel(min(_present(r.total_sqnr_db for r in rows), default=None)),
        excess=fmt.factor(max(_present(r.excess_error for r in rows), default=None)),
        latency=fmt.microseconds(latencies[len(latencies) // 2] if latencies else None),
        detail=details.most_common(1)[0][0] if details else "",
    )


def _present(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and fmt.known(value) is not None]
