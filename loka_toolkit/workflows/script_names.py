"""What a script calls its models."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

from torch import nn

_WRAPPED = ("module", "_orig_mod")
"""Attributes by which DataParallel, DistributedDataParallel and torch.compile hold a model."""


def name_in_script(module: nn.Module, variables: Mapping[str, Any], file: str) -> str | None:
    """Return the name of the variable that holds a module, or the module that it wraps.

    Args:
        module: The module.
        variables: Global variables of the script; they come first.
        file: File of the script: local variables of its functions that are running come next.
    """
    for target in _and_what_it_wraps(module):
        for scope in (variables, *_local_variables(file)):
            for name, value in list(scope.items()):
                if value is target and not name.startswith("_") and name != "self":
                    return name
    return None


def _and_what_it_wraps(module: nn.Module) -> Iterator[nn.Module]:
    current: Any = module
    while isinstance(current, nn.Module):
        yield current
        held = [current._modules[name] for name in _WRAPPED if name in current._modules]
        is_wrapper = len(current._modules) == 1 and len(held) == 1
        current = held[0] if is_wrapper else None


def _local_variables(file: str) -> Iterator[Mapping[str, Any]]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == file and frame.f_code.co_name != "<module>":
            yield frame.f_locals
        frame = frame.f_back
