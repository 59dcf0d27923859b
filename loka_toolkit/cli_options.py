"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no text.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite what is there.")]
Seed = Annotated[int, typer.Option(help="Same inputs, seed and versions give the same result.")]
Config = Annotated[
    Path | None, typer.Option(help="Settings file; default: loka.toml here, if there is one.")
]
Include = Annotated[
    list[str] | None, typer.Option(help="Only sites that match this glob (repeatable).")
]
Exclude = Annotated[
    list[str] | None, typer.Option(help="No sites that match this glob (repeatable).")
]
FailOn = Annotated[
    str | None,
    typer.Option(
        help="Exit 3 or 4 on: unsafe, insufficient, regression:BASELINE (comma-separated)."
    ),
]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a trace.")]
SafetyArgument = Annotated[Path, typer.Argument(metavar="SAFETY", help="A safety map.")]
TableArgument = Annotated[Path, typer.Argument(metavar="TABLE", help="A dispatch table.")]
