"""Gates for pipelines: turn verdicts into an exit code, only when asked.

Precedence: an unhealthy sampler is 4 always; ``unsafe`` and ``regression`` are 3; ``insufficient``
is 4.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from pathlib import Path

import msgspec

from loka_toolkit.artifacts.safety_map import SafetyMap, Verdict
from loka_toolkit.errors import ConfigurationError, UnknownNameError

EXIT_UNSAFE = 3
EXIT_INSUFFICIENT = 4


class Condition(enum.StrEnum):
    """What may fail a gate."""

    UNSAFE = "unsafe"
    INSUFFICIENT = "insufficient"
    REGRESSION = "regression"


class GateSpec(msgspec.Struct, frozen=True):
    """A parsed ``--fail-on``.

    Attributes:
        conditions: What fails the gate.
        baseline: Safety map that ``regression`` compares with.
    """

    conditions: tuple[Condition, ...] = ()
    baseline: Path | None = None


class GateResult(msgspec.Struct, frozen=True):
    """The outcome of a gate.

    Attributes:
        exit_code: 0, 3 or 4.
        reasons: One sentence per condition that failed.
    """

    exit_code: int
    reasons: tuple[str, ...]


def parse_fail_on(text: str | None) -> GateSpec:
    """Parse ``unsafe,insufficient,regression:PATH``.

    Raises:
        ConfigurationError: If a condition is unknown or ``regression`` names no baseline.
    """
    conditions: list[Condition] = []
    baseline: Path | None = None
    for part in filter(None, (p.strip() for p in (text or "").split(","))):
        name, _, argument = part.partition(":")
        if name not in Condition.__members__.values():
            raise UnknownNameError("gate condition", name, list(Condition))
        condition = Condition(name)
        if condition is Condition.REGRESSION:
            if not argument:
                raise ConfigurationError(
                    "--fail-on regression needs a baseline: regression:BASELINE_SAFETY.parquet"
                )
            baseline = Path(argument)
        elif argument:
            raise ConfigurationError(f"--fail-on {name} takes no argument, got {argument!r}")
        conditions.append(condition)
    return GateSpec(tuple(conditions), baseline)


def judge_gate(
    spec: GateSpec, safety: SafetyMap, recipes_used: dict[str, str] | None = None
) -> GateResult:
    """Judge a safety map.

    Args:
        spec: What fails the gate.
        safety: The map.
        recipes_used: Site name to recipe name of a table: then the gate is about these cells and
            not about the sites' verdicts.
    """
    verdicts = _verdicts(safety, recipes_used)
    failures: list[tuple[int, str]] = []
    if not safety.facts.health.healthy:
        failures.append((EXIT_INSUFFICIENT, "unhealthy sampler: no verdict can be trusted"))
    unsafe = sorted(site for site, verdict in verdicts.items() if verdict is Verdict.UNSAFE)
    unclear = sorted(site for site, verdict in verdicts.items() if verdict is Verdict.INSUFFICIENT)
    if Condition.UNSAFE in spec.conditions and unsafe:
        failures.append((EXIT_UNSAFE, _sentence("unsafe", unsafe)))
    if Condition.REGRESSION in spec.conditions and spec.baseline is not None:
        before = _verdicts(SafetyMap.load(spec.baseline), recipes_used)
        lost = sorted(
            site
            for site, verdict in before.items()
            if verdict is Verdict.SAFE and verdicts.get(site) is not Verdict.SAFE
        )
        if lost:
            failures.append((EXIT_UNSAFE, _sentence("no longer safe", lost)))
    if Condition.INSUFFICIENT in spec.conditions and unclear:
        failures.append((EXIT_INSUFFICIENT, _sentence("without sufficient evidence", unclear)))
    return GateResult(
        exit_code=failures[0][0] if failures else 0,
        reasons=tuple(reason for _, reason in failures),
    )


def _verdicts(safety: SafetyMap, recipes_used: dict[str, str] | None) -> dict[str, Verdict]:
    if recipes_used is None:
        return {site.site: site.verdict for site in safety.site_verdicts()}
    found = {}
    for site, recipe in recipes_used.items():
        cell = safety.cell(site, recipe)
        found[site] = cell.verdict if cell is not None else Verdict.INSUFFICIENT
    return found


def _sentence(what: str, sites: Sequence[str], limit: int = 5) -> str:
    more = f" and {len(sites) - limit} more" if len(sites) > limit else ""
    return f"{len(sites)} sites {what}: {', '.join(sites[:limit])}{more}"
