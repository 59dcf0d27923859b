"""``loka record``: records an unmodified training script."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperOption

from loka_toolkit.cli_options import Exclude, Force, Include, Json, Quiet, Seed
from loka_toolkit.console import emit_on_stderr, fail, guarded, stdout_kept_free
from loka_toolkit.errors import ConfigurationError

_MODULE = ("-m", "--module")

HELP = (
    "Run a training script, unchanged, and record every model that it trains."
    "\n\n"
    "Put `loka record` where `python` stands: loka record -o RUN train.py --epochs 3, or "
    "loka record -o RUN -m package.train --epochs 3. Options of loka come before the script."
    "\n\n"
    "Steps are counted at optimizer steps; the loss is read off the graph at backward. A model is "
    "what is called with gradients and held by an optimizer. Models of different optimizers are "
    "told apart and recorded to RUN/NAME each; a single one to RUN itself."
    "\n\n"
    "What the script prints is left alone; the result comes on stderr. With --json the result is "
    "all of stdout, and what the script prints goes to stderr. Exits 1 if the script fails, naming "
    "its own code, or if it trained nothing."
)


class EndsWhereTheScriptBegins(TyperCommand):
    """Leaves everything after the script, or after ``-m MODULE``, to the script, as Python does."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse our own options only."""
        valued = {
            name
            for parameter in self.params
            if isinstance(parameter, TyperOption) and not parameter.is_flag
            for name in parameter.opts
        }
        place = 0
        while place < len(args) and args[place].startswith("-") and args[place] != "--":
            argument = args[place]
            place += 2 if argument in valued else 1
            is_module = argument in _MODULE or argument.startswith("--module=")
            if is_module or (argument.startswith("-m") and not argument.startswith("--")):
                args = [*args[:place], "--", *args[place:]]
                break
        return super().parse_args(ctx, args)


@guarded
def record(
    program: Annotated[
        list[str] | None,
        typer.Argument(metavar="SCRIPT ARGS", help="The training script and its arguments."),
    ] = None,
    module: Annotated[
        str | None, typer.Option(*_MODULE, help="Run a module, as python -m does.")
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The trace, or a directory of one per model.")
    ] = Path("loka-run"),
    recipe: Annotated[
        list[str] | None, typer.Option(help="Answer for this recipe (repeatable).")
    ] = None,
    include: Include = None,
    exclude: Exclude = None,
    model: Annotated[
        str | None, typer.Option(help="Record only the model of this name: variable or class.")
    ] = None,
    first: Annotated[int, typer.Option(min=0, help="Record so many steps in a row,")] = 20,
    every: Annotated[
        int, typer.Option(min=0, help="then every so many; 0 to record no more.")
    ] = 1000,
    seed: Seed = 0,
    json: Json = False,
    quiet: Quiet = False,
    force: Force = False,
) -> None:
    """Parse, run, print what was recorded."""
    from loka_toolkit.recording.schedule import Schedule
    from loka_toolkit.workflows.lines import script_lines
    from loka_toolkit.workflows.record_script import ScriptOptions, record_script
    from loka_toolkit.workflows.script_program import Program

    arguments = list(program or ())
    if module is None and not arguments:
        raise ConfigurationError("name a script, or a module after -m: loka record train.py")
    target = module if module is not None else arguments.pop(0)
    chosen = {"recipes": tuple(recipe)} if recipe else {}
    options = ScriptOptions(
        out=out,
        schedule=Schedule(warm_steps=first, every=every or None),
        include=tuple(include or ()),
        exclude=tuple(exclude or ()),
        model=model,
        seed=seed,
        force=force,
        **chosen,
    )
    with stdout_kept_free() if json else contextlib.nullcontext():
        summary = record_script(Program(target, arguments, is_module=module is not None), options)
    if summary.rank == 0:
        emit_on_stderr(summary, as_json=json, quiet=quiet, lines=script_lines(summary))
    for complaint in summary.complaints:
        fail(complaint)
    if summary.exit_code:
        raise typer.Exit(summary.exit_code)
