"""What runs in the step: a linear layer whose three products are routed one by one.

The products are ``torch.library`` ops with fake kernels, so that ``torch.compile`` keeps them as
they are; the output dtype is an argument and autocast is off inside. An op adds one to its counter
when its kernel runs: the counter is an observation, not a part of the op's value, so it is not
declared as mutated. A product that the compiler drops is not counted, and should not be.
"""

from __future__ import annotations

import copy
import copyreg
import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from loka_toolkit.dispatch.counters import Bank, Outcome, bank
from loka_toolkit.dispatch.decompose import cast_as_autocast
from loka_toolkit.dispatch.frames import is_catching, run_in_frame
from loka_toolkit.kernels.contract import Side


@torch.library.custom_op("loka::gemm", mutates_args=())
def gemm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    out_dtype: torch.dtype,
    bank_id: int,
    slot: int,
) -> Tensor:
    """Multiply with the candidate of a slot, and count a hit.

    Args:
        a: [M, K] or [batch, M, K], any strides.
        b: [K, N] or [batch, K, N], any strides.
        scale_a: Static decode scale of A, float32 scalar, or None to compute it.
        scale_b: The same for B.
        out_dtype: Dtype of the product.
        bank_id: The installation.
        slot: The entry in it.

    Returns:
        [M, N] or [batch, M, N], contiguous.
    """
    owner = bank(bank_id)
    candidate = owner.slots[slot].candidate
    with torch.autocast(a.device.type, enabled=False):
        product = candidate.run(
            candidate.prepare(a, Side.A, scale_a), candidate.prepare(b, Side.B, scale_b), out_dtype
        )
    owner.count(a.device, slot, int(Outcome.HIT))
    return product.contiguous()


@gemm.register_fake
def _(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    out_dtype: torch.dtype,
    bank_id: int,
    slot: int,
) -> Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[-1]), dtype=out_dtype)


@torch.library.custom_op("loka::missed_linear", mutates_args=())
def missed_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, bank_id: int, slot: int, outcome: int
) -> Tensor:
    """Compute the layer's forward in its own precision, and count a miss.

    Args:
        x: [..., I].
        weight: [O, I].
        bias: [O] or None.
        bank_id: The installation.
        slot: The entry in it.
        outcome: Why it is a miss.

    Returns:
        [..., O].
    """
    with torch.autocast(x.device.type, enabled=False):
        product = F.linear(x, weight, bias)
    bank(bank_id).count(x.device, slot, outcome)
    return product.contiguous()


@missed_linear.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, bank_id: int, slot: int, outcome: int
) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@torch.library.custom_op("loka::missed_mm", mutates_args=())
def missed_mm(a: Tensor, b: Tensor, bank_id: int, slot: int, outcome: int) -> Tensor:
    """Multiply [M, K] and [K, N] in their own precision, and count a miss."""
    with torch.autocast(a.device.type, enabled=False):
        product = torch.mm(a, b)
    bank(bank_id).count(a.device, slot, outcome)
    return product


@missed_mm.register_fake
def _(a: Tensor, b: Tensor, bank_id: int, slot: int, outcome: int) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[1]))


@torch.library.custom_op("loka::count_misses", mutates_args=("counts",))
def count_misses(counts: Tensor, slots: list[int], outcome: int) -> None:
    """Count one miss in each of several rows of the counters.

    Args:
        counts: int64 [rows, outcomes].
        slots: The rows.
        outcome: Why they are misses.
    """
    for slot in slots:
        counts[slot, outcome].add_(1)


@count_misses.register_fake
def _(counts: Tensor, slots: list[int], outcome: int) -> None:
    return None


@dataclasses.dataclass(frozen=True)
class RoleRoute:
    """When the candidate of one role runs.

    Attributes:
        slot: Its entry in the bank.
        tokens_min: Least token count.
        tokens_max: Largest.
        granularity: The token count must be a multiple of it.
        dtype: Dtype of the operands.
        device_type: Where the operands must be.
    """

    slot: int
    tokens_min: int
    tokens_max: int
    granularity: int
    dtype: torch.dtype
    device_type: str

    def outcome(self, tokens: int, dtype: torch.dtype, device_type: str) -> Outcome:
        """Return whether the candidate takes a product, and why not.

        A dtype other than the entry's counts as ``LAYOUT``.
        """
        if device_type != self.device_type:
            return Outcome.ENV
        if dtype != self.dtype:
            return Outcome.LAYOUT
        if tokens < self.tokens_min or tokens > self.tokens_max or tokens % self.granularity:
            return Outcome.SHAPE
        return Outcome.HIT


@dataclasses.dataclass(frozen=True)
class Route:
    """How the products of one module are computed; None leaves one in its own precision.

    Attributes:
        bank: Counters and scales.
        fwd: The forward product.
        dgrad: The gradient of the input.
        wgrad: The gradient of the weight.
    """

    bank: Bank
    fwd: RoleRoute | None
    dgrad: RoleRoute | None
    wgrad: RoleRoute | None


ROUTE_ATTRIBUTE = "loka_route"


