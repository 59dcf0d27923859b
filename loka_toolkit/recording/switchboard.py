"""One dispatch mode for every recorder that is open: hands each operator to whom it belongs.

Modes of several recorders, stacked, could only be removed in the order in which they were placed;
and each would take the products of the other's model for its own. So there is one mode, which asks
of every product whose it is: the model whose parameter it multiplies, else the innermost model that
is running, else, in backward, the model whose forward product made the node.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from loka_toolkit.recording.callers import is_inside_function
from loka_toolkit.recording.operators import NORMS, is_unseen_work, unseen_flops
from loka_toolkit.recording.reruns import HOOK_WATCH
from loka_toolkit.recording.storages import StorageRegistry
from loka_toolkit.recording.work import is_work, work_of

OUTSIDE = "outside of every model that is recorded"
"""Why a product is no site while several models are recorded: it is of none of them."""

MODE_STAYS = (
    "another TorchDispatchMode was pushed during a recorded step and still stands; the recorder's "
    "mode stays below it, switched off, until that one is gone"
)


class Listener(Protocol):
    """Looks at operators on behalf of one model during one step."""

    @property
    def model(self) -> nn.Module:
        """The model."""

    def look(
        self,
        func: torch._ops.OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        sequence: int,
    ) -> None:
        """Look at an operator that has run; never raises."""

    def leave_out(self, reason: str, flops: float) -> None:
        """Count a product that belongs to no model."""


class Fence:
    """What is a model's: its parameters, and what runs inside of its modules.

    Args:
        model: The model.
        running: Fences of the modules that are running, outermost first; shared by all fences.
    """

    def __init__(self, model: nn.Module, running: list[Fence]) -> None:
        self.model = model
        self.parameters = {id(parameter) for parameter in model.parameters()}
        self._running = running
        self._registry = StorageRegistry()
        self._storages = {
            self._registry.name(parameter)
            for parameter in model.parameters()
            if type(parameter) in (torch.Tensor, nn.Parameter) and parameter.numel()
        } - {0}
        self._handles: list[Any] = []
        for module in model.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                self._handles.append(module.register_forward_pre_hook(self._enter))
                self._handles.append(module.register_forward_hook(self._leave, always_call=True))

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._running[:] = [fence for fence in self._running if fence is not self]

    def holds(self, x: torch.Tensor) -> bool:
        """Whether a tensor shows the memory of one of the model's parameters."""
        return (
            type(x) in (torch.Tensor, nn.Parameter)
            and x.layout is torch.strided
            and int(x.untyped_storage()._cdata) in self._storages
        )

    def _enter(self, _module: nn.Module, _args: Any) -> None:
        self._running.append(self)

    def _leave(self, _module: nn.Module, _args: Any, _out: Any) -> None:
        for place in reversed(range(len(self._running))):
            if self._running[place] is self:
                del self._running[place:]
                return


