"""What a product's error would be under every recipe, from the full-precision operands alone.

Scales come from the full tensors; only output rows and columns are sub-sampled. Errors with an
exact accumulator are computed on every sampled element. An inexact accumulator is emulated product
by product, some 25 times as costly, so where the sample is large its additional error is measured
on evenly spaced *probe* rows and the figures are corrected by it: error metrics by the ratio of the
errors' energies there, sums by a regression estimator (Cochran, Sampling Techniques, 1977,
chapter 7), which takes the additional error as proportional to the product and adds the mean
residual.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import msgspec
import torch

from loka_toolkit.artifacts.sites import Operand
from loka_toolkit.numerics.blocks import Block, block_of, contraction_block, spread
from loka_toolkit.numerics.casting import CastEvents, cast, cast_events
from loka_toolkit.numerics.emulation import multiply
from loka_toolkit.numerics.formats import FloatFormat
from loka_toolkit.numerics.metrics import (
    RELATIVE_CEILING,
    SQNR_CEILING_DB,
    SQNR_FLOOR_DB,
    ProductError,
    product_error,
)
from loka_toolkit.numerics.recipes import Accumulation, Recipe, Scaling
from loka_toolkit.numerics.scaling import (
    block_amax,
    decode_scale,
    finite_amax,
    mx_scale,
    saturation_limit,
)
from loka_toolkit.recording.products import Factors

PROBE_PRODUCTS = 1 << 18
"""Products emulated one by one per recipe and site: 1 ms on one CPU core."""
EXHAUSTIVE_PRODUCTS = 1 << 22
"""Products up to which a forward site's accumulator is emulated everywhere: 13 ms."""
LEAST_PROBE_ROWS = 6
METRIC_ELEMENTS = 1 << 13
"""Output elements on which error metrics are computed: an SQNR within 0.15 dB."""
LEAST_METRIC_ROWS = 64


@dataclasses.dataclass(frozen=True)
class Scales:
    """Decode scales of the two factors of a product, from the full tensors.

    Attributes:
        a: float32 [], [.., M, 1] or, for blocks along the contraction, [.., M, blocks].
        b: float32 [], [.., 1, N] or [.., blocks, N].
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
        self._amax: dict[tuple[str, int | Block | None], torch.Tensor] = {}
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
            float32, [] (1 if unscaled) or of the shape of ``x`` with one entry per block along
            ``axis``, one block unless the grain has blocks; None for a static scale of which
            nothing is known yet.
        """
        if scaling is Scaling.UNSCALED:
            return torch.ones((), dtype=torch.float32, device=x.device)
        if scaling is Scaling.STATIC:
            amax = self._static.get(operand)
            if amax is None:
                return None
            amax *= abs(self.loss_scale) if operand == Operand.G else 1.0
            known = torch.tensor(amax, dtype=torch.float32, device=x.device)
            return decode_scale(known, fmt, headroom=self._headroom)
        block = block_of(scaling, _side(axis), parameter=operand == Operand.W)
        if block is not None:
            if (operand, block) not in self._amax:
                self._amax[operand, block] = block_amax(x, block)
            amaxes = self._amax[operand, block]
            grain = mx_scale if scaling is Scaling.MXFP8 else decode_scale
            across = -2 if axis == -1 else -1
            spans = grain(amaxes, fmt).repeat_interleave(block[across], dim=across)
            return spans.narrow(across, 0, x.shape[across])
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
        grain = str(scaling) if scale.ndim == 0 else f"{scaling}{axis}"
        key = (operand, fmt.name, grain)
        if key not in self._events:
            block = contraction_block(scaling, _side(axis))
            by_element = scale if block is None else spread(scale, block, x.shape)
            limit = saturation_limit(fmt, scaling)
            self._events[key] = cast_events(x, fmt, by_element, saturated_from=limit)
        return self._events[key]


def full_scales(factors: Factors, recipe: Recipe, book: ScaleBook) -> Scales | None:
    """Return the scales of a product; None if a static one is not known yet."""
    format_a, format_b = recipe.formats
    left, right = (str(operand) for operand in factors.operands)
    axis_a, axis_b = contraction_axes(factors)
    a = book.scale(left, factors.left, format_a, recipe.scaling_a, axis_a)
    b = book.scale(right, factors.right, format_b, recipe.scaling_b, axis_b)
    if a is None or b is None:
        return None
    turn_a = factors.left_transposed and a.ndim > 0
    turn_b = factors.right_transposed and b.ndim > 0
    return Scales(a.mT if turn_a else a, b.mT if turn_b else b)