class RoutedLinear(nn.Linear):
    """An ``nn.Linear`` with a route: the class that ``install`` gives to a module.

    Parameters, buffers, hooks and everything else stay on the module. A copy is routed like the
    original; a pickle holds the plain ``nn.Linear``, since routes belong to a process.
    """

    loka_route: Route

    def forward(self, input: Tensor) -> Tensor:
        """Return x w^T + b, [..., O], each product as its route says; x is [..., I]."""
        if not torch.compiler.is_compiling() and is_catching():
            # Its products are routed here, and not by the mode of a module around it.
            output: Tensor = run_in_frame(self, None, None, self._routed, (input,), {})
            return output
        return self._routed(input)

    def _routed(self, x: Tensor) -> Tensor:
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        device = x.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            x, weight = cast_as_autocast(x, dtype), cast_as_autocast(weight, dtype)
            bias = None if bias is None else cast_as_autocast(bias, dtype)
        odd_bias = bias is not None and bias.dtype != weight.dtype
        if x.dtype != weight.dtype or x.shape[-1:] != weight.shape[1:] or odd_bias:
            return F.linear(x, weight, bias)  # raises what nn.Linear raises
        output: Tensor = _RoutedProducts.apply(  # type: ignore[no-untyped-call]
            x, weight, bias, self.loka_route
        )
        return output

    def extra_repr(self) -> str:
        """Return the layer's sizes and the roles that are routed."""
        routed = [role for role in ("fwd", "dgrad", "wgrad") if getattr(self.loka_route, role)]
        return f"{super().extra_repr()}, routed={'+'.join(routed)}"

    def __deepcopy__(self, memo: dict[int, Any]) -> RoutedLinear:
        """Return a copy that is routed like this module and counts into the same installation."""
        copied = nn.Linear.__new__(RoutedLinear)
        memo[id(self)] = copied
        copied.__dict__.update(
            {
                name: value if name == ROUTE_ATTRIBUTE else copy.deepcopy(value, memo)
                for name, value in self.__dict__.items()
            }
        )
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the plain module."""
        state = {k: v for k, v in self.__dict__.items() if k != ROUTE_ATTRIBUTE}
        return copyreg._reconstructor, (nn.Linear, object, None), state  # type: ignore[attr-defined]


class _RoutedProducts(torch.autograd.Function):
    """y = x w^T + b and its gradients, each product through its route."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, route: Route) -> Tensor:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        ctx.route, ctx.x_shape, ctx.x_stride = route, x.shape, x.stride()
        if route.fwd is None:
            return F.linear(x, weight, bias)
        tokens = _tokens(x)
        outcome = route.fwd.outcome(tokens, x.dtype, x.device.type)
        if outcome is not Outcome.HIT:
            slot = route.fwd.slot
            missed: Tensor = missed_linear(x, weight, bias, route.bank.id, slot, int(outcome))
            return missed
        y = hit(x.reshape(tokens, x.shape[-1]), weight.t(), route.bank, route.fwd)
        if bias is not None:
            y = y + bias
        # Not a view: an activation that works in place may follow, as after nn.Linear.
        unflattened: Tensor = torch.ops.aten._unsafe_view(y, [*x.shape[:-1], weight.shape[0]])
        return unflattened

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        route: Route = ctx.route
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        tokens = _tokens(grad)
        g = grad.reshape(tokens, grad.shape[-1])
        grad_x = grad_weight = grad_bias = None
        if needs_x:
            column_major = len(ctx.x_stride) == 2 and ctx.x_stride == (1, ctx.x_shape[0])
            grad_x = _product(g, weight, route, route.dgrad, tokens, transposed=column_major)
            grad_x = grad_x.view(ctx.x_shape)
        if needs_weight:
            rows = x.reshape(tokens, x.shape[-1])
            grad_weight = _product(g.t(), rows, route, route.wgrad, tokens)
        if needs_bias:
            grad_bias = g.sum(0)
        return grad_x, grad_weight, grad_bias, None


def _product(
    a: Tensor,
    b: Tensor,
    route: Route,
    role: RoleRoute | None,
    tokens: int,
    *,
    transposed: bool = False,
) -> Tensor:
    """Return a b through a route.

    In the default precision it is computed as (b^T a^T)^T where ``transposed``, as autograd does
    for the gradient of a column-major input: the two orders may round differently.
    """
    outcome = None if role is None else role.outcome(tokens, a.dtype, a.device.type)
    if role is not None and outcome is Outcome.HIT:
        return hit(a, b, route.bank, role)
    left, right = (b.t(), a.t()) if transposed else (a, b)
    if role is None:
        product = torch.mm(left, right)
    else:
        product = missed_mm(left, right, route.bank.id, role.slot, int(outcome or 0))
    return product.t() if transposed else product


def hit(a: Tensor, b: Tensor, owner: Bank, role: RoleRoute) -> Tensor:
    """Return a b by the candidate of a role.

    Args:
        a: [M, K] or [batch, M, K].
        b: [K, N] or [batch, K, N].
        owner: The installation's counters and scales.
        role: The role.
    """
    state = owner.on(a.device)
    scale_a, scale_b = state.scale_a[role.slot], state.scale_b[role.slot]
    gradient = owner.slots[role.slot].gradient
    if scale_a is not None and gradient is Side.A:
        scale_a = scale_a * state.loss_scale
    if scale_b is not None and gradient is Side.B:
        scale_b = scale_b * state.loss_scale
    product: Tensor = gemm(a, b, scale_a, scale_b, a.dtype, owner.id, role.slot)
    return product


def _tokens(x: Tensor) -> int:
    tokens = 1
    for size in x.shape[:-1]:
        tokens *= size
    return tokens
