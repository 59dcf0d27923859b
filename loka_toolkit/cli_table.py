"""``loka table``: build, check and show dispatch tables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loka_toolkit.cli_options import (
    Exclude,
    FailOn,
    Force,
    Include,
    Json,
    Quiet,
    SafetyArgument,
    TableArgument,
)
from loka_toolkit.console import emit, guarded, leave, warn

table_app = typer.Typer(no_args_is_help=True, help="Build, check and show dispatch tables.")


@table_app.command()
@guarded
def build(
    safety: SafetyArgument,
    out: Annotated[Path, typer.Option("--out", "-o", help="The table.")] = Path("table.json"),
    replay: Annotated[Path | None, typer.Option(help="Replay results of the chip.")] = None,
    chip: Annotated[
        str | None, typer.Option(help="Chip the table is for; default: this machine's.")
    ] = None,
    objective: Annotated[
        str | None, typer.Option(help="speed, roofline or coverage; default: as the chip allows.")
    ] = None,
    include: Include = None,
    exclude: Exclude = None,
    json: Json = False,
    quiet: Quiet = False,
    force: Force = False,
) -> None:
    """Join safety and replay: what runs where, and why not where not."""
    from loka_toolkit.workflows.lines import table_summary_lines
    from loka_toolkit.workflows.steps import build_table_file
    from loka_toolkit.workflows.summaries import summarize_table

    table = build_table_file(
        safety,
        out,
        replay=replay,
        chip=chip,
        objective=objective,
        include=tuple(include or ()),
        exclude=tuple(exclude or ()),
        force=force,
    )
    summary = summarize_table(table)
    lines = [*table_summary_lines(summary), "", f"table: {out}"]
    emit(summary, as_json=json, quiet=quiet, lines=lines)


@table_app.command()
@guarded
def show(table: TableArgument, json: Json = False, quiet: Quiet = False) -> None:
    """Print every entry and every miss of a table."""
    from loka_toolkit.artifacts.dispatch_table import DispatchTable
    from loka_toolkit.workflows.lines import table_entry_lines, table_summary_lines
    from loka_toolkit.workflows.summaries import summarize_table

    loaded = DispatchTable.load(table)
    lines = [*table_summary_lines(summarize_table(loaded)), "", *table_entry_lines(loaded)]
    emit(loaded, as_json=json, quiet=quiet, lines=lines)


@table_app.command()
@guarded
def check(
    table: TableArgument,
    model: Annotated[
        str | None, typer.Option(help="package.module:factory of the model to dry-run against.")
    ] = None,
    safety: Annotated[
        Path | None, typer.Option(help="Safety map that --fail-on judges the table's cells by.")
    ] = None,
    fail_on: FailOn = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check a table against this machine and, if given, a model; expected and actual printed."""
    from loka_toolkit.workflows.check_table import check_table_file
    from loka_toolkit.workflows.lines import check_lines

    result = check_table_file(table, model=model, safety=safety, fail_on=fail_on)
    emit(result, as_json=json, quiet=quiet, lines=check_lines(result))
    for line in result.warnings:
        warn(line)
    leave(result.exit_code, result.reasons)
