"""The class that a module gets whose products are caught: a subclass of its own class.

As with ``RoutedLinear``, parameters, buffers, ``state_dict`` keys, hooks and tying stay on the
module; a copy is routed like the original, and a pickle holds the plain module.
"""

from __future__ import annotations

import copy
import copyreg
import dataclasses
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from loka_toolkit.dispatch.catching import ModuleRoute, ProductMode, WeightRoutes
from loka_toolkit.dispatch.counters import Bank, Outcome
from loka_toolkit.dispatch.frames import STATE, run_in_frame
from loka_toolkit.dispatch.runtime import ROUTE_ATTRIBUTE, RoutedLinear, count_misses


class RoutedModule(nn.Module):
    """A module with a route, or one inside such a module: mixed in before the module's own class.

    Calling it, or its ``forward``, makes it the innermost frame.
    """

    loka_route: ModuleRoute | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keep from the module's own class that there is a subclass: it may keep a registry."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, its products being caught."""
        if torch.compiler.is_compiling():
            return super().__call__(*args, **kwargs)
        return run_in_frame(self, self._caught(), ProductMode, super().__call__, args, kwargs)

    def _caught(self) -> ModuleRoute | None:
        """Return the route if there is something to catch in a call that is not compiled."""
        route = self.loka_route
        if route is None or not route.slots or self._compiled_call_impl is not None:
            return None
        return route

    def extra_repr(self) -> str:
        """Return what the module's own class says, and how many entries its products have."""
        mine = super().extra_repr()
        slots = () if self.loka_route is None else self.loka_route.slots
        if not slots:
            return mine
        return f"{mine}, routed={len(slots)} entries" if mine else f"routed={len(slots)} entries"

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Return a copy that is routed like this module and counts into the same installation."""
        route, cls = restore(self)
        try:
            copied: nn.Module = copy.deepcopy(self, memo)
        finally:
            give_route(self, cls, route)
        if type(copied) is plain_class(cls) and copied is not self:
            give_route(copied, cls, _copied_route(route, memo))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the plain module."""
        route, cls = restore(self)
        try:
            reduced = self.__reduce_ex__(protocol)
        finally:
            give_route(self, cls, route)
        if isinstance(reduced, str):
            return reduced
        make, args, *rest = map(_without_route, reduced)
        if make is copyreg.__newobj__ and len(args) == 1:  # type: ignore[attr-defined]
            # A pickler insists that this one makes an object of the class that it was given.
            make, args = copyreg._reconstructor, (*args, object, None)  # type: ignore[attr-defined]
        return make, args, *rest


Route = Any
"""A ``ModuleRoute``, or the ``Route`` of a ``RoutedLinear``: whichever the class wants."""


def routed_class(plain: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of a module's class that catches products; it bears the same name.

    Raises:
        TypeError: If the class or its metaclass forbids it.
    """
    names = {
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "forward": _framed(plain),
    }
    metaclass: Any = type(plain)
    made: type[nn.Module] = metaclass(plain.__name__, (RoutedModule, plain), names)
    return made


def _framed(plain: type[nn.Module]) -> Callable[..., Any]:
    """Return a class's forward in a frame of its own, if it was not called through the module.

    Compiled, it counts the products that it does not route.
    """

    @functools.wraps(plain.forward)
    def forward(self: RoutedModule, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            route = self.loka_route
            if route is not None and route.own_slots:
                counts = route.bank.anywhere().counts
                count_misses(counts, list(route.own_slots), int(Outcome.ENV))
        elif STATE.module is not self:
            run = plain.forward.__get__(self)
            return run_in_frame(self, self._caught(), ProductMode, run, args, kwargs)
        return plain.forward(self, *args, **kwargs)

    return forward


def plain_class(routed: type[nn.Module]) -> type[nn.Module]:
    """Return the class that a module had before it was routed."""
    if routed is RoutedLinear:
        return nn.Linear
    plain: type[nn.Module] = routed.__bases__[1]
    return plain


def why_not_wrappable(module: nn.Module) -> str | None:
    """Return None if a module can be given a subclass of its class, else one clause why not."""
    plain = type(module)
    if isinstance(module, torch.jit.ScriptModule):
        return f"the module is a {plain.__name__}, compiled by TorchScript"
    if isinstance(module, RoutedModule | RoutedLinear):
        return None
    if plain not in _WHY_NOT:
        _WHY_NOT[plain] = _why_no_subclass(plain)
    return _WHY_NOT[plain]


_WHY_NOT: weakref.WeakKeyDictionary[type[nn.Module], str | None] = weakref.WeakKeyDictionary()


def _why_no_subclass(plain: type[nn.Module]) -> str | None:
    try:
        probe = object.__new__(plain)
        probe.__class__ = routed_class(plain)
    except (TypeError, RuntimeError, ValueError) as error:
        return f"its class {plain.__name__} cannot be subclassed: {error}"
    return None


def give_route(module: nn.Module, cls: type[nn.Module], route: Route) -> None:
    """Give a module its routed class and its route."""
    module.__class__ = cls
    module.__dict__[ROUTE_ATTRIBUTE] = route


def restore(module: nn.Module) -> tuple[Route, type[nn.Module]]:
    """Take class and route from a module, and return them."""
    cls = type(module)
    route = module.__dict__.pop(ROUTE_ATTRIBUTE, None)
    module.__class__ = plain_class(cls)
    return route, cls


def routed_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that have a routed class."""
    return [m for m in model.modules() if isinstance(m, RoutedModule | RoutedLinear)]


def bank_of(module: nn.Module) -> Bank:
    """Return the counters of the installation that routed a module."""
    route: Route = module.__dict__[ROUTE_ATTRIBUTE]
    bank: Bank = route.bank
    return bank


def _copied_route(route: ModuleRoute, memo: dict[int, Any]) -> ModuleRoute:
    """Return a route whose parameters are those of the copied model."""
    weights = tuple(
        WeightRoutes(copy.deepcopy(weight.owner, memo), weight.attribute, weight.products)
        for weight in route.weights
    )
    return dataclasses.replace(route, weights=weights)


def _without_route(part: Any) -> Any:
    if isinstance(part, dict) and ROUTE_ATTRIBUTE in part:
        return {name: value for name, value in part.items() if name != ROUTE_ATTRIBUTE}
    if isinstance(part, tuple):
        return tuple(map(_without_route, part))
    return part
