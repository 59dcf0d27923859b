"""The map in a few numbers: the tally of verdicts, the speed, the budget."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from loka_toolkit.artifacts.safety_map import (
    FAST_SPEEDUP,
    SafetyMap,
    SiteVerdict,
    SpeedEvidence,
    Verdict,
)
from loka_toolkit.artifacts.sites import Role
from loka_toolkit.reporting import formatting as fmt
from loka_toolkit.reporting.formatting import Quantity
from loka_toolkit.reporting.map_view import VerdictMark

_ROLES = {role.value: index for index, role in enumerate(Role)}
OTHER_ROLE = "other"


@dataclasses.dataclass(frozen=True)
class Tally:
    """How many sites have a verdict, and how much of the work they are.

    Attributes:
        mark: The verdict.
        sites: Sites with it.
        flops: Their share of the GEMM FLOPs of the sites judged.
    """

    mark: VerdictMark
    sites: int
    flops: Quantity


@dataclasses.dataclass(frozen=True)
class FlopBars:
    """The figure of FLOP shares per verdict.

    Attributes:
        labels: ``all`` first, then the roles present.
        shares: One (safe, insufficient-evidence, unsafe) triple per label, of all the FLOPs judged.
        alt: The same in words.
    """

    labels: tuple[str, ...]
    shares: tuple[tuple[float, float, float], ...]
    alt: str


@dataclasses.dataclass(frozen=True)
class Budget:
    """What the forward sites would cost together, against what the model may lose.

    Attributes:
        budget: The tolerance's relative log loss.
        total: Sum of the posterior mean impacts of the safe forward sites, each under its recipe.
        upper: Sum of their 95 % quantiles.
        used: ``total`` over ``budget``.
        within: Whether ``total`` is at most ``budget``; None where nothing is known.
        statement: One sentence.
    """

    budget: Quantity
    total: Quantity
    upper: Quantity
    used: Quantity
    within: bool | None
    statement: str


@dataclasses.dataclass(frozen=True)
class Overview:
    """What the map says, in a few numbers.

    Attributes:
        sentence: The whole in one sentence.
        tallies: One per verdict: safe, insufficient-evidence, unsafe.
        fast_sites: Sites with a fast recipe.
        fast_flops: Their share of FLOPs.
        speed_sentence: Where the speed-ups come from.
        false_discovery_rate: Expected share of wrong ``safe`` verdicts.
        budget: The loss budget.
        bars: The figure; None where there is no site.
    """

    sentence: str
    tallies: tuple[Tally, ...]
    fast_sites: int
    fast_flops: Quantity
    speed_sentence: str
    false_discovery_rate: Quantity
    budget: Budget
    bars: FlopBars | None


def overview(safety: SafetyMap) -> Overview:
    """Return the map in a few numbers."""
    verdicts = safety.site_verdicts()
    order = (Verdict.SAFE, Verdict.INSUFFICIENT, Verdict.UNSAFE)
    tallies = tuple(
        Tally(
            mark=VerdictMark.of(kind),
            sites=sum(v.verdict is kind for v in verdicts),
            flops=fmt.share(_flops(v for v in verdicts if v.verdict is kind)),
        )
        for kind in order
    )
    fast = [v for v in verdicts if v.fast]
    parts = [f"{t.sites} {t.mark.name} ({t.flops.text} of the FLOPs)" for t in tallies]
    sentence = (
        f"Of {fmt.plural(len(verdicts), 'GEMM site')} judged, {fmt.listing(parts)}."
        if verdicts
        else "No site was judged: the map holds no cells."
    )
    return Overview(
        sentence=sentence,
        tallies=tallies,
        fast_sites=len(fast),
        fast_flops=fmt.share(_flops(fast)),
        speed_sentence=_speed_sentence(safety, fast),
        false_discovery_rate=fmt.share(safety.facts.false_discovery_rate),
        budget=_budget(safety, verdicts),
        bars=_bars(verdicts, tallies),
    )


def _flops(verdicts: Iterable[SiteVerdict]) -> float:
    values = [v.flops_share for v in verdicts]
    return math.fsum(value for value in values if math.isfinite(value))


def _speed_sentence(safety: SafetyMap, fast: list[SiteVerdict]) -> str:
    evidence = {
        kind: sum(cell.speedup_evidence is kind for cell in safety.cells) for kind in SpeedEvidence
    }
    measured, predicted = evidence[SpeedEvidence.MEASURED], evidence[SpeedEvidence.PREDICTED]
    if not measured and not predicted:
        return (
            "No speed-up is known: neither replay results nor a chip for the roofline were given "
            "to the analysis, so no site can be called fast."
        )
    sources = []
    if measured:
        sources.append(f"measured by replay for {fmt.plural(measured, 'cell')}")
    if predicted:
        sources.append(f"predicted by the roofline model for {fmt.plural(predicted, 'cell')}")
    return (
        f"{fmt.plural(len(fast), 'site')} fast (safe, and at least "
        f"{fmt.factor(FAST_SPEEDUP).text} with casts included); "
        f"speed-ups are {fmt.listing(sources)}."
    )


def _budget(safety: SafetyMap, verdicts: tuple[SiteVerdict, ...]) -> Budget:
    budget = safety.facts.tolerance.relative_log_loss
    chosen = [
        cell
        for v in verdicts
        if v.recipe is not None
        and v.role == Role.FWD
        and (cell := safety.cell(v.site, v.recipe)) is not None
    ]
    impacts = [cell.impact for cell in chosen if fmt.known(cell.impact) is not None]
    highs = [cell.impact_hi for cell in chosen if fmt.known(cell.impact_hi) is not None]
    total = math.fsum(i for i in impacts if i is not None) if impacts else None
    upper = math.fsum(i for i in highs if i is not None) if highs else None
    unknown = len(chosen) - len(impacts)
    if total is None:
        statement = (
            f"The impact on the loss is not known for any of the "
            f"{fmt.plural(len(chosen), 'safe forward site')}; the reason stands beside each cell."
            if chosen
            else "There is no safe forward site, so nothing would be spent."
        )
    else:
        most = "" if upper is None else f" (sum of the 95 % quantiles {fmt.relative(upper).text})"
        statement = (
            f"All {fmt.plural(len(impacts), 'safe forward site')} with a known impact together, "
            f"each under its recipe, are expected to change the loss by {fmt.relative(total).text}"
            f"{most}; the budget is {fmt.relative(budget).text}."
        )
        if unknown:
            statement += f" The impact of {fmt.plural(unknown, 'more site')} is not known."
    return Budget(
        budget=fmt.relative(budget),
        total=fmt.relative(total),
        upper=fmt.relative(upper),
        used=fmt.share(total / budget if total is not None and budget > 0 else None),
        within=None if total is None else total <= budget,
        statement=statement,
    )


def _bars(verdicts: tuple[SiteVerdict, ...], tallies: tuple[Tally, ...]) -> FlopBars | None:
    if not verdicts:
        return None
    order = (Verdict.SAFE, Verdict.INSUFFICIENT, Verdict.UNSAFE)
    known = {v.role if v.role in _ROLES else OTHER_ROLE for v in verdicts}
    roles = sorted(known, key=lambda role: _ROLES.get(role, len(_ROLES)))

    def triple(chosen: list[SiteVerdict]) -> tuple[float, float, float]:
        one, two, three = (_flops(v for v in chosen if v.verdict is kind) for kind in order)
        return one, two, three

    groups = {"all": list(verdicts)} | {
        role: [v for v in verdicts if (v.role if v.role in _ROLES else OTHER_ROLE) == role]
        for role in roles
    }
    words = ", ".join(f"{t.mark.name} {t.flops.text}" for t in tallies)
    return FlopBars(
        labels=tuple(groups),
        shares=tuple(triple(chosen) for chosen in groups.values()),
        alt=f"Bars: share of GEMM FLOPs per verdict, all sites and per role. All sites: {words}.",
    )
