"""Which recorders are open: each has a model, a directory and its place to itself."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path

from torch import nn

from loka_toolkit.errors import ConfigurationError
from loka_toolkit.recording.switchboard import SWITCHBOARD


@dataclasses.dataclass(frozen=True)
class _Claim:
    path: Path
    model: nn.Module
    thread: int


_lock = threading.Lock()
_claims: dict[int, _Claim] = {}
"""By identity of the recorder that is open."""

_launcher: str | None = None
"""The launcher that alone may open recorders, or None."""

_is_admitted = False


def claim(recorder: object, path: Path, model: nn.Module) -> None:
    """Note that a recorder opens.

    Args:
        recorder: The recorder.
        path: Directory of its trace.
        model: Its model.

    Raises:
        ConfigurationError: If a recorder of the same directory, of a model that shares a trained
            parameter, or of another thread is open; or if a launcher does the recording.
    """
    with _lock:
        if _launcher is not None and not _is_admitted:
            raise ConfigurationError(
                f"cannot record to {path}: this script runs under `{_launcher}`, which records it "
                f"already; take record() out of the script, or run it without `{_launcher}`"
            )
        thread = threading.get_ident()
        for other in _claims.values():
            reason = _conflict(other, path, model, thread)
            if reason is not None:
                raise ConfigurationError(
                    f"cannot record to {path}: the recorder of {other.path} is still open, and "
                    f"{reason}"
                )
        _claims[id(recorder)] = _Claim(path, model, thread)
        SWITCHBOARD.announce(model)


def release(recorder: object) -> None:
    """Give the claim back; does nothing where the recorder does not hold it."""
    with _lock:
        held = _claims.pop(id(recorder), None)
        if held is not None:
            SWITCHBOARD.withdraw(held.model)


@contextlib.contextmanager
def launching(name: str) -> Iterator[None]:
    """Let only this launcher open recorders.

    Args:
        name: What it is called in the message of a refusal.

    Raises:
        ConfigurationError: If a launcher is at work already, or a recorder is open.
    """
    global _launcher
    with _lock:
        if _launcher is not None:
            raise ConfigurationError(f"`{name}` runs inside of `{_launcher}` already; use one")
        for other in _claims.values():
            raise ConfigurationError(
                f"cannot start `{name}`: the recorder of {other.path} is still open; close it first"
            )
        _launcher = name
    try:
        yield
    finally:
        _launcher = None


@contextlib.contextmanager
def admitted() -> Iterator[None]:
    """Open a recorder on behalf of the launcher."""
    global _is_admitted
    _is_admitted = True
    try:
        yield
    finally:
        _is_admitted = False


def _conflict(other: _Claim, path: Path, model: nn.Module, thread: int) -> str | None:
    if other.path.resolve() == path.resolve():
        return "two recorders cannot write to one directory; name another path"
    if other.thread != thread:
        return "what a recorder places belongs to a thread; close it first"
    if other.model is model:
        return (
            "it records the same model; close it first, or name all recipes in it: one recorder "
            "answers for every recipe"
        )
    mine = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    for name, parameter in other.model.named_parameters():
        if parameter.requires_grad and id(parameter) in mine:
            return (
                f"its model shares parameter {name} with this one ({mine[id(parameter)]}); close "
                "it first, or record a module that contains both"
            )
    return None
