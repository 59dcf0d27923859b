"""Catches the products that a module writes in Python, and routes those that have an entry.

A product is known by its signature, and never by its number within the forward: the parameter that
it multiplies (or that it multiplies none) and the dimensions that do not depend on the batch. So a
branch not taken, a loop, a forward that is recomputed or one that stops early cannot move an entry
from one product to another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from loka_toolkit.dispatch.counters import Bank, Outcome
from loka_toolkit.dispatch.decompose import (
    Call,
    Product,
    Program,
    cast_as_autocast,
    program_of,
    take_apart,
)
from loka_toolkit.dispatch.frames import STATE, is_checkpointed_part
from loka_toolkit.dispatch.products import ProductRoute, route_product

PRODUCT_FUNCTIONS: frozenset[Any] = frozenset(
    {
        torch.matmul,
        torch.mm,
        torch.bmm,
        torch.addmm,
        torch.baddbmm,
        torch.inner,
        torch.einsum,
        torch.tensordot,
        torch.chain_matmul,
        torch.linalg.matmul,
        torch.linalg.multi_dot,
        torch.Tensor.matmul,
        torch.Tensor.__matmul__,
        torch.Tensor.mm,
        torch.Tensor.bmm,
        torch.Tensor.addmm,
        torch.Tensor.baddbmm,
        torch.Tensor.inner,
        torch.mv,
        torch.addmv,
        torch.dot,
        torch.Tensor.mv,
        torch.Tensor.addmv,
        torch.Tensor.dot,
        torch.Tensor.addmm_,
        torch.Tensor.baddbmm_,
        torch.Tensor.addmv_,
        F.linear,
    }
)
"""What is caught, in-place products only to be counted. Not seen, as they are never replaced:
bilinear forms, convolutions, and attention and RNN composites."""

_PLAIN_TENSORS = (torch.Tensor, nn.Parameter)
_COPY_NODES = frozenset(
    f"{name}Backward0"
    for name in (
        "T Transpose Permute Expand View UnsafeView ReshapeAlias Unsqueeze Squeeze Select Slice "
        "Clone ToCopy Alias"
    ).split()
) | {"SqueezeBackward1"}
_LONGEST_TRAIL = 8

Sizes = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class WeightRoutes:
    """The products with one parameter.

    Attributes:
        owner: The module that registers the parameter.
        attribute: Its name there.
        products: Route by (O, I, batch); None for a product that the table leaves alone.
    """

    owner: nn.Module
    attribute: str
    products: Mapping[Sizes, ProductRoute | None]


@dataclasses.dataclass(frozen=True, eq=False)
class ModuleRoute:
    """What is caught while a module is the innermost one running.

    Attributes:
        bank: Counters and scales.
        unmatched: Row of the counters for products of which the table does not know.
        slots: Rows of the counters of every entry here.
        own_slots: Those of entries that are counted here where the module runs compiled.
        weights: Products with a parameter.
        activations: Route by (M, N, K) of products of two activations; None likewise.
    """

    bank: Bank
    unmatched: int
    slots: tuple[int, ...]
    own_slots: tuple[int, ...]
    weights: tuple[WeightRoutes, ...]
    activations: Mapping[Sizes, ProductRoute | None]


class ProductMode(TorchFunctionMode):
    """Sees every function of torch that the module calls from Python."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the function, its products through their routes."""
        kwargs = kwargs or {}
        route = STATE.route
        module = STATE.module
        if route is not None and module is not None and not torch.compiler.is_compiling():
            if func in PRODUCT_FUNCTIONS:
                return _caught(route, module, func, args, kwargs)
            if func is F.multi_head_attention_forward:
                with self:
                    return _UNCHECKED_ATTENTION(*args, **kwargs)
        return func(*args, **kwargs)


def _unchecked(function: FunctionType) -> FunctionType:
    """Return a function of torch.nn.functional that runs its body where a function mode is on.

    Such a function hands itself to the mode as a whole, and what it calls would not be seen.
    """
    names = {**function.__globals__, "has_torch_function": lambda _: False}
    copied = FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


_UNCHECKED_ATTENTION = _unchecked(F.multi_head_attention_forward)  # type: ignore[arg-type]


