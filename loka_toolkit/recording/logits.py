"""What the gradient cannot show: how outputs move the logits of saturated examples.

Where p is exactly 0 or 1 in the training dtype, the gradient of the log loss vanishes and with it
every trace of what an error does to that logit; raw counts as inputs make such examples common. On
such a step one more backward pass is run, from the logits instead of the loss. It leaves no
gradient in any parameter, but hooks on activations are called a second time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from loka_toolkit.recording.layers import StepRecord
from loka_toolkit.recording.loss import PRODUCT_NODES, CapturedLoss

_VIEWS = frozenset(
    {
        "ViewBackward0",
        "UnsafeViewBackward0",
        "ReshapeAliasBackward0",
        "SqueezeBackward0",
        "SqueezeBackward1",
        "SqueezeBackward2",
        "UnsqueezeBackward0",
    }
)


def read_logits(record: StepRecord, loss: CapturedLoss, logit: torch.Tensor | None) -> str | None:
    """Fill in the logit's derivative at every layer's sampled output rows, and the loss's at it.

    Args:
        record: The step; its layers are changed in place.
        loss: The captured log loss; slope and curvature are recomputed from the logits.
        logit: The logits, where the loss was given probabilities.

    Returns:
        None, or the reason why it cannot be done.
    """
    if loss.loss_node is None:
        return "several losses were added"
    edge = _logit_edge(loss)
    values = loss.prediction if loss.from_logits else logit
    if edge is None or values is None or loss.target is None or loss.weights is None:
        return "the logits behind the probabilities were not found"
    if values.numel() != loss.terms or loss.terms != loss.examples:
        return "there is not one logit per example"
    nodes = _product_nodes(edge.node)
    if nodes is None:
        return "the graph holds custom functions, which are not run twice"
    layers = [layer for layer in record.layers if layer.sequence in nodes]
    if not layers:
        return "no recorded product leads to the logits"
    seed = torch.ones_like(values)
    with torch.enable_grad():
        found = torch.autograd.grad(
            edge,
            [GradientEdge(nodes[layer.sequence or 0], 0) for layer in layers],
            grad_outputs=seed,
            retain_graph=True,
            allow_unused=True,
        )
    for layer, gradient in zip(layers, found, strict=True):
        if gradient is not None:
            layer.logit_rows = layer.sampled_rows_of(gradient.detach())
    _expand_at_logits(loss, values.detach().to(torch.float64).reshape(-1))
    return None


def _logit_edge(loss: CapturedLoss) -> GradientEdge | None:
    node, output = loss.loss_node.next_functions[0]
    if loss.from_logits:
        return None if node is None else GradientEdge(node, output)
    while node is not None and node.name() in _VIEWS:
        node, output = node.next_functions[0]
    if node is None or node.name() != "SigmoidBackward0":
        return None
    node, output = node.next_functions[0]
    return None if node is None else GradientEdge(node, output)


def _product_nodes(root: Any) -> dict[int, Any] | None:
    """Return the nodes of products by sequence number; None if a node runs Python code."""
    found: dict[int, Any] = {}
    seen, pending = {root}, [root]
    while pending:
        node = pending.pop()
        if isinstance(node, BackwardCFunction):
            return None
        if node.name() in PRODUCT_NODES:
            found[int(node._sequence_nr())] = node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)
    return found


def _expand_at_logits(loss: CapturedLoss, z: torch.Tensor) -> None:
    """Take slope and curvature of the loss, as it is written, at the logits in float64."""
    assert loss.target is not None and loss.weights is not None
    y = loss.target
    p, q = torch.sigmoid(z), torch.sigmoid(-z)
    slope, curvature = p * (1 - y) - q * y, p * q
    if not loss.from_logits:
        # binary_cross_entropy clamps logarithms at -100, and beyond that its slope is zero.
        flat = ((y > 0) & (torch.log(p) < -100)) | ((y < 1) & (torch.log(1 - p) < -100))
        slope, curvature = slope.masked_fill(flat, 0.0), curvature.masked_fill(flat, 0.0)
    loss.slope, loss.curvature = loss.weights * slope, loss.weights * curvature
