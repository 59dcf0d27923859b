"""Which modules of a model can be routed."""

from __future__ import annotations

import torch
from torch import nn

from loka_toolkit.artifacts.sites import canonical_fqn
from loka_toolkit.dispatch.runtime import RoutedLinear


def why_not_replaceable(module: nn.Module) -> str | None:
    """Return None if the module's products can be routed, else one clause that says why not.

    Exactly ``nn.Linear`` can: a subclass may compute something else in its forward.
    """
    if type(module) is not nn.Linear and type(module) is not RoutedLinear:
        return f"the module is a {type(module).__name__}; only nn.Linear itself is replaced"
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance"
    weight = module.weight
    if type(weight) not in (nn.Parameter, torch.Tensor):
        return f"its weight is a {type(weight).__name__}"
    if weight.layout is not torch.strided or weight.is_quantized:
        return "its weight is sparse or quantized"
    return None


def modules_by_fqn(model: nn.Module) -> dict[str, tuple[nn.Module, ...]]:
    """Return the distinct modules of every canonical path; a shared module has several paths."""
    found: dict[str, list[nn.Module]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        mine = found.setdefault(canonical_fqn(name), [])
        if all(module is not other for other in mine):
            mine.append(module)
    return {fqn: tuple(modules) for fqn, modules in found.items()}
