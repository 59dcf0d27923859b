"""What a product's error would be under every recipe, from the full-precision operands alone.

Scales come from the full tensors; only output rows and columns are sub-sampled. The relative
Frobenius error is that of the whole product, see :mod:`loka_toolkit.recording.whole`; what is known
row by row or element by element is that of a plain sample of whole examples. Errors with an exact
accumulator are computed on every sampled element. An inexact accumulator is emulated product by
product, some 25 times as costly, so where the sample is large its additional error is measured on
evenly spaced *probe* rows and the figures are corrected by it: the relative error by what it adds
to the error's energy there, other metrics by the ratio of these energies, sums by a regression
estimator (Cochran, Sampling Techniques, 1977, chapter 7), which takes the additional error as
proportional to the product and adds the mean residual.
"""

from __future__ import annotations

import dataclasses
import math

import msgspec
import torch

from loka_toolkit.numerics.metrics import (
    RELATIVE_CEILING,
    SQNR_CEILING_DB,
    SQNR_FLOOR_DB,
    ProductError,
    product_error,
)
from loka_toolkit.numerics.recipes import Accumulation, Recipe
from loka_toolkit.recording.products import Factors
from loka_toolkit.recording.samples import Rows, SampleCasts, as_rows, evenly_spaced_rows
from loka_toolkit.recording.samples import Sample as Sample
from loka_toolkit.recording.scalebook import ScaleBook as ScaleBook
from loka_toolkit.recording.scalebook import Scales, full_scales
from loka_toolkit.recording.whole import Shares, WholeSample, chance_correlation

PROBE_PRODUCTS = 1 << 18
"""Products emulated one by one per recipe and site: 1 ms on one CPU core."""
EXHAUSTIVE_PRODUCTS = 1 << 22
"""Products up to which a forward site's accumulator is emulated everywhere: 13 ms."""
LEAST_PROBE_ROWS = 6
METRIC_ELEMENTS = 1 << 13
"""Output elements on which error metrics are computed: an SQNR within 0.15 dB."""
LEAST_METRIC_ROWS = 64


@dataclasses.dataclass(frozen=True)
class RecipeError:
    """The error of one product under one recipe.

    Attributes:
        recipe: The recipe.
        error: Emulated minus exact, float32 [rows, n]; where there are probe rows, with the
            accumulator's error as predicted from these.
        probe_rows: Rows of ``error`` on which the accumulator was emulated; None if on all of them
            or if it is exact.
        probe_error: What the true error there exceeds the predicted by, float32
            [len(probe_rows), n].
        metrics: Error metrics, the accumulator included.
        scales: Decode scales from the full tensors.
    """

    recipe: Recipe
    error: torch.Tensor
    probe_rows: torch.Tensor | None
    probe_error: torch.Tensor | None
    metrics: ProductError
    scales: Scales


