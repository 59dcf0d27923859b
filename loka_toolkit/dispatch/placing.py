"""Placing routes: which module gets which, and which row of the counters is whose."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from torch import nn

from loka_toolkit.artifacts.sites import Role
from loka_toolkit.dispatch.catching import ModuleRoute, Sizes, WeightRoutes
from loka_toolkit.dispatch.counters import Bank
from loka_toolkit.dispatch.entries import ResolvedEntry
from loka_toolkit.dispatch.options import torch_dtype
from loka_toolkit.dispatch.places import Place, has_products, never_runs
from loka_toolkit.dispatch.product_sites import SiteGroup
from loka_toolkit.dispatch.products import ProductRoute
from loka_toolkit.dispatch.resolve import Resolution
from loka_toolkit.dispatch.runtime import RoleRoute, Route, RoutedLinear
from loka_toolkit.dispatch.wrapping import give_route, routed_class, why_not_wrappable


@dataclasses.dataclass(frozen=True)
class CounterRow:
    """What a row of the counters counts.

    Attributes:
        fqn: Module path.
        role: Role.
        calls: Calls of the module that it stands for; empty for products that are not known.
    """

    fqn: str
    role: str
    calls: tuple[int | str, ...]


@dataclasses.dataclass(frozen=True)
class CaughtModule:
    """A module whose products are to be caught.

    Attributes:
        module: The module.
        fqn: Its path.
        groups: The products that may be computed while it runs.
    """

    module: nn.Module
    fqn: str
    groups: tuple[SiteGroup, ...]


@dataclasses.dataclass(frozen=True)
class RoutePlan:
    """What gets routed, and the rows of the counters.

    Attributes:
        entries: The entry of every slot.
        rows: What every row counts: a row per slot, then one per caught module.
        layers: The nn.Linear layers with the slot of each role.
        groups: The slots of every group of products with an entry, by role.
        modules: The modules whose products are caught.
    """

    entries: tuple[ResolvedEntry, ...]
    rows: tuple[CounterRow, ...]
    layers: tuple[tuple[nn.Module, dict[Role, int]], ...]
    groups: tuple[tuple[SiteGroup, dict[Role, int]], ...]
    modules: tuple[CaughtModule, ...]


def plan_routes(resolution: Resolution) -> RoutePlan:
    """Number the slots of a resolution and find the modules to be caught."""
    entries: list[ResolvedEntry] = []
    rows: list[CounterRow] = []

    def add(resolved: ResolvedEntry, calls: tuple[int | str, ...]) -> int:
        entries.append(resolved)
        rows.append(CounterRow(resolved.entry.fqn, resolved.entry.role, calls))
        return len(entries) - 1

    layers = []
    for module, by_role in resolution.routes:
        layers.append((module, {r: add(e, (e.entry.call,)) for r, e in by_role.items()}))
    of_layer = {id(module): slots for module, slots in layers}
    routed = [group for group in resolution.products if group.roles and group.layer is None]
    groups = []
    for group in routed:
        slots = {role: add(entry, group.calls[role]) for role, entry in group.roles.items()}
        groups.append((group, slots))
    for group in resolution.products:
        if group.layer is not None:
            groups.append((group, of_layer[id(group.layer)]))
    modules = _caught_modules(routed, resolution)
    rows += [CounterRow(caught.fqn, Role.FWD.value, ()) for caught in modules]
    return RoutePlan(tuple(entries), tuple(rows), tuple(layers), tuple(groups), tuple(modules))


def place_routes(plan: RoutePlan, bank: Bank, device_type: str) -> None:
    """Give every module its class and its route.

    Args:
        plan: What gets routed.
        bank: Counters and scales.
        device_type: Where the operands must be.
    """
    role_routes = [
        _role_route(entry, number, device_type) for number, entry in enumerate(plan.entries)
    ]
    for module, slots in plan.layers:
        roles = {role: role_routes[slot] for role, slot in slots.items()}
        route = Route(bank, roles.get(Role.FWD), roles.get(Role.DGRAD), roles.get(Role.WGRAD))
        give_route(module, RoutedLinear, route)
    made = {
        id(group): ProductRoute(bank, {r: role_routes[s] for r, s in slots.items()})
        for group, slots in plan.groups
    }
    slots_of = {id(group): tuple(slots.values()) for group, slots in plan.groups}
    classes: dict[type[nn.Module], type[nn.Module]] = {}
    caught = {id(found.module) for found in plan.modules}
    for number, found in enumerate(plan.modules):
        mine = tuple(s for group in found.groups for s in slots_of.get(id(group), ()))
        own = tuple(s for g in found.groups if _is_own(g, found) for s in slots_of.get(id(g), ()))
        weights, activations = _routes_of(found, made)
        unmatched = len(plan.entries) + number
        caught_by = ModuleRoute(bank, unmatched, mine, own, weights, activations)
        _give(found.module, caught_by, classes)
    followed = ModuleRoute(bank, 0, (), (), (), {})
    for module in _followed(plan.modules):
        if id(module) not in caught and not isinstance(module, RoutedLinear):
            _give(module, followed, classes)


def _caught_modules(routed: Iterable[SiteGroup], resolution: Resolution) -> list[CaughtModule]:
    modules = {id(m): m for group in routed for m in group.runners}
    return [
        CaughtModule(
            module,
            resolution.paths[identity],
            tuple(g for g in resolution.products if any(module is m for m in g.runners)),
        )
        for identity, module in modules.items()
    ]


def _is_own(group: SiteGroup, caught: CaughtModule) -> bool:
    """Return whether a module is the innermost that may compute a group's products."""
    return group.layer is None and group.runners[-1] is caught.module


def _routes_of(
    found: CaughtModule, made: dict[int, ProductRoute]
) -> tuple[tuple[WeightRoutes, ...], dict[Sizes, ProductRoute | None]]:
    """Return what a module's products are routed by, with and without a parameter.

    A product with an entry is not one that is left alone, whatever the table says of others.
    """
    weights: dict[int, tuple[Place, dict[Sizes, ProductRoute | None]]] = {}
    activations: dict[Sizes, ProductRoute | None] = {}
    for group in sorted(found.groups, key=lambda group: not group.roles):
        products = activations
        if group.place is not None:
            products = weights.setdefault(id(group.place.parameter), (group.place, {}))[1]
        products.setdefault(group.signature.sizes, made.get(id(group)))
    by_weight = [WeightRoutes(p.owner, p.attribute, products) for p, products in weights.values()]
    return tuple(by_weight), activations


def _followed(modules: Iterable[CaughtModule]) -> Iterable[nn.Module]:
    """Yield what is inside of caught modules and may multiply: its products are not theirs."""
    seen: set[int] = set()
    for caught in modules:
        for inner in caught.module.modules():
            if id(inner) not in seen and has_products(inner) and not never_runs(inner):
                seen.add(id(inner))
                if why_not_wrappable(inner) is None:
                    yield inner


def _give(
    module: nn.Module, route: ModuleRoute, classes: dict[type[nn.Module], type[nn.Module]]
) -> None:
    plain = type(module)
    if plain not in classes:
        classes[plain] = routed_class(plain)
    give_route(module, classes[plain], route)


def _role_route(resolved: ResolvedEntry, slot: int, device_type: str) -> RoleRoute:
    entry = resolved.entry
    return RoleRoute(
        slot=slot,
        tokens_min=entry.tokens_min,
        tokens_max=entry.tokens_max,
        granularity=resolved.granularity,
        dtype=torch_dtype(entry.dtype),
        device_type=device_type,
    )
