"""The safety map: what the analysis concluded about every site and recipe.

One Parquet file, ``safety.parquet``: a row per cell (site x recipe), and in its metadata the
tolerance, the hyperparameters, the fit's diagnostics and the static scales. It holds all that
choosing candidates and updating posteriors in training need, without the trace and without PyMC.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from loka_toolkit.artifacts import storage
from loka_toolkit.artifacts.map_facts import MapFacts
from loka_toolkit.artifacts.schema import Column, ColumnType, TableSchema
from loka_toolkit.errors import ArtifactCorruptError
from loka_toolkit.numerics.recipes import BASELINE_RECIPES

if TYPE_CHECKING:
    import pandas as pd

KIND = "loka-safety-map"

FAST_SPEEDUP = 1.05
"""Least speed-up, casts included, that counts as faster: below it the gain is within the noise of
timing."""


class Verdict(enum.StrEnum):
    """What is concluded about a cell or a site."""

    SAFE = "safe"
    UNSAFE = "unsafe"
    INSUFFICIENT = "insufficient-evidence"

    @property
    def symbol(self) -> str:
        """A symbol, so that colour is never the only sign."""
        return {"safe": "✓", "unsafe": "✗", "insufficient-evidence": "?"}[self.value]


class SpeedEvidence(enum.StrEnum):
    """Where a speed-up comes from."""

    MEASURED = "measured"
    PREDICTED = "predicted"
    NONE = "none"


class Criterion(enum.StrEnum):
    """The criteria of the tolerance that are modelled, each larger-is-better and in dB.

    ``underflow`` is -10 log10 of the underflow share of the worst input-column group;
    ``saturation`` -10 log10 of the saturation share; both are floored as the analysis documents.
    """

    SQNR = "sqnr"
    ROW_SQNR = "row_sqnr"
    UNDERFLOW = "underflow"
    SATURATION = "saturation"


class Posterior(msgspec.Struct, frozen=True):
    """Normal-inverse-gamma posterior of a cell's criterion, hyperparameters averaged.

    The mean is Normal(mu, variance / kappa), the variance InverseGamma(alpha, beta); dB and dB^2.

    Attributes:
        mu: Location of the mean, dB.
        kappa: Weight of the mean, in steps.
        alpha: Shape of the variance.
        beta: Scale of the variance, dB^2.
        steps: Steps that went in (effective).
        outlying_steps: Steps counted as events and kept out.
        limit: The limit that the tolerance sets, dB.
    """

    mu: float
    kappa: float
    alpha: float
    beta: float
    steps: float
    outlying_steps: int
    limit: float


class Cell(msgspec.Struct, frozen=True):
    """One site under one recipe; see :data:`CELLS` for units."""

    site: str
    fqn: str
    call: int
    role: str
    recipe: str
    module_type: str
    weight: str | None
    dispatchable: bool
    batch: int
    m: int
    n: int
    k: int
    dtype: str
    flops_share: float
    evidence_steps: int
    evidence_effective: float
    sqnr_db: float | None
    sqnr_db_lo: float | None
    sqnr_db_hi: float | None
    row_sqnr_db: float | None
    underflow_share_worst_group: float
    underflow_worst_group: str | None
    saturation_share: float
    p_exceed: float | None
    p_exceed_lo: float | None
    p_exceed_hi: float | None
    p_exceed_mcse: float | None
    p_unsafe: float | None
    binding_criterion: str | None
    impact: float | None
    impact_lo: float | None
    impact_hi: float | None
    impact_allotment: float
    impact_reason: str | None
    gradient_bias: float | None
    gradient_noise_ratio: float | None
    drift_db_per_1000_steps: float | None
    verdict: Verdict
    reason: str
    fast: bool
    speedup: float | None
    speedup_evidence: SpeedEvidence
    posteriors: dict[str, Posterior]


class SiteVerdict(msgspec.Struct, frozen=True):
    """The verdict of a site over all recipes considered.

    Attributes:
        site: Site name.
        role: Its role.
        verdict: ``safe`` if any recipe is, ``unsafe`` if all are, else ``insufficient-evidence``.
        recipe: The recipe that decided: the safe one with the least p_exceed, else null.
        flops_share: Share of the GEMM FLOPs of the step.
        fast: Whether a safe recipe of it is fast.
        reason: The deciding cell's reason.
    """

    site: str
    role: str
    verdict: Verdict
    recipe: str | None
    flops_share: float
    fast: bool
    reason: str


_T = ColumnType
_POSTERIOR_FIELDS = Posterior.__struct_fields__

CELLS = TableSchema(
    "cells",
    1,
    (
        Column("site", _T.STRING, "site name"),
        Column("fqn", _T.STRING, "module path"),
        Column("call", _T.INT32, "index of the product in the module"),
        Column("role", _T.STRING, "fwd, dgrad, wgrad, grad_a, grad_b"),
        Column("recipe", _T.STRING, "recipe name"),
        Column("module_type", _T.STRING, "class name of the module"),
        Column("weight", _T.STRING, "FQN of the parameter; null without one", True),
        Column("dispatchable", _T.BOOL, "whether a kernel can stand in for it at all"),
        Column("batch", _T.INT64, "number of products"),
        Column("m", _T.INT64, "rows of the output (largest seen)"),
        Column("n", _T.INT64, "columns of the output"),
        Column("k", _T.INT64, "contraction length (largest seen)"),
        Column("dtype", _T.STRING, "dtype of the output in the traced run"),
        Column("flops_share", _T.FLOAT64, "share of the GEMM FLOPs of the step, in [0, 1]"),
        Column("evidence_steps", _T.INT64, "sampled steps with an error"),
        Column("evidence_effective", _T.FLOAT64, "the same after autocorrelation"),
        # Where a step lies above what is modelled (numerics.posterior.SQNR_WINDOW_DB), the mean and
        # the upper quantile are those of the steps, if larger.
        Column("sqnr_db", _T.FLOAT64, "mean SQNR, dB: posterior, or of the steps", True),
        Column("sqnr_db_lo", _T.FLOAT64, "5 % quantile of a future step's SQNR, dB", True),
        Column("sqnr_db_hi", _T.FLOAT64, "95 % quantile of it, or of the steps, dB", True),
        Column("row_sqnr_db", _T.FLOAT64, "mean of the 5th-percentile row's SQNR, dB", True),
        Column("underflow_share_worst_group", _T.FLOAT64, "mean over steps, in [0, 1]"),
        Column("underflow_worst_group", _T.STRING, "operand[first:last column]", True),
        Column("saturation_share", _T.FLOAT64, "mean over steps, in [0, 1]"),
        Column("p_exceed", _T.FLOAT64, "mean of the exceedance rate pi", True),
        Column("p_exceed_lo", _T.FLOAT64, "5 % quantile of pi", True),
        Column("p_exceed_hi", _T.FLOAT64, "95 % quantile of pi", True),
        Column("p_exceed_mcse", _T.FLOAT64, "Monte Carlo standard error of p_exceed_hi", True),
        Column("p_unsafe", _T.FLOAT64, "P(pi > exceedance rate of the tolerance)", True),
        Column("binding_criterion", _T.STRING, "the criterion exceeded most often", True),
        Column("impact", _T.FLOAT64, "posterior mean relative loss change, floored at 0", True),
        Column("impact_lo", _T.FLOAT64, "5 % quantile", True),
        Column("impact_hi", _T.FLOAT64, "95 % quantile", True),
        Column("impact_allotment", _T.FLOAT64, "budget x share of forward FLOPs"),
        Column("impact_reason", _T.STRING, "why impact is null or beyond validity", True),
        Column("gradient_bias", _T.FLOAT64, "mean of <dG,G>/<G,G>", True),
        Column("gradient_noise_ratio", _T.FLOAT64, "mean of the lost batch share", True),
        Column("drift_db_per_1000_steps", _T.FLOAT64, "least-squares slope of the SQNR", True),
        Column("verdict", _T.STRING, "safe, unsafe or insufficient-evidence"),
        Column("reason", _T.STRING, "one sentence"),
        Column("fast", _T.BOOL, f"safe and speed-up >= {FAST_SPEEDUP}, casts included"),
        Column("speedup", _T.FLOAT64, "time of the default over time in FP8", True),
        Column("speedup_evidence", _T.STRING, "measured, predicted or none"),
        *(
            Column(f"{criterion}_{field}", _T.FLOAT64, f"posterior of {criterion}: {field}", True)
            for criterion in Criterion
            for field in _POSTERIOR_FIELDS
        ),
    ),
)


@dataclasses.dataclass(frozen=True)
class SafetyMap:
    """The verdicts of one analysis.

    Attributes:
        cells: One per site and recipe.
        facts: What holds for the whole map.
    """

    cells: tuple[Cell, ...]
    facts: MapFacts

    def save(self, path: str | Path, *, force: bool = False) -> Path:
        """Write the map to one Parquet file, atomically.

        Raises:
            ArtifactExistsError: If there is a file and ``force`` is false.
        """
        path = Path(path)
        storage.ensure_writable(path, force=force)
        table = storage.table_from_rows(CELLS, [_row_of(cell) for cell in self.cells])
        storage.write_table(path, table, CELLS, kind=KIND, payload=self.facts)
        return path

    @classmethod
    def load(cls, path: str | Path) -> SafetyMap:
        """Read a map.

        Raises:
            ArtifactError: If it is missing, damaged, foreign or newer.
        """
        path = Path(path)
        table, payload = storage.read_table(path, CELLS, kind=KIND)
        facts = storage.decode_payload(path, payload, MapFacts)
        try:
            cells = tuple(_cell_of(row) for row in table.to_pylist())
        except (msgspec.ValidationError, ValueError) as error:
            raise ArtifactCorruptError(f"{path} has a damaged row: {error}") from None
        return cls(cells=cells, facts=facts)

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the contents, in hexadecimal."""
        return storage.digest_structs(self.facts, self.cells)

    def to_frame(self) -> pd.DataFrame:
        """Return one row per cell, columns as in :data:`CELLS`.

        Raises:
            MissingDependencyError: If pandas is absent.
        """
        return storage.frame_from_rows(CELLS, [_row_of(cell) for cell in self.cells])

    def site_verdicts(self) -> tuple[SiteVerdict, ...]:
        """Return one verdict per site, in the order of the cells.

        Baselines do not count beside other recipes: that a site may run in float32 says nothing.
        """
        by_site: dict[str, list[Cell]] = {}
        for cell in self.cells:
            by_site.setdefault(cell.site, []).append(cell)
        return tuple(
            _site_verdict([c for c in cells if c.recipe not in BASELINE_RECIPES] or cells)
            for cells in by_site.values()
        )

    def cell(self, site: str, recipe: str) -> Cell | None:
        """Return the cell of a site and a recipe, or None."""
        return self._index.get((site, recipe))

    @functools.cached_property
    def _index(self) -> dict[tuple[str, str], Cell]:
        return {(cell.site, cell.recipe): cell for cell in self.cells}


