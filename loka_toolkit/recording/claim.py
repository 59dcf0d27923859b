"""One open recorder per process: what it places, in PyTorch and for the process, does not nest."""

from __future__ import annotations

import threading
from pathlib import Path

from loka_toolkit.errors import ConfigurationError

_lock = threading.Lock()
_holders: dict[int, Path] = {}
"""Path of the trace by identity of the recorder that is open; one entry at most."""


def claim(recorder: object, path: Path) -> None:
    """Make a recorder the open one.

    A dispatch mode of one recorder above that of another could not be removed in the order in
    which steps end, and the same holds for what stands in for ``torch.autograd.backward``.

    Args:
        recorder: The recorder that opens.
        path: Directory of its trace.

    Raises:
        ConfigurationError: If a recorder is open, be it in another thread.
    """
    with _lock:
        for other in _holders.values():
            raise ConfigurationError(
                f"cannot record to {path}: the recorder of {other} is still open; close it first, "
                "or name all recipes in it: one recorder answers for every recipe"
            )
        _holders[id(recorder)] = path


def release(recorder: object) -> None:
    """Give the claim back; does nothing where the recorder does not hold it."""
    with _lock:
        _holders.pop(id(recorder), None)
