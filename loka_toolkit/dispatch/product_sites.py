"""Entries of products that are not those of an ``nn.Linear``, against a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from loka_toolkit.artifacts.dispatch_table import DispatchTable, Entry, MissReason
from loka_toolkit.artifacts.sites import Role
from loka_toolkit.dispatch.entries import ResolvedEntry, SiteStatus, hit_of, miss, same_choice
from loka_toolkit.dispatch.places import Place, Places, has_products, never_runs
from loka_toolkit.dispatch.signatures import BATCH_AXIS, Signature, signature_of
from loka_toolkit.dispatch.wrapping import why_not_wrappable
from loka_toolkit.errors import near_misses


@dataclasses.dataclass(frozen=True)
class SiteGroup:
    """The entries, or the misses, of the products of one signature in one module.

    Attributes:
        place: The parameter multiplied, or None.
        signature: What the products are known by.
        runners: The modules that may be running while they are computed.
        roles: The entry that stands for all calls of a role; empty where the table leaves the
            products alone.
        calls: The calls that each role's entry stands for.
        layer: The nn.Linear whose own products are routed by its class: these are those that the
            modules around it do with its weight. They are caught where such a module is caught for
            the sake of others.
    """

    place: Place | None
    signature: Signature
    runners: tuple[nn.Module, ...]
    roles: Mapping[Role, ResolvedEntry]
    calls: Mapping[Role, tuple[int | str, ...]]
    layer: nn.Module | None = None


def product_mismatch(entry: Entry, places: Places) -> str | None:
    """Return why an entry is not of this model, or None."""
    if entry.weight is None:
        return None
    place = places.parameters.get(entry.weight)
    if place is None:
        near = near_misses(entry.weight, places.parameters)
        return f"{entry.fqn}: parameter {entry.weight} is not in the model; {near}"
    signature = signature_of(entry)
    if signature is None:
        return None
    outputs, inputs, _ = signature.sizes
    if place.parameter.numel() % (outputs * inputs) == 0:
        return None
    return (
        f"{entry.fqn}#{entry.call}:{entry.role}: expected {entry.weight} to hold matrices of "
        f"{outputs}x{inputs}, actual shape {tuple(place.parameter.shape)}"
    )


def why_not_routable(
    entry: Entry, places: Places, unfollowed: dict[nn.Module, str | None]
) -> str | None:
    """Return None if the product of an entry can be caught, else one clause that says why not.

    Args:
        entry: The entry.
        places: The parts of the model.
        unfollowed: What was found of each module already; filled here.
    """
    if entry.weight is None and entry.token_axis != BATCH_AXIS:
        return "the entry does not name the parameter it multiplies; build the table again"
    signature = signature_of(entry)
    if signature is None:
        return f"{entry.role} with a batch of {entry.batch} is no product that can be caught"
    module = places.innermost(entry.fqn)
    if module is None:
        return "its path is ambiguous"
    if not never_runs(module) and (why := why_not_wrappable(module)) is not None:
        return why
    runners = _runners(entry.fqn, signature, places)
    if not runners:
        return "no module runs it"
    for runner in runners:
        if runner not in unfollowed:
            unfollowed[runner] = _why_not_followed(runner)
    return next((why for r in runners if (why := unfollowed[r]) is not None), None)


def _why_not_followed(runner: nn.Module) -> str | None:
    """Return why the products of what is inside of a module cannot be told from its own."""
    for name, inner in runner.named_modules():
        if has_products(inner) and not _is_followed(inner):
            why = why_not_wrappable(inner)
            return f"what {name or 'it'} multiplies could not be told from its own: {why}"
    return None


def group_sites(
    resolved: Iterable[ResolvedEntry], table: DispatchTable, places: Places
) -> tuple[tuple[SiteGroup, ...], tuple[SiteStatus, ...]]:
    """Join the entries whose products cannot be told apart, and say what becomes of each.

    Entries of one signature in one module must agree, since they run the same code; where they
    do not, all of them are misses.
    """
    found: dict[tuple[int, Signature], dict[Role, list[ResolvedEntry]]] = {}
    at: dict[tuple[int, Signature], tuple[str, Signature]] = {}
    for one in resolved:
        signature = signature_of(one.entry)
        module = places.innermost(one.entry.fqn)
        if signature is None or module is None:
            continue
        place = None if signature.weight is None else places.parameters[signature.weight]
        same = Signature(None if place is None else str(id(place.parameter)), signature.sizes)
        key = (id(module), same)
        at.setdefault(key, (one.entry.fqn, signature))
        found.setdefault(key, {}).setdefault(Role(one.entry.role), []).append(one)
    groups: list[SiteGroup] = []
    statuses: list[SiteStatus] = []
    for key, by_role in found.items():
        fqn, signature = at[key]
        roles: dict[Role, ResolvedEntry] = {}
        for role, mine in by_role.items():
            if all(same_choice(mine[0].entry, other.entry) for other in mine):
                roles[role] = mine[0]
                statuses += [hit_of(other, eager_only=True) for other in mine]
            else:
                detail = (
                    f"its calls with {signature} cannot be told apart, and their entries differ"
                )
                statuses += [miss(other.entry, MissReason.CONFLICT, detail) for other in mine]
        groups.append(
            SiteGroup(
                place=None if signature.weight is None else places.parameters[signature.weight],
                signature=signature,
                runners=_runners(fqn, signature, places),
                roles=roles,
                calls={r: _in_order(o.entry.call for o in by_role[r]) for r in roles},
            )
        )
    return (*groups, *_known_misses(table, places)), tuple(statuses)


def _in_order(calls: Iterable[int | str]) -> tuple[int | str, ...]:
    return tuple(sorted(calls, key=lambda call: (isinstance(call, str), call)))


def layer_groups(
    routes: Iterable[tuple[nn.Module, Mapping[Role, ResolvedEntry]]], places: Places
) -> tuple[SiteGroup, ...]:
    """Return the products that modules around an nn.Linear may do with its weight."""
    groups = []
    for layer, roles in routes:
        entry = next(iter(roles.values())).entry
        signature = None if entry.weight is None else signature_of(entry)
        place = None if entry.weight is None else places.parameters.get(entry.weight)
        if signature is None or place is None:
            continue
        runners = tuple(m for m in _runners(entry.fqn, signature, places) if m is not layer)
        groups.append(SiteGroup(place, signature, runners, roles, {}, layer))
    return tuple(groups)


def _known_misses(table: DispatchTable, places: Places) -> tuple[SiteGroup, ...]:
    """Return the products that the table knows and leaves alone."""
    groups = []
    for one in table.misses:
        signature = signature_of(one)
        if signature is None:
            continue
        place = None if signature.weight is None else places.parameters.get(signature.weight)
        if place is None and signature.weight is not None:
            continue
        groups.append(SiteGroup(place, signature, _runners(one.fqn, signature, places), {}, {}))
    return tuple(groups)


def _runners(fqn: str, signature: Signature, places: Places) -> tuple[nn.Module, ...]:
    place = None if signature.weight is None else places.parameters.get(signature.weight)
    return tuple(m for m in places.runners(fqn, place) if why_not_wrappable(m) is None)


def _is_followed(module: nn.Module) -> bool:
    """Return whether the runtime knows when a module runs, or need not know."""
    is_scripted = isinstance(module, torch.jit.ScriptModule)  # its products are not caught
    return is_scripted or never_runs(module) or why_not_wrappable(module) is None
