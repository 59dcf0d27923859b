"""Resolve: which entries of a table hold for a model, and why the others do not.

A pure function of the table, the model's structure and the candidates known here, so that every
rank of a distributed job resolves alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import msgspec
from torch import nn

from loka_toolkit.artifacts.dispatch_table import ANY_CALL, DispatchTable, Entry, MissReason
from loka_toolkit.artifacts.sites import Role
from loka_toolkit.dispatch.options import torch_dtype
from loka_toolkit.dispatch.plans import LINEAR_ROLES
from loka_toolkit.dispatch.replaceable import modules_by_fqn, why_not_replaceable
from loka_toolkit.errors import near_misses
from loka_toolkit.kernels.contract import Candidate, Chip, Problem

GRANULARITIES = (1, 8, 16, 32, 64, 128)
"""Multiples of the token count that kernels ask for, where they do not pad it themselves."""


class SiteStatus(msgspec.Struct, frozen=True):
    """What becomes of a site.

    Attributes:
        fqn: Module path.
        call: Index of the product in the module, or ``*``.
        role: Its role.
        candidate: The kernel that runs it, or null.
        reason: Why it runs in its original precision, or null.
        detail: One sentence; for a site with a kernel, when it holds.
    """

    fqn: str
    call: int | str
    role: str
    candidate: str | None
    reason: MissReason | None
    detail: str


@dataclasses.dataclass(frozen=True)
class ResolvedEntry:
    """An entry that holds.

    Attributes:
        entry: The entry.
        candidate: Its kernel.
        granularity: The token count must be a multiple of it.
    """

    entry: Entry
    candidate: Candidate
    granularity: int


@dataclasses.dataclass(frozen=True)
class Resolution:
    """A table against a model.

    Attributes:
        sites: Every entry, every miss, and every nn.Linear of which the table knows nothing.
        routes: Modules to route, each with its resolved entries by role.
        mismatches: Lines that say which entries are not of this model.
    """

    sites: tuple[SiteStatus, ...]
    routes: tuple[tuple[nn.Module, Mapping[Role, ResolvedEntry]], ...]
    mismatches: tuple[str, ...]


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
    modules = modules_by_fqn(model)
    sites: list[SiteStatus] = []
    mismatches: list[str] = []
    found: dict[tuple[int, Role], list[tuple[nn.Module, ResolvedEntry]]] = {}
    for entry in table.entries:
        module = _module_of(entry, modules)
        odd = module if isinstance(module, str) else _dimension_mismatch(entry, module)
        if isinstance(module, str) or odd is not None:
            mismatches.append(str(odd))
            continue
        resolved = _resolve_entry(entry, module, candidates, chip)
        if isinstance(resolved, SiteStatus):
            sites.append(resolved)
        else:
            found.setdefault((id(module), Role(entry.role)), []).append((module, resolved))
    routes: dict[int, tuple[nn.Module, dict[Role, ResolvedEntry]]] = {}
    for (identity, role), aliases in found.items():
        module, first = aliases[0]
        if all(_same_choice(first.entry, other.entry) for _, other in aliases):
            routes.setdefault(identity, (module, {}))[1][role] = first
            sites += [_hit(resolved) for _, resolved in aliases]
        else:
            names = " and ".join(resolved.entry.fqn for _, resolved in aliases)
            detail = f"the module is {names}, and their entries differ"
            sites += [_miss(r.entry, MissReason.CONFLICT, detail) for _, r in aliases]
    sites += [SiteStatus(m.fqn, m.call, m.role, None, m.reason, m.detail) for m in table.misses]
    sites += _unknown_linears(table, modules)
    return Resolution(tuple(sites), tuple(routes.values()), tuple(mismatches))


def _module_of(entry: Entry, modules: Mapping[str, tuple[nn.Module, ...]]) -> nn.Module | str:
    roles = [role.value for role in Role]
    if entry.role not in roles:
        return f"{entry.fqn}: unknown role {entry.role!r}; {near_misses(entry.role, roles)}"
    found = modules.get(entry.fqn, ())
    if not found:
        return f"{entry.fqn} is not in the model; {near_misses(entry.fqn, modules)}"
    if len(found) > 1:
        return f"{entry.fqn} names {len(found)} modules once wrapper prefixes are removed"
    return found[0]


def _dimension_mismatch(entry: Entry, module: nn.Module) -> str | None:
    """Return why an entry's dimensions are not those of an ``nn.Linear``, or None."""
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


def _resolve_entry(
    entry: Entry, module: nn.Module, candidates: Mapping[str, Candidate], chip: Chip
) -> ResolvedEntry | SiteStatus:
    why = why_not_replaceable(module)
    if why is not None:
        return _miss(entry, MissReason.NOT_REPLACEABLE, why)
    if entry.role not in LINEAR_ROLES or entry.batch != 1:
        detail = f"{entry.role} with a batch of {entry.batch} is no product of nn.Linear"
        return _miss(entry, MissReason.NOT_REPLACEABLE, detail)
    if entry.call != ANY_CALL:
        detail = "this version routes the calls of a module together, and the entry is for one"
        return _miss(entry, MissReason.NOT_REPLACEABLE, detail)
    candidate = candidates.get(entry.candidate)
    if candidate is None:
        detail = (
            f"no candidate {entry.candidate!r} here; {near_misses(entry.candidate, candidates)}"
        )
        return _miss(entry, MissReason.KERNEL_ABSENT, detail)
    if candidate.version() is None:
        detail = f"{candidate.name} needs {candidate.library}, which is not installed"
        return _miss(entry, MissReason.KERNEL_ABSENT, detail)
    if Role(entry.role) not in candidate.roles:
        detail = f"{candidate.name} does not compute {entry.role}"
        return _miss(entry, MissReason.KERNEL_ABSENT, detail)
    granularity, why = _granularity(entry, candidate, chip)
    if granularity is None:
        return _miss(entry, MissReason.SHAPE, f"{candidate.name} does not take it: {why}")
    return ResolvedEntry(entry, candidate, granularity)


def _granularity(entry: Entry, candidate: Candidate, chip: Chip) -> tuple[int | None, str | None]:
    """Return the smallest multiple of the token count that a candidate takes, or None and why."""
    why: str | None = None
    for multiple in GRANULARITIES:
        odd = max(1, entry.tokens_max // multiple - 1) | 1
        why = candidate.supports(_problem(entry, odd * multiple), chip)
        if why is None:
            return multiple, None
    return None, why


def _problem(entry: Entry, tokens: int) -> Problem:
    return Problem(
        Role(entry.role),
        entry.batch,
        tokens if entry.m is None else entry.m,
        entry.n,
        tokens if entry.k is None else entry.k,
        torch_dtype(entry.dtype),
    )


def _same_choice(one: Entry, other: Entry) -> bool:
    return msgspec.structs.replace(one, fqn="", evidence=other.evidence) == msgspec.structs.replace(
        other, fqn=""
    )


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


def _hit(found: ResolvedEntry) -> SiteStatus:
    entry = found.entry
    multiple = f", multiples of {found.granularity}" if found.granularity > 1 else ""
    detail = (
        f"{entry.dtype}, {entry.tokens_min} to {entry.tokens_max} tokens{multiple}; products of "
        "another dtype count as layout misses, of another token count as shape misses"
    )
    return SiteStatus(entry.fqn, entry.call, entry.role, found.candidate.name, None, detail)


def _miss(entry: Entry, reason: MissReason, detail: str) -> SiteStatus:
    return SiteStatus(entry.fqn, entry.call, entry.role, None, reason, detail)
