from __future__ import annotations

import os
import signal

import pytest
import typer

from loka_toolkit.console import EXIT_INTERRUPTED, emit, guarded, printable
from loka_toolkit.errors import NoEvidenceError, UnknownNameError


def test_an_interrupt_that_compiled_code_swallows_still_ends_the_command():
    before = signal.getsignal(signal.SIGINT)

    @guarded
    def command() -> str:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(10_000):
                pass
        except KeyboardInterrupt:
            pass  # as a callback of a compiler may
        return "done"

    with pytest.raises(typer.Exit) as caught:
        command()
    assert caught.value.exit_code == EXIT_INTERRUPTED
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    ("error", "code"), [(NoEvidenceError("x\ny"), 1), (UnknownNameError("recipe", "a", ["b"]), 2)]
)
def test_our_errors_are_one_line_and_their_own_code(error, code, capsys):
    @guarded
    def command() -> None:
        raise error

    with pytest.raises(typer.Exit) as caught:
        command()
    assert caught.value.exit_code == code
    assert capsys.readouterr().err.count("\n") == 1


def test_other_errors_are_named_without_a_traceback(capsys):
    @guarded
    def command() -> None:
        raise ZeroDivisionError("why")

    with pytest.raises(typer.Exit):
        command()
    assert capsys.readouterr().err.startswith("error: internal error: ZeroDivisionError: why")


def test_names_cannot_drive_the_terminal(capsys):
    hostile = "a\x1b[31m\u202e\nb"
    assert printable(hostile) == "a\\x1b[31m\\u202e\\nb"
    emit(None, as_json=False, quiet=False, lines=[hostile, "é ✓ 中"])
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "é ✓ 中" in out
