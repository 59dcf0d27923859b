"""Check: a dry run of a table against this machine and, if given, a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from torch import nn

from loka_toolkit.artifacts.dispatch_table import DispatchTable
from loka_toolkit.dispatch.consistency import check_consistency
from loka_toolkit.dispatch.entries import SiteStatus
from loka_toolkit.dispatch.resolve import resolve
from loka_toolkit.dispatch.validate import Check, check_entries, check_validators, unmeasured
from loka_toolkit.environment import Environment, current_environment
from loka_toolkit.kernels.catalog import catalog
from loka_toolkit.kernels.contract import Candidate, Chip


class TableCheck(msgspec.Struct, frozen=True):
    """What a dry run found.

    Attributes:
        chip: Chip of the model, or of this machine without a model.
        checks: Every validator, and everything in the table that no build could have written,
            expected and actual.
        unmeasured: Entries whose kernel was not judged on the table's chip.
        sites: Per site the kernel that would run, or why none; empty without a model.
        mismatches: Entries that are not of this model.
    """

    chip: str
    checks: tuple[Check, ...]
    unmeasured: int
    sites: tuple[SiteStatus, ...]
    mismatches: tuple[str, ...]

    @property
    def refusals(self) -> tuple[str, ...]:
        """Hard checks that do not hold, a line each; ``install`` would refuse."""
        return tuple(str(check) for check in self.checks if check.hard and not check.holds)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Soft validators that do not hold, a line each; ``install`` would warn."""
        return tuple(str(check) for check in self.checks if not check.hard and not check.holds)

    @property
    def usable(self) -> bool:
        """Whether ``install`` would accept the table, unmeasured entries allowed."""
        return not self.refusals and not self.mismatches


def check_table(
    table: DispatchTable | str | Path,
    model: nn.Module | None = None,
    *,
    environment: Environment | None = None,
    candidates: Sequence[Candidate] | None = None,
) -> TableCheck:
    """Check a table; nothing is changed, nothing is raised for what the check finds.

    Args:
        table: The table or its file.
        model: The model to dry-run against.
        environment: Where it would be used; this process's by default.
        candidates: Kernels known there; the catalog by default.

    Raises:
        ArtifactError: If the file is missing, damaged, foreign or newer.
    """
    table = table if isinstance(table, DispatchTable) else DispatchTable.load(table)
    environment = environment or current_environment()
    known = {c.name: c for c in (catalog() if candidates is None else candidates)}
    chip = chip_of_model(model, environment)
    checks = check_validators(table.validators, environment, known, chip=chip.name)
    resolution = None if model is None else resolve(table, model, known, chip)
    return TableCheck(
        chip=chip.name,
        checks=(*checks, *check_consistency(table), *check_entries(table, known)),
        unmeasured=len(unmeasured(table)),
        sites=() if resolution is None else resolution.sites,
        mismatches=() if resolution is None else resolution.mismatches,
    )


def chip_of_model(model: nn.Module | None, environment: Environment) -> Chip:
    """Return the chip on which a model is; that of the environment without parameters or a device.

    A model on the ``meta`` device is taken to be meant for this machine.
    """
    parameter = None if model is None else next(model.parameters(), None)
    if parameter is not None and parameter.device.type not in ("cuda", "meta"):
        return Chip(parameter.device.type, None)
    if environment.capability is None:
        return Chip(environment.chip, None)
    major, minor = environment.capability.split(".")
    return Chip(environment.chip, (int(major), int(minor)))
