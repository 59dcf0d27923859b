"""What a product's error would be under every recipe, from the full-precision operands alone.

Scales come from the full tensors; only output rows and columns are sub-sampled. Errors with an
exact accumulator are computed on every sampled element. An inexact accumulator is emulated product
by product, some 25 times as costly, so where the sample is large its additional error is measured
on evenly spaced *probe* rows and the figures are corrected by it: sums by a difference estimator,
error metrics by the ratio on the probe rows.
"""

from __future__ import annotations

import dataclasses

import torch

from loka_toolkit.artifacts.sites import Operand
from loka_toolkit.numerics.casting import CastEvents, cast_events
from loka_toolkit.numerics.emulation import emulate
from loka_toolkit.numerics.formats import FloatFormat
from loka_toolkit.numerics.metrics import SQNR_CEILING_DB, SQNR_FLOOR_DB, ProductError, product_error
from loka_toolkit.numerics.recipes import Accumulation, Recipe, Scaling
from loka_toolkit.numerics.scaling import decode_scale, finite_amax
from loka_toolkit.recording.products import Factors

PROBE_PRODUCTS = 1 << 19
"""Products emulated one by one per recipe and site: 2 ms on one CPU core."""
EXHAUSTIVE_PRODUCTS = 1 << 22
"""Products up to which a forward site's accumulator is emulated everywhere: 13 ms."""
LEAST_PROBE_ROWS = 8


@dataclasses.dataclass(frozen=True)
class Scales:
    """Decode scales of the two factors of a product, from the full tensors.

    Attributes:
        a: float32 [] or [.., M, 1].
        b: float32 [] or [.., 1, N].
    """

    a: torch.Tensor
    b: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Sample:
    """The part of a product on which errors are computed.

    Attributes:
        a: Sampled rows, [.., m, K].
        b: Sampled columns, [.., K, n].
        exact: The product of these, float64 [.., m, n].
        rows: Indices of the sampled rows; None for all.
        columns: Indices of the sampled columns; None for all.
        batch: Indices of the sampled products of a batch; None for all.
    """

    a: torch.Tensor
    b: torch.Tensor
    exact: torch.Tensor
    rows: torch.Tensor | None
    columns: torch.Tensor | None
    batch: torch.Tensor | None

    @classmethod
    def of(
        cls,
        factors: Factors,
        *,
        rows: torch.Tensor | None,
        columns: torch.Tensor | None,
        batch: torch.Tensor | None,
    ) -> Sample:
        """Select rows, columns and products of a batch, and multiply them in float64."""
        a = _select(_select(factors.a, batch, 0), rows, -2)
        b = _select(_select(factors.b, batch, 0), columns, -1)
        return cls(a, b, a.to(torch.float64) @ b.to(torch.float64), rows, columns, batch)

    @property
    def row_count(self) -> int:
        """Sampled output rows, over all sampled products of a batch."""
        return int(self.exact.shape[:-1].numel())

    def scales(self, full: Scales) -> Scales:
        """Return the scales of the sampled rows and columns."""
        a = full.a if full.a.ndim == 0 else _select(_select(full.a, self.batch, 0), self.rows, -2)
        b = (
            full.b
            if full.b.ndim == 0
            else _select(_select(full.b, self.batch, 0), self.columns, -1)
        )
        return Scales(a, b)


@dataclasses.dataclass(frozen=True)
class RecipeError:
    """The error of one product under one recipe.

    Attributes:
        recipe: The recipe.
        error: Emulated minus exact, float32 [rows, n], with an exact accumulator.
        probe_rows: Rows of ``error`` on which the accumulator was emulated; None if it is exact.
        probe_error: What the accumulator adds there, float32 [len(probe_rows), n].
        metrics: Error metrics, the accumulator included.
        scales: Decode scales from the full tensors.
    """

    recipe: Recipe
    error: torch.Tensor
    probe_rows: torch.Tensor | None
    probe_error: torch.Tensor | None
    metrics: ProductError
    scales: Scales


