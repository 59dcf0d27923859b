"""Loss impact of an output error: first order, Gauss-Newton term, standard error, validity.

For a mean loss over B separable examples, output error e and gradient g of the mean loss at that
output, example b's loss changes by d_b = B g_b.e_b to first order. Where the loss depends on one
prediction z per example (binary log loss, squared error) with slope s and curvature c,
the prediction moves by dz_b = d_b / s_b and the second order is sum_b 0.5 c_b dz_b^2 / B. For a
log loss this is the exact Gauss-Newton weight p(1-p), of less noise than the empirical Fisher term
that stands in for other losses.

Where an example has several terms (tasks, tokens), its change is a sum over them that cannot be
taken apart. Given the inputs the labels of terms are independent of each other, so the cross terms
of its square vanish on average: with a loss that is the sum of all terms over N, the term is
0.5 N sum_b (g_b.e_b)^2. That is for likelihoods, where the expected squared slope of a term is its
curvature; other losses are corrected by the ratio of the two over the step (a dispersion, as in
generalized linear models: McCullagh and Nelder, 1989, chapter 4).
"""

from __future__ import annotations

import dataclasses
import math

import torch

from loka_toolkit.recording.loss_terms import VANISHING_SLOPE

LARGEST_LOGIT_CHANGE = 1.0
"""Beyond it p(1-p) changes by more than half, and a second-order expansion says nothing."""


@dataclasses.dataclass(frozen=True)
class Impact:
    """Impact of one site under one recipe, in units of the mean loss.

    Attributes:
        first_order: sum(g e), or None.
        second_order: The quadratic term, or None.
        standard_error: Of the first order, from sampling examples; 0 if all were taken.
        status: ``ok``, ``beyond-validity`` or ``unknown``.
        reason: Why it is not ``ok``.
    """

    first_order: float | None
    second_order: float | None
    standard_error: float | None
    status: str
    reason: str | None

    @classmethod
    def unknown(cls, reason: str) -> Impact:
        """Return the impact of which nothing is known."""
        return cls(None, None, None, "unknown", reason)


@dataclasses.dataclass(frozen=True)
class ExampleTerms:
    """What the loss is at the sampled examples.

    Attributes:
        total: Examples in the step, B.
        slope: d term / d prediction at the sampled examples, float64, or None.
        curvature: Second derivative, likewise.
        is_log_loss: Whether the prediction is a logit.
        mean_over: N, the number that the sum of all terms is divided by; 0 stands for B.
        terms: Terms of the loss; 0 stands for one per example.
        dispersion: Curvature over squared slope of the terms, on average.
        is_residual_loss: Whether the prediction is known to be no logit.
        saturated: Terms of the whole step whose gradient vanishes in the training dtype.
    """

    total: int
    slope: torch.Tensor | None
    curvature: torch.Tensor | None
    is_log_loss: bool
    mean_over: int = 0
    terms: int = 0
    dispersion: float = 1.0
    is_residual_loss: bool = False
    saturated: int = 0


def example_changes(
    gradient: torch.Tensor, error: torch.Tensor, example_of_row: torch.Tensor, sampled: int
) -> torch.Tensor:
    """Return g_b.e_b of every sampled example, float64 [sampled].

    Args:
        gradient: Gradient of the mean loss at the sampled rows, [rows, n].
        error: Output error, [rows, n].
        example_of_row: Position of each row's example among the sampled ones, int64 [rows].
        sampled: Number of sampled examples.
    """
    per_row = (gradient.to(torch.float64) * error.to(torch.float64)).sum(-1).cpu()
    changes = torch.zeros(sampled, dtype=torch.float64)
    return changes.index_add_(0, example_of_row, per_row)


def impact_of(changes: torch.Tensor, terms: ExampleTerms) -> Impact:
    """Return the impact of the changes g_b.e_b of the sampled examples, scaled up to all of them.

    Args:
        changes: float64 [sampled examples].
        terms: The loss at these.
    """
    sampled, total = len(changes), terms.total
    if not bool(torch.isfinite(changes).all()):
        return Impact.unknown("the emulated output is not finite")
    scale = total / sampled
    first = scale * float(changes.sum())
    error = _sampling_error(changes, total)
    if terms.slope is None or terms.curvature is None:
        mean_over = terms.mean_over or total
        second = scale * 0.5 * mean_over * terms.dispersion * float(changes.square().sum())
        if terms.is_residual_loss:
            return Impact(first, second, error, "ok", None)
        moves, is_exact = changes * mean_over * total / (terms.terms or total), False
    else:
        alive = terms.slope.abs() > VANISHING_SLOPE
        moves = torch.where(alive, changes * total / torch.where(alive, terms.slope, 1.0), 0.0)
        second = scale * 0.5 * float((terms.curvature * moves.square()).sum()) / total
        if not terms.is_log_loss:
            return Impact(first, second, error, "ok", None)
        is_exact = True
    if terms.saturated:
        return Impact(
            first,
            second,
            error,
            "beyond-validity",
            f"{terms.saturated} of {terms.terms or total} examples are saturated: their gradient "
            "vanishes, so what the error does to their logits cannot be seen",
        )
    return _judged(first, second, error, moves, exact=is_exact)


def impact_of_moves(moves: torch.Tensor, terms: ExampleTerms) -> Impact:
    """Return the impact of known logit changes, scaled up to all examples.

    Args:
        moves: Change of the logits of the sampled examples, float64.
        terms: The loss at these, with slope and curvature.
    """
    if not bool(torch.isfinite(moves).all()):
        return Impact.unknown("the emulated output is not finite")
    if terms.slope is None or terms.curvature is None:
        return Impact.unknown("the loss has no slope per example")
    total, scale = terms.total, terms.total / len(moves)
    changes = terms.slope * moves / total
    second = scale * 0.5 * float((terms.curvature * moves.square()).sum()) / total
    error = _sampling_error(changes, total)
    impact = _judged(scale * float(changes.sum()), second, error, moves, exact=True)
    if impact.reason is None:
        return impact
    note = f"; {terms.saturated} of {total} examples are saturated in the training dtype"
    return dataclasses.replace(impact, reason=impact.reason + note)


def _sampling_error(changes: torch.Tensor, total: int) -> float:
    """Return the standard error of the sum over all examples, sampled without replacement."""
    sampled = len(changes)
    if sampled == total:
        return 0.0
    spread = float(changes.std(unbiased=True)) if sampled > 1 else math.nan
    return total * spread * math.sqrt((1 - sampled / total) / sampled)


def _judged(
    first: float, second: float, error: float, moves: torch.Tensor, *, exact: bool
) -> Impact:
    largest = float(moves.abs().amax()) if len(moves) else 0.0
    if largest <= LARGEST_LOGIT_CHANGE:
        return Impact(first, second, error, "ok", None)
    if not exact:
        reason = (
            f"the terms of an example change by {largest:.3g}, and a logit by no less: more than "
            f"{LARGEST_LOGIT_CHANGE:g}"
        )
        return Impact(first, second, error, "beyond-validity", reason)
    reason = f"a logit changes by {largest:.3g}, more than {LARGEST_LOGIT_CHANGE:g}"
    return Impact(first, second, error, "beyond-validity", reason)
