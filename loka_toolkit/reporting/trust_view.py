"""Whether to trust the numbers: the fit's health, the tolerance, the scales, the provenance."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from loka_toolkit.artifacts.map_facts import FitHealth, MapFacts
from loka_toolkit.artifacts.safety_map import SafetyMap
from loka_toolkit.artifacts.trace import Trace
from loka_toolkit.environment import Environment
from loka_toolkit.reporting import formatting as fmt
from loka_toolkit.reporting.formatting import Quantity

_SHARES = frozenset(
    {
        "underflow_share_worst_group",
        "saturation_share",
        "gradient_bias",
        "gradient_noise_ratio",
        "exceedance_rate",
        "relative_log_loss",
    }
)


_MINUS_TWELVE = "\N{SUPERSCRIPT MINUS}\N{SUPERSCRIPT ONE}\N{SUPERSCRIPT TWO}"


@dataclasses.dataclass(frozen=True)
class Gate:
    """One check of the sampler.

    Attributes:
        name: What is checked.
        value: What was found.
        limit: What it must be.
        passed: Whether it is.
    """

    name: str
    value: str
    limit: str
    passed: bool


@dataclasses.dataclass(frozen=True)
class HyperparameterRow:
    """Posterior summary of one hyperparameter."""

    name: str
    mean: Quantity
    sd: Quantity
    interval: str
    r_hat: Quantity
    ess_bulk: Quantity
    ess_tail: Quantity


@dataclasses.dataclass(frozen=True)
class HealthView:
    """The fit's health.

    Attributes:
        healthy: Whether all gates passed.
        sentence: The same in a sentence.
        problems: One sentence per gate that failed.
        gates: The checks.
        hyperparameters: Their posterior summaries.
        evidence_sentence: How much evidence the cells rest on.
    """

    healthy: bool
    sentence: str
    problems: tuple[str, ...]
    gates: tuple[Gate, ...]
    hyperparameters: tuple[HyperparameterRow, ...]
    evidence_sentence: str


@dataclasses.dataclass(frozen=True)
class ToleranceRow:
    """One number of the tolerance and why it is what it is."""

    name: str
    value: str
    reason: str


@dataclasses.dataclass(frozen=True)
class ScaleRow:
    """A static scale of one operand in one format."""

    layer: str
    operand: str
    format: str
    amax: Quantity
    spread: Quantity
    headroom: Quantity
    scale: Quantity
    overflow: Quantity
    steps: Quantity


@dataclasses.dataclass(frozen=True)
class RecordedEvent:
    """Something that the recorder reports.

    Attributes:
        message: Its own words.
        sentence: The same with what kind it is, when and how often it happened.
    """

    message: str
    sentence: str


@dataclasses.dataclass(frozen=True)
class Source:
    """An artifact that went into the report.

    Attributes:
        name: ``safety map``, ``trace``, ``replay results`` or ``dispatch table``.
        location: Path as given; a dash where it was passed as a value.
        created: When it was made, or a dash.
        digest: SHA-256, or a dash.
        config: The arguments that made it, as JSON.
    """

    name: str
    location: str
    created: str
    digest: str
    config: str


@dataclasses.dataclass(frozen=True)
class EnvironmentTable:
    """Fingerprints side by side.

    Attributes:
        columns: What each fingerprint belongs to.
        rows: Property name and one value per column; the flag says whether they differ.
    """

    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[str, ...], bool], ...]


def health(safety: SafetyMap) -> HealthView:
    """Return the fit's health."""
    facts = safety.facts
    found = facts.health
    effective = sorted(
        cell.evidence_effective
        for cell in safety.cells
        if fmt.known(cell.evidence_effective) is not None
    )
    steps = [cell.evidence_steps for cell in safety.cells]
    evidence = (
        f"The cells rest on {_span(steps)} sampled steps each, worth {_span(effective)} "
        f"independent ones after autocorrelation (median "
        f"{fmt.significant(effective[len(effective) // 2])})."
        if steps and effective
        else "No cell holds evidence."
    )
    sentence = (
        f"{fmt.plural(found.chains, 'chain')} of {fmt.plural(found.draws, 'draw')} in "
        f"{fmt.significant(found.seconds)} s; "
        + (
            "every gate passed."
            if found.healthy
            else "at least one gate failed, so no verdict of this map is safe to act upon."
        )
    )
    return HealthView(
        healthy=found.healthy,
        sentence=sentence,
        problems=found.problems,
        gates=_gates(found),
        hyperparameters=tuple(
            HyperparameterRow(
                name=h.name,
                mean=fmt.plain(h.mean),
                sd=fmt.plain(h.sd),
                interval=fmt.interval(fmt.plain(h.lo), fmt.plain(h.hi)),
                r_hat=Quantity(fmt.known(h.r_hat), _r_hat(h.r_hat)),
                ess_bulk=fmt.plain(h.ess_bulk),
                ess_tail=fmt.plain(h.ess_tail),
            )
            for h in facts.hyperparameters
        ),
        evidence_sentence=evidence,
    )


