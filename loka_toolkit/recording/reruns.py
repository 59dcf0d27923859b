"""Whether a graph may be run, or read, once more than the training script does: nobody may notice.

Hooks of the script would run again with every pass of our own: they may count, change gradients, or
add to the gradient that an activation retains. What a hook has packed may be there to be unpacked
once only; unpacking a checkpoint computes its block anew, which draws random numbers and moves the
running statistics of batch normalizations.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

HOOKED = "the script placed hooks during the step, which are not run twice"
RETAINED = "the script retains gradients of activations, to which another pass would add"
PACKED = (
    "hooks pack what is saved for backward (activation checkpointing, offloading), which is not "
    "unpacked twice"
)

_RAW = "_raw_saved_"
_HARMLESS = "save_on_cpu."
"""PyTorch's own hooks that only copy, by their qualified name."""


class HookWatch:
    """Notices hooks that are placed on tensors and nodes, and gradients retained by activations.

    PyTorch tells neither of a node. But it numbers the handles of hooks, and whose activations
    retain their gradient has asked for it. Counts are of the process, and never go down.
    """

    def __init__(self) -> None:
        self._ours = 0
        self._retained = 0
        self._watchers = 0

    def install(self) -> None:
        """Begin to notice retained gradients."""
        self._watchers += 1
        if self._watchers > 1:
            return

        def retain_grad(tensor: torch.Tensor) -> None:
            self._retained += not tensor.is_leaf
            torch._C.TensorBase.retain_grad(tensor)

        torch.Tensor.retain_grad = retain_grad  # type: ignore[method-assign, assignment]

    def remove(self) -> None:
        """Notice them no more; the last one leaves PyTorch as it was."""
        self._watchers -= 1
        if self._watchers == 0:
            del torch.Tensor.retain_grad

    @contextlib.contextmanager
    def of_our_own(self) -> Iterator[None]:
        """Place hooks that harm nobody."""
        before = int(RemovableHandle.next_id)
        try:
            yield
        finally:
            self._ours += int(RemovableHandle.next_id) - before

    def mark(self) -> tuple[int, int]:
        """Return what :meth:`since` compares with."""
        return int(RemovableHandle.next_id) - self._ours, self._retained

    def since(self, mark: tuple[int, int]) -> str | None:
        """Return what the script placed since a mark, in words, or None."""
        hooks, retained = self.mark()
        if retained != mark[1]:
            return RETAINED
        return HOOKED if hooks != mark[0] else None


HOOK_WATCH = HookWatch()
"""The one of this process."""


def why_packed(nodes: Iterable[Any]) -> str | None:
    """Return why what some nodes saved may not be read or used an extra time, or None."""
    for node in nodes:
        for name in dir(node):
            if name.startswith(_RAW) and any(map(_is_packed, _saved(node, name))):
                return PACKED
    return None


def _saved(node: Any, name: str) -> tuple[Any, ...]:
    saved = getattr(node, name)
    return tuple(saved) if isinstance(saved, tuple | list) else (saved,)


def _is_packed(saved: Any) -> bool:
    hook = None if saved is None else saved.unpack_hook
    if hook is None:
        return False
    is_of_torch = getattr(hook, "__module__", None) == torch.autograd.graph.__name__
    return not (is_of_torch and hook.__qualname__.startswith(_HARMLESS))
