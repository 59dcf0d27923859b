"""Sees, in all of PyTorch, which module begins a forward and which optimizer steps.

Placed once for a whole training script, so it is cheap: modules inside of a running one are passed
on at once, and what is compiled is left to the compiler.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)


class Follower(Protocol):
    """Is told what happens; what it raises passes through to the training script."""

    def is_followed(self, module: nn.Module) -> bool:
        """Whether a module is trained, as far as is known."""

    def begin_forward(self, module: nn.Module) -> None:
        """A forward of a followed module, inside of no other one, with gradients, begins."""

    def end_step(self, optimizer: Optimizer, loss_scale: torch.Tensor | None) -> None:
        """An optimizer has stepped."""

    def skip_step(self, optimizer: Optimizer) -> None:
        """A gradient scaler found Inf or NaN, so the optimizer did not step."""

    def note_other_thread(self) -> None:
        """A module was called with gradients in another thread."""


class Scout:
    """Stands in for parts of PyTorch while a script runs.

    Args:
        follower: Who is told.
    """

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._is_running = False
        self._is_installed = False
        self._thread = 0
        self._process = 0
        self._depth: dict[int, int] = {}
        self._scales: dict[int, torch.Tensor] = {}
        self._undo: list[Callable[[], None]] = []

    def optimizers(self) -> Iterator[Optimizer]:
        """Yield every optimizer that is alive, oldest first."""
        for reference in self._optimizers:
            optimizer = reference()
            if optimizer is not None:
                yield optimizer

    def install(self) -> None:
        """Begin to look; the calling thread is the one that is followed."""
        self._thread, self._process = threading.get_ident(), os.getpid()
        self._is_installed = True
        self._replace(nn.Module, "__call__", self._call)
        self._replace(Optimizer, "__init__", self._init)
        self._replace(torch.amp.GradScaler, "step", self._scaled_step)
        handles = (
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        )
        self._undo += [handle.remove for handle in handles]

    def remove(self) -> None:
        """Restore what was replaced; where somebody wrapped it, it only passes on from now on."""
        self._is_installed = False
        while self._undo:
            self._undo.pop()()

    def _replace(
        self, owner: type, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        original = owner.__dict__[name]
        replacement = make(original)
        setattr(owner, name, replacement)

        def restore() -> None:
            if owner.__dict__.get(name) is replacement:
                setattr(owner, name, original)

        self._undo.append(restore)

    def _is_here(self) -> bool:
        """Whether this is the thread and the process that are followed: no worker, no fork."""
        return (
            self._is_installed
            and threading.get_ident() == self._thread
            and os.getpid() == self._process
        )

    # Forwards

    def _call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self._is_running or not self._begins(module):
                return original(module, *args, **kwargs)
            self._is_running = True
            self._depth.clear()  # of steps that raised
            try:
                self._follower.begin_forward(module)
                return original(module, *args, **kwargs)
            finally:
                self._is_running = False

        return call

    def _begins(self, module: nn.Module) -> bool:
        if not torch.is_grad_enabled() or not self._is_installed:
            return False
        if not self._is_here():
            self._follower.note_other_thread()
            return False
        # Inside of backward, activation checkpointing calls modules again.
        return torch._C._current_autograd_node() is None and self._follower.is_followed(module)

    # Optimizers

    def _init(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def init(optimizer: Optimizer, /, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            self._register(optimizer)

        return init

    def _register(self, optimizer: Optimizer) -> None:
        if self._is_installed and all(known is not optimizer for known in self.optimizers()):
            self._optimizers = [known for known in self._optimizers if known() is not None]
            self._optimizers.append(weakref.ref(optimizer))

    def _before_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        # A class whose step calls that of its base class runs the hooks of both.
        self._register(optimizer)
        self._depth[id(optimizer)] = self._depth.get(id(optimizer), 0) + 1

    def _after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        depth = self._depth.pop(id(optimizer), 1) - 1
        if depth > 0:
            self._depth[id(optimizer)] = depth
        elif self._is_here():
            scale = self._scales.pop(id(optimizer), None)
            # Fused optimizers are called even so, and leave the parameters as they are.
            found = getattr(optimizer, "found_inf", None)
            if isinstance(found, torch.Tensor) and bool(found.any()):
                self._follower.skip_step(optimizer)
            else:
                self._follower.end_step(optimizer, scale)

    def _scaled_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(
            scaler: torch.amp.GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any
        ) -> Any:
            scale = getattr(scaler, "_scale", None)
            if not self._is_here() or not scaler.is_enabled() or scale is None:
                return original(scaler, optimizer, *args, **kwargs)
            self._scales[id(optimizer)] = scale.detach().clone()
            result = original(scaler, optimizer, *args, **kwargs)
            if self._scales.pop(id(optimizer), None) is not None:
                self._follower.skip_step(optimizer)
            return result

        return step