class ScaleBook:
    """Scales and cast events of a layer's operands, computed once and shared by its sites.

    Args:
        static: Static amax per operand from earlier sampled steps, where there is one; that of g
            at loss scale 1.
        headroom: Factor of a static scale above that amax.

    Attributes:
        loss_scale: Loss scale of the step, known before g is.
    """

    def __init__(self, static: dict[str, float], headroom: float) -> None:
        self._static = static
        self._headroom = headroom
        self.loss_scale = 1.0
        self._amax: dict[tuple[str, int | None], torch.Tensor] = {}
        self._events: dict[tuple[str, str, str], CastEvents] = {}

    def scale(
        self, operand: str, x: torch.Tensor, fmt: FloatFormat, scaling: Scaling, axis: int
    ) -> torch.Tensor | None:
        """Return the decode scale of an operand in its recorded orientation.

        Args:
            operand: Its name.
            x: [.., rows, width].
            fmt: Format.
            scaling: Grain.
            axis: Dimension of ``x``, -1 or -2, along which the product contracts.

        Returns:
            float32, [] or of the shape of ``x`` with length 1 along ``axis``; None for a static
            scale of which nothing is known yet.
        """
        if scaling is Scaling.STATIC:
            amax = self._static.get(operand)
            if amax is None:
                return None
            amax *= abs(self.loss_scale) if operand == Operand.G else 1.0
            known = torch.tensor(amax, dtype=torch.float32, device=x.device)
            return decode_scale(known, fmt, headroom=self._headroom)
        dim = axis if scaling is Scaling.ROWWISE else None
        if (operand, dim) not in self._amax:
            self._amax[operand, dim] = finite_amax(x, dim=dim, keepdim=dim is not None)
        return decode_scale(self._amax[operand, dim], fmt)

    def events(
        self,
        operand: str,
        x: torch.Tensor,
        fmt: FloatFormat,
        scaling: Scaling,
        axis: int,
        scale: torch.Tensor,
    ) -> CastEvents:
        """Return what the cast of the full operand loses."""
        grain = f"{scaling}{axis}" if scaling is Scaling.ROWWISE else str(scaling)
        key = (operand, fmt.name, grain)
        if key not in self._events:
            self._events[key] = cast_events(x, fmt, scale)
        return self._events[key]


def full_scales(factors: Factors, recipe: Recipe, book: ScaleBook) -> Scales | None:
    """Return the scales of a product; None if a static one is not known yet."""
    format_a, format_b = recipe.formats
    left, right = (str(operand) for operand in factors.operands)
    axis_a, axis_b = contraction_axes(factors)
    a = book.scale(left, factors.left, format_a, recipe.scaling, axis_a)
    b = book.scale(right, factors.right, format_b, recipe.scaling, axis_b)
    if a is None or b is None:
        return None
    turn_a = factors.left_transposed and a.ndim > 0
    turn_b = factors.right_transposed and b.ndim > 0
    return Scales(a.mT if turn_a else a, b.mT if turn_b else b)


def contraction_axes(factors: Factors) -> tuple[int, int]:
    """Return the dimensions of the recorded operands along which the product contracts."""
    return (-2 if factors.left_transposed else -1), (-1 if factors.right_transposed else -2)


def recipe_errors(
    factors: Factors, sample: Sample, recipes: tuple[Recipe, ...], book: ScaleBook, exhaustive: int
) -> list[RecipeError]:
    """Return the error of a product under every recipe whose scales are known.

    Args:
        factors: The product.
        sample: The part of it on which errors are computed.
        recipes: The recipes.
        book: Scales and cast events of its operands.
        exhaustive: Number of products up to which an inexact accumulator is emulated everywhere.
    """
    is_small = sample.exact.numel() * sample.a.shape[-1] <= exhaustive
    found = []
    exact_sums: dict[tuple[str, str, Scaling], tuple[torch.Tensor, ProductError]] = {}
    for recipe in recipes:
        scales = full_scales(factors, recipe, book)
        if scales is None:
            continue
        key = (recipe.format_a, recipe.format_b, recipe.scaling)
        if key not in exact_sums:
            error = _emulated_error(sample, recipe, scales, Accumulation.FP32)
            exact_sums[key] = (error, product_error(sample.exact, sample.exact + error))
        error, metrics = exact_sums[key]
        rows = error.reshape(-1, error.shape[-1])
        if recipe.accumulation is Accumulation.FP32:
            found.append(RecipeError(recipe, rows, None, None, metrics, scales))
            continue
        found.append(_with_accumulator(sample, recipe, scales, error, metrics, is_small))
    return found


