"""One product of a model replaced by its FP8 emulation; knows nothing of the recorder.

Products are taken where Python calls them (``torch.nn.functional.linear``, ``matmul`` and so on),
numbered in the order of the forward pass. Operands are the float64 model's, rounded to float32, so
what is compared is the emulated product in a model that is otherwise exact.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from loka_toolkit.numerics.emulation import emulate
from loka_toolkit.numerics.recipes import Recipe

Dims = tuple[int, int, int, int]
"""Batch, M, N and K of a forward product, parameters on the right."""


@dataclasses.dataclass(frozen=True)
class Replacement:
    """What is replaced, and how.

    Attributes:
        index: Number of the forward product.
        role: ``fwd``, ``dgrad``, ``wgrad``, ``grad_a`` or ``grad_b``.
        recipe: The recipe.
        scale_a: Static decode scale of the left factor; None to take it from the tensor.
        scale_b: Likewise of the right factor.
    """

    index: int
    role: str
    recipe: Recipe
    scale_a: float | None = None
    scale_b: float | None = None

    def multiply(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Return the emulated product in the dtype of ``a``."""
        scales = [None if s is None else torch.tensor(s) for s in (self.scale_a, self.scale_b)]
        with torch.no_grad():
            out = emulate(
                a.detach().float(),
                b.detach().float(),
                self.recipe,
                scale_a=scales[0],
                scale_b=scales[1],
            )
        return out.to(a.dtype)


class ReplacedProducts(TorchFunctionMode):
    """Replaces one product, or none, and lists all of them.

    Args:
        replacement: What to replace; None to only look.

    Attributes:
        seen: Dims of every product so far.
    """

    def __init__(self, replacement: Replacement | None = None) -> None:
        super().__init__()
        self._replacement = replacement
        self.seen: list[Dims] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Compute products by :meth:`_product`, everything else as it is."""
        kwargs = kwargs or {}
        if func is F.linear:
            x, w = args[0], args[1]
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            out = self._product(x.reshape(-1, x.shape[-1]), w.t(), is_weight=True)
            out = out.reshape(*x.shape[:-1], w.shape[0])
            return out if bias is None else out + bias
        if func in (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.bmm):
            return self._matmul(args[0], args[1])
        if func is torch.tensordot:
            x, w, dims = args[0], args[1], kwargs.get("dims", args[2] if len(args) > 2 else None)
            if dims == ([1], [0]) and x.ndim == 3 and w.ndim == 2:
                rows = x.permute(0, 2, 1).reshape(-1, x.shape[1])
                out = self._product(rows, w, is_weight=True)
                return out.reshape(x.shape[0], x.shape[2], w.shape[1])
            raise NotImplementedError(f"tensordot over {dims}")
        if func in (torch.mm, torch.addmm, torch.baddbmm, torch.einsum, torch.Tensor.mm):
            raise NotImplementedError(f"{func} is not taken apart here")
        return func(*args, **kwargs)

    def _matmul(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if b.ndim == 2:
            out = self._product(a.reshape(-1, a.shape[-1]), b, is_weight=_is_weight(b))
            return out.reshape(*a.shape[:-1], b.shape[-1])
        shape = (*a.shape[:-1], b.shape[-1])
        a, b = a.reshape(-1, *a.shape[-2:]), b.reshape(-1, *b.shape[-2:])
        return self._product(a, b, is_weight=False).reshape(shape)

    def _product(self, a: torch.Tensor, b: torch.Tensor, *, is_weight: bool) -> torch.Tensor:
        index = len(self.seen)
        self.seen.append((a.shape[:-2].numel(), a.shape[-2], b.shape[-1], a.shape[-1]))
        wanted = self._replacement
        if wanted is None or wanted.index != index:
            return a @ b
        if wanted.role == "fwd":
            return wanted.multiply(a, b)
        out: torch.Tensor = _ReplacedBackward.apply(a, b, wanted, is_weight)
        return out


def _is_weight(x: torch.Tensor) -> bool:
    return isinstance(x, nn.Parameter)


class _ReplacedBackward(torch.autograd.Function):
    """An exact product of which one backward product is replaced."""

    @staticmethod
    def forward(
        ctx: Any, a: torch.Tensor, b: torch.Tensor, wanted: Replacement, is_weight: bool
    ) -> torch.Tensor:
        """Return A B."""
        ctx.save_for_backward(a, b)
        ctx.wanted, ctx.is_weight = wanted, is_weight
        return a @ b

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        """Return the gradients of A and B, one of them as FP8 would compute it."""
        a, b = ctx.saved_tensors
        role, multiply = ctx.wanted.role, ctx.wanted.multiply
        of_a = multiply(g, b.mT) if role in ("dgrad", "grad_a") else g @ b.mT
        if role == "wgrad":
            of_b = multiply(g.mT, a).mT
        elif role == "grad_b":
            of_b = multiply(a.mT, g)
        else:
            of_b = a.mT @ g
        return of_a, of_b, None, None
