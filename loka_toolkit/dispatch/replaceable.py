"""Which linear layers are routed by their class."""

from __future__ import annotations

import torch
from torch import nn

from loka_toolkit.dispatch.runtime import RoutedLinear


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is exactly an ``nn.Linear``, routed or not.

    A subclass may compute something else: its products are caught like those of any module.
    """
    return type(module) is nn.Linear or type(module) is RoutedLinear


def why_not_replaceable(module: nn.Module) -> str | None:
    """Return None if a linear layer can be routed, else one clause that says why not."""
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance"
    weight = module.weight
    if type(weight) not in (nn.Parameter, torch.Tensor):
        return f"its weight is a {type(weight).__name__}"
    if weight.layout is not torch.strided or weight.is_quantized:
        return "its weight is sparse or quantized"
    return None
