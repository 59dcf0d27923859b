"""A caught product: forward and both gradients, each through its route.

Whatever the model wrote, aten multiplies out = alpha A B (+ beta C). Here that product is brought
into the orientation in which it was judged, x[T,I] w[O,I]^T for a product with a parameter on
either side, and handed to the candidate of its role. A role without a route, or whose entry does
not hold for this product, runs the operator that autograd would have run, operands in its order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from loka_toolkit.artifacts.sites import Role
from loka_toolkit.dispatch.counters import Bank, Outcome
from loka_toolkit.dispatch.decompose import FIRST_FACTOR
from loka_toolkit.dispatch.runtime import RoleRoute, hit


@dataclasses.dataclass(frozen=True)
class ProductRoute:
    """How the products of one signature are computed.

    Attributes:
        bank: Counters and scales.
        roles: Route by role; a role that is absent runs in its own precision.
    """

    bank: Bank
    roles: Mapping[Role, RoleRoute]

    def __deepcopy__(self, memo: dict[int, object]) -> ProductRoute:
        """Return self: a copy of an installed model counts into the same installation."""
        return self


@dataclasses.dataclass(frozen=True)
class _Written:
    """The product as aten was asked for it.

    Attributes:
        op: The operator.
        args: Its arguments; tensors are those given to the autograd function.
        kwargs: ``alpha`` and ``beta``.
        side: ``a`` or ``b`` where that factor is a parameter, else None.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    side: str | None


def route_product(
    op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], route: ProductRoute, side: str | None
) -> Tensor:
    """Return what ``op`` returns, each product through its route.

    Args:
        op: One of the products that a candidate may compute.
        args: Its arguments: addend if any, left factor, right factor.
        kwargs: ``alpha`` and ``beta``, if given.
        route: The route.
        side: ``a`` or ``b`` where that factor is a parameter, else None.
    """
    first = FIRST_FACTOR[op]
    addend = args[0] if first else None
    written = _Written(op, args, kwargs, side)
    out: Tensor = _RoutedProduct.apply(  # type: ignore[no-untyped-call]
        args[first], args[first + 1], addend, written, route
    )
    return out


class _RoutedProduct(torch.autograd.Function):
    """out = alpha a b + beta addend and its gradients; a, b: matrices, batches of them, vectors."""

    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        b: Tensor,
        addend: Tensor | None,
        written: _Written,
        route: ProductRoute,
    ) -> Tensor:
        needs_a, needs_b = ctx.needs_input_grad[:2]
        ctx.save_for_backward(a if needs_b else None, b if needs_a else None)
        ctx.route, ctx.side = route, written.side
        ctx.alpha, ctx.beta = written.kwargs.get("alpha", 1), written.kwargs.get("beta", 1)
        ctx.is_column_major = tuple(
            x.ndim == 2 and x.stride(0) == 1 and x.stride(1) == x.shape[0] for x in (a, b)
        )
        ctx.ndims = a.ndim, b.ndim
        left, right = _as_matrices(a, b)
        role = route.roles.get(Role.FWD)
        ctx.tokens = _tokens(left, right, written.side)
        if not _takes(route, role, a, ctx.tokens):
            out: Tensor = written.op(*written.args, **written.kwargs)
            return out
        if written.side == "a":
            product = _hit(right.mT, left.mT, route.bank, role).mT.contiguous()
        else:
            product = _hit(left, right, route.bank, role)
        product = _as_written(product, ctx.ndims)  # contiguous, as aten's: views of it may follow
        if ctx.alpha != 1:
            product = product * ctx.alpha
        if addend is not None and ctx.beta != 0:
            product = product + (addend if ctx.beta == 1 else ctx.beta * addend)
        return product

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        grad_a = grad_b = grad_addend = None
        if ctx.needs_input_grad[0]:
            grad_a = _scaled(_gradient_of_a(ctx, grad, b), ctx.alpha)
        if ctx.needs_input_grad[1]:
            grad_b = _scaled(_gradient_of_b(ctx, grad, a), ctx.alpha)
        if ctx.needs_input_grad[2]:
            grad_addend = _scaled(grad, ctx.beta)  # autograd adds up what was broadcast
        return grad_a, grad_b, grad_addend, None, None


def _gradient_of_a(ctx: Any, grad: Tensor, b: Tensor) -> Tensor:
    """Return g b^T; with a vector b that is an outer product, which contracts over nothing."""
    route: ProductRoute = ctx.route
    role = route.roles.get({"a": Role.WGRAD, "b": Role.DGRAD, None: Role.GRAD_A}[ctx.side])
    if ctx.ndims[1] == 1:
        return grad.ger(b) if ctx.ndims[0] == 2 else grad * b
    if _takes(route, role, grad, ctx.tokens):
        return _hit(grad, b.mT, route.bank, role)
    if ctx.is_column_major[0]:
        return torch.mm(b, grad.t()).t()
    return torch.bmm(grad, b.mT) if grad.ndim == 3 else torch.mm(grad, b.mT)


def _gradient_of_b(ctx: Any, grad: Tensor, a: Tensor) -> Tensor:
    """Return a^T g."""
    route: ProductRoute = ctx.route
    role = route.roles.get({"a": Role.DGRAD, "b": Role.WGRAD, None: Role.GRAD_B}[ctx.side])
    if ctx.ndims[0] == 1:
        return grad * a
    is_vector = ctx.ndims[1] == 1
    if _takes(route, role, grad, ctx.tokens):
        g = grad.unsqueeze(1) if is_vector else grad
        if ctx.side is None:
            product = _hit(a.mT, g, route.bank, role)
        else:
            product = _hit(g.mT, a, route.bank, role).mT
        return product.squeeze(1) if is_vector else product
    if is_vector:
        return torch.mv(a.t(), grad)
    if ctx.is_column_major[1]:
        return torch.mm(grad.t(), a).t()
    return torch.bmm(a.mT, grad) if grad.ndim == 3 else torch.mm(a.mT, grad)


def _as_matrices(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors with vectors as a row on the left and as a column on the right."""
    return a.unsqueeze(0) if a.ndim == 1 else a, b.unsqueeze(1) if b.ndim == 1 else b


def _as_written(product: Tensor, ndims: tuple[int, int]) -> Tensor:
    product = product.squeeze(-1) if ndims[1] == 1 else product
    return product.squeeze(-1) if ndims[0] == 1 else product


def _takes(route: ProductRoute, role: RoleRoute | None, operand: Tensor, tokens: int) -> bool:
    """Return whether a role's candidate takes this product; count the miss if it has one."""
    if role is None:
        return False
    outcome = role.outcome(tokens, operand.dtype, operand.device.type)
    if outcome is Outcome.HIT:
        return True
    route.bank.count(operand.device, role.slot, int(outcome))
    return False


def _hit(a: Tensor, b: Tensor, bank: Bank, role: RoleRoute | None) -> Tensor:
    """Return a b by a role's candidate; einsum writes one product as a batch of one."""
    if role is None:
        raise ValueError("a product without a route cannot be a hit")
    if a.ndim == 3 and a.shape[0] == 1:
        return hit(a[0], b[0], bank, role).unsqueeze(0)
    return hit(a, b, bank, role)


def _tokens(a: Tensor, b: Tensor, side: str | None) -> int:
    if side is None:
        return a.shape[0] if a.ndim == 3 else 1
    return b.shape[-1] if side == "a" else a.shape[-2]


def _scaled(x: Tensor, factor: Any) -> Tensor:
    return x if factor == 1 else x * factor
