"""The sites that matter most, with their distributions; and the sites that get no verdict."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from loka_toolkit.artifacts.safety_map import Cell, SafetyMap, Verdict
from loka_toolkit.artifacts.sites import Operand, Role
from loka_toolkit.artifacts.trace import Trace
from loka_toolkit.errors import UnknownNameError
from loka_toolkit.numerics.recipes import Recipe, parse_recipe
from loka_toolkit.reporting import formatting as fmt
from loka_toolkit.reporting.formatting import Quantity
from loka_toolkit.reporting.histogram_view import Histogram, factors, histogram
from loka_toolkit.reporting.map_view import SiteRow, VerdictMark
from loka_toolkit.reporting.series_view import Series, criteria_shown, impact_series, series

_Row = Mapping[str, Any]
_OPERAND_COLUMNS = (
    "step",
    "site",
    "operand",
    "dtype",
    "amax",
    "zero_share",
    "nonfinite_count",
    "histogram_log2",
    "row_amax_quantiles",
    "column_amax_quantiles",
)
_ERROR_COLUMNS = (
    "step",
    "site",
    "recipe",
    "sqnr_db",
    "row_sqnr_db_p05",
    "underflow_share_worst_group",
    "saturation_share",
    "scale_a",
    "scale_b",
    "impact_first_order",
    "impact_second_order",
)


@dataclasses.dataclass(frozen=True)
class SiteCard:
    """A site in detail, under one recipe.

    Attributes:
        anchor: Identifier in the page.
        row: The site over all recipes.
        recipe: The recipe shown.
        mark: Its verdict.
        why_recipe: Why that one.
        reason: The reason of its verdict.
        histograms: Distributions of the operands.
        series: Errors over the steps.
        absent: A sentence for each figure that could not be drawn.
    """

    anchor: str
    row: SiteRow
    recipe: str
    mark: VerdictMark
    why_recipe: str
    reason: str
    histograms: tuple[Histogram, ...]
    series: tuple[Series, ...]
    absent: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Details:
    """The sites that matter most.

    Attributes:
        cards: One per site.
        note: Which sites these are and what was cut.
    """

    cards: tuple[SiteCard, ...]
    note: str


@dataclasses.dataclass(frozen=True)
class NormRow:
    """A norm site: observed, not replaced.

    Attributes:
        site: Site name.
        module_type: Class of its module.
        shape: Rows and width.
        amax: Median over steps of the input's amax.
        variance: Median over steps of the input's variance.
        spike: Largest variance of the input over its median.
        steps: Sampled steps.
    """

    site: str
    module_type: str
    shape: str
    amax: Quantity
    variance: Quantity
    spike: Quantity
    steps: Quantity


@dataclasses.dataclass(frozen=True)
class UnjudgedRow:
    """A recorded product for which the map holds no cell.

    Attributes:
        site: Site name.
        op: Operator.
        shape: Its dimensions.
        dispatchable: Whether a kernel can stand in for it at all.
        reason: Why none can; None if one can, or if an old trace does not say.
    """

    site: str
    op: str
    shape: str
    dispatchable: bool
    reason: str | None


def ranked(rows: Sequence[SiteRow]) -> list[SiteRow]:
    """Return sites, those that are not safe first, then by share of FLOPs, else as they were."""
    safe = Verdict.SAFE.value
    return sorted(rows, key=lambda r: (r.mark.name == safe, -(r.flops.raw or 0.0)))


def details(safety: SafetyMap, rows: Sequence[SiteRow], trace: Trace | None, top: int) -> Details:
    """Return the ``top`` sites that matter most, and what was cut."""
    if trace is None:
        return Details(
            cards=(),
            note="No distributions are shown: they are in the trace, and none was given. Make the "
            "report with the trace to see them.",
        )
    order = ranked(rows)
    chosen = order[:top]
    featured = {row.site: _featured(safety, row) for row in chosen}
    layers = {_layer(cell) for cell, _ in featured.values()}
    operands = _operands(trace, layers)
    errors = _errors(trace, {(cell.site, cell.recipe) for cell, _ in featured.values()})
    scales = {(scale.layer, scale.operand): scale for scale in safety.facts.scales}
    loss_scales = trace.steps["loss_scale"].to_pylist()
    loss_scale = statistics.median(loss_scales) if loss_scales else 1.0
    cards = []
    for index, row in enumerate(chosen):
        cell, why = featured[row.site]
        found = errors.get((cell.site, cell.recipe), [])
        recipe = _fp8_recipe(cell.recipe)
        shown: list[Histogram | Series | str] = []
        for side, operand in zip("ab", factors(cell) or (), strict=False):
            key = (_layer(cell), operand.value)
            decode = [e[f"scale_{side}"] for e in found if e[f"scale_{side}"] is not None]
            shown.append(
                histogram(
                    cell,
                    side,
                    operand,
                    recipe,
                    operands.get(key, []),
                    decode,
                    scales.get(key),
                    loss_scale,
                )
            )
        shown.extend(series(cell, criterion, found) for criterion in criteria_shown(cell))
        impact = impact_series(cell, found, safety.facts.baseline_loss)
        if impact is not None:
            shown.append(impact)
        cards.append(
            SiteCard(
                anchor=f"site-{index}",
                row=row,
                recipe=cell.recipe,
                mark=VerdictMark.of(cell.verdict),
                why_recipe=why,
                reason=cell.reason,
                histograms=tuple(item for item in shown if isinstance(item, Histogram)),
                series=tuple(item for item in shown if isinstance(item, Series)),
                absent=tuple(item for item in shown if isinstance(item, str)),
            )
        )
    return Details(cards=tuple(cards), note=_note(order, len(chosen)))


def norm_rows(trace: Trace) -> tuple[NormRow, ...]:
    """Return the norm sites of a trace, a row per site."""
    import pyarrow.compute as pc

    sites = trace.sites
    sites = sites.filter(pc.equal(sites["role"], Role.NORM.value)).to_pylist()
    shapes = {row["site"]: row for row in sites}
    table = trace.operands.select(["step", "site", "operand", "amax", "variance"])
    table = table.filter(pc.equal(table["operand"], Operand.INPUT.value))
    inputs: dict[str, list[_Row]] = {}
    for row in table.to_pylist():
        inputs.setdefault(row["site"], []).append(row)
    rows = []
    for name, site in shapes.items():
        seen = inputs.get(name, [])
        variances = [r["variance"] for r in seen if fmt.known(r["variance"]) is not None]
        amaxes = [r["amax"] for r in seen if fmt.known(r["amax"]) is not None]
        median = statistics.median(variances) if variances else None
        rows.append(
            NormRow(
                site=name,
                module_type=site["module_type"],
                shape=fmt.extent(site["m"], site["n"]),
                amax=fmt.plain(statistics.median(amaxes) if amaxes else None),
                variance=fmt.plain(median),
                spike=fmt.factor(max(variances) / median if median else None),
                steps=fmt.count(len({r["step"] for r in seen})),
            )
        )
    return tuple(rows)


def unjudged_rows(trace: Trace, safety: SafetyMap) -> tuple[UnjudgedRow, ...]:
    """Return the products that were recorded and have no cell, a row per site."""
    judged = {cell.site for cell in safety.cells}
    columns = ["site", "role", "op", "batch", "m", "n", "k", "dispatchable"]
    columns.append("not_dispatchable_reason")
    rows = {}
    for row in trace.sites.select(columns).to_pylist():
        if row["role"] != Role.NORM.value and row["site"] not in judged:
            rows[row["site"]] = UnjudgedRow(
                site=row["site"],
                op=row["op"],
                shape=fmt.shape(row["batch"], row["m"], row["n"], row["k"]),
                dispatchable=row["dispatchable"],
                reason=row["not_dispatchable_reason"],
            )
    return tuple(rows.values())


def _featured(safety: SafetyMap, row: SiteRow) -> tuple[Cell, str]:
    """Return the cell that a site's card shows, and why that one."""
    cells = [cell for cell in safety.cells if cell.site == row.site]
    if row.recipe is not None:
        pool, why = [c for c in cells if c.recipe == row.recipe], "the recipe that makes it safe"
    else:
        pool = [c for c in cells if c.verdict.value == row.mark.name] or cells
        why = "the recipe that comes closest to the tolerance"
    best = min(pool, key=lambda c: (2.0 if c.p_exceed is None else c.p_exceed, c.recipe))
    return best, why if len(cells) > 1 else "the only recipe judged"


