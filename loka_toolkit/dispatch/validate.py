"""Validators: what must hold where a table is used, expected and actual."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from loka_toolkit.artifacts.dispatch_table import KERNEL_ABI, DispatchTable, Entry, Validator
from loka_toolkit.environment import CPU_CHIP, Environment
from loka_toolkit.errors import TableRefusedError
from loka_toolkit.kernels.contract import Candidate

ABI_PREFIX = "kernel_abi/"
"""``kernel_abi`` is the toolkit's; ``kernel_abi/CANDIDATE`` that of one kernel."""


class Check(msgspec.Struct, frozen=True):
    """One validator against this machine.

    Attributes:
        name: The fact.
        expected: Its value when the table was built.
        actual: Its value here.
        hard: Whether a difference refuses the table.
    """

    name: str
    expected: str | None
    actual: str | None
    hard: bool

    @property
    def holds(self) -> bool:
        """Whether expected and actual agree."""
        return self.expected == self.actual

    def __str__(self) -> str:
        """Return one line: name, expected, actual."""
        return f"{self.name}: expected {self.expected or 'none'}, actual {self.actual or 'none'}"


def validators_for(
    chip: str,
    environment: Environment | None,
    entries: Iterable[Entry],
    candidates: Mapping[str, Candidate],
) -> tuple[Validator, ...]:
    """Return the validators of a table.

    Args:
        chip: Chip it is for.
        environment: Where the evidence was gathered, or this machine if it has that chip; None
            for a chip that is not here and was not measured, of whose driver and libraries nothing
            is known.
        entries: The table's entries.
        candidates: Their kernels by name.
    """
    names = sorted({entry.candidate for entry in entries})
    found = [Validator("chip", chip, True), Validator("kernel_abi", str(KERNEL_ABI), True)]
    found += [Validator(f"{ABI_PREFIX}{n}", str(candidates[n].abi), True) for n in names]
    if environment is not None and chip != CPU_CHIP:
        found += [
            Validator("driver", environment.driver, False),
            Validator("cuda", environment.cuda, False),
        ]
    if environment is not None:
        libraries = ["torch", *sorted({candidates[n].library for n in names} - {"torch"})]
        found += [Validator(n, environment.libraries.get(n), False) for n in libraries]
    return tuple(found)


def check_validators(
    validators: Sequence[Validator],
    environment: Environment,
    candidates: Mapping[str, Candidate],
    *,
    chip: str | None = None,
) -> tuple[Check, ...]:
    """Compare validators with an environment.

    The ABI of a candidate that this version does not know is left out: its entries are misses.

    Args:
        validators: The table's.
        environment: Where it would be used.
        candidates: Kernels known here, by name.
        chip: Chip of the model, if it is not the environment's.
    """
    checks = []
    for validator in validators:
        name = validator.name
        if name.startswith(ABI_PREFIX):
            candidate = candidates.get(name.removeprefix(ABI_PREFIX))
            if candidate is None:
                continue
            actual: str | None = str(candidate.abi)
        else:
            actual = _fact(name, environment, chip or environment.chip)
        checks.append(Check(name, validator.expected, actual, validator.hard))
    return tuple(checks)


def check_entries(table: DispatchTable, candidates: Mapping[str, Candidate]) -> tuple[Check, ...]:
    """Return a failed hard check for every entry that no table of ours would hold."""
    checks = []
    for entry in table.entries:
        candidate = candidates.get(entry.candidate)
        if candidate is None:
            continue
        name = f"{entry.fqn}#{entry.call}:{entry.role}"
        if candidate.emulated:
            checks.append(Check(f"{name} runs", "a kernel", f"{candidate.name} (emulated)", True))
        if candidate.recipe != entry.recipe:
            checks.append(Check(f"{name} recipe", entry.recipe, candidate.recipe, True))
    return tuple(checks)


def unmeasured(table: DispatchTable) -> tuple[Entry, ...]:
    """Return the entries whose kernel was not judged on the table's chip."""
    return tuple(entry for entry in table.entries if entry.evidence.numerics != "measured")


def refuse_or_warn(
    table: DispatchTable, checks: Sequence[Check], *, on_gpu: bool, allow_unmeasured: bool
) -> None:
    """Raise on a hard difference, warn about soft ones.

    Raises:
        TableRefusedError: If a hard check fails, or on a GPU if entries are unmeasured and that
            was not allowed; expected and actual are printed, a line each.
    """
    hard = [str(check) for check in checks if check.hard and not check.holds]
    if hard:
        chip_differs = any(line.startswith("chip:") for line in hard)
        step = (
            "build it with the chip where the model's parameters are, or move the model first"
            if chip_differs
            else "build the table again with this version"
        )
        raise TableRefusedError("the table does not fit:\n  " + "\n  ".join(hard) + f"\n{step}")
    guesses = unmeasured(table)
    if on_gpu and guesses and not allow_unmeasured:
        first = guesses[0]
        raise TableRefusedError(
            f"{len(guesses)} of {len(table.entries)} entries were not measured on {table.chip}, "
            f"the first is {first.fqn}#{first.call}:{first.role} ({first.candidate}): expected "
            "numerics measured, actual none; replay the trace on this chip and build the table "
            "with the results, or pass allow_unmeasured=True"
        )
    soft = [str(check) for check in checks if not check.hard and not check.holds]
    if soft:
        warnings.warn(
            f"the dispatch table was built elsewhere: {'; '.join(soft)}", UserWarning, stacklevel=3
        )


def _fact(name: str, environment: Environment, chip: str) -> str | None:
    if name == "chip":
        return chip
    if name == "kernel_abi":
        return str(KERNEL_ABI)
    if name in ("driver", "cuda"):
        value: str | None = getattr(environment, name)
        return value
    return environment.libraries.get(name)
