"""How the observer reads a forward product: its shape, and factors made only as far as needed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from loka_toolkit.recording.convolution import Convolution
from loka_toolkit.recording.convolution_calls import ConvolutionCall
from loka_toolkit.recording.products import Factors, Product, SiteShape, forward_factors, shape_of
from loka_toolkit.recording.sampling import SampledRows


@dataclasses.dataclass(frozen=True)
class ForwardView:
    """A forward product, ready to be judged.

    Attributes:
        shape: What the table ``sites`` says of it, in canonical orientation.
        alpha: Factor of the product in the output.
        factors: Returns the factors and where among their rows the sampled ones are.
        most_rows: Rows that can be sampled at most; None for any number.
        geometry: Of a convolution.
    """

    shape: SiteShape
    alpha: float
    factors: Callable[[SampledRows], tuple[Factors, SampledRows]]
    most_rows: int | None = None
    geometry: Convolution | None = None


def view_of(work: Product | ConvolutionCall, parameter_side: str | None) -> ForwardView:
    """Return how a forward product is read.

    Args:
        work: The product.
        parameter_side: ``"a"`` or ``"b"`` where a factor is a parameter, else None.
    """
    if isinstance(work, Product):
        factors = forward_factors(work, parameter_side)
        return ForwardView(shape_of(work, factors), work.alpha, lambda sampled: (factors, sampled))
    has_parameter = parameter_side is not None
    return ForwardView(
        shape=work.shape,
        alpha=1.0,
        factors=lambda sampled: work.forward_factors(has_parameter, sampled),
        most_rows=work.most_rows,
        geometry=work.geometry,
    )