def _note(order: list[SiteRow], shown: int) -> str:
    cut = order[shown:]
    text = (
        f"Shown: {fmt.plural(shown, 'site')} of {fmt.count(len(order)).text}, those that are not "
        "safe first, then by share of FLOPs."
    )
    if not cut:
        return f"{text} None was cut."
    verdicts = [
        f"{number} {name}"
        for name in (v.value for v in Verdict)
        if (number := sum(row.mark.name == name for row in cut))
    ]
    flops = fmt.share(sum(row.flops.raw or 0.0 for row in cut)).text
    return (
        f"{text} Cut: {fmt.plural(len(cut), 'site')} ({fmt.listing(verdicts)}) with {flops} of the "
        "FLOPs; raise the number of sites shown to see them."
    )


def _layer(cell: Cell) -> str:
    return f"{cell.fqn}#{cell.call}"


def _fp8_recipe(name: str) -> Recipe | None:
    try:
        return parse_recipe(name)
    except UnknownNameError:
        return None


def _operands(trace: Trace, layers: set[str]) -> dict[tuple[str, str], list[_Row]]:
    import pyarrow as pa
    import pyarrow.compute as pc

    wanted = pa.array([f"{layer}:{role}" for layer in sorted(layers) for role in Role], pa.string())
    table = trace.operands.select(list(_OPERAND_COLUMNS))
    table = table.filter(pc.is_in(table["site"], value_set=wanted))
    found: dict[tuple[str, str], list[_Row]] = {}
    for row in table.to_pylist():
        layer = row["site"].rpartition(":")[0]
        found.setdefault((layer, row["operand"]), []).append(row)
    return found


def _errors(trace: Trace, wanted: set[tuple[str, str]]) -> dict[tuple[str, str], list[_Row]]:
    import pyarrow as pa
    import pyarrow.compute as pc

    sites = pa.array(sorted({site for site, _ in wanted}), pa.string())
    table = trace.errors.select(list(_ERROR_COLUMNS))
    table = table.filter(pc.is_in(table["site"], value_set=sites))
    found: dict[tuple[str, str], list[_Row]] = {}
    for row in table.to_pylist():
        key = (row["site"], row["recipe"])
        if key in wanted:
            found.setdefault(key, []).append(row)
    return found
