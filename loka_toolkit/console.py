"""How the command line speaks: results on stdout, progress and errors on stderr."""

from __future__ import annotations

import atexit
import functools
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from types import FrameType
from typing import Any, ParamSpec, TypeVar

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from loka_toolkit.errors import LokaError

EXIT_ERROR = 1
EXIT_INTERRUPTED = 130

_P = ParamSpec("_P")
_R = TypeVar("_R")
_verbose = False

ProgressCallback = Callable[[str, int, int], None]
"""Called with the name of a stage, how much of it is done, and how much there is."""


def set_verbose(verbose: bool) -> None:
    """Choose whether an unforeseen error prints its traceback."""
    global _verbose
    _verbose = verbose


def guarded(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Turn our own errors, and an interrupt, into one line on stderr and an exit code."""

    @functools.wraps(function)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            with _noticed_interrupt():
                return function(*args, **kwargs)
        except LokaError as error:
            fail(str(error))
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            fail("interrupted; files that were written are complete")
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except BrokenPipeError:
            # The reader of a pipe has left, as `head` does: nobody is there to be told.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(EXIT_ERROR) from None
        except typer.Exit:
            raise
        except Exception as error:
            fail(f"internal error: {type(error).__name__}: {error} (-v shows the traceback)")
            if _verbose:
                traceback.print_exc()
            raise typer.Exit(EXIT_ERROR) from None

    return wrapper


@contextmanager
def _noticed_interrupt() -> Iterator[None]:
    """Interrupt as Python does, and once more at the end if compiled code swallowed it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupted = False
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
    if interrupted:
        raise KeyboardInterrupt


def fail(message: str) -> None:
    """Print one error line on stderr."""
    print(f"error: {printable(' '.join(message.split()))}", file=sys.stderr)


def warn(message: str) -> None:
    """Print one warning line on stderr."""
    print(f"warning: {printable(' '.join(message.split()))}", file=sys.stderr)


def leave(exit_code: int, reasons: Sequence[str]) -> None:
    """Leave with the exit code of a gate, its reasons on stderr; return if it passed."""
    for reason in reasons:
        warn(reason)
    if exit_code:
        raise typer.Exit(exit_code)


def emit(value: Any, *, as_json: bool, quiet: bool, lines: Sequence[str] = ()) -> None:
    """Print a result: as one JSON document, as lines for people, or not at all.

    Args:
        value: What ``--json`` prints; anything that msgspec encodes.
        as_json: Print JSON, whatever ``quiet`` says.
        quiet: Print nothing for people.
        lines: What people read.
    """
    if as_json:
        encoded = msgspec.json.format(msgspec.json.encode(value), indent=2)
        print(encoded.decode())
    elif not quiet:
        for line in lines:
            print(printable(line))


def emit_on_stderr(value: Any, *, as_json: bool, quiet: bool, lines: Sequence[str] = ()) -> None:
    """Print a result as :func:`emit` does, lines for people on stderr: stdout is a script's."""
    if as_json:
        emit(value, as_json=True, quiet=quiet)
    elif not quiet:
        for line in lines:
            print(printable(line), file=sys.stderr)


@contextmanager
def stdout_kept_free() -> Iterator[None]:
    """Send to stderr what a script, and any process it starts, prints on stdout, also at exit."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        # Registered last, it runs before what the script registered.
        atexit.register(_send_stdout_to_stderr)


def _send_stdout_to_stderr() -> None:
    sys.stdout.flush()
    os.dup2(2, 1)


def printable(text: str) -> str:
    """Return text whose control characters are spelled out: names in a trace may hold any."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def table_lines(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Return an aligned plain-text table as lines."""
    console = Console(width=_width(), color_system=None, force_terminal=False)
    table = Table(box=None, pad_edge=False, show_edge=False)
    for header in headers:
        table.add_column(header, overflow="fold", justify="left")
    for row in rows:
        table.add_row(*(("" if value is None else str(value)) for value in row))
    with console.capture() as capture:
        console.print(table, markup=False, highlight=False)
    return [line.rstrip() for line in capture.get().splitlines()]


@contextmanager
def progress_reporter(quiet: bool) -> Iterator[ProgressCallback]:
    """Yield a callback that draws bars on a terminal and prints plain lines in a log."""
    if quiet:
        yield lambda stage, done, total: None
        return
    if not sys.stderr.isatty():
        yield _plain_progress()
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, Any] = {}

        def draw(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=max(total, 1))
            bars.update(tasks[stage], completed=done, total=max(total, 1))

        yield draw


def _plain_progress() -> ProgressCallback:
    last: dict[str, int] = {}

    def print_line(stage: str, done: int, total: int) -> None:
        tenth = 10 * done // total if total else 10
        if last.get(stage) != tenth:
            last[stage] = tenth
            print(f"{stage}: {done}/{total}", file=sys.stderr, flush=True)

    return print_line


def _width() -> int:
    return Console().width if sys.stdout.isatty() else 160
