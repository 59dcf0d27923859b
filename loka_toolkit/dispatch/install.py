"""Install a dispatch table into a model, and take it out again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

import msgspec
import torch
from torch import Tensor, nn

from loka_toolkit.artifacts.dispatch_table import DispatchTable, MissReason
from loka_toolkit.artifacts.sites import Role
from loka_toolkit.dispatch.check import chip_of_model
from loka_toolkit.dispatch.consistency import check_consistency
from loka_toolkit.dispatch.counters import Bank, Outcome, Slot
from loka_toolkit.dispatch.options import torch_dtype
from loka_toolkit.dispatch.resolve import ResolvedEntry, SiteStatus, resolve
from loka_toolkit.dispatch.runtime import ROUTE_ATTRIBUTE, RoleRoute, Route, RoutedLinear
from loka_toolkit.dispatch.validate import check_entries, check_validators, refuse_or_warn
from loka_toolkit.environment import CPU_CHIP, current_environment
from loka_toolkit.errors import NoMatchError, TableError, TableMismatchError
from loka_toolkit.kernels.catalog import catalog
from loka_toolkit.kernels.contract import Candidate

_SHOWN_MISMATCHES = 8


class Counts(msgspec.Struct, frozen=True):
    """How often the entries of an installation ran or missed, and which sites have none.

    Attributes:
        hits: Products that ran their candidate, by role.
        misses: Products with an entry that ran in their original precision all the same, by
            reason and role: ``env`` for another kind of device, ``shape`` for another token count,
            ``layout`` for another dtype of the operands than the entry's.
        sites_missed: Sites without an entry that holds, by reason and role. Their products are not
            counted: those modules run as if nothing were installed.
    """

    hits: dict[str, int]
    misses: dict[str, dict[str, int]]
    sites_missed: dict[str, dict[str, int]]


class SiteCounts(msgspec.Struct, frozen=True):
    """How often one routed site ran.

    Attributes:
        fqn: Module path.
        role: Its role.
        hits: Products that ran the candidate.
        misses: Products that did not, by reason as in :class:`Counts`.
    """

    fqn: str
    role: str
    hits: int
    misses: dict[str, int]


class Installation:
    """The handle of an installed table; a context manager that uninstalls at the end."""

    def __init__(
        self,
        model: nn.Module,
        table: DispatchTable,
        sites: tuple[SiteStatus, ...],
        bank: Bank,
        slots: Sequence[ResolvedEntry],
    ) -> None:
        self.table = table
        self._model = model
        self._sites = sites
        self._bank = bank
        self._slots = tuple(slots)

    def sites(self) -> tuple[SiteStatus, ...]:
        """Return one row per site: the candidate that runs it, or why none does."""
        return self._sites

    def counts(self) -> Counts:
        """Return hits and misses since the table was installed; this synchronizes the device."""
        hits: dict[str, int] = {}
        misses: dict[str, dict[str, int]] = {}
        for site in self.counts_by_site():
            hits[site.role] = hits.get(site.role, 0) + site.hits
            for reason, count in site.misses.items():
                by_role = misses.setdefault(reason, {})
                by_role[site.role] = by_role.get(site.role, 0) + count
        missed: dict[str, dict[str, int]] = {}
        for status in self._sites:
            if status.reason is not None:
                by_role = missed.setdefault(status.reason.value, {})
                by_role[status.role] = by_role.get(status.role, 0) + 1
        return Counts(hits, misses, missed)

    def counts_by_site(self) -> tuple[SiteCounts, ...]:
        """Return hits and misses of every routed site; this synchronizes the device."""
        rows = []
        for resolved, totals in zip(self._slots, self._bank.totals(), strict=True):
            misses = {
                _reason(outcome).value: totals[outcome]
                for outcome in Outcome
                if outcome is not Outcome.HIT and totals[outcome]
            }
            entry = resolved.entry
            rows.append(SiteCounts(entry.fqn, entry.role, totals[Outcome.HIT], misses))
        return tuple(rows)

    def set_loss_scale(self, scale: float | Tensor) -> None:
        """Set the factor by which the loss is multiplied before backward; 1 until then.

        Static scales of gradients are relative to it. A tensor on the device is copied without a
        synchronization, so a gradient scaler's own tensor can be given at every step.
        """
        self._bank.set_loss_scale(scale)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Run every product in its original precision inside, uncounted.

        For recording while a table is installed: the recorder sees products of aten, and the
        operands of the original precision are the true ones. A compiled model is compiled again.
        """
        routes = [(m, m.loka_route) for m in self._routed_modules()]
        for module, _ in routes:
            _restore(module)
        try:
            yield
        finally:
            for module, route in routes:
                _give_route(module, route)

    def uninstall(self) -> None:
        """Take the table out of the model; does nothing the second time."""
        for module in self._routed_modules():
            _restore(module)

    def _routed_modules(self) -> list[RoutedLinear]:
        return [m for m in _routed(self._model) if m.loka_route.bank is self._bank]

    def __enter__(self) -> Installation:
        """Return self."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Uninstall."""
        self.uninstall()


