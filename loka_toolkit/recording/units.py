"""The loss in units of its mean per example: what was said, what was seen, and what holds."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from loka_toolkit.recording.loss import CapturedLoss
from loka_toolkit.recording.sampling import RowLayout, find_layout


class Reduction(enum.StrEnum):
    """How the terms of the loss were reduced."""

    MEAN = "mean"
    SUM = "sum"


@dataclasses.dataclass(frozen=True)
class StepFacts:
    """What the training script said of a step.

    Attributes:
        loss: Its loss, in its own units.
        examples: Their number, or the example of every row.
        loss_scale: Factor of the loss before backward.
        reduction: How the loss is reduced over examples.
    """

    loss: float | None = None
    examples: int | torch.Tensor | None = None
    loss_scale: float | None = None
    reduction: Reduction | None = None

    @property
    def example_count(self) -> int | None:
        """Number of examples said."""
        if isinstance(self.examples, torch.Tensor):
            return int(self.examples.max()) + 1 if self.examples.numel() else 0
        return self.examples

    def as_understood(self, examples: int | None) -> StepFacts:
        """Return what the next step may go by: examples of one micro-batch, not of all of them."""
        if isinstance(self.examples, int):
            return dataclasses.replace(self, examples=examples)
        return self


_T = TypeVar("_T")


def understand_step(
    loss: Any,
    examples: Any,
    loss_scale: Any,
    reduction: Any,
    reject: Callable[[str], None],
) -> StepFacts:
    """Return the arguments of a step that make sense; the others are left out.

    Args:
        loss: See :class:`StepFacts`; numbers may be tensors.
        examples: Likewise.
        loss_scale: Likewise.
        reduction: Likewise.
        reject: Called with one sentence for every argument left out.
    """

    def checked(name: str, value: Any, convert: Callable[[Any], _T]) -> _T | None:
        if value is None:
            return None
        try:
            return convert(value)
        except (TypeError, ValueError, RuntimeError) as error:
            reject(f"step({name}=) is left out: {error}")
            return None

    return StepFacts(
        loss=checked("loss", loss, _as_number),
        examples=checked("examples", examples, _as_examples),
        loss_scale=checked("loss_scale", loss_scale, _as_scale),
        reduction=checked("reduction", reduction, Reduction),
    )


def _as_number(value: Any) -> float:
    return float(value.detach()) if isinstance(value, torch.Tensor) else float(value)


def _as_scale(value: Any) -> float:
    number = _as_number(value)
    if not math.isfinite(number) or number == 0:
        raise ValueError(f"{number} is no finite factor")
    return number


def _as_examples(value: Any) -> int | torch.Tensor:
    if isinstance(value, torch.Tensor) and value.ndim:
        if value.dtype.is_floating_point or value.dtype.is_complex or value.dtype == torch.bool:
            raise TypeError(f"a tensor of dtype {value.dtype} does not number examples")
        if value.ndim != 1 or (value.numel() and int(value.min()) < 0):
            raise ValueError("give one non-negative number per row, in one dimension")
        return value.detach().to("cpu", torch.int64, copy=True)
    number = int(value)
    if number != value or number < 1:
        raise ValueError(f"{value} is no positive number of examples")
    return number


@dataclasses.dataclass(frozen=True)
class LossUnits:
    """How gradients of the script's loss become gradients of the mean loss.

    Attributes:
        examples: Number of examples, or None.
        row_examples: Example of every row where the script said so.
        is_count_explicit: Whether the script gave the number of examples.
        reduction: Mean or sum, or None.
        loss_scale: Factor of the loss before backward.
        divisor: g_mean = g / divisor; None where unknown.
        loss: The script's loss.
        mean_loss: Data loss per example.
        slope: d term / d prediction of every example, float64, or None.
        curvature: Second derivative, likewise.
        mean_over: Number that the sum of all terms is divided by to give the mean loss.
        terms: Terms of the loss; one per example where nothing else is known.
        dispersion: Sum of the terms' curvatures over that of their squared slopes: 1 for a
            likelihood, on average; other losses have a scale of their own.
        is_residual_loss: Whether the prediction is known to be no logit.
        is_log_loss: Whether the prediction is a logit.
        saturated: Which terms lose their gradient in the training dtype, bool; None if unknown.
        bypassing: Sequence numbers of products that the known loss does not cover.
        mixed: Sequence numbers of nodes after which examples are mixed.
        reason: Why impact cannot be computed; None if it can.
    """

    examples: int | None
    row_examples: torch.Tensor | None
    is_count_explicit: bool
    reduction: Reduction | None
    loss_scale: float
    divisor: float | None
    loss: float | None
    mean_loss: float | None
    slope: torch.Tensor | None
    curvature: torch.Tensor | None
    mean_over: int
    terms: int
    dispersion: float
    is_residual_loss: bool
    is_log_loss: bool
    saturated: torch.Tensor | None
    bypassing: frozenset[int]
    mixed: frozenset[int]
    reason: str | None

    @property
    def saturated_count(self) -> int:
        """Number of saturated terms."""
        return 0 if self.saturated is None else int(self.saturated.sum())

    def layout(self, leading: tuple[int, ...]) -> RowLayout | str:
        """Return where the examples are among rows flattened from ``leading``, or why not."""
        if self.examples is None:
            return "the number of examples is not known; pass step(examples=)"
        return find_layout(leading, self.examples, assume_consecutive=self.is_count_explicit)


def resolve_units(
    said: StepFacts, seen: CapturedLoss | None, contradiction: Callable[[str], None]
) -> LossUnits:
    """Join what the script said with what the graph showed; what was said wins.

    Args:
        said: Arguments of ``step()``.
        seen: The loss captured at backward, or None.
        contradiction: Called with one sentence for every contradiction.
    """
    known = seen is not None and seen.node is not None
    examples = _examples(said, seen, contradiction)
    reduction, loss_scale, reason = _reduction_and_scale(said, seen, contradiction)
    if reason is None and examples is None:
        reason = "the number of examples is not known; pass step(examples=)"
    if seen is not None and not seen.is_separable:
        reason = seen.reason
    elif seen is not None and seen.reason is not None and known:
        reason = seen.reason if said.reduction is None or said.examples is None else reason
    divisor = None
    if reduction is not None and loss_scale is not None and examples:
        divisor = loss_scale * (examples if reduction is Reduction.SUM else 1)
        if not (math.isfinite(divisor) and divisor != 0):
            reason, divisor = f"the loss scale is {loss_scale}", None
    slope, curvature = _terms_per_example(seen, examples, reduction, divisor)
    mean_over = examples or 0
    if seen is not None and known and reduction is Reduction.MEAN:
        mean_over = seen.mean_over
    has_terms = seen is not None and seen.slope is not None and seen.curvature is not None
    _check_loss(said, seen, divisor, contradiction)
    return LossUnits(
        examples=examples,
        row_examples=said.examples if isinstance(said.examples, torch.Tensor) else None,
        is_count_explicit=said.examples is not None,
        reduction=reduction,
        loss_scale=1.0 if loss_scale is None else loss_scale,
        divisor=divisor,
        loss=said.loss if said.loss is not None else (seen.total if seen else None),
        mean_loss=_mean_loss(seen, examples, reduction, divisor),
        slope=slope,
        curvature=curvature,
        mean_over=mean_over,
        terms=seen.terms if seen is not None and known else examples or 0,
        dispersion=_dispersion(seen, mean_over, divisor, loss_scale),
        is_residual_loss=has_terms and seen is not None and not seen.is_log_loss,
        is_log_loss=seen is not None and seen.is_log_loss,
        saturated=None if seen is None or seen.saturated is None else seen.saturated.cpu(),
        bypassing=seen.bypassing if seen is not None and _is_guarded(said) else frozenset(),
        mixed=seen.mixed if seen is not None else frozenset(),
        reason=reason,
    )


def _examples(
    said: StepFacts, seen: CapturedLoss | None, contradiction: Callable[[str], None]
) -> int | None:
    """Return the number of examples of the first micro-batch."""
    examples = said.example_count
    if seen is None or seen.node is None or seen.examples is None:
        return examples
    if examples is None or examples == seen.examples:
        return seen.examples
    if seen.backwards > 1 and examples == seen.examples * seen.backwards:
        return seen.examples  # the script counts all micro-batches of the step
    contradiction(
        f"step(examples=) says {examples} where the target of {seen.node} has {seen.examples}; the "
        "argument is used"
    )
    return examples


def _check_loss(
    said: StepFacts,
    seen: CapturedLoss | None,
    divisor: float | None,
    contradiction: Callable[[str], None],
) -> None:
    """Tell when the loss said is, in no unit that scripts use, the one that was differentiated.

    Of several micro-batches the script may give the last, the sum or the mean, so nothing is said.
    """
    if said.loss is None or seen is None or seen.total is None or seen.backwards > 1:
        return
    if not (math.isfinite(said.loss) and math.isfinite(seen.total)):
        return
    units = [1.0, *(1 / x for x in (seen.loss_scale, divisor) if x)]
    meant = [seen.total * unit for unit in units]
    if seen.data_loss is not None:
        meant += [seen.data_loss, seen.data_loss * seen.mean_over]
    if not any(math.isclose(said.loss, value, rel_tol=0.01, abs_tol=1e-6) for value in meant):
        contradiction(
            f"step(loss=) says {said.loss:g} where {seen.total:g} was differentiated; the argument "
            "is kept as the loss of the step, and impact rests on what was differentiated"
        )


def _is_guarded(said: StepFacts) -> bool:
    """Whether the graph has to vouch for the loss, because the script did not."""
    return said.examples is None or said.reduction is None


def _reduction_and_scale(
    said: StepFacts, seen: CapturedLoss | None, contradiction: Callable[[str], None]
) -> tuple[Reduction | None, float | None, str | None]:
    if seen is None or seen.node is None:
        if said.reduction is None:
            why = seen.reason if seen is not None and seen.reason else "no backward was seen"
            return None, said.loss_scale, why
        return said.reduction, 1.0 if said.loss_scale is None else said.loss_scale, None
    reduction, loss_scale = said.reduction, said.loss_scale
    multiplier = seen.loss_scale
    if seen.reduction == "none":
        return _unreduced(said, seen, multiplier)
    found = Reduction(seen.reduction) if seen.reduction else None
    if reduction is not None and found is not None and reduction is not found:
        contradiction(
            f"step(reduction=) says {reduction} where {seen.node} has {found}; the argument is used"
        )
        # A factor measured at the node belongs to the node's own reduction.
        return reduction, 1.0 if loss_scale is None else loss_scale, None
    if loss_scale is not None and multiplier is not None:
        if not math.isclose(loss_scale, multiplier, rel_tol=1e-3):
            contradiction(
                f"step(loss_scale=) says {loss_scale:g} where the gradient reaching {seen.node} "
                f"is {multiplier:g}; the argument is used"
            )
    elif loss_scale is None:
        loss_scale = multiplier
    if loss_scale is None:
        why = "no backward passed through the loss"
        if len(seen.multipliers) == seen.losses > 1:
            why = f"{seen.losses} losses of different weight were added; pass step(loss_scale=)"
        return found, None, why
    return reduction or found, loss_scale, None


def _unreduced(
    said: StepFacts, seen: CapturedLoss, multiplier: float | None
) -> tuple[Reduction | None, float | None, str | None]:
    """Judge a loss reduced outside of its node, perhaps with a weight per example."""
    if said.reduction is not None and said.loss_scale is not None:
        return said.reduction, said.loss_scale, None
    if multiplier is not None:
        return Reduction.MEAN, multiplier, None
    return (
        said.reduction,
        said.loss_scale,
        "examples are weighted, so the scale of the loss cannot be told; pass "
        "step(reduction=, loss_scale=)",
    )


def _terms_per_example(
    seen: CapturedLoss | None,
    examples: int | None,
    reduction: Reduction | None,
    divisor: float | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if seen is None or seen.slope is None or seen.curvature is None:
        return None, None
    if seen.terms != examples or reduction is None or divisor is None or seen.losses > 1:
        return None, None
    if seen.reduction == "none" and seen.uniform_multiplier is None:
        if seen.multiplier is None or seen.multiplier.numel() != seen.terms:
            return None, None
        weights = seen.multiplier.reshape(-1).cpu() * examples / divisor
        return seen.slope.cpu() * weights, seen.curvature.cpu() * weights
    return seen.slope.cpu(), seen.curvature.cpu()


def _dispersion(
    seen: CapturedLoss | None, mean_over: int, divisor: float | None, loss_scale: float | None
) -> float:
    """Return sum of w c over sum of (w s)^2, with weight w, slope s and curvature c of a term."""
    if seen is None or seen.slope is None or seen.curvature is None or not divisor:
        return 1.0
    weights = torch.ones_like(seen.slope)
    if seen.reduction == "none" and seen.multiplier is not None:
        if seen.multiplier.numel() == seen.terms:
            weights = seen.multiplier.reshape(-1) * mean_over / divisor
    elif seen.losses > 1 and len(seen.multipliers) == seen.losses and loss_scale:
        each = [seen.multipliers[number].reshape(-1)[:1] for number in range(seen.losses)]
        weights = torch.cat(each).repeat_interleave(seen.mean_over) / loss_scale
    curvature = float((weights * seen.curvature).sum())
    squares = float((weights * seen.slope).square().sum())
    ratio = curvature / squares if squares > 0 else 1.0
    return ratio if math.isfinite(ratio) and ratio > 0 else 1.0


def _mean_loss(
    seen: CapturedLoss | None,
    examples: int | None,
    reduction: Reduction | None,
    divisor: float | None,
) -> float | None:
    if seen is None:
        return None
    if seen.data_loss is None:
        # All that is known of a loss of one's own is its total.
        return seen.total / divisor if seen.total is not None and divisor else None
    if reduction is Reduction.SUM and examples:
        return seen.data_loss * seen.mean_over / examples
    return seen.data_loss
