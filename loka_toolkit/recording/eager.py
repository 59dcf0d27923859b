"""Runs compiled code eagerly while a step is recorded, and compiled again afterwards.

Compiled code hides its products. Worse, a frame that torch.compile meets while a dispatch mode is
on is marked to be skipped for good, so that the model would stay uncompiled after the step.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

_DYNAMO = "torch._dynamo"


class EagerStance:
    """Forces eager execution; the user's stance comes back when the last one is removed."""

    _holders: int = 0
    _stance: Any = None

    def __init__(self) -> None:
        self._is_held = False

    def install(self) -> None:
        """Force eager execution, if anything can have been compiled at all."""
        if self._is_held or not is_compiler_loaded():
            return
        if EagerStance._stance is None:
            EagerStance._stance = torch.compiler.set_stance("force_eager")
        EagerStance._holders += 1
        self._is_held = True

    def remove(self) -> None:
        """Give the stance back."""
        if not self._is_held:
            return
        self._is_held = False
        EagerStance._holders -= 1
        if EagerStance._holders == 0:
            stance, EagerStance._stance = EagerStance._stance, None
            stance.__exit__(None, None, None)


def is_compiler_loaded() -> bool:
    """Whether torch.compile was ever called: it loads its compiler then."""
    return _DYNAMO in sys.modules
