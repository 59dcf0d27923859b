"""The rows of a replay as they come in, saved every few seconds; and those an earlier run left."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import torch

from loka_toolkit.artifacts.replay_results import ReplayFacts, ReplayResults, ReplayRow
from loka_toolkit.artifacts.trace import Trace
from loka_toolkit.errors import ArtifactCorruptError, ReplayError
from loka_toolkit.harness.bench import BenchSettings, Measured
from loka_toolkit.harness.workloads import Workload
from loka_toolkit.kernels.contract import Candidate, Chip

JUDGE_VERSION = 1
"""Raised when limits or measurements change, so that older rows are measured again."""

_SAVE_EVERY_SECONDS = 10.0


@dataclasses.dataclass(frozen=True)
class Job:
    """One row to measure.

    Attributes:
        index: Of the workload among those of the trace.
        workload: The workload.
        candidate: The candidate.
        digest: Identifies both, and how they are measured.
    """

    index: int
    workload: Workload
    candidate: Candidate
    digest: str


class Ledger:
    """The rows so far, written out every few seconds.

    Args:
        path: Where to; None keeps them in memory.
        facts: What holds for all of them.
        rows: Rows that are there already, by digest.
        order: Digests in the order of the results.
    """

    def __init__(
        self,
        path: Path | None,
        facts: ReplayFacts,
        rows: dict[str, ReplayRow],
        order: Sequence[str],
    ) -> None:
        self.rows = rows
        self._path = path
        self._facts = facts
        self._order = order
        self._saved_at = time.monotonic()

    def add(self, row: ReplayRow) -> None:
        """Take a row, and save if the last time is some seconds ago."""
        self.rows[row.workload_digest] = row
        if time.monotonic() - self._saved_at > _SAVE_EVERY_SECONDS:
            self.save()

    def complete(self) -> None:
        """Note that every workload was visited."""
        self._facts = msgspec.structs.replace(self._facts, complete=True)

    def results(self) -> ReplayResults:
        """Return the rows so far."""
        found = [self.rows[digest] for digest in self._order if digest in self.rows]
        return ReplayResults(rows=tuple(found), facts=self._facts)

    def save(self) -> None:
        """Write the rows so far, atomically."""
        if self._path is not None:
            self.results().save(self._path)
        self._saved_at = time.monotonic()


@contextlib.contextmanager
def saved_at_last(ledger: Ledger) -> Iterator[None]:
    """Save whatever happens, so that an interrupt costs the row in flight only."""
    try:
        yield
    finally:
        ledger.save()


def resumable(path: Path, trace: Trace) -> dict[str, ReplayRow]:
    """Return the rows that an earlier run of the same trace left at ``path``, by digest.

    Raises:
        ArtifactError: If what stands there cannot be read.
        ReplayError: If it comes from another trace.
    """
    if not path.exists():
        return {}
    try:
        results = ReplayResults.load(path)
    except ArtifactCorruptError as error:
        raise ArtifactCorruptError(f"{error}; use --force to replace it") from None
    if results.facts.trace_digest != trace.digest:
        raise ReplayError(
            f"{path} holds results of trace {results.facts.trace_digest[:12]}, and {trace.path} is "
            f"trace {trace.digest[:12]}; choose another path, or --force to replace them"
        )
    return {row.workload_digest: row for row in results.rows}


def row_digest(
    workload: Workload, candidate: Candidate, settings: BenchSettings, chip: Chip
) -> str:
    """Return what identifies a row: the same digest, the same measurement."""
    identity = {
        "judge": JUDGE_VERSION,
        "workload": workload.identity,
        "candidate": [candidate.name, candidate.recipe, _version(candidate), candidate.abi],
        "libraries": [str(torch.__version__), torch.version.cuda],
        "policy": dataclasses.asdict(settings.policy),
        "chip": [chip.name, chip.capability, settings.threads if chip.capability is None else 0],
        "draws": [settings.draws, settings.seed],
    }
    return hashlib.sha256(msgspec.json.encode(identity, order="sorted")).hexdigest()


def _version(candidate: Candidate) -> str | None:
    found = candidate.version()
    return None if found is None else str(found)  # torch's own is a subclass that no encoder takes


def row_of(job: Job, measured: Measured, chip: Chip) -> ReplayRow:
    """Return the row of the results."""
    site, problem, candidate = job.workload.site, job.workload.problem, job.candidate
    outcome = {
        field.name: getattr(measured.outcome, field.name)
        for field in dataclasses.fields(measured.outcome)
    }
    return ReplayRow(
        site=str(site),
        fqn=site.fqn,
        call=site.call,
        role=site.role.value,
        batch=problem.batch,
        m=problem.m,
        n=problem.n,
        k=problem.k,
        dtype=job.workload.dtype,
        candidate=candidate.name,
        library=candidate.library,
        version=_version(candidate),
        recipe=candidate.recipe,
        emulated=candidate.emulated,
        inputs=measured.inputs,
        chip=chip.name,
        workload_digest=job.digest,
        **outcome,
    )
