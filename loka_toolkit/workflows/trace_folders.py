"""Where the traces of one script lie: a single model in RUN itself, several in RUN/NAME each."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from loka_toolkit.artifacts.trace import TABLES, manifest_name
from loka_toolkit.errors import ArtifactExistsError

_NOT_PLAIN = re.compile(r"[^A-Za-z0-9_.+-]+")


def folder_name(model: str) -> str:
    """Return the name of a model as that of a directory."""
    return _NOT_PLAIN.sub("_", model).strip(".") or "model"


def check_free(run: Path, *, force: bool) -> None:
    """Check, before the script starts, that traces can be put somewhere.

    Raises:
        ArtifactExistsError: If something is there and overwriting was not asked for.
    """
    if run.exists() and not run.is_dir():
        raise ArtifactExistsError(f"{run} is a file; a trace is a directory: name another path")
    if run.is_dir() and any(run.iterdir()) and not force:
        raise ArtifactExistsError(
            f"{run} is not empty; use another path, or --force to overwrite the trace"
        )


def clear_traces(run: Path, rank: int) -> None:
    """Remove what a rank left of earlier traces in a directory or one below it, nothing else."""
    for folder in (run, *(p for p in run.glob("*") if p.is_dir())):
        if not (folder / manifest_name(rank)).is_file():
            continue
        for path in _files_of(folder, rank):
            path.unlink()
        for table in TABLES:
            _remove_if_empty(folder / table.name)
        if folder != run:
            _remove_if_empty(folder)


def move_trace(source: Path, target: Path, rank: int) -> None:
    """Move what a rank wrote of a closed trace to another directory."""
    for path in _files_of(source, rank):
        place = target / path.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(path, place)
    for table in TABLES:
        _remove_if_empty(source / table.name)
    _remove_if_empty(source)


def _files_of(folder: Path, rank: int) -> list[Path]:
    own = f"rank{rank:05d}-"
    found = [folder / manifest_name(rank)]
    for table in TABLES:
        found += sorted((folder / table.name).glob(f"{own}*"))
    return [path for path in found if path.is_file()]


def _remove_if_empty(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