def _side(axis: int) -> Literal["a", "b"]:
    """Return which factor of a product contracts along that dimension."""
    return "a" if axis == -1 else "b"


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
    casts = _SampleCasts(sample)
    metric_rows = _evenly_spaced_rows(sample, METRIC_ELEMENTS, LEAST_METRIC_ROWS)
    exact_sums: dict[Recipe, tuple[torch.Tensor, ProductError]] = {}
    found = []
    for recipe in recipes:
        scales = full_scales(factors, recipe, book)
        if scales is None:
            continue
        if is_small:
            error = casts.error(recipe, scales, None)
            metrics = _metrics(sample.exact, error, metric_rows)
            found.append(RecipeError(recipe, _as_rows(error).float(), None, None, metrics, scales))
            continue
        exactly = msgspec.structs.replace(recipe, accumulation=Accumulation.FP32)
        if exactly not in exact_sums:
            error = casts.error(exactly, scales, None)
            exact_sums[exactly] = (error, _metrics(sample.exact, error, metric_rows))
        error, metrics = exact_sums[exactly]
        rows = _as_rows(error)
        if recipe.accumulation is Accumulation.FP32:
            found.append(RecipeError(recipe, rows.float(), None, None, metrics, scales))
            continue
        work = max(1, sample.a.shape[-1] * sample.exact.shape[-1])
        probe = _evenly_spaced_rows(sample, PROBE_PRODUCTS // work, LEAST_PROBE_ROWS, per_row=1)
        total = _as_rows(casts.error(recipe, scales, probe))
        without = rows[probe.flat]
        exact = _as_rows(sample.exact)[probe.flat]
        corrected = _corrected(metrics, exact, without, total)
        # Truncation shrinks a product in proportion to it; what is left varies little by row.
        energy = float(exact.square().sum())
        shrinkage = float(((total - without) * exact).sum()) / energy if energy else 0.0
        predicted = rows + shrinkage * _as_rows(sample.exact)
        rest = (total - predicted[probe.flat]).float()
        found.append(RecipeError(recipe, predicted.float(), probe.flat, rest, corrected, scales))
    return found


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Some products of a batch and some rows of each, evenly spaced.

    Attributes:
        batch: Indices of the products; None for all.
        rows: Indices of the rows of each; None for all.
        flat: Numbers of the rows among all sampled ones.
    """

    batch: torch.Tensor | None
    rows: torch.Tensor | None
    flat: torch.Tensor


def _evenly_spaced_rows(
    sample: Sample, elements: int, least: int, per_row: int | None = None
) -> _Rows:
    m = sample.exact.shape[-2]
    width = sample.exact.shape[-1] if per_row is None else per_row
    limit = max(least, elements // max(1, width))
    products = sample.exact.shape[0] if sample.exact.ndim == 3 else 1
    rows = _evenly(m, limit)
    batch = _evenly(products, max(1, limit // m))
    within = rows if rows is not None else torch.arange(m)
    across = batch if batch is not None else torch.arange(products)
    flat = (across.reshape(-1, 1) * m + within).reshape(-1).to(sample.exact.device)
    return _Rows(batch, rows, flat)


class _SampleCasts:
    """The sampled operands, cast once per format and grain."""

    def __init__(self, sample: Sample) -> None:
        self._sample = sample
        self._casts: dict[tuple[str, str, Scaling], tuple[torch.Tensor, torch.Tensor]] = {}

    def error(self, recipe: Recipe, scales: Scales, part: _Rows | None) -> torch.Tensor:
        """Return emulated minus exact, float64, on the sample or on a part of its rows.

        The same as :func:`loka_toolkit.numerics.emulation.emulate`, whose casts are shared here.
        """
        narrow = self._sample.scales(scales)
        format_a, format_b = recipe.formats
        a, scale_a = self._cast("a", self._sample.a, format_a, recipe.scaling_a, narrow.a)
        b, scale_b = self._cast("b", self._sample.b, format_b, recipe.scaling_b, narrow.b)
        exact = self._sample.exact
        if part is not None:
            a = _select(_select(a, part.batch, 0), part.rows, -2)
            if scale_a.ndim:
                scale_a = _select(_select(scale_a, part.batch, 0), part.rows, -2)
            b = _select(b, part.batch, 0)
            scale_b = _select(scale_b, part.batch, 0) if scale_b.ndim else scale_b
            exact = _select(_select(exact, part.batch, 0), part.rows, -2)
        # Products of FP8 and 16-bit values are exact in float32 (nearly, where their blocks have
        # scales); summing them is off by K * 2**-24 at most.
        if recipe.accumulation is not Accumulation.FP32:
            product = multiply(a, b, scale_a, scale_b, recipe).to(torch.float64)
        elif recipe.block_length is None:
            product = (a @ b).to(torch.float64) * scale_a * scale_b
        else:
            left = _descaled(a, scale_a, contraction_block(recipe.scaling_a, "a"))
            right = _descaled(b, scale_b, contraction_block(recipe.scaling_b, "b"))
            product = (left @ right).to(torch.float64)
        # A kernel's output leaves the range of float32 where the product does.
        return product.to(torch.float32).to(torch.float64) - exact

    def _cast(
        self,
        side: Literal["a", "b"],
        x: torch.Tensor,
        fmt: FloatFormat,
        scaling: Scaling,
        scale: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key = (side, fmt.name, scaling)
        if key not in self._casts:
            block = contraction_block(scaling, side)
            by_element = scale if block is None else spread(scale, block, x.shape)
            stored = cast(x, fmt, by_element).to(torch.float32)
            self._casts[key] = (stored, scale.to(torch.float64))
        return self._casts[key]


def _descaled(stored: torch.Tensor, scale: torch.Tensor, block: Block | None) -> torch.Tensor:
    by_element = scale if block is None else spread(scale, block, stored.shape)
    return stored * by_element.to(torch.float32)


def _metrics(exact: torch.Tensor, error: torch.Tensor, rows: _Rows) -> ProductError:
    reference = _as_rows(exact)[rows.flat]
    return product_error(reference, reference + _as_rows(error)[rows.flat])


def _as_rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


def _evenly(count: int, limit: int) -> torch.Tensor | None:
    if count <= limit:
        return None
    return torch.linspace(0, count - 1, limit, dtype=torch.float64).round().to(torch.int64)


def _select(x: torch.Tensor, indices: torch.Tensor | None, dim: int) -> torch.Tensor:
    return x if indices is None else x.index_select(dim, indices.to(x.device))


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
