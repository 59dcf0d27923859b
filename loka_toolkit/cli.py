"""``loka``: parses, calls one verb, prints; computes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from loka_toolkit import console
from loka_toolkit._version import __version__
from loka_toolkit.cli_options import (
    Config,
    Exclude,
    FailOn,
    Force,
    Include,
    Json,
    Quiet,
    RunArgument,
    SafetyArgument,
    Seed,
)
from loka_toolkit.cli_record import HELP, EndsWhereTheScriptBegins, record
from loka_toolkit.cli_table import table_app
from loka_toolkit.console import emit, guarded, leave
from loka_toolkit.settings import load_settings

app = typer.Typer(
    name="loka",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Find out, from your own training run, where FP8 is safe and where it pays.",
)
app.add_typer(table_app, name="table")
app.command(
    "record",
    help=HELP,
    cls=EndsWhereTheScriptBegins,
    context_settings={"allow_interspersed_args": False},
)(record)


def _version(show: bool) -> None:
    if show:
        print(f"loka {__version__}")
        raise typer.Exit


@app.callback()
def main_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="Show tracebacks of internal errors.")
    ] = False,
) -> None:
    """Options that stand before the command."""
    console.set_verbose(verbose)


@app.command()
@guarded
def demo(
    out: Annotated[Path, typer.Option(help="Where everything is written.")] = Path("loka-demo"),
    seed: Seed = 0,
    json: Json = False,
    quiet: Quiet = False,
    force: Force = False,
) -> None:
    """Train a small click model and walk the whole road, in about a minute."""
    from loka_toolkit.workflows.demo import run_demo
    from loka_toolkit.workflows.lines import demo_lines

    with console.progress_reporter(quiet or json) as progress:
        summary = run_demo(out, seed=seed, force=force, progress=progress)
    emit(summary, as_json=json, quiet=quiet, lines=demo_lines(summary))


@app.command()
@guarded
def trace(run: RunArgument, json: Json = False, quiet: Quiet = False) -> None:
    """Say what a trace holds and what it could not see."""
    from loka_toolkit.artifacts.trace import Trace
    from loka_toolkit.workflows.lines import trace_lines
    from loka_toolkit.workflows.summaries import summarize_trace

    summary = summarize_trace(Trace.open(run))
    emit(summary, as_json=json, quiet=quiet, lines=trace_lines(summary))


@app.command()
@guarded
def analyze(
    run: RunArgument,
    out: Annotated[Path, typer.Option("--out", "-o", help="The safety map.")] = Path(
        "safety.parquet"
    ),
    recipe: Annotated[
        list[str] | None, typer.Option(help="Consider this recipe only (repeatable).")
    ] = None,
    include: Include = None,
    exclude: Exclude = None,
    replay: Annotated[
        Path | None, typer.Option(help="Replay results: speed-ups are then measured.")
    ] = None,
    chip: Annotated[
        str | None, typer.Option(help="Predict speed-ups for this chip, for example H200.")
    ] = None,
    config: Config = None,
    seed: Seed = 0,
    fail_on: FailOn = None,
    json: Json = False,
    quiet: Quiet = False,
    force: Force = False,
) -> None:
    """Fit the error model and say, per site and recipe, whether FP8 is safe."""
    from loka_toolkit.workflows import steps
    from loka_toolkit.workflows.gate import judge_gate, parse_fail_on
    from loka_toolkit.workflows.lines import map_lines
    from loka_toolkit.workflows.summaries import summarize_map

    gate = parse_fail_on(fail_on)
    settings = load_settings(config)
    with console.progress_reporter(quiet or json) as progress:
        safety = steps.analyze_run(
            run,
            out,
            settings=settings,
            recipes=recipe,
            include=include,
            exclude=exclude,
            replay=replay,
            chip=chip,
            seed=seed,
            force=force,
            progress=progress,
        )
    summary = summarize_map(safety)
    lines = [*map_lines(summary, safety), "", f"safety map: {out}"]
    emit(summary, as_json=json, quiet=quiet, lines=lines)
    result = judge_gate(gate, safety)
    leave(result.exit_code, result.reasons)


@app.command()
@guarded
def report(
    safety: SafetyArgument,
    out: Annotated[Path, typer.Option("--out", "-o", help="The HTML file.")] = Path("report.html"),
    trace: Annotated[Path | None, typer.Option(help="The trace: adds distributions.")] = None,
    replay: Annotated[Path | None, typer.Option(help="Replay results: adds kernels.")] = None,
    table: Annotated[Path | None, typer.Option(help="A dispatch table: adds entries.")] = None,
    top: Annotated[int, typer.Option(min=1, help="Sites drawn in detail.")] = 20,
    fail_on: FailOn = None,
    json: Json = False,
    quiet: Quiet = False,
    force: Force = False,
) -> None:
    """Write the safety report: one HTML file that needs nothing else."""
    from loka_toolkit.artifacts.safety_map import SafetyMap
    from loka_toolkit.reporting import write_report
    from loka_toolkit.workflows.gate import judge_gate, parse_fail_on

    gate = parse_fail_on(fail_on)
    path = write_report(out, safety, trace=trace, replay=replay, table=table, top=top, force=force)
    emit({"report": str(path)}, as_json=json, quiet=quiet, lines=[f"report: {path}"])
    result = judge_gate(gate, SafetyMap.load(safety))
    leave(result.exit_code, result.reasons)


@app.command()
@guarded
def replay(
    run: RunArgument,
    out: Annotated[Path, typer.Option("--out", "-o", help="Results; resumed if there.")] = Path(
        "replay.parquet"
    ),
    candidate: Annotated[
        list[str] | None, typer.Option(help="Candidate name or glob (repeatable).")
    ] = None,
    include: Include = None,
    exclude: Exclude = None,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda; default: the GPU if any.")
    ] = None,
    policy: Annotated[str | None, typer.Option(help="Name of a timing policy.")] = None,
    draws: Annotated[int, typer.Option(min=1, help="Fresh inputs judged per row.")] = 2,
    seed: Seed = 0,
    json: Json = False,
    quiet: Quiet = False,
    force: Force = False,
) -> None:
    """Run the traced GEMMs through candidate kernels, on inputs drawn from recorded moments."""
    from loka_toolkit.harness import replay as run_replay
    from loka_toolkit.workflows.lines import replay_lines
    from loka_toolkit.workflows.summaries import summarize_replay

    with console.progress_reporter(quiet or json) as progress:
        results = run_replay(
            run,
            out,
            candidates=candidate,
            include=tuple(include or ()),
            exclude=tuple(exclude or ()),
            device=device,
            policy=policy,
            draws=draws,
            seed=seed,
            force=force,
            progress=progress,
        )
    summary = summarize_replay(results)
    emit(summary, as_json=json, quiet=quiet, lines=[*replay_lines(summary), "", f"results: {out}"])


@app.command()
@guarded
def estimate(
    run: RunArgument,
    chip: Annotated[str, typer.Option(help="H200, H100, B200 or MI300X; it need not be here.")],
    step_ms: Annotated[
        float | None,
        typer.Option(
            help="Milliseconds of one optimizer step in 16 bits on that chip: the ceiling then "
            "speaks of the whole step.",
        ),
    ] = None,
    recipe: Annotated[
        list[str] | None, typer.Option(help="Consider this recipe only (repeatable).")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Say how much FP8 could gain at most, by layer and in all, without the GPU."""
    from loka_toolkit.harness import estimate as predict
    from loka_toolkit.workflows.lines import estimate_lines

    forecast = predict(run, chip=chip, recipes=recipe, step_ms=step_ms)
    document = {"ceiling": forecast.ceiling, "gains": forecast.ceiling.gains()}
    emit(
        document | {"sites": forecast.sites},
        as_json=json,
        quiet=quiet,
        lines=estimate_lines(forecast),
    )


@app.command()
@guarded
def env(json: Json = False, quiet: Quiet = False) -> None:
    """Print the fingerprint of this environment and which candidates it offers."""
    from loka_toolkit.workflows.inspect_environment import describe_environment
    from loka_toolkit.workflows.lines import environment_lines

    description = describe_environment()
    emit(description, as_json=json, quiet=quiet, lines=environment_lines(description))


def main() -> None:
    """Entry point of the ``loka`` command."""
    app()


if __name__ == "__main__":
    main()