def install(
    model: nn.Module,
    table: DispatchTable | str | Path,
    *,
    allow_unmeasured: bool = False,
    candidates: Sequence[Candidate] | None = None,
) -> Installation:
    """Route the products of a model's linear layers as a table says.

    A routed ``nn.Linear`` gets the class :class:`RoutedLinear`; parameters, ``state_dict`` keys,
    tying, hooks and optimizer state stay as they are. A site without an entry that holds runs as
    before. Install after the model was moved to its device; wrapping and compiling may come before
    or after.

    Args:
        model: The model.
        table: The table or its file.
        allow_unmeasured: Accept entries whose kernel was not judged on this GPU.
        candidates: Kernels known here; the catalog by default.

    Raises:
        ArtifactError: If the file is missing, damaged, foreign or newer.
        TableError: If a table is installed already.
        TableRefusedError: If a hard validator differs, the table is not one that a build could
            have written, or entries are unmeasured on a GPU.
        TableMismatchError: If entries name layers that the model does not have, or of another size.
    """
    table = table if isinstance(table, DispatchTable) else DispatchTable.load(table)
    if any(True for _ in _routed(model)):
        raise TableError("a table is installed in this model already; call uninstall(model) first")
    known = {c.name: c for c in (catalog() if candidates is None else candidates)}
    environment = current_environment()
    chip = chip_of_model(model, environment)
    checks = check_validators(table.validators, environment, known, chip=chip.name)
    refuse_or_warn(
        table,
        (*checks, *check_consistency(table), *check_entries(table, known)),
        on_gpu=chip.capability is not None,
        allow_unmeasured=allow_unmeasured,
    )
    resolution = resolve(table, model, known, chip)
    if resolution.mismatches:
        raise _mismatch_error(resolution.mismatches)
    slots = [r for _, by_role in resolution.routes for r in by_role.values()]
    bank = Bank([_slot(resolved) for resolved in slots], _device_of(model))
    index = {id(resolved): number for number, resolved in enumerate(slots)}
    device_type = "cpu" if chip.name == CPU_CHIP else "cuda"
    for module, by_role in resolution.routes:
        routes = {
            role: _role_route(resolved, index[id(resolved)], device_type)
            for role, resolved in by_role.items()
        }
        route = Route(bank, routes.get(Role.FWD), routes.get(Role.DGRAD), routes.get(Role.WGRAD))
        _give_route(module, route)
    return Installation(model, table, resolution.sites, bank, slots)


def uninstall(model: nn.Module) -> None:
    """Take the installed table out of a model, or out of a copy of it.

    Raises:
        NoMatchError: If there is none.
    """
    routed = list(_routed(model))
    if not routed:
        raise NoMatchError("routed layer", "nn.Linear", ())
    for module in routed:
        _restore(module)


def _device_of(model: nn.Module) -> torch.device:
    parameter = next(model.parameters(), None)
    if parameter is None or parameter.device.type == "meta":
        return torch.device("cpu")
    return parameter.device


def _routed(model: nn.Module) -> list[RoutedLinear]:
    return [module for module in model.modules() if isinstance(module, RoutedLinear)]


def _give_route(module: nn.Module, route: Route) -> None:
    module.__class__ = RoutedLinear
    module.__dict__[ROUTE_ATTRIBUTE] = route


def _restore(module: RoutedLinear) -> None:
    del module.__dict__[ROUTE_ATTRIBUTE]
    module.__class__ = nn.Linear  # type: ignore[assignment]


def _slot(resolved: ResolvedEntry) -> Slot:
    entry = resolved.entry
    static = entry.scale_policy == "static"
    gradient_is_a = Role(entry.role) in (Role.DGRAD, Role.WGRAD)
    return Slot(
        candidate=resolved.candidate,
        scale_a=entry.scale_a if static else None,
        scale_b=entry.scale_b if static else None,
        relative_to_loss_scale=gradient_is_a,
    )


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


def _reason(outcome: Outcome) -> MissReason:
    reason = outcome.reason
    if reason is None:
        raise ValueError("a hit has no reason")
    return reason


def _mismatch_error(mismatches: Sequence[str]) -> TableMismatchError:
    shown = "\n  ".join(mismatches[:_SHOWN_MISMATCHES])
    more = len(mismatches) - _SHOWN_MISMATCHES
    rest = f"\n  and {more} more" if more > 0 else ""
    return TableMismatchError(
        f"{len(mismatches)} entries of the table are not of this model:\n  {shown}{rest}\n"
        "record this model and build its own table"
    )
