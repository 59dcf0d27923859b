"""Who called the operator that was just seen: told from the Python frames above it.

Autograd computes gradients straight from C++, so between the engine's frame and the operator no
module runs. Where one does, or torch.utils.checkpoint, a forward is being computed anew.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterator, Mapping
from types import FrameType

import torch.autograd.function
import torch.autograd.graph
import torch.nn.modules.module
import torch.utils.checkpoint
from torch import nn

_ENGINE = torch.autograd.graph.__file__
_FUNCTION = torch.autograd.function.__file__
_CHECKPOINT = torch.utils.checkpoint.__file__
_MODULE = torch.nn.modules.module.__file__
_CALL = "_call_impl"
_COMPILED = "_TorchDynamoContext.__call__."


class Origin(enum.Enum):
    """What an operator that runs during backward belongs to."""

    GRADIENT = enum.auto()
    RECOMPUTE = enum.auto()


def origin_in_backward() -> Origin:
    """Return whether an operator inside of backward computes a gradient or a forward anew."""
    for frame in _frames():
        file = frame.f_code.co_filename
        if file == _ENGINE:
            return Origin.GRADIENT
        if file == _CHECKPOINT or (file == _MODULE and frame.f_code.co_name == _CALL):
            return Origin.RECOMPUTE
    return Origin.GRADIENT  # on a thread of the engine, which has no frames of its own


def is_inside_function() -> bool:
    """Whether a checkpoint or another custom function of autograd runs this forward."""
    return any(frame.f_code.co_filename in (_CHECKPOINT, _FUNCTION) for frame in _frames())


def is_inside_compiled() -> bool:
    """Whether a function compiled by torch.compile runs this forward, eagerly."""
    return any(frame.f_code.co_qualname.startswith(_COMPILED) for frame in _frames())


def innermost_module(names: Mapping[nn.Module, str]) -> str | None:
    """Return the path of the innermost module whose ``forward`` is running.

    Unlike hooks, this sees modules whose ``forward`` was called directly.

    Args:
        names: Paths of the modules that count.

    Returns:
        None where none of them was entered since the innermost module that was properly called.
    """
    for frame in _frames():
        code = frame.f_code
        if code.co_filename == _MODULE and code.co_name == _CALL:
            return None
        if code.co_name == "forward" and code.co_varnames[:1] == ("self",):
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module) and module in names:
                return names[module]
    return None


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