class Switchboard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The mode; there is one per process, :data:`SWITCHBOARD`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._listeners: list[tuple[Listener, int]] = []
        self._announced: list[nn.Module] = []
        self._fences: list[Fence] = []
        self._running: list[Fence] = []
        self._owners: dict[int, Fence] = {}

    def connect(self, listener: Listener) -> None:
        """Hand operators to a listener from now on."""
        self._listeners.append((listener, _next_sequence()))
        self._place_fences()
        if not self._stands():
            self.__enter__()  # type: ignore[no-untyped-call]

    def disconnect(self, listener: Listener) -> bool:
        """Hand nothing to a listener any more.

        Returns:
            False if the mode still stands though nobody listens, because another mode stands above
            it; try again once that one is gone.
        """
        self._listeners = [entry for entry in self._listeners if entry[0] is not listener]
        if self._listeners:
            oldest = min(since for _, since in self._listeners)
            self._owners = {s: owner for s, owner in self._owners.items() if s >= oldest}
            return True
        for fence in self._fences:
            fence.remove()
        self._fences.clear()
        self._running.clear()
        self._owners.clear()
        stack = _get_current_dispatch_mode_stack()
        if stack and stack[-1] is self:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return not self._stands()

    def announce(self, model: nn.Module) -> None:
        """Take note of a model of its own: what belongs to it belongs to no other one."""
        self._announced.append(model)
        if self._listeners:
            self._place_fences()

    def withdraw(self, model: nn.Module) -> None:
        """Forget a model that was announced."""
        for place, known in enumerate(self._announced):
            if known is model:
                del self._announced[place]
                return

    def concerns(self, model: nn.Module, tensors: Any) -> bool:
        """Whether what is about to be differentiated depends on a model.

        True also where the graph shows no model at all, as with reentrant checkpointing.
        """
        if len(self._fences) < 2:
            return True
        leaves = [x for x in tree_leaves(tensors) if isinstance(x, torch.Tensor)]
        pending: list[Any] = [x.grad_fn for x in leaves if x.grad_fn is not None]
        seen = set(pending)
        is_of_others = False
        while pending:
            node = pending.pop()
            variable = getattr(node, "variable", None)
            owner = self._owners.get(int(node._sequence_nr()))
            if owner is None and variable is not None:
                owners = [f for f in self._fences if id(variable) in f.parameters]
                owner = next((f for f in owners if f.model is model), next(iter(owners), None))
            if owner is not None and owner.model is model:
                return True
            is_of_others = is_of_others or owner is not None
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    pending.append(following)
        return not is_of_others

    def forget(self) -> None:
        """Hand nothing to anybody: this process is a fork, and the trace is its parent's."""
        self._listeners.clear()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator, then show it; what it raises passes through untouched."""
        kwargs = kwargs or {}
        if not self._listeners or not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        # The number of the node that autograd made for this operator, if it made one.
        sequence = _next_sequence() - 1
        out = func(*args, **kwargs)
        listeners = [listener for listener, _ in self._listeners]
        if _is_counted(func):
            owner = self._owner(args, sequence, torch.is_grad_enabled())
            if owner is not None:
                listeners = [one for one in listeners if one.model is owner.model]
            elif len(self._fences) > 1:
                flops = _flops(func, args, kwargs, out)
                for listener in listeners:
                    if flops is not None:
                        listener.leave_out(OUTSIDE, flops)
                return out
        for listener in listeners:
            listener.look(func, args, kwargs, out, sequence)
        return out

    def _owner(self, args: tuple[Any, ...], sequence: int, has_gradients: bool) -> Fence | None:
        tensors = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
        owner = next((f for f in self._fences if any(map(f.holds, tensors))), None)
        if owner is None and self._running:
            owner = self._running[-1]
        node: Any = torch._C._current_autograd_node()
        if owner is None and node is not None:
            return self._owners.get(int(node._sequence_nr()))
        if owner is None and len(self._fences) == 1:
            owner = self._fences[0]
        if owner is None:
            return None
        # A custom function computes without gradients; what was numbered last is its own node.
        is_numbered = (
            any(x.requires_grad for x in tensors) if has_gradients else (is_inside_function())
        )
        if is_numbered:
            self._owners.setdefault(sequence, owner)
        return owner

    def _place_fences(self) -> None:
        models = [*self._announced, *(listener.model for listener, _ in self._listeners)]
        fenced = {id(fence.model) for fence in self._fences}
        for model in models:
            if id(model) not in fenced:
                fenced.add(id(model))
                with HOOK_WATCH.of_our_own():
                    self._fences.append(Fence(model, self._running))

    def _stands(self) -> bool:
        return any(mode is self for mode in _get_current_dispatch_mode_stack())


SWITCHBOARD = Switchboard()
"""The one of this process."""


class BackwardTap:
    """Shows what ``torch.autograd.backward`` is given to everybody who asks; one per process."""

    def __init__(self) -> None:
        self._looks: list[Callable[[Any, Any], None]] = []
        self._original: Callable[..., None] | None = None
        self._replacement: Callable[..., None] | None = None

    def add(self, look: Callable[[Any, Any], None]) -> None:
        """Call ``look`` with the first two arguments of every outermost call."""
        self._looks.append(look)
        if self._replacement is None:
            self._stand_in()

    def remove(self, look: Callable[[Any, Any], None]) -> None:
        """Call it no more; the last one restores PyTorch's function."""
        if look in self._looks:
            self._looks.remove(look)
        if not self._looks and self._replacement is not None:
            if torch.autograd.backward is self._replacement:
                assert self._original is not None
                torch.autograd.backward = self._original
            # Where somebody wrapped the wrapper, it only passes on from now on.
            self._original = self._replacement = None

    def forget(self) -> None:
        """Show nothing to anybody: this process is a fork."""
        self._looks.clear()

    def _stand_in(self) -> None:
        original = torch.autograd.backward

        @functools.wraps(original)
        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> None:
            if self._replacement is backward and torch._C._current_autograd_node() is None:
                for look in tuple(self._looks):
                    look(tensors, grad_tensors)
            original(tensors, grad_tensors, *args, **kwargs)

        self._original, self._replacement = original, backward
        torch.autograd.backward = backward


BACKWARD_TAP = BackwardTap()
"""The one of this process."""


def _is_counted(func: torch._ops.OpOverload) -> bool:
    """Whether an operator may become a site or unseen work, rather than be followed only."""
    return is_work(func) or is_unseen_work(func) or func.overloadpacket in NORMS


def _flops(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
) -> float | None:
    if func.overloadpacket in NORMS:
        return None
    work = work_of(func, args, kwargs, out)
    return work.flops if work else unseen_flops(func.overloadpacket, args, kwargs, out)


def _next_sequence() -> int:
    return int(torch._C._autograd._get_sequence_nr())


def _forget_in_fork() -> None:
    SWITCHBOARD.forget()
    BACKWARD_TAP.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_fork)
