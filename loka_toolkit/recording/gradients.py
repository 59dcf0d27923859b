"""What an error does to a parameter gradient: bias, and noise against that of the minibatch.

The gradient of a minibatch of B independent examples is G = sum_b G_b; the trace of its covariance
is estimated by B/(B-1) (sum_b |G_b|^2 - |G|^2 / B). Both |dG|^2 and the trace are taken over the
same sampled rows and columns of G, so their ratio needs no scaling up.
"""

from __future__ import annotations

import torch

from loka_toolkit.recording.layers import GradientColumns
from loka_toolkit.recording.products import Factors
from loka_toolkit.recording.sampling import RowLayout
from loka_toolkit.recording.whatif import RecipeError, Sample

_LARGEST_GRAM_WORK = 1 << 29
"""Multiplications up to which the gradients of examples with several rows are computed exactly."""


def gradient_columns(sample: Sample, errors: list[RecipeError]) -> GradientColumns:
    """Return bias and error energy of a parameter gradient under every recipe."""
    exact = sample.exact.reshape(-1, sample.exact.shape[-1])
    columns = GradientColumns(gradient_squares=float(exact.square().sum()))
    if columns.gradient_squares == 0:
        columns.reason = "the gradient is zero"
        return columns
    for error in errors:
        delta = error.error.to(torch.float64)
        bias = float((delta * exact).sum()) / columns.gradient_squares
        squares = float(delta.square().sum())
        if error.probe_rows is not None and error.probe_error is not None:
            part = exact[error.probe_rows]
            added = error.probe_error.to(torch.float64)
            energy = float(part.square().sum())
            bias += float((added * part).sum()) / energy if energy else 0.0
            before = float(delta[error.probe_rows].square().sum())
            after = float((delta[error.probe_rows] + added).square().sum())
            squares = squares * after / before if before else squares + after
        columns.bias[error.recipe.name] = bias
        columns.error_squares[error.recipe.name] = squares
    return columns


def example_gradient_squares(
    columns: GradientColumns, factors: Factors, sample: Sample, layout: RowLayout | str
) -> None:
    """Fill in the sum over examples of |G_b|^2 on the sampled rows and columns.

    Args:
        columns: Changed in place.
        factors: The wgrad product, A = g^T [O, T], B = x [T, I].
        sample: Its sampled part, with all tokens.
        layout: Where the examples are among the tokens, or why that is not known.
    """
    if columns.reason is not None:
        return
    if isinstance(layout, str):
        columns.reason = layout
        return
    if sample.a.ndim != 2 or layout.rows != sample.a.shape[-1]:
        columns.reason = "the tokens of the product are not the rows of the examples"
        return
    if layout.examples < 2:
        columns.reason = "a minibatch of one example has no covariance"
        return
    columns.layout = layout
    g = sample.a.mT.to(torch.float32)  # [T, sampled outputs]
    x = sample.b.to(torch.float32)  # [T, sampled inputs]
    per_example = layout.outer * layout.inner
    if per_example == 1:
        squares = g.square().sum(1, dtype=torch.float64) * x.square().sum(1, dtype=torch.float64)
        columns.example_squares = float(squares.sum())
        return
    work = layout.rows * per_example * (g.shape[1] + x.shape[1])
    if work > _LARGEST_GRAM_WORK:
        columns.reason = f"{per_example} rows per example are too many to add up exactly"
        columns.layout = None
        return
    order = layout.rows_of(torch.arange(layout.examples)).reshape(-1).to(g.device)
    g_rows = g[order].reshape(layout.examples, per_example, -1)
    x_rows = x[order].reshape(layout.examples, per_example, -1)
    gram = (g_rows @ g_rows.mT) * (x_rows @ x_rows.mT)
    columns.example_squares = float(gram.sum(dtype=torch.float64))


def noise_ratio(columns: GradientColumns, recipe: str) -> float | None:
    """Return |dG|^2 over the trace of the minibatch gradient covariance, or None."""
    if columns.example_squares is None or columns.layout is None:
        return None
    examples = columns.layout.examples
    spread = columns.example_squares - columns.gradient_squares / examples
    trace = examples / (examples - 1) * spread
    return columns.error_squares[recipe] / trace if trace > 0 else None
