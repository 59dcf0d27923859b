"""What the autograd graph says of the loss: reduction, examples, slope and curvature per term.

Known losses leave their arguments in their autograd node. Read there, before backward frees them,
nothing has to be guessed: a sum reduction, a regularizer, a gradient scaler's factor and the
division of micro-batches are all seen for what they are. Several losses that are added count as
one, where all of them have the same reduction, examples and factor.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from loka_toolkit.recording.loss_terms import LOSS_NODES, LossTerms, read_terms
from loka_toolkit.recording.reruns import HOOK_WATCH, why_packed
from loka_toolkit.recording.switchboard import BACKWARD_TAP, SWITCHBOARD

PRODUCT_NODES = frozenset(
    {"AddmmBackward0", "MmBackward0", "BmmBackward0", "BaddbmmBackward0", "AddbmmBackward0"}
)
MIXED = "behind a batch normalization the gradients of examples are not independent of each other"
_TRAINING = "_saved_training"
"""Attribute of a batch normalization's node: whether it normalized over the batch."""


@dataclasses.dataclass
class CapturedLoss:
    """What one call of backward revealed.

    Attributes:
        total: Value of the scalar that was differentiated, or None.
        node: Name of the loss node found, or of several; None if the loss is not known.
        reason: Why the loss is not known; None if it is.
        is_separable: False where examples are known to share terms.
        reduction: ``mean``, ``sum`` or ``none``.
        examples: Length of the target's first dimension, or of the model's input (:meth:`group`).
        terms: Terms that were reduced, over all losses.
        losses: Number of losses that were added.
        data_loss: Sum over the losses of the mean of their terms (without class or example
            weights), or None.
        slope: d term / d prediction, float64 [terms]; see :class:`LossTerms`.
        curvature: Second derivative, likewise.
        is_log_loss: Whether the prediction is a logit.
        multipliers: Gradient that reached each node, known once backward ran.
        backwards: Calls of backward in the step, this one included.
        loss_node: The node, until :meth:`release`; None where there are several.
        prediction: The loss's input, until :meth:`release`, likewise.
        target: Target of every term, float64 [terms], of a binary log loss.
        weights: Weight of every term, likewise.
        from_logits: Whether the node's input is the logit and not the probability.
        saturated: Which terms of a log loss lose their gradient in the training dtype, bool.
        bypassing: Sequence numbers of products that reach the total other than through the losses.
        mixed: Sequence numbers of nodes behind a batch normalization, which mixes examples.
        roots: What is differentiated, until :meth:`release`.
        root_gradients: Gradients that backward is given for them, or None, likewise.
    """

    total: float | None = None
    node: str | None = None
    reason: str | None = None
    is_separable: bool = True
    reduction: str | None = None
    examples: int | None = None
    terms: int = 0
    losses: int = 1
    data_loss: float | None = None
    slope: torch.Tensor | None = None
    curvature: torch.Tensor | None = None
    is_log_loss: bool = False
    multipliers: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    backwards: int = 1
    bypassing: frozenset[int] = frozenset()
    mixed: frozenset[int] = frozenset()
    loss_node: Any = None
    prediction: torch.Tensor | None = None
    target: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    from_logits: bool = False
    saturated: torch.Tensor | None = None
    roots: tuple[torch.Tensor, ...] = ()
    root_gradients: tuple[torch.Tensor | None, ...] | None = None

    @property
    def saturated_count(self) -> int:
        """Number of saturated terms."""
        return 0 if self.saturated is None else int(self.saturated.sum())

    def release(self) -> None:
        """Let go of the graph."""
        self.loss_node = self.prediction = self.root_gradients = None
        self.roots = ()

    def group(self, inputs: int | None) -> None:
        """Take examples to be the rows of the model's input where the target has several for each.

        A loss over every token of a sequence has as many targets as tokens, which attention mixes;
        what is independent of each other are the sequences.

        Args:
            inputs: First dimension of the model's inputs, or None.
        """
        examples = self.examples
        if inputs and examples and 1 < inputs < examples and examples % inputs == 0:
            self.examples = inputs

    @property
    def mean_over(self) -> int:
        """Terms whose mean it is, where it is one; several losses are a sum of means."""
        return self.terms // self.losses

    @property
    def multiplier(self) -> torch.Tensor | None:
        """Gradient that reached the one node, or None."""
        return self.multipliers.get(0) if self.losses == 1 else None

    @property
    def uniform_multiplier(self) -> float | None:
        """The multiplier, if it is one number."""
        if len(self.multipliers) < self.losses:
            return None
        every = torch.cat([m.reshape(-1) for m in self.multipliers.values()])
        if every.numel() == 0 or not bool((every == every[0]).all()):
            return None
        return float(every[0])

    @property
    def loss_scale(self) -> float | None:
        """Factor of the loss before backward, as far as the graph tells."""
        multiplier = self.uniform_multiplier
        if multiplier is None:
            return None
        # Equal weights: whatever reduced the terms, their mean has weight 1 / terms.
        return multiplier * self.mean_over if self.reduction == "none" else multiplier


