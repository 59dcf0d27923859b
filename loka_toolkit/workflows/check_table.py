"""Check a table from files: validators, a dry run on a model, a gate over the cells it uses."""

from __future__ import annotations

from pathlib import Path

import msgspec

from loka_toolkit.artifacts.dispatch_table import ANY_CALL, DispatchTable
from loka_toolkit.artifacts.safety_map import SafetyMap
from loka_toolkit.dispatch import Check, SiteStatus, check_table
from loka_toolkit.errors import ConfigurationError
from loka_toolkit.workflows.gate import judge_gate, parse_fail_on
from loka_toolkit.workflows.steps import load_model

EXIT_UNUSABLE = 1


class CheckReport(msgspec.Struct, frozen=True):
    """What checking a table found.

    Attributes:
        usable: Whether ``install`` would accept the table, unmeasured entries allowed.
        chip: Chip it was checked for.
        checks: Every validator, expected and actual.
        refusals: Hard differences.
        warnings: Soft differences.
        unmeasured: Entries whose kernel was not judged on the table's chip.
        sites: Per site the kernel that would run, or why none; empty without a model.
        mismatches: Entries that are not of this model.
        exit_code: 0, 1 if the table is unusable, or the gate's.
        reasons: What decided the exit code.
    """

    usable: bool
    chip: str
    checks: tuple[Check, ...]
    refusals: tuple[str, ...]
    warnings: tuple[str, ...]
    unmeasured: int
    sites: tuple[SiteStatus, ...]
    mismatches: tuple[str, ...]
    exit_code: int
    reasons: tuple[str, ...]


def check_table_file(
    path: Path, *, model: str | None = None, safety: Path | None = None, fail_on: str | None = None
) -> CheckReport:
    """Check a table; nothing is changed.

    Args:
        path: The table.
        model: ``package.module:factory`` of the model to dry-run against.
        safety: Safety map whose cells the gate judges.
        fail_on: The gate; it needs ``safety``.

    Raises:
        LokaError: If a file or an argument cannot be used.
    """
    if fail_on and safety is None:
        raise ConfigurationError("--fail-on needs --safety: the verdicts are in the safety map")
    table = DispatchTable.load(path)
    found = check_table(table, None if model is None else load_model(model))
    exit_code, reasons = 0, (*found.refusals, *found.mismatches)
    if not found.usable:
        exit_code = EXIT_UNUSABLE
    elif safety is not None:
        loaded = SafetyMap.load(safety)
        gate = judge_gate(parse_fail_on(fail_on), loaded, recipes_used(table, loaded))
        exit_code, reasons = gate.exit_code, gate.reasons
    return CheckReport(
        usable=found.usable,
        chip=found.chip,
        checks=found.checks,
        refusals=found.refusals,
        warnings=found.warnings,
        unmeasured=found.unmeasured,
        sites=found.sites,
        mismatches=found.mismatches,
        exit_code=exit_code,
        reasons=reasons,
    )


def recipes_used(table: DispatchTable, safety: SafetyMap) -> dict[str, str]:
    """Return the recipe whose verdict a table relies on, per site of the map that it covers."""
    used = {(e.fqn, e.call, e.role): e.evidence.recipe_judged for e in table.entries}
    found = {}
    for cell in safety.cells:
        for call in (cell.call, ANY_CALL):
            recipe = used.get((cell.fqn, call, cell.role))
            if recipe is not None:
                found[cell.site] = recipe
    return found