def recipe_errors(
    factors: Factors,
    sample: Sample,
    recipes: tuple[Recipe, ...],
    book: ScaleBook,
    exhaustive: int,
    whole: WholeSample | None = None,
) -> list[RecipeError]:
    """Return the error of a product under every recipe whose scales are known.

    Args:
        factors: The product.
        sample: The part of it on which errors are computed.
        recipes: The recipes.
        book: Scales and cast events of its operands.
        exhaustive: Number of products up to which an inexact accumulator is emulated everywhere.
        whole: What stands for the whole product; None if ``sample`` does.
    """
    outputs = factors.batch * factors.dims[0] * factors.dims[1]
    is_small = sample.exact.numel() * sample.a.shape[-1] <= exhaustive
    casts = SampleCasts(sample)
    whole = WholeSample(sample, None) if whole is None else whole
    whole_casts = casts if whole.sample is sample else SampleCasts(whole.sample)
    metric_rows = evenly_spaced_rows(sample, METRIC_ELEMENTS, LEAST_METRIC_ROWS)
    probe_casts: SampleCasts | None = None
    exact_sums: dict[Recipe, _ExactSums] = {}
    found = []
    for recipe in recipes:
        scales = full_scales(factors, recipe, book)
        if scales is None:
            continue
        exactly = msgspec.structs.replace(recipe, accumulation=Accumulation.FP32)
        if exactly not in exact_sums:
            error = casts.error(exactly, scales, None)
            of_whole = error
            if whole_casts is not casts:
                of_whole = whole_casts.error(exactly, scales, None)
            metrics = _metrics(sample.exact, error, metric_rows)
            exact_sums[exactly] = _ExactSums(error, whole.shares(of_whole), metrics)
        sums = exact_sums[exactly]
        rows, exact = as_rows(sums.error), as_rows(sample.exact)
        if recipe.accumulation is Accumulation.FP32:
            metrics = _with_relative(sums.metrics, sums.shares)
            found.append(RecipeError(recipe, rows.float(), None, None, metrics, scales))
            continue
        if is_small:
            error = casts.error(recipe, scales, None)
            metrics = _metrics(sample.exact, error, metric_rows)
            if whole_casts is casts:
                shares = whole.shares(error)
            else:
                added = as_rows(error) - rows
                chance = chance_correlation(exact, rows, added, outputs)
                shares = sums.shares.plus(Shares.of(exact, added), chance)
            metrics = _with_relative(metrics, shares)
            found.append(RecipeError(recipe, as_rows(error).float(), None, None, metrics, scales))
            continue
        work = max(1, sample.a.shape[-1] * sample.exact.shape[-1])
        probe = evenly_spaced_rows(sample, PROBE_PRODUCTS // work, LEAST_PROBE_ROWS, per_row=1)
        total = as_rows(casts.error(recipe, scales, probe))
        without = rows[probe.flat]
        reference = exact[probe.flat]
        corrected = _corrected(sums.metrics, reference, without, total)
        seen = (reference, without, total - without)
        weights = None
        if whole.probe is not None:
            probe_casts = probe_casts or SampleCasts(whole.probe.sample)
            casts_only = probe_casts.error(exactly, scales, None)
            added = probe_casts.error(recipe, scales, None) - casts_only
            seen = (whole.probe.sample.exact, casts_only, added)
            weights = whole.probe.weights
        chance = chance_correlation(*seen, outputs, weights)
        shares = sums.shares.plus(Shares.of(seen[0], seen[2], weights), chance)
        corrected = _with_relative(corrected, shares)
        # Truncation shrinks a product in proportion to it; what is left varies little by row.
        energy = float(reference.square().sum())
        shrinkage = float(((total - without) * reference).sum()) / energy if energy else 0.0
        predicted = rows + shrinkage * exact
        rest = (total - predicted[probe.flat]).float()
        found.append(RecipeError(recipe, predicted.float(), probe.flat, rest, corrected, scales))
    return found


@dataclasses.dataclass(frozen=True)
class _ExactSums:
    """A product's error where only casts lose something.

    Attributes:
        error: On the sample, float64.
        shares: Of the whole product.
        metrics: Error metrics on rows of the sample.
    """

    error: torch.Tensor
    shares: Shares
    metrics: ProductError


def _with_relative(metrics: ProductError, shares: Shares) -> ProductError:
    """Replace the relative Frobenius error and the SQNR that it gives."""
    square = shares.square
    if square is None or metrics.relative_frobenius is None:
        return metrics
    if not square < RELATIVE_CEILING**2:  # NaN too: what is not finite has the largest error
        relative, sqnr = RELATIVE_CEILING, SQNR_FLOOR_DB
    else:
        relative = math.sqrt(square)
        sqnr = SQNR_CEILING_DB if square == 0 else -10 * math.log10(square)
    sqnr = min(max(sqnr, SQNR_FLOOR_DB), SQNR_CEILING_DB)
    return dataclasses.replace(metrics, relative_frobenius=relative, sqnr_db=sqnr)


def _metrics(exact: torch.Tensor, error: torch.Tensor, rows: Rows) -> ProductError:
    reference = as_rows(exact)[rows.flat]
    return product_error(reference, reference + as_rows(error)[rows.flat])


def _corrected(
    metrics: ProductError,
    exact: torch.Tensor,
    without: torch.Tensor,
    with_accumulator: torch.Tensor,
) -> ProductError:
    """Scale error metrics by what the accumulator changed of the error's energy on probe rows."""
    before = float(without.square().sum())
    after = float(with_accumulator.square().sum())
    if not (math.isfinite(after) and before > 0 and after > 0):
        return product_error(exact, exact + with_accumulator)
    factor = math.sqrt(after / before)
    shift = -20 * math.log10(factor)

    def scaled(value: float | None) -> float | None:
        return None if value is None else min(value * factor, RELATIVE_CEILING)

    def shifted(value: float | None) -> float | None:
        return None if value is None else min(max(value + shift, SQNR_FLOOR_DB), SQNR_CEILING_DB)

    return ProductError(
        relative_frobenius=scaled(metrics.relative_frobenius),
        sqnr_db=shifted(metrics.sqnr_db),
        row_sqnr_db_p05=shifted(metrics.row_sqnr_db_p05),
        element_error_median=scaled(metrics.element_error_median),
        element_error_mean=scaled(metrics.element_error_mean),
    )