def _with_accumulator(
    sample: Sample,
    recipe: Recipe,
    scales: Scales,
    error: torch.Tensor,
    metrics: ProductError,
    is_small: bool,
) -> RecipeError:
    width = sample.exact.shape[-1]
    batch, rows, flat = _probe(sample, everything=is_small)
    narrow = sample.scales(scales)
    inexact = emulate(
        _select(_select(sample.a, batch, 0), rows, -2),
        _select(sample.b, batch, 0),
        recipe,
        scale_a=_select(_select(narrow.a, batch, 0), rows, -2) if narrow.a.ndim else narrow.a,
        scale_b=_select(narrow.b, batch, 0) if narrow.b.ndim else narrow.b,
    )
    exact = sample.exact.reshape(-1, width)[flat]
    total = inexact.to(torch.float64).reshape(-1, width) - exact
    all_rows = error.reshape(-1, width)
    if len(flat) == sample.row_count:
        whole = total.reshape(sample.exact.shape)
        measured = product_error(sample.exact, sample.exact + whole)
        return RecipeError(recipe, total.to(torch.float32), None, None, measured, scales)
    without = all_rows[flat].to(torch.float64)
    corrected = _corrected(
        metrics, product_error(exact, exact + without), product_error(exact, exact + total)
    )
    added = (total - without).to(torch.float32)
    return RecipeError(recipe, all_rows, flat, added, corrected, scales)


def _probe(
    sample: Sample, *, everything: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    """Choose products of a batch and rows, evenly spaced, and number the rows they make."""
    m, n = sample.exact.shape[-2], sample.exact.shape[-1]
    budget_rows = max(LEAST_PROBE_ROWS, PROBE_PRODUCTS // max(1, n * sample.a.shape[-1]))
    if everything:
        budget_rows = sample.row_count
    products = sample.exact.shape[0] if sample.exact.ndim == 3 else 1
    rows = _evenly(m, budget_rows)
    batch = _evenly(products, max(1, budget_rows // m))
    device = sample.exact.device
    within = rows if rows is not None else torch.arange(m)
    across = batch if batch is not None else torch.arange(products)
    flat = (across.reshape(-1, 1) * m + within).reshape(-1).to(device)
    return batch if sample.exact.ndim == 3 else None, rows, flat


def _evenly(count: int, limit: int) -> torch.Tensor | None:
    if count <= limit:
        return None
    return torch.linspace(0, count - 1, limit, dtype=torch.float64).round().to(torch.int64)


def _select(x: torch.Tensor, indices: torch.Tensor | None, dim: int) -> torch.Tensor:
    return x if indices is None else x.index_select(dim, indices.to(x.device))


def _emulated_error(
    sample: Sample, recipe: Recipe, scales: Scales, accumulation: Accumulation
) -> torch.Tensor:
    exactly = Recipe(recipe.format_a, recipe.format_b, recipe.scaling, accumulation)
    narrow = sample.scales(scales)
    emulated = emulate(sample.a, sample.b, exactly, scale_a=narrow.a, scale_b=narrow.b)
    return (emulated.to(torch.float64) - sample.exact).to(torch.float32)


def _corrected(
    all_rows: ProductError, without: ProductError, with_accumulator: ProductError
) -> ProductError:
    """Scale the metrics of all rows by what the accumulator changed on the probe rows."""

    def corrected(name: str, *, in_db: bool) -> float | None:
        whole = getattr(all_rows, name)
        low, high = getattr(without, name), getattr(with_accumulator, name)
        if whole is None or low is None or high is None:
            return high if whole is None else whole
        if in_db:
            return float(min(max(whole + (high - low), SQNR_FLOOR_DB), SQNR_CEILING_DB))
        return float(whole * (high / low) if low > 0 else whole + (high - low))

    return ProductError(
        relative_frobenius=corrected("relative_frobenius", in_db=False),
        sqnr_db=corrected("sqnr_db", in_db=True),
        row_sqnr_db_p05=corrected("row_sqnr_db_p05", in_db=True),
        element_error_median=corrected("element_error_median", in_db=False),
        element_error_mean=corrected("element_error_mean", in_db=False),
    )