def capture(
    tensors: torch.Tensor | Sequence[torch.Tensor],
    keep: Callable[[Any], None],
    gradients: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
) -> CapturedLoss:
    """Read the graph behind what is about to be differentiated.

    Args:
        tensors: The first argument of ``torch.autograd.backward``.
        keep: Called with the handle of every hook placed, to be removed after the step.
        gradients: Its second argument.
    """
    roots = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
    captured = CapturedLoss(roots=roots)
    if gradients is not None:
        given = [gradients] if isinstance(gradients, torch.Tensor) else gradients
        captured.root_gradients = tuple(given)
    if len(roots) == 1 and roots[0].numel() == 1:
        captured.total = float(roots[0].detach())
    nodes, bypassing = _walk([root.grad_fn for root in roots if root.grad_fn is not None])
    if (why := why_packed(nodes)) is not None:
        captured.reason = f"{why}; pass step(examples=, reduction=)"
        return captured
    every = [read_terms(node) for node in nodes]
    alike = {(t.reduction, t.examples, t.terms) for t in every}
    if len(alike) != 1:
        captured.reason = (
            "no loss of a known kind is in the graph; pass step(examples=, reduction=)"
            if not every
            else f"{len(every)} losses of different size or reduction were added; pass "
            "step(examples=, reduction=)"
        )
        return captured
    captured.bypassing = frozenset(bypassing)
    captured.mixed = _mixed(nodes)
    _join(captured, every)
    if len(nodes) == 1:
        captured.loss_node, captured.prediction = nodes[0], every[0].prediction
        captured.target, captured.weights = every[0].target, every[0].weights
        captured.from_logits = every[0].from_logits
    with HOOK_WATCH.of_our_own():
        for number, node in enumerate(nodes):
            keep(node.register_prehook(functools.partial(_note_multiplier, captured, number)))
    return captured


def _note_multiplier(
    captured: CapturedLoss, number: int, gradients: tuple[torch.Tensor, ...]
) -> None:
    if number not in captured.multipliers and gradients and gradients[0] is not None:
        captured.multipliers[number] = gradients[0].detach().to(torch.float64).clone()


def _join(captured: CapturedLoss, every: list[LossTerms]) -> None:
    """Describe the sum of one or several losses of the same size and reduction."""
    captured.node = " and ".join(sorted({terms.node for terms in every}))
    captured.losses = len(every)
    captured.reduction, captured.examples = every[0].reduction, every[0].examples
    captured.terms = sum(terms.terms for terms in every)
    captured.is_separable = all(terms.is_separable for terms in every)
    reasons = [terms.reason for terms in every if terms.reason is not None]
    captured.reason = reasons[0] if reasons else None
    if len(every) > 1 and every[0].reduction == "none":
        captured.reason = f"{len(every)} unreduced losses were added; pass step(reduction=)"
    means = [terms.data_loss for terms in every]
    known = [mean for mean in means if mean is not None]
    captured.data_loss = sum(known) if len(known) == len(means) else None
    captured.slope = _joined([terms.slope for terms in every])
    captured.curvature = _joined([terms.curvature for terms in every])
    captured.saturated = _joined([terms.saturated for terms in every])
    captured.is_log_loss = all(terms.is_log_loss for terms in every)


def _joined(parts: list[torch.Tensor | None]) -> torch.Tensor | None:
    known = [part for part in parts if part is not None]
    return torch.cat(known) if len(known) == len(parts) else None


def _mixed(roots: list[Any]) -> frozenset[int]:
    """Return the nodes from which a way to the roots leads through a batch normalization."""
    behind = set()
    seen = {(root, False) for root in roots}
    pending = list(seen)
    while pending:
        node, is_mixed = pending.pop()
        is_mixed = is_mixed or ("BatchNorm" in node.name() and getattr(node, _TRAINING, True))
        if is_mixed:
            behind.add(int(node._sequence_nr()))
        for following, _ in node.next_functions:
            if following is not None and (following, is_mixed) not in seen:
                seen.add((following, is_mixed))
                pending.append((following, is_mixed))
    return frozenset(behind)


def _walk(roots: list[Any]) -> tuple[list[Any], set[int]]:
    """Return the loss nodes nearest to the roots, and products reached without passing one."""
    losses, products = [], set()
    seen = set(roots)
    pending = list(roots)
    while pending:
        node = pending.pop()
        name = node.name()
        if name in LOSS_NODES:
            losses.append(node)
            continue
        if name in PRODUCT_NODES:
            products.add(int(node._sequence_nr()))
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)
    return losses, products


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

    def _look(self, tensors: Any, gradients: Any) -> None:
        try:
            with torch.no_grad(), _disable_current_modes():
                if self._model is not None and not SWITCHBOARD.concerns(self._model, tensors):
                    return
                captured = capture(tensors, self._handles.append, gradients)
                self._found(captured)
                captured.release()
        except Exception as error:
            self._report(error)
