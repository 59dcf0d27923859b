"""Resolve: which entries of a table hold for a model, and why the others do not.

A pure function of the table, the model's structure and the candidates known here, so that every
rank of a distributed job resolves alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torch import nn

from loka_toolkit.artifacts.dispatch_table import ANY_CALL, DispatchTable, Entry, MissReason
from loka_toolkit.artifacts.sites import Role
from loka_toolkit.dispatch.entries import (
    ResolvedEntry,
    SiteStatus,
    hit_of,
    miss,
    same_choice,
    with_kernel,
)
from loka_toolkit.dispatch.places import Places
from loka_toolkit.dispatch.plans import LINEAR_ROLES
from loka_toolkit.dispatch.product_sites import (
    SiteGroup,
    group_sites,
    layer_groups,
    product_mismatch,
    why_not_routable,
)
from loka_toolkit.dispatch.replaceable import is_linear, why_not_replaceable
from loka_toolkit.errors import near_misses
from loka_toolkit.kernels.contract import Candidate, Chip


@dataclasses.dataclass(frozen=True)
class Resolution:
    """A table against a model.

    Attributes:
        sites: Every entry, every miss, and every nn.Linear of which the table knows nothing.
        routes: The nn.Linear layers to route, each with its resolved entries by role.
        products: Other products: those to route, and those that the table knows and leaves alone.
        mismatches: Lines that say which entries are not of this model.
        paths: First path of every module, by the module's identity.
    """

    sites: tuple[SiteStatus, ...]
    routes: tuple[tuple[nn.Module, Mapping[Role, ResolvedEntry]], ...]
    products: tuple[SiteGroup, ...]
    mismatches: tuple[str, ...]
    paths: Mapping[int, str]


def resolve(
    table: DispatchTable, model: nn.Module, candidates: Mapping[str, Candidate], chip: Chip
) -> Resolution:
    """Resolve a table against a model; nothing is changed and nothing is run.

    Args:
        table: The table.
        model: The model.
        candidates: Kernels known here, by name.
        chip: Where the model is.
    """
    places = Places.of(model)
    sites: list[SiteStatus] = []
    mismatches: list[str] = []
    layers: dict[tuple[int, Role], list[tuple[nn.Module, ResolvedEntry]]] = {}
    products: list[ResolvedEntry] = []
    unfollowed: dict[nn.Module, str | None] = {}
    for entry in table.entries:
        module = _module_of(entry, places)
        odd = module if isinstance(module, str) else _mismatch(entry, module, places)
        if isinstance(module, str) or odd is not None:
            mismatches.append(str(odd))
            continue
        is_layer = is_linear(module)
        if is_layer:
            why = _why_not_layer(entry, module)
        else:
            why = why_not_routable(entry, places, unfollowed)
        if why is not None:
            sites.append(miss(entry, MissReason.NOT_REPLACEABLE, why))
            continue
        resolved = with_kernel(entry, candidates, chip)
        if isinstance(resolved, SiteStatus):
            sites.append(resolved)
        elif is_layer:
            layers.setdefault((id(module), Role(entry.role)), []).append((module, resolved))
        else:
            products.append(resolved)
    routes: dict[int, tuple[nn.Module, dict[Role, ResolvedEntry]]] = {}
    for (identity, role), aliases in layers.items():
        module, first = aliases[0]
        if all(same_choice(first.entry, other.entry) for _, other in aliases):
            routes.setdefault(identity, (module, {}))[1][role] = first
            sites += [hit_of(resolved) for _, resolved in aliases]
        else:
            names = " and ".join(resolved.entry.fqn for _, resolved in aliases)
            detail = f"the module is {names}, and their entries differ"
            sites += [miss(r.entry, MissReason.CONFLICT, detail) for _, r in aliases]
    groups, statuses = group_sites(products, table, places)
    sites += statuses
    groups = (*groups, *layer_groups(routes.values(), places))
    sites += [SiteStatus(m.fqn, m.call, m.role, None, m.reason, m.detail) for m in table.misses]
    sites += _unknown_linears(table, places.modules)
    paths = {id(module): fqn for fqn, module in places.paths}
    return Resolution(tuple(sites), tuple(routes.values()), groups, tuple(mismatches), paths)


def _module_of(entry: Entry, places: Places) -> nn.Module | str:
    roles = [role.value for role in Role]
    if entry.role not in roles:
        return f"{entry.fqn}: unknown role {entry.role!r}; {near_misses(entry.role, roles)}"
    found = places.modules.get(entry.fqn, ())
    if not found:
        return f"{entry.fqn} is not in the model; {near_misses(entry.fqn, places.modules)}"
    module = places.innermost(entry.fqn)
    if module is None:
        return f"{entry.fqn} names {len(found)} modules once wrapper prefixes are removed"
    return module


def _mismatch(entry: Entry, module: nn.Module, places: Places) -> str | None:
    """Return why an entry's parameter or dimensions are not those of the model, or None."""
    if not is_linear(module):
        return product_mismatch(entry, places)
    if not isinstance(module, nn.Linear):
        return None
    width, height = module.in_features, module.out_features
    table_says = {
        Role.FWD: (entry.k, entry.n),
        Role.DGRAD: (entry.n, entry.k),
        Role.WGRAD: (entry.n, entry.m),
    }.get(Role(entry.role), (width, height))
    if table_says == (width, height):
        return None
    return (
        f"{entry.fqn}:{entry.role}: expected Linear({table_says[0]}, {table_says[1]}), "
        f"actual Linear({width}, {height})"
    )


def _why_not_layer(entry: Entry, module: nn.Module) -> str | None:
    """Return None if an entry can be routed by the class of its nn.Linear, else why not."""
    why = why_not_replaceable(module)
    if why is not None:
        return why
    if entry.role not in LINEAR_ROLES or entry.batch != 1:
        return f"{entry.role} with a batch of {entry.batch} is no product of nn.Linear"
    if entry.call != ANY_CALL:
        return "the calls of an nn.Linear are routed together, and the entry is for one"
    return None


def _unknown_linears(
    table: DispatchTable, modules: Mapping[str, tuple[nn.Module, ...]]
) -> list[SiteStatus]:
    known = {entry.fqn for entry in table.entries} | {miss.fqn for miss in table.misses}
    covered = {id(module) for fqn in known for module in modules.get(fqn, ())}
    return [
        SiteStatus(
            fqn,
            ANY_CALL,
            Role.FWD.value,
            None,
            MissReason.INSUFFICIENT,
            "the table does not know this layer: it was never recorded",
        )
        for fqn, found in modules.items()
        if fqn not in known
        and any(isinstance(m, nn.Linear) and id(m) not in covered for m in found)
    ]