def _site_verdict(cells: list[Cell]) -> SiteVerdict:
    safe = [cell for cell in cells if cell.verdict is Verdict.SAFE]
    unsafe = [cell for cell in cells if cell.verdict is Verdict.UNSAFE]
    if safe:
        verdict, pool = Verdict.SAFE, safe
    elif len(unsafe) == len(cells):
        verdict, pool = Verdict.UNSAFE, unsafe
    else:
        verdict = Verdict.INSUFFICIENT
        pool = [cell for cell in cells if cell.verdict is Verdict.INSUFFICIENT]
    best = min(pool, key=lambda c: (c.p_exceed if c.p_exceed is not None else 2.0, c.recipe))
    return SiteVerdict(
        site=best.site,
        role=best.role,
        verdict=verdict,
        recipe=best.recipe if verdict is Verdict.SAFE else None,
        flops_share=best.flops_share,
        fast=any(cell.fast for cell in safe),
        reason=best.reason,
    )


def _row_of(cell: Cell) -> dict[str, Any]:
    row: dict[str, Any] = {
        name: getattr(cell, name) for name in cell.__struct_fields__ if name != "posteriors"
    }
    row["verdict"], row["speedup_evidence"] = cell.verdict.value, cell.speedup_evidence.value
    for criterion in Criterion:
        posterior = cell.posteriors.get(criterion.value)
        for field in _POSTERIOR_FIELDS:
            value = None if posterior is None else float(getattr(posterior, field))
            row[f"{criterion}_{field}"] = value
    return row


def _cell_of(row: dict[str, Any]) -> Cell:
    posteriors = {}
    for criterion in Criterion:
        values = {field: row.pop(f"{criterion}_{field}") for field in _POSTERIOR_FIELDS}
        if values["mu"] is not None:
            values["outlying_steps"] = int(values["outlying_steps"])
            posteriors[criterion.value] = Posterior(**values)
    return msgspec.convert({**row, "posteriors": posteriors}, type=Cell, from_attributes=True)
