"""An entry by itself: which kernel runs it here, and what is said of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import msgspec

from loka_toolkit.artifacts.dispatch_table import Entry, MissReason
from loka_toolkit.artifacts.sites import Role
from loka_toolkit.dispatch.options import torch_dtype
from loka_toolkit.dispatch.signatures import BATCH_AXIS
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


def with_kernel(
    entry: Entry, candidates: Mapping[str, Candidate], chip: Chip
) -> ResolvedEntry | SiteStatus:
    """Return an entry with its kernel, or why no kernel here runs it."""
    candidate = candidates.get(entry.candidate)
    if candidate is None:
        detail = (
            f"no candidate {entry.candidate!r} here; {near_misses(entry.candidate, candidates)}"
        )
        return miss(entry, MissReason.KERNEL_ABSENT, detail)
    if candidate.version() is None:
        detail = f"{candidate.name} needs {candidate.library}, which is not installed"
        return miss(entry, MissReason.KERNEL_ABSENT, detail)
    if Role(entry.role) not in candidate.roles:
        detail = f"{candidate.name} does not compute {entry.role}"
        return miss(entry, MissReason.KERNEL_ABSENT, detail)
    granularity, why = _granularity(entry, candidate, chip)
    if granularity is None:
        return miss(entry, MissReason.SHAPE, f"{candidate.name} does not take it: {why}")
    return ResolvedEntry(entry, candidate, granularity)


def hit_of(found: ResolvedEntry, *, eager_only: bool = False) -> SiteStatus:
    """Return what is said of an entry that holds."""
    entry = found.entry
    multiple = f", multiples of {found.granularity}" if found.granularity > 1 else ""
    unit, what = ("tokens", "token count")
    if entry.token_axis == BATCH_AXIS:
        unit, what = ("products at once", "number or size of products")
    detail = (
        f"{entry.dtype}, {entry.tokens_min} to {entry.tokens_max} {unit}{multiple}; products of "
        f"another dtype count as layout misses, of another {what} as shape misses"
    )
    if eager_only:
        detail += ", and a compiled call of the module as an env miss"
    return SiteStatus(entry.fqn, entry.call, entry.role, found.candidate.name, None, detail)


def miss(entry: Entry, reason: MissReason, detail: str) -> SiteStatus:
    """Return what is said of an entry that does not hold."""
    return SiteStatus(entry.fqn, entry.call, entry.role, None, reason, detail)


def same_choice(one: Entry, other: Entry) -> bool:
    """Return whether two entries route alike, whatever their names and evidence are."""
    neutral = {"fqn": "", "call": 0, "weight": None, "evidence": one.evidence}
    return msgspec.structs.replace(one, **neutral) == msgspec.structs.replace(other, **neutral)


def _granularity(entry: Entry, candidate: Candidate, chip: Chip) -> tuple[int | None, str | None]:
    """Return the smallest multiple of the token count that a candidate takes, or None and why."""
    if entry.token_axis == BATCH_AXIS:
        why = candidate.supports(_problem(entry, entry.batch), chip)
        return (1, None) if why is None else (None, why)
    why = None
    for multiple in GRANULARITIES:
        odd = max(1, entry.tokens_max // multiple - 1) | 1
        why = candidate.supports(_problem(entry, odd * multiple), chip)
        if why is None:
            return multiple, None
    return None, why


def _problem(entry: Entry, tokens: int) -> Problem:
    return Problem(
        Role(entry.role),
        tokens if entry.token_axis == BATCH_AXIS else entry.batch,
        tokens if entry.m is None else entry.m,
        entry.n,
        tokens if entry.k is None else entry.k,
        torch_dtype(entry.dtype),
        parameter=False if entry.token_axis == BATCH_AXIS else None,
    )
