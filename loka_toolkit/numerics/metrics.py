"""How far a product is from its reference, in numbers that decide and numbers that compare."""

from __future__ import annotations

import dataclasses
import math

import torch

from loka_toolkit.errors import ConfigurationError

SQNR_CEILING_DB = 200.0
"""An SQNR above this (relative error below 1e-10) is reported as this."""

SQNR_FLOOR_DB = -100.0
"""An SQNR below this, or an error where the reference is zero, is reported as this."""

RELATIVE_CEILING = 10.0 ** (-SQNR_FLOOR_DB / 20)
"""The relative error that the floor stands for, 1e5; reported in place of infinities."""


@dataclasses.dataclass(frozen=True)
class ProductError:
    """The error of a product against its reference.

    Attributes:
        relative_frobenius: |error|_F / |reference|_F; None if 0/0.
        sqnr_db: -20 log10 of it, within [-100, 200] dB; None if 0/0.
        row_sqnr_db_p05: 5th percentile of the SQNR of the output's rows, same limits; rows whose
            reference and error are both zero are skipped; None if no row is left.
        element_error_median: Median of |error| / |reference| over non-zero references; None if
            there are none.
        element_error_mean: Mean of the same (MERE): dominated by near-zero references, reported to
            compare with others and not to decide on.
    """

    relative_frobenius: float | None
    sqnr_db: float | None
    row_sqnr_db_p05: float | None
    element_error_median: float | None
    element_error_mean: float | None


def product_error(reference: torch.Tensor, approximation: torch.Tensor) -> ProductError:
    """Compare a product with its reference, in float64.

    A reference that is not finite is no reference: every figure is None. An approximation that is
    not finite where the reference is has the largest error: floor and ceiling.

    Args:
        reference: [.., M, N], any number of elements, also none.
        approximation: Same shape.

    Raises:
        ConfigurationError: If the shapes differ.
    """
    if reference.shape != approximation.shape:
        raise ConfigurationError(
            f"the reference has shape {tuple(reference.shape)} and the approximation "
            f"{tuple(approximation.shape)}; give both for the same outputs"
        )
    truth = reference.detach().to(torch.float64)
    if truth.numel() == 0 or not bool(torch.isfinite(truth).all()):
        return ProductError(None, None, None, None, None)
    if truth.ndim < 2:
        truth = truth.reshape(1, -1)
    error = (approximation.detach().to(torch.float64).reshape(truth.shape) - truth).abs_()
    error = error.nan_to_num_(nan=math.inf, posinf=math.inf)
    truth = truth.abs()
    relative = _ratio(_norm(error.reshape(1, -1)), _norm(truth.reshape(1, -1)))
    rows = _ratio(_norm(error), _norm(truth))
    row_sqnr = _sqnr_db(rows[~torch.isnan(rows)])
    nonzero = truth != 0
    elements = error[nonzero].div_(truth[nonzero]).clamp_(max=_LARGEST_ELEMENT_ERROR)
    elements = torch.where(torch.isfinite(error[nonzero]), elements, RELATIVE_CEILING)
    whole = float(relative)
    return ProductError(
        relative_frobenius=None if math.isnan(whole) else whole,
        sqnr_db=None if math.isnan(whole) else float(_sqnr_db(relative)),
        row_sqnr_db_p05=_percentile(row_sqnr, 0.05),
        element_error_median=_percentile(elements, 0.5),
        element_error_mean=float(elements.mean()) if elements.numel() else None,
    )


_LARGEST_ELEMENT_ERROR = 1e300  # a finite error over a subnormal reference must not become Inf


def _norm(x: torch.Tensor) -> torch.Tensor:
    """Return the 2-norm along the last dimension, safe from overflow and underflow."""
    largest = x.amax(-1, keepdim=True)
    divisor = torch.where((largest > 0) & torch.isfinite(largest), largest, 1.0)
    return (x / divisor).square_().sum(-1).sqrt_() * divisor.squeeze(-1)


def _ratio(error: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Return error / truth; NaN for 0/0, the ceiling where it would be infinite or larger."""
    ratio = (error / truth).clamp_(max=RELATIVE_CEILING)
    return torch.where((error == 0) & (truth == 0), math.nan, ratio)


def _sqnr_db(relative: torch.Tensor) -> torch.Tensor:
    return (-20.0 * torch.log10(relative)).clamp_(SQNR_FLOOR_DB, SQNR_CEILING_DB)


def _percentile(values: torch.Tensor, probability: float) -> float | None:
    """Interpolate linearly between order statistics; torch.quantile stops at 2**24 elements."""
    count = values.numel()
    if count == 0:
        return None
    flat = values.reshape(-1)
    position = probability * (count - 1)
    below = math.floor(position)
    low = float(flat.kthvalue(below + 1).values)
    high = float(flat.kthvalue(min(below + 2, count)).values)
    return low + (position - below) * (high - low)