def _caught(
    route: ModuleRoute, module: nn.Module, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    call, program, cast_to = _understood(func, args, kwargs)
    if call is None or program is None:
        _count_unmatched(route, args, Outcome.LAYOUT)
        return func(*args, **kwargs)
    routed: dict[int, Callable[..., Tensor]] = {}
    for product in program.products:
        found, side = _route_of(route, module, product, call.tensors)
        if found is not None:
            routed[product.step] = _computing(found, side)
    if program.has_others:
        _count_unmatched(route, args, Outcome.LAYOUT)
    if not routed:
        return func(*args, **kwargs)
    if cast_to is None:
        return program.run(call.tensors, routed)
    device = call.tensors[0].device.type
    tensors = [cast_as_autocast(tensor, cast_to) for tensor in call.tensors]
    with torch.autocast(device, enabled=False):
        return program.run(tensors, routed)


def _understood(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Call | None, Program | None, torch.dtype | None]:
    """Return a call's tensors, what it does, and the dtype to which autocast casts them."""
    if kwargs.get("out") is not None or torch._C._functorch.peek_interpreter_stack() is not None:
        return None, None, None
    if is_checkpointed_part():
        return None, None, None
    call = take_apart(func, args, kwargs)
    if call is None or not call.tensors or not all(map(_is_ordinary, call.tensors)):
        return None, None, None
    device = call.tensors[0].device.type
    cast_to = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    program = program_of(call, func, args, kwargs, cast_to)
    if program is not None and cast_to is not None and not program.is_plain:
        program = None
    return call, program, cast_to


def _is_ordinary(tensor: Tensor) -> bool:
    return type(tensor) in _PLAIN_TENSORS and tensor.layout is torch.strided


def _computing(route: ProductRoute, side: str | None) -> Callable[..., Tensor]:
    def compute(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        return route_product(op, args, kwargs, route, side)

    return compute


def _route_of(
    route: ModuleRoute, module: nn.Module, product: Product, tensors: tuple[Tensor, ...]
) -> tuple[ProductRoute | None, str | None]:
    """Return the route of a product and the side of its parameter; count it if it is not known."""
    sides = [("b", product.source_b), ("a", product.source_a)]
    shown = [(side, tensors[source]) for side, source in sides if source is not None]
    is_parameter = False
    for side, tensor in shown:
        parameter = _parameter_shown(tensor, route, module)
        if parameter is None:
            continue
        is_parameter = True
        for weight in route.weights:
            if weight.owner._parameters.get(weight.attribute) is parameter:
                outputs = product.m if side == "a" else product.n
                sizes = (outputs, product.k, product.batch)
                if sizes in weight.products:
                    return weight.products[sizes], side
                _count_unmatched(route, tensors, Outcome.SHAPE)
                return None, None
    sizes = (product.m, product.n, product.k)
    if sizes in route.activations and not is_parameter:
        return route.activations[sizes], None
    _count_unmatched(route, tensors, Outcome.SHAPE)
    return None, None


def _parameter_shown(tensor: Tensor, route: ModuleRoute, module: nn.Module) -> Tensor | None:
    """Return the parameter whose elements a tensor shows, in memory or in a copy, or None."""
    if isinstance(tensor, nn.Parameter):
        return tensor
    if isinstance(tensor._base, nn.Parameter):
        return tensor._base
    if tensor.grad_fn is not None:
        leaf = _copied_from(tensor)
        return leaf if isinstance(leaf, nn.Parameter) else None
    storage = tensor.untyped_storage()._cdata  # no trail: a leaf, detached, or without gradients
    routed = (weight.owner._parameters.get(weight.attribute) for weight in route.weights)
    for parameter in (*routed, *module._parameters.values()):
        if parameter is not None and parameter.untyped_storage()._cdata == storage:
            return parameter
    return None


def _copied_from(tensor: Tensor) -> Tensor | None:
    """Return the leaf of which autograd says that a tensor is a view or a copy, or None."""
    node: Any = tensor.grad_fn
    for _ in range(_LONGEST_TRAIL):
        if node is None:
            return None
        if node.name() == "torch::autograd::AccumulateGrad":
            leaf: Tensor = node.variable
            return leaf
        if node.name() not in _COPY_NODES:
            return None
        node = node.next_functions[0][0]
    return None


def _count_unmatched(route: ModuleRoute, values: Any, outcome: Outcome) -> None:
    tensor = next((v for v in values if isinstance(v, Tensor)), None)
    if tensor is not None:
        route.bank.count(tensor.device, route.unmatched, int(outcome))
