"""Which routed module is running in this thread, and whether its products are being caught.

A frame is the innermost routed module that is running. Products are caught by a function mode
that stands on torch's stack only while the innermost frame has products to route: whatever runs
in a frame without any, such as a child that is a plain network, pays nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


class _State(threading.local):
    """The frame of this thread, the mode that catches for it, and whether that one is on.

    ``saves_with`` is what torch.utils.checkpoint had in place when the frame began.
    """

    module: nn.Module | None = None
    route: Any = None
    saves_with: Any = None
    mode: TorchFunctionMode | None = None
    is_on: bool = False


STATE = _State()


def run_in_frame(
    module: nn.Module,
    route: Any,
    new_mode: Callable[[], TorchFunctionMode] | None,
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run a callable with another innermost frame, and put the previous one back.

    Args:
        module: The module that runs.
        route: Its route; None where nothing in it is to be caught.
        new_mode: Makes the mode of a thread that has none; None only where ``route`` is.
        call: What runs.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    state = STATE
    before = state.module, state.route, state.saves_with
    was_on = state.is_on
    if state.mode is None and new_mode is not None:
        state.mode = new_mode()
    state.module, state.route = module, route
    if route is not None:
        state.saves_with = _checkpoint()
    if route is not None and not was_on:
        _switch_on(state)
    elif route is None and was_on:
        _switch_off(state)
    try:
        return call(*args, **kwargs)
    finally:
        state.module, state.route, state.saves_with = before
        if state.is_on and not was_on:
            _switch_off(state)
        elif was_on and not state.is_on:
            _switch_on(state)


def is_catching() -> bool:
    """Return whether products of this thread are being caught."""
    return STATE.is_on


def is_checkpointed_part() -> bool:
    """Return whether a checkpoint began within the innermost frame and has not ended.

    What it covers is computed again in backward, when no module is running: a product that was
    routed the first time would not be the second time, and autograd insists that both save alike.
    """
    return _checkpoint() is not STATE.saves_with


def _checkpoint() -> Any:
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None or "checkpoint" not in getattr(hooks[0], "__qualname__", ""):
        return None
    return hooks[0]


def _switch_on(state: _State) -> None:
    if state.mode is not None:
        state.mode.__enter__()  # type: ignore[no-untyped-call]
        state.is_on = True


def _switch_off(state: _State) -> None:
    """Take the mode off the stack; where another one stands above it, it stays and lets pass."""
    top = torch.overrides._get_current_function_mode()  # type: ignore[no-untyped-call]
    if state.mode is not None and top is state.mode:
        state.mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        state.is_on = False
