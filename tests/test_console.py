from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from loka_toolkit.console import EXIT_INTERRUPTED, emit, guarded, printable
from loka_toolkit.errors import NoEvidenceError, UnknownNameError

ROOT = Path(__file__).resolve().parents[1]


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


def test_a_reader_that_leaves_is_no_error(tmp_path):
    script = tmp_path / "many_lines.py"
    script.write_text(
        "from loka_toolkit.console import emit, guarded\n"
        "guarded(lambda: emit(None, as_json=False, quiet=False, lines=['x' * 99] * 100_000))()\n"
    )
    process = subprocess.Popen(
        [sys.executable, script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None and process.stderr is not None
    with process:
        assert process.stdout.readline().strip() == "x" * 99
        process.stdout.close()
        assert "internal error" not in process.stderr.read()
