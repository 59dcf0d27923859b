"""The safety report: one HTML file that says what is safe, why, and whether to believe it."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

from loka_toolkit.artifacts import storage
from loka_toolkit.artifacts.dispatch_table import DispatchTable
from loka_toolkit.artifacts.replay_results import ReplayResults
from loka_toolkit.artifacts.safety_map import SafetyMap
from loka_toolkit.artifacts.trace import Trace
from loka_toolkit.reporting.view import Inputs, build_view

__all__ = ["report", "write_report"]

PathLike: TypeAlias = str | Path


def report(
    safety: SafetyMap | PathLike,
    *,
    trace: Trace | PathLike | None = None,
    replay: ReplayResults | PathLike | None = None,
    table: DispatchTable | PathLike | None = None,
    top: int = 20,
    title: str | None = None,
) -> str:
    """Return the safety report as one HTML document that needs nothing else.

    The same artifacts give the same bytes.

    Args:
        safety: The safety map, or where it is.
        trace: The trace it was made from, or where it is: brings the distributions, the errors
            over steps and the norm sites.
        replay: Replay results, or where they are.
        table: A dispatch table, or where it is.
        top: How many sites are shown with their distributions.
        title: Title of the page.

    Raises:
        ArtifactError: If an artifact is missing, damaged, foreign or newer.
        ConfigurationError: If ``top`` is negative.
        MissingDependencyError: If Jinja2 or Matplotlib is absent.
    """
    from loka_toolkit.reporting.html import render

    inputs = _open(safety, trace, replay, table)
    return render(build_view(inputs, top=top, title=title))


def write_report(
    path: PathLike,
    safety: SafetyMap | PathLike,
    *,
    trace: Trace | PathLike | None = None,
    replay: ReplayResults | PathLike | None = None,
    table: DispatchTable | PathLike | None = None,
    top: int = 20,
    title: str | None = None,
    force: bool = False,
) -> Path:
    """Write the safety report to an HTML file, atomically; see :func:`report`.

    Args:
        path: The file to write.
        safety: The safety map, or where it is.
        trace: The trace it was made from, or where it is.
        replay: Replay results, or where they are.
        table: A dispatch table, or where it is.
        top: How many sites are shown with their distributions.
        title: Title of the page.
        force: Overwrite what is there.

    Raises:
        ArtifactExistsError: If there is a file and ``force`` is false; nothing is computed then.
        ArtifactError: If an artifact is missing, damaged, foreign or newer.
        ConfigurationError: If ``top`` is negative.
        MissingDependencyError: If Jinja2 or Matplotlib is absent.
    """
    path = Path(path)
    storage.ensure_writable(path, force=force)
    page = report(safety, trace=trace, replay=replay, table=table, top=top, title=title)
    storage.write_text(path, page)
    return path


def _open(
    safety: SafetyMap | PathLike,
    trace: Trace | PathLike | None,
    replay: ReplayResults | PathLike | None,
    table: DispatchTable | PathLike | None,
) -> Inputs:
    locations: dict[str, str] = {}
    digests: dict[str, str] = {}
    if not isinstance(safety, SafetyMap):
        locations["safety map"] = str(safety)
        safety = SafetyMap.load(safety)
    digests["safety map"] = safety.digest
    if trace is not None:
        trace = trace if isinstance(trace, Trace) else Trace.open(trace)
        locations["trace"] = str(trace.path)
    if replay is not None:
        if not isinstance(replay, ReplayResults):
            locations["replay results"] = str(replay)
            replay = ReplayResults.load(replay)
        digests["replay results"] = replay.digest
    if table is not None and not isinstance(table, DispatchTable):
        locations["dispatch table"] = str(table)
        digests["dispatch table"] = storage.digest_file(Path(table))
        table = DispatchTable.load(table)
    return Inputs(
        safety=safety,
        trace=trace,
        replay=replay,
        table=table,
        locations=locations,
        digests=digests,
    )
