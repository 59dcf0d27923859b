"""Puts a rank's rows into the trace's directory, whole part by whole part."""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loka_toolkit.artifacts import storage
from loka_toolkit.artifacts.schema import TableSchema
from loka_toolkit.artifacts.trace import (
    ERRORS,
    KIND,
    MOMENTS,
    OPERANDS,
    SCHEMA_VERSION,
    SITES,
    STEPS,
    TABLES,
    Event,
    Manifest,
    RunStatus,
    manifest_name,
)
from loka_toolkit.environment import current_environment, timestamp
from loka_toolkit.errors import ArtifactExistsError, ConfigurationError
from loka_toolkit.recording.memory import RunMemory
from loka_toolkit.recording.settings import RecorderSettings

FLUSH_STEPS = 8
FLUSH_SECONDS = 20.0
"""Rows are written after so many recorded steps or seconds, whichever comes first, and at once
after the first recorded step: what a kill loses is bounded, and so is the cost of syncing files."""

_RANK_FILE = re.compile(r"^(manifest-)?rank(?P<rank>\d{5})(-.*\.parquet|\.json)$")


class TraceWriter:
    """Buffers rows and flushes them.

    Args:
        settings: The recorder's settings.
    """

    def __init__(self, settings: RecorderSettings) -> None:
        self._settings = settings
        self._rows: dict[str, list[Mapping[str, Any]]] = {table.name: [] for table in TABLES}
        self._parts = 0
        self._buffered_steps = 0
        self._last_flush = time.monotonic()
        self._moments_due = 1
        self._created = timestamp()

    def open(self, config: dict[str, Any]) -> None:
        """Claim the directory and write a manifest.

        Raises:
            ArtifactExistsError: If a trace, or anything else, is there and ``force`` is false.
            ConfigurationError: If it cannot be written.
        """
        self._config = config
        path = self._settings.path
        if path.exists() and not path.is_dir():
            raise ArtifactExistsError(
                f"{path} is a file; a trace is a directory: name another path"
            )
        try:
            mine = self._own_files(path)
            if mine and not self._settings.force:
                raise ArtifactExistsError(
                    f"{path} is not empty; use another path, or force=True to overwrite the trace"
                )
            for file in mine:
                if _is_of_a_trace(file):
                    file.unlink()
            path.mkdir(parents=True, exist_ok=True)
            self._put_manifest(RunStatus(), ())
        except OSError as error:
            raise ConfigurationError(f"cannot write a trace to {path}: {error.strerror}") from None

    def add(self, table: TableSchema, rows: Sequence[Mapping[str, Any]]) -> None:
        """Buffer rows of a table."""
        self._rows[table.name].extend(rows)

    def end_step(self) -> bool:
        """Count a recorded step; return whether it is time to flush."""
        self._buffered_steps += 1
        waited = time.monotonic() - self._last_flush > FLUSH_SECONDS
        return self._parts == 0 or self._buffered_steps >= FLUSH_STEPS or waited

    def flush(
        self,
        status: RunStatus,
        events: tuple[Event, ...],
        memory: RunMemory,
    ) -> None:
        """Write what is buffered, then the manifest.

        Raises:
            OSError: If it cannot be written; rows that were not written stay buffered.
            FileNotFoundError: If the trace was taken away, in which case nothing is written.
        """
        self._check_present()
        first = self._parts
        wrote = False
        # Steps come last: a step that has a row there has all of its rows.
        for table in (SITES, OPERANDS, ERRORS, STEPS):
            rows = self._rows[table.name]
            if rows:
                self._write(table, rows, first)
                rows.clear()
                wrote = True
        self._parts += wrote
        self._buffered_steps = 0
        self._last_flush = time.monotonic()
        if status.closed or status.steps_recorded >= self._moments_due:
            self._write_moments(memory)
            # Moments are rewritten whole, so at doubling intervals: their cost stays in proportion.
            self._moments_due = max(1, 2 * status.steps_recorded)
        self.write_manifest(status, events)

    def compact(self) -> None:
        """Merge the parts of every table into one.

        Raises:
            OSError: If it cannot be written; the parts stay as they are.
        """
        for table in (SITES, STEPS, OPERANDS, ERRORS):
            directory = self._settings.path / table.name
            if directory.is_dir():
                storage.compact_parts(directory, table, self._settings.rank)

    def write_manifest(self, status: RunStatus, events: tuple[Event, ...]) -> None:
        """Write this rank's manifest again.

        Raises:
            OSError: If it cannot be written.
            FileNotFoundError: If the trace was taken away, in which case it is not written.
        """
        self._check_present()
        self._put_manifest(status, events)

    def _check_present(self) -> None:
        """Find that the trace is still there: what is left of it would be a trace with gaps."""
        name = manifest_name(self._settings.rank)
        if not (self._settings.path / name).is_file():
            reason = f"its {name} was deleted or moved while recording, and rows with it"
            raise FileNotFoundError(errno.ENOENT, reason)

    def _put_manifest(self, status: RunStatus, events: tuple[Event, ...]) -> None:
        manifest = Manifest(
            kind=KIND,
            schema_version=SCHEMA_VERSION,
            created=self._created,
            rank=self._settings.rank,
            world_size=self._settings.world_size,
            environment=current_environment(),
            config=self._config,
            recipes=tuple(recipe.name for recipe in self._settings.recipes),
            status=status,
            events=events,
        )
        storage.write_json(self._settings.path / manifest_name(self._settings.rank), manifest)

    def _write_moments(self, memory: RunMemory) -> None:
        rows = list(memory.rows(self._settings.rank))
        if rows:
            self._write(MOMENTS, rows, 0)

    def _write(self, table: TableSchema, rows: Sequence[Mapping[str, Any]], part: int) -> None:
        path = storage.part_path(self._settings.path / table.name, self._settings.rank, part)
        storage.write_table(
            path, storage.table_from_rows(table, rows), table, kind=storage.part_kind(table)
        )

    def _own_files(self, path: Path) -> list[Path]:
        """Return the files that this rank finds in its way; rank 0 answers for strangers."""
        rank, world_size = self._settings.rank, self._settings.world_size
        found = []
        for file in sorted(p for p in path.rglob("*") if not p.is_dir()):
            match = _RANK_FILE.match(file.name)
            owner = int(match["rank"]) if match else 0
            if owner == rank or (rank == 0 and owner >= world_size):
                found.append(file)
        return found


def _is_of_a_trace(file: Path) -> bool:
    return file.name == manifest_name(0) or _RANK_FILE.match(file.name) is not None
