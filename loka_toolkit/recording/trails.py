"""Where the dimensions of a flattened operand came from.

F.linear on [examples, tokens, features] multiplies a view [examples * tokens, features], and
nn.MultiheadAttention transposes to [tokens, examples, features] first. Which rows belong to which
example can be told only by following the views.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from loka_toolkit.recording.storages import StorageRegistry

aten = torch.ops.aten

Factors = tuple[tuple[int, ...], ...]
"""Per dimension, the sizes that it was flattened from, outermost first; sizes of 1 are left out."""

_RESHAPES = frozenset({aten.view, aten._unsafe_view, aten.reshape})
_SAME_SHAPE = frozenset(
    {
        aten.clone,
        aten._to_copy,
        aten.mul,
        aten.div,
        aten.add,
        aten.sub,
        aten.detach,
        aten.relu,
        aten.gelu,
        aten.silu,
        aten.sigmoid,
        aten.tanh,
        aten._softmax,
        aten.native_dropout,
        aten.native_layer_norm,
        aten.masked_fill,
    }
)

_Key = tuple[int, int, tuple[int, ...], tuple[int, ...]]


class ShapeTrails:
    """Follows views, transpositions and element-wise operators.

    Args:
        registry: Names the storages.
    """

    def __init__(self, registry: StorageRegistry) -> None:
        self._registry = registry
        self._known: dict[_Key, Factors] = {}

    def factors(self, x: torch.Tensor) -> Factors:
        """Return what the dimensions of ``x`` were flattened from."""
        known = self._known.get(self._key(x))
        return known if known is not None else plain(x.shape)

    def follow(self, func: torch._ops.OpOverload, args: Sequence[object], out: object) -> None:
        """Note what an operator did to the dimensions of its first argument."""
        if isinstance(out, tuple) and out and isinstance(out[0], torch.Tensor):
            out = out[0]
        source = args[0] if args else None
        if not (isinstance(source, torch.Tensor) and isinstance(out, torch.Tensor)):
            return
        if source.layout is not torch.strided or out.layout is not torch.strided:
            return
        found = self._after(func.overloadpacket, args, source, out)
        if found is not None and found != plain(out.shape):
            self._known[self._key(out)] = found

    def _after(
        self,
        packet: torch._ops.OpOverloadPacket,
        args: Sequence[object],
        source: torch.Tensor,
        out: torch.Tensor,
    ) -> Factors | None:
        if packet in _RESHAPES:
            return regroup(self.factors(source), out.shape)
        if packet in _SAME_SHAPE:
            return self.factors(source) if source.shape == out.shape else None
        if packet is aten.t:
            return self.factors(source)[::-1]
        if packet is aten.transpose:
            return _permuted(self.factors(source), _swapped(source.ndim, args[1], args[2]))
        if packet is aten.permute and isinstance(args[1], list | tuple):
            return _permuted(self.factors(source), [int(d) % source.ndim for d in args[1]])
        if packet in (aten.squeeze, aten.unsqueeze):
            return regroup(self.factors(source), out.shape)
        return None

    def _key(self, x: torch.Tensor) -> _Key:
        return self._registry.name(x), int(x.storage_offset()), tuple(x.shape), x.stride()


def plain(shape: Sequence[int]) -> Factors:
    """Return the factors of a tensor of which nothing is known."""
    return tuple((int(size),) if size != 1 else () for size in shape)


def regroup(factors: Factors, shape: Sequence[int]) -> Factors | None:
    """Return the factors after a view to ``shape``, or None if they cannot be split so."""
    pending = [size for dimension in factors for size in dimension]
    result = []
    for size in shape:
        missing, taken = int(size), []
        while missing > 1:
            if not pending:
                return None
            head = pending.pop(0)
            if missing % head == 0:
                taken.append(head)
                missing //= head
            elif head % missing == 0:
                taken.append(missing)
                pending.insert(0, head // missing)
                missing = 1
            else:
                return None
        result.append(tuple(taken))
    return tuple(result)


def _swapped(ndim: int, first: object, second: object) -> list[int]:
    order = list(range(ndim))
    if isinstance(first, int) and isinstance(second, int):
        order[first], order[second] = order[second], order[first]
    return order


def _permuted(factors: Factors, order: Sequence[int]) -> Factors:
    return tuple(factors[d] for d in order)
