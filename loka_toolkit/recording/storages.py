"""Identity of tensors' memory without keeping the memory alive."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

_SAME_VALUES = frozenset(
    {
        "TBackward0",
        "TransposeBackward0",
        "PermuteBackward0",
        "ViewBackward0",
        "ReshapeAliasBackward0",
        "UnsqueezeBackward0",
        "SqueezeBackward0",
        "SqueezeBackward1",
        "SelectBackward0",
        "SliceBackward0",
        "ExpandBackward0",
        "AsStridedBackward0",
        "AliasBackward0",
        "ToCopyBackward0",
        "CloneBackward0",
    }
)
"""Nodes of views, copies and casts."""


class StorageRegistry:
    """Names storages by the address of their control block.

    A weak reference is held to every storage named, which keeps the control block, and not the
    data, from being freed: so no two storages named during the life of a registry share a name.
    """

    def __init__(self) -> None:
        self._held: dict[int, StorageWeakRef] = {}

    def name(self, x: torch.Tensor) -> int:
        """Return the name of a tensor's storage; a sparse tensor, which has none, gets 0."""
        if x.layout is not torch.strided:
            return 0
        storage = x.untyped_storage()
        name = int(storage._cdata)
        if name not in self._held:
            self._held[name] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        return name


@dataclasses.dataclass(frozen=True)
class ParameterPlace:
    """A parameter inside a storage.

    Attributes:
        fqn: The parameter's name, wrapper prefixes removed.
        first: Its first element's offset.
        last: The offset behind its last element.
    """

    fqn: str
    first: int
    last: int


class ParameterMap:
    """Finds the parameter that a tensor is a view or a cast of.

    Args:
        registry: Names the storages.
        parameters: Parameters by canonical name; of tied ones, only the first.
    """

    def __init__(self, registry: StorageRegistry, parameters: dict[str, torch.Tensor]) -> None:
        self._registry = registry
        self._places: dict[int, list[ParameterPlace]] = {}
        self._names = {id(parameter): fqn for fqn, parameter in parameters.items()}
        for fqn, parameter in parameters.items():
            if parameter.layout is not torch.strided or parameter.numel() == 0:
                continue
            first = int(parameter.storage_offset())
            extent = sum(
                (int(size) - 1) * int(stride)
                for size, stride in zip(parameter.shape, parameter.stride(), strict=True)
            )
            place = ParameterPlace(fqn, first, first + extent + 1)
            self._places.setdefault(registry.name(parameter), []).append(place)

    def find(self, x: torch.Tensor) -> str | None:
        """Return the name of the parameter whose memory, or a cast of it, ``x`` shows."""
        places = self._places.get(self._registry.name(x))
        if not places:
            return self._find_in_graph(x)
        offset = x.storage_offset()
        return next((p.fqn for p in places if p.first <= offset < p.last), places[0].fqn)

    def _find_in_graph(self, x: torch.Tensor) -> str | None:
        """Follow views and casts back to a parameter, such as a cast that autocast had cached."""
        node: Any = x.grad_fn
        while node is not None and node.name() in _SAME_VALUES:
            node = node.next_functions[0][0]
        variable = getattr(node, "variable", None)
        return None if variable is None else self._names.get(id(variable))

    def follow(self, source: torch.Tensor, copy: torch.Tensor) -> None:
        """Remember that ``copy`` is a cast or a copy of ``source``, if that is a parameter."""
        fqn = self.find(source)
        if fqn is not None and self.find(copy) is None:
            whole = copy.untyped_storage().nbytes() // copy.element_size()
            self._places[self._registry.name(copy)] = [ParameterPlace(fqn, 0, whole)]