def tolerance(facts: MapFacts) -> tuple[ToleranceRow, ...]:
    """Return the tolerance, a row per number."""
    rows = []
    for name, value in msgspec.structs.asdict(facts.tolerance).items():
        if name in _SHARES:
            text = f"{fmt.significant(100 * value, 2)} %"
        elif name in ("sqnr_db", "row_sqnr_db_p05"):
            text = f"{fmt.significant(value)} dB"
        else:
            text = fmt.count(value).text if isinstance(value, int) else fmt.significant(value)
        reason = facts.tolerance_reasons.get(name, "No reason was recorded for this number.")
        rows.append(ToleranceRow(name=name, value=text, reason=reason))
    return tuple(rows)


def scales(facts: MapFacts) -> tuple[ScaleRow, ...]:
    """Return the static scales, a row per layer, operand and format."""
    return tuple(
        ScaleRow(
            layer=scale.layer,
            operand=scale.operand,
            format=name,
            amax=fmt.plain(scale.amax),
            spread=fmt.plain(scale.log2_amax_sd),
            headroom=fmt.factor(scale.headroom),
            scale=fmt.plain(value, 4),
            overflow=_probability(scale.overflow_probability.get(name)),
            steps=fmt.count(scale.steps),
        )
        for scale in facts.scales
        for name, value in sorted(scale.scale.items())
    )


def trace_events(trace: Trace) -> tuple[RecordedEvent, ...]:
    """Return what the recorder wants a reader to know."""
    found: dict[str, RecordedEvent] = {}
    for manifest in trace.manifests:
        for event in manifest.events:
            where = f" at step {event.step}" if event.step is not None else ""
            times = f" ({event.count} times)" if event.count > 1 else ""
            sentence = f"{event.kind}{where}: {event.message}{times}"
            found[sentence] = RecordedEvent(event.message, sentence)
        if not manifest.status.closed:
            message = "not closed"
            sentence = (
                f"The recording of rank {manifest.rank} was {message}: the trace holds what had "
                "been flushed."
            )
            found[sentence] = RecordedEvent(message, sentence)
    return tuple(found.values())


def skip_reasons(trace: Trace) -> tuple[str, ...]:
    """Return why sampled steps left no rows, the most frequent reason first."""
    steps = trace.steps.select(["status", "reason"]).to_pylist()
    found = collections.Counter(
        f"{row['status']}: {row['reason']}" if row["reason"] else row["status"]
        for row in steps
        if row["status"] != "recorded"
    )
    return tuple(f"{reason} ({number})" for reason, number in found.most_common())


def environments(columns: Sequence[tuple[str, Environment]]) -> EnvironmentTable:
    """Return fingerprints side by side."""
    flat = [_flatten(environment) for _, environment in columns]
    names = list(dict.fromkeys(name for one in flat for name in one))
    rows = []
    for name in names:
        values = tuple(one.get(name, fmt.MISSING) for one in flat)
        rows.append((name, values, len(set(values)) > 1))
    return EnvironmentTable(columns=tuple(name for name, _ in columns), rows=tuple(rows))


def source(
    name: str,
    *,
    location: str | None,
    created: str | None,
    digest: str | None,
    config: Mapping[str, Any],
) -> Source:
    """Return an artifact that went into the report."""
    return Source(
        name=name,
        location=location or fmt.MISSING,
        created=created or fmt.MISSING,
        digest=digest or fmt.MISSING,
        config=fmt.json_text(config) if config else "",
    )


def _gates(found: FitHealth) -> tuple[Gate, ...]:
    return (
        Gate(
            "largest R-hat of a hyperparameter",
            _r_hat(found.max_r_hat),
            "at most 1.01",
            found.max_r_hat <= 1.01,
        ),
        Gate(
            "least effective sample size",
            fmt.significant(found.min_ess),
            "at least 400",
            found.min_ess >= 400,
        ),
        Gate(
            "divergences after warm-up",
            fmt.count(found.divergences).text,
            "0",
            found.divergences == 0,
        ),
        Gate(
            "least BFMI of a chain",
            fmt.significant(found.min_bfmi),
            "at least 0.3",
            found.min_bfmi >= 0.3,
        ),
    )


def _span(values: Sequence[float]) -> str:
    low, high = (
        fmt.count(value).text if isinstance(value, int) else fmt.significant(value)
        for value in (min(values), max(values))
    )
    return low if low == high else f"{low} to {high}"


def _r_hat(value: float) -> str:
    number = fmt.known(value)
    return fmt.MISSING if number is None else f"{number:.4f}"


def _probability(value: float | None) -> Quantity:
    """Write a probability; below 1e-12 it is rounding of a tail, and neither 0 nor a figure."""
    number = fmt.known(value)
    if number is not None and number < 1e-12:
        return Quantity(number, f"<\N{NARROW NO-BREAK SPACE}10{_MINUS_TWELVE}")
    return Quantity(number, fmt.significant(number, 2))


def _flatten(environment: Environment) -> dict[str, str]:
    values = msgspec.structs.asdict(environment)
    libraries = values.pop("libraries")
    flat = {name: fmt.MISSING if value is None else str(value) for name, value in values.items()}
    return flat | {name: str(version) for name, version in sorted(libraries.items())}
