"""The errors of a trace as matrices: a row per cell (site x recipe), a column per sampled step."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from loka_toolkit.artifacts.safety_map import Criterion
from loka_toolkit.artifacts.sites import Role, SiteKey, select_sites
from loka_toolkit.artifacts.trace import Trace
from loka_toolkit.errors import ConfigurationError, NoEvidenceError
from loka_toolkit.numerics.metrics import SQNR_FLOOR_DB
from loka_toolkit.numerics.posterior import FloatArray, clip_sqnr, share_limit_db, share_to_db
from loka_toolkit.numerics.recipes import parse_recipe
from loka_toolkit.numerics.tolerance import Tolerance

if TYPE_CHECKING:
    import pyarrow as pa

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

SHOWN_DB = 60.0
"""Products that are exactly right are recorded with 200 dB; a mean over steps stops here."""


@dataclasses.dataclass(frozen=True)
class SiteFacts:
    """What a site is.

    Attributes:
        key: Its name, parsed.
        module_type: Class name of the module.
        weight: FQN of the parameter, or None.
        dispatchable: Whether a kernel can stand in for it at all.
        batch: Number of products.
        m: Rows of the output, the largest seen.
        n: Columns of the output.
        k: Contraction length, the largest seen.
        dtype: Dtype of the output.
        flops: FLOPs of all its executions in the step with most of them.
    """

    key: SiteKey
    module_type: str
    weight: str | None
    dispatchable: bool
    batch: int
    m: int
    n: int
    k: int
    dtype: str
    flops: float


@dataclasses.dataclass(frozen=True)
class Observations:
    """What was observed, C cells (site-major) by S sampled steps; NaN where nothing was.

    Where several ranks report a step, the worst rank counts for the tolerance and the mean over
    ranks for impact and gradients.

    Attributes:
        sites: The sites, in the order of the cells.
        recipes: The recipes, in the order of the cells.
        site_of: [C] index into ``sites``.
        recipe_of: [C] index into ``recipes``.
        steps: [S] optimizer steps, ascending.
        seen: [C, S] whether an error was recorded.
        values: Criterion -> [C, S] dB as modelled.
        limits: Criterion -> limit, dB on the same scale.
        sqnr_shown: [C, S] SQNR as recorded, dB, at most ``SHOWN_DB``; NaN where it was destroyed.
        row_sqnr_shown: [C, S] the same of the 5th-percentile row.
        destroyed: [C, S] whether the product came out non-finite.
        underflow_share: [C] mean share in the worst group.
        underflow_group: [C] the group most often the worst, or None.
        saturation_share: [C] mean share.
        first_order: [C, S] signed change of the mean loss.
        second_order: [C, S] non-negative change of the mean loss.
        beyond_validity: [C] steps at which the impact left its range of validity.
        impact_reason: [C] the commonest reason why impact is null, or None.
        gradient_bias: [C, S].
        gradient_noise: [C, S].
        unknown_sites: Sites with errors that the table of sites lacks.
    """

    sites: tuple[SiteFacts, ...]
    recipes: tuple[str, ...]
    site_of: IntArray
    recipe_of: IntArray
    steps: IntArray
    seen: BoolArray
    values: dict[Criterion, FloatArray]
    limits: dict[Criterion, float]
    sqnr_shown: FloatArray
    row_sqnr_shown: FloatArray
    destroyed: BoolArray
    underflow_share: FloatArray
    underflow_group: tuple[str | None, ...]
    saturation_share: FloatArray
    first_order: FloatArray
    second_order: FloatArray
    beyond_validity: IntArray
    impact_reason: tuple[str | None, ...]
    gradient_bias: FloatArray
    gradient_noise: FloatArray
    unknown_sites: tuple[str, ...]

    @property
    def cells(self) -> int:
        """Number of cells."""
        return len(self.site_of)


def limits_db(tolerance: Tolerance) -> dict[Criterion, float]:
    """Return the limit of every modelled criterion, on the scale on which it is modelled."""
    return {
        Criterion.SQNR: tolerance.sqnr_db,
        Criterion.ROW_SQNR: tolerance.row_sqnr_db_p05,
        Criterion.UNDERFLOW: share_limit_db(tolerance.underflow_share_worst_group),
        Criterion.SATURATION: share_limit_db(tolerance.saturation_share),
    }


def select_recipes(trace: Trace, recipes: Sequence[str] | None) -> tuple[str, ...]:
    """Return the recipes to consider: those asked for, or all that the trace answers for.

    Raises:
        UnknownNameError: If a name is no recipe.
        ConfigurationError: If the trace has no errors under it, or none were named.
    """
    recorded = tuple(dict.fromkeys(name for m in trace.manifests for name in m.recipes))
    if recipes is None:
        return recorded
    asked = tuple(dict.fromkeys(parse_recipe(name).name for name in recipes))
    if not asked:
        raise ConfigurationError(f"no recipe was named; the trace holds {', '.join(recorded)}")
    absent = [name for name in asked if name not in recorded]
    if absent:
        raise ConfigurationError(
            f"trace {trace.path} holds no errors under {', '.join(absent)}; it was recorded for "
            f"{', '.join(recorded)}: analyze these, or record again with the recipe"
        )
    return asked


def observe(
    trace: Trace,
    tolerance: Tolerance,
    recipes: tuple[str, ...],
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> Observations:
    """Read the errors of a trace.

    Raises:
        NoEvidenceError: If nothing was recorded for the sites and recipes chosen.
        NoMatchError: If a glob matches no site.
        ArtifactError: If the trace is damaged.
    """
    known = {str(site.key): site for site in read_sites(trace.sites)}
    kept = select_sites(tuple(known), include, exclude)
    # What no kernel can stand in for and nobody judged, such as fused attention, has no cell.
    judged = set(trace.errors["site"].unique().to_pylist())
    kept = tuple(name for name in kept if known[name].dispatchable or name in judged)
    sites = tuple(known[name] for name in kept)
    rows = _Rows(trace.errors, kept, recipes)
    unknown = tuple(sorted(set(rows.site_names) - set(known)))
    if not rows.count:
        raise NoEvidenceError(
            f"trace {trace.path} holds no errors for the sites and recipes chosen: "
            f"{len(kept)} sites, recipes {', '.join(recipes)}"
        )
    cells = len(sites) * len(recipes)
    limits = limits_db(tolerance)
    sqnr = rows.floats("sqnr_db")
    relative = rows.floats("relative_frobenius")
    lost = ((sqnr <= SQNR_FLOOR_DB) | np.isinf(relative) | rows.is_nan("sqnr_db")).astype(float)
    underflow = rows.floats("underflow_share_worst_group")
    saturation = rows.floats("saturation_share")
    row_sqnr = rows.floats("row_sqnr_db_p05")
    share_limit = tolerance.underflow_share_worst_group
    values = {
        Criterion.SQNR: clip_sqnr(np.where(lost > 0, np.nan, sqnr), limits[Criterion.SQNR]),
        Criterion.ROW_SQNR: clip_sqnr(row_sqnr, limits[Criterion.ROW_SQNR]),
        Criterion.UNDERFLOW: share_to_db(underflow, share_limit),
        Criterion.SATURATION: share_to_db(saturation, tolerance.saturation_share),
    }
    beyond = rows.strings("impact_status") == "beyond-validity"
    return Observations(
        sites=sites,
        recipes=recipes,
        site_of=np.repeat(np.arange(len(sites)), len(recipes)),
        recipe_of=np.tile(np.arange(len(recipes)), len(sites)),
        steps=rows.steps,
        seen=rows.spread_count() > 0,
        values={criterion: rows.spread_worst(column) for criterion, column in values.items()},
        limits=limits,
        sqnr_shown=rows.spread_worst(np.minimum(np.where(lost > 0, np.nan, sqnr), SHOWN_DB)),
        row_sqnr_shown=rows.spread_worst(np.minimum(row_sqnr, SHOWN_DB)),
        destroyed=np.nan_to_num(-rows.spread_worst(-lost), nan=0.0) > 0,
        underflow_share=rows.mean_per_cell(underflow),
        underflow_group=rows.commonest_per_cell("underflow_worst_group", cells),
        saturation_share=rows.mean_per_cell(saturation),
        first_order=rows.spread_mean(rows.floats("impact_first_order")),
        second_order=rows.spread_mean(rows.floats("impact_second_order")),
        beyond_validity=(-rows.spread_worst(np.where(beyond, -1.0, 0.0)) > 0).sum(axis=1),
        impact_reason=rows.commonest_per_cell("impact_reason", cells),
        gradient_bias=rows.spread_mean(rows.floats("gradient_bias")),
        gradient_noise=rows.spread_mean(rows.floats("gradient_noise_ratio")),
        unknown_sites=unknown,
    )


def read_sites(table: pa.Table) -> tuple[SiteFacts, ...]:
    """Return the GEMM sites of a trace, each once with its largest shape; norms are left out."""
    found: dict[SiteKey, SiteFacts] = {}
    per_step: dict[tuple[SiteKey, int], float] = {}
    for row in table.to_pylist():
        if row["role"] == Role.NORM:
            continue
        key = SiteKey(row["fqn"], row["call"], Role(row["role"]))
        once = row["flops"]
        if once is None:
            once = 2.0 * row["batch"] * row["m"] * row["n"] * row["k"]
        step = (key, row["first_step"])
        per_step[step] = per_step.get(step, 0.0) + once * row["executions"]
        before = found.get(key)
        found[key] = SiteFacts(
            key=key,
            module_type=row["module_type"],
            weight=row["weight"],
            dispatchable=row["dispatchable"] and (before is None or before.dispatchable),
            batch=max(row["batch"], before.batch if before else 0),
            m=max(row["m"], before.m if before else 0),
            n=max(row["n"], before.n if before else 0),
            k=max(row["k"], before.k if before else 0),
            dtype=row["dtype_out"],
            flops=max(per_step[step], before.flops if before else 0.0),
        )
    return tuple(found.values())


class _Rows:
    """The rows of the table ``errors`` that belong to a cell, and how to spread them over it."""

    def __init__(self, table: pa.Table, sites: Sequence[str], recipes: Sequence[str]) -> None:
        site_names, site_codes = _codes(table, "site")
        recipe_names, recipe_codes = _codes(table, "recipe")
        site_at = {name: i for i, name in enumerate(sites)}
        recipe_at = {name: i for i, name in enumerate(recipes)}
        site = np.array([site_at.get(n, -1) for n in site_names] or [-1])[site_codes]
        recipe = np.array([recipe_at.get(n, -1) for n in recipe_names] or [-1])[recipe_codes]
        keep = (site >= 0) & (recipe >= 0)
        self.site_names = site_names
        self._table = table.filter(keep)
        self.count = int(keep.sum())
        self._cell = (site * len(recipes) + recipe)[keep]
        step = self._table.column("step").to_numpy()
        self.steps, self._step = np.unique(step, return_inverse=True)
        self._shape = (len(sites) * len(recipes), len(self.steps))

    def floats(self, name: str) -> FloatArray:
        return np.asarray(self._table.column(name).to_numpy(zero_copy_only=False), np.float64)

    def is_nan(self, name: str) -> BoolArray:
        """Whether a value is NaN as opposed to null."""
        column = self._table.column(name)
        valid = column.is_valid().to_numpy(zero_copy_only=False).astype(bool)
        return np.asarray(valid & np.isnan(self.floats(name)))

    def strings(self, name: str) -> npt.NDArray[np.object_]:
        return np.array(self._table.column(name).to_pylist(), dtype=object)

    def spread_worst(self, values: FloatArray) -> FloatArray:
        """Return [C, S] with the least value over ranks."""
        spread = np.full(self._shape, np.nan)
        np.fmin.at(spread, (self._cell, self._step), values)
        return spread

    def spread_mean(self, values: FloatArray) -> FloatArray:
        """Return [C, S] with the mean over ranks of what is finite."""
        finite = np.isfinite(values)
        at = (self._cell[finite], self._step[finite])
        total, count = np.zeros(self._shape), np.zeros(self._shape)
        np.add.at(total, at, values[finite])
        np.add.at(count, at, 1.0)
        return np.where(count > 0, total / np.maximum(count, 1.0), np.nan)

    def spread_count(self) -> FloatArray:
        count = np.zeros(self._shape)
        np.add.at(count, (self._cell, self._step), 1.0)
        return count

    def mean_per_cell(self, values: FloatArray) -> FloatArray:
        """Return [C] means over rows; 0 where a cell has none."""
        finite = np.isfinite(values)
        total = np.bincount(self._cell[finite], values[finite], minlength=self._shape[0])
        count = np.bincount(self._cell[finite], minlength=self._shape[0])
        return np.asarray(total / np.maximum(count, 1))

    def commonest_per_cell(self, name: str, cells: int) -> tuple[str | None, ...]:
        """Return the commonest non-null string of every cell; the first seen wins a tie."""
        texts = self._table.column(name)
        valid = texts.is_valid().to_numpy(zero_copy_only=False).astype(bool)
        counters: dict[int, Counter[str]] = {}
        for cell, text in zip(self._cell[valid], texts.drop_null().to_pylist(), strict=True):
            counters.setdefault(int(cell), Counter())[text] += 1
        return tuple(
            counters[c].most_common(1)[0][0] if c in counters else None for c in range(cells)
        )


def _codes(table: pa.Table, name: str) -> tuple[list[str], IntArray]:
    encoded: Any = table.column(name).combine_chunks().dictionary_encode()
    return encoded.dictionary.to_pylist(), encoded.indices.to_numpy().astype(np.int64)
