"""What the autograd graph says of the loss: reduction, examples, slope and curvature per term.

Known losses leave their arguments in their autograd node. Read there, before backward frees them,
nothing has to be guessed: a sum reduction, a regularizer, a gradient scaler's factor and the
division of micro-batches are all seen for what they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from loka_toolkit.recording.switchboard import BACKWARD_TAP, SWITCHBOARD

PRODUCT_NODES = frozenset(
    {"AddmmBackward0", "MmBackward0", "BmmBackward0", "BaddbmmBackward0", "AddbmmBackward0"}
)
VANISHING_SLOPE = 1e-30
"""A slope below this is one that float32 gradients cannot carry: the example is saturated."""

_BCE_EPSILON = 1e-12
"""EPSILON of binary_cross_entropy_backward in ATen/native/Loss.cpp."""

_REDUCTIONS = {0: "none", 1: "mean", 2: "sum"}


@dataclasses.dataclass
class CapturedLoss:
    """What one call of backward revealed.

    Attributes:
        total: Value of the scalar that was differentiated, or None.
        node: Name of the one loss node found, or None.
        reason: Why the loss is not known; None if it is.
        is_separable: False where examples are known to share terms.
        reduction: ``mean``, ``sum`` or ``none``.
        examples: Length of the target's first dimension.
        terms: Terms that were reduced.
        data_loss: Mean of the terms (without class or example weights), float.
        slope: d term / d prediction, float64 [terms], prediction being the logit of a binary log
            loss or the output of a squared error; None for other losses.
        curvature: Second derivative, likewise.
        is_log_loss: Whether the prediction is a logit.
        multiplier: Gradient that reached the node, known once backward ran.
        loss_node: The node, until :meth:`release`.
        prediction: The loss's input, until :meth:`release`.
        target: Target of every term, float64 [terms], of a binary log loss.
        weights: Weight of every term, likewise.
        from_logits: Whether the node's input is the logit and not the probability.
        saturated: Which terms of a log loss lose their gradient in the training dtype, bool.
        bypassing: Sequence numbers of products that reach the total other than through the node.
    """

    total: float | None = None
    node: str | None = None
    reason: str | None = None
    is_separable: bool = True
    reduction: str | None = None
    examples: int | None = None
    terms: int = 0
    data_loss: float | None = None
    slope: torch.Tensor | None = None
    curvature: torch.Tensor | None = None
    is_log_loss: bool = False
    multiplier: torch.Tensor | None = None
    bypassing: frozenset[int] = frozenset()
    loss_node: Any = None
    prediction: torch.Tensor | None = None
    target: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    from_logits: bool = False
    saturated: torch.Tensor | None = None

    @property
    def saturated_count(self) -> int:
        """Number of saturated terms."""
        return 0 if self.saturated is None else int(self.saturated.sum())

    def release(self) -> None:
        """Let go of the graph."""
        self.loss_node = self.prediction = None

    @property
    def uniform_multiplier(self) -> float | None:
        """The multiplier, if it is one number."""
        if self.multiplier is None or self.multiplier.numel() == 0:
            return None
        first = self.multiplier.reshape(-1)[0]
        return float(first) if bool((self.multiplier == first).all()) else None

    @property
    def loss_scale(self) -> float | None:
        """Factor of the loss before backward, as far as the graph tells."""
        multiplier = self.uniform_multiplier
        if multiplier is None:
            return None
        # Equal weights: whatever reduced the terms, their mean has weight 1 / terms.
        return multiplier * self.terms if self.reduction == "none" else multiplier


def capture(
    tensors: torch.Tensor | Sequence[torch.Tensor],
    keep: Callable[[Any], None],
) -> CapturedLoss:
    """Read the graph behind what is about to be differentiated.

    Args:
        tensors: The first argument of ``torch.autograd.backward``.
        keep: Called with the handle of every hook placed, to be removed after the step.
    """
    roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    captured = CapturedLoss()
    if len(roots) == 1 and roots[0].numel() == 1:
        captured.total = float(roots[0].detach())
    losses, bypassing = _walk([root.grad_fn for root in roots if root.grad_fn is not None])
    if len(losses) != 1:
        captured.reason = (
            "no loss of a known kind is in the graph; pass step(examples=, reduction=)"
            if not losses
            else f"{len(losses)} losses were added; pass step(examples=, reduction=)"
        )
        return captured
    node = losses[0]
    captured.bypassing = frozenset(bypassing)
    captured.node = node.name()
    captured.reduction = _REDUCTIONS[int(node._saved_reduction)]
    _KNOWN[node.name()](node, captured)

    def note_multiplier(gradients: tuple[torch.Tensor, ...]) -> None:
        if captured.multiplier is None and gradients and gradients[0] is not None:
            captured.multiplier = gradients[0].detach().to(torch.float64).clone()

    keep(node.register_prehook(note_multiplier))
    return captured


def _walk(roots: list[Any]) -> tuple[list[Any], set[int]]:
    """Return the loss nodes nearest to the roots, and products reached without passing one."""
    losses, products = [], set()
    seen = set(roots)
    pending = list(roots)
    while pending:
        node = pending.pop()
        name = node.name()
        if name in _KNOWN:
            losses.append(node)
            continue
        if name in PRODUCT_NODES:
            products.add(int(node._sequence_nr()))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)
    return losses, products


def _binary_log_loss(node: Any, captured: CapturedLoss) -> None:
    from_logits = node.name() == "BinaryCrossEntropyWithLogitsBackward0"
    prediction, target = node._saved_self.detach(), node._saved_target.detach()
    weight = node._saved_weight
    pos_weight = getattr(node, "_saved_pos_weight", None)
    probability = torch.sigmoid(prediction) if from_logits else prediction
    # The probability in the training dtype is what the gradient was computed from.
    p, y = probability.to(torch.float64).reshape(-1), target.to(torch.float64).reshape(-1)
    _describe(captured, target)
    loss = (
        functional.binary_cross_entropy_with_logits
        if from_logits
        else (functional.binary_cross_entropy)
    )
    captured.data_loss = float(loss(prediction.to(torch.float64), target.to(torch.float64)))
    weights = torch.ones_like(p)
    if weight is not None:
        weights = weights * weight.detach().to(torch.float64).expand(target.shape).reshape(-1)
    if pos_weight is not None:
        if not bool(((y == 0) | (y == 1)).all()):
            return
        positive = pos_weight.detach().to(torch.float64).expand(target.shape).reshape(-1)
        weights = weights * torch.where(y == 1, positive, 1.0)
    captured.is_log_loss = True
    captured.from_logits = from_logits
    captured.loss_node, captured.prediction = node, prediction
    captured.target, captured.weights = y, weights
    captured.slope = weights * (p - y)
    vanishing = captured.slope.abs() <= VANISHING_SLOPE
    if not from_logits:
        # PyTorch divides by max(p (1 - p), 1e-12), and the sigmoid multiplies by p (1 - p).
        damping = (p * (1 - p) / _BCE_EPSILON).clamp(max=1)
        captured.slope = captured.slope * damping
        vanishing = vanishing | ((damping < 1) & ((p - y).abs() > 0.5))
    captured.saturated = vanishing
    captured.curvature = weights * p * (1 - p)


def _squared_error(node: Any, captured: CapturedLoss) -> None:
    prediction, target = node._saved_self.detach(), node._saved_target.detach()
    residual = (prediction.to(torch.float64) - target.to(torch.float64)).reshape(-1)
    _describe(captured, prediction)
    captured.data_loss = float(residual.square().mean())
    captured.slope = 2 * residual
    captured.curvature = torch.full_like(residual, 2.0)


def _log_softmax_loss(node: Any, captured: CapturedLoss) -> None:
    log_probability, target = node._saved_self.detach(), node._saved_target.detach()
    if target.ndim == 0:
        log_probability, target = log_probability.unsqueeze(0), target.unsqueeze(0)
    _describe(captured, target)
    ignored_terms = int(_is_ignored(node, target).sum())
    classes = log_probability.shape[1]
    if target.ndim == 1 and classes == target.shape[0]:
        captured.is_separable = False
        captured.reason = (
            f"a softmax over {classes} classes for {classes} examples is an in-batch softmax: "
            "examples share terms"
        )
    elif node._saved_weight is not None or ignored_terms:
        captured.reason = "classes are weighted or ignored, so examples do not count equally"
    chosen = log_probability.to(torch.float64).gather(1, target.clamp(min=0).unsqueeze(1))
    terms = chosen.squeeze(1)[~_is_ignored(node, target)]
    captured.data_loss = -float(terms.mean()) if terms.numel() else None


def _is_ignored(node: Any, target: torch.Tensor) -> torch.Tensor:
    try:
        return target == int(node._saved_ignore_index)
    except ValueError:  # PyTorch cannot hand out a negative one, such as the default -100
        return target < 0


def _other(node: Any, captured: CapturedLoss) -> None:
    _describe(captured, node._saved_target.detach())


def _describe(captured: CapturedLoss, target: torch.Tensor) -> None:
    captured.examples = int(target.shape[0]) if target.ndim else 1
    captured.terms = target.numel()
    if target.ndim == 2 and target.shape[0] == target.shape[1] > 1:
        captured.is_separable = False
        captured.reason = (
            f"a loss over {target.shape[0]} x {target.shape[1]} terms looks like one of all pairs "
            "of examples: examples share terms"
        )


_KNOWN: dict[str, Callable[[Any, CapturedLoss], None]] = {
    "BinaryCrossEntropyBackward0": _binary_log_loss,
    "BinaryCrossEntropyWithLogitsBackward0": _binary_log_loss,
    "NllLossBackward0": _log_softmax_loss,
    "NllLoss2DBackward0": _log_softmax_loss,
    "MseLossBackward0": _squared_error,
    "SmoothL1LossBackward0": _other,
    "HuberLossBackward0": _other,
    "SoftMarginLossBackward0": _other,
}


class BackwardWatch:
    """Looks at what ``torch.autograd.backward`` is given, during a recorded step only.

    Args:
        found: Called with what every outermost call revealed.
        report: Called with an internal failure.
        model: The model: a loss that depends on other recorded models only is passed over.
    """

    def __init__(
        self,
        found: Callable[[CapturedLoss], None],
        report: Callable[[Exception], None],
        model: nn.Module | None = None,
    ) -> None:
        self._found = found
        self._report = report
        self._model = model
        self._handles: list[Any] = []

    def install(self) -> None:
        """Begin to look."""
        BACKWARD_TAP.add(self._look)

    def remove(self) -> None:
        """Look no more, and remove the hooks placed in the graph."""
        BACKWARD_TAP.remove(self._look)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _look(self, tensors: Any) -> None:
        try:
            with torch.no_grad(), _disable_current_modes():
                if self._model is not None and not SWITCHBOARD.concerns(self._model, tensors):
                    return
                captured = capture(tensors, self._handles.append)
                self._found(captured)
                captured.release()
        except Exception as error:
            self._report(error)
