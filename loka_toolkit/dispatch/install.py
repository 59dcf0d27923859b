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
from loka_toolkit.artifacts.sites import GEMM_OPERANDS, Operand, Role
from loka_toolkit.dispatch.check import chip_of_model
from loka_toolkit.dispatch.consistency import check_consistency
from loka_toolkit.dispatch.counters import Bank, Outcome, Slot
from loka_toolkit.dispatch.entries import ResolvedEntry, SiteStatus
from loka_toolkit.dispatch.placing import CounterRow, place_routes, plan_routes
from loka_toolkit.dispatch.resolve import resolve
from loka_toolkit.dispatch.signatures import BATCH_AXIS
from loka_toolkit.dispatch.validate import check_entries, check_validators, refuse_or_warn
from loka_toolkit.dispatch.wrapping import bank_of, give_route, restore, routed_modules
from loka_toolkit.environment import CPU_CHIP, current_environment
from loka_toolkit.errors import NoMatchError, TableError, TableMismatchError
from loka_toolkit.kernels.catalog import catalog
from loka_toolkit.kernels.contract import Candidate, Side

_SHOWN_MISMATCHES = 8


class Counts(msgspec.Struct, frozen=True):
    """How often the entries of an installation ran or missed, and which sites have none.

    Attributes:
        hits: Products that ran their candidate, by role.
        misses: Products with an entry that ran in their original precision all the same, by
            reason and role: ``env`` for another kind of device, ``shape`` for another token count,
            ``layout`` for another dtype of the operands than the entry's. Where the products of a
            module are caught: ``shape`` also for a product of which the table does not know,
            ``layout`` for a call that cannot be followed, and once per entry and call of the module
            ``env`` where it runs compiled.
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
        role: Its role; ``fwd`` for the products of which the table does not know.
        hits: Products that ran the candidate.
        misses: Products that did not, by reason as in :class:`Counts`.
        calls: Indices of the products in the module for which the row stands, ``*`` for all of an
            ``nn.Linear``; empty for the products of which the table does not know.
    """

    fqn: str
    role: str
    hits: int
    misses: dict[str, int]
    calls: tuple[int | str, ...]


class Installation:
    """The handle of an installed table; a context manager that uninstalls at the end."""

    def __init__(
        self,
        model: nn.Module,
        table: DispatchTable,
        sites: tuple[SiteStatus, ...],
        bank: Bank,
        rows: Sequence[CounterRow],
    ) -> None:
        self.table = table
        self._model = model
        self._sites = sites
        self._bank = bank
        self._rows = tuple(rows)

    def sites(self) -> tuple[SiteStatus, ...]:
        """Return one row per site: the candidate that runs it, or why none does."""
        return self._sites

    def counts(self) -> Counts:
        """Return hits and misses since the table was installed; this synchronizes the device."""
        hits: dict[str, int] = {}
        misses: dict[str, dict[str, int]] = {}
        for site in self.counts_by_site():
            if site.calls:
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
        for row, totals in zip(self._rows, self._bank.totals(), strict=True):
            misses = {
                _reason(outcome).value: totals[outcome]
                for outcome in Outcome
                if outcome is not Outcome.HIT and totals[outcome]
            }
            rows.append(SiteCounts(row.fqn, row.role, totals[Outcome.HIT], misses, row.calls))
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
        routed = [(module, *restore(module)) for module in self._routed_modules()]
        try:
            yield
        finally:
            for module, route, cls in routed:
                give_route(module, cls, route)

    def uninstall(self) -> None:
        """Take the table out of the model; does nothing the second time."""
        for module in self._routed_modules():
            restore(module)

    def _routed_modules(self) -> list[nn.Module]:
        return [m for m in routed_modules(self._model) if bank_of(m) is self._bank]

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
    """Route the products of a model as a table says.

    A routed ``nn.Linear`` gets the class :class:`RoutedLinear`, any other module whose products
    have entries a subclass of its own class; parameters, ``state_dict`` keys, tying, hooks and
    optimizer state stay as they are. A site without an entry that holds runs as before. Install
    after the model was moved to its device; wrapping and compiling may come before or after.

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
    if routed_modules(model):
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
    plan = plan_routes(resolution)
    bank = Bank([_slot(entry) for entry in plan.entries], _device_of(model), len(plan.modules))
    place_routes(plan, bank, "cpu" if chip.name == CPU_CHIP else "cuda")
    return Installation(model, table, resolution.sites, bank, plan.rows)


def uninstall(model: nn.Module) -> None:
    """Take the installed table out of a model, or out of a copy of it.

    Raises:
        NoMatchError: If there is none.
    """
    routed = routed_modules(model)
    if not routed:
        raise NoMatchError("routed module", "nn.Linear", ())
    for module in routed:
        restore(module)


def _device_of(model: nn.Module) -> torch.device:
    parameter = next(model.parameters(), None)
    if parameter is None or parameter.device.type == "meta":
        return torch.device("cpu")
    return parameter.device


def _slot(resolved: ResolvedEntry) -> Slot:
    entry = resolved.entry
    static = entry.scale_policy == "static"
    operands = GEMM_OPERANDS[Role(entry.role), entry.token_axis != BATCH_AXIS]
    sides = [side for side, operand in zip(Side, operands, strict=True) if operand is Operand.G]
    return Slot(
        candidate=resolved.candidate,
        scale_a=entry.scale_a if static else None,
        scale_b=entry.scale_b if static else None,
        gradient=sides[0] if sides else None,
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
