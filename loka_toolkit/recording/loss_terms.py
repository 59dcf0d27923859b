"""Known losses, read off their autograd nodes: terms, slope and curvature of each.

A node keeps the arguments of its forward until backward frees them. Predictions are those that the
gradient is computed from, in the training dtype; derivatives are taken in float64.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

VANISHING_SLOPE = 1e-30
"""A slope below this is one that float32 gradients cannot carry: the example is saturated."""

_BCE_EPSILON = 1e-12
"""EPSILON of binary_cross_entropy_backward in ATen/native/Loss.cpp."""

_REDUCTIONS = {0: "none", 1: "mean", 2: "sum"}


@dataclasses.dataclass
class LossTerms:
    """What one loss node says.

    Attributes:
        node: Its name.
        reduction: ``mean``, ``sum`` or ``none``.
        examples: Length of the target's first dimension.
        terms: Terms that were reduced; ignored ones do not count.
        data_loss: Mean of the terms (without class or example weights), or None.
        slope: d term / d prediction, float64 [terms], prediction being the logit of a binary log
            loss or the output of a loss of the residual; None for other losses.
        curvature: Second derivative, likewise.
        is_log_loss: Whether the prediction is a logit.
        prediction: The loss's input.
        target: Target of every term, float64 [terms], of a binary log loss.
        weights: Weight of every term, likewise.
        from_logits: Whether the node's input is the logit and not the probability.
        saturated: Which terms of a log loss lose their gradient in the training dtype, bool.
        is_separable: False where examples are known to share terms.
        reason: Why the loss is not a mean of independent terms; None if it is.
    """

    node: str
    reduction: str
    examples: int
    terms: int
    data_loss: float | None = None
    slope: torch.Tensor | None = None
    curvature: torch.Tensor | None = None
    is_log_loss: bool = False
    prediction: torch.Tensor | None = None
    target: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    from_logits: bool = False
    saturated: torch.Tensor | None = None
    is_separable: bool = True
    reason: str | None = None


def read_terms(node: Any) -> LossTerms:
    """Return what a node of a known loss says; see :data:`LOSS_NODES`."""
    target = node._saved_target.detach()
    terms = LossTerms(
        node=node.name(),
        reduction=_REDUCTIONS[int(node._saved_reduction)],
        examples=int(target.shape[0]) if target.ndim else 1,
        terms=target.numel(),
    )
    if target.ndim == 2 and target.shape[0] == target.shape[1] > 1:
        terms.is_separable = False
        terms.reason = (
            f"a loss over {target.shape[0]} x {target.shape[1]} terms looks like one of all pairs "
            "of examples: examples share terms"
        )
    _READERS[terms.node](node, terms, target)
    return terms


def _binary_log_loss(node: Any, terms: LossTerms, target: torch.Tensor) -> None:
    from_logits = terms.node == "BinaryCrossEntropyWithLogitsBackward0"
    prediction, weight = node._saved_self.detach(), node._saved_weight
    pos_weight = getattr(node, "_saved_pos_weight", None)
    probability = torch.sigmoid(prediction) if from_logits else prediction
    p, y = probability.to(torch.float64).reshape(-1), target.to(torch.float64).reshape(-1)
    loss = (
        functional.binary_cross_entropy_with_logits
        if from_logits
        else functional.binary_cross_entropy
    )
    terms.data_loss = float(loss(prediction.to(torch.float64), target.to(torch.float64)))
    weights = torch.ones_like(p)
    if weight is not None:
        weights = weights * weight.detach().to(torch.float64).expand(target.shape).reshape(-1)
    if pos_weight is not None:
        if not bool(((y == 0) | (y == 1)).all()):
            return
        positive = pos_weight.detach().to(torch.float64).expand(target.shape).reshape(-1)
        weights = weights * torch.where(y == 1, positive, 1.0)
    terms.is_log_loss, terms.from_logits = True, from_logits
    terms.prediction, terms.target, terms.weights = prediction, y, weights
    terms.slope = weights * (p - y)
    vanishing = terms.slope.abs() <= VANISHING_SLOPE
    if not from_logits:
        # PyTorch divides by max(p (1 - p), 1e-12), and the sigmoid multiplies by p (1 - p).
        damping = (p * (1 - p) / _BCE_EPSILON).clamp(max=1)
        terms.slope = terms.slope * damping
        vanishing = vanishing | ((damping < 1) & ((p - y).abs() > 0.5))
    terms.saturated = vanishing
    terms.curvature = weights * p * (1 - p)


def _soft_margin(node: Any, terms: LossTerms, target: torch.Tensor) -> None:
    """Read log(1 + exp(-y z)) with y = 1 or -1: the binary log loss by another name."""
    z = node._saved_self.detach().to(torch.float64).reshape(-1)
    y = target.to(torch.float64).reshape(-1)
    terms.data_loss = float(functional.softplus(-y * z).mean())
    wrong = torch.sigmoid(-y * z)
    terms.is_log_loss = True
    terms.slope, terms.curvature = -y * wrong, y.square() * wrong * (1 - wrong)
    terms.saturated = terms.slope.abs() <= VANISHING_SLOPE


def _residuals(node: Any, target: torch.Tensor) -> torch.Tensor:
    prediction: torch.Tensor = node._saved_self.detach().to(torch.float64)
    return (prediction - target.to(torch.float64)).reshape(-1)


def _squared_error(node: Any, terms: LossTerms, target: torch.Tensor) -> None:
    residual = _residuals(node, target)
    terms.data_loss = float(residual.square().mean())
    terms.slope = 2 * residual
    terms.curvature = torch.full_like(residual, 2.0)


def _huber(node: Any, terms: LossTerms, target: torch.Tensor) -> None:
    """Read a loss that is quadratic up to a residual, and linear beyond."""
    residual = _residuals(node, target)
    if terms.node == "HuberLossBackward0":
        knee = float(node._saved_delta)
        inner, height = 1.0, knee
    else:
        knee = float(node._saved_beta)
        inner, height = (1.0 / knee if knee else 0.0), 1.0
    is_inner = residual.abs() < knee
    terms.slope = torch.where(is_inner, inner * residual, height * residual.sign())
    terms.curvature = torch.where(is_inner, inner, 0.0)
    outer = height * (residual.abs() - 0.5 * knee)
    terms.data_loss = float(torch.where(is_inner, 0.5 * inner * residual.square(), outer).mean())


def _log_softmax_loss(node: Any, terms: LossTerms, target: torch.Tensor) -> None:
    log_probability = node._saved_self.detach()
    if target.ndim == 0:
        log_probability, target = log_probability.unsqueeze(0), target.unsqueeze(0)
    classes = log_probability.shape[1]
    if target.ndim == 1 and classes == target.shape[0]:
        terms.is_separable = False
        terms.reason = (
            f"a softmax over {classes} classes for {classes} examples is an in-batch softmax: "
            "examples share terms"
        )
    elif node._saved_weight is not None:
        terms.reason = "classes are weighted, so examples do not count equally"
    is_counted = ~_is_ignored(node, target)
    chosen = log_probability.to(torch.float64).gather(1, target.clamp(min=0).unsqueeze(1))
    counted = chosen.squeeze(1)[is_counted]
    terms.terms = counted.numel()
    terms.data_loss = -float(counted.mean()) if counted.numel() else None
    if not counted.numel():
        terms.reason = "every target is ignored"


def _is_ignored(node: Any, target: torch.Tensor) -> torch.Tensor:
    try:
        return target == int(node._saved_ignore_index)
    except ValueError:  # PyTorch cannot hand out a negative one, such as the default -100
        return target < 0


_READERS: dict[str, Callable[[Any, LossTerms, torch.Tensor], None]] = {
    "BinaryCrossEntropyBackward0": _binary_log_loss,
    "BinaryCrossEntropyWithLogitsBackward0": _binary_log_loss,
    "NllLossBackward0": _log_softmax_loss,
    "NllLoss2DBackward0": _log_softmax_loss,
    "MseLossBackward0": _squared_error,
    "SmoothL1LossBackward0": _huber,
    "HuberLossBackward0": _huber,
    "SoftMarginLossBackward0": _soft_margin,
}

LOSS_NODES = frozenset(_READERS)
"""Autograd nodes of the losses that are known."""
