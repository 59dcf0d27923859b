"""What one GEMM-like aten call did: a product, a convolution, or a fused composite."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from loka_toolkit.recording.composites import Composite, composite_of, is_composite
from loka_toolkit.recording.convolution_calls import ConvolutionCall, convolution_of, is_convolution
from loka_toolkit.recording.products import Product, is_product, product_of

Work = Product | ConvolutionCall | Composite


def work_of(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> Work | None:
    """Return what a GEMM-like call did; None if it is none."""
    return (
        product_of(func, args, kwargs, out)
        or convolution_of(func, args, out)
        or composite_of(func, args, kwargs, out)
    )


def is_work(func: torch._ops.OpOverload) -> bool:
    """Whether an operator is GEMM-like."""
    return is_product(func) or is_convolution(func) or is_composite(func)


@dataclasses.dataclass(frozen=True)
class Tensors:
    """The tensors of a call that decide whether it can be looked at.

    Attributes:
        factors: What is multiplied.
        is_empty: Whether nothing is.
    """

    factors: tuple[torch.Tensor, ...]
    is_empty: bool

    @property
    def are_plain(self) -> bool:
        """Whether no factor is of a subclass, whose memory cannot be read."""
        plain = (torch.Tensor, torch.nn.Parameter)
        return all(type(x) in plain for x in self.factors)


def tensors_of(work: Work) -> Tensors:
    """Return the tensors of a call."""
    if isinstance(work, Product):
        is_empty = work.out.numel() == 0 or work.a.shape[-1] == 0
        return Tensors((work.a, work.b), is_empty)
    if isinstance(work, ConvolutionCall):
        return Tensors((work.x, work.w), work.shape.flops == 0)
    return Tensors(work.factors, work.shape.flops == 0)
